"""What `probe` costs over a plain forward, batch 64 on the CPU, and how it agrees with one by hand.

Everyone runs once a round: the plain forward (eval mode, no gradients), one more batch of a probe that
goes on, and a whole call of `probe` with that one batch, which looks at the graph first. Ratios are
those of medians over rounds, of the time on the clock and of the processor's time, which a busy machine
disturbs less.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attractor.residual import probe, resnet_cifar
from attractor.residual.batch import Batch
from attractor.residual.evaluation import evaluation_mode
from attractor.residual.meter import Meter
from benchmarks.results import save

BATCH, ROUNDS = 64, 15


def networks() -> dict[str, tuple[nn.Module, Any]]:
    found: dict[str, tuple[nn.Module, Any]] = {
        f"resnet_cifar({depth}, gate={gate!r})": (resnet_cifar(depth, gate=gate), images(32))
        for depth, gate in ((20, "none"), (56, "none"), (56, "se"), (56, "stepnet"))
    }
    try:
        import transformers
    except ImportError:
        print("transformers is not installed: left out")
        return found
    make = lambda kind, **options: transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model(kind, **options)
    )
    layers = dict(hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768)
    ids = torch.randint(100, (BATCH, 64))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    padded = {
        "input_ids": ids,
        "attention_mask": (torch.arange(64) < torch.arange(1, 65)[:, None]).long(),
    }
    sizes = dict(embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 3, 2])
    bert = make("bert", **layers, vocab_size=100)
    return found | {
        "ResNet (transformers)": (make("resnet", **sizes), images(64)),
        "ViT (transformers)": (make("vit", **layers, image_size=32, patch_size=4), images(32)),
        "BERT (transformers)": (bert, text),
        "BERT (transformers), padded": (bert, padded),
    }


def images(size: int) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def measure(model: nn.Module, given: Any) -> dict[str, Any]:
    with evaluation_mode(model) as net:
        batch = Batch.of(given, net, None)
        meter = Meter(net, "block", "", None)
        jobs: dict[str, Callable[[], Any]] = {
            "plain": lambda: meter.call(net, batch.data),
            "batch": lambda: meter.measure(batch),
            "call": lambda: probe(net, [given]),
        }
        for job in jobs.values():
            job()
        clock: dict[str, list[float]] = {name: [] for name in jobs}
        processor: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(ROUNDS):
            for name, job in jobs.items():
                start = time.perf_counter(), time.process_time()
                job()
                clock[name].append(time.perf_counter() - start[0])
                processor[name].append(time.process_time() - start[1])
        blocks = len(meter.plans[0].blocks)
    middle = lambda times: {name: statistics.median(values) for name, values in times.items()}
    clock_, processor_ = middle(clock), middle(processor)
    return {
        "blocks": blocks,
        "milliseconds": clock_["plain"] * 1e3,
        **{f"{job}_ratio": clock_[job] / clock_["plain"] for job in ("batch", "call")},
        **{f"{job}_processor_ratio": processor_[job] / processor_["plain"] for job in ("batch", "call")},
    }


def difference(gate: str) -> float:
    """The largest relative difference from a forward by hand, of ResNet56's blocks in float32."""
    torch.manual_seed(1)
    net, x = resnet_cifar(56, gate=gate).eval(), torch.randn(8, 3, 32, 32)
    found = probe(net, [x])
    norms = lambda t: t.double().flatten(1).norm(dim=1)
    rows = []
    with torch.no_grad():
        x = net.relu(net.bn1(net.conv1(x)))
        for _, block in net.blocks:
            f = block.relu(block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x))))))
            f = block.bn3(block.conv3(f))
            x = x if block.downsample is None else block.downsample(x)
            f = f if block.gate is None else block.gate(f, x)
            rows.append(norms(f) / norms(x))
            x = block.relu(x + f)
    want = torch.stack(rows, 1)
    return ((found.nsi - want) / want).abs().max().item()


def main() -> None:
    torch.manual_seed(0)
    rows = []
    for name, (model, given) in networks().items():
        row = {"network": name, **measure(model, given)}
        rows.append(row)
        print(
            f"{name:32} {row['milliseconds']:7.1f} ms, a batch {row['batch_ratio']:.3f}x "
            f"({row['batch_processor_ratio']:.3f}x), a call {row['call_ratio']:.3f}x "
            f"({row['call_processor_ratio']:.3f}x of the processor's time)",
            flush=True,
        )
    by_hand = {gate: difference(gate) for gate in ("none", "se", "stepnet")}
    print("largest relative difference from a forward by hand:", by_hand)
    save("probing", {"batch": BATCH, "rounds": ROUNDS, "rows": rows, "difference": by_hand})


if __name__ == "__main__":
    main()
