"""The road of one attention call: files, Python calls, and the time of a small one beside SDPA.

Counts the functions of attractor that one causal call of `pde_attention` enters, with `sys.setprofile`,
after a first call that fills caches, and prints the plans of twelve different calls:

    python -m benchmarks.road                   on the CPU, one thread
    python -m benchmarks.road --device cuda

The small call has 64 tokens and 4 heads of 32 dimensions. Its time is the median of many calls, which
alternate with calls of `scaled_dot_product_attention`.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attractor
from attractor.attention import explain, pde_attention, pdes
from benchmarks.results import save

SOURCE = Path(attractor.__file__).parent
ROUNDS = 400


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """Return how many Python functions of each file of attractor a call enters."""
    files: Counter[str] = Counter()

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            files[str(path.relative_to(SOURCE))] += 1

    call()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    files.pop("__init__.py", None)  # the lazy attribute of the package, which users look up once
    return dict(files)


def times(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Return the median time of each call in microseconds, measured in turn."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 20):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if turn >= 20:
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(values) for name, values in seconds.items()}


def plans(device: str) -> dict[str, str]:
    """Return the plans of twelve different calls, as `explain` prints them."""
    q, k, v = torch.randn(3, 2, 4, 256, 32, device=device)
    heads = torch.full((4, 1, 1), 0.1, device=device)
    valid = torch.ones(2, 256, dtype=torch.bool, device=device)
    valid[0, 200:] = False
    anywhere = torch.rand(256, 256, device=device) < 0.9
    documents = (torch.arange(256, device=device) // 100).expand(2, -1)
    long = torch.randn(1, 2, 2_000, 16, device=device)
    kwargs: dict[str, dict[str, Any]] = {
        "causal diffusion": {"is_causal": True, "pde": "diffusion"},
        "causal, learnt coefficients per head": {"is_causal": True, "pde": pdes.Wave(heads)},
        "no mask": {"pde": "wave"},
        "padding": {"pde": "diffusion", "key_padding": valid},
        "causal and padding": {"pde": "diffusion", "key_padding": valid, "is_causal": True},
        "window": {"pde": "advection_diffusion", "window": (16, 16)},
        "documents": {"pde": "diffusion", "is_causal": True, "documents": documents},
        "a mask that puts walls anywhere": {"pde": "diffusion", "attn_mask": anywhere},
        "dropout": {"pde": "diffusion", "dropout_p": 0.1, "is_causal": True},
        "query axis": {"pde": "diffusion", "axis": "query"},
        "reaction-diffusion": {"pde": "reaction_diffusion", "is_causal": True},
    }
    texts = {name: str(explain(q, k, v, **options)) for name, options in kwargs.items()}
    texts["reaction-diffusion, 2,000 tokens"] = str(
        explain(long, long, long, is_causal=True, pde="reaction_diffusion")
    )
    return texts


def main() -> None:
    """Print and save the counts, the times and the plans."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = torch.randn(3, 1, 4, 64, 32, device=device, dtype=dtype)
    pde = pdes.Diffusion(alpha=0.1)

    def ours() -> Tensor:
        return pde_attention(q, k, v, is_causal=True, pde=pde)

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    files = counted(ours)
    print(f"one causal call: {len(files)} files, {sum(files.values())} Python calls")
    for name, count in files.items():
        print(f"  {count:4} {name}")
    took = times({"sdpa": sdpa, "pde_attention": ours}, device)
    ratio = took["pde_attention"] / took["sdpa"]
    print(f"64 tokens: {took['pde_attention']:.0f} us, SDPA {took['sdpa']:.0f} us, ratio {ratio:.1f}")
    texts = plans(device)
    for name, text in texts.items():
        print(f"\n{name}\n{text}")
    save("road" if device == "cpu" else "road_gpu", {
        "files": files, "microseconds": took, "ratio": ratio, "plans": texts,
    })  # fmt: skip


if __name__ == "__main__":
    main()
