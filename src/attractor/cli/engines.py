"""Options of the commands whose work can be done by several processes or machines."""

from typing import Annotated

import typer

Engine = Annotated[
    str | None,
    typer.Option(help="here, processes or ray; default: processes if there are several workers."),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="At a time; default 1, on Ray what the cluster has room for.")
]
Address = Annotated[
    str | None,
    typer.Option(help="Of a Ray cluster, as 10.0.0.1:6379; default: the one here, or a new one."),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Of the CPU for each; default 1, all where one runs alone.")
]
Part = Annotated[
    str, typer.Option(metavar="I/N", help="Only a part, as 3/16, for an array of 16 batch jobs.")
]
