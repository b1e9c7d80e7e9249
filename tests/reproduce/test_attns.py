"""The AttNS paper: experiments run, and the task's numbers are what they should be."""

import json
import math

import pytest
import torch

from attractor import evolve, systems
from attractor.ode.pairs import one_step
from attractor.reproduce import (
    CONTRADICTED,
    INCONCLUSIVE,
    SUPPORTED,
    Context,
    Results,
    catalogue,
    find,
    run,
)
from attractor.reproduce.summary import rows
from attractor.reproduce.tasks import solver_settings, solver_theory, solvers
from experiments import attns_shared, attns_table1

NAMES = [name for name, e in catalogue().items() if e.paper == "attns"]
SMALL = {
    "train": 30, "test": 12, "epochs": 3, "width": 16, "substeps": 8,
    "horizon": {"spring-mass": 4.0, "2-link": 2.0, "elastic": 2.0},
}  # fmt: skip


def test_all_places_are_there():
    places = [
        "fig2",
        "fig3",
        "fig4",
        "fig5",
        "table1",
        "table2",
        "table6",
        "top10",
        "theorem51",
        "theorem52",
    ]
    assert sorted(NAMES) == sorted(f"attns-{place}" for place in [*places, "normalised"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_runs_at_smoke_scale(name):
    experiment = catalogue()[name]
    results = run(experiment, "smoke")
    assert results.complete
    assert len(rows(experiment, results)) == len(experiment.arms_of("smoke"))  # all columns are there
    if len(results.arms) == len(experiment.arms):  # judge and picture can do with what the task gives
        assert experiment.judge(results).why
        assert experiment.picture(results) is not None


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["paper", "normalised", "default"])
def test_the_same_numbers_again(recipe):
    config = {**SMALL, "system": "2-link", "recipe": recipe, "correction": "neurvec"}
    first, second = (solvers.solve(config, Context(seed=3)) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)  # NaN and all
    assert first["metrics"]["mse"] != solvers.solve(config, Context(seed=4))["metrics"]["mse"]


def test_the_error_is_the_mean_over_all_states():
    """RK4 on a chain of masses, against the matrix exponential, by hand."""
    config = {**SMALL, "system": "spring-mass", "n": 3, "recipe": "default", "correction": None}
    found = solvers.solve(config, Context())["metrics"]
    chain = systems.SpringMass(3)
    u0 = chain.sample(12, torch.Generator().manual_seed(solver_settings.TEST_SEED), torch.float64)
    t = torch.arange(21, dtype=torch.float64) * 0.2
    off = (evolve(chain, u0, t, "rk4").u - chain.exact(t, u0)).square()
    assert found["mse"] == found["plain"] == pytest.approx(off.mean().item(), rel=1e-12)
    assert found["mse_end"] == pytest.approx(off[-1].mean().item(), rel=1e-12)


def test_a_linear_system_is_corrected_to_rounding_by_the_default_recipe():
    config = {**SMALL, "system": "spring-mass", "n": 3, "recipe": "default", "correction": "attns"}
    assert solvers.solve(config, Context())["metrics"]["mse"] < 1e-24


def test_what_is_lost_counts_as_the_ceiling():
    u = torch.zeros(2, 3, 1, dtype=torch.float64)
    solved = evolve(lambda t, u: u**3, u[0] + torch.tensor([[0.0], [0.0], [9e9]]), torch.arange(5.0))
    found = solvers.error(solved, torch.zeros(5, 3, 1, dtype=torch.float64))
    assert found == {
        "mse": solver_settings.CEILING,
        "mse_end": solver_settings.CEILING,
        "lost": pytest.approx(1 / 3),
    }


def test_the_paper_s_training_data_are_those_of_its_scheme():
    chain = systems.SpringMass(3)
    u0 = chain.sample(4, torch.Generator().manual_seed(0), torch.float64)
    ours = solver_settings.by_scheme(chain, u0, solver_settings.get_scheme("euler"), 0.2, 3)
    t = torch.arange(601, dtype=torch.float64) * 1e-3
    torch.testing.assert_close(ours, evolve(chain, u0, t, "euler", every=200).u, rtol=1e-11, atol=1e-11)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["paper", "normalised"])
@pytest.mark.parametrize("correction", ["attns", "neurvec"])
def test_training_as_printed_learns_and_folds(recipe, correction):
    """What a trained correction adds has the error that its last loss says, in its own units."""
    config = {**SMALL, "system": "2-link", "recipe": recipe, "correction": correction, "epochs": 120}
    context = Context()
    given = solver_settings.make_setting(config, context)
    pairs = one_step(given.system, given.scheme, given.dt, [given.run], False)
    model, found = solvers.train_as_printed(config, pairs, context, 120, 1.0)
    own = next(model.parameters()).dtype
    off = model(pairs.u.to(own), pairs.slope.to(own), pairs.dt).double() - pairs.error
    size = pairs.error.std(0) if recipe == "normalised" else 1.0
    assert (off / size).square().mean().item() == pytest.approx(found["metrics"]["loss"], rel=0.1)
    assert found["metrics"]["loss"] < 0.9 * found["curves"]["loss"][0]
    assert found["metrics"]["updates"] == 120


