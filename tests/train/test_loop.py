"""The training loop on tiny networks: what it computes, what it keeps, and what it says."""

import copy
import json
import math
import shutil
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from attractor.data import images
from attractor.residual import resnet_cifar
from attractor.train import (
    PAPER,
    SHORT,
    Classify,
    DivergedError,
    History,
    Recipe,
    Seeds,
    checkpoint,
    compiled_blocks,
    evaluate,
    repeated_blocks,
    train,
    train_seeds,
)
from attractor.train.feeds import cut_out, feed_of, pad_images
from attractor.train.place import Place
from attractor.train.recent_checkpoints import RecentCheckpoints

pytest.importorskip("accelerate")

PLAIN = Recipe(epochs=2, batch=32, learning_rate=0.05, warmup=0.5, crop=1, flip=False, precision="fp32")


def digits(n=None, split="train"):
    data = images.load("digits", split)
    return data if n is None else data.subset(n)


def small(dropout=0.0, size=8):
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, size, 3, padding=1, bias=False), nn.BatchNorm2d(size), nn.ReLU(), nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(64 * size, 10),
    )  # fmt: skip


def run(model=None, data=None, valid=None, recipe=PLAIN, **options):
    model = small() if model is None else model
    history = train(model, data or digits(200), valid, recipe, device="cpu", **options)
    return model, history


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def numbers(history):
    timed = ("seconds", "images_per_second", "samples_per_second")
    return [{k: v for k, v in row.items() if k not in timed} for row in history]


@pytest.fixture
def one_thread(monkeypatch):
    """For processes that are forked: they do not have the threads that their parent has made."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Accelerate asks for more
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- recipes


def test_rates_of_the_short_recipe():
    at = lambda t: SHORT.rate(t) / SHORT.learning_rate
    assert (SHORT.batch, SHORT.learning_rate, SHORT.weight_decay, SHORT.nesterov) == (
        256,
        0.2,
        5e-4,
        True,
    )
    assert at(0) == 0
    assert at(2.5) == pytest.approx(0.5)
    assert at(5) == pytest.approx(1)
    assert at((5 + SHORT.epochs) / 2) == pytest.approx(0.5)
    assert at(SHORT.epochs) == pytest.approx(0)
    assert replace(SHORT, floor=0.1).rate(SHORT.epochs) == pytest.approx(0.02)


def test_rates_of_the_papers_recipe():
    assert (PAPER.epochs, PAPER.batch, PAPER.weight_decay) == (164, 128, 1e-4)
    for time, rate in ((0, 0.1), (80.99, 0.1), (81, 0.01), (121.99, 0.01), (122, 0.001), (163.9, 0.001)):
        assert PAPER.rate(time) == pytest.approx(rate)
    assert replace(PAPER, schedule="constant", milestones=()).rate(150) == 0.1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"optimiser": "adam"}, "optimiser = 'adam' is not one of sgd, adamw"),
        ({"batch": 0}, "batch = 0 must be an integer of at least 1"),
        ({"epochs": 2.5}, "epochs = 2.5 must be an integer of at least 0"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0 must be a finite number of at least 0"),
        ({"label_smoothing": 1.0}, r"must be in \[0, 1\)"),
        ({"mixup": -0.1}, "mixup = -0.1 must be a finite number of at least 0"),
        ({"clip": 0.0}, "clip = 0.0 must be positive"),
        ({"seed": 1.5}, "seed = 1.5 must be an integer"),
        ({"schedule": "steps"}, r"milestones = \(\) with schedule 'steps'"),
    ],
)
def test_recipes_check_themselves(wrong, told):
    with pytest.raises(ValueError, match=told):
        Recipe(**wrong)


def test_what_decays():
    model = small()
    for recipe, vectors in ((PLAIN, True), (replace(PLAIN, optimiser="adamw"), False),
                            (replace(PLAIN, decay_vectors=False), False)):  # fmt: skip
        groups = recipe.make_optimiser(model).param_groups
        decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        for p in model.parameters():
            assert decays[id(p)] == (5e-4 if p.dim() > 1 or vectors else 0)


# ---- batches


@given(
    st.integers(0, 3), st.sampled_from(["zero", "reflect"]), st.integers(1, 3), st.integers(4, 6),
    st.integers(4, 6), st.integers(0, 1000),
)  # fmt: skip
def test_augmented_images_are_crops_and_flips(crop, how, channels, height, width, seed):
    """Each is found among all shifted and mirrored versions of its image, made one by one."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(1, 256, (5, channels, height, width), generator=generator, dtype=torch.uint8)
    data = SimpleNamespace(
        images=pixels, labels=torch.arange(5), mean=(0.0,) * channels, std=(1 / 255,) * channels
    )
    recipe = Recipe(batch=5, crop=crop, padding=how, seed=seed)
    feed = feed_of(data, recipe, train=True, like=torch.zeros(1, dtype=torch.float64))
    (inputs,) = feed.epoch(0)
    x, labels = feed.batch(*inputs)
    assert x.shape == pixels.shape
    assert sorted(labels.tolist()) == list(range(5))
    mode = {"zero": "constant", "reflect": "reflect"}[how]
    for image, label in zip(x, labels):
        larger = nn.functional.pad(pixels[label].double(), (crop,) * 4, mode=mode)
        versions = [
            part.flip(-1) if flipped else part
            for top, left, flipped in product(range(2 * crop + 1), range(2 * crop + 1), (False, True))
            for part in [larger[:, top : top + height, left : left + width]]
        ]
        assert any(torch.allclose(image, version, rtol=0, atol=1e-9) for version in versions)


def test_all_crops_and_flips_occur_and_differ_between_epochs():
    data = digits()
    feed = feed_of(data, Recipe(batch=100, crop=1), train=True, like=torch.zeros(1))
    draws = feed.draws(0)
    assert draws.shape == (1400, 4)
    assert len(draws[:, 0].unique()) == 1400
    kinds, counts = draws[:, 1:].unique(dim=0, return_counts=True)
    assert len(kinds) == 3 * 3 * 2
    assert counts.min() > 40
    assert torch.equal(draws, feed.draws(0))
    assert not torch.equal(draws, feed.draws(1))


