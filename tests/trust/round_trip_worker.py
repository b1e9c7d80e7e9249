"""Saves one of everything that the library can save, or loads it; in a process each.

``python -m tests.trust.round_trip_worker save|load FOLDER`` prints fingerprints by name, as JSON.
"""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import attractor as at
from attractor.integrations import hub
from attractor.ode.compare import Comparison
from attractor.ode.fine_data import FineData
from attractor.reproduce import Experiment, Scale, best, load, run
from attractor.residual import StiffnessProfile, gates, resnet_cifar
from attractor.storage.fingerprint import fingerprint
from attractor.train import CheckpointError, Recipe, train

RECIPE = Recipe(epochs=2, batch=4, learning_rate=0.05, warmup=0, precision="fp32", crop=0)
NETWORKS = {
    **{f"resnet_cifar {gate}": ("resnet_cifar", {"depth": 20, "width": 4, "gate": gate}) for gate in
       ("none", "se", "cbam", "eca", "sem", "srm", "fca", "iebn", "sge", "dia", "stepnet")},
    "vit": ("vit", {"image_size": 8, "patch": 4, "dim": 16, "depth": 2, "heads": 2}),
    "Classifier": ("Classifier", {"vocabulary": 9, "classes": 2, "dim": 8, "heads": 2, "layers": 1, "hidden": 8,
                                  "pde": at.pdes.Wave(c=0.2), "steps": 2}),
    "LanguageModel": ("LanguageModel", {"vocabulary": 9, "dim": 8, "heads": 2, "layers": 2, "hidden": 8, "steps": 3,
                                        "pde": at.pdes.AdvectionDiffusion(alpha=0.2, beta=0.1)}),
}  # fmt: skip
EXPERIMENT = Experiment(
    name="attns-example", paper="attns", place="Table 0", claim="b is more than a.",
    task="attractor.reproduce.tasks:echo", arms={"a": {"value": 1.0}, "b": {"value": 2.0}},
    scales={"smoke": Scale(seeds=(0, 1))}, metric="value", better="higher", numbers={}, judge=best("b"),
)  # fmt: skip


class SE(nn.Module):
    """A user's own gate with the name and the state of ours, and another forward."""

    def __init__(self, channels):
        super().__init__()
        inner = gates.SE(channels, reduction=2)
        for name, part in inner._modules.items():
            self.add_module(name, part)
        self.register_buffer("doubled", inner.doubled)

    def forward(self, x):
        return x


class ResNet(nn.Module):
    """A user's own network with a name of ours."""

    def __init__(self, gate):
        super().__init__()
        self.stem, self.gate, self.head = nn.Conv2d(1, 4, 3, padding=1), gate(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.gate(self.stem(x)).mean((-2, -1)))


def ours(channels):
    return gates.SE(channels, reduction=2)


def batches():
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 1, 6, 6, generator=generator), torch.arange(4) % 2) for _ in range(3)]


def weights(module):
    return fingerprint(dict(module.state_dict()))


def answer(module, name):
    """What a network gives of fixed inputs."""
    generator = torch.Generator().manual_seed(0)
    if name in ("Classifier", "LanguageModel"):
        inputs = torch.randint(1, 9, (2, 7), generator=generator)
    else:
        inputs = torch.randn(2, 3, 8, 8, generator=generator)
    with torch.no_grad():
        return fingerprint(module.eval()(inputs))


def trained(folder, gate=SE):
    torch.manual_seed(1)
    model = ResNet(gate)
    history = train(model, batches(), batches(), RECIPE, device="cpu", out=folder)
    return model, [
        {k: v for k, v in row.items() if not k.endswith("second") and k != "seconds"} for row in history
    ]


def save(folder):
    found = {}
    for name, (network, options) in NETWORKS.items():
        torch.manual_seed(0)
        made = hub.network(network, **options)
        made.save_pretrained(folder / name)
        found[name] = [weights(made.net), answer(made, name)]
    torch.manual_seed(0)
    net = resnet_cifar(20, width=4, gate="se")
    x = torch.randn(5, 3, 8, 8)
    profile = at.probe(net, [x]).beside(at.probe(resnet_cifar(20, width=4, gate="se"), [x]))
    for name, own in {
        "profile": profile,
        "profile, gate": profile.with_step("gate").beside(None),
    }.items():
        own.save(folder / name)
        found[name] = describe(own)
    model, rows = trained(folder / "training")
    found["training"] = [weights(model), rows]
    results = run(EXPERIMENT, "smoke", folder=folder / "results")
    found["results"] = json.loads(json.dumps(results.runs))
    solver = at.fit(at.systems.Logistic(growth=2.0), dt=0.5, horizon=2.0, width=8, trajectories=20)
    compared = at.compare(solver, horizon=1.0, batch=5, schemes=("rk4",), compile=False, peers=False)
    worst = replace(
        compared, points=(replace(compared.points[0], error=float("inf")),), m=float("inf"), rival=None
    )
    for name, own in {"comparison": compared, "comparison, infinite": worst}.items():
        own.save(folder / name)
        found[name] = repr(own) + repr(own.to_json())
    data = at.make_trajectories(
        at.systems.Logistic(), folder / "data", trajectories=6, dt=0.5, horizon=1.0, shard_size=3
    )
    found["data"] = [data.hash, fingerprint([run.u for run in data.runs()])]
    return found


def load_all(folder):
    found = {}
    for name in NETWORKS:
        made = hub.load(folder / name)
        found[name] = [weights(made.net), answer(made, name)]
    for name in ("profile", "profile, gate"):
        found[name] = describe(StiffnessProfile.load(folder / name))
    model, rows = trained(folder / "training")
    fresh = ResNet(SE)
    fresh.load_state_dict(load_file(folder / "training" / "model.safetensors"))
    assert weights(fresh) == weights(model)
    found["training"] = [weights(model), rows]
    with pytest.raises(CheckpointError, match="another model"):
        trained(folder / "training", ours)
    found["results"] = json.loads(json.dumps(load(EXPERIMENT, "smoke", folder / "results").runs))
    for name in ("comparison", "comparison, infinite"):
        own = Comparison.from_json(json.loads((folder / name / "compare.json").read_text()))
        found[name] = repr(own) + repr(own.to_json())
    data = FineData.open(folder / "data")
    found["data"] = [data.hash, fingerprint([run.u for run in data.runs()])]
    return found


def describe(profile):
    parts = ("one", "gate", "gates", "stage", "names", "model", "granularity", "step", "mean")
    own = [fingerprint(getattr(profile, name)) for name in parts]
    return own + ([describe(profile.initial)] if profile.initial is not None else [])


def main():
    folder = Path(sys.argv[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps({"save": save, "load": load_all}[sys.argv[1]](folder)))


if __name__ == "__main__":
    main()
