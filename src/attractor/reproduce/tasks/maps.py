"""Attention maps under PDEs: measurements of the quantities in the PDE attention paper's theorems.

The maps are softmax maps of random queries and keys, in float64 on the CPU. They are computed and
measured by `attractor.attention.diagnostics`.

All configurations have "tokens" and "sharpness", the standard deviation of the scores.
"""

import math
from typing import Any

import torch
from torch import Tensor

from attractor.attention.diagnostics import hybrid_errors, trace
from attractor.attention.pdes import PDE, Line, evolve, get_pde
from attractor.attention.performer import RandomFeatures, performer_dense
from attractor.reproduce.tasks import Context, Outcome

POINTS = 25  # maximum number of points of a curve


def spreading(config: dict[str, Any], context: Context) -> Outcome:
    """Measure how far attention spreads in pseudo-time: Theorem 1, and the third part of Theorem D.2.

    Each query attends to one random key in the middle half, so that the boundaries are far away. The
    square of the range is the variance of the key position under a row's weights, minus that of the
    initial map, as a mean over rows.

    Configuration:
        pde: name of a PDE, which has its default coefficients.
        steps, dt: number and size of the steps.

    Metrics:
        exponent: p of the growth ``range ~ t^p``.
        rate: ``range² / (2 alpha t)`` at the end, which is 1 for diffusion without a boundary.
        reach: largest distance in keys at which a single weight has an effect after four steps.
        tail: ratio of the effects at distances 4 and 3.

    Curves: time, range.
    """
    generator = torch.Generator().manual_seed(context.seed)
    tokens = config["tokens"]
    key = torch.randn(1, 4, tokens, 32, generator=generator, dtype=torch.float64)
    targets = torch.randint(tokens // 4, tokens - tokens // 4, (tokens,), generator=generator)
    pde: Any = get_pde(config["pde"])()
    query = config["sharpness"] * key[..., targets, :]
    evolution = trace(query, key, pde=pde, steps=config["steps"], dt=config["dt"])
    squared_range = (
        (evolution.spread.square() - evolution.spread[:1].square()).mean((1, 2)).clamp(min=0)[1:]
    )
    times = evolution.times[1:]
    late = times >= times[-1] / 20
    x, y = times[late].log(), squared_range[late].sqrt().log()
    exponent = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    alpha = getattr(pde, "alpha", math.nan)
    effect = _effect(pde, tokens, 4)
    return {
        "metrics": {
            "exponent": exponent.item(),
            "rate": (squared_range[-1] / (2 * alpha * times[-1])).item(),
            "reach": float((effect > 0).sum() - 1),
            "tail": (effect[4] / effect[3]).item(),
        },
        "curves": {"time": _thin(times), "range": _thin(squared_range.sqrt())},
    }


def smoothing(config: dict[str, Any], context: Context) -> Outcome:
    """Measure whether maps become smoother and more uniform with each step: Theorem 2.

    Configuration:
        pde, steps, dt, causal: arguments of `trace`.

    Metrics:
        falls: share of the steps in which both the roughness ``|L A|²`` and the variance fall.
        smoothness, variance: ``|L A|²`` and the variance at the end, relative to the start.
        mass: maximum deviation of a row's sum from 1.

    Curves: time, smoothness, variance.
    """
    query, key = _queries(config, context)
    motion: Any = {"pde": config["pde"], "steps": config["steps"], "dt": config["dt"]}
    evolution = trace(query, key, is_causal=config["causal"], **motion)
    smoothness, variance = evolution.smoothness, evolution.variance
    falls = (smoothness.diff(dim=0) < 0) & (variance.diff(dim=0) < 0)
    share = lambda x: (x / x[:1]).mean((1, 2))
    return {
        "metrics": {
            "falls": falls.double().mean().item(),
            "smoothness": share(smoothness)[-1].item(),
            "variance": share(variance)[-1].item(),
            "mass": (evolution.row_mass - 1).abs().max().item(),
        },
        "curves": {
            "time": _thin(evolution.times),
            "smoothness": _thin(share(smoothness)),
            "variance": _thin(share(variance)),
        },
    }


def depth(config: dict[str, Any], context: Context) -> Outcome:
    """Compare L layers of one step each with one layer of L steps and with the exact flow: D.4.

    Distances are Frobenius norms, relative to that of the initial map.

    Configuration:
        alpha: coefficient of diffusion.
        time: pseudo-time of all layers together.
        layers: number L of layers.

    Metrics:
        error: distance between L layers and the exact flow over the same time.
        additive: distance between L layers of one step and one layer of L steps.
        high, low: remaining share of the highest and of the lowest non-constant frequency.
        softmax: distance between the map of L steps and the last map of a transformer whose layers each
            compute a softmax map and take one step.
        dt: size of a step.
    """
    tokens, layers, alpha = config["tokens"], config["layers"], config["alpha"]
    pde, dt = get_pde("diffusion")(alpha=alpha), config["time"] / config["layers"]
    query, key = _queries(config, context)
    first = _softmax(query, key)
    composed = first
    for _ in range(layers):
        composed = evolve(pde, composed, Line(-1), 1, dt)
    single_layer = evolve(pde, first, Line(-1), layers, dt)
    laplacian = Line(-1).laplacian(torch.eye(tokens, dtype=torch.float64))
    flow = first @ torch.linalg.matrix_exp(alpha * config["time"] * laplacian)
    modes = torch.linalg.eigh(laplacian).eigenvectors  # from the highest frequency to the constant
    remainder = torch.linalg.vector_norm(composed @ modes, dim=(0, 1, 2)) / torch.linalg.vector_norm(
        first @ modes, dim=(0, 1, 2)
    )
    last = evolve(pde, _softmax(*_layers(query, key, pde, layers, dt)), Line(-1), 1, dt)
    return {
        "metrics": {
            "error": _apart(composed, flow, first),
            "additive": _apart(composed, single_layer, first),
            "high": remainder[0].item(),
            "low": remainder[-2].item(),
            "softmax": _apart(last, single_layer, first),
            "dt": dt,
        }
    }


def hybrid(config: dict[str, Any], context: Context) -> Outcome:
    """Compare an approximate map with the exact softmax map after diffusion: Proposition D.5.

    Distances are relative to the norm of the exact map.

    Configuration:
        alpha, dt: coefficient of diffusion and size of a step.
        cheap: the approximate map: "exact", "largest" for the larger half of each row's entries,
            "window" or "performer".
        window, features: width of the window, and number of random features.
        decay: ``alpha lambda_min T``, from which the number of steps follows.

    Metrics:
        start: distance before the first step.
        end: distance of the diffused approximate map from the initial exact map. The proposition bounds
            it by start plus terms of the order of ``exp(-decay)`` and dt.
        truth: distance from the exact map after the same steps.
        stationary: distance of the exact map after the steps from the initial one.
        bound: ``start + exp(-decay) + dt |A'|``, where the second constant is the change of the map per
            unit of time.
        excess: ``end - bound``.
        grows: 1 if the distance "truth" increases in any step.

    Curves: time, start (distance from the initial exact map), truth.
    """
    tokens, alpha, dt = config["tokens"], config["alpha"], config["dt"]
    pde = get_pde("diffusion")(alpha=alpha)
    lowest = 2 - 2 * math.cos(math.pi / tokens)  # smallest positive eigenvalue of minus the Laplacian
    steps = math.ceil(config["decay"] / (alpha * lowest * dt))
    query, key = _queries(config, context)
    exact = _softmax(query, key)
    cheap = _cheap(config, query, key, exact)
    to_start, to_truth = hybrid_errors(exact, cheap, Line(-1), pde=pde, steps=steps, dt=dt)
    size = torch.linalg.vector_norm(exact, dim=(-2, -1))
    to_start, to_truth = ((x / size).mean((1, 2)) for x in (to_start, to_truth))
    evolved = evolve(pde, exact, Line(-1), steps, dt)
    change = alpha * torch.linalg.vector_norm(Line(-1).laplacian(exact), dim=(-2, -1)) / size
    bound = to_start[0] + math.exp(-config["decay"]) + dt * change.mean()
    return {
        "metrics": {
            "start": to_start[0].item(),
            "end": to_start[-1].item(),
            "truth": to_truth[-1].item(),
            "stationary": _apart(evolved, exact, exact),
            "bound": bound.item(),
            "excess": (to_start[-1] - bound).item(),
            "grows": float((to_truth.diff() > 1e-12).any()),
        },
        "curves": {
            "time": _thin(dt * torch.arange(steps + 1)),
            "start": _thin(to_start),
            "truth": _thin(to_truth),
        },
    }


def _queries(config: dict[str, Any], context: Context) -> tuple[Tensor, Tensor]:
    """Return random queries and keys ``[1, 4, tokens, 32]``; scores have the deviation "sharpness"."""
    generator = torch.Generator().manual_seed(context.seed)
    query, key = torch.randn(2, 1, 4, config["tokens"], 32, generator=generator, dtype=torch.float64)
    return config["sharpness"] * query, key


def _softmax(query: Tensor, key: Tensor) -> Tensor:
    return trace(query, key, pde="diffusion", steps=0).maps[0]


def _layers(query: Tensor, key: Tensor, pde: PDE, layers: int, dt: float) -> tuple[Tensor, Tensor]:
    """Return queries and keys of the last layer, which are mixed by the map of each previous layer."""
    for _ in range(layers - 1):
        evolved = evolve(pde, _softmax(query, key), Line(-1), 1, dt)
        query, key = query + evolved @ query, key + evolved @ key
    return query, key


def _effect(pde: PDE, tokens: int, steps: int) -> Tensor:
    """Return the absolute value at distances 0, 1, 2 ... from a unit weight in the middle."""
    single = torch.zeros(1, tokens, dtype=torch.float64)
    single[0, tokens // 2] = 1.0
    return evolve(pde, single, Line(-1), steps, 1.0)[0, tokens // 2 :].abs()


def _cheap(config: dict[str, Any], query: Tensor, key: Tensor, exact: Tensor) -> Tensor:
    if config["cheap"] == "exact":
        return exact
    if config["cheap"] == "largest":
        mask = exact >= exact.median(-1, keepdim=True).values
        return exact * mask / (exact * mask).sum(-1, keepdim=True)
    if config["cheap"] == "window":
        side = config["window"] // 2
        return trace(query, key, pde="diffusion", steps=0, window=(side, side)).maps[0]
    generator = torch.Generator().manual_seed(0)
    features = RandomFeatures(query.shape[-1], config["features"], generator=generator).double()
    return performer_dense(query, key, key, features=features)[1]


def _apart(a: Tensor, b: Tensor, size: Tensor) -> float:
    """Return the distance of maps a and b relative to the norm of `size`, as a mean over heads."""
    norm = lambda u: torch.linalg.vector_norm(u, dim=(-2, -1))
    return (norm(a - b) / norm(size)).mean().item()


def _thin(x: Tensor) -> list[float]:
    places = torch.linspace(0, len(x) - 1, min(POINTS, len(x))).round().long()
    return [float(f"{v:.6g}") for v in x[places].tolist()]
