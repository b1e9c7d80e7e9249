"""Small networks on the digits that come with the library: how accurate, and how stiff."""

from collections.abc import Callable
from typing import Any

import torch

from attractor.data import images
from attractor.residual import StiffnessProfile, probe, resnet_cifar
from attractor.train import Recipe, train

GATES = ("none", "se", "stepnet")
NAMES = {"none": "no gate", "se": "SE", "stepnet": "StepNet"}
COLORS = {"none": "#8a949e", "se": "#2f9e6e", "stepnet": "#3d85c6"}
PROBED = 128  # test images
CELLS = 40  # of the surface, in each direction
Tell = Callable[[str, float], None]


def run(seed: int, device: str, tell: Tell, small: bool) -> dict[str, Any]:
    """A network for each gate, trained by one recipe and probed before and after."""
    depth, width, epochs = (29, 4, 1) if small else (29, 8, 6)
    recipe = Recipe(
        epochs=epochs, batch=64, learning_rate=0.1, warmup=0.25 * epochs, crop=1, flip=False, seed=seed
    )
    data = images.load("digits", "train"), images.load("digits", "test")
    batches = [data[1].normalised(slice(PROBED)).to(device)]
    arms: dict[str, Any] = {}
    profiles: dict[str, StiffnessProfile] = {}
    for i, gate in enumerate(GATES):
        torch.manual_seed(seed)
        model = resnet_cifar(depth, width=width, num_classes=10, in_channels=1, gate=gate).to(device)
        initial = probe(model, batches, settle=True)

        def told(progress: Any, i: int = i, gate: str = gate) -> None:
            done = (progress.epoch - 1 + progress.step / progress.steps) / progress.epochs
            tell(f"digits, {NAMES[gate]}: epoch {progress.epoch}", (i + done) / len(GATES))

        tell(f"digits, {NAMES[gate]}", i / len(GATES))
        history = train(model, *data, recipe, device=device, tell=told)
        profile = profiles[gate] = probe(model, batches).beside(initial)
        arms[gate] = {
            "accuracy": history.accuracy,
            "parameters": sum(p.numel() for p in model.parameters()),
            "tns": profile.tns.item(),
            "tns_initial": initial.tns.item(),
            "nsi": profile.nsi.mean(0).tolist(),
            "nsi_initial": initial.nsi.mean(0).tolist(),
            "stage": profile.stage.tolist(),
        }
    shown = [p for profile in profiles.values() for p in (profile, profile.initial) if p is not None]
    m1, m2 = _thresholds(shown)
    share = lambda p: (100 * p.surface(m1, m2).T).round().int().tolist()
    surfaces = {gate: [share(p), share(p.initial)] for gate, p in profiles.items()}
    return {
        "depth": depth, "epochs": epochs, "training_images": len(data[0]), "test_images": len(data[1]),
        "probed": PROBED, "gates": arms,
        "drawn": {"m1": m1.tolist(), "m2": m2.tolist(), "surfaces": surfaces},
    }  # fmt: skip


