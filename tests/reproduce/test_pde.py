"""Experiments of the PDE attention paper: all of them run; tasks give what is known beforehand."""

import json
import math
import sys

import pytest
import torch

from attractor.reproduce import CONTRADICTED, INCONCLUSIVE, SUPPORTED, Results, catalogue, find, run
from attractor.reproduce.tasks import Context, maps, mixed, texts
from attractor.train import CheckpointError

NAMES = [name for name in catalogue() if name.startswith("pde-")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path):
    experiment = find(name)
    results = run(experiment, "smoke", folder=tmp_path)
    assert not results.missing()
    for runs in results.runs.values():
        assert {experiment.metric, *experiment.others} <= runs[0]["metrics"].keys()


def config(name, arm, **changes):
    return {**find(name).config(arm, "smoke"), **changes}


def test_the_same_numbers_twice():
    given = config("pde-leak", "PDE, causal")
    first, second = (texts.language(given, Context(seed=3)) for _ in range(2))
    assert str(first) == str(second)  # NaN is not NaN
    assert texts.language(given, Context(seed=4)) != first


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["standard", "PDE, causal"])
def test_models_that_are_causal_have_one_perplexity(arm):
    given = config("pde-leak", arm, shorten=16, evaluations=1)
    given["recipes"]["fair"] |= {"learning_rate": 1e-2, "updates": 20, "batch_tokens": 512}
    metrics = texts.language(given, Context())["metrics"]
    assert metrics["causal"] == 1
    assert metrics["left_to_right"] == pytest.approx(metrics["sample_forced"], rel=1e-4)


def test_the_smallest_scale_shows_the_leak():
    found = {
        arm: run(find("pde-leak"), "smoke", arms=[arm]).runs[arm][0]["metrics"]
        for arm in ("PDE, causal", "PDE, without walls")
    }
    assert [metrics["causal"] for metrics in found.values()] == [1, 0]
    alone, forced = (
        {arm: m[name] for arm, m in found.items()} for name in ("left_to_right", "sample_forced")
    )
    assert alone["PDE, without walls"] > 1.5 * forced["PDE, without walls"]
    assert alone["PDE, causal"] == pytest.approx(forced["PDE, causal"], rel=1e-4)


@pytest.mark.parametrize("channels", [(), (2, 4)], ids=["a layer", "a channel"])
def test_mixed_values_are_attention_to_a_convolution(channels):
    torch.manual_seed(0)
    attention = mixed.MixedValues(3, *channels).double()
    torch.nn.init.normal_(attention.weight)
    query, key, value = torch.randn(3, 2, 2, 7, 4, dtype=torch.float64)
    weight = attention.weight.expand(3, 2, 1, 4).flatten(1).T[:, None].flip(2)  # [channels, 1, 3]
    rows = value.transpose(2, 3).flatten(1, 2)  # [batch, channels, tokens]
    moved = torch.conv1d(torch.nn.functional.pad(rows, (2, 0)), weight, groups=8)
    moved = moved.view(2, 2, 4, 7).transpose(2, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, moved, is_causal=True)
    torch.testing.assert_close(attention(query, key, value, is_causal=True), expected)
    short = (x[..., :2, :] for x in (query, key, value))  # fewer tokens than weights
    torch.testing.assert_close(attention(*short, is_causal=True), expected[..., :2, :])


def test_every_layer_mixes_for_itself():
    given = config("pde-mixing", "mixed values, a channel")
    options = {**given["size"], **texts._model_options(given), "max_tokens": 8}
    model = texts.LanguageModel(20, **options)
    found = [m for m in model.modules() if isinstance(m, mixed.MixedValues)]
    assert [m.weight.shape for m in found] == [(5, 2, 1, 8)] * 2
    assert found[0].weight is not found[1].weight


def test_an_untrained_model_guesses():
    given = config("pde-leak", "standard", evaluations=1)
    given["recipes"]["fair"] |= {"learning_rate": 0.0, "updates": 1}
    metrics = texts.language(given, Context())["metrics"]
    assert metrics["perplexity"] == pytest.approx(257, rel=0.1)


def test_the_loss_in_parts_is_the_loss(monkeypatch):
    torch.manual_seed(0)
    model = texts.LanguageModel(20, dim=8, heads=2, layers=1, hidden=8, max_tokens=16, dropout=0.0)
    ids = torch.randint(20, (6, 13))
    whole = texts.next_token(model, ids)
    whole.sum().backward()
    gradient = model.embed.tokens.weight.grad.clone()
    model.zero_grad()
    monkeypatch.setattr(texts, "CHUNK", 10)
    parts = texts.next_token(model, ids)
    parts.sum().backward()
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(model.embed.tokens.weight.grad, gradient)


