"""Arguments to try functions with: mostly good, of every kind that is allowed, and some that are not.

A target draws its arguments from a `Maker`. What is allowed varies all the time: values (zeros, tiny,
large), layouts (transposed, strided, expanded), dtypes, sizes of batches down to nothing. What is not
allowed comes by the example's mood: in half of them nothing is odd, in the others one argument is, or
any may be. `tame` and `finite` say what the example may be held to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)
WRONG_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float16, torch.float64)
FILLS = ("normal", "normal", "normal", "zeros", "ones", "whole", "tiny", "large")
LAYOUTS = ("plain", "plain", "plain", "transposed", "strided", "expanded", "offset")


class Maker:
    """Draws one example's arguments.

    Attributes:
        finite: no NaN and no infinity was drawn.
        tame: nor anything else that is not within what the function documents.
        tensors: all that were drawn, to see that they stay as they are.
    """

    def __init__(self, draw: Callable[..., Any], sane: bool = False) -> None:
        self.draw = draw
        self.finite = self.tame = True
        self.tensors: list[Tensor] = []
        mood = 0 if sane else self.whole_number(0, 9)
        self._odd = (
            None if mood < 5 else self.pick((0, 1, 2, 0, 1, 3, 2, 4, 5, 6, 7)) if mood < 9 else -1
        )
        self._drawn = 0

    # Small choices

    def whole_number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def pick(self, options: Sequence[Any]) -> Any:
        """One of them; the first is the simplest."""
        return options[self.whole_number(0, len(options) - 1)]

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def chance(self, percent: int) -> bool:
        return self.whole_number(0, 99) >= 100 - percent

    def seed(self) -> int:
        return self.draw(st.integers(0, 2**32 - 1))

    def strange(self) -> bool:
        """Whether the argument that is drawn next is one that should be refused, or survived."""
        self._drawn += 1
        odd = self._odd == self._drawn - 1 or (self._odd == -1 and self.chance(25))
        self.tame &= not odd
        return odd

    # Arguments

    def number(self, low: float, high: float, odd: Sequence[Any] = ()) -> Any:
        """A float from low to high; or what is no such number."""
        if self.strange():
            wrong = (float("nan"), float("inf"), -1.0, 0.0, -float("inf"), 1e300, -1e300, 1e-300, "1", None,
                     2 + 1j, True, torch.tensor(0.5), torch.ones(2), np.float64(0.5), [1.0], 7, *odd)  # fmt: skip
            value = self.pick(wrong)
            if isinstance(value, float) and not np.isfinite(value):
                self.finite = False
            return value
        return low + (high - low) * self.pick((0.5, 1.0, 0.0, 0.25, 0.75, 0.1, 0.9))

    def whole(self, low: int, high: int, odd: Sequence[Any] = ()) -> Any:
        """An integer from low to high; or what is none."""
        if self.strange():
            return self.pick(
                (-1, 0, 2.5, 2.0, "3", None, True, float("nan"), -(2**40), torch.tensor(2), [1], *odd)
            )
        return self.whole_number(low, high)

    def choice(self, options: Sequence[Any], odd: Sequence[Any] = ()) -> Any:
        """One of some names; or another."""
        if self.strange():
            near = f"{options[0]}x"
            return self.pick((near, "", None, 3, str(options[0]).upper(), ["a"], b"key", *odd))
        return self.pick(options)

    def maybe(self, thing: Callable[[], Any]) -> Any:
        """None, or what is drawn."""
        return thing() if self.chance(50) else None

    def boolean(self) -> Any:
        return self.pick((None, "yes", 2, [])) if self.strange() else self.flag()

    def sizes(self, low: int, high: int, most: int = 3) -> tuple[int, ...]:
        """The sizes of low to high dimensions, a zero now and then."""
        return tuple(
            0 if self.chance(4) else self.whole_number(1, most)
            for _ in range(self.whole_number(low, high))
        )

    def tensor(
        self,
        shape: Sequence[int],
        dtypes: Sequence[torch.dtype] = WIDE,
        fill: str | None = None,
        layout: str | None = None,
        grad: bool = False,
    ) -> Any:
        """A tensor of that shape; or what is not quite one. fill: as in `filled`."""
        strange = self.strange()
        kind = self.pick(("value", "shape", "dtype", "device", "type")) if strange else ""
        if kind == "type":
            return self.pick((None, "tensor", 3.0, [[1.0, 2.0]], np.ones((2, 2)), [], object()))
        if kind == "shape":
            shape = self.pick((shape[1:], (*shape, 2), (1, *shape), (*shape[:-1], (*shape, 0)[-1] + 1),
                               (*shape[:-1], 0), (), (0,), (2, 3, 4, 5, 6)))  # fmt: skip
        dtype = self.pick(WRONG_DTYPES if kind == "dtype" else dtypes)
        fill = fill or self.pick(FILLS)
        if kind == "value":
            fill = self.pick(("nan", "inf", "huge", "low"))
            self.finite &= fill in ("huge", "low") and dtype.is_floating_point
        made = laid_out(filled(tuple(shape), dtype, fill, self.seed()), layout or self.pick(LAYOUTS))
        if kind == "device":
            made = made.to("meta")
        if grad and self.chance(15) and (made.is_floating_point() or made.is_complex()):
            made.requires_grad_()
        self.tensors.append(made)
        return made

    def bools(self, shape: Sequence[int]) -> Any:
        """A mask, mostly True."""
        if self.strange():
            return self.tensor_of(self.pick((torch.float32, torch.int64, torch.bool)), (*shape, 1))
        generator = torch.Generator().manual_seed(self.seed())
        mask = torch.rand(*shape, generator=generator) < self.pick((0.8, 1.0, 0.5, 0.0))
        made = laid_out(mask, self.pick(LAYOUTS))
        self.tensors.append(made)
        return made

    def integers(self, shape: Sequence[int], low: int, high: int) -> Any:
        """Integers from low to high; or others."""
        if self.strange():
            kind = self.pick(("float", "shape", "range", "meta", "type", "bool"))
            if kind == "type":
                return self.pick((None, "ids", [[1, 2]], 3))
            if kind in ("float", "bool"):
                return self.tensor_of(torch.float32 if kind == "float" else torch.bool, shape)
            made = torch.full(tuple(shape), high + 7 if self.flag() else -3)
            if kind == "shape":
                made = made.new_zeros((*shape, 2) if self.flag() else (0,))
            made = made.to("meta") if kind == "meta" else made
        else:
            generator = torch.Generator().manual_seed(self.seed())
            dtype = self.pick((torch.int64, torch.int64, torch.int32, torch.int16))
            made = torch.randint(low, high + 1, tuple(shape), generator=generator).to(dtype)
            made = laid_out(made, self.pick(LAYOUTS))
        self.tensors.append(made)
        return made

    def tensor_of(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Ones, kept an eye on."""
        made = torch.ones(tuple(shape), dtype=dtype)
        self.tensors.append(made)
        return made

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed())