def test_cut_out_by_hand():
    image = torch.arange(12).view(1, 3, 4, 1)
    part = cut_out(image, torch.tensor([[0, 1, 0, 0], [0, 1, 0, 1]]), 2, 3)[..., 0]
    assert part.tolist() == [[[4, 5, 6], [8, 9, 10]], [[6, 5, 4], [10, 9, 8]]]
    assert pad_images(torch.arange(3).view(1, 1, 1, 3).expand(1, 1, 3, 3), 2, "reflect")[0, 0, 0].tolist() == [
        2, 1, 0, 1, 2, 1, 0]  # fmt: skip
    with pytest.raises(ValueError, match="crop = 3 pixels cannot be reflected"):
        pad_images(torch.zeros(1, 1, 3, 3), 3, "reflect")


@pytest.mark.parametrize("channels_last", [True, False])
def test_batches_are_normalised_and_laid_out(channels_last):
    data = digits(50).rgb()
    recipe = Recipe(batch=50, crop=0, flip=False, channels_last=channels_last)
    feed = feed_of(data, recipe, train=False, like=torch.zeros(1))
    (inputs,) = feed.epoch(0)
    x, labels = feed.batch(*inputs)
    torch.testing.assert_close(x, data.normalised(), rtol=1e-5, atol=1e-5)
    assert torch.equal(labels, data.labels)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert x.is_contiguous(memory_format=layout)


def test_processes_share_every_batch():
    whole, halves = (
        [
            feed_of(digits(100), Recipe(batch=30), train=True, like=torch.zeros(1), share=(i, n))
            for i in range(n)
        ]
        for n in (1, 2)
    )
    for (all_of_it,), *parts in zip(whole[0].epoch(3), *(feed.epoch(3) for feed in halves)):
        assert torch.equal(all_of_it, torch.cat([part for (part,) in parts]))
    shares = [
        feed_of(digits(101), Recipe(batch=30), train=False, like=torch.zeros(1), share=(i, 2))
        for i in (0, 1)
    ]
    seen = torch.cat([draw[:, 0] for feed in shares for (draw,) in feed.epoch(0)])
    assert sorted(seen.tolist()) == list(range(101))
    with pytest.raises(ValueError, match="batch = 5 cannot be shared by 2 processes"):
        feed_of(digits(100), Recipe(batch=5), train=True, like=torch.zeros(1), share=(0, 2))
    with pytest.raises(ValueError, match="batch = 256 is more than the 100 training images"):
        run(data=digits(100), recipe=SHORT)


# ---- training


def test_it_learns_digits():
    recipe = replace(PLAIN, epochs=6, batch=64, learning_rate=0.1, warmup=1.0)
    model, history = run(data=digits(), valid=digits(split="test"), recipe=recipe)
    assert history.accuracy > 0.9
    assert history.rows[0]["train_loss"] > 2 * history.final["train_loss"]
    assert evaluate(model, digits(split="test"))["accuracy"] == pytest.approx(history.accuracy)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_it_is_the_loop_one_would_write(optimiser):
    recipe = replace(PLAIN, optimiser=optimiser, clip=0.5, label_smoothing=0.1, decay_vectors=True)
    data = digits(70)
    model, history = run(data=data, recipe=recipe)

    other = small()
    if optimiser == "sgd":
        own = torch.optim.SGD(other.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    else:
        own = torch.optim.AdamW(other.parameters(), 0.05, weight_decay=5e-4)
    feed = feed_of(data, recipe, train=True, like=torch.zeros(1))
    for epoch in range(2):
        losses = []
        for i, inputs in enumerate(feed.epoch(epoch)):
            time = epoch + (i + 0.5) / 2
            own.param_groups[0]["lr"] = 0.05 * (
                time / 0.5 if time < 0.5 else (1 + math.cos(math.pi * (time - 0.5) / 1.5)) / 2
            )
            x, labels = feed.batch(*inputs)
            loss = cross_entropy(other(x), labels, reduction="none", label_smoothing=0.1)
            own.zero_grad()
            loss.mean().backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            own.step()
            losses.append(loss.detach())
        assert history.rows[epoch]["train_loss"] == torch.cat(losses).double().mean().item()
    assert same(model, other)


def test_evaluation_counts_every_sample_once():
    model, data = small().eval(), digits(103)
    logits = model(data.normalised()).detach()
    loss = cross_entropy(logits, data.labels).item()
    hits = (logits.argmax(1) == data.labels).sum().item()
    for batch in (7, 50, 103, 1000):
        found = evaluate(model, data, batch=batch)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["accuracy"] == hits / 103
    frozen = replace(PLAIN, epochs=1, learning_rate=0.0, batch=20)
    _, history = run(
        model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data=data, valid=data, recipe=frozen
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).train()
    evaluate(model, data)
    assert model.training  # left in the mode it was in
    assert history.final["valid_accuracy"] * 103 == pytest.approx(
        round(history.final["valid_accuracy"] * 103)
    )


def test_the_same_seed_gives_the_same_network():
    (a, first), (b, second) = run(small(0.3)), run(small(0.3))
    assert same(a, b)
    assert numbers(first) == numbers(second)
    assert not same(a, run(small(0.3), recipe=replace(PLAIN, seed=1))[0])


def test_the_callers_surroundings_are_left_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    model = small(0.3)
    torch.set_rng_state(before)
    run(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (torch.arange(12), "labels go from 0 to 11, but the model gives 10"),
        (torch.tensor([3, -1]), "-1 to 3"),
    ],
)
def test_labels_that_the_model_does_not_know_are_named(labels, told):
    """On a GPU they would be an assertion of the device, after which nothing runs."""
    model, batches = nn.Linear(4, 10), [(torch.zeros(len(labels), 4), labels)]
    with pytest.raises(ValueError, match=f"{told}.*labels from 0 to 9"):
        train(model, batches, None, PLAIN, device="cpu")
    with pytest.raises(ValueError, match=told):
        evaluate(model, batches)


@pytest.mark.parametrize("exact", [False, True])
def test_labels_may_be_left_out(exact):
    model, x = nn.Linear(4, 10), torch.randn(6, 4)
    labels = model(x).argmax(1).tolist()
    labels = torch.tensor([*labels[:3], -100, -100, 0 if labels[5] else 1])
    found = Classify(wary=True, exact=exact)(model, (x, labels))
    torch.testing.assert_close(found["loss"].mean(), cross_entropy(model(x), labels))
    assert found["accuracy"].double().mean().item() == pytest.approx(3 / 4)
    assert len(found["loss"]) == (4 if exact else 6)
    all_out = Classify(exact=exact)(model, (x, torch.full((6,), -100)))
    assert all_out["loss"].mean().item() == 0  # training goes on


