"""Seconds per CIFAR epoch of a ResNet: the captured training step beside a plain loop, in the same run.

The network of the StepNet paper (ResNet164 by default), batch 256, mixed bfloat16, Nesterov SGD, random
crops and flips, images as bytes on the device. Everyone does the same arithmetic on the same kind of
batches:

- plain: an ordinary PyTorch loop, operation by operation, weights as they come;
- plain, channels_last: the same with weights and images in channels_last;
- graph: `attractor.train.train`, the whole step as one CUDA graph;
- compile: the same with the residual blocks compiled.

Each runs epochs of ``--steps`` steps; the first is a warm-up, the median of the others is scaled to the
195 steps of CIFAR. cuDNN may choose its algorithms for all; no loop waits for the device within an epoch.

    python -m benchmarks.training                                            # on a GPU
    python -m benchmarks.training --gate none se stepnet --depth 164
    python -m benchmarks.training --device cpu --depth 20 --steps 2 --batch 8 --out out/training.json
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from attractor.residual.resnet import resnet_cifar
from attractor.storage.files import write_json
from attractor.train import SHORT, Recipe, train
from attractor.train.feeds import feed_of
from benchmarks.results import save

IMAGES, RATE = 50_000, 0.01
Epochs = tuple[float, list[float]]  # seconds of the first, and of the others


def plain(model: torch.nn.Module, data: SimpleNamespace, recipe: Recipe, device: torch.device) -> Epochs:
    """The loop one would write."""
    model.to(device)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(
        model.parameters(),
        RATE,
        momentum=recipe.momentum,
        nesterov=True,
        weight_decay=recipe.weight_decay,
    )
    feed = feed_of(data, recipe, train=True, like=next(model.parameters()))
    model.train()
    seconds = []
    for epoch in range(recipe.epochs):
        wait(device)
        began = time.perf_counter()
        total = torch.zeros((), device=device)
        for inputs in feed.epoch(epoch):
            x, labels = feed.batch(*inputs)
            with torch.autocast(device.type, torch.bfloat16):
                loss = cross_entropy(model(x), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.detach()
        wait(device)
        seconds.append(time.perf_counter() - began)
    assert total.isfinite()
    return seconds[0], seconds[1:]


def ours(model: torch.nn.Module, data: SimpleNamespace, recipe: Recipe, device: torch.device) -> Epochs:
    """What the library does."""
    seconds = train(model, data, None, recipe, device=device).column("seconds")
    return seconds[0], seconds[1:]


def contenders(device: torch.device) -> dict[str, tuple[Callable[..., Epochs], dict[str, object]]]:
    found: dict[str, tuple[Callable[..., Epochs], dict[str, object]]] = {
        "plain": (plain, {"channels_last": False}),
        "plain, channels_last": (plain, {}),
    }
    if device.type == "cuda":
        found |= {"graph": (ours, {"capture": "graph"}), "compile": (ours, {"capture": "compile"})}
    else:
        found["train"] = (ours, {"capture": "none"})
    return found


def measure(gate: str, given: argparse.Namespace, device: torch.device) -> list[dict]:
    torch.manual_seed(0)
    count = given.steps * given.batch
    data = SimpleNamespace(
        images=torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8),
        labels=torch.randint(0, 10, (count,)), mean=(0.5,) * 3, std=(0.25,) * 3,
    )  # fmt: skip
    rows: list[dict] = []
    for name, (run, options) in contenders(device).items():
        torch.manual_seed(0)
        recipe = Recipe(
            epochs=1 + given.rounds, batch=given.batch, learning_rate=RATE, warmup=0.0, schedule="constant",
            weight_decay=SHORT.weight_decay, precision="bf16", **options,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        first, others = run(resnet_cifar(given.depth, 10, gate), data, recipe, device)
        step = statistics.median(others) / given.steps
        row = {
            "gate": gate, "loop": name, "milliseconds_per_step": step * 1e3,
            "seconds_per_epoch": step * (IMAGES // given.batch), "images_per_second": given.batch / step,
            "first_epoch_seconds": first, "epochs": others,
        }  # fmt: skip
        if rows:
            row |= {"speedup": rows[0]["milliseconds_per_step"] / (step * 1e3)}
        if device.type == "cuda":
            row["peak_mb"] = torch.cuda.max_memory_allocated() / 1e6
        rows.append(row)
        ratio = f", {row['speedup']:.2f}x" if "speedup" in row else ""
        print(
            f"{gate}, {name}: {step * 1e3:.1f} ms a step, {row['seconds_per_epoch']:.2f} s an epoch{ratio} "
            f"(first {given.steps} steps: {first:.1f} s)",
            flush=True,
        )
    return rows


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=164, help="9n + 2")
    parser.add_argument("--gate", nargs="+", default=["none", "se", "stepnet"])
    parser.add_argument("--steps", type=int, default=65, help="of an epoch that is measured")
    parser.add_argument("--rounds", type=int, default=3, help="epochs measured, after the first")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="another file than benchmarks/results/training.json")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    content = {
        "device": name, "torch": torch.__version__, "depth": given.depth, "batch": given.batch,
        "precision": "bf16", "steps": given.steps, "rounds": given.rounds, "rows": [],
    }  # fmt: skip
    for gate in given.gate:
        content["rows"] += measure(gate, given, device)
        if given.out:
            write_json(given.out, content)
        else:
            save("training", content)


if __name__ == "__main__":
    main()
