"""The command line.

General: ``attractor demo`` and ``doctor``. Hybrid solvers: ``attractor fit``, ``solve`` and ``compare``.
One file a group; importing it adds its commands to the application.
"""

from attractor.cli import general, solvers
from attractor.cli.terminal import app

__all__ = ["app", "general", "main", "solvers"]


def main() -> None:
    """Entry point of the `attractor` command."""
    app()
