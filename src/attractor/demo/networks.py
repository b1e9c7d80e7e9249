"""Accuracy and stiffness of small networks on the digits that come with the library."""

from collections.abc import Callable
from typing import Any

import torch

from attractor.data import images
from attractor.residual import StiffnessProfile, probe, resnet_cifar
from attractor.train import Recipe, train

GATES = ("none", "se", "stepnet")
NAMES = {"none": "no gate", "se": "SE", "stepnet": "StepNet"}
COLORS = {"none": "#8a949e", "se": "#2f9e6e", "stepnet": "#3d85c6"}
PROBED = 128  # test images to probe
CELLS = 40  # cells of the surface per axis
Tell = Callable[[str, float], None]


def run(seed: int, device: str, tell: Tell, small: bool) -> dict[str, Any]:
    """Train one network per gate by one recipe, and probe each before and after."""
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

        def report(progress: Any, i: int = i, gate: str = gate) -> None:
            fraction = (progress.epoch - 1 + progress.step / progress.steps) / progress.epochs
            tell(f"digits, {NAMES[gate]}: epoch {progress.epoch}", (i + fraction) / len(GATES))

        tell(f"digits, {NAMES[gate]}", i / len(GATES))
        history = train(model, *data, recipe, device=device, tell=report)
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
    all_profiles = [
        p for profile in profiles.values() for p in (profile, profile.initial) if p is not None
    ]
    m1, m2 = _thresholds(all_profiles)
    share = lambda p: (100 * p.surface(m1, m2).T).round().int().tolist()
    surfaces = {gate: [share(p), share(p.initial)] for gate, p in profiles.items()}
    return {
        "depth": depth, "epochs": epochs, "training_images": len(data[0]), "test_images": len(data[1]),
        "probed": PROBED, "gates": arms,
        "drawn": {"m1": m1.tolist(), "m2": m2.tolist(), "surfaces": surfaces},
    }  # fmt: skip


def _thresholds(profiles: list[StiffnessProfile]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both axes of the surface, up to where all networks have less than 1 % stiff inputs."""
    zero = torch.zeros(1, dtype=torch.float64)
    axis = torch.linspace(0, 3, 300, dtype=torch.float64)
    high = torch.linspace(0, max(p.nsi.max().item() for p in profiles), 300, dtype=torch.float64)
    largest = lambda lines: torch.stack(lines).amax(0)
    m1 = axis[largest([p.surface(axis, zero)[:, 0] for p in profiles]) >= 0.01]
    m2 = high[largest([p.surface(zero, high)[0] for p in profiles]) >= 0.01]
    end = lambda values, all: values[-1].item() if len(values) else all[-1].item()
    return tuple(  # type: ignore[return-value]
        torch.linspace(0, top, CELLS, dtype=torch.float64) for top in (end(m1, axis), end(m2, high))
    )


def show(page: Any, results: dict[str, Any]) -> None:
    """Add this part to a page."""
    from attractor.report import live
    from attractor.report.page import script_json

    arms = results["gates"]
    best = max(arms, key=lambda gate: arms[gate]["accuracy"])
    page.heading("Gates in a small network")
    rows = [
        [NAMES[g], f"{100 * a['accuracy']:.1f}\u00a0%", a["tns_initial"], a["tns"]]
        for g, a in arms.items()
    ]
    page.table(["gate", "test accuracy", "TNS before", "TNS trained"], rows)
    page.text(
        f"Networks of {results['depth']} layers, trained by one recipe for {results['epochs']} epochs "
        f"on {results['training_images']:,} images of digits; here {NAMES[best]} is the most accurate "
        f"on {results['test_images']} test images. One seed and so few images are not enough to rank "
        "gates; the documentation has results on CIFAR-10 with several seeds."
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
        "A residual network is a time stepper, and NSI is the length of its steps: how much a block "
        f"changes its feature, relative to the feature's norm (mean of {results['probed']} test images; "
        "dashed lines separate stages, whose first block has no StepNet gate). A gate multiplies the "
        "output of a block, so that steps are shorter even before training (dotted lines)."
    )
    page.heading("The TNS surface")
    data = results["drawn"]
    axes: dict[str, Any] = dict(
        x="m1: NSI above the stage's mean", y="m2: NSI", of="stiff inputs (%)", top=100
    )
    first = next(iter(arms))
    figure = live.heatmap(data["surfaces"][first][0], data["m1"], data["m2"], **axes)
    controls = live.choice("surface-gate", "network", {g: NAMES[g] for g in arms}) + live.tick(
        "surface-before", "before training"
    )
    numbers = {g: [round(a["tns"], 4), round(a["tns_initial"], 4)] for g, a in arms.items()}
    page.plot(
        "Share of inputs with a block beyond both thresholds", figure, 420,
        controls=f'<div class="controls">{controls}<span id="surface-tns" class="numbers"></span></div>',
        script=_SURFACE.replace("SURFACES", script_json(data["surfaces"])).replace(
            "NUMBERS", script_json(numbers)
        ),
    )  # fmt: skip
    page.text(
        "A point is the share of test images for which some block is stiffer than both thresholds; "
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


def summary(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, value) lines for the terminal."""
    arms = results["gates"]
    accuracy = ", ".join(f"{NAMES[g]} {100 * a['accuracy']:.1f} %" for g, a in arms.items())
    total = ", ".join(f"{NAMES[g]} {a['tns']:.2g}" for g, a in arms.items())
    return [("digits, accuracy", accuracy), ("digits, TNS", total)]
