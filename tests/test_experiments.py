"""Every experiment runs from end to end, in small."""

import pytest

from experiments import gates


@pytest.mark.slow
def test_gates(tmp_path):
    path = tmp_path / "gates.json"
    common = ["--depth", "29", "--epochs", "1", "--gates", "none", "stepnet", "--out", str(path)]
    gates.main([*common, "--seeds", "1"])
    found = gates.main([*common, "--seeds", "2"])
    rows = {row["arm"]: row for row in found["summary"]}
    assert {name: row["seeds"] for name, row in rows.items()} == {"none": 2, "stepnet": 2}
    assert rows["none"]["gain"] is None
    assert rows["stepnet"]["gain"] == pytest.approx(
        rows["stepnet"]["accuracy"] - rows["none"]["accuracy"]
    )
    assert rows["stepnet"]["tns_trained_gate"] > rows["stepnet"]["tns_trained_one"] > 0
    assert found["correlations"]["models"]["one"]["kendall"] is not None
    for picture in ("tns", "nsi", "surface", "proportion"):
        assert (tmp_path / f"gates_{picture}.png").stat().st_size > 0
    before = path.read_text()
    assert gates.main([*common, "--seeds", "2"])["arms"] == found["arms"]  # nothing is run twice
    assert path.read_text() == before
    with pytest.raises(SystemExit):  # other numbers would be lost
        gates.main(["--depth", "29", "--epochs", "2", "--gates", "none", "--out", str(path)])
    assert path.read_text() == before


@pytest.mark.slow
def test_gates_trained_at_a_time(tmp_path):
    common = ["--depth", "29", "--epochs", "1", "--gates", "none", "stepnet", "--seeds", "1"]
    one = gates.main([*common, "--out", str(tmp_path / "one.json")])
    two = gates.main([*common, "--out", str(tmp_path / "two.json"), "--workers", "2"])
    assert list(two["arms"]) == ["none", "stepnet"]
    for name, seeds in one["arms"].items():
        assert two["arms"][name]["0"]["accuracy"] == pytest.approx(seeds["0"]["accuracy"], abs=0.01)
        assert two["arms"][name]["0"]["seconds_per_epoch"] is None


def test_gains_are_paired_by_seed():
    """By hand: seeds differ by much, gates by little; a seed that the plain network lacks does not count."""
    stiff = {when: {step: {"tns": 1.0} for step in ("one", "gate")} for when in ("initial", "trained")}
    run = lambda accuracy: {
        "accuracy": accuracy, "parameters": 1, "seconds_per_epoch": 1.0, "stiffness": stiff
    }  # fmt: skip
    arms = {
        "none": {"0": run(0.80), "1": run(0.90), "2": run(0.70)},
        "se": {"0": run(0.81), "1": run(0.92), "2": run(0.73), "3": run(0.10)},
        "eca": {"0": run(0.85)},
    }
    plain, se, eca = gates.summary({"arms": arms})
    assert (plain["gain"], plain["gains"], plain["gain_error"]) == (None, [], None)
    assert plain["spread"] == pytest.approx(10)
    assert se["gains"] == pytest.approx([1, 2, 3])
    assert se["gain"] == pytest.approx(2)
    assert se["gain_error"] == pytest.approx(1 / 3**0.5)  # deviation 1, three seeds
    assert eca["gain"] == pytest.approx(5)
    assert (eca["gain_error"], eca["spread"]) == (None, None)
