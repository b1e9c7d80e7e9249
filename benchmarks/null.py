"""Verdicts under equal arms: how often does each direction occur where there is nothing to see?

Rules are applied to arms whose runs have one and the same normal distribution. Then the experiments of
`attractor reproduce` are judged by their own code with every metric of their results replaced: all arms
get the same mean, and a run the deviation that the arm's seeds show. Verdicts are fair if "supported" and
"contradicted" are equally frequent for single comparisons, and both at most 2.5 % for several together.
"""

import argparse
import copy
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from attractor.reproduce import DIRECTIONS, Results, Verdict, all_of, best, find, gains
from attractor.reproduce.shelf import home
from attractor.reproduce.summary import largest
from attractor.reproduce.verdict import Rule
from benchmarks.results import save

DRAWS = 1000
SEEDS = (0, 1, 2)
FAR = 100.0  # deviations between an arm and those that are no rivals
OTHERS = [f"arm {i}" for i in range(5)]
RULES: dict[str, tuple[Rule, dict[str, float]]] = {  # rule, and means of arms that are not at 0
    "gains, one arm over another": (gains(["ours"], "arm 0"), {}),
    "gains, one arm over another, lower is better": (gains(["ours"], "arm 0", "lower"), {}),
    "best of two": (best("ours", ["arm 0"]), {}),
    "gains, five arms over another": (gains(OTHERS, "ours"), {}),
    "best of six": (best("ours", OTHERS), {}),
    "best of six, four of them far worse": (best("ours", OTHERS), dict.fromkeys(OTHERS[1:], -FAR)),
    "gains and best, as in Table 1 of StepNet": (
        all_of(gains([*OTHERS[1:], "ours"], "arm 0"), best("ours", OTHERS)), {}),
}  # fmt: skip
EXPERIMENTS = (  # those whose claims compare arms by their final metrics
    "attns-table2", "attns-fig4", "attns-normalised", "attns-top10", "stepnet-table1",
    "stepnet-table1-cifar100", "stepnet-table1-protocol", "stepnet-table4", "stepnet-fig2", "stepnet-fig3",
    "stepnet-initial", "stepnet-initial-cifar100", "pde-table1", "pde-table2", "pde-table3", "pde-table4",
    "pde-table5", "pde-characters", "pde-leak", "pde-mixing",
)  # fmt: skip
DEVIATION = 0.0046  # of the logarithm of a metric of arms with one seed: that of the language models


def drawn(shift: dict[str, float], generator: random.Random) -> Results:
    """Return results of arms that differ by their means at most, as passed."""
    runs = {
        arm: {s: {"metrics": {"x": shift.get(arm, 0.0) + generator.gauss(0, 1)}} for s in SEEDS}
        for arm in ("ours", *OTHERS)
    }
    return Results("null", "cpu", "x", list(runs), list(SEEDS), runs)


def moments(results: Results) -> dict[str, tuple[bool, float, float]]:
    """Return of every metric whether it is positive, the mean over arms, and the deviation over seeds.

    Mean and deviation of a positive metric are those of its logarithm.
    """
    values: dict[str, list[list[float]]] = {}
    for runs in results.runs.values():
        every = [run["metrics"] for run in runs.values()]
        for name in set.intersection(*(set(m) for m in every)) if every else ():
            if all(m[name] is not None and math.isfinite(m[name]) for m in every):
                values.setdefault(name, []).append([m[name] for m in every])
    found = {}
    for name, groups in values.items():
        positive = min(map(min, groups)) > 0
        scaled = [[math.log(x) for x in g] if positive else g for g in groups]
        squares = [statistics.variance(g) for g in scaled if len(g) > 1]
        spread = math.sqrt(statistics.fmean(squares)) if squares else DEVIATION
        found[name] = positive, statistics.fmean(map(statistics.fmean, scaled)), spread or DEVIATION
    return found


def equal(
    results: Results, known: dict[str, tuple[bool, float, float]], generator: random.Random
) -> Results:
    """Return the results with every metric drawn anew, alike for all arms."""
    made = copy.copy(results)
    made.runs = {}
    for arm, runs in results.runs.items():
        made.runs[arm] = {}
        for seed, run in runs.items():
            metrics = dict(run["metrics"])
            for name, (positive, mean, spread) in known.items():
                x = generator.gauss(mean, spread)
                metrics[name] = math.exp(x) if positive else x
            made.runs[arm][seed] = {**run, "metrics": metrics}
    return made


def count(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Return how often each direction occurs, and how often for the comparisons one by one."""
    verdicts = list(verdicts)
    words = Counter(verdict.direction for verdict in verdicts)
    single = Counter(e.direction for v in verdicts for e in v.effects if not e.limitation)
    return {
        **{word: words[word] for word in DIRECTIONS[:3]},
        "single": {word: single[word] for word in DIRECTIONS[:3]},
    }


def rules(draws: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row per rule."""
    rows = []
    for name, (rule, shift) in RULES.items():
        generator = random.Random(f"{seed}, {name}")
        verdicts = [rule(drawn(shift, generator)) for _ in range(draws)]
        comparisons = len(verdicts[0].effects)
        rows.append({"rule": name, "comparisons": comparisons, **count(verdicts)})
    return rows


def claims(
    draws: int, names: Iterable[str] = EXPERIMENTS, seed: int = 0, tell: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Return a row per claim of the experiments."""
    rows = []
    for name in names:
        experiment = find(name)
        results = largest(experiment, home())
        if results is None:
            continue
        known, generator = moments(results), random.Random(f"{seed}, {name}")
        verdicts = [experiment.judge(equal(results, known, generator)) for _ in range(draws)]
        for i, part in enumerate(verdicts[0].claims):
            row = {
                "experiment": name, "claim": part.claim,
                "comparisons": len(part.effects), "barred": sum(bool(e.limitation) for e in part.effects),
                **count(verdict.claims[i] for verdict in verdicts),
            }  # fmt: skip
            rows.append(row)
            tell(", ".join(map(str, row.values())))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS, help="Draws per rule and per experiment.")
    draws = parser.parse_args().draws
    for row in (rows := rules(draws)):
        print(", ".join(map(str, row.values())))
    save("null", {"draws": draws, "seeds": len(SEEDS), "rules": rows, "claims": claims(draws)})


if __name__ == "__main__":
    main()
