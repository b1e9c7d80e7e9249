"""Fig. 12: validation perplexity of the four PDEs over training.

In the paper diffusion and reaction-diffusion are ahead early, and all four end between 2.15 and 2.27.
The runs are those of Table 5.
"""

from attractor.reproduce import DIRECTION, FAILS, HOLDS, UNTESTED, Experiment, Results, Scale, Verdict
from attractor.reproduce.verdict import number

from . import pde_settings as lm
from . import pde_table5 as table


def judge(results: Results) -> Verdict:
    """Whether diffusion and reaction-diffusion are ahead of the two others early, and all four far ahead
    of standard attention, early and at the end."""
    place = max(0, len(results.curve("standard", "perplexity")) // 5 - 1)
    early = {w: results.curve(f"{w}, causal", "perplexity")[place] for w in table.NAMES.values()}
    update = results.curve("standard", "update")[place]
    standard = results.curve("standard", "perplexity")[place]
    order = table.ahead(early)
    parts = [max(early.values()) / standard]
    parts.append(max(results.mean(f"{w}, causal") for w in early) / results.mean("standard"))
    why = (
        f"causal maps after {update} updates: {order.why}, standard attention {number(standard)}; at "
        f"the end the worst has {100 * parts[1]:.0f} % of standard attention's"
    )
    if order.word == FAILS or max(parts) > 1 + lm.LEVEL:
        return Verdict(FAILS, why)
    if order.word == UNTESTED:
        return Verdict(UNTESTED, why)
    return Verdict(HOLDS if max(parts) < 0.01 else DIRECTION, why)


def picture(results: Results):
    """With walls, and without; each on its own scale, for with walls they are close."""
    titles = ["causal", "without walls; dashed: left to right"]
    figure, axes = lm.axes_of(2, titles, "updates", "validation perplexity", sharey=False)
    for axis, kind in zip(axes, ("causal", "without walls")):
        arms = {"standard": "standard"} | {f"{w}, {kind}": w for w in table.NAMES.values()}
        lm.perplexities(axis, results, arms)
    axes[0].set_yscale("linear")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="pde-fig12",
    paper="pde",
    place="Fig. 12, final perplexities",
    claim="All PDEs stay far below standard attention; diffusion and reaction-diffusion converge first.",
    task=lm.TASK,
    base=lm.BASE,
    arms=table.ARMS,
    scales={
        **table.SCALES,
        "smoke": Scale(lm.SMOKE, arms=("diffusion, without walls",), judged=False, time="1 s"),
    },
    metric="perplexity",
    better="lower",
    others=("left_to_right", "causal"),
    numbers=table.EXPERIMENT.numbers,
    judge=judge,
    data=("wikitext2",),
    note="The runs of pde-table5; early is after a fifth of the updates.",
    picture=picture,
)
