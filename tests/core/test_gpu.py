"""The core on a CUDA device: same numbers as on the CPU."""

import pytest
import torch

import attractor as at
from tests.contracts import SYSTEMS

pytestmark = pytest.mark.gpu
T = torch.linspace(0, 1, 41, dtype=torch.float64)


@pytest.mark.parametrize("make", SYSTEMS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("how", [{}, {"scheme": "dopri5", "rtol": 1e-8}], ids=["grid", "controlled"])
def test_same_as_on_the_cpu(make, how):
    system = make()
    t = T * {"Robertson": 1e-3, "Oregonator": 1e-3, "Pollution": 1e-11}.get(make.__name__, 1.0)
    u0 = system.sample(50, torch.Generator().manual_seed(0), torch.float64)
    here = at.evolve(system, u0, t, **how)
    there = at.evolve(system, u0.cuda(), t, **how)
    assert there.u.is_cuda
    assert there.ok.is_cuda
    torch.testing.assert_close(there.u.cpu(), here.u, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("scheme", ["rodas4", "rodas5p"])
def test_rosenbrock_schemes_on_stiff_systems(scheme):
    system = at.systems.HIRES()
    u0 = system.sample(50, torch.Generator().manual_seed(0), torch.float64)
    how = dict(rtol=1e-6, atol=1e-9)
    here = at.evolve(system, u0, [0.0, 300.0], scheme, **how)
    there = at.evolve(system, u0.cuda(), [0.0, 300.0], scheme, **how)
    assert there.ok.all()
    torch.testing.assert_close(there.u.cpu(), here.u, rtol=1e-6, atol=1e-8)


def test_compiled_with_gradients():
    system = at.systems.ElasticPendulum()
    u0 = system.sample(1000, dtype=torch.float64, device="cuda").requires_grad_()
    fast = at.evolve(system, u0, T, compile=True, every=10)
    plain = at.evolve(system, u0, T, every=10)
    torch.testing.assert_close(fast.u, plain.u, rtol=1e-10, atol=1e-10)
    (a,) = torch.autograd.grad(fast.final.square().sum(), u0)
    (b,) = torch.autograd.grad(plain.final.square().sum(), u0)
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_a_loss_changes_no_bit_of_the_others():
    u0 = torch.rand(1000, 2, device="cuda") + 20
    u0[17] = torch.tensor([0.02, -1.0])
    rate = lambda t, u: torch.stack((u[..., 1], -u[..., 0].sqrt()), -1)
    alone = torch.arange(1000, device="cuda") != 17
    for how in ({}, {"scheme": "dopri5", "rtol": 1e-5}):
        solved = at.evolve(rate, u0, T.float(), **how)
        assert torch.equal(solved.ok, alone)
        assert torch.equal(solved.u[:, alone], at.evolve(rate, u0[alone], T.float(), **how).u)


def test_samples_on_the_device_are_the_same():
    system = at.systems.SpringMass()
    make = lambda device: system.sample(5, torch.Generator().manual_seed(0), device=device)
    assert torch.equal(make("cuda").cpu(), make("cpu"))
