"""What two processes fit: ``torchrun --nproc-per-node 2 fit_worker.py FOLDER``."""

import sys

import torch
import torch.distributed as dist

from attractor.ode import fit
from tests.distributed.launching import write_result

COMMON = {"dt": 0.1, "horizon": 1.0, "fine_dt": 0.025, "trajectories": 20, "width": 8}


def sample(n, generator):
    return torch.rand(n, 1, generator=generator, dtype=torch.float64)


def decay(speed):
    return lambda t, u: -speed * u.sin()


def step(solver):
    return solver.step(torch.full((1, 1), 0.5, dtype=torch.float64)).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = fit(decay(1.0 + rank), sample=sample, **COMMON)  # another equation in each process
    alone = step(fit(decay(3.0), sample=sample, **COMMON)) if rank == 0 else None  # nobody else calls it
    shared = fit(decay(1.0), sample=sample, process_group="world", **COMMON)
    grouped = fit(decay(1.0), sample=sample, process_group=dist.group.WORLD, **COMMON)
    try:
        fit(decay(1.0 + rank), sample=sample, process_group="world", **COMMON)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    result = {"own": step(own), "alone": alone, "shared": step(shared), "grouped": step(grouped),
              "refusal": refusal}  # fmt: skip
    write_result(sys.argv[1], rank, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
