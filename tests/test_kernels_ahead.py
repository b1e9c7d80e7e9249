"""All kernels compile for GPUs, and fit into their memory, on a machine that has none."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
LAUNCHED = re.compile(r"wrap_triton\((?:\w+\.)?(\w+)\)\[|^ +(_\w+)\[\(triton", re.MULTILINE)


def launched():
    """Names of the kernels that the library launches."""
    sources = [path.read_text() for path in (HERE.parent / "src").rglob("*.py")]
    return {a or b for source in sources for a, b in LAUNCHED.findall(source)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [(89, 99), (90, 227)],  # the least shared memory, and Hopper's instructions
    ids=["RTX 4090, L40", "H100, H200"],
)
def test_every_kernel_compiles_and_fits(capability, kilobytes):
    command = [sys.executable, HERE / "kernels_ahead.py", str(capability), "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"].rpartition(".")[2] for row in found} == launched()
    assert max(row["shared"] for row in found) <= kilobytes << 10
