"""Table 3, COCO: Faster R-CNN with a gated ResNet50 or ResNet101 as its backbone.

FOLDER holds train2017, val2017 and annotations, or a folder coco that does. Faster R-CNN is
torchvision's; AP is computed here, as pycocotools does. The smoke test writes such a folder with
squares to be found, and has a detector of one layer in place of Faster R-CNN.
"""

from attractor.reproduce import Experiment, Scale, all_of, best
from attractor.reproduce.tasks.detection import DETECT

GATES = ("none", "se", "eca", "sge", "stepnet")
ROWS = {50: (36.9, 38.3, 38.5, 38.9, 39.8), 101: (38.9, 39.8, 40.4, 40.2, 41.9)}  # AP
ARMS = {f"ResNet{d}, {gate}": {"depth": d, "gate": gate} for d in ROWS for gate in GATES}
TINY = {f"ResNet34, {gate}": {"depth": 34, "gate": gate} for gate in ("none", "stepnet")}
USUAL = {
    "epochs": 12, "batch": 16, "learning_rate": 0.02, "warmup": 0.07, "schedule": "steps",
    "milestones": [8, 11], "nesterov": False, "weight_decay": 1e-4, "capture": "none",
}  # fmt: skip

EXPERIMENT = Experiment(
    name="stepnet-table3",
    paper="stepnet",
    place="Table 3, MS COCO, all rows, AP",
    claim="StepNet is the best gate for the backbone of Faster R-CNN, by 0.9 and 1.5 points of AP.",
    task=DETECT,
    arms={**ARMS, **TINY},
    scales={
        "smoke": Scale(
            {"detector": "dense", "weights": None, "frozen": -1, "side": 64, "boxes": 4, "workers": 0,
             "made": 8, "recipe": {**USUAL, "epochs": 1, "batch": 4, "warmup": 0, "milestones": [1],
                                   "clip": 5.0}},
            arms=tuple(TINY), judged=False, time="4 s",
        ),
        "gpu": Scale(
            {"detector": "faster-rcnn", "weights": "torchvision", "frozen": 1, "side": 640, "boxes": 100,
             "workers": 8, "recipe": USUAL},
            arms=tuple(ARMS), seeds=(0,), time="about half a day for each of 10 runs, an estimate",
        ),
    },
    metric="AP",
    better="higher",
    numbers={f"ResNet{d}, {g}": x for d, row in ROWS.items() for g, x in zip(GATES, row)},
    judge=all_of(
        *(
            best(
                f"ResNet{d}, stepnet",
                [f"ResNet{d}, {g}" for g in GATES],
                claim=f"StepNet is the best gate for ResNet{d} in Faster R-CNN",
            )
            for d in ROWS
        )
    ),
    others=("AP50", "AP75", "APS", "APM", "APL"),
    unit="%",
    data=("coco",),
    missing="COCO is not here; with train2017, val2017 and annotations in FOLDER or in FOLDER/coco it "
    "runs, and needs torchvision and Pillow",
    note="torchvision's Faster R-CNN for MMDetection's, 12 epochs of batch 16. The backbone starts "
    "from torchvision's weights with gates that start at 1: backbones trained with gates on "
    "ImageNet, which the paper has, would come from Table 2. Its first stage is frozen, as usual, "
    "and with it that stage's gates: they stay at 1. Evaluated on the 5,000 images of val2017 (the "
    "paper: 40,670 test images, whose boxes are not public), one seed (the paper: five).",
)  # fmt: skip
