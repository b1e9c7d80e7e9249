"""Stiffness profiles: formulas, both steps, files, pictures, comparisons."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from attractor.core import stiffness
from attractor.residual import StiffnessProfile, compare_profiles, probe, ranks, resnet_cifar
from attractor.train import CheckpointError

STAGE = torch.tensor([0, 0, 0, 1, 1, 1, 1])


def a_profile(seed=0, gated=True, initial=True, inputs=30, **options):
    draw = torch.Generator().manual_seed(seed)
    random = lambda: torch.randn(inputs, 7, generator=draw, dtype=torch.float64).mul(0.4).exp()
    gate, factor = random(), torch.rand(inputs, 7, generator=draw, dtype=torch.float64)
    if not gated:
        factor = torch.full_like(factor, math.nan)
    factor[:, 0] = math.nan
    one = torch.where(factor.isnan(), gate, gate * factor)
    names = tuple(f"layer{i}" for i in range(7))
    found = StiffnessProfile(one, gate, factor, STAGE, names, **options)
    return found.beside(a_profile(seed + 1000, gated, False, inputs)) if initial else found


def test_formulas_are_those_of_the_core():
    found = a_profile()
    assert torch.equal(found.tns, stiffness.total_neural_stiffness(found.one, STAGE))
    assert torch.equal(found.total(False), stiffness.total_neural_stiffness(found.one, STAGE, False))
    m1, m2 = torch.linspace(0, 1, 4), torch.linspace(0, 2, 5)
    for name in ("surface", "proportion"):
        want = getattr(stiffness, f"stiffness_{name}")(found.one, STAGE, m1, m2)
        assert torch.equal(getattr(found, name)(m1, m2), want)
    other = found.with_step("gate").with_mean("stage")
    want = stiffness.total_neural_stiffness(found.gate, STAGE, mean="stage")
    assert torch.equal(other.tns, want)
    assert torch.equal(other.initial.nsi, found.initial.gate)
    assert torch.equal(other.with_step("one").with_mean("input").tns, found.tns)


def test_a_summary_states_the_initial_value_or_its_absence():
    text = a_profile().summary()
    assert "TNS, step one" in text
    assert "TNS, step gate" in text
    assert "not given" not in text
    assert "initial: unknown" in a_profile(initial=False).summary()
    assert "no gates: both step sizes are 1" in a_profile(gated=False).summary()
    assert "30 inputs, 7 blocks in 2 stages" in repr(a_profile())
    assert str(a_profile()) == text  # what print shows


def test_stages_of_one_block_have_no_tns_but_a_summary():
    alone = StiffnessProfile(
        *[torch.ones(3, 2)] * 2, torch.full((3, 2), math.nan), torch.arange(2), ("a", "b")
    )
    assert alone.totals() == {s: {"trained": None, "initial": None} for s in ("one", "gate")}
    assert "TNS, step one: –" in alone.summary()
    with pytest.raises(ValueError, match=r"use \.nsi of the blocks.*\.total\(drop_first=False\)"):
        _ = alone.tns
    assert alone.total(drop_first=False) == 0
    assert ".total(" not in alone.note  # which would say as little


def of_stages(*blocks, mean="input", seed=0):
    """A profile with so many blocks a stage."""
    stage = torch.repeat_interleave(torch.arange(len(blocks)), torch.tensor(blocks))
    nsi = torch.rand(5, len(stage), generator=torch.Generator().manual_seed(seed)) + 0.1
    names = tuple(f"layer{s}.{b}" for s, n in enumerate(blocks, 1) for b in range(n))
    return StiffnessProfile(nsi, nsi, torch.full_like(nsi, math.nan), stage, names, mean=mean)


@pytest.mark.parametrize("mean", ["input", "stage"])
@pytest.mark.parametrize("blocks", [(2, 2, 2, 2), (3, 2, 4), (1, 3), (1, 2), (3, 4)])
@pytest.mark.parametrize("drop_first", [True, False])
def test_unmeasured_stages_do_not_change_tns(blocks, mean, drop_first):
    """And what it speaks of does: a silent stage is one whose NSI may be anything."""
    found = of_stages(*blocks, mean=mean)
    silent = stiffness.silent_stages(found.stage, drop_first, mean)
    tns = lambda nsi: stiffness.total_neural_stiffness(nsi, found.stage, drop_first, mean)
    for stage in range(len(blocks)):
        last = (found.stage == stage).nonzero()[-1]
        louder = found.nsi.clone()
        louder[2, last] *= 50
        assert torch.equal(tns(louder), tns(found.nsi)) == (stage in silent)
    assert bool(found.note) == bool(stiffness.silent_stages(found.stage, mean=mean))


def test_the_note_on_unmeasured_stages_is_shown_everywhere():
    """A ResNet18's TNS is 0 by construction, which is no measurement."""
    found = of_stages(2, 2, 2, 2)
    assert found.tns == 0
    assert found.total(drop_first=False) > 0
    assert found.note.startswith("TNS does not measure any stage: it omits a stage's first block")
    assert ".total(drop_first=False)" in found.note
    assert found.note in str(found)
    assert "TNS does not measure 4 stages, see .note" in repr(found)
    assert "TNS does not measure any stage" in found._repr_html_()
    assert found.numbers()["note"] == found.note
    assert found.numbers()["tns_with_first"]["one"]["trained"] == pytest.approx(
        found.total(False).item()
    )
    assert f"a: {found.note}" in repr(compare_profiles({"a": found}))
    some = of_stages(3, 2, 1)
    assert "TNS does not measure the stages that begin at layer2.0, layer3.0:" in some.note
    assert "for 1 stages of one block it is the only alternative" in some.note
    for silent_of_none in (of_stages(3, 4), of_stages(2, 2, mean="stage")):
        assert silent_of_none.note == ""
        assert "does not measure" not in repr(silent_of_none) + str(silent_of_none)


