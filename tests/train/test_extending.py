"""Trainings as users extend them: optimisers, schedules, accumulation, averages, hooks, more epochs."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from attractor.train import CheckpointError, Recipe, evaluate, parameter_groups, train

pytest.importorskip("accelerate")

RECIPE = Recipe(
    epochs=2, learning_rate=0.1, warmup=0.0, schedule="constant", momentum=0.0, nesterov=False,
    weight_decay=0.0, precision="fp32",
)  # fmt: skip


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def batches(count=6, size=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, size, 3, generator=generator)
    return [(inputs, (inputs.sum(1) > 0).long()) for inputs in x]


def run(recipe=RECIPE, model=None, data=None, valid=None, **options):
    model = linear() if model is None else model
    return model, train(model, data or batches(), valid, recipe, device="cpu", **options)


def same(a, b):
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


def rmsprop(model):
    return torch.optim.RMSprop(model.parameters(), lr=0.01)


def halving(time):
    return 0.5 ** int(time)


def test_an_optimiser_and_a_schedule_of_your_own_take_the_steps_of_a_plain_loop():
    model, history = run(replace(RECIPE, optimiser=rmsprop, schedule=halving))
    plain = linear()
    optimiser = rmsprop(plain)
    for epoch in range(2):
        for x, labels in batches():
            optimiser.param_groups[0]["lr"] = 0.01 * halving(epoch)
            optimiser.zero_grad()
            nn.functional.cross_entropy(plain(x), labels).backward()
            optimiser.step()
    assert same(model, plain)
    assert history.column("lr") == [0.01, 0.005]


def test_groups_keep_their_own_learning_rates():
    rates = []

    def groups(model):
        own = [{"params": model.weight, "lr": 0.1}, {"params": model.bias, "lr": 0.01}]
        optimiser = torch.optim.SGD(own)
        step = optimiser.step
        optimiser.step = lambda: (rates.append([g["lr"] for g in optimiser.param_groups]), step())
        return optimiser

    run(replace(RECIPE, epochs=1, optimiser=groups, schedule=lambda time: 0.5))
    assert rates == [[0.05, 0.005]] * 6


def test_parameter_groups_of_the_library_are_an_optimiser_of_your_own():
    make = lambda model: torch.optim.AdamW(parameter_groups(model, 1e-2))
    model, history = run(replace(RECIPE, optimiser=make))
    assert not same(model, linear())
    assert history.column("lr") == [1e-2, 1e-2]


def test_what_returns_no_optimiser_is_named():
    with pytest.raises(
        TypeError, match=r"returned a NoneType; it must return a torch\.optim\.Optimizer"
    ):
        run(replace(RECIPE, optimiser=lambda model: None))
    with pytest.raises(ValueError, match="not one of sgd, adamw, or a function"):
        replace(RECIPE, optimiser="lion")


@pytest.mark.parametrize("optimiser", [rmsprop, torch.optim.Adadelta, lambda m: Counting(m)])
def test_a_resumed_run_continues_the_state_of_any_optimiser(tmp_path, optimiser):
    make = optimiser if optimiser is rmsprop else (
        (lambda model: optimiser(model.parameters())) if optimiser is torch.optim.Adadelta else optimiser
    )  # fmt: skip
    recipe = replace(RECIPE, optimiser=make)
    whole, _ = run(recipe)

    def stop(progress):
        if progress.row:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, out=tmp_path, tell=stop)
    resumed, history = run(recipe, out=tmp_path)
    assert same(resumed, whole)
    assert len(history) == 2


class Counting(torch.optim.SGD):
    """SGD whose step shrinks with a count that is a Python number."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].setdefault("count", 0) + 1
                self.state[p]["count"] = count
                p.data.sub_(p.grad, alpha=group["lr"] / count)


def test_other_optimisers_are_other_runs(tmp_path):
    run(replace(RECIPE, optimiser=rmsprop), out=tmp_path)
    other = lambda model: torch.optim.RMSprop(model.parameters(), lr=0.02)
    with pytest.raises(CheckpointError, match="optimiser = 'rmsprop #"):
        run(replace(RECIPE, optimiser=other), out=tmp_path)


@pytest.mark.parametrize("count", [2, 3])
def test_accumulated_batches_are_one_large_batch(count):
    data = batches()
    large = [tuple(torch.cat(parts) for parts in zip(*data[i : i + count])) for i in range(0, 6, count)]
    model, history = run(replace(RECIPE, accumulate=count), data=data)
    expected, others = run(RECIPE, data=large)
    for a, b in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(a, b)
    losses = history.column("train_loss"), others.column("train_loss")
    assert losses[0] == pytest.approx(losses[1])