def test_constant_noise_is_what_a_perfect_correction_would_subtract():
    config = {**SMALL, "system": "elastic"}
    given = solver_settings.make_setting(config, Context())
    pairs = one_step(given.system, given.scheme, given.dt, [given.run], False)
    moved = solvers._shift_starts(pairs, 1e-5, given)
    after = moved.u + moved.dt * moved.slope + moved.error
    torch.testing.assert_close(after, pairs.u + pairs.dt * pairs.slope + pairs.error)


def test_the_largest_second_derivatives_are_chosen():
    config = {**SMALL, "system": "2-link", "test": 40}
    whole, top = (
        solver_settings.make_setting({**config, **more}, Context()).truth for more in ({}, {"top": 0.1})
    )
    size = lambda truth: (
        solver_settings.second_derivative(systems.PendulumChain(2), truth).abs().amax((0, -1))
    )
    assert top.shape[1] == 4
    torch.testing.assert_close(size(top), size(whole).sort(descending=True).values[:4])


@pytest.mark.slow
def test_theorems_hold_for_a_small_fit():
    config = {**SMALL, "system": "2-link", "recipe": "default", "correction": "attns", "end": 1.0}
    bound = solver_theory.bound(config, Context())["metrics"]
    assert bound["actual"] <= bound["carried"] <= bound["classical"] <= bound["theorem"]
    assert solver_theory.lipschitz(config, Context())["metrics"]["used"] <= 1


@pytest.mark.parametrize(
    ("ours", "theirs", "epochs", "word"),
    [
        ([1e-6, 2e-6, 1e-6], [1e-4, 1e-4, 3e-4], 500, SUPPORTED),
        ([1e-6, 2e-6, 1e-6], [1e-4, 1e-4, 3e-4], 10, INCONCLUSIVE),  # a short training proves nothing
        ([1e-4, 1e-4, 3e-4], [1e-6, 2e-6, 1e-6], 500, CONTRADICTED),
        ([1e-4, 1e-4, 3e-4], [1e-6, 2e-6, 1e-6], 10, INCONCLUSIVE),
        ([1e-6, 1e-6, 1e-6], [1e-6, 1e-6, 1e-6], 500, INCONCLUSIVE),  # level
        ([1e-6], [2e-6], 500, INCONCLUSIVE),  # nor can one seed on the other side
        ([2e-6], [1e-6], 500, INCONCLUSIVE),  # one seed cannot tell
        ([1e-6, 2e-6, 4e-6], [1.1e-6, 1.5e-6, 3e-6], 500, INCONCLUSIVE),  # nor three that differ so
        ([None, None], [1e-6, 1e-6], 500, CONTRADICTED),  # a training that diverged is the worst
        ([1e-6, 1e-6], [None, None], 500, SUPPORTED),
        ([1e40, 1e40], [1e40, 1e40], 500, INCONCLUSIVE),  # both are lost
    ],
)
def test_which_error_is_smaller(ours, theirs, epochs, word):
    results = pair(ours, theirs, epochs={"s": epochs})
    assert attns_shared.smaller("a", ["a", "b"])(results).direction == word


def pair(ours, theirs, **config):
    config = {"system": "s", "recipe": "paper", **config}
    runs = {
        arm: {seed: {"metrics": {"mse": x}, "config": config} for seed, x in enumerate(errors)}
        for arm, errors in (("a", ours), ("b", theirs))
    }
    return Results("x", "cpu", "mse", ["a", "b"], [0, 1, 2], runs)


def test_epochs_of_half_of_the_data_are_epochs():
    """A claim about half of the data can be contradicted."""
    ours, theirs = [1e-4, 1e-4, 3e-4], [1e-6, 2e-6, 1e-6]
    judge = attns_shared.smaller("a", ["a", "b"])
    assert judge(pair(ours, theirs, epochs=500, share=0.5)).direction == CONTRADICTED
    assert judge(pair(theirs, ours, epochs=500, share=0.5)).direction == SUPPORTED
    for one, other in ((ours, theirs), (theirs, ours)):
        short = judge(pair(one, other, epochs=250, share=0.5))
        assert short.direction == INCONCLUSIVE
        assert short.why.endswith("a training of 250 of 500 epochs decides nothing either way")
    assert judge(pair(ours, theirs, recipe="default", share=0.5)).direction == CONTRADICTED


