"""Fig. 2: training losses of AttNS and two kinds of AttNS-m, and where the attention values go.

The paper trains AttNS (Eq. 10), AttNS-m (Eq. 6) and AttNS-m with 1 + Q in place of Q (Eq. 9), and shows
that the products stop at a larger loss, and that the mean of Q quickly gets close to 1. It does not say
for which system; here are two. Only the paper's recipe has losses to show.
"""

from typing import Any

from attractor.reproduce import Effect, Experiment, Results, Scale, Verdict, all_of, decide, number

from .attns_shared import (
    CPU,
    GPU,
    SEEDS,
    SMOKE,
    SOLVE,
    UNPRINTED,
    all_smaller,
    arms,
    frame,
    name,
    too_short,
)

SYSTEMS = ("2-link", "spring-mass")
KINDS = {
    "AttNS": {"correction": "attns"},
    "AttNS-m": {"correction": "attns_m"},
    "AttNS-m, 1 + Q": {"correction": "attns_m", "residual": True},
}
NEAR = 0.1  # of 1


def settles(results: Results) -> Verdict:
    """Q of AttNS-m ends near 1."""
    arms = {s: name(s, "AttNS-m", "paper") for s in SYSTEMS}
    effects = [
        Effect(
            s,
            tuple(NEAR - abs(q - 1) for q in results.values(arm, "q")),
            limitation=too_short(results, [arm]),
        )
        for s, arm in arms.items()
    ]
    each = ", ".join(
        f"{number(results.mean(arm, 'q'))} (|Q - 1| on average {number(results.mean(arm, 'away'))}, {s})"
        for s, arm in arms.items()
    )
    ends = ", ".join(f"{results.mean(arm, 'q'):.3f}" for arm in arms.values())
    return decide(
        effects,
        f"the mean of Q ends at {each}",
        claim="Q of AttNS-m goes to 1",
        measurement=f"Q = {ends}",
    )


LOSSES = all_smaller(
    {s: (name(s, "AttNS", "paper"), [name(s, what, "paper") for what in KINDS]) for s in SYSTEMS},
    "AttNS reaches a smaller training loss than both kinds of AttNS-m",
    "loss",
)


def picture(results: Results) -> Any:
    """Loss and attention value over epochs."""
    from attractor.report.figures import plt

    figure, axes = plt.subplots(1, 3, figsize=(12.5, 3.6))
    for i, s in enumerate(SYSTEMS):
        for k, what in enumerate(KINDS):
            arm = name(s, what, "paper")
            epochs, loss = results.curve(arm, "epoch"), results.curve(arm, "loss")
            axes[i].semilogy(epochs, loss, lw=1.4, ls="--" if k == 2 else "-", label=what)
            if k == 1:
                q = results.curve(arm, "q")
                axes[2].plot([epochs[-1] * j / (len(q) - 1) for j in range(len(q))], q, label=s)
        frame(axes[i], s, "epoch", "training loss" if i == 0 else "")
    axes[2].axhline(1.0, color="#1b1f24", ls=":", lw=1.2)
    frame(axes[2], "mean of Q, AttNS-m", "epoch", "")
    for axis in (axes[0], axes[2]):
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="attns-fig2",
    paper="attns",
    place="Fig. 2",
    claim="AttNS reaches a smaller training loss than both kinds of AttNS-m, whose Q goes to 1.",
    task=SOLVE,
    arms=arms(SYSTEMS, KINDS, ("paper",)),
    base={"watch": True},
    scales={
        "smoke": Scale(SMOKE, judged=False, time="1 s"),
        "cpu": Scale(
            CPU,
            SEEDS,
            time="12 min on 2 cores",
            note="Here 2,000 trajectories and 10 epochs in batches of 2,048, 970 updates.",
        ),
        "gpu": Scale(
            {**GPU, "epochs": {"2-link": 500, "spring-mass": 500}},
            SEEDS,
            time="8 min on one H200",
            training="100 %",
            note="Here all 500 epochs: 61,000 updates on the 2-link pendulum, 15,000 on spring-mass.",
        ),
    },
    metric="loss",
    better="lower",
    numbers={},
    others=("mse", "q", "away", "updates"),
    judge=all_of(LOSSES, settles),
    logarithmic=True,
    note=f"{UNPRINTED} The paper says of the products that their loss falls fast at first and slowly "
    "in the last epochs, so that a short training shows the opposite of its end. Losses have lambda "
    "= 1e6 for the pendulum. 1 + Q is AttNS-m whose last bias starts one higher, which is the same "
    "network.",
    picture=picture,
)
