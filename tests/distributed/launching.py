"""Real launchers, as a user would call them; what processes write comes back as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node"],
    "accelerate": ["accelerate.commands.launch", "--cpu", "--mixed_precision=no", "--dynamo_backend=no",
                   "--num_machines=1", "--main_process_port=0", "--num_processes"],
}  # fmt: skip


def launch(launcher, processes, worker, folder, *arguments, options=()):
    """Run a worker file in several processes on the CPU, and return the result of each process.

    Args:
        launcher: the name of a launcher.
        processes: the number of processes.
        worker: the worker file.
        folder: the folder of the results, the first argument of the worker.
        arguments: further arguments of the worker.
        options: further options of the launcher.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    module, *usual = LAUNCHERS[launcher]
    command = [sys.executable, "-m", module, *usual, str(processes), *options]
    command += [str(Path(__file__).parent / worker), str(folder), *map(str, arguments)]
    surroundings = {
        k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER_"))
    }
    surroundings["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    surroundings |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]


def write_result(folder, rank, result):
    """What `launch` reads."""
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