def test_words_that_decide_are_learnt():
    given = config("pde-table1", "SST-2, standard, paper's recipe")
    given["recipes"]["paper"] |= {"epochs": 15, "batch": 32, "learning_rate": 1e-2}
    outcome = texts.classify(given, Context())
    assert outcome["metrics"]["accuracy"] == 100
    assert len(outcome["curves"]["train_loss"]) == 15


def test_patience_ends_a_training(tmp_path):
    assert not texts._stale([3.0, 2.0, 2.5, 2.1], 3)
    assert texts._stale([3.0, 2.0, 2.5, 2.1, 2.0], 3)
    given = config("pde-table1", "SST-2, standard, paper's recipe")
    given["recipes"]["paper"] |= {"epochs": 9, "learning_rate": 0.0, "patience": 3}
    scratch = tmp_path / "results" / "pde_table1" / ".smoke" / "0-0"
    assert texts.classify(given, Context(scratch=scratch))["metrics"]["epochs"] == 4  # all losses equal
    # What is stopped after its last epoch does not train further.
    again = texts.classify(given, Context(scratch=scratch))
    assert json.dumps(again) == json.dumps(texts.classify(given, Context()))
    with pytest.raises(CheckpointError, match="steps per epoch"):
        texts.classify({**given, "limit": [40, 40]}, Context(scratch=scratch))


def test_what_was_interrupted_goes_on(tmp_path, monkeypatch):
    given = config("pde-leak", "standard", evaluations=4)
    scratch = tmp_path / "results" / "pde_leak" / ".smoke" / "0-0"
    whole = texts.language(given, Context())
    honest, calls = texts.left_to_right, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) in (3, 4):
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(texts, "left_to_right", interrupted)
    for _ in range(2):  # after the third epoch's checkpoint, and when it goes on from there
        with pytest.raises(KeyboardInterrupt):
            texts.language(given, Context(scratch=scratch))
    again = texts.language(given, Context(scratch=scratch))
    assert str(again["metrics"]) == str(whole["metrics"])  # NaN is not NaN
    assert again["curves"] == whole["curves"]


def test_windows_and_batches():
    ids = torch.arange(101)
    passes = texts.Windows(ids, 10, 4)
    rows = torch.cat(list(passes))
    assert len(passes) == 2
    assert rows.shape == (8, 11)
    assert len(rows[:, 0].unique()) == 8
    assert (rows[:, 0] % 10 == 0).all()
    assert all(row.shape == (4, 11) for row in texts.Windows(ids, 10, 4, steps=7))
    with pytest.raises(ValueError, match=r"ids has 101 tokens, and a text needs 101 \+ 1"):
        texts.Windows(ids, 101, 4)
    labels = torch.arange(10)
    sizes = [len(y) for _, y in texts.Texts(labels[:, None], labels, 4, shuffled=True)]
    assert sizes == [3, 3, 3]
    assert [len(y) for _, y in texts.Texts(labels[:, None], labels, 4)] == [4, 4, 2]


def test_diffusion_spreads_like_the_square_root():
    given = config("pde-theorem-range", "diffusion", tokens=64, steps=30)
    found = maps.spreading(given, Context())["metrics"]
    assert found["exponent"] == pytest.approx(0.5, abs=0.02)
    assert found["rate"] == pytest.approx(1, abs=0.05)
    # Four steps of [a, 1 - 2 a, a], a = 0.1: the ends are a^4 and 4 a^3 (1 - 2 a).
    assert found["reach"] == 4
    assert found["tail"] == pytest.approx(0.1 / (4 * 0.8))


def test_the_exact_map_does_not_stay():
    found = maps.hybrid(config("pde-hybrid", "exact, dt 0.25", decay=5.0), Context())["metrics"]
    assert found["start"] == found["truth"] == 0
    assert found["end"] == pytest.approx(found["stationary"])
    assert found["excess"] > 0.1


def test_layers_of_one_step_are_one_layer_of_many():
    errors = [
        maps.depth(config("pde-depth", "4 layers", layers=n), Context())["metrics"] for n in (32, 64)
    ]
    assert max(e["additive"] for e in errors) < 1e-15
    assert math.log2(errors[0]["error"] / errors[1]["error"]) == pytest.approx(1, abs=0.02)


