"""The models of the PDE paper's first public code, and the evaluations of one set of weights."""

import math
import sys

import pytest
import torch

from attractor.reproduce import CONTRADICTED, INCONCLUSIVE, SUPPORTED, Results, find
from attractor.reproduce.tasks import Context, artefact
from attractor.train import Recipe

SIZE = {"dim": 16, "heads": 2, "layers": 2, "hidden": 16, "dropout": 0.1}
VOCABULARY, TOKENS, PADDING = 20, 12, 0


@pytest.fixture
def lines():
    """Eight lines of 3 to 10 tokens, padded to 12."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(3, 11)
    ids = torch.randint(1, VOCABULARY, (8, TOKENS), generator=generator)
    ids[~artefact.real_tokens(lengths, TOKENS)] = PADDING
    return artefact.Lines(ids.int(), lengths, 3)


def model_of(pde_steps):
    torch.manual_seed(0)
    return artefact.LineModel(VOCABULARY, TOKENS, pde_steps, **SIZE).eval()


pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def config(arm="standard, 256", **changes):
    return {**find("pde-artefact").config(arm, "smoke"), **changes}


@torch.no_grad()
@pytest.mark.parametrize("fast", [True, False])
def test_only_the_fast_path_of_the_baseline_returns_zeros_for_padding(fast, lines):
    real = artefact.real_tokens(lines.lengths, TOKENS)
    for pde_steps in (None, 4):
        model = model_of(pde_steps)
        with artefact.fast_path(fast):
            states = model.states(lines.ids.long(), real)
        zero = (states == 0).all(-1)
        assert not zero[real].any()
        assert zero[~real].all() if fast and pde_steps is None else not zero[~real].any()
        assert artefact.line_losses(model, lines, fast)[1] == (fast and pde_steps is None)


@torch.no_grad()
def test_the_fast_path_changes_nothing_but_padding_of_the_baseline(lines):
    real = artefact.real_targets(lines.lengths, TOKENS)
    for pde_steps in (None, 4):
        model = model_of(pde_steps)
        on, off = (artefact.line_losses(model, lines, fast)[0] for fast in (True, False))
        torch.testing.assert_close(on[real], off[real], rtol=1e-4, atol=1e-4)
        if pde_steps is None:
            assert not torch.allclose(on[~real], off[~real], rtol=1e-2)
        else:
            torch.testing.assert_close(on, off, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_on_the_fast_path_padding_after_padding_costs_what_the_bias_says(lines):
    model = model_of(None)
    losses, _ = artefact.line_losses(model, lines, fast=True)
    after = ~artefact.real_tokens(lines.lengths, TOKENS)[:, :-1]  # targets whose input is padding
    bias = model.head.bias.double()
    expected = bias.logsumexp(0) - bias[PADDING]
    assert expected.item() == pytest.approx(math.log(VOCABULARY), abs=0.5)
    torch.testing.assert_close(losses[after], expected.expand(int(after.sum())), rtol=1e-5, atol=1e-5)


def test_the_setting_of_the_fast_path_is_restored():
    before = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError), artefact.fast_path(not before):
        raise KeyError
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_a_step_of_diffusion_is_the_stencil_and_leaves_both_ends():
    torch.manual_seed(0)
    x, alpha = torch.randn(2, 5, 3, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    step = torch.eye(5, dtype=torch.float64)
    for i in (1, 2, 3):
        step[i, i - 1 : i + 2] = torch.tensor([0.1, 0.8, 0.1])
    torch.testing.assert_close(artefact.diffuse(x, alpha), step @ x)
    assert artefact.diffuse(x[:, :2], alpha).equal(x[:, :2])


def test_the_pde_model_takes_its_steps_after_each_layer():
    model = model_of(4)
    assert model.encoder.alpha.tolist() == [[pytest.approx(0.1)] * 4] * 2
    with torch.no_grad():
        model.encoder.alpha.zero_()
    layers = torch.nn.Sequential(*model.encoder.layers)
    x = torch.randn(2, 5, SIZE["dim"])
    expected = layers(x)
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    torch.testing.assert_close(model.encoder(x, src_key_padding_mask=nothing), expected)


@torch.no_grad()
@pytest.mark.parametrize("pde_steps", [None, 4])
def test_from_left_to_right_a_model_reads_nothing_after_the_target(pde_steps, lines):
    model = model_of(pde_steps)
    sample = torch.tensor([[7, 3]])  # token 4 of a line of ten
    before = artefact.prefix_losses(model, lines.ids, sample)
    forced = artefact.line_losses(model, lines, fast=False)[0][7, 3]
    lines.ids[7, 5:8] = 1 + lines.ids[7, 5:8] % (VOCABULARY - 1)
    assert artefact.prefix_losses(model, lines.ids, sample).equal(before)
    assert artefact.line_losses(model, lines, fast=False)[0][7, 3] != forced  # which sees the future
    given = lines.ids[7:8, :4].long()
    logits = model(given)[0, -1].double()
    expected = logits.logsumexp(0) - logits[lines.ids[7, 4]]
    torch.testing.assert_close(before, expected[None], rtol=1e-5, atol=1e-5)


def test_a_sample_has_no_padding_and_no_target_twice():
    lengths = torch.arange(3, 11)
    everything = int((lengths - 1).sum())
    pairs = artefact.sample_targets(lengths, TOKENS, 1000)
    assert len(pairs) == len(pairs.unique(dim=0)) == everything
    assert (pairs[:, 1] + 1 < lengths[pairs[:, 0]]).all()
    assert artefact.sample_targets(lengths, TOKENS, 5).equal(pairs[:5])


def test_the_counts_of_an_evaluation_are_those_of_its_parts(lines):
    found = artefact.evaluations(
        model_of(None), lines, artefact.sample_targets(lines.lengths, TOKENS, 1000)
    )
    share = artefact.real_targets(lines.lengths, TOKENS).double().mean().item()
    for path, whole in (("on", "perplexity"), ("off", "fast_off")):
        mean = share * math.log(found[f"real_{path}"]) + (1 - share) * found[f"pad_{path}"]
        assert found[whole] == pytest.approx(math.exp(mean))
    assert found["sample_forced"] == pytest.approx(found["real_off"])  # of all tokens


def test_every_line_is_in_one_batch():
    ids, lengths = torch.arange(10)[:, None], torch.arange(10)
    batches = artefact.Lines(ids, lengths, 4, shuffled=True)
    assert [len(rows) for rows, _ in batches] == [4, 4, 2]
    assert len(batches) == 3
    assert sorted(torch.cat([own for _, own in batches]).tolist()) == list(range(10))


def test_lines_are_framed_cut_and_padded_as_bert_does(monkeypatch):
    class Framed(artefact.text.Bytes):
        first = 1

    monkeypatch.setattr(artefact, "tokenizer_of", lambda kind, folder: Framed())
    artefact._token_ids.cache_clear()
    try:
        _, parts, _ = artefact._padded_lines.__wrapped__("toy", "bytes", None, None, 18)
    finally:
        artefact._token_ids.cache_clear()
    ids, lengths = parts["train"]
    texts = artefact.toy_lines("train")
    assert {len(line) > 16 for line in texts} == {True, False}
    for row, length, line in zip(ids.tolist(), lengths.tolist(), texts):
        assert row == [1, *line.encode()[:16], 10] + [256] * (18 - length)


def test_weights_decay_and_rates_are_those_of_the_code():
    recipe = artefact._recipe(find("pde-artefact").config("PDE, 256", "gpu")["recipe"], 3)
    assert recipe == Recipe(
        epochs=2, learning_rate=1e-4, warmup=0.2, schedule="constant", optimiser="adamw",
        betas=(0.9, 0.999), weight_decay=0.01, decay_vectors=True, clip=1.0, precision="fp32", seed=3,
    )  # fmt: skip
    assert [recipe.rate(t) for t in (0.1, 0.2, 2.0)] == pytest.approx([5e-5, 1e-4, 1e-4])
    groups = recipe.make_optimiser(model_of(4)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.01]


@pytest.mark.parametrize("arm", ["standard, 256", "PDE, 256"])
def test_padding_is_learnt_and_the_fast_path_unlearns_it(arm):
    """The artefact itself, on a text made here: one set of weights, two perplexities."""
    given = config(arm, limit=[320, 20])
    given["recipe"] |= {"learning_rate": 2e-2}
    metrics = artefact.encoder_model(given, Context())["metrics"]
    assert metrics["pad_off"] < 0.2
    assert metrics["fast_off"] < metrics["real_off"]
    assert metrics["causal"] == 0
    assert metrics["real_on"] == pytest.approx(metrics["real_off"], rel=1e-3)
    if arm.startswith("standard"):
        assert metrics["zeros"] == 1
        assert metrics["pad_on"] > 1.5
        assert metrics["perplexity"] > 2 * metrics["fast_off"]
    else:
        assert metrics["zeros"] == 0
        assert metrics["perplexity"] == pytest.approx(metrics["fast_off"], rel=1e-3)


def test_what_was_interrupted_goes_on(tmp_path, monkeypatch):
    given = config()
    given["recipe"] |= {"epochs": 3}
    whole = artefact.encoder_model(given, Context())
    evaluated, calls = artefact.evaluations, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluated(*args)

    monkeypatch.setattr(artefact, "evaluations", interrupted)
    context = Context(scratch=tmp_path / "scratch")
    with pytest.raises(KeyboardInterrupt):
        artefact.encoder_model(given, context)
    assert artefact.encoder_model(given, context) == whole
    assert len(whole["curves"]["fast_off"]) == 3


def results(on, off, pde, zeros=1.0, scale="gpu"):
    """Made-up results: the baseline with the fast path and without it, and the PDE."""
    module = sys.modules[find("pde-artefact").judge.__module__]
    runs = {}
    for (standard, moved), a, b, c in zip(module.PAIRS, on, off, pde):
        more = {"left_to_right": 300.0, "sample_forced": 200.0}
        runs[standard] = {0: {"metrics": {"perplexity": a, "fast_off": b, "zeros": zeros, **more}}}
        runs[moved] = {0: {"metrics": {"perplexity": c, "fast_off": c, "zeros": 0.0, **more}}}
        for arm in (standard, moved):
            runs[arm][1] = runs[arm][0]
    return Results("pde-artefact", scale, "perplexity", list(runs), [0], runs)


def test_verdicts():
    judge = find("pde-artefact").judge
    on, off, pde = (6865.0, 14900.0, 20748.0), (13.0, 4.0, 2.0), (12.65, 3.74, 1.97)
    of = lambda *numbers, **options: [p.direction for p in judge(results(*numbers, **options)).parts]
    assert of(on, off, pde)[:2] == [CONTRADICTED, SUPPORTED], "the same weights have the PDE's numbers"
    assert of(on, on, pde)[:2] == [SUPPORTED, SUPPORTED], "the gap is there without the fast path"
    assert of(pde, pde, pde) == [INCONCLUSIVE] * 3, "there is no gap"
    assert of(on, (5.0, 2.0, 1.0), pde)[:2] == [CONTRADICTED, CONTRADICTED]
    not_taken = judge(results(on, off, pde, zeros=0.0))
    assert not_taken.direction == INCONCLUSIVE
    assert "torch did not take the fast path" in not_taken.why
    assert "99.6, 99.2, 99.8 % of the gap" in judge(results(on, off, pde)).why


def test_the_picture_has_the_papers_numbers_where_tokens_are_the_papers():
    experiment = find("pde-artefact")
    numbers = (6865.0, 14900.0, 20748.0), (13.0, 4.0, 2.0), (12.65, 3.74, 1.97)
    lines = {}
    for scale in ("cpu", "gpu"):
        figure = experiment.picture(results(*numbers, scale=scale))
        lines[scale] = [line.get_label() for line in figure.axes[0].lines]
    assert set(lines["gpu"]) - set(lines["cpu"]) == {"standard, the paper", "PDE, the paper"}