def test_labels_that_are_left_out_are_no_part_of_any_mean():
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    labels = model(x).argmax(1)
    part = torch.where(torch.arange(8) < 5, labels, -100)
    batches = [(x[:4], part[:4]), (x[4:], part[4:])]
    assert evaluate(model, batches) == pytest.approx(evaluate(model, [(x[:5], labels[:5])]), rel=1e-6)


@pytest.mark.parametrize(
    "labels",
    [
        lambda logits: logits.argmax(1),
        lambda logits: logits.argmax(1).int(),
        lambda logits: torch.eye(logits.shape[1])[logits.argmax(1)].movedim(-1, 1),  # probabilities
    ],
)
@pytest.mark.parametrize("shape", [(6, 3), (2, 6, 6), (2, 3, 5, 4)])
def test_accuracy_has_its_classes_where_the_loss_has_them(shape, labels):
    logits = torch.randn(shape)
    found = Classify(wary=True)(nn.Identity(), (logits, labels(logits)))
    assert found["accuracy"].double().mean() == 1
    assert found["loss"].shape == (shape[0], *shape[2:])


def test_classes_may_be_last():
    logits = torch.randn(2, 5, 3)
    found = Classify(wary=True)(nn.Identity(), (logits, logits.argmax(-1)))
    assert found["accuracy"].double().mean() == 1
    wanted = cross_entropy(logits.flatten(0, 1), logits.argmax(-1).flatten())
    torch.testing.assert_close(found["loss"].mean(), wanted)


class Longer(list):
    """Gives more batches than its length says, as a loader of an iterable data set with workers may."""

    def __len__(self):
        return 2


def test_evaluation_takes_all_batches_whatever_the_length():
    batches = Longer((torch.full((n, 1), float(n)), torch.zeros(n)) for n in (4, 3, 3))
    found = evaluate(nn.Linear(1, 1), batches, loss=lambda model, batch: batch[0][:, 0])
    assert found["loss"] == pytest.approx((16 + 9 + 9) / 10)
    labelled = Longer((x, y.long()) for x, y in batches)
    with pytest.warns(UserWarning, match="more batches than the 2 that its length says"):
        train(nn.Linear(1, 2), labelled, None, replace(PLAIN, epochs=1), device="cpu")


def test_evaluation_leaves_every_module_in_its_mode():
    model = small(0.1).train()
    model[1].eval()
    evaluate(model, digits(40))
    assert [m.training for m in model] == [True, False, True, True, True, True]


class _StopError(Exception):
    pass


def test_a_loader_with_a_generator_goes_on_as_if_nothing_had_been(tmp_path):
    data = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)

    def trained(out=None, tell=None):
        torch.manual_seed(3)
        model, own = nn.Linear(3, 2), torch.Generator().manual_seed(0)
        loader = torch.utils.data.DataLoader(data, 6, shuffle=True, generator=own)
        train(model, loader, None, replace(PLAIN, epochs=3), device="cpu", out=out, tell=tell)
        return model.weight

    def stop(progress):
        if progress.row and progress.epoch == 1:
            raise _StopError

    with pytest.raises(_StopError):
        trained(tmp_path, stop)
    assert torch.equal(trained(tmp_path), trained())


def test_mistakes_in_data_and_losses_are_named():
    data = SimpleNamespace(
        images=torch.zeros(8, 1, 4, 4, dtype=torch.uint8).numpy(),
        labels=torch.zeros(8),
        mean=(0,),
        std=(1,),
    )
    with pytest.raises(TypeError, match=r"images and labels are ndarray and Tensor; give tensors"):
        run(data=data)
    data.images, data.labels = torch.as_tensor(data.images), torch.zeros(9).long()
    with pytest.raises(ValueError, match="8 images have 9 labels"):
        run(data=data)
    batches = [(torch.zeros(2, 3), torch.zeros(2).long())]
    number = lambda model, batch: {"loss": model(batch[0]).mean(), "count": 2.0}
    with pytest.raises(TypeError, match="returned count as float; it must return tensors"):
        train(nn.Linear(3, 2), batches, None, PLAIN, loss=number, device="cpu")
    once = type("Once", (), {"__len__": lambda s: 1, "__iter__": lambda s: iter(())})()
    with pytest.raises(ValueError, match="no validation batches in epoch 1"):
        train(nn.Linear(3, 2), batches, once, PLAIN, device="cpu")


def test_momentum_may_be_none_at_all():
    _, history = run(recipe=replace(PLAIN, momentum=0.0, epochs=1))
    assert math.isfinite(history.final["train_loss"])


def test_mixup_is_a_mean_of_two_images_and_of_their_losses():
    data = digits(70)
    recipe = replace(PLAIN, mixup=0.4, label_smoothing=0.1)
    plain, feed = (
        feed_of(data, r, train=True, like=torch.zeros(1)) for r in (replace(recipe, mixup=0.0), recipe)
    )
    seen = []
    for alone, inputs in zip(plain.epoch(1), feed.epoch(1), strict=True):
        x, labels = plain.batch(*alone)  # mixup changes no crop, and not which images a batch has
        mixed, first, second, weight = feed.batch(*inputs)
        assert torch.equal(first, labels)
        assert torch.equal(second, labels.roll(1))
        w = weight[:, None, None, None]
        torch.testing.assert_close(mixed, w * x + (1 - w) * x.roll(1, 0))
        seen.append(weight)
        model = small().train()
        found = Classify(0.1)(model, (mixed, first, second, weight))
        target = 0.9 * nn.functional.one_hot(first, 10) * weight[:, None] + 0.01
        target += 0.9 * nn.functional.one_hot(second, 10) * (1 - weight[:, None])
        torch.testing.assert_close(found["loss"], cross_entropy(model(mixed), target, reduction="none"))
        right = model(mixed).argmax(-1)
        hit = weight * (right == first) + (1 - weight) * (right == second)
        torch.testing.assert_close(found["accuracy"], hit)
    weights = torch.cat(seen)
    assert ((weights >= 0) & (weights <= 1)).all()
    again = torch.cat([inputs[2] for inputs in feed.epoch(1)])
    assert torch.equal(again, weights)
    assert not torch.equal(torch.cat([inputs[2] for inputs in feed.epoch(2)]), weights)
    many = feed_of(digits(), replace(recipe, batch=1437), train=True, like=torch.zeros(1)).weights(0)
    assert many.mean().item() == pytest.approx(0.5, abs=0.04)
    assert many.var().item() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.1)  # of Beta(a, a)