# Verdicts: a paper's own numbers hold, if causal models have them; what does not differ does not


def verdict(name, values, **common):
    """Of made-up results: an arm's metric, or all its metrics; a list has one for each seed."""
    experiment = find(name)

    def made(given):
        return {"metrics": common | (given if isinstance(given, dict) else {experiment.metric: given})}

    runs = {
        arm: {seed: made(one) for seed, one in enumerate(given if isinstance(given, list) else [given])}
        for arm, given in values.items()
    }
    seeds = list(next(iter(runs.values())))
    return experiment.judge(Results(name, "gpu", experiment.metric, list(values), seeds, runs)).direction


def triples(ends, numbers):
    """The three arms of every end: what the paper has for standard and for PDE attention."""
    return {
        f"{arm}{end}": x
        for end, (standard, pde) in zip(ends, numbers)
        for arm, x in (("standard", standard), ("PDE, causal", pde), ("PDE, without walls", pde))
    }


def test_verdicts_on_lengths():
    ends = (", 256", ", 512", ", 1024")
    paper = triples(ends, [(6865.18, 12.65), (1.49e4, 3.74), (20748.29, 1.97)])
    assert verdict("pde-table2", paper) == SUPPORTED
    assert verdict("pde-table2", triples(ends, [(100, 90), (110, 95), (120, 100)])) == CONTRADICTED
    assert verdict("pde-leak", triples([""], [(6865.18, 12.65)]), left_to_right=13.0) == SUPPORTED
    assert verdict("pde-leak", triples([""], [(100, 90)]), left_to_right=13.0) == SUPPORTED
    assert verdict("pde-leak", triples([""], [(100, 100)]), left_to_right=13.0) == INCONCLUSIVE
    assert verdict("pde-leak", triples([""], [(90, 100)]), left_to_right=13.0) == CONTRADICTED


def test_verdicts_on_steps():
    kinds = ("PDE, causal", "PDE, without walls")

    def of(standard, by_steps, finite=1.0):
        arms = {
            f"{k}, {n} steps": {"perplexity": x, "finite": finite if n == 8 else 1.0}
            for k in kinds
            for n, x in zip((1, 2, 4, 8), by_steps)
        }
        return verdict("pde-table4", {"standard": standard, **arms}, finite=1.0)

    assert of(13318.93, (3.49, 3.42, 3.36, None), finite=0.0) == SUPPORTED
    assert of(118.0, (116.0, 114.0, 110.0, None), finite=0.0) == SUPPORTED
    assert of(118.0, (116.0, 114.0, 110.0, 119.0)) == SUPPORTED, "of eight the claim says nothing"
    assert of(118.0, (117.0, 125.0, 110.0, 106.0)) == CONTRADICTED, "two steps are worse than one"
    assert of(118.0, (118.1, 117.9, 117.8, 106.0)) == INCONCLUSIVE, "all are level"


def test_verdicts_on_equations():
    names = ("diffusion", "wave", "reaction-diffusion", "advection-diffusion")

    def of(standard, found):
        arms = {f"{n}, {k}": x for n, x in zip(names, found) for k in ("causal", "without walls")}
        return verdict("pde-table5", {"standard": standard, **arms}, left_to_right=9.0)

    assert of(9096.3, (2.15, 2.27, 2.15, 2.25)) == SUPPORTED
    assert of(9096.3, (2.15, 2.27, 2.15, 2.18)) == INCONCLUSIVE, "the paper's own numbers, of one seed"
    assert of(9096.3, (2.27, 2.15, 2.15, 2.18)) == CONTRADICTED, "diffusion is not among the best"
    assert of(100.0, (95.0, 97.0, 95.0, 97.0)) == SUPPORTED
    assert of(118.4, (110.5, 113.6, 111.3, 109.1)) == INCONCLUSIVE, "too near for one seed"
    assert of(100.0, (100.0,) * 4) == INCONCLUSIVE


def test_verdicts_on_longformers():
    def of(causal, two_sided):
        kinds = {"causal": causal, "two-sided": two_sided}
        values = {
            f"{model}, {kind}": x
            for kind, pair in kinds.items()
            for model, x in zip(("Longformer", "PDE-Longformer"), pair)
        }
        return verdict("pde-table3", values, left_to_right=9.0)

    assert of((150.0, 140.0), (1.04, 1.02)) == SUPPORTED
    assert of((140.0, 150.0), (1.04, 1.02)) == CONTRADICTED
    assert of((150.0, 140.0), (1.01, 1.28)) == SUPPORTED, "windows that look ahead do not decide"
    assert of((150.0, 149.0), (1.04, 1.03)) == INCONCLUSIVE, "level"
    assert of((150.0, 160.0), (1.04, 1.02)) == CONTRADICTED


