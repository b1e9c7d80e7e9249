"""The paper's advice on sequence length (its Appendix E.1): alpha ~ 1/T², dt ~ 1/T, c ~ T^gamma."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from attractor.attention.pdes.pde import PDE, as_equation
from attractor.core.checks import check_number, is_whole

# beta goes with alpha: that keeps their balance, and an advection that keeps maps non-negative does.
POWERS = {"alpha": -2.0, "beta": -2.0}


def for_length(
    pde: str | PDE, tokens: int, *, reference: int = 512, dt: float = 1.0, gamma: float = 0.0
) -> tuple[Any, float]:
    """Return a PDE for texts of `tokens` tokens, given one for texts of `reference`, and its step size.

    alpha and beta are multiplied by ``(reference / tokens) ** 2``, dt by ``reference / tokens``, a
    wave's c by ``(tokens / reference) ** gamma``.

    Consequence: in a fixed number of steps a peak spreads over ``sqrt(2 alpha steps dt)`` tokens
    (a wave: ``c steps dt``), so this width shrinks like ``T ** -1.5`` (a wave: like ``T ** (gamma -
    1)``), both in tokens and against the length of the text. Long texts are left almost as softmax
    made them; for the same width at every length, keep alpha and dt as they are. A wave with gamma up
    to 1 stays within its limit if it is within it at `reference`.

    Args:
        pde: An equation whose coefficients are numbers, or the name of one.
        tokens: Number of tokens that the result is for.
        reference: Number of tokens that `pde` and `dt` are for.
        dt: Step size at `reference` tokens.
        gamma: Power of the length with which a wave's speed grows.

    Returns:
        The PDE and its step size.

    Raises:
        ValueError: They are not stable, or the paper has no rule for a coefficient.

    >>> for_length("diffusion", 1024, reference=512)
    (Diffusion(alpha=0.025), 0.5)
    """
    equation = as_equation(pde)
    check_number("dt", dt, 0.0)
    check_number("gamma", gamma)
    if not is_whole(tokens) or not is_whole(reference) or tokens < 1 or reference < 1:
        raise ValueError(f"tokens = {tokens} and reference = {reference} must be at least 1")
    ratio = tokens / reference
    powers = {**POWERS, "c": gamma}
    numbers = {
        field.name: getattr(equation, field.name)
        for field in (fields(equation) if is_dataclass(equation) else ())
        if not isinstance(getattr(equation, field.name), bool)
    }
    if not numbers or not set(numbers) <= set(powers):
        raise ValueError(
            f"{pde!r} must be a dataclass with no other coefficients than {', '.join(powers)}: for "
            "others the paper has no advice"
        )
    try:
        result = replace(equation, **{name: x * ratio ** powers[name] for name, x in numbers.items()})
    except OverflowError:
        raise ValueError(
            f"coefficients for {tokens} tokens instead of {reference} are beyond all numbers; "
            f"gamma = {gamma:g} is too much"
        ) from None
    result.check(dt / ratio)
    return result, dt / ratio
