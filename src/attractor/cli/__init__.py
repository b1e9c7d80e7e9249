"""The command line.

General: ``attractor demo``, ``report`` and ``doctor``. Solvers: ``attractor trajectories``, ``fit`` and
``tune`` (`fitting`), ``solve`` and ``compare`` (`solvers`). Networks: ``attractor train`` (`training`)
and ``probe`` (`networks`). Speed: ``attractor bench``. The papers: ``attractor reproduce``. There is one
file per group; importing it adds its commands to the application.
"""

from attractor.cli import fitting, general, networks, pages, papers, solvers, speed, start, training
from attractor.cli.terminal import app

__all__ = [
    "app", "fitting", "general", "main", "networks", "pages", "papers", "solvers", "speed", "start",
    "training",
]  # fmt: skip


def main() -> None:
    """Entry point of the `attractor` command."""
    app(prog_name="attractor")
