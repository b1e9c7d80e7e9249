"""Whether kernels give the same bits every time.

    python -m benchmarks.repeats --device cuda

Each kind of `attractor bench`, forward and backward on one input, so many times; and a hybrid solver's steps.
How many runs differ from the first in a bit, of the output and of each gradient: as torch runs by default,
and after ``torch.use_deterministic_algorithms(True)``.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attractor.attention import pde_attention, pdes
from attractor.attention.precision import accumulate_dtype
from attractor.bench import attention
from attractor.ode import HybridSolver, corrections, systems
from benchmarks.results import save

NAMES = ("output", "query", "key", "value", "alpha", "beta")
CAUSAL = "reaction, causal"


def differing(call: Callable[[], tuple[Tensor, ...]], repeats: int) -> list[int]:
    """Of each result, how many of the runs differ from the first."""
    first, count = call(), None
    for _ in range(repeats - 1):
        differ = torch.stack([(a != b).any() for a, b in zip(first, call())])
        count = differ.int() if count is None else count + differ
    return [0] * len(first) if count is None else count.tolist()


def with_gradients(kind: str, tokens: int, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    """A call that gives the output and all gradients."""
    torch.manual_seed(0)
    *qkv, grad = (
        torch.randn(2, 8, tokens, 64, device=device, dtype=dtype).requires_grad_() for _ in range(4)
    )
    coefficients = attention.learnt(8, accumulate_dtype(dtype), device)
    used = coefficients if "reaction" in kind or kind == "split" else coefficients[:1]
    if kind == CAUSAL:
        pde = pdes.ReactionDiffusion(*coefficients)
        ours: Any = lambda q, k, v: pde_attention(q, k, v, is_causal=True, pde=pde, steps=4)
    else:
        ours, _ = attention.contenders(kind, coefficients, 4)

    def call() -> tuple[Tensor, ...]:
        out = ours(*qkv)
        return out.detach(), *torch.autograd.grad(out, [*qkv, *used], grad.detach())

    return call


def steps_of_a_pendulum(width: int, device: str) -> Callable[[], Any]:
    """A call that takes ten hybrid steps of a thousand elastic pendulums."""
    torch.manual_seed(0)
    pendulum = systems.ElasticPendulum()
    correction = corrections.AttNS(4, width=width, device=device).requires_grad_(False)
    solver, start = HybridSolver(pendulum, "rk4", correction, 0.1), pendulum.sample(1_000, device=device)
    return lambda: (solver.solve(start, 1.0).u,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=250)
    parser.add_argument("--tokens", type=int, default=2_000)
    args = parser.parse_args()
    rows = []
    for asked in (False, True):
        torch.use_deterministic_algorithms(asked)  # only to warn would keep what is quick
        for kind in (*attention.KINDS, CAUSAL):
            call = with_gradients(kind, args.tokens, args.device, getattr(torch, args.dtype))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = differing(call, args.repeats)
            differ = {n: x for n, x in zip(NAMES, found) if x}
            told = sorted(
                {str(w.message).split(". ")[0] for w in caught if "determin" in str(w.message)}
            )
            rows.append({"kind": kind, "deterministic_asked": asked, "differ": differ, "warned": told})
            print(
                f"{kind:<18}{'deterministic' if asked else 'default':<15}{differ or 'all equal'}", *told
            )
    torch.use_deterministic_algorithms(False)
    for width in (256, 1024):
        (found,) = differing(steps_of_a_pendulum(width, args.device), args.repeats)
        differ = {"output": found} if found else {}
        rows.append({"kind": f"hybrid, width {width}", "deterministic_asked": False, "differ": differ})
        print(f"{rows[-1]['kind']:<33}{differ or 'all equal'}")
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    save("repeats", {"device": name, "dtype": args.dtype, "repeats": args.repeats,
                     "tokens": args.tokens, "rows": rows})  # fmt: skip


if __name__ == "__main__":
    main()
