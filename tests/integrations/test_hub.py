"""The hub, without a network: folders here, and a hub that is a folder."""

import copy
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import attractor as at
from attractor.integrations import hub
from attractor.ode import pretrained
from attractor.train.tensors import write_tensors

library = pytest.importorskip("huggingface_hub")


class Repo(str):
    repo_id = property(lambda self: str(self).removeprefix("hub:"))


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Repositories are folders; what is fetched are links, as in the hub's cache."""
    home = tmp_path / "hub"

    def upload(repo_id, folder_path, **_):
        shutil.copytree(folder_path, home / repo_id, dirs_exist_ok=True)
        return f"hub:{repo_id}"

    def snapshot(repo_id, revision=None, **_):
        if not (home / repo_id).exists():
            raise OSError(f"404: no {repo_id}")
        cache = tmp_path / "cache" / repo_id
        for path in (home / repo_id).rglob("*"):
            if path.is_file():
                link = cache / path.relative_to(home / repo_id)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(path)
        return str(cache)

    def one(repo_id, filename, **_):
        path = Path(snapshot(repo_id)) / filename
        if not path.exists():
            raise library.errors.EntryNotFoundError(f"404: no {filename}")
        return str(path)

    monkeypatch.setattr(library, "upload_folder", upload)
    monkeypatch.setattr(library, "create_repo", lambda repo, **_: Repo(f"hub:{repo}"))
    monkeypatch.setattr(library, "snapshot_download", snapshot)
    monkeypatch.setattr(library.HfApi, "upload_folder", lambda self, **k: upload(**k))
    monkeypatch.setattr(library.HfApi, "create_repo", lambda self, repo_id, **_: Repo(f"hub:{repo_id}"))
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", one)
    monkeypatch.setattr(library, "hf_hub_download", one)
    return home


def same(a, b):
    u0 = a.rate.sample(3, torch.Generator().manual_seed(0), torch.float64)
    return torch.equal(a.solve(u0, 10 * a.dt).u, b.solve(u0, 10 * b.dt).u)


def test_a_solver_goes_to_the_hub_and_comes_back(fake):
    solver = at.HybridSolver.from_pretrained("henon-heiles")
    assert solver.push_to_hub("me/orbits") == "hub:me/orbits"
    assert {p.name for p in (fake / "me/orbits").iterdir()} == {"README.md", "solver"}
    card = (fake / "me/orbits/README.md").read_text()
    for part in ("HenonHeiles", "rk4", "0.25", 'from_pretrained("me/orbits")'):
        assert part in card
    back = at.HybridSolver.from_pretrained("me/orbits")
    assert same(solver, back)
    assert back.fit_error == solver.fit_error


def test_a_damaged_repository_is_found_out(fake):
    at.HybridSolver.from_pretrained("henon-heiles").push_to_hub("me/orbits")
    tensors = fake / "me/orbits/solver/tensors.safetensors"
    raw = bytearray(tensors.read_bytes())
    raw[-1] ^= 1
    tensors.write_bytes(raw)
    with pytest.raises(at.CheckpointError, match="does not match its hash"):
        at.HybridSolver.from_pretrained("me/orbits")


def test_a_solver_from_a_folder(tmp_path):
    solver = at.HybridSolver.from_pretrained("elastic-pendulum")
    solver.save(tmp_path / "repo/solver")
    assert same(solver, at.HybridSolver.from_pretrained(tmp_path / "repo/solver"))
    assert same(solver, at.HybridSolver.from_pretrained(tmp_path / "repo"))  # as one that was fetched


@pytest.mark.usefixtures("fake")
def test_names_that_nobody_knows():
    with pytest.raises(
        ValueError, match=r"there are elastic-pendulum, .*did you mean 'elastic-pendulum'"
    ):
        at.HybridSolver.from_pretrained("elastic-pendulm")
    with pytest.raises(
        ValueError, match=r"is no folder here, and could not be fetched from the hub .*404"
    ):
        at.HybridSolver.from_pretrained("nobody/nothing")


