"""The command line.

General: ``attractor demo``, ``report`` and ``doctor``. Hybrid solvers: ``attractor trajectories``,
``fit``, ``solve`` and ``compare``. Residual networks: ``attractor probe``. Speed: ``attractor bench``.
The papers: ``attractor reproduce``.
There is one file per group; importing it adds its commands to the application.
"""

from attractor.cli import general, networks, pages, papers, solvers, speed, start
from attractor.cli.terminal import app

__all__ = ["app", "general", "main", "networks", "pages", "papers", "solvers", "speed", "start"]


def main() -> None:
    """Entry point of the `attractor` command."""
    app(prog_name="attractor")
