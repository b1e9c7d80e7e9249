"""Commands of residual networks: probe."""

import time
import traceback
from collections.abc import Iterator
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
    console,
    example,
    make_table,
    need,
    origin,
    print_json,
    progress_bar,
    report_usage_errors,
    say,
)

if TYPE_CHECKING:
    import torch

    from attractor.cli import network_names as networks
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
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="Option of the network: -o depth=29."),
    ] = None,
    pretrained: Annotated[
        bool | None,
        typer.Option(
            "--pretrained/--random",
            help="Use pretrained or random weights; default: pretrained if the hub has them.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Trained weights: a .safetensors file, or a finished training's folder."),
    ] = None,
    initial: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Function that makes the network before training, for a network of your own.",
        ),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="A folder with image files.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Test images of cifar10, cifar100, stl10, digits.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the data set; default: ATTRACTOR_DATA.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="A file with one text per line.")] = None,
    noise: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of random inputs to use; default without another source: --inputs."
        ),
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Height and width of images.")] = None,
    inputs: Annotated[int, typer.Option(min=1, help="Largest number of inputs.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Number of inputs per batch.")] = 32,
    granularity: Annotated[str, typer.Option(help="Unit to probe: block, or addition.")] = "block",
    step: Annotated[
        str, typer.Option(help="Step size of a block: one, or gate for the values of its gate.")
    ] = "one",
    within: Annotated[
        str, typer.Option(help="Probe only additions in this module, such as encoder.")
    ] = "",
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for profile and pictures.")] = Path("out/probe"),
    as_json: AsJson = False,
) -> None:
    """Measure how stiff a residual network is, block by block.

    A network with trained weights is shown beside its random initialisation,
    because NSI depends on it. Without a source of inputs, a network of your
    own is probed on the inputs in its file, which are a batch or a function
    inputs(n, generator); other networks are probed on noise.
    """
    check_device(device)
    need("matplotlib", "report")
    import torch

    from attractor.cli import network_inputs as inputs_of
    from attractor.cli import network_names as networks
    from attractor.report import stiffness as pictures
    from attractor.residual.probing import probe as probe_network
    from attractor.storage.files import lock_folder, write_json

    start = time.perf_counter()
    with report_usage_errors():
        check_out(out)
        torch.manual_seed(seed)
        with console.status(f"making {name}"):
            network = networks.find(name, networks.parse_options(option), pretrained, weights)
            before = _before(network, initial, option, seed)
        count = noise or inputs
        side = size or network.size
        sources = {"--images": images, "--data": data, "--texts": texts, "--noise": noise}
        sources_passed = [k for k, v in sources.items() if v is not None]
        if len(sources_passed) > 1:
            raise ValueError(f"{' and '.join(sources_passed)} exclude each other; give one")
        batches: Iterator[Any]
        if images is not None:
            batches = inputs_of.folder_of_images(network, images, count, batch, side)
        elif data is not None:
            batches = inputs_of.data_set(network, data, folder, count, batch, seed, size)
        elif texts is not None:
            batches = inputs_of.texts(network, texts, count, batch)
        elif noise is None and network.inputs is not None:
            batches = inputs_of.own_inputs(network, count, batch, seed)
        else:
            batches = inputs_of.noise(network, count, batch, seed, side)
        with progress_bar() as progress:
            task = progress.add_task(f"probing {name}", total=count)
            try:
                profile = probe_network(
                    network.model, batches, step, granularity=granularity, device=device, initial=before,  # type: ignore[arg-type]
                    limit=count, within=within, settle=not network.trained,
                    progress=lambda n: progress.update(task, completed=n),
                )  # fmt: skip
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not isinstance(error, RuntimeError) and not _in_a_module(error):
                    raise
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise ValueError(
                    f"{name} rejected its inputs ({reason}); "
                    f"{inputs_of.advice(network, ''.join(sources_passed))}"
                ) from error
    _show(profile, name)
    if network.trained and before is None:
        say("initial: not known; give --initial NAME, a function that makes it", style="yellow")
    if not network.trained:
        say("The weights are random: these are the values at initialisation.")
    default_source = f"--noise {count}" if network.inputs is None else f"inputs of {network.place}"
    source = next((f"{k} {sources[k]}" for k in sources_passed), default_source)
    numbers = {**origin(), "network": name, "source": source, "trained": network.trained}
    with lock_folder(out):  # all files are of one command
        write_json(out / "probe.json", {**numbers, **profile.numbers()})
        profile.save(out / "profile")
        for kind in pictures.KINDS:
            (out / f"{kind}.png").unlink(missing_ok=True)  # a picture may be left from another network
            if kind != "gates" or profile.gated:
                _draw(profile, kind, out)
    seconds = time.perf_counter() - start
    files = {"profile": out / "profile", "numbers": out / "probe.json", "picture": out / "all.png"}
    if as_json:
        places = {key: str(path) for key, path in files.items()}
        print_json({**numbers, **profile.numbers(), "files": places, "seconds": seconds})
    say(f"{seconds:.0f} s. " + ", ".join(f"{key}: {path}" for key, path in files.items()))


def _before(
    network: "networks.Network", initial: str | None, option: list[str] | None, seed: int
) -> "torch.nn.Module | None":
    """Return the network with random weights if the network to probe is trained, else None."""
    import torch

    from attractor.cli import network_names as networks

    torch.manual_seed(seed)
    if initial is not None:
        return networks.find(initial, networks.parse_options(option), pretrained=False).model
    return network.fresh() if network.trained and network.fresh is not None else None


def _in_a_module(error: BaseException) -> bool:
    """Return whether an error was raised in the call of a module."""
    from torch import nn

    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == nn.Module.__module__ for frame, _ in frames)


def _show(profile: "StiffnessProfile", name: str) -> None:
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
            totals = f"{_cell(pair['trained'])}, initial {_cell(pair['initial'])}"
            say(f"TNS with first blocks, step {step}: {totals}")


def _draw(profile: "StiffnessProfile", kind: str, out: Path) -> None:
    try:
        profile.plot(kind, out / f"{kind}.png")
    except ValueError as error:  # one block per stage, or gates that do not vary
        say(f"no picture of {kind}: {error}", style="yellow")


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
