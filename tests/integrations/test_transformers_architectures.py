"""Every class of transformers takes PDE attention by its name, or refuses it by a BypassError that names the class."""

import warnings
from collections import Counter

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks import architectures  # noqa: E402
from benchmarks.pages import load  # noqa: E402


@pytest.fixture(autouse=True)
def _one_quiet_thread():
    threads, level = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(level)


def faults(rows):
    named = lambda row: row["why"].startswith("BypassError: ") and "this model" not in row["why"]
    return [
        row
        for row in rows
        if row["outcome"] == "wrong" or (row["outcome"] == "refused" and not named(row))
    ]


@pytest.mark.slow
def test_a_few_of_each_kind():
    types = ("gpt2", "jamba", "gptj", "mamba", "xlnet", "bert", "deberta", "longformer", "bart", "led")
    rows = architectures.sweep(types)
    found = {(row["kind"], row["type"]): row["outcome"] for row in rows}
    assert faults(rows) == []
    for kind, model_type in (
        ("causal", "gpt2"),
        ("causal", "jamba"),
        ("masked", "bert"),
        ("sequence to sequence", "bart"),
    ):
        assert found[kind, model_type] == "PDE attention"
    for kind, model_type in (("causal", "gptj"), ("causal", "mamba"), ("causal", "xlnet"), ("masked", "deberta"),
                             ("masked", "longformer"), ("sequence to sequence", "led")):  # fmt: skip
        assert found[kind, model_type] == "refused"


@pytest.mark.slow
@pytest.mark.parametrize("kind", architectures.KINDS)
def test_all_of_a_kind(kind):
    rows = architectures.sweep(kinds=[kind])
    counts = Counter(row["outcome"] for row in rows)
    print(kind, dict(counts))
    assert faults(rows) == []
    assert counts["PDE attention"] > 0.5 * len(rows)
    kept = load("architectures")
    if kept["transformers"] == transformers.__version__:
        names = ("kind", "type", "class", "outcome")
        outcomes = lambda rows: [tuple(row[name] for name in names) for row in rows]
        assert outcomes(rows) == outcomes(row for row in kept["rows"] if row["kind"] == kind)
