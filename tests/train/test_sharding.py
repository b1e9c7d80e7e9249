"""What sharding accepts and refuses; tests/distributed compares sharded training with one process."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from attractor.train import Recipe, train
from attractor.train.sharding import check_sharding, equal_steps, gather_tensors, local

RECIPE = Recipe(epochs=2, learning_rate=0.1, warmup=0.0, precision="fp32")


def with_parameter(value):
    model = nn.Linear(3, 3)
    model.extra = nn.Parameter(value)
    return model


@pytest.mark.parametrize(
    ("model", "recipe", "precision", "message"),
    [
        (nn.Linear(3, 3), RECIPE, "fp16", "precision = 'fp16' with sharding = 'full'.*use 'bf16'"),
        (nn.Linear(3, 3), replace(RECIPE, capture="graph"), "fp32", "use capture='auto'"),
        (torch.compile(nn.Linear(3, 3)), RECIPE, "fp32", "pass the model itself"),
        (with_parameter(torch.ones(())), RECIPE, "fp32", "'extra' is a scalar.*of shape \\[1\\]"),
        (with_parameter(torch.ones(2).double()), RECIPE, "fp32", "dtypes torch.float32, torch.float64"),
    ],
)
def test_what_cannot_be_sharded_raises(model, recipe, precision, message):
    with pytest.raises(ValueError, match=message):
        check_sharding(model, recipe, precision)


def test_an_unknown_sharding_raises():
    with pytest.raises(ValueError, match="sharding = 'half' is not one of none, full"):
        train(nn.Linear(3, 3), [torch.ones(2, 3)], None, RECIPE, sharding="half")


def test_one_process_trains_without_sharding():
    pytest.importorskip("accelerate")
    data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    weights = []
    for sharding in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        loss = lambda model, batch: mse_loss(model(batch), batch)
        train(model, data, None, RECIPE, loss=loss, device="cpu", sharding=sharding)
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_all_processes_evaluate_as_often_as_the_one_with_the_most_batches():
    others = [True, True, True, False]  # whether another process has a batch: three of them
    anywhere = lambda own: others.pop(0) or own
    assert list(equal_steps([(1,), (2,)], anywhere)) == [((1,), True), ((2,), True), ((2,), False)]
    with pytest.raises(ValueError, match="this process has no batch, but others have"):
        list(equal_steps([], lambda own: True))


def test_whole_tensors_stay_as_they_are():
    x = torch.ones(2)
    assert local(x) is x
    assert gather_tensors({"x": x}, keep=True)["x"] is x
    assert gather_tensors({"x": x}, keep=False) == {}