@pytest.mark.parametrize(
    ("ratio", "spread", "word"),
    [(0.1, 1.1, SUPPORTED), (1.1, 2.0, INCONCLUSIVE), (10, 1.1, CONTRADICTED), (0.9, 2.0, INCONCLUSIVE)],
)
def test_verdicts_on_inputs(ratio, spread, word):
    runs = {
        attns_shared.name(s, what, r): {
            seed: {"metrics": {"mse": x * spread ** (seed * (what == "AttNS"))},
                   "config": {"system": s, "recipe": r, "epochs": 500}}
            for seed in range(-1, 2)
        }
        for r in ("paper", "normalised", "default")
        for s in attns_table1.SYSTEMS
        for what, x in (("AttNS", ratio * 1e-6), ("NeurVec", 1e-6))
    }  # fmt: skip
    judge = find("attns-normalised").judge
    assert judge(Results("attns-normalised", "gpu", "mse", list(runs), [0], runs)).direction == word


def test_what_goes_around_a_network_may_be_its_input_itself(monkeypatch):
    made = []
    taken = solvers.train_epochs
    keep = lambda model, *args, **more: (made.append(model), taken(model, *args, **more))[1]
    monkeypatch.setattr(solvers, "train_epochs", keep)
    config = {**find("attns-table2").config("2-link: with identity, paper", "smoke"), "train": 4}
    solvers.solve(config, Context())
    assert torch.equal(made[0].net.around.weight, torch.eye(4))


@pytest.mark.parametrize(
    ("narrow", "middle", "wide", "word"),
    [
        ([3e-6, 4e-6], [2e-6, 1e-6], [1e-7, 2e-7], SUPPORTED),
        ([1e-7, 1.1e-7], [2e-6, 1e-6], [3e-6, 3.2e-6], CONTRADICTED),
        ([1e-7, 9e-6], [2e-6, 1e-6], [3e-6, 1e-6], INCONCLUSIVE),  # seeds differ by more
        ([1e-7], [2e-6], [3e-6], INCONCLUSIVE),
    ],
)
def test_verdicts_on_width(narrow, middle, wide, word):
    runs = {}
    for system in attns_table1.SYSTEMS:
        config = {"system": system, "recipe": "paper", "epochs": {system: 500}}
        for what, errors in zip(attns_table1.ENDS, (narrow, middle, wide)):
            made = {s: {"metrics": {"mse": x}, "config": config} for s, x in enumerate(errors)}
            runs[attns_shared.name(system, what, "paper")] = made
    results = Results("attns-table1", "gpu", "mse", list(runs), [0, 1], runs)
    assert attns_table1.wider(results).direction == word


def test_no_ratio_of_errors_where_trajectories_are_lost():
    runs = {
        attns_shared.name(s, f"h = {h}, width {w}", "paper"): {
            seed: {
                "metrics": {"mse": solver_settings.CEILING if s == lost and h == 3 else 1e-6, "step": h},
                "config": {"system": s, "recipe": "paper", "epochs": {s: 500}},
            }
            for seed in (0, 1)
        }
        for lost in ("elastic",)
        for s in attns_table1.SYSTEMS
        for h, w in ((2, 512), (2, 1024), (2, 2048), (3, 1024), (4, 1024))
    }
    made = Results("attns-table1", "gpu", "mse", list(runs), [0], runs)
    verdict = attns_table1.deeper(made)
    words = [effect.direction for effect in verdict.effects]
    assert words == [SUPPORTED] * 4 + [INCONCLUSIVE] * 2
    assert verdict.direction == INCONCLUSIVE
    assert "elastic not known, trajectories are lost" in verdict.why
    assert attns_table1.slower(made).direction == SUPPORTED


def test_curves_are_short_and_keep_their_ends():
    thin = solvers.thin([i / 3 for i in range(1000)])
    assert len(thin) == solvers.POINTS
    assert (thin[0], thin[-1]) == (0.0, 333.0)
    assert math.isnan(solvers.thin([None])[0])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["paper", "normalised", "default"])
def test_on_a_gpu_it_is_the_same_experiment(recipe):
    config = {**SMALL, "system": "elastic", "recipe": recipe, "correction": "attns", "epochs": 50,
              "compile": True, "speed": True}  # fmt: skip
    ours, theirs = (
        solvers.solve({**config, "compile": device == "cuda"}, Context(device=device))
        for device in ("cuda", "cpu")
    )
    assert ours["data"] == theirs["data"]
    assert ours["metrics"]["plain"] == pytest.approx(theirs["metrics"]["plain"], rel=1e-6)
    assert ours["metrics"]["lost"] == 0
    assert ours["metrics"]["step"] > 0
    if recipe == "default":
        assert abs(ours["metrics"]["log_mse"] - theirs["metrics"]["log_mse"]) < 2
    else:
        assert ours["metrics"]["loss"] == pytest.approx(theirs["metrics"]["loss"], rel=0.3)
