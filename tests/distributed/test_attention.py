"""Context-parallel attention in real processes equals one process; the worker file has the cases."""

import pytest
import torch

from attractor.attention import Parts, context_parallel_attention, pde_attention
from tests.distributed.launching import launch

EXACT = 1e-12
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Four processes, of which groups of two, three and four work together."""
    return launch("torchrun", 4, "attention_worker.py", tmp_path_factory.mktemp("four"), 40, 0)


def test_output_and_all_gradients_are_those_of_one_process(found):
    for result in found:
        cases = result["random"]
        assert set(cases["worst"]) == {"output", "q", "k", "v", "first", "second"}
        assert max(cases["worst"].values()) < EXACT, cases["worst"]
    most = found[1]["random"]  # of all groups
    assert most["cases"] == 40
    assert min(most["short"], most["uneven"], most["zigzag"]) >= 4  # runs shorter than the reach, too


def test_grouped_heads_equal_one_process(found):
    for result in found:
        worst = result["grouped_heads"]["worst"]
        assert set(worst) == {"output", "q", "k", "v", "first", "second"}
        assert max(worst.values()) < EXACT, worst


def test_bytes_sent_are_proportional_to_the_key_heads(found):
    """Ratios of 2 and 4 query heads per key head, with common and with per-head coefficients."""
    for result in found:
        for case in result["grouped_heads"]["bytes"]:
            sent = {int(ratio): count for ratio, count in case["sent"].items()}
            assert sent[2] == 2 * sent[4]
            if not case["per_head"]:
                assert sent[1] == 4 * sent[4]


def test_later_processes_are_not_seen(found):
    assert all(result["causality"] for result in found)


def test_whole_models_are_context_parallel(found):
    assert max(result["modules"] for result in found) < EXACT


def test_types_and_shapes(found):
    for result in found:
        errors = result["types"]
        assert errors.pop("torch.bfloat16") < 2e-2
        assert errors.pop("torch.float32") < 2e-6
        assert max(errors.values()) < EXACT


def test_all_processes_are_told_what_is_wrong(found):
    said = {
        "reaction": "ReactionDiffusion is not linear",
        "unstable": "dt = 1 is unstable for Diffusion",
        "cross": "query has 3 tokens and key 6",
        "heads": "The ranks differ in batch size times heads: [1, 2, 1, 2]; only the number of tokens may differ.",
        "key heads": "The ranks differ in batch size times key heads: [1, 2, 1, 2]; only the number",
        "nothing": "The ranks hold [0, 3, 6, 6] tokens, but each needs at least one; use fewer processes.",
        "processes": "parts is for 5 processes, but the group has 4",
        "twice": "has no second derivatives",
    }
    for rank, result in enumerate(found):
        told = result["refusals"]
        for name, start in said.items():
            assert start in told[name]
        assert (
            told["parts"]
            == f"query has 6 tokens on rank {rank}, but parts assigns 7 tokens to this rank"
        )
        if rank % 2:
            assert "the last dimension of query and key must be the same" in told["one"]
        else:
            assert (
                told["one"]
                == "Ranks [1, 3] rejected their arguments; see the error on each of those ranks."
            )
        assert ("outside" in told) == (rank > 1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_many_more_cases(processes, tmp_path):
    for result in launch("torchrun", processes, "attention_worker.py", tmp_path, 400, 7):
        assert max(result["random"]["worst"].values()) < EXACT


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_process_needs_no_group(is_causal):
    given = torch.randn(3, 2, 4, 50, 8, dtype=torch.float64)
    expected = pde_attention(*given, is_causal=is_causal, pde="advection_diffusion", method="dense")
    for parts in (None, Parts.split(50, 1, zigzag=True)):
        found = context_parallel_attention(
            *given, "advection_diffusion", is_causal=is_causal, parts=parts
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


def test_parts_are_checked():
    with pytest.raises(ValueError, match="7 tokens cannot be split into 8 runs for 4 processes"):
        Parts.split(7, 4, zigzag=True)
    for runs in ((((0, 3),), ((4, 6),)), (((0, 3),), ((2, 6),)), (((0, 3), (3, 3)), ((3, 6),))):
        with pytest.raises(ValueError, match="must cover the whole sequence, each token once"):
            Parts(runs)
    with pytest.raises(ValueError, match="at least one run per process, in ascending order"):
        Parts((((3, 6), (0, 3)),))
    with pytest.raises(ValueError, match="must have 10 tokens along dim"):
        Parts.split(10, 2).take(torch.zeros(9, 4), 0)


def test_zigzag_shares_causal_work_evenly():
    """Pairs of row and key up to the diagonal, for every process."""
    for processes, tokens in ((2, 64), (4, 256)):
        work = {}
        for zigzag in (False, True):
            parts = Parts.split(tokens, processes, zigzag)
            work[zigzag] = [sum(i + 1 for a, b in runs for i in range(a, b)) for runs in parts.runs]
        assert max(work[True]) <= 1.02 * min(work[True])
        mean = sum(work[False]) / processes
        assert max(work[False]) / mean == pytest.approx(2 - 1 / processes, rel=0.02)
