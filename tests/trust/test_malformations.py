"""Files in which one field differs are refused with the error of their format, or load correctly."""

import json
import math
import os

import pytest
import torch

import attractor as at
from attractor.ode import make_trajectories
from attractor.ode.fine_data import FineData, tensor_hash
from attractor.storage import schema
from attractor.storage.limits import parse_json
from attractor.storage.tensor_specs import NO_NAN, TensorSpec, check_tensors
from attractor.train import checkpoint
from benchmarks.damage import sealed

pytest.importorskip("huggingface_hub")
malformations = pytest.importorskip("benchmarks.malformations")

measured = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the most memory cannot be read here"
)


@measured
@pytest.mark.parametrize("name", malformations.FORMATS)
def test_a_sample_of_malformations_is_refused_or_loads(name):
    """The small version of `python -m benchmarks.malformations`."""
    result = malformations.campaign(12, seed=3, names=[name])
    assert not result["failures"]
    assert result["refused"] + result["loaded"] == 12
    assert result["refused"]


@measured
@pytest.mark.slow
def test_many_malformations_are_refused_or_load():
    assert not malformations.campaign(2000, seed=4)["failures"]


# ---- the language of schemas


POINT = schema.record(
    {"x": schema.number(low=0), "kind": schema.text(choices=("a", "b"))},
    {"sizes": schema.listing(schema.number(whole=True), most=2), "error": schema.any_of(schema.number(), schema.null)},
)  # fmt: skip
GOOD = {"x": 1.5, "kind": "a", "sizes": [1, 2], "error": None}


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ({"x": "1.5"}, "x is the text '1.5'; it must be a number of at least 0"),
        ({"x": True}, "x is true; it must be a number of at least 0"),
        ({"x": -1}, "x is -1; it must be a number of at least 0"),
        ({"x": math.nan}, "x is nan; it must be a number"),
        ({"x": math.inf}, "x is inf; it must be a number"),
        ({"x": 10**400}, "x is a whole number of more than 300 digits; it must be a number"),
        ({"x": None}, "x is null; it must be a number"),
        ({"kind": "c"}, "kind is the text 'c'; it must be one of a, b"),
        ({"kind": ["a"]}, "kind is a list of 1 items; it must be one of a, b"),
        ({"sizes": [1, 2.0]}, "sizes[1] is 2.0; it must be a whole number"),
        ({"sizes": [1, 2, 3]}, "sizes is a list of 3 items; it must be a list of 0 to 2 items"),
        ({"error": "no"}, "error is the text 'no'; it must be a number, or it must be null"),
        ({"more": 1}, "the content has the key 'more'; it may have x, kind, sizes, error"),
    ],
)  # fmt: skip
def test_a_fault_names_the_field_its_value_and_what_is_allowed(entries, fault):
    assert schema.mismatch(GOOD, POINT) is None
    found = schema.mismatch({**GOOD, **entries}, POINT)
    assert found.startswith(fault)
    with pytest.raises(at.CheckpointError, match=r"^a/b.json: .*\. Save it again\.$"):
        schema.check({**GOOD, **entries}, POINT, "a/b.json", at.CheckpointError, "Save it again.")


def test_the_fault_of_alternatives_is_that_of_the_closest_one():
    either = schema.any_of(POINT, schema.record({"name": schema.text()}))
    assert schema.mismatch({**GOOD, "sizes": [None]}, either).startswith("sizes[0] is null")
    assert schema.mismatch({"x": 1}, POINT) == "the content lacks 'kind'; it must have x, kind"
    kinds = schema.variants("kind", {"a": POINT, "c": schema.record({"kind": schema.text()})})
    assert schema.mismatch(GOOD, kinds) is None
    assert schema.mismatch({"kind": "c"}, kinds) is None
    assert schema.mismatch({"kind": "b"}, kinds) == "kind is the text 'b'; it must be one of a, c"
    assert schema.mismatch([], kinds).startswith(
        "the content is a list of 0 items; it must be an object"
    )


def test_values_are_nested_no_deeper_than_a_schema_allows():
    assert schema.mismatch({"a": [[1]]}, schema.plain) is None
    deep = []
    for _ in range(20):
        deep = [deep]
    assert "nested" in schema.mismatch(deep, schema.plain)
    assert "finite" in schema.mismatch({"a": [1e999]}, schema.plain)
    assert schema.mismatch("0x1p-3", schema.text_number()) is None
    for text in ("0x1p+99999", "nan", "inf", "", "x", None, "1" * 400):
        assert "must be a number as text" in schema.mismatch(text, schema.text_number())


def test_tensors_have_the_names_shapes_dtypes_and_numbers_of_their_specs():
    specs = {
        "u": TensorSpec(("n", 2)),
        "t": TensorSpec(("n",)),
        "mask": TensorSpec(("n",), values=NO_NAN),
    }
    good = {"u": torch.ones(3, 2), "t": torch.ones(3), "mask": torch.full((3,), -math.inf)}
    check_tensors(good, specs, "x")
    for entries, fault in (
        ({"u": torch.ones(3)}, r"u is float32 \[3\], not .* \[n, 2\]"),
        ({"t": torch.ones(4)}, r"t is float32 \[4\], not .* \[n = 3\]"),
        ({"t": torch.ones(3).long()}, r"t is int64 \[3\], not float64"),
        ({"t": torch.tensor([1, math.nan, math.inf])}, "t has 2 numbers that are NaN or infinite"),
        ({"mask": torch.full((3,), math.nan)}, "mask has 3 numbers that are NaN"),
        ({"v": torch.ones(1)}, "it also has v"),
    ):
        with pytest.raises(ValueError, match=rf"^x: {fault}"):
            check_tensors({**good, **entries}, specs, "x")
    with pytest.raises(ValueError, match="it lacks mask, t"):
        check_tensors({"u": good["u"]}, specs, "x")
    check_tensors({"u": good["u"]}, specs, "x", optional=("mask", "t"))


