"""Fine data of rates that depend on t, whose shards start at different times."""

import math

import pytest
import torch

from attractor.ode.trajectories import Plan, make_run, make_runs

F64 = {"dtype": torch.float64}


def of_components(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, torch.cos(t) - x**3), -1)


def of_states(t, u):
    return torch.cos(t) * u - u**3


def of_one_time(t, u):
    return math.cos(float(t)) * u - u**3


def of_parameters(t, u, p):
    return torch.cos(t) * p[..., :1] - u**3


def states(n, generator):
    return torch.rand(n, 2, generator=generator, **F64) + 0.5


@pytest.mark.parametrize("f", [of_components, of_states, of_one_time, of_parameters])
def test_shards_followed_together_equal_shards_followed_alone(f):
    plans = (
        Plan(9, 0.25, 4, 4, period=2 * math.pi, shard_size=3),
        Plan(4, 0.25, 4, 4, period=2 * math.pi, shard_size=2, stream="held out"),
    )
    shards = [(plans[0], 0), (plans[1], 0), (plans[0], 2), (plans[1], 1), (plans[0], 0)]
    calls = []

    def rate(t, u, *p):
        calls.append(len(u))
        return f(t, u, *p)

    parameters = states if f is of_parameters else None
    together = make_runs(rate, states, shards, None, parameters)
    count = len(calls)
    for run, (plan, shard) in zip(together, shards):
        alone = make_run(f, states, plan, shard, None, parameters)
        assert run.t0 == alone.t0 == plan.start(shard)
        torch.testing.assert_close(run.u, alone.u, rtol=1e-13, atol=1e-14)
        assert run.parameters is None or torch.equal(run.parameters, alone.parameters)
    assert len({run.t0 for run in together}) == 4
    one_batch = 16 * 12  # steps of dop853
    assert count < 1.2 * one_batch if f is not of_one_time else count >= 4 * one_batch
