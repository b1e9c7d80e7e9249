"""What is special about each system; what they share is in contracts.py."""

import math

import pytest
import torch

import attractor as at

F64 = dict(dtype=torch.float64)


def test_spring_mass_is_the_paper_s_equation():
    system = at.systems.SpringMass(n=3)
    u = torch.rand(4, 6, **F64)
    q, p = u.chunk(2, -1)
    k, m = system.k, system.m
    padded = torch.nn.functional.pad(q, (1, 1))
    for i in range(1, 4):
        force = k[i - 1] * (padded[:, i - 1] - padded[:, i]) + k[i] * (padded[:, i + 1] - padded[:, i])
        torch.testing.assert_close(system(0.0, u)[:, 2 + i], force)
        torch.testing.assert_close(system(0.0, u)[:, i - 1], p[:, i - 1] / m[i - 1])


def test_spring_constants_come_from_the_seed():
    a, b = at.systems.SpringMass(20), at.systems.SpringMass(20)
    assert torch.equal(a.k, b.k)
    assert a == b
    assert not torch.equal(a.k, at.systems.SpringMass(20, seed=1).k)
    assert a.k.shape == (21,)
    assert a.k.min() >= 1
    assert a.m.min() >= 0.2


@pytest.mark.slow
def test_elastic_pendulum_needs_the_two():
    """Eq. 12 as printed, without the factor 2, loses its energy."""
    system = at.systems.ElasticPendulum()
    u0 = system.sample(5, torch.Generator().manual_seed(0), torch.float64)

    def as_printed(t, u):
        du = system(t, u)
        theta, r, omega, v = u.unbind(-1)
        turn = (-system.g * theta.sin() - omega * v) / r
        return torch.stack((du[..., 0], du[..., 1], turn, du[..., 3]), -1)

    t, how = [0.0, 5.0], dict(scheme="dopri5", rtol=1e-10, atol=1e-12)
    drift = lambda rate: (
        (system.energy(at.evolve(rate, u0, t, **how).final) - system.energy(u0)).abs().max()
    )
    assert drift(system) < 1e-6
    assert drift(as_printed) > 1e-1


@pytest.mark.parametrize("links", [1, 2, 3, 10])
def test_tensions_give_the_paper_s_accelerations(links):
    """Eq. 13: A theta'' = b."""
    system = at.systems.PendulumChain(links)
    u = torch.randn(7, 2 * links, **F64)
    theta, omega = u.chunk(2, -1)
    i = torch.arange(1, links + 1, **F64)
    c = links - torch.maximum(i[:, None], i) + 1
    apart = theta[:, :, None] - theta[:, None]
    b = -(c * omega[:, None] ** 2 * apart.sin()).sum(-1) - (links - i + 1) * system.g * theta.sin()
    expected = torch.linalg.solve(c * apart.cos(), b)
    torch.testing.assert_close(system(0.0, u)[:, links:], expected, rtol=1e-10, atol=1e-10)


def test_one_link_is_the_pendulum():
    system = at.systems.PendulumChain(1)
    torch.testing.assert_close(
        system(0.0, torch.tensor([0.5, 0.2], **F64)), torch.tensor([0.2, -9.8 * math.sin(0.5)], **F64)
    )


def test_figure_eight_returns():
    system = at.systems.ThreeBody()
    u0 = torch.tensor(system.FIGURE_EIGHT, **F64)
    solved = at.evolve(system, u0, [0.0, system.PERIOD], "dopri5", rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(solved.final, u0, rtol=0, atol=1e-6)


def test_henon_heiles_samples_stay_bounded():
    system = at.systems.HenonHeiles()
    assert system.energy(system.sample(10_000)).max() < 1 / 6


def test_lorenz_fixed_points():
    c = math.sqrt(8 / 3 * 27)
    rate = at.systems.Lorenz()(0.0, torch.tensor([c, c, 27.0], **F64))
    assert rate.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: at.systems.SpringMass(0), "at least one mass"),
        (lambda: at.systems.PendulumChain(0), "at least one link"),
    ],
)
def test_bad_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


STIFF = [at.systems.Robertson, at.systems.HIRES, at.systems.Oregonator, at.systems.Pollution]


@pytest.mark.parametrize("make", STIFF)
def test_stiff_systems_end_at_the_published_states(make):
    reference = torch.tensor(make.REFERENCE, **F64)
    smallest = 1e-3 * reference.clamp(max=1e-3)
    solved = at.evolve(
        make(),
        torch.tensor(make.START, **F64),
        [0.0, make.END],
        "rodas5p",
        rtol=1e-5,
        atol=1e-5 * smallest,
    )
    assert solved.ok
    assert ((solved.final - reference) / reference).abs().max() < 1e-3
    assert solved.stats.steps < 600


@pytest.mark.slow
@pytest.mark.parametrize("make", STIFF)
def test_radau_ends_at_the_published_states(make):
    from scipy.integrate import solve_ivp

    system = make()
    rate = lambda t, u: system(t, torch.from_numpy(u.copy())).numpy()
    jacobian = lambda t, u: torch.func.jacrev(lambda u: system(t, u))(torch.from_numpy(u.copy())).numpy()
    solved = solve_ivp(
        rate, (0.0, make.END), make.START, "Radau", rtol=1e-10, atol=1e-20, jac=jacobian
    ).y[:, -1]
    torch.testing.assert_close(
        torch.from_numpy(solved), torch.tensor(make.REFERENCE, **F64), rtol=1e-9, atol=0.0
    )


def test_pollution_keeps_its_nitrogen_and_sulphur():
    system = at.systems.Pollution()
    nitrogen, sulphur = torch.zeros(2, 20, **F64)
    nitrogen[[0, 1, 12, 14, 18]], nitrogen[19] = 1, 2
    sulphur[[16, 17]] = 1
    du = system(0.0, torch.rand(5, 20, **F64))
    rounding = 1e-14 * du.abs().max()
    assert (du @ nitrogen).abs().max() < rounding
    assert (du @ sulphur).abs().max() < rounding
