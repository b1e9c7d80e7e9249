"""Table 1, STL-10: what a gate is worth on 5,000 images of 96 x 96.

The paper does not say how it trained on STL-10; here with its optimiser for CIFAR, crops of 12 pixels.
The smoke test reads files of the same layout with random images.
"""

from attractor.reproduce import Experiment, Scale

from .stepnet_shared import CLASSIFY, SEEDS, SIX, SMOKE, TABLE1, gains_picture, gates

NUMBERS = {
    "none": 82.66, "se": 83.96, "cbam": 84.11, "eca": 83.89, "sem": 85.73, "srm": 84.73, "fca": 85.34,
    "iebn": 85.13, "stepnet": 86.08,
}  # fmt: skip
MADE = {
    "data": "stl10", "made": 16, "network": SMOKE["network"], "probed": 8,
    "recipe": {"epochs": 1, "batch": 8, "learning_rate": 0.1, "warmup": 0, "crop": 12},
}  # fmt: skip
STL10 = {
    "data": "stl10",
    "network": {"name": "resnet_cifar", "depth": 164, "width": 16},
    "recipe": {
        "epochs": 164, "batch": 128, "learning_rate": 0.1, "warmup": 0, "schedule": "steps",
        "milestones": [81, 122], "nesterov": False, "weight_decay": 1e-4, "crop": 12,
    },
    "probed": 256,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="stepnet-table1-stl10",
    paper="stepnet",
    place="Table 1, STL-10, six of nine rows",
    claim="Every gate makes ResNet164 better on STL-10, and StepNet most.",
    task=CLASSIFY,
    arms=TABLE1,
    scales={
        "smoke": Scale(MADE, arms=("none", "stepnet"), judged=False, time="2 s"),
        "gpu": Scale(STL10, seeds=SEEDS, arms=SIX, time="about 3 h on one H200, an estimate"),
    },
    metric="accuracy",
    better="higher",
    numbers=NUMBERS,
    judge=gates(SIX),
    others=("parameters", "tns_one", "tns_gate"),
    unit="%",
    data=("stl10",),
    missing="STL-10's files are not here; with train_X.bin, train_y.bin, test_X.bin and test_y.bin in "
    "FOLDER (or FOLDER/stl10_binary) it runs",
    note="The paper's depth, epochs and optimiser; how it trained on STL-10 it does not say. "
    "bfloat16. CBAM, SEM and FCA, with the second best of the table, are not run unless asked for "
    "(--arm).",
    picture=gains_picture(NUMBERS),
)
