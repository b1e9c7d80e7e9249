"""Coefficients for other lengths (Appendix E.1 of the paper): alpha ~ 1/T², dt ~ 1/T, c ~ T^gamma."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from attractor.attention.pdes.pde import PDE, as_equation
from attractor.common.checks import check_number, is_whole

# beta has the power of alpha, which preserves their ratio and therefore non-negative maps.
POWERS = {"alpha": -2.0, "beta": -2.0}


def for_length(
    pde: str | PDE, tokens: int, *, reference: int = 512, dt: float = 1.0, gamma: float = 0.0
) -> tuple[Any, float]:
    """Return a PDE for texts of `tokens` tokens, given one for texts of `reference`, and its step size.

    alpha and beta are multiplied by ``(reference / tokens) ** 2``, dt by ``reference / tokens``, and the
    c of a wave by ``(tokens / reference) ** gamma``.

    In a fixed number of steps, a peak spreads over ``sqrt(2 alpha steps dt)`` tokens, or ``c steps dt``
    for a wave. This width is proportional to ``T ** -1.5``, or ``T ** (gamma - 1)`` for a wave, so the
    maps of long texts hardly change. For an equal width at all lengths, do not scale alpha and dt. A
    wave with gamma up to 1 remains stable if it is stable at `reference`.

    Args:
        pde: An equation whose coefficients are numbers, or the name of one.
        tokens: Number of tokens that the result is for.
        reference: Number of tokens that `pde` and `dt` are for.
        dt: Step size at `reference` tokens.
        gamma: Power of the length to which the speed of a wave is proportional.

    Returns:
        The PDE and its step size.

    Raises:
        ValueError: The result is unstable, or the paper has no rule for a coefficient.

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
            f"{pde!r} must be a dataclass with no other coefficients than {', '.join(powers)}, because "
            "the paper has no rule for others"
        )
    try:
        result = replace(equation, **{name: x * ratio ** powers[name] for name, x in numbers.items()})
    except OverflowError:
        raise ValueError(
            f"coefficients for {tokens} tokens instead of {reference} are beyond all numbers; use a "
            f"smaller gamma than {gamma:g}"
        ) from None
    result.check(dt / ratio)
    return result, dt / ratio
