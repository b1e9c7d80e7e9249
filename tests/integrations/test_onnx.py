import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import attractor as at
from attractor.integrations import onnx
from attractor.ode.trust import TrustRegion

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def damped(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, -1.3 * x.sin() - 0.1 * v), -1)


def forced(t, u):
    x, v = u.unbind(-1)
    return torch.stack((v, 0.1 * torch.cos(0.7 * torch.as_tensor(t).to(u)) - 1.3 * x), -1)


def numbers(t, u):
    """Numbers that float32 does not have, wherever they can stand."""
    x, v = u.unbind(-1)
    bent = torch.where(x > 0.2, 0.1, x) + (v % (math.pi / 3)).clamp(max=0.3) + torch.full_like(x, 0.3)
    return torch.stack((v.add(x, alpha=0.7) + 0.1 / (1.7 + v * v), 1.3**v + x.abs() ** 1.3 - bent), -1)


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, t, u):
        return self.layer(u).tanh()


def untrained(rate, dim, scheme="rk4", correction="neurvec", dtype=torch.float64, **options):
    """A solver with random weights: it must be exported as faithfully as a fitted one."""
    options |= {} if correction == "linear" else {"width": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = at.corrections.get_correction(correction)(dim, dtype=dtype, **options)
        states = torch.randn(100, dim, dtype=dtype)
    trust = None if hasattr(rate, "sample") else TrustRegion.around(states)
    return at.HybridSolver(rate, scheme, module, 0.1, trust)


@pytest.fixture(scope="module")
def fitted():
    return at.fit(at.systems.ElasticPendulum(), dt=0.1, horizon=1.0, trajectories=50, width=32)


def run_alone(folder, code, *inputs):
    """What the code saves in after.npy, in a process where attractor cannot be imported."""
    for name, x in zip("ut", inputs):
        np.save(folder / f"{name}.npy", x.numpy())
    lines = ("import sys, numpy as np", "sys.modules['attractor'] = None", "u = np.load('u.npy')", code)
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=folder, check=True)
    return torch.from_numpy(np.load(folder / "after.npy"))


@pytest.mark.slow
def test_onnx_runs_without_attractor_and_torch(fitted, tmp_path):
    for name in ("onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    made = onnx.export(fitted, tmp_path / "pendulum.onnx")
    assert made.path == tmp_path / "pendulum.onnx"
    assert made.difference <= 20 * EPS[torch.float64]
    assert [p.name for p in tmp_path.iterdir()] == ["pendulum.onnx"]  # nothing temporary, no side file

    code = """
sys.modules["torch"] = None
import onnxruntime
session = onnxruntime.InferenceSession("pendulum.onnx")
(given,), (back,) = session.get_inputs(), session.get_outputs()
assert (given.name, given.shape, back.name, back.shape) == ("u", ["batch", 4], "after", ["batch", 4])
about = session.get_modelmeta().custom_metadata_map
assert float(about["dt"]) == 0.1 and about["scheme"] == "rk4" and about["correction"] == "Stages"
assert about["system"].startswith("ElasticPendulum(") and about["steps"] == "1"
np.save("after.npy", session.run(None, {"u": u})[0])"""
    u = fitted.rate.sample(11, torch.Generator().manual_seed(0), torch.float64)
    torch.testing.assert_close(run_alone(tmp_path, code, u), fitted.step(u), rtol=1e-13, atol=1e-13)


@pytest.mark.slow
def test_pt2_runs_without_attractor(fitted, tmp_path):
    onnx.export(fitted, tmp_path / "pendulum.pt2", steps=2)
    code = """
import json, torch
about = {"attractor.json": ""}
model = torch.export.load("pendulum.pt2", extra_files=about).module()
assert json.loads(about["attractor.json"])["steps"] == "2"
np.save("after.npy", model(torch.from_numpy(u)).numpy())"""
    u = fitted.rate.sample(11, torch.Generator().manual_seed(0), torch.float64)
    want = fitted.solve(u, 0.2).final
    torch.testing.assert_close(run_alone(tmp_path, code, u), want, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "steps"),
    [
        (untrained(numbers, 2, "euler"), 1),
        pytest.param(untrained(forced, 2, dtype=torch.float32), 2, marks=pytest.mark.slow),
    ],
    ids=["numbers", "float32 with t"],
)
def test_onnx_agrees(solver, steps, tmp_path):
    for name in ("onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    made = onnx.export(solver, tmp_path / "model.onnx", steps=steps)
    assert made.difference <= 20 * EPS[next(solver.correction.parameters()).dtype]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "solver",
    [
        untrained(at.systems.PendulumChain(2), 4),
        untrained(at.systems.PendulumChain(5), 10, "euler", "csm", torch.float32),
        untrained(at.systems.SpringMass(4), 8, "leapfrog", "attns"),
        untrained(at.systems.Lorenz(), 3, "dopri5", "linear"),
        untrained(damped, 2, "rk4", "attns_m", torch.float32),
        untrained(Learned(), 2, "rk4", "fsnet"),
    ],
    ids=str,
)
def test_pt2_agrees(solver, tmp_path):
    made = onnx.export(solver, tmp_path / "model.pt2")
    assert made.difference <= 20 * EPS[next(solver.correction.parameters()).dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver",
    [untrained(forced, 2), untrained(at.systems.Lorenz(), 3, period=2.0)],
    ids=["forced rate", "timed correction"],
)
def test_time_is_an_input_where_it_matters(solver, tmp_path):
    onnx.export(solver, tmp_path / "model.pt2", steps=2)
    model = torch.export.load(tmp_path / "model.pt2").module()
    u = torch.rand(5, solver.correction.config["dim"], dtype=torch.float64)
    for t in (torch.tensor(0.0).double(), torch.tensor(0.7).double()):
        torch.testing.assert_close(model(u, t), solver.step(solver.step(u, t), t + 0.1))
    assert not torch.equal(model(u, t), model(u, t + 0.5))


