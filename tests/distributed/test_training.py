"""Training in two real processes does what one does: images, texts, corrections; and goes on in either.

The tolerance: what rounding makes of sums in another order. Models are in float64, where after three
epochs losses and weights agree to 1e-10; the fits' least squares lose some digits more.
"""

import inspect

import pytest

import attractor as at
from attractor.ode.closed_form import ClosedForm
from tests.distributed import fit_worker, train_worker
from tests.distributed.launching import launch

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

CLOSE = {"rel": 1e-10, "abs": 1e-10}
FITTING = "crew" in inspect.signature(ClosedForm).parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="module")
def one(folder):
    return train_worker.whole(folder / "one")


@pytest.fixture(scope="module")
def two(folder, one):
    return launch("torchrun", 2, "train_worker.py", folder / "two", folder / "one", FITTING)


@pytest.fixture(scope="module")
def fitted(folder):
    return train_worker.corrections(folder / "one")


def alike(mine, theirs):
    assert len(mine["rows"]) == len(theirs["rows"]) == 3
    for a, b in zip(mine["rows"], theirs["rows"]):
        assert a == pytest.approx(b, **CLOSE)
    assert mine["weights"] == pytest.approx(theirs["weights"], **CLOSE)


@pytest.mark.parametrize("kind", train_worker.TRAININGS)
def test_two_processes_train_as_one(one, two, kind):
    assert [result["share"] for result in two] == [[0, 2], [1, 2]]
    for result in two:
        alike(one[kind], result["whole"][kind])
        assert result["whole"][kind]["same"]
    assert one[kind]["rows"][-1]["train_loss"] < one[kind]["rows"][0]["train_loss"]


@pytest.mark.parametrize("kind", train_worker.TRAININGS)
def test_two_processes_go_on_where_one_was(one, two, kind):
    for result in two:
        alike(one[kind], result["resumed"][kind])


@pytest.mark.parametrize("kind", train_worker.TRAININGS)
def test_one_process_goes_on_where_two_were(one, two, folder, kind, monkeypatch):
    monkeypatch.setattr(train_worker, "TRAININGS", {kind: train_worker.TRAININGS[kind]})
    alike(one[kind], train_worker.resumed(folder / "two", folder / "again")[kind])


@pytest.mark.parametrize("kind", train_worker.TRAININGS)
def test_there_is_one_checkpoint(one, two, folder, kind):
    names = lambda which: sorted(p.name for p in (folder / which / kind).iterdir())
    assert names("one") == names("two")


@pytest.mark.skipif(not FITTING, reason="fits are for one process")
@pytest.mark.parametrize(
    ("way", "digits"), [("default", 6), ("adam", 6), ("paper", 4)]
)  # the last in float32
def test_two_processes_fit_as_one(two, fitted, way, digits):
    mine = fitted[way]
    size = max(map(abs, mine["added"]))
    for result in two:
        found = result["corrections"][way]
        assert found["added"] == pytest.approx(mine["added"], rel=0, abs=10**-digits * size)
        for name in ("loss", "rollout", "scale", "correction"):
            a, b = ([row[name] for row in x["history"] if name in row] for x in (found, mine))
            assert a == (pytest.approx(b, rel=1e-4) if name in ("loss", "rollout") else b)
    assert two[0]["corrections"][way] == two[1]["corrections"][way]


def test_a_fit_takes_part_in_a_group_only_if_it_is_told_to(tmp_path):
    first, second = launch("torchrun", 2, "fit_worker.py", tmp_path)
    expected = [
        fit_worker.step(at.fit(fit_worker.decay(speed), sample=fit_worker.sample, **fit_worker.COMMON))
        for speed in (1.0, 2.0, 3.0)
    ]
    assert [first["own"], second["own"], first["alone"]] == pytest.approx(expected, rel=1e-12)
    for name in ("shared", "grouped"):
        assert first[name] == second[name] == pytest.approx(expected[0], rel=1e-8)
    for result in (first, second):
        assert "call fit with different data" in result["refusal"]


@pytest.mark.skipif(not FITTING, reason="fits are for one process")
def test_one_process_takes_up_a_fit_of_two(two, folder):
    again = train_worker.corrections(folder / "two")
    for way in ("default", "paper"):
        assert (
            again[way]["added"] == two[0]["corrections"][way]["added"]
        )  # all that was left is to load it
