"""Tasks of the StepNet paper on images: train a network, and measure its stiffness before and after.

`classify` is for images that fit into memory (the digits, CIFAR, STL-10), `imagefolder` for ImageNet's
layout. All networks of a comparison have the same recipe, the same batches and the same initial weights,
except those of the gates. Accuracy is that of the last epoch on the test set, which is not used for any
choice. Stiffness is measured on the first test images.
"""

import hashlib
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attractor.data import images
from attractor.data.folders import folder_of
from attractor.data.imagefolder import ImageFolder
from attractor.reproduce.tasks import Context, Outcome
from attractor.residual import StiffnessProfile, probe, ranks, resnet34, resnet50, resnet_cifar, vit
from attractor.storage.files import write_bytes
from attractor.train import Recipe, train

Sets = tuple[images.ImageSet, images.ImageSet]
CLASSIFY, IMAGEFOLDER = (f"{__name__}:{name}" for name in ("classify", "imagefolder"))
NETWORKS: dict[str, Any] = {
    "resnet_cifar": resnet_cifar, "vit": vit, "resnet34": resnet34, "resnet50": resnet50,
}  # fmt: skip
OPTIONS = ("gate", "gate_options", "mixer", "where")  # options of a network that an arm may have

# Configurations that experiments share. Runs with the same configuration are shared as well.
GATES = ("none", "se", "cbam", "eca", "sem", "srm", "fca", "iebn", "stepnet")  # rows of Table 1
SIX = ("none", "se", "eca", "srm", "iebn", "stepnet")
SHORT: dict[str, Any] = {
    "epochs": 30, "batch": 256, "learning_rate": 0.2, "warmup": 5.0, "weight_decay": 5e-4,
}  # fmt: skip
RESNET83: dict[str, Any] = {"name": "resnet_cifar", "depth": 83, "width": 16}
CIFAR10: dict[str, Any] = {"data": "cifar10", "network": RESNET83, "recipe": SHORT, "probed": 256}
CIFAR100: dict[str, Any] = {**CIFAR10, "data": "cifar100", "recipe": {**SHORT, "capture": "compile"}}
DIGITS: dict[str, Any] = {
    "data": "digits",
    "network": {"name": "resnet_cifar", "depth": 47, "width": 8},
    "recipe": {"epochs": 10, "batch": 64, "learning_rate": 0.1, "warmup": 2, "crop": 1, "flip": False},
    "probed": 256,
}
SMOKE: dict[str, Any] = {
    "data": "digits",
    "images": 192,
    "network": {"name": "resnet_cifar", "depth": 29, "width": 4},
    "recipe": {"epochs": 1, "batch": 32, "learning_rate": 0.1, "warmup": 0, "crop": 1, "flip": False},
    "probed": 32,
}

STEPS = ("one", "gate")
M1 = torch.linspace(0, 2.4, 13, dtype=torch.float64)  # thresholds m1, m2 of surfaces and proportions
M2 = torch.linspace(0, 2.4, 25, dtype=torch.float64)


