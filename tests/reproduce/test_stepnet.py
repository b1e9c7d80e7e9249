"""The StepNet experiments run in small, and what they measure is what they say."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from attractor.data import images
from attractor.reproduce import (
    CONTRADICTED,
    INCONCLUSIVE,
    SUPPORTED,
    Results,
    Verdict,
    catalogue,
    find,
    run,
)
from attractor.reproduce.results import digest
from attractor.reproduce.tasks import Context
from attractor.reproduce.tasks.detection import average_precision, detect, overlaps
from attractor.reproduce.tasks.images import (
    M1,
    M2,
    NETWORKS,
    SMOKE,
    classify,
    imagefolder,
    make_imagefolder,
    oscillation,
    peak,
    stiffness,
    table,
)
from attractor.residual import StiffnessProfile

NAMES = [name for name, e in catalogue().items() if e.paper == "stepnet"]
PLACES = (
    "table1 table1-cifar100 table1-stl10 table2 table3 table4 table7 fig2 fig3 fig6 fig7 fig8 fig9 fig10"
    " initial"
)


def test_every_place_has_its_experiment():
    assert {f"stepnet-{place}" for place in PLACES.split()} <= set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_in_small_and_can_be_drawn(name, tmp_path):
    pytest.importorskip("PIL")
    experiment = find(name)
    found = run(experiment, "smoke", folder=tmp_path)
    assert found.complete
    for arm in found.arms:
        (kept,) = found.runs[arm].values()
        assert {experiment.metric, *experiment.others} <= kept["metrics"].keys()
        assert len(json.dumps(kept)) < 20_000
    # As if all arms had been run at the largest scale: it can be judged and drawn.
    kept = next(run for runs in found.runs.values() for run in runs.values())
    arms = experiment.arms_of("gpu")
    gated = next(
        (r[0] for r in found.runs.values() if "correlation_gate" in r[0].get("curves", {})), kept
    )
    whole = Results(name, "gpu", experiment.metric, arms, [0, 1, 2], {a: {} for a in arms})
    for arm in arms:
        whole.runs[arm] = dict.fromkeys(range(3), gated)
    assert isinstance(experiment.judge(whole), Verdict)
    if experiment.picture is not None:
        pytest.importorskip("matplotlib")
        from attractor.report.figures import write

        path = write(experiment.picture(whole), tmp_path / "picture.png")
        assert path.stat().st_size > 5_000


@pytest.mark.parametrize("name", NAMES)
def test_larger_scales_are_well_formed(name):
    from attractor.reproduce.tasks.images import make_recipe

    experiment = find(name)
    for scale, what in experiment.scales.items():
        for arm in experiment.arms_of(scale):
            assert make_recipe(experiment.config(arm, scale), 0).epochs > 0
        assert what.time
    assert set(experiment.numbers) <= set(experiment.arms)


def test_figures_share_the_runs_of_table_1():
    def made(name):
        experiment = find(name)
        return {digest(experiment.task, experiment.config(a, "gpu")) for a in experiment.arms_of("gpu")}

    more = ("stepnet-fig7-cifar100", "stepnet-initial-cifar100")
    for name in ("stepnet-fig2", "stepnet-fig3", "stepnet-fig6", *more):
        assert made(name) <= made("stepnet-table1-cifar100")
    for name in ("stepnet-fig7", "stepnet-initial"):
        assert made(name) <= made("stepnet-table1")


@pytest.mark.slow
def test_the_same_numbers_again():
    config = {**SMOKE, "gate": "stepnet", "trick": {"mixup": 0.3, "label_smoothing": 0.1}}
    one, two = (json.dumps(classify(config, Context(seed=3))) for _ in range(2))
    assert one == two
    assert json.dumps(classify(config, Context(seed=4))) != one


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path):
    config = {**SMOKE, "gate": "se", "images": 64, "recipe": {**SMOKE["recipe"], "epochs": 6}}
    lines = []

    def stop(line):
        lines.append(line)
        if len(lines) == 5:  # a checkpoint is written after the fifth epoch, before it is told
            raise KeyboardInterrupt

    whole = classify(config, Context())
    with pytest.raises(KeyboardInterrupt):
        classify(config, Context(scratch=tmp_path, tell=stop))
    assert (tmp_path / "run" / "epoch-0005").is_dir()
    assert json.dumps(classify(config, Context(scratch=tmp_path))) == json.dumps(whole)


def test_separable_images_are_told_apart(tmp_path, monkeypatch):
    """Dark and bright images, and a network that sees their mean colour."""
    pytest.importorskip("PIL")
    make_imagefolder(tmp_path / "imagenet", 8)
    mean = lambda num_classes, gate: nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes)
    )
    monkeypatch.setitem(NETWORKS, "resnet34", mean)
    config = {
        "network": {"name": "resnet34"}, "gate": "none", "size": 32, "workers": 0,
        "recipe": {"epochs": 10, "batch": 8, "learning_rate": 0.2, "warmup": 0},
    }  # fmt: skip
    found = imagefolder(config, Context(folder=tmp_path))
    assert found["metrics"]["accuracy"] == 100
    with pytest.raises(FileNotFoundError, match="that has train/<class>/<image> and val"):
        imagefolder(config, Context(folder=tmp_path / "imagenet" / "train"))


# ---- what is measured


def profile(nsi, stage, gates=None):
    nsi = torch.tensor(nsi, dtype=torch.float64)
    gates = torch.full_like(nsi, math.nan) if gates is None else torch.tensor(gates, dtype=nsi.dtype)
    names = tuple(f"layer.{i}" for i in range(nsi.shape[1]))
    return StiffnessProfile(nsi, 2 * nsi, gates, torch.tensor(stage), names)


def test_stiffness_by_hand():
    """Two inputs, a stage of four blocks of which the first does not count, and one of three."""
    made = profile([[9, 1, 2, 3, 9, 1, 1], [9, 2, 2, 2, 9, 1, 3]], [0, 0, 0, 0, 1, 1, 1])
    found = stiffness(made)
    metrics = found["metrics"]
    # Changes over means: (1/2, 0) in the first stage, (0, 2/2) in the second.
    assert metrics["oscillation_one"] == pytest.approx((0.25 + 0.5) / 2)
    assert metrics["oscillation_gate"] == pytest.approx(metrics["oscillation_one"])  # it is relative
    # Means over inputs of the first stage: 1.5, 2, 2.5.
    assert metrics["peak_one"] == pytest.approx(0.25)
    # Rectangles a x b: of input 1 0.5 x 3 (and 0 x 1), of input 2 0 x 2 and 0.5 x 3.
    assert metrics["tns_one"] == pytest.approx(1.5)
    assert metrics["tns_gate"] == pytest.approx(3.0)
    assert metrics["proportion_one"] == pytest.approx(2 / 10)
    assert metrics["stiff_inputs_one"] == 1
    surface, share = (table(found["curves"][f"{name}_one"]) for name in ("surface", "share"))
    assert surface.shape == share.shape == (len(M1), len(M2))
    assert surface[2, -1] == 100  # m1 = 0.4, m2 = 2.4: both have a block of 3
    assert surface[3].sum() == 0  # m1 = 0.6: nothing
    assert share[2, 0] == 200
    assert math.isnan(metrics["blocks_one"])
    assert oscillation(made.one[:, :2], torch.tensor([0, 0])) != oscillation(made.one, made.stage)
    assert math.isnan(oscillation(made.one[:, :2], torch.tensor([0, 0])))
    assert peak(torch.ones(2, 3), torch.zeros(3)) == 0


def test_correlations_with_gates_by_hand():
    """In block 1 the gate falls as NSI grows, in block 2 it grows; over blocks it falls, then grows."""
    gates = [[0.5, 0.9, 0.1, 0.2], [0.5, 0.1, 0.9, 0.2]]
    made = profile([[9, 1, 2, 1.5], [9, 2, 3, 1.5]], [0, 0, 0, 0], gates)
    metrics = stiffness(made)["metrics"]
    assert metrics["blocks_gate"] == pytest.approx(0, abs=1e-9)  # -1 and +1; the third is constant
    first = np.corrcoef([1, 2, 1.5], [0.9, 0.1, 0.2])[0, 1]
    second = np.corrcoef([2, 3, 1.5], [0.1, 0.9, 0.2])[0, 1]
    assert metrics["paths_gate"] == pytest.approx((first + second) / 2)
    assert metrics["negative_gate"] == 0.5


def test_average_precision_by_hand():
    square = lambda x, side=10.0: [x, 0, x + side, side]
    truth = lambda boxes, labels, crowd=None: {
        "boxes": np.array(boxes, dtype=float), "labels": np.array(labels),
        "areas": np.array([(b[2] - b[0]) * (b[3] - b[1]) for b in boxes], dtype=float),
        "crowd": np.array(crowd or [False] * len(labels)),
    }  # fmt: skip
    got = lambda boxes, labels, scores: {
        "boxes": np.array(boxes, dtype=float).reshape(-1, 4), "labels": np.array(labels),
        "scores": np.array(scores, dtype=float),
    }  # fmt: skip
    truths = [truth([square(0), square(50)], [1, 1]), truth([square(0, 40.0)], [2])]
    perfect = [got([square(0), square(50)], [1, 1], [0.9, 0.8]), got([square(0, 40.0)], [2], [0.5])]
    found = average_precision(truths, perfect)
    assert found["AP"] == found["AP50"] == found["AP75"] == found["APS"] == found["APM"] == 100
    assert math.isnan(found["APL"])
    # Class 1: best a miss, then one of two found: precision 1/2 up to recall 1/2, 51 of 101 recalls.
    # Class 2: nothing.
    half = [got([square(200), square(0)], [1, 1], [0.9, 0.8]), got([], [], [])]
    assert average_precision(truths, half)["AP"] == pytest.approx(100 * (0.5 * 51 / 101 + 0) / 2)
    # Overlap 0.6: found at thresholds 0.5, 0.55 and 0.6 of ten.
    near = [got([[0, 0, 10, 6.0001]], [1], [0.9])]
    found = average_precision([truth([square(0)], [1])], near)
    assert found["AP"] == pytest.approx(30)
    assert (found["AP50"], found["AP75"]) == (pytest.approx(100), 0)
    # A second detection of the same is wrong, one in a crowd counts neither way.
    twice = [got([square(0), square(0), square(52)], [1, 1, 1], [0.9, 0.8, 0.95])]
    crowd = [truth([square(0), [50, 0, 100, 10]], [1, 1], [False, True])]
    assert average_precision(crowd, twice)["AP"] == pytest.approx(100)
    # A detection of a small box counts though it is itself not small; a miss of that size does not.
    large = [got([[0, 0, 33, 32], [300, 0, 340, 40]], [1, 1], [0.9, 0.95])]
    assert average_precision([truth([[0, 0, 31, 32]], [1])], large)["APS"] == pytest.approx(90)
    assert overlaps(np.array([square(0)]), np.array([square(5)]), np.array([False]))[0, 0] == (
        pytest.approx(1 / 3)
    )


def test_average_precision_is_that_of_pycocotools():
    coco, cocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    random = np.random.default_rng(0)
    truths, found, things, told = [], [], [], []
    for image in range(20):
        low = random.uniform(0, 300, (6, 2))
        boxes = np.concatenate((low, low + random.uniform(5, 150, (6, 2))), 1)
        labels, crowd = random.integers(1, 3, 6), random.random(6) < 0.15
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        truths.append({"boxes": boxes, "labels": labels, "areas": areas, "crowd": crowd})
        mine = np.concatenate((boxes + random.normal(0, 6, boxes.shape), boxes[:3] + 40))
        own, scores = np.concatenate((labels, labels[:3])), random.random(9)
        found.append({"boxes": mine, "labels": own, "scores": scores})
        size = lambda b: [b[0], b[1], b[2] - b[0], b[3] - b[1]]
        for b, k, c, a in zip(boxes, labels, crowd, areas):
            things.append({
                "id": len(things) + 1, "image_id": image, "category_id": int(k), "bbox": size(b),
                "area": a, "iscrowd": int(c),
            })  # fmt: skip
        told += [
            {"image_id": image, "category_id": int(k), "bbox": size(b), "score": s}
            for b, k, s in zip(mine, own, scores)
        ]
    whole = coco.COCO()
    whole.dataset = {
        "images": [{"id": i} for i in range(20)], "annotations": things,
        "categories": [{"id": 1}, {"id": 2}],
    }  # fmt: skip
    whole.createIndex()
    judged = cocoeval.COCOeval(whole, whole.loadRes(told), "bbox")
    judged.evaluate(), judged.accumulate(), judged.summarize()
    ours = average_precision(truths, found)
    names = ("AP", "AP50", "AP75", "APS", "APM", "APL")
    assert [ours[n] for n in names] == pytest.approx([100 * x for x in judged.stats[:6]], abs=1e-6)


@pytest.mark.slow
def test_a_detector_finds_squares():
    pytest.importorskip("PIL")
    config = find("stepnet-table3").config("ResNet34, stepnet", "smoke")
    config["recipe"] = {**config["recipe"], "epochs": 40, "milestones": [30]}
    assert detect(config, Context())["metrics"]["AP50"] > 50


def test_faster_rcnn_says_what_it_needs(monkeypatch):
    pytest.importorskip("PIL")
    monkeypatch.setitem(sys.modules, "torchvision.models.detection", None)
    config = find("stepnet-table3").config("ResNet50, se", "gpu") | {"weights": None, "made": 2}
    with pytest.raises(ImportError, match="pip install torchvision"):
        detect(config, Context())


# ---- verdicts


def results(name, values, metric="accuracy"):
    experiment = find(name)
    runs = {
        arm: {s: {"metrics": {metric: x}, "seconds": 0, "device": ""} for s, x in enumerate(row)}
        for arm, row in values.items()
    }
    return Results(experiment.name, "gpu", metric, list(values), [0, 1, 2], runs)


def test_the_best_is_best_at_the_same_seeds():
    judge = find("stepnet-table4").judge
    ours, other = "F(x_t+1, x_t)", "F(x_t)"
    clear = results("stepnet-table4", {ours: [95, 94, 93.0], other: [94, 93.1, 91.9]})
    assert judge(clear).direction == SUPPORTED
    unclear = results("stepnet-table4", {ours: [95, 94, 93.0], other: [94, 94.5, 92.9]})
    assert judge(unclear).direction == INCONCLUSIVE
    # A seed that only one of them has does not count, however good.
    late = results("stepnet-table4", {ours: [95, 94.9, 95.1], other: [95.5]})
    assert judge(late).direction == INCONCLUSIVE
    assert "-0.5 [-1.1, 0.11]" in judge(late).why  # by the deviation of the arm with three seeds
    # Behind by less than seeds differ, and by more.
    level = results("stepnet-table4", {ours: [95, 94, 93.0], other: [95.5, 93.8, 93.1]})
    assert judge(level).direction == INCONCLUSIVE
    behind = results("stepnet-table4", {ours: [95, 94, 93.0], other: [96, 95.1, 93.9]})
    assert judge(behind).direction == CONTRADICTED


@pytest.mark.parametrize(
    ("se", "start", "word"),
    [
        ([1.5, 1.6, 1.5], 0.9, SUPPORTED),
        ([1.2, 1.9, 1.1], 0.9, INCONCLUSIVE),  # seeds differ by more
        ([0.8, 1.2, 0.97], 0.9, INCONCLUSIVE),  # a little below, as far as three seeds tell
        ([0.99, 1.0, 1.01], 0.9, CONTRADICTED),  # a little below at every seed
        ([1.5, 1.6, 1.5], 2.5, CONTRADICTED),  # above from the beginning, training lowered it
    ],
)
def test_gates_must_end_above_the_plain_network_and_rise_there(se, start, word):
    ends = {"none": 1.0, "se": 0.0, "eca": 1.5, "srm": 1.6, "iebn": 0.5, "stepnet": 0.6}
    found = results("stepnet-initial", {arm: [0, 0, 0] for arm in ends})
    for arm, after in ends.items():
        for seed, run_ in found.runs[arm].items():
            end = se[seed] if arm == "se" else after + seed / 100
            begin = start if arm == "se" else 0.9 + seed / 100
            run_["metrics"] = {
                f"tns_{step}{when}": x
                for step in ("one", "gate") for when, x in (("", end), ("_initial", begin))
            }  # fmt: skip
    assert find("stepnet-initial").judge(found).direction == word


@pytest.mark.parametrize(
    ("over_blocks", "word"),
    [
        ([-0.8, -0.7, -0.75], SUPPORTED),
        ([-0.8, -0.007, -0.6], INCONCLUSIVE),
        ([0.1, 0.2, -0.1], INCONCLUSIVE),
        ([0.5, 0.6, 0.55], CONTRADICTED),
    ],
)
def test_a_correlation_of_about_nothing_is_none(over_blocks, word):
    found = results("stepnet-fig9", {"se": over_blocks})
    for run_, x in zip(found.runs["se"].values(), over_blocks):
        run_["metrics"] = {"blocks_gate": x / 10 - 0.7, "paths_gate": x}
    assert find("stepnet-fig9").judge(found).direction == word


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tns", "word"),
    [
        ((1, 2, 3, 4, 5, 6), SUPPORTED),
        ((6, 5, 4, 3, 2, 1), CONTRADICTED),
        ((2, 1, 6, 3, 5, 4), INCONCLUSIVE),
    ],
)
def test_seeds_are_no_networks_of_their_own(tns, word):
    found = results("stepnet-fig7", {arm: [0, 0, 0] for arm in find("stepnet-fig7").arms})
    columns = ("gate", "one", "gate_initial", "one_initial")
    for i, runs in enumerate(found.runs.values()):
        for seed, run_ in runs.items():
            run_["metrics"] = {f"tns_{c}": tns[i] + seed / 10 for c in columns[:2]}
            run_["metrics"] |= {f"tns_{c}": -i % 4 + seed / 10 for c in columns[2:]}
            run_["metrics"]["accuracy"] = 90.0 + i + seed / 10
    assert find("stepnet-fig7").judge(found).direction == word
    found.runs["none"][0]["metrics"]["accuracy"] = None  # a training that was lost
    assert "over all 17 networks" in find("stepnet-fig7").judge(found).why


def test_tricks_that_do_not_help_test_nothing():
    judge = find("stepnet-fig8").judge

    def made(accuracy, tns):
        arms = {"plain": (70.0, 1.0), "label smoothing": (accuracy, tns), "mixup": (69.0, 0.2)}
        arms["both"] = (69.0, 0.2)
        found = results("stepnet-fig8", {arm: [0, 0] for arm in arms})
        for arm, (a, t) in arms.items():
            for s, run_ in found.runs[arm].items():
                run_["metrics"] = {"accuracy": a + s / 100, "tns_one": t + s / 100}
        return found

    assert judge(made(71.0, 1.2)).direction == SUPPORTED
    assert judge(made(71.0, 0.8)).direction == CONTRADICTED
    assert "no trick made this short training better" in judge(made(69.0, 1.2)).why


def test_made_data_have_the_layout_of_the_real(tmp_path):
    from attractor.reproduce.tasks.images import make_stl10

    make_stl10(tmp_path, 20)
    found = images.load("stl10", "test", tmp_path)
    assert found.images.shape == (20, 3, 96, 96)
    assert found.labels.tolist() == [i % 10 for i in range(20)]
