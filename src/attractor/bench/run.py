"""All benchmarks in one run, one row per case; a case that fails does not stop the others."""

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attractor.bench import attention, model, solvers, timing

KINDS = (*attention.KINDS, "hybrid")
WHOLE_MODEL = "model"  # not measured by default, because it needs transformers and minutes
ROUNDS = {"cuda": 15, "cpu": 5}
Case = tuple[str, int, int]  # kind, tokens (0: the default) and batch; or kind, width and batch


def cases(kinds: Sequence[str], device: str, tokens: Sequence[int] = ()) -> list[Case]:
    """Return the cases of some kinds on a device; `tokens` replaces the default lengths."""
    place = "cuda" if torch.device(device).type == "cuda" else "cpu"
    selection: list[Case] = []
    for kind in kinds:
        if kind == WHOLE_MODEL:
            selection += [(f"{WHOLE_MODEL} {case}", n, 0) for case in model.KINDS for n in tokens or [0]]
            continue
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not one of {', '.join((*KINDS, WHOLE_MODEL))}")
        if kind == "hybrid":
            selection += [(kind, w, b) for w in solvers.WIDTHS[place] for b in solvers.BATCHES[place]]
            continue
        lengths = attention.LONG if kind == "window" else attention.TOKENS
        for count in tokens or lengths[place]:
            nonlinear = kind in ("reaction", "split")
            if tokens or not nonlinear or count <= attention.REACTION_UP_TO[place]:
                small = place == "cuda" and count <= 4_096
                selection.append((kind, count, 8 if small else 1))
    return selection


def header(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return device, versions and the measured ceilings of the machine."""
    gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or device,
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "ceilings": timing.ceilings(device, dtype),
    }


def rows(
    case_list: Sequence[Case],
    device: str,
    dtype: torch.dtype,
    machine: dict[str, Any],
    config: Any = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield one row per case. A row that could not be measured has an entry "failed".

    Args:
        case_list: The cases.
        device, dtype: Device and dtype of attention and models.
        machine: The result of `header`.
        config: The result of `model.config_of`, for cases of a whole model.
        options: Further arguments of the measurements, such as `steps`.
    """
    errors: dict[str, Any] = {}
    gpu = torch.device(device).type == "cuda"
    rounds = ROUNDS["cuda" if gpu else "cpu"]
    for kind, size, batch in case_list:
        try:
            if kind.startswith(WHOLE_MODEL):
                case = kind.removeprefix(f"{WHOLE_MODEL} ")
                row = model.measure(
                    case, config, device=device, dtype=dtype, tokens=size or None, **options
                )
                yield row | {"case": case, "kind": WHOLE_MODEL}
            elif kind == "hybrid":
                yield solvers.measure(batch, size, device=device, rounds=rounds)
            else:
                yield _errors_of(errors, kind, device, dtype) | attention.measure(
                    kind, size, batch, device=device, dtype=dtype, ceilings=machine["ceilings"],
                    dense=attention.fits(size, batch, 8, device), rounds=rounds, **options,
                )  # fmt: skip
        except Exception as error:  # a kernel that fails must not stop the other cases
            name = "width" if kind == "hybrid" else "tokens"
            yield {
                "kind": kind, name: size, "batch": batch, "failed": f"{type(error).__name__}: {error}"
            }  # fmt: skip
        if gpu:
            torch.cuda.empty_cache()


def _errors_of(errors: dict[str, Any], kind: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the errors of a kind against float64, computed once."""
    if kind not in errors:
        errors[kind] = attention.errors(kind, device=device, dtype=dtype)
    return {"errors": errors[kind]}
