"""Numbers of docs/claims.md, recomputed from the files of results by other code than that of the page.

Nothing here uses `attractor.reproduce`: files are read as JSON, means and intervals are those of NumPy and
SciPy, the papers' numbers are typed in again.
"""

import json
import random
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "results"
GATES = ("se", "eca", "srm", "iebn", "stepnet")
LM_DEVIATION, LM_FREEDOM = 0.0046, 8  # checked below


def metric(file, arm, name, scale="gpu"):
    """Return a metric by seed."""
    runs = json.loads((FOLDER / file / f"{scale}.json").read_text())["runs"][arm]
    return {int(seed): run["metrics"][name] for seed, run in runs.items()}


def gap(file, arm, other, name, log=False, other_file=None):
    """Return arm - other at the seeds of both."""
    a, b = metric(file, arm, name), metric(other_file or file, other, name)
    scale = np.log if log else np.asarray
    return np.array([scale(a[s]) - scale(b[s]) for s in sorted(a.keys() & b.keys())])


def perplexity(ours, theirs):
    """Return the logarithm of the factor by which a perplexity is lower; (file, arm) each."""
    return gap(theirs[0], theirs[1], ours[1], "perplexity", True, ours[0])


def mean(*gaps):
    return np.mean(gaps, axis=0)


def accuracies(file, arms, paper):
    gains = mean(*(gap(file, arm, "none", "accuracy") for arm in arms))
    return gains, np.mean([paper[arm] - paper["none"] for arm in arms]), False


def rise(file, arm, name="tns_gate"):
    after, before = metric(file, arm, name), metric(file, arm, f"{name}_initial")
    return np.array([np.log(after[s] / before[s]) for s in sorted(after)])


CIFAR10 = dict(none=93.35, se=94.26, eca=94.15, srm=94.59, iebn=94.70, stepnet=95.14)
CIFAR100 = dict(none=74.30, se=75.25, eca=74.41, srm=75.49, iebn=76.32, stepnet=77.04)
T1, T1C, PROTOCOL = "stepnet_table1", "stepnet_table1_cifar100", "stepnet_table1_protocol"
LEAK, MIX, T2, T4, T5 = "pde_leak", "pde_mixing", "pde_table2", "pde_table4", "pde_table5"
PERPLEXITIES = {256: (6865.18, 12.65), 512: (1.49e4, 3.74), 1024: (20748.29, 1.97)}


def length(kind, n):
    """Return where the runs of a length are; those of 256 tokens are in pde-leak, of 512 maybe in a table."""
    places = [(LEAK, kind), (T2, f"{kind}, {n}")] if n == 256 else [(T2, f"{kind}, {n}")]
    if n == 512:
        steps = f"{kind}, 4 steps" if kind != "standard" else kind
        places += [(T4, steps), ("pde_table13", f"{kind}, 2 %")]
    for file, arm in places:
        if arm in json.loads((FOLDER / file / "gpu.json").read_text())["runs"]:
            return file, arm
    raise KeyError((kind, n))


def lower_at_every_length():
    pairs = [(length("PDE, causal", n), length("standard", n)) for n in PERPLEXITIES]
    gaps = [perplexity(ours, theirs) for ours, theirs in pairs]
    fewest = min(map(len, gaps))
    factors = [np.log(a / b) for a, b in PERPLEXITIES.values()]
    first = next(i for i, g in enumerate(gaps) if len(g) == fewest)
    return gaps[first], factors[first], True


def error(system, ours, theirs, recipe="paper", file="attns_top10"):
    other = f"{system}: {theirs}" if "," in theirs else f"{system}: {theirs}, {recipe}"
    return gap(file, other, f"{system}: {ours}, {recipe}", "mse", True)


def artefact(name):
    gaps = [gap("pde_artefact", f"standard, {n}", f"PDE, {n}", name, True) for n in PERPLEXITIES]
    return mean(*gaps), np.mean([np.log(a / b) for a, b in PERPLEXITIES.values()]), True


