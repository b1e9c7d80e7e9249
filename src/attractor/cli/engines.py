"""Options of the commands that can use several processes or machines."""

from typing import Annotated

import typer

Engine = Annotated[
    str | None,
    typer.Option(
        help="Engine: here, processes or ray; default: processes if there are several workers."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Number of workers; default: 1, on Ray what the cluster allows."),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Address of a Ray cluster, such as 10.0.0.1:6379; default: the local one, or a new one."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads per worker; default: 1, or all if there is a single worker."),
]
Part = Annotated[
    str,
    typer.Option(metavar="I/N", help="Compute only a part, such as 3/16 in an array of 16 batch jobs."),
]