def test_mixup_trains_evaluates_without_and_goes_on_after_a_break(tmp_path):
    recipe = replace(PLAIN, epochs=4, mixup=0.2)
    data, valid = digits(200), digits(60, "test")
    whole, expected = run(data=data, valid=valid, recipe=recipe)
    assert evaluate(whole, valid)["loss"] == pytest.approx(expected.final["valid_loss"], rel=1e-6)
    assert numbers(run(data=data, valid=valid, recipe=replace(recipe, mixup=0.0))[1]) != numbers(
        expected
    )

    def stop(progress):
        if progress.row and progress.epoch == 2:
            raise InterruptedRun

    with pytest.raises(InterruptedRun):
        run(data=data, valid=valid, recipe=recipe, out=tmp_path, tell=stop)
    resumed, history = run(data=data, valid=valid, recipe=recipe, out=tmp_path)
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)


def test_processes_share_what_is_mixed():
    recipe = Recipe(batch=30, mixup=1.0)
    make = lambda *share: feed_of(digits(100), recipe, train=True, like=torch.zeros(1), share=share)
    for whole, *parts in zip(make(0, 1).epoch(3), make(0, 2).epoch(3), make(1, 2).epoch(3)):
        for everything, halves in zip(whole, zip(*parts), strict=True):
            assert torch.equal(everything, torch.cat(halves))


def test_mixup_where_it_cannot_be():
    with pytest.raises(ValueError, match="mixup belongs to the default loss"):
        run(recipe=replace(PLAIN, mixup=0.2), loss=Classify())
    batches = [(torch.rand(4, 1, 8, 8), torch.arange(4))]
    with pytest.raises(ValueError, match="mix the batches where they are made"):
        train(small(), batches, None, replace(PLAIN, mixup=0.2), device="cpu")
    train(small(), digits(64), batches, replace(PLAIN, mixup=0.2), device="cpu")  # to validate: fine


class InterruptedRun(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("within", [False, True])
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(tmp_path, optimiser, within):
    recipe = replace(PLAIN, epochs=4, optimiser=optimiser, learning_rate=0.01)
    data, valid = digits(100), digits(40, "test")
    whole, expected = run(small(0.2), data, valid, recipe)
    calls = []

    def stop_after_epoch(progress):
        if not within and progress.row and progress.epoch == 2:
            raise InterruptedRun

    def stop_within(self, model, batch):
        calls.append(model.training)
        if within and sum(calls) == 2 * 3 + 2:
            raise InterruptedRun
        return call(self, model, batch)

    call = Classify.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classify, "__call__", stop_within)
        with pytest.raises(InterruptedRun):
            run(small(0.2), data, valid, recipe, out=tmp_path, tell=stop_after_epoch)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["epoch-0001", "epoch-0002"]
    resumed, history = run(small(0.2), data, valid, recipe, out=tmp_path)
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)
    again, once_more = run(small(0.2), data, valid, recipe, out=tmp_path)  # nothing left to do
    assert same(again, whole)
    assert once_more.rows == history.rows
    log, times = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("log", "times")
    )
    assert log == numbers(expected)
    assert [{**row, **time} for row, time in zip(log, times, strict=True)] == history.rows
    assert list(log[0]) == [
        "epoch", "lr", "train_loss", "train_accuracy", "valid_loss", "valid_accuracy"]  # fmt: skip
    assert list(times[0]) == ["epoch", "seconds", "images_per_second"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    _, expected = run(out=tmp_path)
    (tmp_path / "epoch-0003").mkdir()  # as if the next one had been interrupted
    (tmp_path / "epoch-0003" / "config.json").write_text("{")
    with pytest.warns(UserWarning, match=r"epoch-0003 has no manifest.*; going on from epoch-0002"):
        _, history = run(out=tmp_path)
    assert history.rows == expected.rows


def killed(folder):
    """Train, and end as a process ends that is killed while its third checkpoint is being written."""
    import os
    import signal

    from attractor.train import checkpoint_files

    write = checkpoint_files.write_bytes

    def stop(path, content):
        if "epoch-0003" in str(path) and path.name == "config.json":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, content)

    checkpoint_files.write_bytes = stop
    run(small(0.2), digits(100), digits(40, "test"), replace(PLAIN, epochs=4), out=folder)


def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path, one_thread):
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=killed, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == -9
    left = ["epoch-0001", "epoch-0002", "epoch-0003", "log.jsonl", "run.json", "times.jsonl"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    data, valid, recipe = digits(100), digits(40, "test"), replace(PLAIN, epochs=4)
    with pytest.warns(UserWarning, match=r"epoch-0003 has no manifest"):
        resumed, history = run(small(0.2), data, valid, recipe, out=tmp_path)
    whole, expected = run(small(0.2), data, valid, recipe)
    assert len(history) == 4
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)


def test_a_full_disk_loses_one_epoch(tmp_path, monkeypatch):
    from attractor.storage import files
    from attractor.train import checkpoint_files

    def full(path, content):
        if "epoch-0002" in str(path):
            raise OSError(28, "No space left on device")
        return files.write_bytes(path, content)

    monkeypatch.setattr(checkpoint_files, "write_bytes", full)
    told = r"epoch 2 could not be written to .* \(No space left on device\); .*epoch-0001 is whole"
    with pytest.raises(OSError, match=told):
        run(out=tmp_path)
    monkeypatch.undo()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["epoch-0001", "log.jsonl", "run.json", "times.jsonl"]
    resumed, history = run(out=tmp_path)
    whole, expected = run()
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["epoch-0001", "epoch-0002"]


def test_a_folder_that_cannot_be_written_to_is_found_out_first(tmp_path):
    (tmp_path / "file").write_text("")
    count = []
    with pytest.raises(OSError):  # noqa: PT011
        run(out=tmp_path / "file", loss=lambda m, b: count.append(1) or Classify()(m, b)["loss"])
    assert not count