# (experiment, number of the claim) -> samples, the paper's effect or None, whether they are logarithms
CLAIMS = {
    ("stepnet-table1", 0): lambda: accuracies(T1, GATES, CIFAR10),
    ("stepnet-table1", 1): lambda: (gap(T1, "stepnet", "srm", "accuracy"), 95.14 - 94.59, False),
    ("stepnet-table1-cifar100", 0): lambda: accuracies(T1C, GATES, CIFAR100),
    ("stepnet-table1-cifar100", 1): lambda: (gap(T1C, "stepnet", "srm", "accuracy"), 77.04 - 75.49, False),
    ("stepnet-table1-protocol", 0): lambda: accuracies(PROTOCOL, ("se", "srm", "stepnet"), CIFAR10),
    ("stepnet-table1-protocol", 1): lambda: (
        gap(PROTOCOL, "stepnet", "srm", "accuracy"), 95.14 - 94.59, False),
    ("stepnet-fig2", 0): lambda: (
        mean(*(gap(T1C, g, "none", "tns_gate", True) for g in ("se", "eca", "srm"))), None, True),
    ("stepnet-fig3", 0): lambda: (gap(T1C, "se", "none", "oscillation_gate", True), None, True),
    ("stepnet-initial", 0): lambda: (
        mean(*(gap(T1, g, "none", "tns_gate", True) for g in ("se", "eca", "srm"))), None, True),
    ("stepnet-initial", 1): lambda: (
        mean(*(rise(T1, g) - rise(T1, "none") for g in ("se", "eca", "srm"))), None, True),
    ("stepnet-initial-cifar100", 1): lambda: (
        mean(*(rise(T1C, g) - rise(T1C, "none") for g in ("se", "eca", "srm"))), None, True),
    ("pde-leak", 0): lambda: (
        perplexity((LEAK, "PDE, causal"), (LEAK, "standard")), np.log(6865.18 / 12.65), True),
    ("pde-mixing", 1): lambda: (
        perplexity((LEAK, "PDE, causal"), (MIX, "mixed values, a channel")), None, True),
    ("pde-table2", 2): lower_at_every_length,
    ("pde-table3", 0): lambda: (
        perplexity(("pde_table3", "PDE-Longformer, causal"), ("pde_table3", "Longformer, causal")),
        np.log(1.04 / 1.02), True),
    ("pde-table4", 0): lambda: (
        perplexity(length("PDE, causal", 512), length("standard", 512)), np.log(13318.93 / 3.36), True),
    ("pde-artefact", 1): lambda: artefact("fast_off"),
    ("pde-artefact", 2): lambda: artefact("left_to_right"),
    ("pde-characters", 0): lambda: (
        mean(*(gap("pde_characters", pde, "standard", "accuracy") for pde in ("diffusion", "wave"))),
        None, False),
    ("pde-table1", 1): lambda: (
        mean(*(
            gap("pde_table1", f"{d}, diffusion, paper's recipe", f"{d}, standard, paper's recipe", "accuracy")
            for d in ("IMDb", "AG News", "SST-2")
        )), np.mean([3.0, 11.6, 19.7]), False),
    ("attns-top10", 0): lambda: (
        mean(*(error(s, "AttNS", "NeurVec") for s in ("elastic", "2-link"))),
        np.mean([np.log(6.32e-5 / 1.34e-6), np.log(3.54e-6 / 8.54e-8)]), True),
    ("attns-top10", 1): lambda: (
        mean(*(error(s, "AttNS", "RK4, alone") for s in ("elastic", "2-link"))),
        np.mean([np.log(4.33 / 1.34e-6), np.log(3.56e-2 / 8.54e-8)]), True),
}  # fmt: skip


def recomputed(samples, paper, log):
    """Return the numbers of a row: the effect with its interval, the paper's, the share in per cent."""
    stats = pytest.importorskip("scipy.stats")
    value = samples.mean()
    if len(samples) > 1:
        low, high = stats.t.interval(0.95, len(samples) - 1, value, stats.sem(samples))
    else:
        half = stats.t.ppf(0.975, LM_FREEDOM) * LM_DEVIATION * 2**0.5
        low, high = value - half, value + half
    scale = np.exp if log else float
    row = {"value": scale(value), "low": scale(low), "high": scale(high)}
    if paper is not None:
        row |= {"paper": scale(paper)}
        row |= {
            f"share {k}": 100 * x / paper for k, x in (("value", value), ("low", low), ("high", high))
        }
    return row


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def printed():
    """Return the numbers of every row of the page, as they are printed, by experiment and claim."""
    rows, name, paper, count = {}, "", "", 0
    prefix = {"AttNS": "attns", "StepNet": "stepnet", "PDE": "pde"}
    for line in (ROOT / "docs" / "claims.md").read_text().splitlines():
        if line.startswith("## "):
            paper = prefix.get(line[3:].split()[0].rstrip(","), "")
        if not line.startswith("| ") or not paper or line.startswith("| ---"):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 8 or cells[1] == "the paper says":
            continue
        if cells[0]:
            name, count = f"{paper}-{re.match(r'.([^]]+)', cells[0])[1]}", -1
        count += 1
        numbers = dict(zip(("value", "low", "high"), NUMBER.findall(cells[3])))
        if found := NUMBER.findall(cells[2]):
            numbers["paper"] = found[0]
        if found := NUMBER.findall(cells[7]):
            numbers |= dict(zip(("share value", "share low", "share high"), found))
        rows[name, count] = numbers
    return rows


def same(text, value):
    """Return whether a number is the printed one, to its last digit."""
    kept = Decimal(text.replace(",", ""))
    unit = 10.0 ** kept.as_tuple().exponent
    return abs(float(kept) - value) <= 0.501 * unit


def test_twenty_random_numbers():
    rows = printed()
    wanted = {key: recomputed(*claim()) for key, claim in CLAIMS.items()}
    every = [(key, what, value) for key, row in wanted.items() for what, value in row.items()]
    assert len(every) > 80
    chosen = random.SystemRandom().sample(every, 20)
    for (name, count), what, value in chosen:
        text = rows[name, count].get(what)
        assert text is not None, (name, count, what, rows[name, count])
        assert same(text, value), f"{name}, claim {count}: {what} is printed as {text}, but is {value}"


@pytest.mark.parametrize("key", CLAIMS, ids=lambda key: f"{key[0]}, {key[1]}")
def test_all_numbers(key):
    row = printed()[key]
    values = recomputed(*CLAIMS[key]())
    assert {what: row.get(what) for what in values if not same(row[what], values[what])} == {}


def test_the_deviation_of_language_models():
    arms = [(LEAK, "standard"), (LEAK, "PDE, causal")]
    arms += [(MIX, f"mixed values, a {what}") for what in ("layer", "channel")]
    logs = [np.log(list(metric(file, arm, "perplexity").values())) for file, arm in arms]
    assert sum(len(x) - 1 for x in logs) == LM_FREEDOM
    assert round(float(np.sqrt(np.mean([x.var(ddof=1) for x in logs]))), 4) == LM_DEVIATION