# ---- what was accepted silently, or raised another error


@pytest.fixture
def solver(tmp_path):
    made = at.HybridSolver(at.systems.ElasticPendulum(), "rk4", at.corrections.AttNS(4, width=8), 0.1)
    return made.save(tmp_path / "solver")


def change(folder, **entries):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **entries}))
    sealed(folder)


def test_duplicate_keys_and_constants_are_no_json():
    with pytest.raises(ValueError, match="an object has the key 'a' twice"):
        parse_json('{"a": 1, "b": {"a": 2}, "a": 1}', "x")
    for constant in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(ValueError, match=f"{constant} is no number of JSON"):
            parse_json(f"[{constant}]", "x")
        assert isinstance(parse_json(f"[{constant}]", "x", constants=True)[0], float)


def test_a_key_that_is_there_twice_is_refused(solver):
    path = solver / "config.json"
    path.write_text(path.read_text().replace('"trust": false', '"trust": false, "trust": false'))
    sealed(solver)
    with pytest.raises(at.CheckpointError, match="the key 'trust' twice"):
        at.HybridSolver.load(solver)


def test_extra_tensors_are_refused(solver):
    tensors, config = checkpoint.load(solver, "hybrid solver")
    for name in ("extra", "trust.mean"):
        checkpoint.save(solver, "hybrid solver", {**tensors, name: torch.ones(1)}, config)
        with pytest.raises(at.CheckpointError, match="tensors that belong to no part of the solver"):
            at.HybridSolver.load(solver)
    checkpoint.save(solver, "hybrid solver", {**tensors, "correction.extra": torch.ones(1)}, config)
    with pytest.raises(at.CheckpointError, match="it also has extra"):
        at.HybridSolver.load(solver)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(solver, number):
    tensors, config = checkpoint.load(solver, "hybrid solver")
    tensors["correction.net.head.bias"][0] = number
    checkpoint.save(solver, "hybrid solver", tensors, config)
    with pytest.raises(
        at.CheckpointError, match=r"net.head.bias has 1 numbers that are NaN or infinite"
    ):
        at.HybridSolver.load(solver)


@pytest.mark.parametrize(
    ("name", "number", "fault"),
    [
        ("deviation", 0.0, "the deviations and the limit of its trust region must be above 0"),
        ("deviation", -math.inf, "deviation has 4 numbers that are NaN or infinite"),
        ("limit", -1.0, "the deviations and the limit of its trust region must be above 0"),
        ("accuracy", math.inf, "accuracy has 4 numbers that are NaN or infinite"),
    ],
)
def test_a_trust_region_that_would_trust_everything_is_refused(tmp_path, name, number, fault):
    malformations.FORMATS["solver: slope"].make(tmp_path / "solver")
    tensors, config = checkpoint.load(tmp_path / "solver", "hybrid solver")
    tensors[f"trust.{name}"].fill_(number)
    checkpoint.save(tmp_path / "solver", "hybrid solver", tensors, config)
    with pytest.raises(at.CheckpointError, match=fault):
        at.HybridSolver.load(tmp_path / "solver")


def test_a_rate_and_a_correction_of_different_dimensions_are_refused(solver):
    change(solver, rate={"system": "Lorenz", "options": {}})
    with pytest.raises(at.CheckpointError, match=r"of 4 components, and those of Lorenz.* have 3"):
        at.HybridSolver.load(solver)


def test_a_correction_for_other_stages_than_the_schemes_is_refused(tmp_path):
    correction = at.corrections.Stages(4, stages=6)
    folder = at.HybridSolver(at.systems.ElasticPendulum(), "rk4", correction, 0.1).save(tmp_path / "s")
    with pytest.raises(at.CheckpointError, match=r"a correction of 6 stages, and Scheme.'rk4'.* has 4"):
        at.HybridSolver.load(folder)


@pytest.mark.parametrize(
    ("about", "u", "fault"),
    [
        ({}, torch.zeros(3, 2, dtype=torch.float64), r"u is float64 \[3, 2\], not float64 \[3, 2, components\]"),
        ({}, torch.zeros(3, 2, 3), r"u is float32 \[3, 2, 3\], not float64"),
        ({}, torch.full((3, 2, 3), math.nan, dtype=torch.float64), "u has 18 numbers that are NaN or infinite"),
        ({"t0": 0.0}, None, "the entry about: t0 is 0.0; it must be a number as text"),
        ({"shard": 10**400}, None, "the entry about: shard is a whole number of more than 300 digits"),
    ],
)  # fmt: skip
def test_shards_of_another_rank_dtype_or_description_are_refused(tmp_path, about, u, fault):
    from safetensors import safe_open
    from safetensors.torch import save_file

    data = make_trajectories(
        at.systems.Lorenz(), tmp_path, trajectories=2, dt=0.1, horizon=0.2, fine_dt=0.1
    )
    path = tmp_path / "shard-00000.safetensors"
    with safe_open(path, "pt") as file:
        own, states = json.loads(file.metadata()["about"]), file.get_tensor("u")
    states = states if u is None else u
    own |= {"sha256": tensor_hash(states), **about}
    save_file({"u": states}, path, {"about": json.dumps(own)})
    with pytest.raises(at.CheckpointError, match=fault):
        FineData.open(tmp_path).runs()
    assert data.plan.steps == 2