def test_only_its_own_folders_are_touched(tmp_path):
    """Other folders with such names are left alone, and the eleventh thousandth epoch is after the tenth."""
    (tmp_path / "epoch-0001-best").mkdir(parents=True)
    run(out=tmp_path)
    run(out=tmp_path, resume=False)
    assert (tmp_path / "epoch-0001-best").is_dir()
    for name in ("epoch-9999", "epoch-10000", "epoch-9999-step-000012", "epoch-9999-step-1000000"):
        (tmp_path / name).mkdir()
    names = [p.name for p in RecentCheckpoints(tmp_path, "training").paths()]
    assert names == ["epoch-10000", "epoch-9999-step-1000000", "epoch-9999-step-000012", "epoch-9999",
                     "epoch-0002", "epoch-0001"]  # fmt: skip


def test_other_frozen_parameters_are_another_training(tmp_path):
    run(out=tmp_path)
    model = small()
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"other parameters frozen \(0.weight\); give another out="):
        run(model, out=tmp_path)


def test_another_training_is_not_resumed(tmp_path):
    run(out=tmp_path)
    run(out=tmp_path, recipe=replace(PLAIN, capture="none"))  # which changes no number
    with pytest.raises(
        ValueError, match=r"learning_rate = 0.05, not 0.1; give another out=, or resume=False"
    ):
        run(out=tmp_path, recipe=replace(PLAIN, learning_rate=0.1))
    with pytest.raises(ValueError, match=r"holds a run with 6 steps per epoch, not 3"):
        run(out=tmp_path, data=digits(100))
    with pytest.raises(
        ValueError, match=r"another model \(its module '0' is Conv2d\(1, 8,.* Conv2d\(1, 4"
    ):
        run(small(size=4), out=tmp_path)
    fresh, _ = run(out=tmp_path, resume=False, save_every=0)
    assert same(fresh, run()[0])
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["log.jsonl", "model.safetensors", "run.json", "times.jsonl"]


def test_tied_weights_are_kept(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.turn = nn.Embedding(12, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.turn(self.embed(ids)))

    def next_token(model, ids):
        logits = model(ids[:, :-1])
        return {"loss": cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")}

    torch.manual_seed(0)
    batches = list((torch.arange(12).repeat(40).view(8, 60) % 12).split(2))
    recipe = Recipe(epochs=20, learning_rate=0.03, warmup=0, optimiser="adamw", floor=0.1)
    model = Tied()
    initial = copy.deepcopy(model)
    history = train(model, batches, batches, recipe, loss=next_token, device="cpu", out=tmp_path)
    assert history.final["valid_loss"] < 0.05
    assert list(history.final)[-1] == "samples_per_second"
    assert model.head.weight is model.embed.weight
    train(initial, batches, batches, recipe, loss=next_token, device="cpu", out=tmp_path)
    assert same(initial, model)
    fresh = Tied()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert same(fresh, model)
    assert fresh.head.weight is fresh.embed.weight


# ---- batches from anywhere


def test_a_loss_says_what_is_reported():
    model = nn.Linear(2, 1)
    batches = [{"x": torch.randn(n, 2), "y": torch.randn(n, 1)} for n in (3, 5, 4)]

    def loss(model, batch):
        error = (model(batch["x"]) - batch["y"]).squeeze(1)
        return {"loss": error.square(), "absolute": error.abs(), "batches": torch.tensor(2.0)}

    recipe = Recipe(epochs=1, learning_rate=0.0, warmup=0)
    history = train(model, batches, batches, recipe, loss=loss, device="cpu")
    x, y = (torch.cat([b[k] for b in batches]) for k in "xy")
    error = (model(x) - y).detach()
    for part in ("train", "valid"):
        assert history.final[f"{part}_loss"] == pytest.approx(error.square().mean().item())
        assert history.final[f"{part}_absolute"] == pytest.approx(error.abs().mean().item())
        assert history.final[f"{part}_batches"] == 2
    plain = train(model, batches, None, recipe, loss=lambda m, b: m(b["x"]).mean() * 0 + 3, device="cpu")
    assert plain.final["train_loss"] == 3
    with pytest.raises(
        ValueError, match="the loss function returned the names error; one of them must be 'loss'"
    ):
        train(model, batches, None, recipe, loss=lambda m, b: {"error": m(b["x"])}, device="cpu")
    with pytest.raises(ValueError, match="label_smoothing belongs to the default loss"):
        train(model, batches, None, replace(recipe, label_smoothing=0.1), loss=loss, device="cpu")


def test_loaders_are_told_the_epoch_and_shuffle_alike():
    class Batches:
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs += (epoch,)

        def __len__(self):
            return 2

        def __iter__(self):
            return iter([(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))] * 2)

    batches = Batches()
    train(nn.Linear(3, 2), batches, None, replace(PLAIN, epochs=3), device="cpu")
    assert batches.epochs == (0, 1, 2)

    def trained():
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)
        model = nn.Linear(3, 2)
        torch.manual_seed(torch.seed())  # the loader's order comes from the recipe's seed alone
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
        train(model, loader, None, PLAIN, device="cpu")
        return model

    assert same(trained(), trained())


def test_batches_that_are_shuffled_and_noisy_are_the_same_after_a_break(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, i):
            return torch.randn(3) + i, i % 2

    def trained(out=None, tell=None):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        loader = torch.utils.data.DataLoader(Noisy(), 6, shuffle=True)  # the last batch is smaller
        recipe = replace(PLAIN, epochs=3, learning_rate=0.01)
        return model, train(model, loader, loader, recipe, device="cpu", out=out, tell=tell)

    def stop(progress):
        if progress.row and progress.epoch == 1:
            raise InterruptedRun

    whole, expected = trained()
    with pytest.raises(InterruptedRun):
        trained(tmp_path, stop)
    resumed, history = trained(tmp_path)
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_the_batches_of_a_loader_that_shuffles(world):
    """Each process has random numbers of its own; together they still see every sample once."""
    seen = []
    for rank in range(world):
        torch.manual_seed(100 + rank)
        loader = torch.utils.data.DataLoader(torch.arange(24), 4, shuffle=True)
        feed = feed_of(loader, PLAIN, train=True, like=torch.zeros(1), share=(rank, world))
        before = torch.get_rng_state()
        seen.append([x.tolist() for (x,) in feed.epoch(0)])
        assert torch.equal(torch.get_rng_state(), before)
    assert sorted(x for own in seen for batch in own for x in batch) == list(range(24))
    whole = feed_of(loader, PLAIN, train=True, like=torch.zeros(1))
    assert [batch for row in zip(*seen) for batch in row] == [x.tolist() for (x,) in whole.epoch(0)]