@pytest.mark.parametrize("initial", [True, False])
def test_saved_and_loaded(tmp_path, initial):
    found = a_profile(initial=initial, step="gate", mean="stage", model="Net", granularity="addition")
    again = StiffnessProfile.load(found.save(tmp_path / "profile"))
    assert repr(again) == repr(found)
    assert again.names == found.names
    assert (again.step, again.mean, again.granularity) == ("gate", "stage", "addition")
    assert torch.equal(again.tns, found.tns)
    assert torch.equal(again.gates.nan_to_num(-1), found.gates.nan_to_num(-1))
    assert (again.initial is None) == (not initial)
    if initial:
        assert torch.equal(again.initial.tns, found.initial.tns)
    config = tmp_path / "profile/config.json"
    config.write_text(config.read_text().replace("layer1", "layer9"))
    with pytest.raises(CheckpointError, match="does not match its hash"):
        StiffnessProfile.load(tmp_path / "profile")


def test_another_kind_of_checkpoint_is_refused(tmp_path):
    from attractor.train import checkpoint

    checkpoint.save(tmp_path / "a", "solver", {"w": torch.ones(1)}, {})
    with pytest.raises(CheckpointError, match="holds a solver, not a stiffness profile"):
        StiffnessProfile.load(tmp_path / "a")
    checkpoint.save(tmp_path / "b", "stiffness profile", {"one": torch.ones(1, 1)}, {"names": ["a"]})
    with pytest.raises(CheckpointError, match="the content lacks 'model'; it must have names, model"):
        StiffnessProfile.load(tmp_path / "b")


def test_correlation_with_gates():
    scipy = pytest.importorskip("scipy.stats")
    found = a_profile()
    for step in ("one", "gate"):
        got = found.with_step(step).correlation()
        for b in range(1, 7):
            x, g = found.with_step(step).nsi[:, b].numpy(), found.gates[:, b].numpy()
            assert got["pearson"][b].item() == pytest.approx(scipy.pearsonr(x, g).statistic, rel=1e-6)
            assert got["spearman"][b].item() == pytest.approx(scipy.spearmanr(x, g).statistic, rel=1e-6)
        assert got["pearson"][0].isnan()


COLUMN = arrays.arrays(float, st.integers(3, 12), elements=st.integers(-3, 3).map(float))


@given(COLUMN, st.data())
def test_rank_correlations_with_ties(x, data):
    scipy = pytest.importorskip("scipy.stats")
    y = data.draw(arrays.arrays(float, len(x), elements=st.integers(-3, 3).map(float)))
    kinds = {"kendall": scipy.kendalltau, "spearman": scipy.spearmanr, "pearson": scipy.pearsonr}
    for name, reference in kinds.items():
        got = getattr(ranks, name)(torch.tensor(x), torch.tensor(y))
        if len(set(x)) == 1 or len(set(y)) == 1:
            assert math.isnan(got)
        else:
            assert got == pytest.approx(reference(x, y).statistic, abs=1e-12)


def test_correlations_with_a_constant_up_to_rounding_are_nan():
    noise = torch.randn(20, dtype=torch.float64)
    constant = torch.full((20,), 0.1, dtype=torch.float64)  # whose mean is not 0.1
    for x, y in ((constant, noise), (noise, constant), (0 * noise, noise), (noise[:1], noise[:1])):
        assert math.isnan(ranks.pearson(x, y))
    tiny = 1e-3 + 1e-9 * noise
    assert ranks.pearson(tiny, 1e-200 * noise) == pytest.approx(1, abs=1e-6)


def test_p_values():
    scipy = pytest.importorskip("scipy.stats")
    x, y = torch.tensor([1.0, 2, 3, 4, 5, 6]), torch.tensor([1.0, 2, 3, 4, 6, 5])
    exact = scipy.kendalltau(x.numpy(), y.numpy(), method="exact").pvalue
    assert ranks.p_value(ranks.kendall, x, y) == pytest.approx(exact)
    many = torch.randn(20)
    assert ranks.p_value(ranks.spearman, many, many) == pytest.approx(1 / 5001)
    assert math.isnan(ranks.p_value(ranks.kendall, x, torch.ones(6)))


