"""Properties of the simulated workers of benchmarks/workers.py, on which the real engine runs."""

import math
import sys
from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks.data_parallel import Training
from benchmarks.simulated_ray import SLOWER, Case, SimulatedRay, replaced_ray, simulate

HARSH = Case(20, 200, 10.0, startup=1.0, spread=0.1, slow=0.05, mtbf=400.0, repair=30.0, detection=2.0)


@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (1, 7), (5, 20), (7, 20), (30, 20)])
def test_undisturbed_jobs_take_the_closed_form(workers, shards):
    outcome = simulate(Case(workers, shards, 3.0, startup=2.0))
    assert outcome.wall == pytest.approx(2.0 + math.ceil(shards / workers) * 3.0)
    assert not outcome.died
    assert not outcome.begun_again


def test_one_worker_waits_for_each_transfer_but_not_for_the_disk():
    case = Case(1, 20, 3.0, size=1e6, link=2e6, handling=0.25, startup=2.0)
    assert simulate(case).wall == pytest.approx(2.0 + 20 * (3.0 + 0.5) + 0.25)


@pytest.mark.parametrize("cost", ["link", "command"])
def test_many_workers_are_as_fast_as_the_slowest_shared_resource(cost):
    one_second = {"link": {"size": 1e6, "link": 1e6}, "command": {"handling": 1.0}}[cost]
    case = Case(100, 1_000, 10.0, **one_second)
    assert simulate(case).wall == pytest.approx(1_000.0, rel=0.02)


def test_slow_machines_take_their_factor():
    case = Case(5, 20, 3.0)
    assert simulate(replace(case, slow=1.0)).wall == pytest.approx(SLOWER * simulate(case).wall)


@pytest.mark.parametrize("seed", range(5))
def test_every_shard_is_delivered_exactly_once(seed):
    outcome = simulate(replace(HARSH, mtbf=1_000.0), seed)
    assert not outcome.died
    assert outcome.begun_again > 0
    assert sorted(outcome.delivered) == list(range(HARSH.shards))


def test_equal_seeds_give_equal_outcomes():
    assert simulate(HARSH, 3) == simulate(HARSH, 3)


def test_more_failures_never_shorten_a_job_on_average():
    mean = lambda mtbf: fmean(simulate(replace(HARSH, mtbf=mtbf), seed).wall for seed in range(10))
    walls = [mean(mtbf) for mtbf in (math.inf, 3_000.0, 1_000.0)]
    assert walls == sorted(walls)


def test_probability_of_a_failed_job_agrees_with_the_simulation():
    case = Case(20, 100, 10.0, mtbf=60.0, repair=1.0, detection=0.0)
    expected = case.job_failure_probability
    assert 0.01 < expected < 0.99
    runs = 60
    died = sum(simulate(case, seed).died for seed in range(runs)) / runs
    assert abs(died - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)
    assert replace(case, mtbf=math.inf).job_failure_probability == 0


def test_the_installed_ray_is_restored():
    before = sys.modules.get("ray")
    with replaced_ray(SimulatedRay(Case(1, 1, 1.0), 0)):
        assert sys.modules["ray"] is not before
    assert sys.modules.get("ray") is before


@pytest.mark.parametrize(("processes", "hours"), [(8, 10), (64, 10), (1_000, 1_000)])
def test_useful_training_agrees_with_the_closed_form(processes, hours):
    training = Training(processes, 3_600.0 * hours)
    assert training.useful() == pytest.approx(training.expected_useful(), rel=0.03)
    best = training.best_interval()
    assert best["young"] == pytest.approx(best["daly"], rel=0.1)
    optimum = replace(training, interval=best["daly"]).expected_useful()
    for factor in (0.5, 2.0):
        assert replace(training, interval=factor * best["daly"]).expected_useful() < optimum


def test_a_step_takes_the_slowest_process_and_the_all_reduce():
    even = Training(4, math.inf, spread=0.0)
    assert even.step_seconds() == pytest.approx(even.step + 1.5 * even.gradients / even.link)
    steps = [Training(processes, math.inf).step_seconds() for processes in (1, 8, 64, 512)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("seed", range(5))
def test_copies_of_slow_shards_deliver_every_shard_once(seed):
    outcome = simulate(replace(HARSH, mtbf=1_000.0, copies=True), seed)
    assert not outcome.died
    assert sorted(outcome.delivered) == list(range(HARSH.shards))


def test_copies_shorten_a_job_with_slow_machines():
    case = Case(100, 1_000, 60.0, slow=0.02)
    alone, copied = simulate(case).wall, simulate(replace(case, copies=True)).wall
    assert alone >= SLOWER * 60.0
    # A copy begins when a shard has taken twice the usual time, and then takes the usual time.
    assert copied < alone - 60.0


def test_equal_machines_begin_no_copies():
    case = Case(10, 105, 60.0)
    assert simulate(replace(case, copies=True)) == simulate(case)