def test_data_that_would_be_misread_are_refused():
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    with pytest.raises(TypeError, match="TensorDataset gives single samples; training takes batches"):
        train(nn.Linear(3, 2), torch.utils.data.TensorDataset(x, y), None, PLAIN, device="cpu")
    floats = SimpleNamespace(
        images=torch.rand(40, 1, 8, 8), labels=torch.zeros(40).long(), mean=(0,), std=(1,)
    )
    with pytest.raises(
        ValueError, match=r"images are torch.float32 \[40, 1, 8, 8\]; they must be uint8"
    ):
        run(data=floats)
    loader = torch.utils.data.DataLoader(
        torch.arange(8), sampler=torch.utils.data.DistributedSampler(range(8), 2, 0)
    )
    with pytest.raises(ValueError, match="this loader gives each process a share already"):
        feed_of(loader, PLAIN, train=True, like=torch.zeros(1), share=(0, 2))
    batches = [{"x": torch.zeros(2), "y": torch.ones(2)}, {"y": torch.ones(2), "x": torch.zeros(2)}]
    with pytest.raises(ValueError, match="batches must have one structure; the first had"):
        list(feed_of(batches, PLAIN, train=True, like=torch.zeros(1)).epoch(0))
    for share in ((0, 2), (1, 2)):  # the same in every process
        with pytest.raises(ValueError, match="1 batches for 2 processes: too few"):
            feed_of(batches[:1], PLAIN, train=False, like=torch.zeros(1), share=share)
        with pytest.raises(ValueError, match="1 images for 2 processes: too few"):
            feed_of(digits(1), PLAIN, train=False, like=torch.zeros(1), share=share)
    with pytest.raises(
        ValueError,
        match=r"a batch is a Tensor of length 40, but the default loss needs \(inputs, labels\)",
    ):
        run(data=[torch.zeros(40, 1, 8, 8)])
    with pytest.raises(ValueError, match="precision = 'auto' is not one of fp32, bf16, fp16"):
        evaluate(small(), digits(10), precision="auto")