NETWORKS = [
    ("resnet_cifar", {"depth": 11, "gate": "se", "width": 4}, lambda: torch.randn(2, 3, 16, 16)),
    ("vit", {"image_size": 8, "patch": 4, "dim": 16, "depth": 2, "heads": 2}, lambda: torch.randn(2, 3, 8, 8)),
    (
        "LanguageModel",
        {"vocabulary": 20, "dim": 16, "heads": 2, "layers": 1, "hidden": 16, "pde": at.pdes.Wave(0.2), "learn": False},
        lambda: torch.randint(20, (2, 7)),
    ),
    (
        "Classifier",
        {"vocabulary": 20, "classes": 3, "dim": 16, "heads": 2, "layers": 1, "hidden": 16, "pde": "diffusion"},
        lambda: torch.randint(20, (2, 7)),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "make"), NETWORKS, ids=[n for n, _, _ in NETWORKS])
def test_networks_go_to_folders_and_to_the_hub_and_come_back(name, options, make, fake, tmp_path):
    torch.manual_seed(0)
    net = hub.network(name, **options).eval()
    net.save_pretrained(tmp_path / "net")
    files = {p.name for p in (tmp_path / "net").iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors"}
    net.push_to_hub("me/net")
    x = make()
    with torch.no_grad():
        wanted = net(x)
        for place in (tmp_path / "net", "me/net"):
            back = hub.load(place)
            assert not back.training
            assert type(back.net) is type(net.net)
            got = back(x)
            assert torch.equal(got, wanted)


@pytest.mark.slow
def test_a_gate_on_given_weights_starts_at_one_here_too(tmp_path):
    torch.manual_seed(0)
    plain, images = at.residual.resnet34(10).eval(), torch.randn(1, 3, 32, 32)
    write_tensors(tmp_path / "plain.safetensors", dict(plain.state_dict()))
    options = {"num_classes": 10, "gate": "se", "gate_options": {"reduction": 8}}
    net = hub.network("resnet34", weights=tmp_path / "plain.safetensors", **options).eval()
    assert options["gate_options"] == {"reduction": 8}
    with torch.no_grad():
        torch.testing.assert_close(net(images), plain(images), rtol=0, atol=1e-6)
        net.save_pretrained(tmp_path / "net")
        assert torch.equal(hub.load(tmp_path / "net")(images), net(images))
    kept = json.loads((tmp_path / "net/config.json").read_text())["options"]["gate_options"]
    assert kept == {"identity": True, "reduction": 8}


def test_older_folders_do_not_tell_how_their_gates_began(tmp_path):
    net, images = hub.network("resnet_cifar", depth=11, width=4, gate="se"), torch.randn(2, 3, 8, 8)
    net.eval().save_pretrained(tmp_path)
    tensors = {k: v for k, v in net.net.state_dict().items() if not k.endswith("doubled")}
    write_tensors(tmp_path / "model.safetensors", tensors)
    assert torch.equal(hub.load(tmp_path)(images), net(images))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_networks_come_back_in_the_precision_they_were_saved_in(tmp_path, dtype):
    torch.manual_seed(0)
    net = hub.network("resnet_cifar", depth=11, width=4, gate="se").to(dtype).eval()
    net.net.fc.float()  # a part may have another
    net.save_pretrained(tmp_path)
    back = hub.load(tmp_path)
    for name, value in net.state_dict().items():
        assert back.state_dict()[name].dtype == value.dtype
        assert torch.equal(back.state_dict()[name], value)
    images = torch.randn(2, 3, 8, 8, dtype=dtype)
    assert torch.equal(back.net.features(images)[-1], net.net.features(images)[-1])


def test_networks_can_be_pickled_and_copied(tmp_path):
    net, images = hub.network("resnet_cifar", depth=11, width=4, gate="dia"), torch.randn(2, 3, 8, 8)
    net.eval()
    for again in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert type(again) is type(net)
        assert torch.equal(again(images), net(images))
        again.save_pretrained(tmp_path)
        assert torch.equal(hub.load(tmp_path)(images), net(images))


def test_pickled_weights_are_not_loaded(fake):
    net = hub.network("resnet_cifar", depth=11, width=2)
    net.push_to_hub("me/net")
    (fake / "me/net/model.safetensors").rename(fake / "me/net/pytorch_model.bin")
    with pytest.raises(at.CheckpointError, match="pickled are not loaded"):
        hub.load("me/net")


def test_weights_and_names_that_do_not_fit_are_refused(tmp_path):
    hub.network("resnet_cifar", depth=11, width=2).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"width": 2', '"width": 3'))
    with pytest.raises(at.CheckpointError):
        hub.load(tmp_path)
    config.write_text(text.replace("resnet_cifar", "system"))
    with pytest.raises(ValueError, match="network is the text 'system'; it must be one of resnet_cifar"):
        hub.load(tmp_path)
    with pytest.raises(TypeError, match="gate is a type, which a configuration cannot hold"):
        hub.network("resnet_cifar", gate=at.gates.SE)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            '"depth": 11',
            '"depth": 1000000000',
            "depth = 1000000000 is more than the saved tensors allow",
        ),
        (
            '"width": 2',
            '"width": 1000000000000',
            "width = 1000000000000 is more than the saved tensors allow",
        ),
        ('"depth": 11', '"depth": "eleven"', "holds no network of attractor"),
        ('"depth"', '"colour"', "holds no network of attractor"),
        ('"network"', '"name"', "config.json: the content lacks 'network'"),
        ('"width": 2', '"width": 2, "device": "cuda"', "options has the key 'device'"),
        ('"width": 2', '"width": 2, "width": 2', "has the key 'width' twice"),
        ("{", "[", "holds no network of attractor"),
    ],
)
def test_hostile_configurations_are_refused(tmp_path, old, new, told):
    hub.network("resnet_cifar", depth=11, width=2).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new, 1))
    with pytest.raises(at.CheckpointError, match=told):
        hub.load(tmp_path)