def classify(config: dict[str, Any], context: Context) -> Outcome:
    """Train one network on images in memory, and measure its stiffness.

    Configuration:
        data: name of a data set in `attractor.data.images`.
        images: number of training images to use; optional.
        made: number of random images in STL-10's format to use in place of the data set; optional.
        network: name and shape of the network.
        gate, gate_options, mixer, where: options of the network.
        recipe, trick: options of `Recipe`; those of the trick take precedence.
        probed: number of test images on which stiffness is measured; 0 for no measurement.
    """
    sets = _sets(config, context)
    model = make_network(config, sets[0], context.seed).to(context.device)
    batches = list(sets[1].normalised(slice(config["probed"])).to(context.device).split(128))
    initial = probe(model, batches, settle=True) if config["probed"] else None
    recipe = make_recipe(config, context.seed)
    history = train(
        model, *sets, recipe, device=context.device, save_every=5,
        tell=_progress_callback(context, recipe), out=folder_for(context, recipe),
    )  # fmt: skip
    metrics = {
        "accuracy": 100 * history.accuracy,
        "train_loss": history.final["train_loss"],
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    curves: dict[str, Any] = {"accuracy": [100 * x for x in history.column("valid_accuracy")]}
    if initial is not None:
        before, after = stiffness(initial), stiffness(probe(model, batches))
        metrics |= after["metrics"] | {f"{k}_initial": v for k, v in before["metrics"].items()}
        curves |= after["curves"] | {
            f"{k}_initial": v
            for k, v in before["curves"].items()
            if k.split("_")[-1] in STEPS  # without quantiles and counts, which would enlarge the files
        }
    outcome = {"metrics": metrics, "curves": curves, "data": hashes(config, sets)}
    return round_outcome(outcome)


def imagefolder(config: dict[str, Any], context: Context) -> Outcome:
    """Train one network on ``FOLDER/train/<class>/<image>``, and test it on ``FOLDER/val``.

    FOLDER is the folder of the data, or ``imagenet`` in it. The configuration is that of `classify`,
    except for:
        size: height and width of the images.
        workers: number of processes that decode images; null for an automatic choice.
        made: number of generated images per class and split, with two classes, to use in place of
            FOLDER; optional.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = _imagenet(config, context, Path(temporary))
        training = ImageFolder(place / "train", train=True, size=config["size"])
        test = ImageFolder(place / "val", size=config["size"], classes=training.classes)
        torch.manual_seed(context.seed)
        options = {name: config[name] for name in OPTIONS if name in config}
        model = NETWORKS[config["network"]["name"]](num_classes=len(training.classes), **options)
        recipe = make_recipe(config, context.seed)
        history = train(
            model, training.loader(recipe.batch, config["workers"]),
            test.loader(recipe.batch, config["workers"]), recipe, device=context.device,
            tell=_progress_callback(context, recipe), out=folder_for(context, recipe),
        )  # fmt: skip
    return round_outcome({
        "metrics": {
            "accuracy": 100 * history.accuracy,
            "train_loss": history.final["train_loss"],
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        "curves": {"accuracy": [100 * x for x in history.column("valid_accuracy")]},
        "data": _name_hash(training, test),
    })  # fmt: skip


def classify_data(config: dict[str, Any], context: Context) -> dict[str, str]:
    """Return the hashes of the data that `classify` reads."""
    return hashes(config, _sets(config, context))


def imagefolder_data(config: dict[str, Any], context: Context) -> dict[str, str]:
    """Return the hash of the names of the files that `imagefolder` reads."""
    with tempfile.TemporaryDirectory() as temporary:
        place = _imagenet(config, context, Path(temporary))
        return _name_hash(*(ImageFolder(place / part, size=config["size"]) for part in ("train", "val")))


def _name_hash(*folders: ImageFolder) -> dict[str, str]:
    names = "\n".join(sorted(p.name for d in folders for p in d.paths))
    return {"names of files": hashlib.sha256(names.encode()).hexdigest()}


def make_network(config: dict[str, Any], data: images.ImageSet, seed: int) -> nn.Module:
    """Return the network of a configuration.

    Networks of the same seed have the same initial weights, except those of their gates.
    """
    shape = dict(config["network"])
    make = NETWORKS[shape.pop("name")]
    shape |= {name: config[name] for name in OPTIONS if name in config}
    if make is vit:
        shape["image_size"] = data.images.shape[-1]
    torch.manual_seed(seed)
    return make(num_classes=len(data.classes), in_channels=data.images.shape[1], **shape)


def make_recipe(config: dict[str, Any], seed: int) -> Recipe:
    """Return the recipe of a configuration, with the options of its "trick" if it has one."""
    options = {**config["recipe"], **config.get("trick", {})}
    if "milestones" in options:
        options["milestones"] = tuple(options["milestones"])
    return Recipe(**options, seed=seed)


def folder_for(context: Context, recipe: Recipe) -> Path | None:
    """Return the folder of checkpoints; None without a scratch folder or for a single epoch."""
    return None if context.scratch is None or recipe.epochs < 2 else context.scratch / "run"


def stiffness(profile: StiffnessProfile) -> dict[str, dict[str, Any]]:
    """Return the metrics and curves of a profile, for the step 1 ("one") and for the gate as the step.

    Metrics, each with the suffix of the step:
        tns: total neural stiffness.
        nsi: mean of NSI over inputs and blocks.
        proportion, stiff_inputs: share of blocks and of inputs beyond the thresholds 0.5 and 0.5.
        oscillation, peak: see these functions.
        blocks: correlation over inputs of NSI with the mean of the gate, as a mean over the blocks of
            the first stage.
        paths: the same correlation over the blocks of the first stage, as a median over inputs.
        negative: share of inputs for which that correlation is negative.
    """
    metrics: dict[str, float] = {}
    curves: dict[str, Any] = {"stage": profile.stage.tolist()}
    first = (profile.stage == profile.stage[0]).nonzero()[1:, 0]
    gates = profile.gates[:, first].double()
    for step in STEPS:
        step_profile = profile.with_step(step)  # type: ignore[arg-type]
        nsi = step_profile.nsi.double().cpu()
        metrics |= {
            f"tns_{step}": float(step_profile.tns),
            f"nsi_{step}": float(nsi.mean()),
            f"proportion_{step}": float(step_profile.proportion(0.5, 0.5)),
            f"stiff_inputs_{step}": float(step_profile.surface(0.5, 0.5)),
            f"oscillation_{step}": oscillation(nsi, step_profile.stage.cpu()),
            f"peak_{step}": peak(nsi, step_profile.stage.cpu()),
        }
        paths = [ranks.pearson(x, g) for x, g in zip(nsi[:, first], gates.cpu())]
        correlations = [x for x in paths if not math.isnan(x)]
        blocks = step_profile.correlation()["pearson"]
        within = [x for x in blocks[first.cpu()].tolist() if not math.isnan(x)]
        metrics |= {
            f"blocks_{step}": float(np.mean(within)) if within else math.nan,
            f"paths_{step}": float(np.median(correlations)) if correlations else math.nan,
            f"negative_{step}": float(np.mean([x < 0 for x in correlations]))
            if correlations
            else math.nan,
        }
        low, high = (torch.quantile(nsi, q, dim=0).tolist() for q in (0.1, 0.9))
        curves |= {
            f"nsi_{step}": nsi.mean(0).tolist(), f"nsi_{step}_low": low, f"nsi_{step}_high": high,
            f"surface_{step}": _table(step_profile.surface, 100),
            f"share_{step}": _table(step_profile.proportion, 1000),
        }  # fmt: skip
        if correlations:
            counts = np.histogram(correlations, bins=20, range=(-1, 1))[0]
            curves |= {
                f"correlation_{step}": blocks.tolist(),
                f"paths_{step}_count": (100 * counts / len(correlations)).tolist(),
            }
    return {"metrics": metrics, "curves": curves}


def oscillation(nsi: Tensor, stage: Tensor) -> float:
    """Return the relative change of NSI ``[inputs, blocks]`` from block to block.

    This is the mean over inputs and stages of ``mean |NSI_{t+1} - NSI_t| / mean NSI``, without the first
    block of each stage. It is NaN if no stage has three blocks.
    """
    parts = []
    for number in stage.unique():
        stage_nsi = nsi[:, stage == number][:, 1:]
        if stage_nsi.shape[1] > 1:
            parts.append((stage_nsi.diff(dim=1).abs().mean(1) / stage_nsi.mean(1)).mean())
    return float(torch.stack(parts).mean()) if parts else math.nan


def peak(nsi: Tensor, stage: Tensor) -> float:
    """Return the relative excess of the stiffest block of the first stage over the stage's mean.

    NSI ``[inputs, blocks]`` is averaged over inputs before, and the first block is left out.
    """
    stage_nsi = nsi[:, stage == stage[0]][:, 1:].mean(0)
    return float(stage_nsi.max() / stage_nsi.mean() - 1)


def table(rows: list[str]) -> np.ndarray:
    """Return the array ``[13, 25]`` over (M1, M2) that `_table` wrote, in the same unit."""
    percentages = np.zeros((len(M1), len(M2)), dtype=int)
    for i, row in enumerate(rows):
        numbers = [int(x) for x in row.split()]
        percentages[i, : len(numbers)] = numbers
    return percentages


def _table(measure: Any, whole: int) -> list[str]:
    """Return the share of inputs or blocks beyond both thresholds, as one line of integers per m1.

    Trailing zeros are left out.

    Args:
        measure: Function of the thresholds (m1, m2) that returns the shares ``[13, 25]``.
        whole: The integer that represents a share of 1, such as 100 for percentages.
    """
    counts = (whole * measure(M1, M2)).round().to(torch.int64).tolist()
    return [" ".join(str(x) for x in row[: sum(y > 0 for y in row)]) for row in counts]


def _sets(config: dict[str, Any], context: Context) -> Sets:
    if "made" in config:
        with tempfile.TemporaryDirectory() as temporary:
            make_stl10(Path(temporary), config["made"])
            return images.load("stl10", "train", temporary), images.load("stl10", "test", temporary)
    folder = folder_of(context.folder)
    training, test = _load(config["data"], None if folder is None else str(folder))
    return training.subset(config["images"]) if "images" in config else training, test


@cache
def _load(name: str, folder: str | None) -> Sets:
    """Return training and test images, which each process reads once."""
    return images.load(name, "train", folder), images.load(name, "test", folder)


def _imagenet(config: dict[str, Any], context: Context, directory: Path) -> Path:
    if "made" in config:
        make_imagefolder(directory, config["made"])
        return directory
    folder = folder_of(context.folder)
    for place in () if folder is None else (folder / "imagenet", folder):
        if (place / "train").is_dir() and (place / "val").is_dir():
            return place
    raise FileNotFoundError(
        f"ImageNet is not in {folder or 'ATTRACTOR_DATA, which is not set'}; pass a folder with --data "
        "that has train/<class>/<image> and val/<class>/<image>, directly or in its folder imagenet"
    )


def make_imagefolder(folder: Path, count: int) -> None:
    """Write `count` small PNGs per split and class, dark or bright, in ImageNet's layout."""
    from PIL import Image

    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, low in (("n01440764", 0), ("n01443537", 128)):
            place = folder / split / name
            place.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(low, low + 128, (48, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{name}_{i}.png")


def make_stl10(folder: Path, count: int) -> None:
    """Write `count` random images per split in STL-10's binary format; classes differ in brightness."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        labels = np.arange(count) % 10
        pixels = random.integers(0, 120, (count, 3, 96, 96)) + 13 * labels[:, None, None, None]
        write_bytes(folder / f"{split}_X.bin", pixels.astype(np.uint8).tobytes())
        write_bytes(folder / f"{split}_y.bin", (labels + 1).astype(np.uint8).tobytes())


def hashes(config: dict[str, Any], sets: Sets) -> dict[str, str]:
    """Return a hash of the images and labels of each set."""
    return {
        f"{config['data']}, {split}": _hash(image_set)
        for split, image_set in zip(("train", "test"), sets)
    }


def _hash(data: images.ImageSet) -> str:
    sha256 = hashlib.sha256(data.images.numpy().tobytes())
    sha256.update(data.labels.numpy().tobytes())
    return sha256.hexdigest()


def round_outcome(outcome: Any) -> Any:
    """Round curves to four significant digits and metrics to six, which keeps files small."""
    return {
        **outcome,
        "metrics": {k: _short(v, 6) for k, v in outcome["metrics"].items()},
        "curves": {k: [_short(x, 4) for x in v] for k, v in outcome["curves"].items()},
    }


def _short(x: Any, digits: int) -> Any:
    return float(f"{x:.{digits}g}") if isinstance(x, float) and math.isfinite(x) else x


def _progress_callback(context: Context, recipe: Recipe) -> Any:
    interval = max(1, recipe.epochs // 5)

    def tell(progress: Any) -> None:
        if progress.row is not None and progress.epoch % interval == 0:
            context.tell(f"  {progress}")

    return tell