@pytest.mark.slow
def test_a_model_that_differs_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    path.write_text("what was there")
    solver = untrained(damped, 2)
    write, read = onnx.FORMATS[".pt2"]
    rounded = lambda content: lambda u: read(content)(u).float().double()
    monkeypatch.setitem(onnx.FORMATS, ".pt2", (write, rounded))
    with pytest.raises(
        RuntimeError, match=r"differs from HybridSolver\(damped.* by .*e-0[89] of a state's"
    ):
        onnx.export(solver, path)
    assert path.read_text() == "what was there"
    assert onnx.export(solver, path, check=False) == onnx.Exported(path, None)
    assert path.read_bytes()[:2] == b"PK"


def test_what_cannot_be_done_says_so(tmp_path, monkeypatch):
    solver = untrained(damped, 2)
    with pytest.raises(ValueError, match=r"'model.zip' must end in \.onnx or \.pt2"):
        onnx.export(solver, tmp_path / "model.zip")
    for steps in (0, 1000):
        with pytest.raises(ValueError, match=f"steps = {steps}; one call takes 1 to 32"):
            onnx.export(solver, tmp_path / "model.pt2", steps=steps)
    unknown = at.HybridSolver(damped, "rk4", at.corrections.Linear(2), 0.1)
    with pytest.raises(ValueError, match="no states to trace"):
        onnx.export(unknown, tmp_path / "model.pt2")
    branching = lambda t, u: -u if u.sum() > 0 else u
    with pytest.raises(RuntimeError, match=r"torch\.where instead of if"):
        onnx.export(untrained(branching, 2), tmp_path / "model.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"onnxscript.*pip install 'attractor\[onnx\]'"):
        onnx.export(solver, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_network_in_float32_is_allowed_its_own_rounding(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    how = dict(
        dt=0.1,
        horizon=1.0,
        trajectories=50,
        width=32,
        correction="attns",
        options={"precision": "float32"},
    )
    solver = at.fit(at.systems.ElasticPendulum(), **how)
    found = onnx.export(solver, tmp_path / "low.onnx")
    assert found.difference < 1e-6
