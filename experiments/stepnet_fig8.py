"""Figure 8: do training tricks that make a network better raise its TNS? CIFAR-100, plain ResNet.

The figure is not legible; label smoothing of 0.1, mixup with alpha 0.2, and both. No gates, so both
steps are one.
"""

import statistics

from attractor.reproduce import INCONCLUSIVE, Experiment, Results, Scale, Verdict, compare, decide

from .stepnet_shared import CIFAR100, CLASSIFY, RECIPE, SEEDS, SHORT, against_accuracy, digits, smoke

TRICKS = {
    "label smoothing": {"label_smoothing": 0.1},
    "mixup": {"mixup": 0.2},
    "both": {"label_smoothing": 0.1, "mixup": 0.2},
}


def judge(results: Results) -> Verdict:
    """Of the tricks that raise accuracy at the same seeds: does TNS rise too?"""
    gap = {t: results.paired(t, "plain", "accuracy") for t in TRICKS}
    rise = {t: compare(results, t, "plain", metric="tns_one", label=f"TNS, {t}") for t in TRICKS}
    told = ", ".join(
        f"{t} {statistics.fmean(gap[t]):+.2f} points and TNS {rise[t].value:+.3f}" for t in TRICKS
    )
    better = [t for t in TRICKS if statistics.fmean(gap[t]) > 0]
    if not better:
        return Verdict(INCONCLUSIVE, f"no trick made this short training better: {told}")
    return decide(
        [rise[t] for t in better], told, caveat="the tricks are chosen by the mean of their gain"
    )


EXPERIMENT = Experiment(
    name="stepnet-fig8",
    paper="stepnet",
    place="Figure 8 (Appendix A)",
    claim="Training tricks that make a network better make its TNS larger, too.",
    task=CLASSIFY,
    arms={
        "plain": {"gate": "none"},
        **{name: {"gate": "none", "trick": trick} for name, trick in TRICKS.items()},
    },
    scales={
        "smoke": smoke("plain", "both"),
        "cpu": digits(time="3 min on 2 cores, on the digits"),
        "gpu": Scale(CIFAR100, seeds=SEEDS, training=SHORT, time="10 min on one H200 beside Table 1's"),
    },
    metric="tns_one",
    better="",
    numbers={},
    judge=judge,
    others=("tns_one_initial", "accuracy", "nsi_one"),
    data=("cifar100",),
    note=f"{RECIPE} Which tricks and data the paper's figure shows cannot be read.",
    picture=against_accuracy,
)
