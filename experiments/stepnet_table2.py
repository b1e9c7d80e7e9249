"""Table 2, ImageNet: ResNet34 and ResNet50 with gates, by the recipe of Table 6.

FOLDER holds train/<class>/<image> and val/<class>/<image>, or a folder imagenet that does. The smoke
test writes such a folder with two classes.
"""

from attractor.reproduce import Experiment, Scale, best
from attractor.reproduce.tasks.images import IMAGEFOLDER

from .stepnet_shared import SEEDS

GATES = ("none", "se", "eca", "cbam", "srm", "fca", "sge", "stepnet")
ROWS = {
    34: (73.99, 74.37, 74.56, 74.89, 74.79, 75.08, 74.50, 75.01),
    50: (76.02, 76.62, 77.07, 76.38, 76.49, 77.22, 77.13, 77.52),
}
ARMS = {
    f"ResNet{d}, {gate}": {"network": {"name": f"resnet{d}"}, "gate": gate}
    for d in ROWS
    for gate in GATES
}
PAPER = {
    "epochs": 120, "batch": 256, "learning_rate": 0.1, "warmup": 0, "schedule": "steps",
    "milestones": [30, 60, 90], "nesterov": False, "weight_decay": 1e-4,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="stepnet-table2",
    paper="stepnet",
    place="Table 2, ImageNet, all rows",
    claim="StepNet is the best gate for ResNet50 on ImageNet (for ResNet34, second to FCA).",
    task=IMAGEFOLDER,
    arms=ARMS,
    scales={
        "smoke": Scale(
            {"made": 4, "size": 32, "workers": 0,
             "recipe": {"epochs": 1, "batch": 4, "learning_rate": 0.01, "warmup": 0}},
            arms=("ResNet34, stepnet", "ResNet50, se"), judged=False, time="3 s",
        ),
        "gpu": Scale(
            {"recipe": PAPER, "size": 224, "workers": None}, seeds=SEEDS,
            time="about a day for each of 48 runs on one H200, an estimate",
        ),
    },
    metric="accuracy",
    better="higher",
    numbers={f"ResNet{d}, {g}": x for d, row in ROWS.items() for g, x in zip(GATES, row)},
    judge=best("ResNet50, stepnet", [f"ResNet50, {gate}" for gate in GATES]),
    others=("parameters",),
    unit="%",
    data=("imagefolder",),
    missing="ImageNet is not here; with train/<class>/<image> and val/<class>/<image> in FOLDER or in "
    "FOLDER/imagenet it runs, and needs Pillow",
    note="The recipe of Table 6: 120 epochs, batch 256, rate 0.1 divided by 10 at 30, 60 and 90.",
)  # fmt: skip
