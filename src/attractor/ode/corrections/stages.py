"""Stages: a correction computed from the stages of the step."""

from typing import Any, ClassVar

from torch import Tensor

from attractor.common.checks import check_whole
from attractor.core.step import Step
from attractor.ode.corrections.correction import Correction
from attractor.ode.corrections.network import Affine, Network, check_sizes, joined


class Stages(Correction):
    """A linear map, or a network, of the state, the first stage and the differences of the stages.

    A Runge-Kutta step has computed its stages already. Their differences carry the derivatives of which
    the error of the step consists, where the slope is only their weighted mean. With ``width=0`` the
    correction is one linear map: the step then is a Runge-Kutta scheme whose weights are matrices, at
    almost the cost of the plain one. It does not vanish with the step.

    Args:
        dim: Size of a state.
        width: Width of the network; 0 for a linear map.
        stages: Number of stages of the scheme, its `rate_calls`: 4 for "rk4", 6 for "dopri5".
        depth: Number of layers of the network.
        activation, skip: Of the network, by default cubic polynomials, and a linear map beside them.
            Other options (period, parameters, precision, device, dtype): see `Network`.
    """

    needs_stages = True
    fit_defaults: ClassVar[dict[str, Any]] = {"width": 512, "activation": "cubic", "skip": True}

    def __init__(
        self,
        dim: int,
        width: int = 0,
        stages: int = 4,
        depth: int = 2,
        activation: str = "cubic",
        skip: bool = True,
        period: float | None = None,
        parameters: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, stages=stages)
        check_whole("width", width, 0)
        inputs = dim * (1 + stages)
        self.config = {"dim": dim, "width": width, "stages": stages, "depth": depth,
                       "activation": activation, "skip": skip, "period": period,
                       "parameters": parameters}  # fmt: skip
        if width:
            self.net = Network(
                inputs, dim, width, depth, activation, skip, period=period, parameters=parameters,
                **options,
            )  # fmt: skip
            self.config = {"dim": dim, "stages": stages, **self.net.config}
        else:
            factory = {key: options.pop(key) for key in ("device", "dtype") if key in options}
            if options:
                raise TypeError(f"a linear map of the stages has no option {', '.join(options)}")
            self.net = Affine(inputs, dim, period, parameters, **factory)

    def _seen(self, step: Step) -> Tensor:
        """Return the state, the first stage, and the differences of the other stages from it."""
        if len(step.stages) != self.config["stages"]:
            raise ValueError(
                f"this correction sees {self.config['stages']} stages, and the step has "
                f"{len(step.stages)}; it belongs to a Runge-Kutta scheme with as many rate calls, and "
                "is called with a Step that has its stages"
            )
        first, *others = step.stages
        return joined(step.u, first, *(k - first for k in others))