def filled(shape: tuple[int, ...], dtype: torch.dtype, fill: str, seed: int) -> Tensor:
    """A tensor of that dtype with values of that kind; the last three are finite but not tame, or not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if not (dtype.is_floating_point or dtype.is_complex):
        return (3 * x).abs().to(dtype)
    most = torch.finfo(dtype).max
    if fill == "zeros":
        x = torch.zeros_like(x)
    elif fill == "ones":
        x = torch.ones_like(x)
    elif fill == "whole":
        x = x.round()
    elif fill == "tiny":
        x = 1e-30 * x
    elif fill == "large":
        x = 30 * x
    elif fill == "huge":
        x = most * x.tanh()
    elif fill == "low":
        x = torch.full_like(x, -most)
    elif fill in ("nan", "inf") and x.numel():
        x.view(-1)[seed % x.numel()] = float(fill)
    return x.to(dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another order of memory; expanded: the first entry of the first dimension."""
    if layout == "transposed" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided" and x.dim() >= 1:
        return torch.stack((x, x), -1)[..., 0]
    if layout == "offset" and x.dim() >= 1:
        return torch.cat((x[:1], x))[len(x[:1]) :]
    if layout == "expanded" and x.dim() >= 1 and x.shape[0]:
        return x[:1].expand(x.shape)
    return x
