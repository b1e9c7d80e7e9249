"""Exact TNS against the brute-force integral and the area of the union of rectangles."""

import statistics
import time
from itertools import pairwise

import numpy as np
import torch

from attractor.core.stiffness import total_neural_stiffness
from benchmarks.results import save

INPUTS, BLOCKS = 10_000, 51


def random_nsi(inputs: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """NSI values with a long tail, three stages of 18, 17 and 16 blocks."""
    nsi = torch.randn(inputs, BLOCKS, generator=generator, dtype=torch.float64).mul(0.6).exp() * 0.4
    return nsi, torch.repeat_interleave(torch.arange(3), torch.tensor([18, 17, 16]))


def corners(nsi: np.ndarray, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(a, b) of every block of one input, stages' first blocks left out. Straight from the text."""
    a, b = [], []
    for s in np.unique(stage):
        values = nsi[stage == s][1:]
        a += list(values / values.mean() - 1)
        b += list(values)
    return np.array(a), np.array(b)


def area_of_union(a: np.ndarray, b: np.ndarray) -> float:
    """Area of the union of [0, a] x [0, b], strip by strip between all widths."""
    cuts = np.unique(np.concatenate(([0.0], a[a > 0])))
    return sum((right - left) * max(b[a >= right], default=0.0) for left, right in pairwise(cuts))


def grid_integral(nsi: torch.Tensor, stage: torch.Tensor, cells: int) -> float:
    """Midpoint sum of the indicator over a grid of thresholds, mean over inputs."""
    pairs = [corners(row, stage.numpy()) for row in nsi.numpy()]
    top_a, top_b = (max(max(x) for x in side) for side in zip(*pairs))
    m1, m2 = ((np.arange(cells) + 0.5) / cells * top for top in (top_a, top_b))
    hits = 0
    for a, b in pairs:
        # For each m1 the tallest block at least that wide covers all m2 below its height.
        tallest = np.array([max(b[a >= x], default=-1.0) for x in m1])
        hits += (m2[None] <= tallest[:, None]).sum()
    return hits / len(pairs) / cells**2 * top_a * top_b


def main() -> None:
    nsi, stage = random_nsi(INPUTS, torch.Generator().manual_seed(0))
    total_neural_stiffness(nsi, stage)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        tns = total_neural_stiffness(nsi, stage).item()
        times.append(time.perf_counter() - start)
    union = np.mean([area_of_union(*corners(row, stage.numpy())) for row in nsi.numpy()]).item()
    few = nsi[:200]
    exact, brute = total_neural_stiffness(few, stage).item(), grid_integral(few, stage, 2_000)
    seconds = statistics.median(times)
    print(f"TNS of {INPUTS:,} inputs x {BLOCKS} blocks: {tns:.6f} in {seconds * 1e3:.1f} ms")
    print(f"union of rectangles: {union:.6f}, relative difference {abs(tns / union - 1):.1e}")
    print(
        f"grid of 2,000 x 2,000 on 200 inputs: {brute:.6f} against {exact:.6f}, {abs(brute / exact - 1):.1e}"
    )
    save(
        "stiffness",
        {"inputs": INPUTS, "blocks": BLOCKS, "seconds": seconds, "tns": tns,
         "union_difference": abs(tns / union - 1), "grid_difference": abs(brute / exact - 1)},
    )  # fmt: skip


if __name__ == "__main__":
    main()
