"""Table 4, CIFAR-100: what StepNet's Adaptor should see, and how it should be made."""

from attractor.reproduce import Experiment, Scale, best

from .stepnet_shared import CIFAR100, CLASSIFY, RECIPE, SEEDS, SHORT, TABLE4, gains_picture, smoke

NUMBERS = {
    "none": 74.30, "F(x_t)": 76.34, "F(x_t+1)": 76.53, "F(x_t+1 - x_t)": 76.42, "F(x_t+1, x_t)": 77.04,
    "adaptor a": 76.19, "adaptor b": 75.45, "adaptor c": 75.12, "adaptor d": 76.83,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="stepnet-table4-cifar100",
    paper="stepnet",
    place="Table 4, CIFAR-100, all rows",
    claim="StepNet's Adaptor is best if it sees both states, and better than four other structures.",
    task=CLASSIFY,
    arms=TABLE4,
    scales={
        "smoke": smoke("F(x_t)", "adaptor d"),
        "gpu": Scale(CIFAR100, seeds=SEEDS, training=SHORT, time="22 min on one H200 beside Table 1's"),
    },
    metric="accuracy",
    better="higher",
    numbers=NUMBERS,
    judge=best("F(x_t+1, x_t)"),
    others=("parameters", "tns_one", "tns_gate"),
    unit="%",
    data=("cifar100",),
    note=RECIPE,
    picture=gains_picture(NUMBERS),
)
