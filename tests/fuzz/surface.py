"""What is public: every function, class and method that a target is wanted for."""

import importlib.util
import inspect
from importlib import import_module
from typing import Any

from tests.fuzz.judging import Target

MODULES = (
    "attractor",
    "attractor.core.tableaus",
    "attractor.core.stiffness",
    "attractor.ode",
    "attractor.ode.systems",
    "attractor.ode.corrections",
    "attractor.ode.theory",
    "attractor.ode.trust",
    "attractor.attention",
    "attractor.attention.pdes",
    "attractor.residual",
    "attractor.residual.gates",
    "attractor.data.images",
    "attractor.data.text",
    "attractor.integrations.scipy",
    "attractor.integrations.timm",
    "attractor.integrations.transformers",
    "attractor.integrations.onnx",
)

# Public, but without a target of their own, and why.
WITHOUT = {
    "attractor.CausalityError": "an exception",
    "attractor.CheckpointError": "an exception",
    "attractor.Stats": "what a solve returns",
    "attractor.ode.trust.TrustRegion.guard": "steps of HybridSolver.solve",
    "attractor.ode.trust.controlled_step": "steps of HybridSolver.solve",
    "attractor.ode.trust.largest_component": "steps of HybridSolver.solve",
    "attractor.ode.trust.settled_substeps": "steps of HybridSolver.solve",
    "attractor.Rosenbrock.standard_form": "takes nothing",
    "attractor.Rosenbrock.step": "steps of evolve; tests/core/test_rosenbrock.py",
    "attractor.Scheme.step": "steps of evolve; tests/ode/test_stages.py",
    "attractor.Splitting.step": "steps of evolve; tests/ode/test_stages.py",
    "attractor.Status": "an enumeration",
    "attractor.TunedSolver": "what tune returns",
    "attractor.Trajectory": "what a solve returns",
    "attractor.HybridSolver.about": "takes nothing",
    "attractor.HybridSolver.push_to_hub": "the hub's; tests/integrations/test_hub.py",
    "attractor.residual.StiffnessProfile.to_pandas": "takes nothing",
    "attractor.ode.Grid.neighbours": "indices of patches; tests/ode/test_grids.py",
    "attractor.ode.Grid.offsets": "indices of patches; tests/ode/test_grids.py",
    "attractor.ode.Grid.patches": "indices of patches; tests/ode/test_grids.py",
    "attractor.ode.corrections.Patches.differences": "a part of forward; tests/ode/test_patches.py",
    "attractor.ode.corrections.Patches.patch_inputs": "a part of forward; tests/ode/test_patches.py",
    "attractor.ode.corrections.Patches.patches": "a part of forward; tests/ode/test_patches.py",
    "attractor.ode.trust.TrustRegion.is_valid": "takes nothing",
    "attractor.ode.trust.plain_guard": "steps of HybridSolver.solve",
    "attractor.ode.FineData": "what make_trajectories returns",
    "attractor.ode.theory.ConvergenceBound": "what convergence_bound returns",
    "attractor.attention.Choice": "what explain returns",
    "attractor.attention.PDETrace": "what trace returns",
    "attractor.integrations.onnx.Exported": "what export returns",
    "attractor.residual.ViT": "made by vit",
    "attractor.residual.gates.Gate": "abstract; every gate has its own",
    "attractor.data.text.Bytes": "takes nothing",
    "attractor.data.text.WordPiece": "needs a vocabulary file; tests/data/test_text.py",
}


def missing_package(which: Target) -> bool:
    """Whether a package is not here that the target's function needs."""
    return which.needs is not None and importlib.util.find_spec(which.needs) is None


def public() -> dict[str, Any]:
    """Functions, classes and the public methods of classes, by one name each; not protocols."""
    found: dict[Any, str] = {}
    for place in MODULES:
        module = import_module(place)
        names = getattr(module, "__all__", None) or [
            n
            for n, v in vars(module).items()
            if not n.startswith("_") and getattr(v, "__module__", "") == place
        ]
        for name in names:
            thing = getattr(module, name)
            protocol = getattr(thing, "_is_protocol", False)
            if (inspect.isfunction(thing) or inspect.isclass(thing)) and not protocol:
                found.setdefault(thing, f"{place}.{name}")
    everything: dict[str, Any] = {}
    for thing, name in found.items():
        everything[name] = thing
        if inspect.isclass(thing):
            for method, value in vars(thing).items():
                made = isinstance(value, classmethod | staticmethod) or inspect.isfunction(value)
                if made and not method.startswith("_") and method != "extra_repr":
                    everything[f"{name}.{method}"] = value
    return everything


def without_target(names: Any) -> list[str]:
    """What is public and neither tried nor excused; a class in `WITHOUT` is that with its methods."""
    excused = lambda name: any(name == w or name.startswith(f"{w}.") for w in WITHOUT)
    return [name for name in public() if name not in names and not excused(name)]