def test_convolutions_of_three_dimensions():
    """channels_last, the default, is for those of two."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 1, 3, padding=1), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip
    _, history = run(model)
    assert len(history) == 2
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_batches_that_cannot_be_used():
    model, recipe = nn.Linear(3, 2), replace(PLAIN, epochs=2)
    with pytest.raises(
        TypeError, match="generator has no length; give images with labels, mean and std"
    ):
        train(model, (x for x in [1]), None, recipe, device="cpu")
    with pytest.raises(TypeError, match="a batch must consist of tensors; this one has Tensor, str"):
        train(model, [(torch.zeros(1, 3), "a")], None, recipe, device="cpu")
    with pytest.raises(ValueError, match="0 batches for 1 process: too few"):
        train(model, [], None, recipe, device="cpu")

    class Once(list):
        def __iter__(self):
            while list.__len__(self):
                yield self.pop()

        def __len__(self):
            return 1

    with pytest.raises(ValueError, match="no batches in epoch 2: the data can be iterated only once"):
        train(model, Once([(torch.zeros(1, 3), torch.zeros(1).long())]), None, recipe, device="cpu")


# ---- what it says


def test_a_loss_that_is_not_finite_stops_it(tmp_path):
    count = iter(range(100))

    def loss(model, batch):
        return Classify()(model, batch)["loss"] * (math.nan if next(count) == 6 + 3 else 1)

    with pytest.raises(
        DivergedError,
        match=r"not finite at epoch 2, step 4 of 6, where the learning rate is 0\.0\d+: lower it",
    ) as found:
        run(loss=loss, out=tmp_path)
    assert (found.value.epoch, found.value.step) == (2, 4)
    assert len(found.value.history) == 1
    sent = copy.copy(found.value)  # as it comes from another process
    assert (str(sent), sent.step, sent.history) == (str(found.value), 4, found.value.history)
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert last == {"epoch": 2, "train_loss": None, "step": 4}
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["epoch-0001"]


def test_progress(monkeypatch):
    monkeypatch.setattr("attractor.train.bookkeeping.Timer.INTERVAL", 0.0)
    told = []
    run(data=digits(100), valid=digits(50, "test"), tell=told.append)
    assert [(p.epoch, p.step, p.row is None) for p in told] == [
        *((1, i, True) for i in (1, 2, 3)), (1, 3, False), *((2, i, True) for i in (1, 2, 3)), (2, 3, False),
    ]  # fmt: skip
    assert all(p.steps == 3 and p.epochs == 2 and p.per_second > 0 for p in told)
    assert told[-1].seconds_left == 0
    assert told[2].seconds_left > 0
    assert str(told[0]).startswith("seed 0, epoch 1/2, step 1/3: loss 2.")
    assert "valid_accuracy" in str(told[-1])


def test_tensorboard_if_it_is_installed(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            assert (folder, purge_step) == (tmp_path / "tensorboard", 1)

        def add_scalar(self, name, value, epoch):
            written.append((name, epoch))

        def close(self):
            written.append("closed")

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter)
    )
    run(out=tmp_path)
    assert written[-1] == "closed"
    assert ("train_loss", 2) in written
    assert ("epoch", 1) not in written


def test_several_seeds(tmp_path):
    seen = []
    found = train_seeds(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), digits(100), digits(50, "test"), PLAIN,
        seeds=(3, 4, 5), out=tmp_path, device="cpu", after=lambda model, history, seed: seen.append((seed, history)),
    )  # fmt: skip
    assert [s for s, _ in seen] == [3, 4, 5]
    values = [history.final["valid_accuracy"] for _, history in seen]
    assert found.values == values
    middle = sum(values) / 3
    assert found.mean == pytest.approx(middle)
    assert found.spread == pytest.approx(math.sqrt(sum((v - middle) ** 2 for v in values) / 2))
    assert len({history.final["train_loss"] for _, history in seen}) == 3
    assert json.loads((tmp_path / "summary.json").read_text())["values"] == values
    assert (tmp_path / "seed-4" / "log.jsonl").exists()
    one = Seeds((0,), (History([{"valid_accuracy": 0.5}]),))
    assert (one.mean, math.isnan(one.spread)) == (0.5, True)
    with pytest.raises(ValueError, match=r"seeds = \(1, 1\); give one or more, all different"):
        train_seeds(small, digits(100), None, PLAIN, seeds=(1, 1))
    assert str(one) == "0.5000 (one seed)"
    numpys = pytest.importorskip("numpy").arange(1, 2)
    again = train_seeds(
        small, digits(100), digits(50, "test"), PLAIN, seeds=numpys, device="cpu", out=tmp_path
    )
    assert again.seeds == (1,)  # the same seed, so the same streams
    assert type(again.seeds[0]) is int


def test_a_number_that_will_not_be_there_is_asked_for_in_vain_at_once():
    with pytest.raises(ValueError, match="valid_accuracy needs valid_data; or ask for another number"):
        train_seeds(small, digits(100), None, PLAIN)
    made = []

    def make():
        made.append(1)
        return small()

    with pytest.raises(
        ValueError, match="no valid_hits in the last row, which has epoch, lr, train_loss"
    ):
        train_seeds(make, digits(100), digits(50), PLAIN, device="cpu", name="valid_hits")
    assert made == [1]


def test_histories_without_what_is_asked():
    with pytest.raises(ValueError, match="the history has no finished epoch"):
        History().accuracy  # noqa: B018
    with pytest.raises(ValueError, match="no valid_accuracy in the last row, which has epoch"):
        History([{"epoch": 1}]).accuracy  # noqa: B018
    assert History([{"a": 1}, {"a": 2}]).column("a") == [1, 2]


def test_networks_without_anything_to_train():
    with pytest.raises(ValueError, match="Identity has no parameters"):
        run(nn.Identity())
    with pytest.raises(ValueError, match="Sequential has no parameter that requires a gradient"):
        run(small().requires_grad_(False))
    with pytest.raises(ValueError, match="capture = 'graph' on cpu; it needs a GPU"):
        run(recipe=replace(PLAIN, capture="graph"))
    if not torch.cuda.is_available():
        with pytest.raises(
            ValueError, match="device = 'cuda', but torch finds no GPU here; use device='cpu'"
        ):
            train(small(), digits(100), None, PLAIN, device="cuda")
    with pytest.raises(ValueError, match="precision 'fp16' on cpu; use 'fp32' or 'bf16'"):
        run(recipe=replace(PLAIN, precision="fp16"))


def test_half_and_double_precision():
    _, history = run(recipe=replace(PLAIN, precision="bf16", epochs=3), valid=digits(50, "test"))
    assert history.final["train_loss"] < history.rows[0]["train_loss"]
    model, _ = run(small().double())
    assert next(model.parameters()).dtype == torch.float64


# ---- blocks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        return x + self.body(x)


class Stage(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def staged():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Stage(16, 4), Stage(16, 5), nn.Linear(16, 10))


def test_repeated_blocks_are_found():
    model = staged()
    assert repeated_blocks(model) == [*model[2].blocks, *model[3].blocks]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert repeated_blocks(encoder) == list(encoder.layers)
    assert repeated_blocks(small()) == []


def test_equal_blocks_are_compiled_once():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model, x = staged(), torch.randn(3, 64)
    expected = model(x)
    with compiled_blocks(model, backend=backend) as blocks:
        assert len(blocks) == 9
        torch.testing.assert_close(model(x), expected)
        assert len(compiled) == 1
    torch.testing.assert_close(model(x), expected)
    assert all(block._compiled_call_impl is None for block in blocks)
    with compiled_blocks(model, lambda m: [m[2]], backend=backend) as blocks:
        assert blocks == [model[2]]
    with pytest.raises(ValueError, match="no repeated blocks found in Sequential; name what to compile"):
        run(recipe=replace(PLAIN, capture="compile"))


# ---- several processes


def train_in_processes(folder):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    torch.manual_seed(5)
    nn.init.normal_(model[1].weight, std=0.1)
    nn.init.zeros_(model[1].bias)
    history = train(model, digits(100), digits(51, "test"), PLAIN, device="cpu", out=folder)
    batches = list(zip(torch.arange(12.0).view(6, 2, 1), torch.zeros(6, 2).long()))
    loss = lambda model, batch: {"loss": model(batch[0]).sum(1) * 0 + batch[0].sum(1)}
    text = train(
        nn.Linear(1, 2), batches, batches[:5], replace(PLAIN, epochs=1), loss=loss, device="cpu"
    )
    return history, text


def _process(folder):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # inherited from the one process before
    assert Place.find("cpu").share == (torch.distributed.get_rank(), 2)
    history, text = train_in_processes(folder)
    assert text.final["train_loss"] == pytest.approx(11 * 12 / 2 / 12)
    assert text.final["valid_loss"] == pytest.approx(9 * 10 / 2 / 10)
    own = folder if torch.distributed.get_rank() == 0 else folder / "elsewhere"
    with pytest.raises(ValueError, match="processes found other checkpoints in"):
        train_in_processes(own)
    # Running means differ between processes; what is evaluated and kept is one model all the same.
    model, valid = small(), digits(51, "test")
    found = train(model, digits(100), valid, PLAIN, device="cpu").final
    assert found["valid_loss"] == pytest.approx(evaluate(model, valid)["loss"], rel=1e-6)
    rank = torch.distributed.get_rank()
    (folder / f"history-{rank}.json").write_text(json.dumps(numbers(history)))


def test_two_processes_do_what_one_does(tmp_path, one_thread):
    from accelerate import debug_launcher

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    debug_launcher(_process, (tmp_path / "two",), num_processes=2)
    history, _ = train_in_processes(tmp_path / "one")
    told = [json.loads((tmp_path / "two" / f"history-{i}.json").read_text()) for i in (0, 1)]
    assert told[0] == told[1]
    for mine, theirs in zip(numbers(history), told[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_captured_step_is_the_same_step(optimiser, precision):
    recipe = replace(
        PLAIN, epochs=3, optimiser=optimiser, precision=precision, learning_rate=0.01, clip=1.0
    )
    data, valid = digits(300), digits(101, "test")
    found = {}
    for capture in ("none", "graph", "auto"):
        model = small()
        history = train(model, data, valid, replace(recipe, capture=capture), device="cuda")
        found[capture] = model, numbers(history)
    for capture in ("graph", "auto"):
        if optimiser == "sgd" and precision == "fp32":  # others enlarge what rounding leaves
            for a, b in zip(found[capture][0].parameters(), found["none"][0].parameters()):
                torch.testing.assert_close(a, b, rtol=0.02, atol=2e-3)
        assert found[capture][1][-1] == pytest.approx(found["none"][1][-1], rel=0.05, abs=0.05)
    assert int(found["graph"][0][1].num_batches_tracked) == 3 * 9


@pytest.mark.gpu
def test_captured_steps_mix_what_others_mix():
    data, valid = digits(300), digits(101, "test")
    found = {}
    for capture in ("none", "graph"):
        recipe = replace(PLAIN, epochs=3, learning_rate=0.01, mixup=0.4, capture=capture)
        model = small()
        found[capture] = model, numbers(train(model, data, valid, recipe, device="cuda"))
    for a, b in zip(found["graph"][0].parameters(), found["none"][0].parameters()):
        torch.testing.assert_close(a, b, rtol=0.02, atol=2e-3)
    assert found["graph"][1][-1] == pytest.approx(found["none"][1][-1], rel=0.05, abs=0.05)


@pytest.mark.gpu
def test_every_captured_step_moves_and_draws_anew(tmp_path):
    """Rates are read from the device, dropout differs from step to step, resuming goes on."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    initial, seen = copy.deepcopy(model), 0

    def loss(model, batch):
        nonlocal seen
        hidden = model[1](torch.ones_like(batch[0].flatten(1)))
        seen += 1
        found = Classify()(model, batch)
        return found | {"kept": hidden.detach().mean(1)}

    recipe = replace(PLAIN, epochs=4, learning_rate=0.1, capture="graph")
    kept = []
    train(
        model,
        digits(),
        None,
        recipe,
        loss=loss,
        device="cuda",
        tell=lambda p: kept.append(p.row),
        out=tmp_path,
    )
    assert seen == 4  # three steps before, one in the capture
    values = [row["train_kept"] for row in kept if row]
    assert len(set(values)) == 4
    assert all(abs(v - 1) < 0.05 for v in values)
    still = replace(recipe, learning_rate=0.0, warmup=0.0)
    before = model[2].weight.detach().clone()
    train(model, digits(), None, still, device="cuda")
    assert torch.equal(model[2].weight, before)
    train(initial, digits(), None, recipe, loss=loss, device="cuda", out=tmp_path)
    assert torch.equal(initial[2].weight.cpu(), before.cpu())


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.gpu
def test_resuming_with_captured_steps(tmp_path, deterministic):
    recipe = replace(PLAIN, epochs=4, capture="graph", learning_rate=0.02)
    data = digits().rgb()
    make = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(288, 10))  # fmt: skip
    torch.manual_seed(0)
    start = make().state_dict()
    whole = make()
    whole.load_state_dict(start)
    train(whole, data, None, recipe, device="cuda")

    def stop(progress):
        if progress.row and progress.epoch == 2:
            raise InterruptedRun

    half = make()
    half.load_state_dict(start)
    with pytest.raises(InterruptedRun):
        train(half, data, None, recipe, device="cuda", out=tmp_path, tell=stop)
    resumed = make()
    resumed.load_state_dict(start)
    train(resumed, data, None, recipe, device="cuda", out=tmp_path)
    for a, b in zip(resumed.parameters(), whole.parameters()):
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_as_it_is():
    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small(0.2)

        def forward(self, x):
            return self.net(x) * (1 if x.sum().item() > -1e9 else 0)

    recipe = replace(PLAIN, learning_rate=0.02)
    torch.manual_seed(0)
    model = Waits()
    with pytest.warns(UserWarning, match="not captured in a CUDA graph, going on without"):
        history = train(
            model, digits(300), digits(100, "test"), replace(recipe, capture="graph"), device="cuda"
        )
    other = Waits()
    plain = train(
        other, digits(300), digits(100, "test"), replace(recipe, capture="none"), device="cuda"
    )
    assert int(model.net[1].num_batches_tracked) == 2 * 9
    assert history.final["train_loss"] == pytest.approx(plain.final["train_loss"], rel=0.02)


