"""Notebooks from the examples: `make notebooks`, or `python docs/notebooks.py FOLDER`.

Those written in cells (`# %%`) become notebooks; a script that reads arguments or runs under torchrun
stays one.
"""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def in_cells() -> list[Path]:
    """The examples that are written in cells."""
    return [path for path in sorted(EXAMPLES.glob("*.py")) if "\n# %%\n" in path.read_text()]


def convert(folder: Path) -> list[Path]:
    """Write a notebook for each; returns their paths."""
    import jupytext

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for path in in_cells():
        notebook = jupytext.read(path, fmt="py:percent")
        notebook.metadata["kernelspec"] = {
            "display_name": "Python 3", "language": "python", "name": "python3",
        }  # fmt: skip
        jupytext.write(notebook, folder / f"{path.stem}.ipynb")
        made.append(folder / f"{path.stem}.ipynb")
    return made


if __name__ == "__main__":
    for name in convert(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("out/notebooks")):
        print(name)
