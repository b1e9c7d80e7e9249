"""Numbers of numpy are numbers: what a sweep over an array passes on is taken as Python's would be."""

import numpy as np
import pytest
import torch

from attractor import gates, ode, residual
from attractor.attention import (
    PDEAttention,
    PDECache,
    RandomFeatures,
    explain,
    pde_attention,
    performer_attention,
    window_attention,
)
from attractor.attention.pdes import for_length
from attractor.data import images, text

FOUR, EIGHT = np.int64(4), np.int32(8)
X = torch.randn(1, 2, 16, 4)
ATTENTION = {
    "steps": lambda n: pde_attention(X, X, X, pde="diffusion", steps=n, is_causal=True),
    "window": lambda n: pde_attention(X, X, X, pde="diffusion", window=n),
    "left and right": lambda n: pde_attention(X, X, X, pde="wave", steps=1, window=(n, n - n)),
    "explain": lambda n: explain(X, X, X, pde="diffusion", steps=n, window=n),
    "window_attention": lambda n: window_attention(X, X, X, window=n, global_tokens=n, pde="diffusion"),
    "performer": lambda n: performer_attention(X, X, X, features=RandomFeatures(n, 2 * n), steps=n),
    "for_length": lambda n: for_length("diffusion", tokens=16 * n, reference=n),
}


@pytest.mark.parametrize("call", ATTENTION.values(), ids=ATTENTION)
def test_attention(call):
    found = []
    for n in (4, FOUR):
        torch.manual_seed(0)
        found.append(call(n))
    assert torch.equal(*found) if isinstance(found[0], torch.Tensor) else found[0] == found[1]


def test_attention_by_tokens():
    cache = PDECache("diffusion", FOUR)
    cache.attend(X, X, X)
    cache.crop(EIGHT)
    assert len(cache) == 8
    layer = PDEAttention(EIGHT, np.int64(2), steps=FOUR)
    assert [type(n) for n in (layer.dim, layer.heads, layer.steps)] == [int, int, int]


@pytest.mark.parametrize(
    ("gate", "options"),
    [("fca", {"frequencies": FOUR}), ("cbam", {"kernel_size": np.int64(3)}), ("sge", {"groups": FOUR}),
     ("eca", {"kernel_size": np.int64(3)}), ("sem", {"kernel_size": np.int64(3)})],
)  # fmt: skip
def test_gates(gate, options):
    made = getattr(gates, gate.upper())(8, **options).eval()
    f = torch.rand(2, 8, 6, 6)
    assert made(f, f).shape == f.shape


def test_others():
    assert residual.vit(image_size=EIGHT, patch=4, dim=8, depth=1, heads=2, num_classes=2) is not None
    assert len(images.load("digits").subset(EIGHT)) == 8
    ids, _ = text.padded(["a longer text", "two"], text.Bytes(), EIGHT)
    assert ids.shape == (2, 8)
    spring = ode.systems.HarmonicOscillator()
    solver = ode.HybridSolver(spring, "rk4", ode.corrections.NeurVec(2, width=8), 0.1)
    assert solver.capture(spring.sample(3), steps=FOUR).steps == 4


@pytest.mark.parametrize("steps", [np.float64(4), np.bool_(True), np.array([4])], ids=repr)
def test_what_is_no_whole_number(steps):
    with pytest.raises(ValueError, match="whole number"):
        pde_attention(X, X, X, pde="diffusion", steps=steps)