@pytest.mark.usefixtures("fake")
def test_networks_that_are_nowhere(tmp_path):
    with pytest.raises(at.CheckpointError, match=r"config.json does not name a network"):
        hub.load(tmp_path)
    with pytest.raises(at.CheckpointError, match="is no folder here, and could not be fetched"):
        hub.load("nobody/nothing")
    hub.network("resnet_cifar", depth=11, width=2).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(at.CheckpointError, match=r"has no model.safetensors"):
        hub.load(tmp_path)


def test_loading_is_silent_and_draws_no_numbers(tmp_path, capsys):
    hub.network("resnet_cifar", depth=11, width=2).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    hub.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_what_comes_with_the_library_is_as_good_as_its_card_says():
    from attractor.ode.trajectories import fine_trajectories

    assert pretrained.names() == ["elastic-pendulum", "henon-heiles", "pendulum-chain"]
    for name in pretrained.names():
        solver, card = at.HybridSolver.from_pretrained(name), pretrained.card(name)
        assert (solver.dt, type(solver.correction).__name__) == (card["dt"], card["correction"])
        assert solver.fit_error == card["fit_error"]
        assert (
            sum(p.stat().st_size for p in pretrained.folder(name).iterdir()) == card["bytes"] < 600_000
        )
        steps = 40
        u0 = solver.rate.sample(20, torch.Generator().manual_seed(123), torch.float64)
        truth = fine_trajectories(solver.rate, u0, solver.dt, steps, 32)
        error = (solver.solve(u0, steps * solver.dt).u - truth).square().mean().item()
        plain = at.evolve(solver.rate, u0, torch.arange(steps + 1, dtype=torch.float64) * solver.dt)
        assert error < 1e-4 * (plain.u - truth).square().mean().item()
        assert card["tested"]["lost"]["hybrid"] == 0


def test_the_network_that_comes_with_the_library_reads_digits():
    from attractor.data import images
    from attractor.residual import pretrained as networks
    from attractor.train import evaluate

    assert networks.names() == ["digits"]
    net, card = networks.load("digits"), networks.card("digits")
    assert sum(p.stat().st_size for p in networks.folder("digits").iterdir()) < 600_000
    found = evaluate(net, images.load("digits", "test"))
    assert found["accuracy"] == pytest.approx(card["accuracy"], abs=0.01)
    assert card["accuracy"] > 0.9
    with pytest.raises(ValueError, match="no pretrained network is called 'digit'; there are digits"):
        networks.load("digit")