def test_comparison(tmp_path):
    profiles = {f"net{i}": a_profile(i) for i in range(5)}
    accuracy = {name: 0.9 + 0.01 * float(p.tns) for name, p in profiles.items()}
    found = compare_profiles(profiles, accuracy)
    assert [row["name"] for row in found.rows] == list(profiles)
    row = found.rows[2]
    assert row["one"] == pytest.approx(profiles["net2"].tns.item())
    assert row["gate"] == pytest.approx(profiles["net2"].with_step("gate").tns.item())
    assert row["gate_initial"] == pytest.approx(profiles["net2"].initial.with_step("gate").tns.item())
    assert found.correlations["one"]["kendall"] == 1
    assert found.correlations["one"]["spearman"] == pytest.approx(1)
    assert found.correlations["one"]["kendall_p"] == pytest.approx(2 / math.factorial(5))
    assert set(found.correlations) == {"one", "gate", "one_initial", "gate_initial"}
    assert "kendall +1.00" in repr(found)
    assert json.loads(found.save(tmp_path / "c.json").read_text())["rows"][0]["name"] == "net0"
    assert compare_profiles(profiles).correlations == {}
    bare = compare_profiles({"a": a_profile(initial=False)}, {"a": 1.0})
    assert bare.rows[0]["one_initial"] is None
    with pytest.raises(ValueError, match=r"differ in \['net4', 'other'\]"):
        compare_profiles(profiles, {**{k: v for k, v in accuracy.items() if k != "net4"}, "other": 1.0})
    with pytest.raises(ValueError, match="profiles is empty"):
        compare_profiles({})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["nsi", "surface", "proportion", "gates", "all"])
def test_pictures(kind, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    figure = a_profile(step="gate").plot(kind, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert figure.get_size_inches().min() > 1


def test_a_picture_of_few_gates_has_no_empty_axes():
    pytest.importorskip("matplotlib")
    found = a_profile(initial=False)
    few = torch.where(torch.arange(7) == 3, found.gates, math.nan)
    figure = StiffnessProfile(found.one, found.gate, few, STAGE, found.names).plot("gates")
    assert [axis.has_data() for axis in figure.axes] == [True, True]


def test_pictures_of_gates_on_other_axes():
    """Whose step "gate" is not defined; that of step "one" is drawn all the same."""
    pytest.importorskip("matplotlib")
    found = a_profile(initial=False)
    unknown = torch.where(found.gates.isnan(), found.gate, math.nan)
    found = StiffnessProfile(found.one, unknown, found.gates, STAGE, found.names)
    for kind in ("nsi", "surface", "proportion", "gates", "all"):
        found.plot(kind)
    assert found.totals()["gate"]["trained"] is None
    with pytest.raises(ValueError, match="granularity='addition'"):
        found.with_step("gate")


@pytest.mark.slow
def test_pictures_of_several(tmp_path):
    pytest.importorskip("matplotlib")
    from attractor.report import figures
    from attractor.report import stiffness as pictures

    profiles = {
        "none": a_profile(0, gated=False),
        "se": a_profile(1),
        "new": a_profile(2, initial=False),
    }
    steps = ("one", "gate")
    for maker in (pictures.nsi, pictures.surfaces, pictures.proportions):
        assert (
            figures.write(maker(profiles, steps), tmp_path / f"{maker.__name__}.png").stat().st_size
            > 1000
        )
    compare_profiles(profiles, dict.fromkeys(profiles, 0.9)).plot(tmp_path / "c.png")
    with pytest.raises(ValueError, match="the comparison has no accuracies"):
        compare_profiles(profiles).plot()
    with pytest.raises(ValueError, match="kind = 'map'; it is one of nsi"):
        profiles["se"].plot("map")
    with pytest.raises(ValueError, match="has no gates"):
        profiles["none"].plot("gates")


def test_the_integral_of_the_surface_is_tns():
    """What the picture shows adds up to the number in its title."""
    found = a_profile()
    m1, m2 = (
        torch.linspace(0, top, 400, dtype=torch.float64) for top in (7, float(found.nsi.max()) * 1.01)
    )
    cells = found.surface(m1[:-1] + m1.diff() / 2, m2[:-1] + m2.diff() / 2)
    assert (cells.mean() * 7 * m2[-1]).item() == pytest.approx(found.tns.item(), rel=5e-3)


def test_gates_make_the_two_steps_differ_before_training():
    """Why the initial value belongs beside: step "gate" is larger by what the gate holds back."""
    images = torch.randn(8, 3, 16, 16)
    torch.manual_seed(0)
    plain = probe(resnet_cifar(20, gate="none"), [images])
    torch.manual_seed(0)
    gated = probe(resnet_cifar(20, gate="stepnet"), [images])
    assert gated.one[:, 1].mean() < plain.one[:, 1].mean()
    assert gated.gates[:, 1].mean().item() == pytest.approx(1 / (1 + math.e), rel=1e-4)  # sigmoid(-1)
    torch.testing.assert_close(gated.gate[:, 1], plain.one[:, 1], rtol=1e-5, atol=0)  # the same f and x
