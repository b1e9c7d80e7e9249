"""What one process saves, another loads as it was; classes that share a name with ours are not taken for them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import attractor as at
from attractor.attention import LanguageModel
from tests.trust import round_trip_worker

pytest.importorskip("accelerate")
pytest.importorskip("huggingface_hub")
ROOT = Path(__file__).parents[2]


def in_a_process(what, folder):
    command = [sys.executable, "-W", "ignore", "-m", "tests.trust.round_trip_worker", what, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_everything_that_is_saved_is_the_same_in_a_new_process(tmp_path):
    saved = in_a_process("save", tmp_path)
    loaded = in_a_process("load", tmp_path)
    assert loaded.keys() == saved.keys()
    for name in saved:
        assert loaded[name] == saved[name], name


@dataclass(frozen=True)
class Diffusion:
    """A user's own equation with the name and the field of ours, and other numbers."""

    alpha: float = 0.1
    linear, reach = True, 1

    def step(self, a, dt, line):
        return a

    def max_dt(self, axis="key"):
        return 1.0


def test_an_equation_with_a_name_of_ours_is_not_saved_as_ours():
    from attractor.integrations import hub

    options = dict(vocabulary=9, dim=8, heads=2, layers=1, hidden=8, steps=1)
    with pytest.raises(TypeError, match="pde is a Diffusion, which a configuration cannot hold"):
        hub.network("LanguageModel", pde=Diffusion(), **options)
    net = hub.network("LanguageModel", pde=at.pdes.Diffusion(), **options)
    assert isinstance(net.net, LanguageModel)


def test_a_network_with_a_name_of_ours_is_not_made_by_name():
    from attractor.integrations import hub

    class LanguageModel(nn.Linear):
        pass

    with pytest.raises((TypeError, ValueError)):
        hub.network(LanguageModel, in_features=1, out_features=1)
    with pytest.raises(TypeError, match="gate is a type, which a configuration cannot hold"):
        hub.network("resnet_cifar", depth=11, width=4, gate=round_trip_worker.SE)


def test_a_run_of_a_users_class_is_not_taken_for_one_of_ours(tmp_path):
    _, rows = round_trip_worker.trained(tmp_path)
    with pytest.raises(
        at.CheckpointError, match=r"another model \(its module 'gate' is SE\(\), not SE\("
    ):
        round_trip_worker.trained(tmp_path, round_trip_worker.ours)
    assert round_trip_worker.trained(tmp_path)[1] == rows
    state = round_trip_worker.ResNet(round_trip_worker.ours).state_dict()
    assert state.keys() == round_trip_worker.ResNet(round_trip_worker.SE).state_dict().keys()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
