"""What of the gain is the PDE's: diffusion beside values that are mixed without any equation.

With walls, PDE attention is a few per cent better than standard attention (pde-leak). Diffusion along
keys smooths the values of neighbours, four steps nine of them, and one number a layer is learnt. Mixing
neighbours is also what short convolutions in transformers do. So the same model, recipe, start and order
of texts once more, with the values of the last five tokens mixed by weights that are learnt: five a
layer, or five a channel.
"""

from attractor.reproduce import (
    Effect,
    Experiment,
    Results,
    Scale,
    Verdict,
    all_of,
    best,
    decide,
    gains,
    number,
    values_of,
)

from . import pde_settings as lm
from .pde_settings import CAUSAL, STANDARD

MIXED = {
    "mixed values, a layer": {"pde": None, "mixed": 5},
    "mixed values, a channel": {"pde": None, "mixed": 5, "each_channel": True},
}
THREE = lm.three(length=256)


def enough(results: Results) -> Verdict:
    """More than half of the gain takes the equation: mixed values have less than half of it."""
    logs = {arm: values_of(results, arm, ratio=True) for arm in results.arms}
    seeds = sorted(set.intersection(*(set(values) for values in logs.values())))
    gain = lambda arm, seed: logs[STANDARD][seed] - logs[arm][seed]
    effects = [
        Effect(arm, tuple(gain(CAUSAL, s) / 2 - gain(arm, s) for s in seeds), None, "", True)
        for arm in MIXED
    ]
    standard = results.mean(STANDARD)
    mixed = max(standard - results.mean(arm) for arm in MIXED)
    whole = number(standard - results.mean(CAUSAL))
    why = f"of the gain of {whole}, {number(mixed)} comes without an equation"
    return decide(effects, why, claim="More than half of the gain takes the equation",
                  headline=min(effects, key=lambda effect: effect.value))  # fmt: skip


RULE = all_of(
    gains([CAUSAL], over=STANDARD, better="lower", ratio=True,
          claim="PDE attention has a lower perplexity than standard attention"),
    best(CAUSAL, [CAUSAL, *MIXED], better="lower", ratio=True,
         claim="PDE attention has a lower perplexity than learnt mixtures of values"),
    enough,
)  # fmt: skip


EXPERIMENT = Experiment(
    name="pde-mixing",
    paper="pde",
    place="Appendix C.3 (what the gains come from); length 256 of Table 2",
    claim="The gains of PDE attention show the critical role of smoothing attention by diffusion.",
    task=lm.TASK,
    base=lm.BASE,
    arms={
        STANDARD: THREE[STANDARD],
        CAUSAL: THREE[CAUSAL],
        **{name: {"model": model, "length": 256} for name, model in MIXED.items()},
    },
    scales={
        "smoke": Scale(lm.SMOKE, arms=(CAUSAL, *MIXED), judged=False, time="2 s"),
        "cpu": Scale(lm.CPU, seeds=(0, 1, 2, 3, 4, 5), time="7 min on 2 cores"),
        "gpu": Scale(lm.GPU, training=lm.SHARE, seeds=(0, 1, 2), time="4 min on one H200"),
    },
    metric="perplexity",
    better="lower",
    others=("left_to_right", "causal", "train_loss", "parameters"),
    numbers={},
    judge=RULE,
    data=("wikitext2",),
    note=(
        "Not in the paper, which has no arm without an equation. The runs of standard and of causal PDE "
        "attention are those of pde-leak. Mixtures start at the token's own value, which is standard "
        "attention. That half of the gain be the PDE's was asked for after the runs at scale gpu were "
        "seen. `left_to_right` is of a sample of 2,048 tokens."
    ),
)
