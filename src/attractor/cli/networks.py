"""Commands of residual networks: probe."""

import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from attractor import networks
from attractor.cli.terminal import (
    AsJson,
    Device,
    Seed,
    app,
    check_device,
    check_out,
    console,
    example,
    make_table,
    need,
    origin,
    print_json,
    progress_bar,
    say,
    told_as_usage,
)
from attractor.core.files import write_json
from attractor.residual.probing import probe as probe_network
from attractor.residual.profile import StiffnessProfile

WHAT = (
    "timm:NAME, torchvision:NAME, transformers:NAME, attractor:NAME, FILE.py:FUNCTION, MODULE:FUNCTION."
)
Name = Annotated[str, typer.Argument(metavar="NAME", help=WHAT)]


@app.command(
    epilog=example(
        "attractor probe attractor:resnet_cifar -o depth=29 --data digits",
        "attractor probe timm:resnet50 --images photos --out out/resnet50",
    )
)
def probe(
    name: Name,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="Of the network: -o depth=29."),
    ] = None,
    pretrained: Annotated[
        bool | None,
        typer.Option("--pretrained/--random", help="Weights of its hub; by default if it has some."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Trained weights: a .safetensors file, or a finished training's folder."),
    ] = None,
    initial: Annotated[
        str | None, typer.Option(metavar="NAME", help="The network before training, if it is your own.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="A folder with image files.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Test images of cifar10, cifar100, stl10, digits.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the data set is; else ATTRACTOR_DATA.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="A file with a text a line.")] = None,
    noise: Annotated[
        int | None, typer.Option(min=1, help="So many random inputs; without a source, --inputs.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Height and width of images.")] = None,
    inputs: Annotated[int, typer.Option(min=1, help="Inputs at most.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Inputs at once.")] = 32,
    granularity: Annotated[str, typer.Option(help="block, or addition.")] = "block",
    step: Annotated[str, typer.Option(help="one, or gate: gates as step sizes.")] = "one",
    within: Annotated[str, typer.Option(help="Only additions in that module, as encoder.")] = "",
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for profile and pictures.")] = Path("out/probe"),
    as_json: AsJson = False,
) -> None:
    """How stiff a residual network is, block by block.

    A network with trained weights is shown beside its random initialisation,
    on which NSI depends. Without a source of inputs a network of your own is
    probed on what its file holds as inputs, a batch or a function
    inputs(n, generator); else on noise.
    """
    check_device(device)
    need("matplotlib", "report")
    from attractor.report import stiffness as pictures

    started = time.perf_counter()
    with told_as_usage():
        check_out(out)
        torch.manual_seed(seed)
        with console.status(f"making {name}"):
            found = networks.find(name, _options(option), pretrained, weights)
            before = _before(found, initial, option, seed)
        count = noise or inputs
        side = size or found.size
        sources = {"--images": images, "--data": data, "--texts": texts, "--noise": noise}
        given = [k for k, v in sources.items() if v is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give one")
        batches: Iterator[Any]
        if images is not None:
            batches = networks.folder_of_images(found, images, count, batch, side)
        elif data is not None:
            batches = networks.data_set(found, data, folder, count, batch, seed, size)
        elif texts is not None:
            batches = networks.texts(found, texts, count, batch)
        elif noise is None and found.inputs is not None:
            batches = networks.own_inputs(found, count, batch, seed)
        else:
            batches = networks.noise(found, count, batch, seed, side)
        with progress_bar() as progress:
            task = progress.add_task(f"probing {name}", total=count)
            try:
                profile = probe_network(
                    found.model, batches, step, granularity=granularity, device=device, initial=before,  # type: ignore[arg-type]
                    limit=count, within=within, settle=not found.trained,
                    progress=lambda n: progress.update(task, completed=n),
                )  # fmt: skip
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not isinstance(error, RuntimeError) and not _in_a_module(error):
                    raise
                told = (str(error).splitlines() or [type(error).__name__])[0]
                raise ValueError(
                    f"{name} cannot take what it was given ({told}); "
                    f"{networks.advice(found, ''.join(given))}"
                ) from error
    _show(profile, name)
    if found.trained and before is None:
        say("initial: not known; give --initial NAME, a function that makes it", style="yellow")
    if not found.trained:
        say("The weights are random: these are the values at initialisation.")
    unasked = f"--noise {count}" if found.inputs is None else f"inputs of {found.place}"
    source = next((f"{k} {sources[k]}" for k in given), unasked)
    numbers = {**origin(), "network": name, "source": source, "trained": found.trained}
    write_json(out / "probe.json", {**numbers, **profile.numbers()})
    profile.save(out / "profile")
    for kind in pictures.KINDS:
        (out / f"{kind}.png").unlink(missing_ok=True)  # which may be of another network
        if kind != "gates" or profile.gated:
            _draw(profile, kind, out)
    seconds = time.perf_counter() - started
    files = {"profile": out / "profile", "numbers": out / "probe.json", "picture": out / "all.png"}
    if as_json:
        places = {key: str(path) for key, path in files.items()}
        print_json({**numbers, **profile.numbers(), "files": places, "seconds": seconds})
    say(f"{seconds:.0f} s. " + ", ".join(f"{key}: {path}" for key, path in files.items()))


def _before(
    found: networks.Network, initial: str | None, option: list[str] | None, seed: int
) -> torch.nn.Module | None:
    """The network with random weights, if the one to be probed is trained."""
    torch.manual_seed(seed)
    if initial is not None:
        return networks.find(initial, _options(option), pretrained=False).model
    return found.fresh() if found.trained and found.fresh is not None else None


def _in_a_module(error: BaseException) -> bool:
    """Whether an error was raised while a module was called."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == nn.Module.__module__ for frame, _ in frames)


def _show(profile: StiffnessProfile, name: str) -> None:
    columns = ("first", "stage", "blocks", "mean", "largest", "initial", "gate")
    title = f"{name}: NSI of {profile.nsi.shape[0]} inputs, step {profile.step}"
    table = make_table(*columns, title=title)
    for row in profile.stages():
        row = {**row, "stage": row["stage"] + 1}
        table.add_row(*(_cell(row[c]) for c in columns))
    console.print(table)
    for step, pair in profile.totals().items():
        say(f"TNS, step {step}: {_cell(pair['trained'])}, initial {_cell(pair['initial'])}")
    if profile.note:
        say(profile.note, style="yellow")
    if profile.note and len(profile.names) > len(profile.stages()):
        for step, pair in profile.totals(drop_first=False).items():
            told = f"{_cell(pair['trained'])}, initial {_cell(pair['initial'])}"
            say(f"TNS with first blocks, step {step}: {told}")


def _draw(profile: StiffnessProfile, kind: str, out: Path) -> None:
    try:
        profile.plot(kind, out / f"{kind}.png")
    except ValueError as error:  # one block a stage, or gates that do not vary
        say(f"no picture of {kind}: {error}", style="yellow")


def _options(texts: list[str] | None) -> dict[str, Any]:
    found = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} must be KEY=VALUE, such as depth=29")
        found[key] = networks.parse(value)
    return found


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
