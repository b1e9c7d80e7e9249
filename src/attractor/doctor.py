"""What is installed, what that switches off, and a self-check that really computes something."""

import importlib.util
import math
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from attractor.attention import kernels, pde_attention
from attractor.core import evolve
from attractor.ode import systems

OPTIONAL = {
    "matplotlib": ("report", "pictures and the report page"),
    "plotly": ("report", "pictures that can be touched"),
    "pandas": ("report", "tables: .to_pandas()"),
    "scipy": ("dev", "reference solutions in tests and benchmarks"),
    "accelerate": ("train", "training"),
    "pillow": ("vision", "images from files"),
    "transformers": ("text", "PDE attention and probes in its models"),
    "timm": ("vision", "gates and probes in its models"),
    "torchvision": ("vision", "its weights, models and detectors"),
    "onnxruntime": ("onnx", "export of solvers to ONNX"),
    "torchdiffeq": ("bench", "comparison with torchdiffeq"),
    "diffrax": ("bench", "comparison with diffrax"),
    "huggingface_hub": ("hub", "save to and load from the hub"),
    "s3fs": ("remote", "folders in object stores, s3://"),
    "triton": ("", "GPU kernels (comes with CUDA builds of torch)"),
}


def versions() -> dict[str, str]:
    """Of everything the core needs."""
    found = {
        "attractor": _version("attractor") or "not installed",
        "python": platform.python_version(),
    }
    return found | {name: _version(name) or "missing" for name in ("torch", "numpy", "typer", "rich")}


def optional() -> list[dict[str, Any]]:
    """Optional packages: version or None, the extra that brings them, what they are for."""
    return [
        {"package": name, "version": _version(name), "extra": extra, "for": purpose}
        for name, (extra, purpose) in OPTIONAL.items()
    ]


def missing() -> dict[str, list[str]]:
    """Optional packages that are not installed, by the extra that brings them."""
    found: dict[str, list[str]] = {}
    for row in optional():
        if row["version"] is None and row["extra"]:
            found.setdefault(row["extra"], []).append(row["package"])
    return found


def devices() -> list[str]:
    """Where tensors can live."""
    found = [f"cpu: {torch.get_num_threads()} threads"]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found.append(f"cuda:{i}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        found.append("mps: Apple GPU")
    return found


def checks(device: str = "cpu", compile: bool = False) -> list[tuple[str, Callable[[], str]]]:
    """Named self-checks; each returns what it found and raises if that is wrong."""

    def order() -> str:
        spring = systems.SpringMass(n=5)
        u0 = spring.sample(20, torch.Generator().manual_seed(0), torch.float64, device)
        errors = []
        for n in (400, 800):
            t = torch.linspace(0, 5, n + 1, dtype=torch.float64)
            solved = evolve(spring, u0, t, "rk4", every=n)
            errors.append((solved.final - spring.exact(solved.t[-1:], u0)[0]).norm().item())
        slope = math.log2(errors[0] / errors[1])
        _require(abs(slope - 4) < 0.1, f"rk4 converges with order {slope:.2f}, not 4")
        return f"order {slope:.3f}"

    def control() -> str:
        system = systems.Logistic()
        u0 = system.sample(50, torch.Generator().manual_seed(0), torch.float64, device)
        t = torch.linspace(0, 5, 21, dtype=torch.float64)
        solved = evolve(system, u0, t, "dopri5", rtol=1e-8, atol=1e-10)
        error = (solved.u - system.exact(solved.t, u0)).abs().max().item()
        _require(error < 1e-6, f"error {error:.1e} at rtol 1e-8")
        return f"error {error:.1e} at rtol 1e-8"

    def gradient() -> str:
        system = systems.HarmonicOscillator()
        u0 = system.sample(4, torch.Generator().manual_seed(0), torch.float64, device).requires_grad_()
        t = torch.linspace(0, 2, 201, dtype=torch.float64)
        (got,) = torch.autograd.grad(evolve(system, u0, t).final[:, 0].sum(), u0)
        want = torch.tensor([math.cos(2), math.sin(2)], dtype=torch.float64, device=device)
        error = (got - want).abs().max().item()
        _require(error < 1e-8, f"gradient off by {error:.1e}")
        return f"error {error:.1e}"

    def lost() -> str:
        rate = lambda t, u: torch.where(u > 5, torch.nan, -u)
        u0 = torch.tensor([[1.0], [9.0], [2.0]], device=device)
        solved = evolve(rate, u0, torch.linspace(0, 1, 11))
        _require(solved.ok.tolist() == [True, False, True], f"ok is {solved.ok.tolist()}")
        return "one of three lost, two untouched"

    def attention() -> str:
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, 2, 100, 16, generator=generator).to(device)
        methods = ("stepped", "dense")
        fast, whole = (
            pde_attention(q, k, v, is_causal=True, pde="diffusion", method=m) for m in methods
        )
        error = (fast - whole).abs().max().item()
        _require(error < 1e-5, f"stepped values and the whole map differ by {error:.1e}")
        if kernels.usable(q, 4):
            return f"error {error:.1e}, by Triton kernels"
        missing = torch.device(device).type == "cuda" and not kernels.TRITON
        return f"error {error:.1e}, by plain torch{', as Triton is missing' if missing else ''}"

    def compiled() -> str:
        system = systems.HarmonicOscillator()
        u0 = system.sample(64, torch.Generator().manual_seed(0), torch.float64, device)
        t = torch.linspace(0, 1, 3, dtype=torch.float64)
        with torch.no_grad():
            start = time.perf_counter()
            fast = evolve(system, u0, t, "rk4", compile=True, every=2)
            took = time.perf_counter() - start
            error = (fast.final - evolve(system, u0, t, "rk4", every=2).final).abs().max().item()
        _require(error < 1e-12, f"compiled and eager differ by {error:.1e}")
        return f"equal to eager, compiled in {took:.1f} s"

    found = [
        ("convergence of rk4 on springs", order),
        ("error control with dopri5", control),
        ("gradients through a solve", gradient),
        ("a trajectory that is lost", lost),
        ("causal PDE attention", attention),
    ]
    return [*found, ("torch.compile of a solve", compiled)] if compile else found


def _require(good: bool, otherwise: str) -> None:
    if not good:
        raise ArithmeticError(otherwise)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return "?" if importlib.util.find_spec(name) else None
