"""Table 13: 0.1 % to 10 % of WikiText-103, ten epochs.

In the paper standard attention goes from 27,598 to 8,697 with more data, PDE attention from 38.1 to 2.3.
WikiText-2 is 2 % of WikiText-103: here 0.1 %, 1 % and 2 % of it, that is 5 %, half and all of
WikiText-2, under the paper's recipe (Table 10) and under the fair one.
"""

from attractor.reproduce import Experiment, Scale, all_of

from . import pde_settings as lm

PARTS = {"0.1 %": 0.05, "1 %": 0.5, "2 %": 1.0}  # of WikiText-103: of WikiText-2
PAPER = {"0.1 %": (27597.5, 38.1), "1 %": (14985.3, 3.7)}
FACTORS = [standard / moved for standard, moved in PAPER.values()]
RECIPES = {"": "fair", ", paper's recipe": "table10"}
GROUPS = {
    f", {size}{end}": {"part": part, "recipe": recipe}
    for end, recipe in RECIPES.items()
    for size, part in PARTS.items()
}
ARMS = {name: arm for end, config in GROUPS.items() for name, arm in lm.three(end, **config).items()}
TRIPLES = [(lm.STANDARD + end, lm.CAUSAL + end, lm.OPEN + end) for end in GROUPS]
FAIR = tuple(name for group in TRIPLES[:3] for name in group)

EXPERIMENT = Experiment(
    name="pde-table13",
    paper="pde",
    place="Table 13, rows 0.1 % and 1 % (5 % and 10 % need WikiText-103)",
    claim="PDE attention needs less data: 38.1 against 27,598 with 0.1 % of WikiText-103, 3.7 against "
    "14,985 with 1 %.",
    task=lm.TASK,
    base=lm.BASE,
    arms=ARMS,
    scales={
        "smoke": Scale(lm.SMOKE, arms=(TRIPLES[1][1], TRIPLES[4][2]), judged=False, time="2 s"),
        "cpu": Scale(lm.CPU, arms=FAIR, time="5 min on 2 cores", judged=False, note=lm.ONE),
        "gpu": Scale(lm.GPU, training=lm.SHARE, time="6 min on one H200"),
    },
    metric="perplexity",
    better="lower",
    others=("left_to_right", "causal", "train_loss", "updates"),
    numbers={
        f"{arm}, {size}{end}": PAPER[size][which]
        for size in PAPER
        for end in RECIPES
        for which, arm in enumerate((lm.STANDARD, lm.OPEN))
    },
    judge=all_of(
        lm.honest(
            TRIPLES[1:3],
            list(PARTS)[1:],
            [*FACTORS[1:], None],
            claim="PDE attention has the lower perplexity with 1 % and 2 % of WikiText-103",
        ),
        lm.honest(
            TRIPLES[:1],
            list(PARTS)[:1],
            FACTORS[:1],
            noise=False,
            claim="PDE attention has the lower perplexity with 0.1 % of WikiText-103",
            caveat="one seed of an over-fitted training, whose deviation is not known",
        ),
        lm.honest(
            TRIPLES[3:],
            list(PARTS),
            [*FACTORS, None],
            noise=False,
            claim="PDE attention has the lower perplexity by the paper's recipe",
            caveat="the models are still one function",
        ),
    ),
    data=("wikitext2",),
    note=(
        "Ten epochs of 0.1 % in batches of 128 texts are ten updates or so, and guessing among 30,522 "
        "pieces gives 30,522. But the paper's training loss of that model is 3.0, of the PDE's 3.8: "
        "what it calls perplexity is another measure for the one than for the other, since in the "
        "authors' code the first alone is evaluated on torch's fast path (pde-artefact). The fair "
        "recipe takes 2,000 updates whatever the data, so that the smallest part is read 140 times "
        "and over-fitted."
    ),
)
