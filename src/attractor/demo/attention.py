"""An attention map that evolves under four PDEs, with and without walls at the edge of its mask."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attractor.attention import pdes
from attractor.attention.diagnostics import PDETrace, trace

TOKENS, STEPS = 32, 12
EQUATIONS: dict[str, Any] = {
    "diffusion": pdes.Diffusion(alpha=0.2),
    "wave": pdes.Wave(c=0.4),
    "reaction-diffusion": pdes.ReactionDiffusion(alpha=0.2, beta=0.1),
    "advection-diffusion": pdes.AdvectionDiffusion(alpha=0.2, beta=-0.15),
}
WALLS = {"walls": "mask", "no walls": "sequence"}
SCALE = 10_000  # maps are stored as integers in units of 1 / SCALE
Tell = Callable[[str, float], None]


def run(seed: int, device: str, tell: Tell, small: bool) -> dict[str, Any]:
    """Compute the map after each step, its row sums, and the weight that leaks."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(TOKENS, 24, generator=generator, dtype=torch.float64)
    earlier = (torch.rand(TOKENS, generator=generator) * torch.arange(TOKENS)).long()
    # Each token attends to itself and to one earlier token.
    queries = 0.75 * keys + 0.75 * keys[earlier]
    query, key = (x.to(device)[None, None] for x in (queries, keys))
    results: dict[str, Any] = {"tokens": TOKENS, "steps": STEPS, "pdes": {}}
    maps: dict[str, Any] = {}
    for i, (name, pde) in enumerate(EQUATIONS.items()):
        tell(f"attention under {name}", i / len(EQUATIONS))
        results["pdes"][name], maps[name] = {}, {}
        for label, walls in WALLS.items():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="walls='sequence'")  # the demo shows the leak
                history = trace(query, key, is_causal=True, pde=pde, steps=STEPS, walls=walls)
            results["pdes"][name][label] = _numbers(history)
            maps[name][label] = (SCALE * history.maps[:, 0, 0].flatten(1)).round().int().tolist()
    return {**results, "drawn": maps}


def _numbers(history: PDETrace) -> dict[str, list[float]]:
    """Return per step the smallest and largest row sum, and the mean weight on future keys."""
    sums = history.row_mass[:, 0, 0]
    return {
        "row_sum_low": sums.amin(-1).tolist(),
        "row_sum_high": sums.amax(-1).tolist(),
        "future": history.leaked[:, 0, 0].tolist(),
    }


def show(page: Any, results: dict[str, Any]) -> None:
    """Add this part to a page."""
    from attractor.report import live
    from attractor.report.page import script_json

    page.script(Path(__file__).with_name("maps.js").read_text())
    steps, tokens = results["steps"], results["tokens"]
    data = {"tokens": tokens, "scale": SCALE, "numbers": results["pdes"], "maps": results["drawn"]}
    controls = (
        live.button("map-play", "Play")
        + live.slider("map-step", "step", 0, steps, steps // 3)
        + live.choice("map-pde", "PDE", {name: name for name in results["pdes"]})
        + live.tick("map-walls", "walls", on=True)
        + live.slider("map-row", "query", 1, tokens, tokens // 2)
    )
    page.heading("A map in pseudo-time, with and without walls")
    page.live(
        "An attention map while it moves, and one of its rows",
        f'<div class="controls">{controls}</div><div id="map-numbers" class="numbers"></div>'
        '<div class="pair"><canvas id="map-canvas"></canvas><canvas id="map-bars"></canvas></div>',
        f"attractorMaps({script_json(data)});",
        "Left: one row per query and one column per key, with stronger colours for larger weights; the "
        "line is the edge of the causal mask. Right: the row of the selected query. Allowed weight is "
        "blue, leaked weight red, and negative weight green. Reaction-diffusion lets row sums grow, the "
        "other equations conserve them.",
    )
    leak = results["pdes"]["diffusion"]
    page.text(
        "PDE attention applies some steps of a PDE to the map of softmax attention: weight spreads to "
        "neighbouring keys. With walls no weight crosses the edge of the mask (weight on future keys: "
        f"{leak['walls']['future'][-1]:g} after {steps} steps of diffusion). Without walls every query "
        "puts weight on keys that it must not attend to, "
        f"{100 * leak['no walls']['future'][-1]:.0f}\u00a0% of it on average."
    )


def summary(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, value) lines for the terminal."""
    leak = {k: v["future"][-1] for k, v in results["pdes"]["diffusion"].items()}
    what = f"{leak['walls']:g} with walls, {leak['no walls']:.3f} without"
    return [("weight on future keys", f"{what} ({results['steps']} steps of diffusion)")]
