"""Algorithm 1: batches, learning rates and the loop that `fit` and the experiments share."""

import itertools

import pytest
import torch

from attractor.core import get_scheme
from attractor.ode import algorithm1, corrections, systems
from attractor.ode.algorithm1 import AllRows, FullBatches, cosine, train_epochs, train_on_pairs
from attractor.ode.pairs import one_step
from attractor.ode.trajectories import Plan, make_run
from attractor.train import Recipe

CPU = torch.device("cpu")


@pytest.fixture
def pairs():
    system = systems.SpringMass(2)
    run = make_run(system, None, Plan(20, 0.1, 5, 1, 0, 20), 0, "cpu")
    return one_step(system, get_scheme("euler"), 0.1, [run], False)


def correction(seed=0):
    torch.manual_seed(seed)
    return corrections.AttNS(4, width=8, dtype=torch.float32)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_all_rows_yields_every_row_once_per_epoch(monkeypatch):
    monkeypatch.setattr(algorithm1, "BATCH", 10)
    batches = AllRows(103, CPU, torch.Generator().manual_seed(0))
    first, second = (list(batches.epoch(epoch)) for epoch in range(2))
    assert [len(batch) for batch in first] == [10] * 10 + [3]
    assert len(batches) == 11
    assert batches.rows == 103
    assert sorted(torch.cat(first).tolist()) == list(range(103))
    assert not torch.equal(torch.cat(first), torch.cat(second))


def test_full_batches_have_one_size_and_depend_on_the_epoch_alone():
    batches = FullBatches(103, 10, CPU, lambda epoch: 7 + epoch)
    first, second, again = (torch.cat(list(batches.epoch(epoch))) for epoch in (0, 1, 0))
    assert len(batches) == 10
    assert batches.rows == len(first) == len(first.unique()) == 100
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_learning_rates_are_those_of_torch_and_of_the_training_loop():
    epochs, updates = 3, 4
    recipe = Recipe(epochs=epochs, learning_rate=1e-3, warmup=0.0)
    middle = [recipe.rate(e + (i + 0.5) / updates) for e in range(epochs) for i in range(updates)]
    assert cosine(epochs, updates, middle=True) == middle
    rates = cosine(epochs, updates)
    assert len(rates) == epochs * updates
    assert rates[0] == 1e-3
    assert all(earlier > later > 0 for earlier, later in itertools.pairwise(rates))
    assert rates[6] == pytest.approx(5e-4)  # half of the way


def test_another_loss_and_another_draw_take_the_same_loop(pairs, monkeypatch):
    """Both callers find the same weights, up to rounding, when batches and rates agree."""
    monkeypatch.setattr(algorithm1, "BATCH", 25)
    own, theirs = correction(), correction()
    history = train_on_pairs(own, pairs, 3, 2.0, torch.Generator().manual_seed(1), lambda message: None)
    u, slope, error = pairs.u.float(), pairs.slope.float(), pairs.error.float()

    def loss(model, index):
        each = 2.0 * (model(u[index], slope[index], 0.1) - error[index]).square().mean(-1)
        return each.mean(), each.detach().double().sum()

    batches = AllRows(len(u), CPU, torch.Generator().manual_seed(1))
    done = []
    losses = train_epochs(
        theirs, loss, batches, 3, cosine(3, len(batches)), after_epoch=lambda *row: done.append(row)
    )
    torch.testing.assert_close(weights(own), weights(theirs), rtol=1e-4, atol=1e-6)
    assert [row["loss"] for row in history] == pytest.approx(losses, rel=1e-4)
    assert [row["epoch"] for row in history] == [0, 1, 2]
    assert done == list(zip((1, 2, 3), losses))
    assert all(p.grad is None for p in theirs.parameters())


def test_a_loss_that_becomes_non_finite_stops_the_training(pairs):
    def loss(model, index):
        total = sum(p.sum() for p in model.parameters()) * torch.inf
        return total, total.detach()

    batches = AllRows(len(pairs.u), CPU, torch.Generator())
    with pytest.raises(FloatingPointError, match=r"non-finite in epoch 0; lower loss_scale"):
        train_epochs(correction(), loss, batches, 2, cosine(2, len(batches)))


@pytest.mark.gpu
def test_updates_in_a_cuda_graph_give_the_same_weights(pairs):
    device = torch.device("cuda")
    u, slope, error = (x.float().to(device) for x in (pairs.u, pairs.slope, pairs.error))

    def loss(model, index):
        each = (model(u[index], slope[index], 0.1) - error[index]).square().mean(-1)
        return each.mean(), each.detach().double().sum()

    found = []
    for graph in (False, True):
        model = correction().to(device)
        batches = FullBatches(len(u), 20, device, lambda epoch: epoch)
        losses = train_epochs(model, loss, batches, 6, cosine(6, len(batches)), graph=graph)
        found.append((weights(model), torch.tensor(losses)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
