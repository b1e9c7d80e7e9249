"""Fig. 10: curves of training at 256, 512 and 1,024 tokens.

In the paper PDE attention converges faster, and its validation perplexity falls to between 1 and 10
while that of standard attention stays above a thousand. The runs are those of Table 2 under the
fair recipe.
"""

from attractor.reproduce import DIRECTION, FAILS, HOLDS, Experiment, Results, Scale, Verdict
from attractor.reproduce.verdict import number

from . import pde_settings as lm
from . import pde_table2 as table

ARMS = {name: table.ARMS[name] for name in table.FAIR}


def judge(results: Results) -> Verdict:
    """Whether causal PDE attention is ahead at the end at all lengths, and not behind early."""
    early, final, told = [], [], []
    for n, (standard, causal, _) in zip(table.LENGTHS, table.TRIPLES):
        ours, theirs = (results.curve(arm, "perplexity") for arm in (causal, standard))
        third = max(0, len(ours) // 3 - 1)
        update = results.curve(causal, "update")[third]
        early.append(ours[third] / theirs[third])
        final.append(results.mean(causal) / results.mean(standard))
        told.append(
            f"{number(ours[third])} against {number(theirs[third])} after {update:,} updates (one "
            f"seed) and {number(results.mean(causal))} against {number(results.mean(standard))} at "
            f"the end ({n})"
        )
    why = "causal PDE attention against standard attention: " + ", ".join(told)
    if max(early + final) < 0.01:
        return Verdict(HOLDS, why)
    ahead = max(final) < 1 - lm.LEVEL and max(early) < 1 + lm.LEVEL
    return Verdict(DIRECTION if ahead else FAILS, why)


def picture(results: Results):
    """A panel a length."""
    titles = [f"{n} tokens" for n in table.LENGTHS]
    figure, axes = lm.axes_of(3, titles, "updates", "validation perplexity")
    for axis, group in zip(axes, table.TRIPLES):
        lm.perplexities(axis, results, dict(zip(group, (lm.STANDARD, lm.CAUSAL, lm.OPEN))))
    axes[0].legend(frameon=False, fontsize=8)
    return figure


EXPERIMENT = Experiment(
    name="pde-fig10",
    paper="pde",
    place="Fig. 10, final perplexities",
    claim="At every length PDE attention converges faster and to a perplexity of 1 to 10, standard "
    "attention to 1,000 to 10,000.",
    task=lm.TASK,
    base=lm.BASE,
    arms=ARMS,
    scales={
        "smoke": Scale(lm.SMOKE, arms=table.TRIPLES[0][1:2], judged=False, time="1 s"),
        "cpu": Scale(lm.CPU, time="5 min on 2 cores; runs of pde-table2", judged=False, note=lm.ONE),
        "gpu": Scale(lm.GPU, time="9 runs of 10 to 18 s on one H200; runs of pde-table2"),
    },
    metric="perplexity",
    better="lower",
    others=("left_to_right", "causal", "train_loss"),
    numbers={arm: x for arm, x in table.EXPERIMENT.numbers.items() if arm in ARMS},
    judge=judge,
    data=("wikitext2",),
    note="Updates are the same for all arms; a curve's points are evaluations of the validation "
    "text. The paper's ranges are those of its text; its numbers 12.65 and 20,748 lie outside.",
    picture=picture,
)
