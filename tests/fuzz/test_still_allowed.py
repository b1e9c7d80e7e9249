"""Checks of arguments must not stand in the way of what torch and its friends do with modules and functions."""

import platform

import accelerate
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import attractor as at
from attractor.attention import Classifier, LanguageModel, pdes
from attractor.attention.pdes import Line
from attractor.data import images

IDS = torch.arange(12).reshape(2, 6)


def model(**options):
    return LanguageModel(12, dim=8, heads=2, layers=1, hidden=8, max_tokens=8, **options).eval()


@pytest.mark.slow
def test_compiled_whole_with_numbers_that_change():
    torch._dynamo.reset()
    attend = torch.compile(
        lambda q, dt: at.pde_attention(q, q, q, pde="diffusion", dt=dt), fullgraph=True, backend="eager"
    )
    q = torch.randn(1, 2, 6, 4)
    for dt in (0.5, 0.25, 0.125):
        torch.testing.assert_close(attend(q, dt), at.pde_attention(q, q, q, pde="diffusion", dt=dt))
    slope = torch.compile(
        lambda u, dt: at.schemes.RK4.slope(lambda t, u: -u, 0.0, u, dt), fullgraph=True, backend="eager"
    )
    for dt in (0.5, 0.25, 0.125):
        slope(torch.ones(2, 3), dt)


def test_exported_with_sizes_that_change():
    class Attend(nn.Module):
        def forward(self, q):
            return at.pde_attention(q, q, q, pde="diffusion", method="dense")

    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(Attend(), (torch.randn(3, 2, 6, 4),), dynamic_shapes=({0: batch},))
    assert exported.module()(torch.randn(5, 2, 6, 4)).shape == (5, 2, 6, 4)


def test_shapes_alone():
    with FakeTensorMode():
        assert model()(torch.zeros(2, 6, dtype=torch.long)).shape == (2, 6, 12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_networks(monkeypatch):
    if platform.machine() in ("aarch64", "arm64"):  # torch's choice for x86 is the default there too
        monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    small = torch.ao.quantization.quantize_dynamic(model(), {nn.Linear})
    assert small(IDS).shape == (2, 6, 12)
    correction = torch.ao.quantization.quantize_dynamic(at.corrections.AttNS(3, width=8), {nn.Linear})
    assert correction(torch.ones(2, 3), torch.ones(2, 3), 0.1).shape == (2, 3)


def test_weights_that_are_elsewhere_until_they_are_needed():
    whole = Classifier(12, 3, dim=8, heads=2, layers=1, hidden=8, max_tokens=8).eval()
    expected = whole(IDS)
    accelerate.cpu_offload(whole, execution_device=torch.device("cpu"))
    torch.testing.assert_close(whole(IDS), expected)


def test_an_embedding_that_is_elsewhere_writes_no_garbage():
    """Its weights are used again for the logits, where no hook of accelerate's brings them."""
    whole = model()
    accelerate.cpu_offload(whole, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="the embedding is on meta"):
        whole(IDS)


def test_networks_that_are_written_down():
    network = at.residual.resnet_cifar(11, 3, gate="none", width=4).eval()
    seen = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(torch.fx.symbolic_trace(network)(seen), network(seen))


def test_odeint_takes_what_torchdiffeq_takes():
    t = torch.linspace(0, 1, 3)
    both = at.odeint(lambda t, y: tuple(-part for part in y), (torch.ones(2), torch.ones(3).double()), t)
    assert [part.shape for part in both] == [(3, 2), (3, 3)]
    flat = at.odeint(lambda t, y: (-y[0].flatten(), -y[1]), (torch.ones(2, 1), torch.ones(3)), t)
    assert flat[0].shape == (3, 2, 1)
    one = at.odeint(
        lambda t, y: -y, torch.ones(2), t, method="rk4", options={"step_size": torch.tensor([0.1])}
    )
    assert one.shape == (3, 2)


def test_a_time_for_each_trajectory():
    correction = at.corrections.AttNS(2, width=8, period=1.0)
    solver = at.HybridSolver(lambda t, u: -u * torch.cos(t)[..., None], "rk4", correction, 0.1)
    assert solver.step(torch.ones(3, 2), torch.rand(3)).shape == (3, 2)


def test_whole_numbers_of_numpy():
    three = np.int64(3)
    chain = at.systems.PendulumChain(links=three)
    u0 = chain.sample(three)
    assert at.evolve(chain, u0, torch.linspace(0, 1, 4), every=three).u.shape == (2, 3, 6)
    assert at.corrections.AttNS(three, width=np.int64(8))(
        torch.ones(2, 3), torch.ones(2, 3), 0.1
    ).shape == (2, 3)


def test_a_long_time_without_a_split_reaction():
    u = torch.full((2, 4), 0.25)
    moved = pdes.evolve(pdes.ReactionDiffusion(0.2, 0.1), u, Line(), 7100, 1.0)
    torch.testing.assert_close(moved, torch.ones_like(u))


def test_images_by_lists_of_places():
    digits = images.load("digits", "test")
    assert torch.equal(digits.take([3, 1]).labels, digits.labels[[3, 1]])
