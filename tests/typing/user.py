# mypy: disallow-untyped-calls, disallow-any-generics, disallow-subclassing-any, disallow-untyped-decorators
# mypy: check-untyped-defs, warn-return-any, strict-equality, extra-checks
"""A user's program, for type checkers: public names as a user writes them. `tests/test_typing.py` checks it."""

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import attractor as at
from attractor.attention import Classifier, LanguageModel, PDEAttention, pde_attention
from attractor.attention.causality import assert_causal
from attractor.attention.pdes import Diffusion, Wave
from attractor.ode import HybridSolver, corrections, fit, pretrained, systems
from attractor.ode.compare import Comparison, compare
from attractor.report import Page
from attractor.residual import ResNet, StiffnessProfile, insert_gates, probe, resnet_cifar
from attractor.storage.objects import ObjectPath
from attractor.train import History, Recipe, train


def rate(t: Any, u: Tensor) -> Tensor:
    return -u * u


def sample(n: int, generator: torch.Generator | None = None) -> Tensor:
    return torch.rand(n, 1, generator=generator, dtype=torch.float64)


def solve() -> None:
    pendulum = systems.PendulumChain(links=2)
    u0 = pendulum.sample(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_type(u0, Tensor)
    trajectory = at.evolve(pendulum, u0, torch.linspace(0, 1, 11), "rk4")
    assert_type(trajectory, at.Trajectory)
    assert_type(trajectory.u, Tensor)
    assert_type(trajectory.stats.rate_calls, int)
    assert_type(len(trajectory), int)
    trajectory.plot("states.png")
    energy: Tensor = pendulum.energy(trajectory.final)
    print(energy, trajectory.to_pandas())

    solver = fit(rate, dt=0.1, horizon=1.0, sample=sample, trajectories=100)
    assert_type(solver, HybridSolver)
    assert_type(solver.solve(u0, 1.0, guard=True), at.Trajectory)
    assert_type(solver.step(u0), Tensor)
    assert_type(solver.save("folder"), Path | ObjectPath)
    assert_type(HybridSolver.load("folder", rate), HybridSolver)
    assert_type(HybridSolver.from_pretrained("elastic-pendulum"), HybridSolver)
    assert_type(pretrained.names(), list[str])
    assert_type(solver.fit_error, float | None)
    own = HybridSolver(rate, "rk4", corrections.AttNS(1, width=32), 0.1)
    found = compare(own, horizon=1.0, batch=10, peers=False)
    assert_type(found, Comparison)
    assert_type(found.verdict, str)
    assert_type(found.gain, float)


def network() -> None:
    net = resnet_cifar(20, gate="se")
    assert_type(net, ResNet)
    profile = probe(net, [torch.randn(4, 3, 32, 32)])
    assert_type(profile, StiffnessProfile)
    assert_type(profile.tns, Tensor)
    assert_type(profile.summary(), str)
    profile.plot("nsi", Path("nsi.png"))
    insert_gates(nn.Sequential(net), "stepnet")
    history = train(net, [(torch.randn(4, 3, 32, 32), torch.zeros(4).long())], recipe=Recipe(epochs=1))
    assert_type(history, History)


def transformer() -> None:
    query = torch.randn(1, 4, 16, 8)
    assert_type(pde_attention(query, query, query, is_causal=True, pde=Diffusion(0.1), steps=4), Tensor)
    layer = PDEAttention(32, 4, pde="wave", causal=True)
    model = LanguageModel(100, dim=32, heads=4, layers=2, pde=Wave(0.1), learn=False)
    classifier = Classifier(100, 2, dim=32)
    assert_causal(model, torch.zeros(1, 8, dtype=torch.long))
    print(layer, classifier)


def report() -> None:
    page = Page("Runs").section("One").table(["a"], [[1.0]])
    assert_type(page, Page)
    assert_type(page.write("page.html"), Path)