def test_verdicts_on_mixtures():
    arms = ("standard", "PDE, causal", "mixed values, a layer", "mixed values, a channel")
    of = lambda *numbers: verdict("pde-mixing", dict(zip(arms, numbers)))
    assert of(106, 102, 104, 103) == INCONCLUSIVE, "one seed"
    two = lambda *numbers: of(*([x, x + 0.1] for x in numbers))
    assert two(106, 102, 105, 104.9) == SUPPORTED
    assert two(106, 102, 105, 103) == CONTRADICTED, "most of it takes no equation"
    assert two(106, 103, 105, 102) == CONTRADICTED
    assert of(106, 102, 104, 95) == INCONCLUSIVE
    assert of(101, 102, 104, 103) == INCONCLUSIVE, "no gain over standard attention"


def test_verdicts_on_accuracies():
    table = sys.modules[find("pde-table1").judge.__module__]

    def of(*gains, doubt=0.1):
        runs = {
            table.name_of(data, model, rate): {
                seed: {
                    "metrics": {"accuracy": 80 + more + doubt * seed * (more != 0), "valid_accuracy": 80}
                }
                for seed in range(-1, 2)
            }
            for rate in ("paper", *table.GRID)
            for data, gain in zip(table.SETS, gains)
            for model, more in (("standard", 0.0), ("diffusion", gain))
        }
        return table.judge(Results("pde-table1", "gpu", "accuracy", list(runs), [0], runs)).direction

    assert of(3.0, 11.6, 19.7) == SUPPORTED
    assert of(1.0, 1.0, 1.0) == SUPPORTED, "the size is another question"
    assert of(-0.2, 0.1, 0.2, doubt=0.01) == CONTRADICTED
    assert of(0.2, 0.1, 0.2, doubt=0.5) == INCONCLUSIVE
    assert of(2.0, 11.6, 19.7, doubt=1.0) == INCONCLUSIVE, "seeds of the first differ by more"


def test_verdicts_on_theorems():
    names = [f"{pde}, {kind}" for kind in ("causal", "full") for pde in
             ("diffusion", "advection-diffusion", "reaction-diffusion", "wave")]  # fmt: skip

    def of(falls, variance):
        values = {
            arm: [{"falls": falls.get(arm.split(",")[0], 1.0),
                  "variance": variance.get(arm.split(",")[0], 0.3)}] * 2
            for arm in names
        }  # fmt: skip
        return verdict("pde-theorem2", values)

    assert of({}, {}) == SUPPORTED
    assert of({"wave": 0.5}, {"wave": 1.1}) == SUPPORTED, "the theorem is not about the wave"
    assert of({"reaction-diffusion": 0.5}, {"reaction-diffusion": 1.4}) == CONTRADICTED

    far = lambda **metrics: verdict("pde-theorem-tail", {"diffusion": [metrics] * 2})
    assert far(exponent=1.0, reach=20, tail=0.8) == SUPPORTED
    assert far(exponent=0.5, reach=4, tail=0.02) == CONTRADICTED


def test_verdicts_on_coefficients():
    names = ("diffusion", "wave", "reaction-diffusion", "advection-diffusion")
    none, rising, deep = (0.0,) * 4, (0.01, 0.04, 0.08, 0.11), (0.02, 0.01, 0.01, 0.11)

    def of(alpha, betas):
        values = {
            f"{n}, {k}": {f"{what}_{i}": x for what, row in (("coefficient", alpha), ("beta", beta))
                          for i, x in enumerate(row)}
            for n, beta in zip(names, betas) for k in ("causal", "without walls")
        }  # fmt: skip
        return verdict("pde-fig13", values)

    as_printed = (none, none, rising, deep)
    assert of((0.08, 0.1, 0.135, 0.025), as_printed) == SUPPORTED
    assert of((0.2, 0.2, 0.4, 0.1), as_printed) == SUPPORTED, "the pattern, not the size"
    assert of((0.1, 0.1, 0.1, 0.1), (none,) * 4) == INCONCLUSIVE
    assert of((0.4, 0.1, 0.1, 0.4), (none,) * 4) == CONTRADICTED
