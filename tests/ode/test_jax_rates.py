"""Rates that are translated from torch to JAX have the same values, or are refused by name."""

import numpy as np
import pytest
import torch

from attractor import systems
from attractor.ode.jax_rates import jax_rate
from tests.contracts import every_system

jax = pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@every_system
def test_values_of_the_systems(make):
    system = make()
    u0 = system.sample(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = jax.jit(jax_rate(system, u0))(0.3, u0.numpy())
    assert np.allclose(
        value, system(torch.tensor(0.3, dtype=torch.float64), u0).numpy(), rtol=1e-12, atol=1e-12
    )


def test_time_and_parameters():
    def rate(t, u, p):
        return torch.stack((u[..., 1] * p[..., 0], -u[..., 0] * torch.exp(-t) ** 2), -1)

    u0, p = torch.rand(3, 2, dtype=torch.float64), torch.rand(3, 1, dtype=torch.float64)
    value = jax_rate(rate, u0, p)(0.3, u0.numpy(), p.numpy())
    assert np.allclose(value, rate(torch.tensor(0.3, dtype=torch.float64), u0, p).numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (lambda t, u: torch.special.bessel_j0(u), "bessel_j0"),
        (lambda t, u: u if u.sum() > 0 else -u, "cannot be traced"),
        (lambda t, u: torch.rand_like(u), "rand_like"),
    ],
)
def test_rates_that_cannot_be_translated(rate, message):
    with pytest.raises(NotImplementedError, match=message):
        jax_rate(rate, torch.rand(3, 2, dtype=torch.float64))


def test_compare_leaves_out_what_cannot_be_translated():
    pytest.importorskip("diffrax")
    from attractor.ode.peers import with_error_control

    lines = []
    u0 = torch.rand(3, 2, dtype=torch.float64)
    solvers = with_error_control(lambda t, u: torch.special.bessel_j0(u), u0, None, None, lines.append)
    assert "diffrax Tsit5" not in solvers
    assert any("bessel_j0" in line for line in lines)


def test_diffrax_solves_the_translated_rate():
    pytest.importorskip("diffrax")
    from attractor.ode.peers import with_error_control

    system = systems.ElasticPendulum()
    u0 = system.sample(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = torch.linspace(0, 1, 3, dtype=torch.float64)
    solvers = with_error_control(system, u0, None, None, lambda line: None)
    (own, _), (other, _) = (solvers[name](1e-9, t) for name in ("dopri5, own steps", "diffrax Tsit5"))
    assert torch.allclose(own, other, rtol=1e-7, atol=1e-7)
