"""The numbers of docs/scale.md are those of its result file, and its formulas those of what is sent."""

import pytest

from attractor.attention import Parts
from attractor.attention.context_parallel import _overlaps, _to_the_left
from attractor.attention.parts import count
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
        wanted = _to_the_left(runs, reach, 0)
        sent += sum(
            n for peer in range(processes) if peer != 1 for _, _, n in _overlaps(runs[1], wanted[peer])
        )
    found = scale.exchanged(tokens, processes, causal=True)
    assert found["halo"] == 2 * sent * token * 4  # forward, and gradients back
    assert found["ring"] == (processes - 1) * count(runs[1]) * 2 * token * 12
