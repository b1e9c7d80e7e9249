"""An attention map that moves under four PDEs, with walls at its mask's edge and without."""

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
SCALE = 10_000  # maps are kept as whole numbers of this part
Tell = Callable[[str, float], None]


def run(seed: int, device: str, tell: Tell, small: bool) -> dict[str, Any]:
    """Maps after each step, with what is conserved and what leaks."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(TOKENS, 24, generator=generator, dtype=torch.float64)
    earlier = (torch.rand(TOKENS, generator=generator) * torch.arange(TOKENS)).long()
    # Each token looks at itself and at one before it.
    queries = 0.75 * keys + 0.75 * keys[earlier]
    query, key = (x.to(device)[None, None] for x in (queries, keys))
    found: dict[str, Any] = {"tokens": TOKENS, "steps": STEPS, "pdes": {}}
    drawn: dict[str, Any] = {}
    for i, (name, pde) in enumerate(EQUATIONS.items()):
        tell(f"attention under {name}", i / len(EQUATIONS))
        found["pdes"][name], drawn[name] = {}, {}
        for told, walls in WALLS.items():
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message="walls='sequence'"
                )  # that it leaks is the point
                seen = trace(query, key, is_causal=True, pde=pde, steps=STEPS, walls=walls)
            found["pdes"][name][told] = _measured(seen)
            drawn[name][told] = (SCALE * seen.maps[:, 0, 0].flatten(1)).round().int().tolist()
    return {**found, "drawn": drawn}


def _measured(seen: PDETrace) -> dict[str, list[float]]:
    """Numbers of each step: the smallest and largest row sum, and the mean weight on future keys."""
    sums = seen.row_mass[:, 0, 0]
    return {
        "row_sum_low": sums.amin(-1).tolist(),
        "row_sum_high": sums.amax(-1).tolist(),
        "future": seen.leaked[:, 0, 0].tolist(),
    }


def show(page: Any, found: dict[str, Any]) -> None:
    """Adds this part to a page."""
    from attractor.report import live
    from attractor.report.page import script_json

    page.script(Path(__file__).with_name("maps.js").read_text())
    steps, tokens = found["steps"], found["tokens"]
    data = {"tokens": tokens, "scale": SCALE, "numbers": found["pdes"], "maps": found["drawn"]}
    controls = (
        live.button("map-play", "Play")
        + live.slider("map-step", "step", 0, steps, steps // 3)
        + live.choice("map-pde", "PDE", {name: name for name in found["pdes"]})
        + live.tick("map-walls", "walls", on=True)
        + live.slider("map-row", "query", 1, tokens, tokens // 2)
    )
    page.heading("A map in pseudo-time: take the walls away")
    page.live(
        "An attention map while it moves, and one of its rows",
        f'<div class="controls">{controls}</div><div id="map-numbers" class="numbers"></div>'
        '<div class="pair"><canvas id="map-canvas"></canvas><canvas id="map-bars"></canvas></div>',
        f"attractorMaps({script_json(data)});",
        "Left: a row a query, a column a key, more colour for more weight; the line is the edge of the "
        "causal mask. Right: the row of the chosen query. Blue is allowed, red has leaked, green is "
        "negative. Reaction-diffusion lets row sums grow, the others keep them.",
    )
    leak = found["pdes"]["diffusion"]
    page.text(
        "PDE attention lets the map of softmax attention take some steps of a PDE: weight spreads to "
        "neighbouring keys. With walls at the mask's edge nothing crosses it (weight on future keys: "
        f"{leak['walls']['future'][-1]:g} after {steps} steps of diffusion); without, every query puts "
        f"weight on keys it must not see, {100 * leak['no walls']['future'][-1]:.0f}\u00a0% of it on "
        "average."
    )


def told(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal: what, and what was found."""
    leak = {k: v["future"][-1] for k, v in found["pdes"]["diffusion"].items()}
    what = f"{leak['walls']:g} with walls, {leak['no walls']:.3f} without"
    return [("weight on future keys", f"{what} ({found['steps']} steps of diffusion)")]
