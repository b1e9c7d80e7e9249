"""What results look like: repr, HTML in notebooks, tables of pandas, pictures."""

import builtins
import re

import pytest
import torch

import attractor as at
from attractor.core.stiffness import neural_stiffness_index
from attractor.ode.compare import Comparison, Point
from attractor.residual import StiffnessProfile, compare_profiles


@pytest.fixture
def trajectory():
    u0 = torch.arange(12.0).reshape(2, 3, 2)
    return at.evolve(lambda t, u: -u, u0, torch.linspace(0, 1, 5))


@pytest.fixture
def profile():
    torch.manual_seed(0)
    one = torch.rand(4, 6) + 0.5
    make = lambda one, **more: StiffnessProfile(
        one, one.clone(), torch.full((4, 6), torch.nan), torch.tensor([0, 0, 0, 1, 1, 1]),
        tuple(f"layer{i}" for i in range(6)), **more,
    )  # fmt: skip
    return make(one, initial=make(one / 2))


@pytest.fixture
def comparison():
    point = lambda method, dt, error, seconds: Point(method, dt, False, error, seconds, 80)
    rest = (point("rk4", 0.1, 1e-6, 0.1), point("rk4", 0.05, 1e-12, 0.2))
    return Comparison(
        point("hybrid", 0.1, 1e-10, 0.12), rest, 1.7, 1.2, rest[1], {"batch": 20, "compiled": True}
    )


def columns(html):
    return re.findall("<th>(.*?)</th>", html)


def test_a_trajectory_as_a_table(trajectory):
    pytest.importorskip("pandas")
    table = trajectory.to_pandas()
    assert list(table.columns) == ["trajectory", "t", "u0", "u1", "ok", "status"]
    assert len(table) == 6 * 5
    own = table[table.trajectory == 4]  # the batch's [1, 1]
    torch.testing.assert_close(torch.tensor(own.u1.to_numpy()), trajectory.u[:, 1, 1, 1])
    assert own.t.tolist() == trajectory.t.tolist()
    single = at.evolve(lambda t, u: -u, torch.ones(3), torch.linspace(0, 1, 5)).to_pandas()
    assert len(single) == 5
    assert single.trajectory.tolist() == [0] * 5


def test_a_profile_as_a_table(profile):
    pytest.importorskip("pandas")
    table = profile.to_pandas()
    assert len(table) == 4 * 6
    row = table[(table.input == 2) & (table.block == 5)].iloc[0]
    assert (row["name"], row.stage) == ("layer5", 1)
    assert row.one == profile.one[2, 5].item()
    assert row.initial == pytest.approx(row.one / 2)


def test_comparisons_as_tables(comparison, profile):
    pytest.importorskip("pandas")
    assert comparison.to_pandas().method.tolist() == ["hybrid", "rk4", "rk4"]
    assert comparison.to_pandas().error.min() == 1e-12
    table = compare_profiles({"a": profile, "b": profile}, {"a": 0.5, "b": 0.75}).to_pandas()
    assert table.accuracy.tolist() == [0.5, 0.75]
    assert table.one.tolist() == [pytest.approx(profile.tns.item())] * 2


def test_html_of_notebooks(trajectory, profile, comparison):
    assert "5, from 0 to 1" in trajectory._repr_html_()
    assert columns(profile._repr_html_())[0] == "first"
    assert f"{profile.tns.item():.4g}" in profile._repr_html_()
    assert "1.00e-10" in comparison._repr_html_() or "1e-10" in comparison._repr_html_()
    assert comparison.verdict in comparison._repr_html_().replace("&gt;", ">")
    several = compare_profiles({"<b>": profile, "b": profile}, {"<b>": 0.5, "b": 0.75})
    assert "<b>" not in several._repr_html_()
    assert "&lt;b&gt;" in several._repr_html_()
    solver = at.HybridSolver.from_pretrained("elastic-pendulum")
    assert (
        f"<td>correction</td><td>{type(solver.correction).__name__} of width 512</td>"
        in solver._repr_html_()
    )


@pytest.mark.slow
def test_pictures_are_drawn_and_written(trajectory, profile, comparison, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    for i, shown in enumerate((trajectory, profile, comparison, compare_profiles({"a": profile, "b": profile}, {"a": 0.5, "b": 0.75}))):  # fmt: skip
        path = tmp_path / f"{i}.png"
        assert shown.plot(path=path).axes or i == 0
        assert path.read_bytes().startswith(b"\x89PNG")
    pyplot.close("all")


@pytest.mark.parametrize(("package", "call"), [("pandas", "to_pandas"), ("matplotlib", "plot")])
def test_a_missing_package_is_named_with_its_extra(
    package, call, trajectory, profile, comparison, monkeypatch
):
    import sys

    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    for name in [n for n in sys.modules if n.startswith(("attractor.report", f"{package}."))] + [
        package
    ]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    for shown in (trajectory, profile, comparison):
        with pytest.raises(ImportError, match=r"pip install 'attractor\[report\]'"):
            getattr(shown, call)()


def test_reprs_tell_what_things_are(trajectory, profile, comparison):
    solver = at.HybridSolver.from_pretrained("pendulum-chain")
    told = repr(solver)
    for part in (
        "PendulumChain(links=2",
        "rk4",
        "dt 0.1",
        "AttNS of width 512",
        "test MSE",
        "trust region",
    ):
        assert part in told
    bare = at.HybridSolver(solver.rate, "rk4", solver.correction, 0.1)
    assert "not fitted" in repr(bare)
    assert "no trust region" in repr(bare)
    assert bare.fit_error is None
    assert (
        repr(trajectory)
        == "Trajectory(5 times in [0, 1], states 2 x 3 x 2, all ok, 4 steps, 16 rate calls)"
    )
    assert repr(trajectory.stats) == "Stats(4 steps, 16 rate calls)"
    assert repr(comparison).startswith("Comparison(pays: ")
    assert "6 blocks in 2 stages" in repr(profile)
    x = torch.ones(1, 2, 3, 3)
    assert neural_stiffness_index(x, 2 * x).shape == (1,)
