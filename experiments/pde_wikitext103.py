"""Table 2 on its own data: 5 % of WikiText-103, under the paper's recipe (Table 8) and the fair one.

The training file is 180 MB and not among the data here; with it in the folder that ATTRACTOR_DATA names
(wikitext103_train.txt, .txt.xz, or wikitext-103/wiki.train.tokens) this runs like the others. For the
Tables 3, 4, 5 and 13 put ``"data": "wikitext103"`` and a `part` into their arms likewise.
"""

from attractor.reproduce import Experiment, Scale

from . import pde_settings as lm
from . import pde_table2 as table

ARMS = {
    name: {**arm, "part": 0.05, "recipe": recipe}
    for end, recipe in (("", "fair"), (", paper's recipe", "table8"))
    for n in table.LENGTHS
    for name, arm in lm.three(f", {n}{end}", length=n).items()
}
TRIPLES = [
    (lm.STANDARD + end, lm.CAUSAL + end, lm.OPEN + end)
    for end in [f", {n}{more}" for more in ("", ", paper's recipe") for n in table.LENGTHS]
]
BIG = {**lm.GPU, "data": "wikitext103"}

EXPERIMENT = Experiment(
    name="pde-wikitext103",
    paper="pde",
    place="Table 2 on WikiText-103, both rows",
    claim="Perplexity of standard attention rises with length, 6,865 to 20,748; of PDE attention it "
    "falls, 12.65 to 1.97.",
    task=lm.TASK,
    base=lm.BASE,
    arms=ARMS,
    scales={
        "smoke": Scale(lm.SMOKE, arms=TRIPLES[0][2:], judged=False, time="1 s"),
        "gpu": Scale(BIG, time="9 runs of 10 to 18 s and 9 of 60 to 90 s on one H200"),
    },
    metric="perplexity",
    better="lower",
    others=("left_to_right", "causal", "train_loss", "updates"),
    numbers={
        arm: table.PAPER[n][which]
        for n, (standard, _, without) in zip(table.LENGTHS * 2, TRIPLES)
        for which, arm in enumerate((standard, without))
    },
    judge=table.judge,
    data=("wikitext103",),
    missing="the training file of WikiText-103 is not here; with wikitext103_train.txt in FOLDER it "
    "runs; pde-table2 is the same on WikiText-2",
    note="The first 5 % of the training file; the paper does not say which. An update of the paper's "
    "recipe has as many tokens at all lengths, so 1,024 texts of 256 tokens.",
)
