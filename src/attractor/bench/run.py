"""Everything in one run, a row at a time; a case that fails says why, and the others go on."""

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attractor.bench import attention, model, solvers, timing

KINDS = (*attention.KINDS, "hybrid")
WHOLE_MODEL = "model"  # measured only if it is asked for: it needs transformers, and minutes
ROUNDS = {"cuda": 15, "cpu": 5}
Case = tuple[str, int, int]  # kind; tokens (0: the usual ones) and batch, or width and batch


def cases(kinds: Sequence[str], device: str, tokens: Sequence[int] = ()) -> list[Case]:
    """What is measured by default on a device of that type; `tokens` instead of the lengths there."""
    place = "cuda" if torch.device(device).type == "cuda" else "cpu"
    found: list[Case] = []
    for kind in kinds:
        if kind == WHOLE_MODEL:
            found += [(f"{WHOLE_MODEL} {case}", n, 0) for case in model.KINDS for n in tokens or [0]]
            continue
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not one of {', '.join((*KINDS, WHOLE_MODEL))}")
        if kind == "hybrid":
            found += [(kind, w, b) for w in solvers.WIDTHS[place] for b in solvers.BATCHES[place]]
            continue
        lengths = attention.LONG if kind == "window" else attention.TOKENS
        for count in tokens or lengths[place]:
            nonlinear = kind in ("reaction", "split")
            if tokens or not nonlinear or count <= attention.REACTION_UP_TO[place]:
                small = place == "cuda" and count <= 4_096
                found.append((kind, count, 8 if small else 1))
    return found


def header(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The machine, and the most that was seen of it."""
    gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or device,
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "ceilings": timing.ceilings(device, dtype),
    }


def rows(
    wanted: Sequence[Case],
    device: str,
    dtype: torch.dtype,
    found: dict[str, Any],
    config: Any = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield one row per case. A row that could not be measured has an entry "failed".

    Args:
        found: What `header` returns.
        config: What `model.config_of` returns, for cases of a whole model.
    """
    checked: dict[str, Any] = {}
    gpu = torch.device(device).type == "cuda"
    rounds = ROUNDS["cuda" if gpu else "cpu"]
    for kind, size, batch in wanted:
        try:
            if kind.startswith(WHOLE_MODEL):
                case = kind.removeprefix(f"{WHOLE_MODEL} ")
                measured = model.measure(
                    case, config, device=device, dtype=dtype, tokens=size or None, **options
                )
                yield measured | {"case": case, "kind": WHOLE_MODEL}
            elif kind == "hybrid":
                yield solvers.measure(batch, size, device=device, rounds=rounds)
            else:
                yield _checked(checked, kind, device, dtype) | attention.measure(
                    kind, size, batch, device=device, dtype=dtype, ceilings=found["ceilings"],
                    dense=attention.fits(size, batch, 8, device), rounds=rounds, **options,
                )  # fmt: skip
        except Exception as error:  # a kernel that fails must not take the other results with it
            name = "width" if kind == "hybrid" else "tokens"
            yield {
                "kind": kind, name: size, "batch": batch, "failed": f"{type(error).__name__}: {error}"
            }  # fmt: skip
        if gpu:
            torch.cuda.empty_cache()


def _checked(seen: dict[str, Any], kind: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The errors of a kind against float64, looked at once."""
    if kind not in seen:
        seen[kind] = attention.errors(kind, device=device, dtype=dtype)
    return {"errors": seen[kind]}
