"""Schemas of tensors in files: names, shapes, dtypes and whether numbers are finite.

>>> single = (torch.float32,)
>>> specs = {"u": TensorSpec(("steps", 3), single), "t": TensorSpec(("steps",), single)}
>>> check_tensors({"u": torch.zeros(5, 3), "t": torch.zeros(4)}, specs, "x.safetensors", advice="Stop.")
Traceback (most recent call last):
ValueError: x.safetensors: t is float32 [4], not float32 [steps = 5]. Stop.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attractor.storage.schema import ADVICE

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FINITE, NO_NAN, ANY = "finite ones", "all but NaN", ""  # what the numbers of a tensor may be


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor may be.

    Attributes:
        shape: Whole numbers, and names of sizes, which are equal wherever a name occurs.
        dtypes: The dtypes that are allowed.
        values: `FINITE`, `NO_NAN` or `ANY`.
    """

    shape: tuple[int | str, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    values: str = FINITE

    def mismatch(self, x: Tensor, sizes: dict[str, int]) -> str | None:
        """Return how a tensor differs, or None; `sizes` are those known by name, and gain new ones."""
        fits = x.dim() == len(self.shape)
        for own, size in zip(x.shape, self.shape):
            fits = fits and own == (sizes.setdefault(size, own) if isinstance(size, str) else size)
        if not fits or x.dtype not in self.dtypes:
            named = {name: f"{name} = {size}" for name, size in sizes.items()}
            shape = ", ".join(named.get(str(size), str(size)) for size in self.shape)
            dtypes = " or ".join(map(_name, self.dtypes))
            return f"is {_name(x.dtype)} {list(x.shape)}, not {dtypes} [{shape}]"
        if self.values and (x.is_floating_point() or x.is_complex()) and x.device.type != "meta":
            x = x.float() if x.dtype.itemsize < 2 else x  # torch cannot test 8 bits
            good = torch.isfinite(x) if self.values == FINITE else ~torch.isnan(x)
            if not bool(good.all()):
                return f"has {int((~good).sum()):,} numbers that are NaN or infinite, not {self.values}"
        return None


def specs_of(module: nn.Module) -> dict[str, TensorSpec]:
    """Return the schema of a module's state: parameters are finite, and buffers are not NaN."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        name: TensorSpec(tuple(x.shape), (x.dtype,), FINITE if name in parameters else NO_NAN)
        for name, x in module.state_dict().items()
        if isinstance(x, Tensor)
    }


def check_tensors(
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, TensorSpec],
    source: object,
    error: type[Exception] = ValueError,
    *,
    optional: Collection[str] = (),
    advice: str = ADVICE,
) -> None:
    """Raise an error of a class unless the tensors of a source are those of `specs`, and no others.

    Args:
        optional: Names of specs whose tensors may be missing.
    """
    sizes: dict[str, int] = {}
    lacking = sorted(name for name in specs if name not in tensors and name not in optional)
    unknown = sorted(name for name in tensors if name not in specs)
    mismatches = {name: specs[name].mismatch(x, sizes) for name, x in tensors.items() if name in specs}
    different = [f"{name} {fault}" for name, fault in mismatches.items() if fault]
    faults = [f"it lacks {_few(lacking)}"] if lacking else []
    faults += [f"it also has {_few(unknown)}"] if unknown else []
    faults += [_few(different)] if different else []
    if faults:
        raise error(f"{source}: {'; '.join(faults)}. {advice}")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name[:160] for name in names[:3]) + more


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