def test_batches_that_are_too_few_for_an_update_are_left_out():
    data = batches(5)
    model, _ = run(replace(RECIPE, accumulate=2, epochs=1), data=data)
    expected, _ = run(replace(RECIPE, accumulate=2, epochs=1), data=data[:4])
    assert same(model, expected)
    with pytest.raises(ValueError, match="accumulate = 6 is more than the 5 batches"):
        run(replace(RECIPE, accumulate=6), data=data)


def test_an_interrupted_epoch_of_accumulated_batches_continues(tmp_path, monkeypatch):
    recipe = replace(RECIPE, accumulate=2, epochs=1)
    whole, _ = run(recipe)
    monkeypatch.setattr("attractor.train.bookkeeping.Timer.INTERVAL", 0.0)

    def stop(progress):
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, out=tmp_path, save_minutes=0.0, tell=stop)
    assert (tmp_path / "epoch-0000-step-000001").is_dir()
    assert same(run(recipe, out=tmp_path)[0], whole)


def test_the_trained_model_has_the_averaged_weights():
    decay, recipe = 0.8, replace(RECIPE, ema=0.8)
    model, history = run(recipe, valid=batches(3))
    plain = linear()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for x, labels in batches():
            optimiser.zero_grad()
            nn.functional.cross_entropy(plain(x), labels).backward()
            optimiser.step()
            average.update_parameters(plain)
    assert same(model, average.module)
    assert not same(model, plain)
    assert history.last("valid_loss") == pytest.approx(evaluate(model, batches(3))["loss"])


def test_a_resumed_average_continues(tmp_path):
    recipe = replace(RECIPE, ema=0.8, epochs=3)
    whole, _ = run(recipe)

    def stop(progress):
        if progress.row and progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, out=tmp_path, tell=stop)
    resumed, _ = run(recipe, out=tmp_path)
    assert same(resumed, whole)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], whole.weight)
    again, _ = run(recipe, out=tmp_path)
    assert same(again, whole)


def test_a_finished_run_goes_on_for_more_epochs(tmp_path):
    whole, longer = run(replace(RECIPE, epochs=4))
    run(replace(RECIPE, epochs=2), out=tmp_path)
    extended, history = run(replace(RECIPE, epochs=4), out=tmp_path, extend=True)
    assert same(extended, whole)  # the rate is constant, so the schedule of both is the same
    assert history.column("train_loss") == longer.column("train_loss")
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4
    again, _ = run(replace(RECIPE, epochs=4), out=tmp_path)  # now this is the run
    assert same(again, whole)
    assert json.loads((tmp_path / "run.json").read_text())["recipe"]["epochs"] == 4


def test_an_extended_run_that_was_interrupted_continues(tmp_path):
    run(replace(RECIPE, epochs=2), out=tmp_path)
    recipe = replace(RECIPE, epochs=4, schedule=halving)
    copied = copy.deepcopy(recipe)

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, out=tmp_path, extend=True, tell=stop, save_every=10)
    model, history = run(copied, out=tmp_path, extend=True)
    assert history.column("lr") == [0.1, 0.1, 0.025, 0.0125]
    assert same(run(recipe, out=tmp_path)[0], model)


def test_only_the_schedule_of_a_run_may_be_extended(tmp_path):
    run(out=tmp_path)
    with pytest.raises(CheckpointError, match="or extend=True to continue it with this schedule"):
        run(replace(RECIPE, epochs=3), out=tmp_path)
    with pytest.raises(CheckpointError, match=r"weight_decay = 0\.0, not 0\.1"):
        run(replace(RECIPE, epochs=3, weight_decay=0.1), out=tmp_path, extend=True)
    with pytest.raises(CheckpointError, match="train_data"):
        run(replace(RECIPE, epochs=3), data=batches(6, 5), out=tmp_path, extend=True)
    with pytest.raises(ValueError, match="needs more of them"):
        run(replace(RECIPE, epochs=1), out=tmp_path, extend=True)
    with pytest.raises(ValueError, match="pass out="):
        run(extend=True)


def test_numbers_of_after_epoch_are_in_the_history_and_in_the_log(tmp_path):
    seen = []

    def norm(model, row):
        seen.append((model.training, row["epoch"]))
        return {"norm": model.weight.norm().item()}

    model, history = run(out=tmp_path, after_epoch=norm)
    assert seen == [(False, 1), (False, 2)]
    assert history.last("norm") == model.weight.norm().item()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["norm"] for row in rows] == history.column("norm")
    _, resumed = run(out=tmp_path, after_epoch=norm)
    assert resumed.column("norm") == history.column("norm")
