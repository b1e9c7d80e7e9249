"""The PDE of an attention module: the submodule that `add_pde` adds, and its entry in a config."""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attractor.attention import kernels, pde_attention
from attractor.attention.pdes import BY_NAME, PDE, LearnedPDE, get_pde
from attractor.attention.pdes.evolution import Evolution
from attractor.attention.validation import WALLS
from attractor.storage import schema
from attractor.train.tensors import CheckpointError, described

SETTING = "pde_attention"  # the entry of a model's config that describes the PDE of `add_pde`
VERSION = 2  # of that entry; version 1 has no number, and its coefficients were saved as logits
NUMBERS = schema.any_of(schema.number(), schema.flag, schema.listing(schema.number(), 1, 10_000))
SCHEMA = schema.record(
    {
        "pde": schema.text(choices=BY_NAME), "coefficients": schema.mapping(NUMBERS),
        "steps": schema.number(0, 10_000, whole=True), "dt": schema.number(),
    },
    {
        "per_head": schema.flag, "learn": schema.flag, "walls": schema.text(choices=WALLS),
        "version": schema.number(1, whole=True), "modules": schema.number(1, whole=True),
    },
)  # fmt: skip


@dataclass(eq=False)
class Setting:
    """An equation and its steps.

    Attributes:
        equation, steps, dt, walls, method: As in `pde_attention`, which checks them.
        one_query: Cached results of `takes_one_query`.
    """

    equation: PDE
    steps: int
    dt: float
    walls: str = "mask"
    method: str = "auto"
    one_query: dict[Any, bool] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        fields = getattr(self.equation, "__dict__", {}).values()
        like = next((value for value in fields if isinstance(value, Tensor)), torch.zeros(1))
        one = torch.zeros(1, like.numel(), 1, 1, device=like.device)
        pde_attention(one, one, one, **self.options())  # checks the options

    def options(self) -> dict[str, Any]:
        """Return the arguments of `pde_attention`."""
        return {
            "pde": self.equation,
            "steps": self.steps,
            "dt": self.dt,
            "walls": self.walls,
            "method": self.method,
        }

    def evolution(self) -> Evolution:
        """Return the equation with its steps."""
        return Evolution.of(self.equation, self.steps, self.dt)

    def takes_one_query(self, query: Tensor, key: Tensor, value: Tensor, evolution: Evolution) -> bool:
        """Return whether `kernels.attend_row` supports such tensors; cached per dtype and shape."""
        kind = query.dtype, query.device, query.shape[1::2], key.shape[1], value.shape[-1]
        if kind not in self.one_query:
            supported = self.walls == "mask" and self.method in ("auto", "fused")
            self.one_query[kind] = supported and not kernels.why_not_row(query, key, value, evolution)
        return self.one_query[kind]


class Refinement(nn.Module):
    """The submodule `pde` that `add_pde` adds to an attention module; calling it returns the PDE.

    Args:
        setting: The equation and its steps.
        heads: Number of heads with coefficients of their own, or None for one set of coefficients.
        learn: Whether the coefficients are parameters.
    """

    def __init__(self, setting: Setting, heads: int | None, learn: bool) -> None:
        super().__init__()
        if not isinstance(setting, Setting):
            raise TypeError(f"setting is a {type(setting).__name__}; pass a Setting")
        self.setting = setting
        self.learned = LearnedPDE(setting.equation, heads, setting.dt) if learn else None
        self._evolution: tuple[list[Any], Evolution] | None = None

    def forward(self) -> PDE:
        """Return the PDE with its current coefficients."""
        return self.setting.equation if self.learned is None else self.learned()

    @torch.no_grad()
    def evolution(self) -> Evolution:
        """Return the current PDE with its steps, without gradients.

        Until a coefficient changes, this is the same object with the tables computed from it.
        """
        if self.learned is None:
            return self.setting.evolution()
        parameters = list(self.learned.parameters())
        if any(x.is_inference() for x in parameters):  # these have no version
            return Evolution(self.learned(), self.setting.steps, self.setting.dt)
        versions = [(x.data_ptr(), x._version) for x in parameters]
        if self._evolution is None or self._evolution[0] != versions:
            constant = Evolution(self.learned(), self.setting.steps, self.setting.dt, constant=True)
            self._evolution = versions, constant
        return self._evolution[1]


def refinement_of(module: nn.Module) -> Any:
    """Return the `Refinement` of an attention module, or None.

    Where peft has a wrapper in its place (``modules_to_save=["pde"]``), return the wrapper: its
    attributes and its forward are those of the `Refinement` of the active adapter.

    Raises:
        ValueError: The module is in training mode, and peft has frozen its coefficients.
    """
    refinement: Any = module._modules.get("pde")
    if not isinstance(getattr(refinement, "setting", None), Setting):
        return None
    learned = refinement.learned if isinstance(refinement, Refinement) else None
    if learned is not None and not torch.compiler.is_compiling():
        is_trained = module.training and torch.is_grad_enabled()
        if is_trained and not any(parameter.requires_grad for parameter in learned.parameters()):
            _check_adapter(module)
    return refinement


def _check_adapter(module: nn.Module) -> None:
    """Raise or warn if peft may have frozen the coefficients of a module."""
    if "peft" not in sys.modules:
        return
    message = (
        "peft has frozen the coefficients of this model's PDE, and will not save them in its adapter: "
        'pass modules_to_save=["pde"] to the config of the adapter'
    )
    if has_adapter(module):
        raise ValueError(f"{message}, and freeze these copies if they are to stay as they are")
    warnings.warn(f"the coefficients are frozen. If this model has an adapter: {message}", stacklevel=4)


def has_adapter(model: nn.Module) -> bool:
    """Return whether a module is a model of peft, or contains layers of an adapter."""
    models, layers = (sys.modules.get(f"peft.{name}") for name in ("peft_model", "tuners.tuners_utils"))
    if models is None or layers is None:
        return False
    kinds = (models.PeftModel, layers.BaseTunerLayer)
    return any(isinstance(part, kinds) for part in model.modules())


def from_config(saved: Mapping[str, Any]) -> tuple[PDE, dict[str, Any]]:
    """Return the equation and the options of `add_pde` that the entry `SETTING` of a config holds.

    Raises:
        CheckpointError: The entry does not describe a PDE.
    """
    schema.check(saved, SCHEMA, f"the entry {SETTING!r} of the model's config", CheckpointError)
    tensor = lambda c: torch.tensor(c)[:, None, None] if isinstance(c, list) else c
    options = {name: x for name, x in saved.items() if name not in ("version", "modules")}
    coefficients = {name: tensor(c) for name, c in options.pop("coefficients").items()}
    with described(f"the entry {SETTING!r} of the model's config", "a PDE"):
        return get_pde(options.pop("pde"))(**coefficients), options
