"""Random numbers belong to a call: threads do not change each other's, nor those of their callers."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import attractor as at
from attractor.train import Recipe, evaluate, generators, train, train_seeds

RECIPE = Recipe(epochs=2, batch=8, learning_rate=0.1, warmup=0, precision="fp32", crop=0)
CPU = torch.device("cpu")


def data():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(24, 6, generator=generator), torch.arange(24) % 3


def loader():
    return DataLoader(TensorDataset(*data()), batch_size=8, shuffle=True)


def model(seed=0):
    with generators.own(seed):
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def trained(seed):
    net = model(seed)
    train(net, loader(), loader(), Recipe(**{**vars(RECIPE), "seed": seed}), device="cpu")
    return [p.detach().clone() for p in net.parameters()]


def in_threads(call, arguments):
    """Call a function with each argument, all at the same time."""
    start = threading.Barrier(len(arguments))

    def one(argument):
        start.wait()
        return call(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(one, arguments))


def global_state():
    python, numpys = random.getstate(), np.random.get_state()
    return [torch.get_rng_state().tolist(), python, numpys[1].tolist(), numpys[2:]]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_trainings_in_four_threads_give_the_weights_of_one_after_the_other():
    seeds = [0, 1, 2, 3]
    expected = [trained(seed) for seed in seeds]
    before = global_state()
    for _ in range(3):
        assert all(map(same, in_threads(trained, seeds), expected))
    assert global_state() == before
    assert not same(expected[0], expected[1])


def test_loads_and_fits_in_threads_do_not_change_a_training(tmp_path):
    solver = at.HybridSolver(at.systems.ElasticPendulum(), "rk4", at.corrections.AttNS(4, width=8), 0.1)
    solver.save(tmp_path / "solver")
    expected = trained(0)

    def others(i):
        if i == 0:
            return trained(0)
        for _ in range(20):
            at.HybridSolver.load(tmp_path / "solver")
        evaluate(model(), loader())
        return expected

    assert all(same(weights, expected) for weights in in_threads(others, [0, 1, 2, 3]))


@pytest.mark.filterwarnings("ignore:the correction makes held-out trajectories worse")
def test_fits_in_threads_are_those_of_one_after_the_other():
    def fitted(seed):
        solver = at.fit(
            at.systems.HarmonicOscillator(), dt=0.1, horizon=0.5, trajectories=10, width=8, seed=seed,
            fine_dt=0.05, correction="attns", recipe=at.ode.Paper(epochs=2) if seed % 2 else "default",
        )  # fmt: skip
        return [p.detach().clone() for p in solver.correction.parameters()]

    expected = [fitted(seed) for seed in range(4)]
    assert all(map(same, in_threads(fitted, range(4)), expected))


LEAVE_ALONE = {
    "load": lambda folder: at.HybridSolver.load(folder),
    "fit": lambda folder: at.fit(
        at.systems.HarmonicOscillator(), dt=0.1, horizon=0.5, trajectories=10, width=8, fine_dt=0.05
    ),
    "tune": lambda folder: at.tune(
        at.systems.HarmonicOscillator(), error=1e-3, horizon=0.5, batch=4, budget=1.0, compile=False
    ),
    "probe": lambda folder: at.probe(at.residual.pretrained.load("digits"), [torch.zeros(2, 1, 8, 8)]),
    "pretrained network": lambda folder: at.residual.pretrained.load("digits"),
    "pretrained solver": lambda folder: at.HybridSolver.from_pretrained("elastic-pendulum"),
    "train": lambda folder: trained(0),
    "train_seeds": lambda folder: train_seeds(
        lambda: nn.Linear(6, 3), loader(), loader(), RECIPE, seeds=(0, 1), device="cpu"
    ),
    "evaluate": lambda folder: evaluate(model(), loader()),
    "fine data": lambda folder: at.ode.make_trajectories(
        at.systems.Lorenz(), folder / "data", trajectories=2, dt=0.1, horizon=0.2, fine_dt=0.1
    ),
    "sample": lambda folder: at.systems.Lorenz().sample(3, generator=torch.Generator()),
}


@pytest.mark.filterwarnings("ignore:the correction makes held-out trajectories worse")
@pytest.mark.parametrize(
    "call",
    [pytest.param(f, id=n, marks=[pytest.mark.slow] * (n == "tune")) for n, f in LEAVE_ALONE.items()],
)
def test_calls_leave_the_global_generators_alone(call, tmp_path):
    solver = at.HybridSolver(at.systems.ElasticPendulum(), "rk4", at.corrections.AttNS(4, width=8), 0.1)
    folder = solver.save(tmp_path / "solver")
    before = global_state()
    call(folder if call is LEAVE_ALONE["load"] else tmp_path)
    assert global_state() == before


@pytest.mark.parametrize("name", ["load", "fit"])
def test_calls_do_not_read_the_global_generators(name, tmp_path, monkeypatch):
    """Not even to put them back: a thread that draws meanwhile would see its numbers again."""
    solver = at.HybridSolver(at.systems.ElasticPendulum(), "rk4", at.corrections.AttNS(4, width=8), 0.1)
    folder = solver.save(tmp_path / "solver")

    def refused(*args, **kwargs):
        raise AssertionError("a global generator is used")

    for module, functions in (
        (torch, ("get_rng_state", "set_rng_state", "manual_seed")),
        (torch.random, ("get_rng_state", "set_rng_state", "manual_seed", "fork_rng")),
        (np.random, ("get_state", "set_state", "seed")),
        (random, ("getstate", "setstate", "seed")),
    ):
        for function in functions:
            monkeypatch.setattr(module, function, refused)
    LEAVE_ALONE[name](folder)


# ---- generators of a block


def test_own_generators_draw_what_a_global_one_would():
    def drawn():
        layer = nn.Linear(3, 4)
        x = torch.empty(5).normal_()
        mask = nn.functional.dropout(torch.ones(8), 0.5)
        whole = [torch.randperm(6), torch.randint(9, (3,)), torch.randint(2, 9, (3,))]
        return [
            layer.weight.detach(),
            x,
            mask,
            torch.rand(2),
            torch.randn(2),
            *whole,
            torch.rand_like(x),
        ]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = drawn()
    before = global_state()
    with generators.own(7):
        found = drawn()
        given = torch.rand(2, generator=torch.Generator().manual_seed(1))
    assert global_state() == before
    assert same(found, expected)
    assert torch.equal(given, torch.rand(2, generator=torch.Generator().manual_seed(1)))
    with generators.own(7):
        assert nn.Linear(3, 4, device="meta").weight.is_meta


def test_own_generators_are_those_of_one_thread():
    def drawn(seed):
        with generators.own(seed):
            return [nn.Linear(4, 4).weight.detach() for _ in range(50)]

    expected = [drawn(seed) for seed in range(4)]
    assert all(map(same, in_threads(drawn, range(4)), expected))


def test_forked_generators_are_one_threads_at_a_time():
    inside, most = 0, 0

    def one(_):
        nonlocal inside, most
        with generators.forked(CPU), generators.forked(CPU):
            inside += 1
            most = max(most, inside)
            torch.rand(1000)
            inside -= 1

    in_threads(one, range(4))
    assert most == 1
