"""Table 4, CIFAR-10: what StepNet's Adaptor should see, and how it should be made.

Figure 5 with the structures a to d is not legible; our reading of them is in `gates.StepNet`: a
without scale and shift, b two layers as in SE, c without batch normalisation, d a normalisation for
each state.
"""

from attractor.reproduce import Experiment, Scale, best

from .stepnet_shared import (
    CIFAR10,
    CLASSIFY,
    RECIPE,
    SEEDS,
    SHORT,
    TABLE4,
    digits,
    gains_picture,
    smoke,
)

NUMBERS = {
    "none": 93.35, "F(x_t)": 94.59, "F(x_t+1)": 94.32, "F(x_t+1 - x_t)": 94.69, "F(x_t+1, x_t)": 95.14,
    "adaptor a": 94.39, "adaptor b": 94.05, "adaptor c": 94.19, "adaptor d": 94.92,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="stepnet-table4",
    paper="stepnet",
    place="Table 4, CIFAR-10, all rows",
    claim="StepNet's Adaptor is best if it sees both states, and better than four other structures.",
    task=CLASSIFY,
    arms=TABLE4,
    scales={
        "smoke": smoke("F(x_t+1, x_t)", "adaptor b"),
        "cpu": digits(time="5 min on 2 cores, on the digits"),
        "gpu": Scale(CIFAR10, seeds=SEEDS, training=SHORT, time="22 min on one H200 beside Table 1's"),
    },
    metric="accuracy",
    better="higher",
    numbers=NUMBERS,
    judge=best("F(x_t+1, x_t)"),
    others=("parameters", "tns_one", "tns_gate"),
    unit="%",
    data=("cifar10",),
    note=f"{RECIPE} Differences are taken at the seeds that both arms have. The paper's Figure 5 "
    "with the structures a to d is not legible; our reading: a without scale and shift, b two "
    "layers as in SE, c without batch normalisation, d a normalisation for each state.",
    picture=gains_picture(NUMBERS),
)
