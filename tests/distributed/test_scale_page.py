"""The numbers of docs/scale.md are those of its result file, and its formulas those of what is sent."""

import pytest

from attractor.attention import Parts
from attractor.attention.context_parallel.exchange import overlaps
from attractor.attention.context_parallel.parts import count_tokens, extend_runs
from benchmarks import scale


def test_numbers_are_those_of_the_result_file():
    assert scale.filled(scale.PAGE.read_text()) == scale.PAGE.read_text()


@pytest.mark.parametrize("processes", [3, 8])
def test_computed_exchanges_are_what_is_fetched(processes):
    """A process in the middle, causal: its halo by the plan that the attention follows."""
    tokens, steps, token = 64 * processes, scale.STEPS, scale.HEADS * scale.DIM
    runs = Parts.split(tokens, processes).runs
    sent = 0
    for reach in (steps, 2 * steps):  # of keys, of values
        halo = extend_runs(runs, reach, 0, tokens)
        sent += sum(
            n for peer in range(processes) if peer != 1 for _, _, n in overlaps(runs[1], halo[peer])
        )
    found = scale.exchanged(tokens, processes, causal=True)
    assert found["halo"] == 2 * sent * token * 4  # forward, and gradients back
    assert found["ring"] == (processes - 1) * count_tokens(runs[1]) * 2 * token * 12