def _thresholds(profiles: list[StiffnessProfile]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both axes of the surface, up to where no network has one stiff input in a hundred."""
    zero = torch.zeros(1, dtype=torch.float64)
    wide = torch.linspace(0, 3, 300, dtype=torch.float64)
    high = torch.linspace(0, max(p.nsi.max().item() for p in profiles), 300, dtype=torch.float64)
    most = lambda lines: torch.stack(lines).amax(0)
    m1 = wide[most([p.surface(wide, zero)[:, 0] for p in profiles]) >= 0.01]
    m2 = high[most([p.surface(zero, high)[0] for p in profiles]) >= 0.01]
    end = lambda kept, all: kept[-1].item() if len(kept) else all[-1].item()
    return tuple(  # type: ignore[return-value]
        torch.linspace(0, top, CELLS, dtype=torch.float64) for top in (end(m1, wide), end(m2, high))
    )


def show(page: Any, found: dict[str, Any]) -> None:
    """Adds this part to a page."""
    from attractor.report import live
    from attractor.report.page import script_json

    arms = found["gates"]
    best = max(arms, key=lambda gate: arms[gate]["accuracy"])
    page.heading("What gates do to a small network")
    rows = [
        [NAMES[g], f"{100 * a['accuracy']:.1f}\u00a0%", a["tns_initial"], a["tns"]]
        for g, a in arms.items()
    ]
    page.table(["gate", "test accuracy", "TNS before", "TNS trained"], rows)
    page.text(
        f"Networks of {found['depth']} layers, trained alike for {found['epochs']} epochs on "
        f"{found['training_images']:,} pictures of digits; here {NAMES[best]} is the most accurate on "
        f"{found['test_images']} others. One seed and so few pictures decide nothing; the documentation "
        "has the same on CIFAR-10 with several seeds."
    )
    page.heading("Stiffness, block by block")
    lines: dict[str, Any] = {}
    looks: dict[str, Any] = {}
    for gate, arm in arms.items():
        color = COLORS[gate]
        blocks = list(range(1, len(arm["nsi"]) + 1))
        lines[NAMES[gate]] = blocks, arm["nsi"]
        lines[f"{NAMES[gate]}, before training"] = blocks, arm["nsi_initial"]
        looks[NAMES[gate]] = {"line": {"color": color}, "marker": {"color": color, "symbol": "circle"}}
        before = {"color": color, "dash": "dot", "width": 1.5}
        looks[f"{NAMES[gate]}, before training"] = {"line": before, "mode": "lines", "opacity": 0.8}
    figure = live.lines(lines, x="block", y="NSI", looks=looks, marks=True)
    figure["layout"]["xaxis"]["dtick"] = 1
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    stages = next(iter(arms.values()))["stage"]
    figure["layout"]["shapes"] = [
        {"type": "line", "x0": b + 0.5, "x1": b + 0.5, "yref": "paper", "y0": 0, "y1": 1,
         "line": {"color": "#8a949e", "width": 1, "dash": "dash"}}
        for b in range(1, len(stages)) if stages[b] != stages[b - 1]
    ]  # fmt: skip
    page.plot("Neural stiffness index of each block", figure, 420)
    page.text(
        "A residual network is a time stepper, and NSI is its speed: how far a block moves its "
        f"feature, relative to the feature's size (mean of {found['probed']} test pictures; dashed "
        "lines separate stages, whose first block StepNet leaves as it is). A gate multiplies what a "
        "block adds, so it slows blocks down before any training: compare each line with its dotted one."
    )
    page.heading("The TNS surface")
    drawn = found["drawn"]
    axes: dict[str, Any] = dict(
        x="m1: NSI above the stage's mean", y="m2: NSI", of="stiff inputs (%)", top=100
    )
    first = next(iter(arms))
    figure = live.heatmap(drawn["surfaces"][first][0], drawn["m1"], drawn["m2"], **axes)
    controls = live.choice("surface-gate", "network", {g: NAMES[g] for g in arms}) + live.tick(
        "surface-before", "before training"
    )
    numbers = {g: [round(a["tns"], 4), round(a["tns_initial"], 4)] for g, a in arms.items()}
    page.plot(
        "Share of inputs with a block beyond both thresholds", figure, 420,
        controls=f'<div class="controls">{controls}<span id="surface-tns" class="numbers"></span></div>',
        script=_SURFACE.replace("SURFACES", script_json(drawn["surfaces"])).replace(
            "NUMBERS", script_json(numbers)
        ),
    )  # fmt: skip
    page.text(
        "A point is the share of test pictures for which some block is stiffer than both thresholds; "
        "the volume under this surface is the total neural stiffness, TNS. It is "
        f"{arms['none']['tns']:.2g} without a gate and {arms['stepnet']['tns']:.2g} with StepNet, and "
        f"before training it was {arms['none']['tns_initial']:.2g} and "
        f"{arms['stepnet']['tns_initial']:.2g}."
    )


_SURFACE = """
const surfaces = SURFACES, numbers = NUMBERS;
const gate = document.getElementById("surface-gate"), before = document.getElementById("surface-before");
const draw = () => {
  Plotly.restyle(plot, { z: [surfaces[gate.value][+before.checked]] });
  document.getElementById("surface-tns").textContent = `TNS ${numbers[gate.value][+before.checked]}`;
};
gate.addEventListener("change", draw);
before.addEventListener("change", draw);
draw();
"""


def told(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal: what, and what was found."""
    arms = found["gates"]
    accuracy = ", ".join(f"{NAMES[g]} {100 * a['accuracy']:.1f} %" for g, a in arms.items())
    total = ", ".join(f"{NAMES[g]} {a['tns']:.2g}" for g, a in arms.items())
    return [("digits, accuracy", accuracy), ("digits, TNS", total)]
