"""The kernel for one query equals the dense map, whatever keys are valid, and serves generation.

On a GPU the kernel runs there; elsewhere in Triton's interpreter (see conftest.py).
"""

import pytest
import torch

GPU = torch.cuda.is_available()
pytest.importorskip("triton")

from attractor.attention import explain, kernels, pde_attention, pdes  # noqa: E402
from attractor.attention.kernels import decoding, stencils  # noqa: E402
from attractor.attention.pdes.evolution import Evolution  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Use kernels wherever they can run."""
    monkeypatch.setattr(kernels, "DEVICES", ("cuda", "cpu"))


def tensors(heads, shared, keys, dim=16, depth=16, batch=2, dtype=torch.float32):
    torch.manual_seed(0)
    query = torch.randn(batch, heads, 1, dim, device=DEVICE, dtype=dtype)
    key = torch.randn(batch, keys, shared, dim, device=DEVICE, dtype=dtype).transpose(1, 2)
    value = torch.randn(batch, keys, shared, depth, device=DEVICE, dtype=dtype).transpose(1, 2)
    return query, key, value


def dense(query, key, value, **options):
    exact = (x.double() for x in (query, key, value))
    return pde_attention(*exact, method="dense", enable_gqa=True, **options)


def padding(kind, keys):
    valid = torch.ones(2, keys, dtype=torch.bool)
    if kind == "left":
        valid[0, : keys // 3] = False
    if kind == "right":
        valid[1, -(keys // 3) :] = False
    if kind == "holes":
        valid = torch.rand(2, keys, generator=torch.Generator().manual_seed(1)) > 0.3
    if kind == "none of one row":
        valid[0] = False
    return valid.to(DEVICE)


@pytest.mark.parametrize("kind", [None, "left", "right", "holes", "none of one row"])
@pytest.mark.parametrize(
    ("heads", "shared", "keys", "steps", "name"),
    [
        (4, 2, 300, 4, "diffusion"),
        pytest.param(2, 2, 70, 3, "advection_diffusion", marks=pytest.mark.slow),
        pytest.param(3, 1, 5, 4, "wave", marks=pytest.mark.slow),
        pytest.param(20, 1, 65, 1, "diffusion", marks=pytest.mark.slow),
    ],
)
def test_one_query_equals_dense(heads, shared, keys, steps, name, kind):
    query, key, value = tensors(heads, shared, keys, dim=24, depth=40)
    valid = None if kind is None else padding(kind, keys)
    options = {"pde": name, "steps": steps, "scale": 0.3, "key_padding": valid}
    assert explain(query, key, value, enable_gqa=True, **options).one_query
    found = pde_attention(query, key, value, enable_gqa=True, **options)
    torch.testing.assert_close(found.double(), dense(query, key, value, **options), atol=2e-6, rtol=2e-6)


def test_the_mask_of_a_model_is_a_row_of_valid_keys():
    query, key, value = tensors(4, 2, 100)
    valid = padding("left", 100)
    mask = padding("holes", 100)[:, None, None]
    options = {"pde": "wave", "steps": 2, "attn_mask": mask, "key_padding": valid}
    assert explain(query, key, value, enable_gqa=True, **options).one_query
    found = pde_attention(query, key, value, enable_gqa=True, **options)
    torch.testing.assert_close(found.double(), dense(query, key, value, **options), atol=2e-6, rtol=2e-6)


def test_chunks_of_keys_are_added_up(monkeypatch):
    query, key, value = tensors(2, 1, 700)
    table = stencils.stencil_table(Evolution(pdes.Diffusion(0.2), 4, 1.0), value)
    monkeypatch.setattr(decoding, "PROGRAMS", 1)
    whole = decoding.decode(query, key, value, None, table, 0.25)
    monkeypatch.setattr(decoding, "PROGRAMS", 512)
    torch.testing.assert_close(decoding.decode(query, key, value, None, table, 0.25), whole)


def test_a_hidden_key_changes_no_bit():
    query, key, value = tensors(2, 2, 90)
    valid = padding("left", 90)
    table = stencils.stencil_table(Evolution(pdes.Diffusion(0.2), 4, 1.0), value)
    found = decoding.decode(query, key, value, valid, table, 0.25)
    for x in (key, value):
        x[0, :, :30] = torch.nan
    assert torch.equal(decoding.decode(query, key, value, valid, table, 0.25), found)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"window": (8, 0)},
        {"dropout_p": 0.1},
        {"attn_mask": torch.zeros(1, 100)},
        {"pde": "reaction_diffusion"},
        {"pde": pdes.Diffusion(torch.full((4, 1, 1), 0.1))},
        {"steps": 9},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_calls_take_other_ways(options):
    query, key, value = tensors(4, 2, 100)
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if isinstance(options.get("pde"), pdes.Diffusion):
        options["pde"] = pdes.Diffusion(options["pde"].alpha.to(DEVICE))
    options = {"pde": "diffusion", **options}
    assert not explain(query, key, value, enable_gqa=True, **options).one_query
    query.requires_grad_()
    assert not explain(query, key, value, enable_gqa=True, pde="diffusion").one_query


@pytest.mark.slow
def test_the_operator_keeps_its_promises():
    query, key, value = tensors(4, 2, 100)
    table = stencils.stencil_table(Evolution(pdes.Diffusion(0.2), 2, 1.0), value)
    checks = {"test_utils": ("test_schema", "test_faketensor")}  # it has no derivative
    for valid in (None, padding("left", 100)):
        torch.library.opcheck(
            decoding.decode_operator, (query, key, value, valid, table, 0.25), **checks
        )
