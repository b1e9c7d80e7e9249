"""Commands that train networks: train."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attractor.cli.terminal import (
    AsJson,
    Device,
    Seed,
    app,
    check_device,
    check_out,
    example,
    origin,
    print_json,
    progress_bar,
    report_usage_errors,
    say,
)

if TYPE_CHECKING:
    from torch import nn

    from attractor.train import Recipe


@app.command(
    epilog=example(
        "attractor train attractor:resnet_cifar -o depth=29 -r epochs=5",
        "attractor train timm:resnet18 --data imagefolder --folder photos",
    )
)
def train(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="timm:NAME, torchvision:NAME, attractor:NAME, FILE.py:FUNCTION, MODULE:FUNCTION.",
        ),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="Option of the network: -o depth=29."),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", "-r", metavar="KEY=VALUE", help="Field of the recipe: -r epochs=10."),
    ] = None,
    data: Annotated[
        str, typer.Option(help="Data set: digits, cifar10, cifar100, stl10 or imagefolder.")
    ] = "digits",
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the data set; default: ATTRACTOR_DATA.")
    ] = None,
    pretrained: Annotated[bool, typer.Option(help="Start from the weights of the hub.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Remove the run in --out, and start anew.")
    ] = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="Continue a finished run for more epochs.")
    ] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[
        str, typer.Option(help="Folder of the run, or its URL, such as s3://bucket/run.")
    ] = "out/train",
    as_json: AsJson = False,
) -> None:
    """Train a network on images; save checkpoints, logs and weights.

    An interrupted run in the folder continues. The number of classes and of
    channels are those of the data unless they are passed as options.
    """
    with report_usage_errors():
        check_out(out)
        check_device(device)
        from attractor import train as training

        fields = _recipe(recipe, seed)
        train_set, valid_set, classes, channels = _data(data, folder, fields)
        model = _network(name, option, pretrained, classes, channels, seed)
        with progress_bar() as bar:
            task = bar.add_task("starting", total=fields.epochs)

            def show(progress: Any) -> None:
                bar.update(task, completed=progress.epoch - 1 + progress.step / progress.steps,
                           description=f"loss {progress.loss:.4f}")  # fmt: skip
                if progress.row is not None:
                    say(str(progress))

            history = training.train(
                model, train_set, valid_set, fields, device=device, out=out, resume=not restart,
                extend=extend, tell=show,
            )  # fmt: skip
    if as_json:
        rows, settings = list(history), fields.settings()
        print_json({**origin(), "network": name, "data": data, "recipe": settings, "rows": rows,
                    "out": out})  # fmt: skip
    say(repr(history))
    say(f"Run: {out}, weights: {out}/model.safetensors")


def _recipe(texts: list[str] | None, seed: int) -> "Recipe":
    """Return the recipe with the fields that were passed, as KEY=VALUE."""
    from attractor.cli.network_names import parse_options
    from attractor.common.checks import nearest
    from attractor.train import SHORT, Recipe

    options = {"seed": seed, **parse_options(texts, "--recipe")}
    names = SHORT.settings()
    for name, value in options.items():
        if name not in names:
            raise ValueError(
                f"--recipe has no field {name!r}; it has {', '.join(names)}{nearest(name, list(names))}"
            )
        options[name] = tuple(value) if isinstance(value, list) else value
    return Recipe(**options)


def _data(name: str, folder: Path | None, recipe: "Recipe") -> tuple[Any, Any, int, int]:
    """Return training and validation data, and their numbers of classes and channels."""
    from attractor.data import images
    from attractor.data.imagefolder import ImageFolder

    if name == "imagefolder":
        splits = [images.load("imagefolder", split, folder) for split in ("train", "val")]
        loaders = [split.loader(recipe.batch) for split in splits]
        return loaders[0], loaders[1], len(splits[0].classes), 3
    sets = [images.load(name, split, folder) for split in ("train", "test")]
    assert not any(isinstance(one, ImageFolder) for one in sets)
    return sets[0], sets[1], len(sets[0].classes), sets[0].images.shape[1]


def _network(
    name: str, option: list[str] | None, pretrained: bool, classes: int, channels: int, seed: int
) -> "nn.Module":
    """Return the network, with the classes and channels of the data where its hub has such options."""
    import torch

    from attractor.cli import network_names as networks

    hub = name.partition(":")[0]
    defaults: dict[str, Any] = {}
    if hub in ("attractor", "timm", "torchvision"):
        defaults["num_classes"] = classes
    if hub in ("attractor", "timm"):
        defaults[{"attractor": "in_channels", "timm": "in_chans"}[hub]] = channels
    torch.manual_seed(seed)
    return networks.find(name, defaults | networks.parse_options(option), pretrained).model
