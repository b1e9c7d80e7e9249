"""An experiment of one's own: is Heun's scheme more exact than Euler's by as much as textbooks say?

    attractor reproduce examples/own_experiment.py --scale cpu

A file declares an `EXPERIMENT` and the function that runs one arm with one seed.
"""

import sys

import torch

from attractor import evolve
from attractor.reproduce import Experiment, Scale, from_file, gains, run

T_END = 1.0


def solve(config, context):
    """Return the error of a scheme on harmonic oscillators from random initial states."""
    generator = torch.Generator().manual_seed(context.seed)
    u0 = torch.randn(config["states"], 2, generator=generator, dtype=torch.float64)
    t = torch.linspace(0, T_END, config["steps"] + 1, dtype=torch.float64)
    u = evolve(lambda t, u: torch.stack((u[:, 1], -u[:, 0]), 1), u0, t, config["scheme"]).final
    cosine, sine = torch.cos(t[-1]), torch.sin(t[-1])
    exact = torch.stack((u0[:, 0] * cosine + u0[:, 1] * sine, u0[:, 1] * cosine - u0[:, 0] * sine), 1)
    error = (u - exact).norm(dim=1) / u0.norm(dim=1)
    return {"metrics": {"error": error.mean().item()}}


EXPERIMENT = Experiment(
    name="textbook-heun",  # begins with the paper's short name
    paper="textbook",
    place="errors at t = 1 with steps of 0.1",
    claim="Heun's scheme is more exact than Euler's.",
    task="own_experiment:solve",  # module:function; the module is this file
    arms={"Euler": {"scheme": "euler"}, "Heun": {"scheme": "heun"}},
    base={"steps": 10},
    scales={
        "smoke": Scale({"states": 2}, judged=False),  # shows that everything runs
        "cpu": Scale({"states": 100}, seeds=(0, 1, 2), training="100 %"),
    },
    metric="error",
    better="lower",
    numbers={"Euler": 0.05, "Heun": 0.0017},  # dt / 2 and dt² / 6
    logarithmic=True,  # errors differ by factors
    judge=gains(["Heun"], over="Euler", better="lower"),
)

if __name__ == "__main__":
    experiment = from_file(sys.argv[0])  # under its own name, as `attractor reproduce` reads it
    print(experiment.verdict(run(experiment, "cpu")))
