"""Fig. 12: validation perplexity of the four PDEs over training.

In the paper diffusion and reaction-diffusion are ahead early, and all four end between 2.15 and 2.27.
The runs are those of Table 5.
"""

import math

from attractor.reproduce import Effect, Experiment, Results, Scale, Verdict, combine, decide, number

from . import pde_settings as lm
from . import pde_table5 as table


def judge(results: Results) -> Verdict:
    """Early, diffusion and reaction-diffusion are ahead of the two others; at the end all four are
    ahead of standard attention."""
    place = max(0, len(results.curve("standard", "perplexity")) // 5 - 1)
    early = {w: results.curve(f"{w}, causal", "perplexity")[place] for w in table.NAMES.values()}
    update = results.curve("standard", "update")[place]
    standard = results.curve("standard", "perplexity")[place]
    first = [
        Effect(
            f"{a} against {b}, early", (math.log(early[table.NAMES[b]] / early[table.NAMES[a]]),),
            None, "", True, lm.difference(lm.DEVIATION),
        )
        for a in table.FIRST
        for b in table.REST
    ]  # fmt: skip
    far = [
        lm.versus(results, f"{word}, causal", "standard", word, table.STANDARD / table.PAPER[pde])
        for pde, word in table.NAMES.items()
    ]
    worst = max(results.mean(f"{w}, causal") for w in early) / results.mean("standard")
    return combine([
        decide(first, f"after {update} updates {table.ahead(early)}, standard attention "
               f"{number(standard)}", claim="Diffusion and reaction-diffusion converge first"),
        decide(far, f"the worst has {100 * worst:.0f} % of standard attention's perplexity",
               claim="All PDEs stay below standard attention"),
    ])  # fmt: skip


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
