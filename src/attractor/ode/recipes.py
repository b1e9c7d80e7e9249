"""How `fit` finds the weights of a correction: recipes, and the options of each.

>>> from attractor.ode import Paper, fit, systems
>>> solver = fit(
...     systems.Logistic(), dt=0.5, horizon=2.0, width=16, trajectories=20, scheme="euler",
...     recipe=Paper(epochs=300),
... )
>>> [row["epoch"] for row in solver.history[:2]]
[0, 1]
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from attractor.common.checks import check_number, check_whole


@dataclass(frozen=True)
class Ridge:
    """Recipe "default": random hidden weights and a last layer found by ridge regression.

    The errors of plain steps along fine trajectories are computed in float64. The hidden weights of the
    network are random for standardised inputs, and its last layer (with a linear skip connection) is
    solved for. The scale of the weights and the penalty are those with the smallest error on *rollouts*
    of held-out trajectories. This takes seconds and has no training loop.

    Attributes:
        adam_steps: Number of steps in which the hidden weights are trained as well, before the last
            layer is solved. Held-out rollouts decide when to stop.
    """

    name: ClassVar[str] = "default"
    adam_steps: int = 0

    def __post_init__(self) -> None:
        check_whole("adam_steps", self.adam_steps, 0)


@dataclass(frozen=True)
class Paper:
    """Recipe "paper": Algorithm 1 of the AttNS paper.

    It has teacher-forced pairs, the mean square error times `loss_scale`, float32, and no normalisation.
    The paper prints no optimiser, so this is Adam at 1e-3 with a cosine to 0 and batches of 16,384.

    Attributes:
        epochs: Number of epochs.
        loss_scale: The factor lambda of the loss in the paper's Eq. 7.
    """

    name: ClassVar[str] = "paper"
    epochs: int = 500
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        check_number("loss_scale", self.loss_scale)
        if self.loss_scale <= 0:
            raise ValueError(f"loss_scale = {self.loss_scale} must be a positive number")


Recipe: TypeAlias = Ridge | Paper
BY_NAME: dict[str, type[Recipe]] = {kind.name: kind for kind in (Ridge, Paper)}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """Return the recipe with that name and its usual options, or the recipe itself.

    Raises:
        ValueError: No recipe has this name.
    """
    if isinstance(recipe, Ridge | Paper):
        return recipe
    if not isinstance(recipe, str) or recipe not in BY_NAME:
        raise ValueError(
            f"recipe = {recipe!r}; it is 'default' or 'paper', or with options Ridge(...) or Paper(...) "
            "of attractor.ode"
        )
    return BY_NAME[recipe]()
