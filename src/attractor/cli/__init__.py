"""The command line.

General: ``attractor demo`` and ``doctor``. Hybrid solvers: ``attractor trajectories``, ``fit``,
``solve`` and ``compare``.
Residual networks: ``attractor probe``. Speed: ``attractor bench``. The papers: ``attractor reproduce``.
One file a group; importing it adds its commands to the application.
"""

from attractor.cli import general, networks, papers, solvers, speed
from attractor.cli.terminal import app

__all__ = ["app", "general", "main", "networks", "papers", "solvers", "speed"]


def main() -> None:
    """Entry point of the `attractor` command."""
    app()