@pytest.mark.gpu
def test_dropout_goes_on_after_a_failed_capture():
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small(0.5)

        def forward(self, x):
            torch.cuda.synchronize()  # which a capture forbids, and torch's search for such things misses
            return self.net(x)

    before, history = torch.cuda.current_stream(), None
    with pytest.warns(UserWarning, match="not captured in a CUDA graph, going on without"):
        history = train(
            Stops(), digits(300), digits(100, "test"), replace(PLAIN, capture="graph"), device="cuda"
        )
    assert len(history) == 2
    assert torch.cuda.current_stream() == before
    torch.rand(4, device="cuda")
    again = train(small(0.5), digits(300), None, replace(PLAIN, capture="graph"), device="cuda")
    assert len(again) == 2


@pytest.mark.gpu
def test_random_numbers_of_the_cpu_keep_a_step_from_being_captured():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.kept = small(), []

        def forward(self, x):
            if self.training:
                self.kept.append(bool(torch.rand(()) < 0.5))
            return self.net(x)

    model = Skips()
    with pytest.warns(UserWarning, match="random numbers are drawn on the CPU"):
        train(model, digits(300), None, replace(PLAIN, capture="graph"), device="cuda")
    assert len(model.kept) == 2 * 9


@pytest.mark.gpu
def test_compiled_blocks_in_a_graph():
    found = {}
    for capture in ("none", "compile"):
        model = staged()
        recipe = replace(PLAIN, capture=capture, learning_rate=0.01)
        found[capture] = train(model, digits(300), digits(100, "test"), recipe, device="cuda").final
    assert found["compile"]["train_loss"] == pytest.approx(found["none"]["train_loss"], rel=1e-2)
    assert found["compile"]["valid_loss"] == pytest.approx(found["none"]["valid_loss"], rel=1e-2)


def test_checkpoints_of_older_versions_do_not_tell_how_gates_began(tmp_path):
    def make():
        torch.manual_seed(0)
        return resnet_cifar(11, 10, "se", width=4, in_channels=1)

    run(make(), digits(64), recipe=replace(PLAIN, epochs=2), out=tmp_path, save_every=1)
    last = RecentCheckpoints(tmp_path, "training").paths()[0]
    tensors, config = checkpoint.load(last, "training")
    kept = {name: value for name, value in tensors.items() if not name.endswith(".doubled")}
    assert len(kept) < len(tensors)
    shutil.rmtree(last)
    checkpoint.save(last, "training", kept, config)
    model, history = run(make(), digits(64), recipe=replace(PLAIN, epochs=2), out=tmp_path)
    assert len(history) == 2
    assert torch.equal(model.conv1.weight, tensors["model.conv1.weight"])
