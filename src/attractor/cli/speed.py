"""Commands about speed: bench."""

from pathlib import Path
from typing import Annotated, Any

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
    origin,
    print_json,
    progress_bar,
    report_usage_errors,
    say,
)

TYPES = ("auto", "bfloat16", "float16", "float32", "float64")


@app.command(
    epilog=example(
        "attractor bench --what causal --tokens 1024",
        "attractor bench --device cuda --what causal --what reaction",
        "attractor bench --device cuda --what model",
    )
)
def bench(
    what: Annotated[
        list[str],
        typer.Option(
            help="Case: stepped, causal, reaction, split, window, documents or hybrid; default: all. "
            "model: training and generation of a whole transformers model."
        ),
    ] = [],  # noqa: B006
    model: Annotated[
        str,
        typer.Option(
            help="For --what model: llama (1B parameters), small, or a config.json of transformers, or "
            "its folder; default: llama on a GPU, else small."
        ),
    ] = "",
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="Dtype; auto: bfloat16 on a GPU, else float32.")] = "auto",
    tokens: Annotated[
        list[int],
        typer.Option(min=1, help="Length of the sequences; default: several that suit the device."),
    ] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Steps of the PDE.")] = 4,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of PDE attention and hybrid steps.

    SDPA and plain steps are timed in the same run, and results are compared
    with float64 first. Shares are relative to the copy bandwidth and the
    matrix rate of this run, and count the bytes and operations of attention
    without a PDE.
    """
    import torch

    from attractor.bench import run
    from attractor.common.checks import nearest
    from attractor.storage.files import check_target, write_json

    check_device(device)
    if dtype not in TYPES:
        choices = f"{', '.join(TYPES)}{nearest(dtype, TYPES)}"
        raise typer.BadParameter(f"{dtype!r} is not one of {choices}", param_hint="--dtype")
    if dtype == "auto":
        dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    torch.manual_seed(seed)
    with report_usage_errors():
        if out is not None:
            check_out(out.parent)
            check_target(out)
        cases = run.cases(what or run.KINDS, device, tokens)
        config = _config(model, device) if run.WHOLE_MODEL in what else None
    torch_dtype = getattr(torch, dtype)
    results: dict[str, Any] = {**origin(), **run.header(device, torch_dtype), "rows": []}
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task("measuring", total=len(cases))
        for row in run.rows(cases, device, torch_dtype, results, config, steps=steps):
            results["rows"].append(row)
            progress.update(task, advance=1, description=f"{row['kind']}, {len(results['rows'])} done")
            if out is not None:
                write_json(out, results)
    if as_json:
        print_json(results)
    else:
        _show(results)
        if out is not None:
            say(f"Results: {out}")
    if any("failed" in row for row in results["rows"]):
        raise typer.Exit(1)


def _config(name: str, device: str) -> Any:
    """Return the configuration of the model to measure."""
    from importlib.util import find_spec

    import torch

    from attractor.bench import model

    if find_spec("transformers") is None:
        raise ValueError("--what model needs transformers: pip install 'attractor[text]'")
    return model.config_of(name or ("llama" if torch.device(device).type == "cuda" else "small"))


def _show(results: dict[str, Any]) -> None:
    top = results["ceilings"]
    console.print(
        f"{results['device']}, torch {results['torch']}, {results['dtype']}: copies reach "
        f"{top['copy_gb_s']:,.0f} GB/s, matrix products {top['matrix_tflop_s']:,.3g} TFLOP/s"
    )
    attention = [row for row in results["rows"] if "forward" in row]
    if attention:
        table = make_table(
            "attention", "tokens", "ms", "ratio", "ms", "ratio", "of rate", "of copy", "dense",
            caption="milliseconds and the ratio to SDPA (window, documents: to the same without a PDE), "
            "forward, then forward and backward; shares of the ceilings, forward; how many times "
            "slower the dense map is",
        )  # fmt: skip
        for row in attention:
            forward, both = row["forward"], row["both"]
            speedup = f"{row['speedup_over_dense']:.0f}x" if "speedup_over_dense" in row else ""
            table.add_row(
                row["kind"], f"{row['tokens']:,}", f"{forward['ms']:.3g}", f"{forward['ratio']:.2f}",
                f"{both['ms']:.3g}", f"{both['ratio']:.2f}", f"{100 * forward['of_matrix_rate']:.0f} %",
                f"{100 * forward['of_bandwidth']:.0f} %", speedup,
            )  # fmt: skip
        console.print(table)
    models = [row for row in results["rows"] if "peer_seconds" in row]
    if models:
        table = make_table(
            "model", "tokens", "batch", "sdpa, ms", "PDE, ms", "ratio", "memory",
            caption="milliseconds of a training step or of a generated token; memory relative to sdpa",
        )  # fmt: skip
        for row in models:
            memory = f"{row['memory']:.2f}" if "memory" in row else ""
            table.add_row(
                row["case"], f"{row['tokens']:,}", str(row["batch"]), f"{1e3 * row['peer_seconds']:.4g}",
                f"{1e3 * row['seconds']:.4g}", f"{row['ratio']:.2f}", memory,
            )  # fmt: skip
        console.print(table)
    steps = [row for row in results["rows"] if "hybrid_us" in row]
    if steps:
        table = make_table("hybrid step", "states", "plain, µs", "hybrid, µs", "m*")
        for row in steps:
            table.add_row(
                f"width {row['width']:,}", f"{row['batch']:,}", f"{row['plain_us']:.1f}",
                f"{row['hybrid_us']:.1f}", f"{row['ratio']:.2f}",
            )  # fmt: skip
        console.print(table)
    for row in results["rows"]:
        if "failed" in row:
            size = row.get("tokens", row.get("width"))
            say(f"{row['kind']}, {size:,}: {row['failed']}", style="red")
