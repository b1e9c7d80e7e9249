"""The vision transformer: its formula, its gates, StepNet in place of attention, and any attention."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import attractor as at
from attractor.residual.gates import BY_NAME, DIA, SE, StepNet
from attractor.residual.vit import vit

GATES = [name for name in BY_NAME if name != "iebn"]
SMALL = {
    "image_size": 8,
    "patch": 2,
    "dim": 16,
    "depth": 3,
    "heads": 2,
    "num_classes": 5,
    "in_channels": 1,
}
IMAGES = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def small(*args, **options):
    torch.manual_seed(1)
    return vit(*args, **{**SMALL, **options})


def trained(model):
    """Somewhere else than at the start, where StepNet's scales are 0."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_parameters():
    """Patches, positions, and layers of 12 dim² + 13 dim, as everywhere."""
    d, classes, tokens = 192, 10, 64
    stem = 3 * 16 * d + d + tokens * d
    layer = 12 * d * d + 13 * d
    assert count(vit()) == stem + 9 * layer + 2 * d + d * classes + classes
    assert count(vit(pool="cls")) == count(vit()) + 2 * d  # the token and its position
    # attention, 4 d² + 4 d, gives way to values, d² + d, and StepNet, 6 d
    assert count(vit(mixer="stepnet")) == count(vit()) - 9 * (3 * d * d + 3 * d) + 9 * 6 * d
    assert count(vit(gate="stepnet")) == count(vit()) + 9 * 2 * 6 * d
    assert count(vit(gate="stepnet", where="network")) == count(vit()) + 9 * 6 * d


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_formula(pool):
    model = small(pool=pool).double().eval()
    images = IMAGES.double()
    windows = images.unfold(2, 2, 2).unfold(3, 2, 2).reshape(3, 16, 4)  # patches, row by row
    x = windows @ model.patches.weight.flatten(1).T + model.patches.bias
    if pool == "cls":
        x = torch.cat((model.cls.expand(3, 1, -1), x), 1)
    x = x + model.positions
    for layer in model.layers:
        query, key, value = layer.mix.branch.project(layer.mix.norm(x)).chunk(3, -1)
        seen = []
        for head in range(2):
            q, k, v = (t[..., 8 * head : 8 * head + 8] for t in (query, key, value))
            seen.append((q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ v)
        x = x + layer.mix.branch.out(torch.cat(seen, -1))
        x = x + layer.think.branch(layer.think.norm(x))
    x = model.norm(x)
    torch.testing.assert_close(model(images), model.head(x[:, 0] if pool == "cls" else x.mean(1)))


def test_stepnet_in_place_of_attention():
    """Eq. 32: x + values * F, with F the step size of StepNet from the means of x and x + values."""
    model = trained(small(mixer="stepnet")).double().eval()
    x = torch.randn(3, 16, 16, dtype=torch.float64)
    step = model.layers[0].mix
    assert isinstance(step.branch, nn.Linear)
    assert isinstance(step.gate, StepNet)
    values = step.branch(step.norm(x))
    as_maps = [t.transpose(1, 2)[..., None] for t in (values, x)]
    weights = step.gate.weights(*as_maps)[..., 0].transpose(1, 2)
    assert weights.shape == (3, 1, 16)  # one for each channel of an image
    assert (weights[0] - weights[1]).abs().max() > 1e-3
    torch.testing.assert_close(step(x), x + values * weights)
    assert all(layer.think.gate is None for layer in model.layers)


def test_patches_see_each_other_only_through_a_mean():
    """With StepNet as mixer a patch is told of the others by what the order of patches cannot change."""
    model = trained(small(mixer="stepnet")).eval()
    x = torch.randn(2, 16, 16)
    order = torch.randperm(16)
    torch.testing.assert_close(
        model.layers(x[:, order]), model.layers(x)[:, order], rtol=1e-4, atol=1e-5
    )
    moved = x.clone()
    moved[:, 3] += 1
    assert ((model.layers(moved) - model.layers(x))[:, 7].abs() > 1e-6).any()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate, pool):
    plain, gated = small(pool=pool), small(gate=gate, pool=pool)
    assert all(torch.equal(p, gated.state_dict()[name]) for name, p in plain.state_dict().items())
    gated(IMAGES).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gated.parameters())
    same = small(gate=gate, pool=pool, gate_options={"identity": True})
    for mode in (False, True):
        torch.testing.assert_close(
            same.train(mode)(IMAGES), plain.train(mode)(IMAGES), rtol=0, atol=1e-6
        )
    assert (gated.eval()(IMAGES) - plain.eval()(IMAGES)).abs().max() > 1e-5


def test_gates_see_a_map_of_the_patches():
    class Spy(nn.Module):
        def forward(self, f, x):
            self.given = f, x
            return f

    model = small(gate=lambda channels: Spy(), image_size=(8, 4))
    model(torch.rand(2, 1, 8, 4))
    f, x = model.layers[0].mix.gate.given
    assert f.shape == x.shape == (2, 16, 4, 2)
    tokens = model.patches(torch.zeros(2, 1, 8, 4)).flatten(2).transpose(1, 2)
    step = model.layers[1].think
    step(tokens)
    torch.testing.assert_close(step.gate.given[1], model.patches(torch.zeros(2, 1, 8, 4)))


def test_a_shared_gate():
    model = small(gate="dia")
    assert len([m for m in model.modules() if isinstance(m, DIA)]) == 2  # of mixers, and of networks
    first = model(IMAGES)
    torch.testing.assert_close(model(IMAGES), first)  # nothing is remembered from one image to the next
    model(IMAGES[:2])
    assert torch.equal(copy.deepcopy(model)(IMAGES), first)


@pytest.mark.parametrize("where", ["both", "mixer", "network"])
def test_selection_of_blocks(where):
    model = small(gate="se", where=where)
    for layer in model.layers:
        assert isinstance(layer.mix.gate, SE) == (where != "network")
        assert isinstance(layer.think.gate, SE) == (where != "mixer")
    stepping = small(gate="se", mixer=partial(StepNet, adaptor="c"))
    assert [type(step.gate) for step in (stepping.layers[0].mix, stepping.layers[0].think)] == [
        StepNet,
        SE,
    ]
    assert stepping.layers[0].mix.gate.adaptor == "c"


@pytest.mark.parametrize("pde", ["diffusion", "wave", "reaction_diffusion", None])
def test_any_attention(pde):
    model = small(attention=lambda dim, heads: at.attention.PDEAttention(dim, heads, pde=pde, steps=2))
    assert len([m for m in model.modules() if isinstance(m, at.attention.PDEAttention)]) == 3
    model(IMAGES).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    if pde is None:  # the same layer, under other names
        torch.testing.assert_close(model(IMAGES), small()(IMAGES))


@pytest.mark.parametrize(
    "options",
    [{"mixer": "stepnet", "pool": "cls"},
     *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {"gate": "stepnet"}, {"gate": "dia"}))],
)  # fmt: skip
@pytest.mark.slow
def test_compiles_without_graph_breaks_and_copies(options):
    model = small(**options)
    whole = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(whole(IMAGES), model(IMAGES))
    again = small(**options)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(IMAGES), model.eval()(IMAGES))
    with torch.autocast("cpu", torch.bfloat16):
        half = model.train()(IMAGES)
    assert half.dtype == torch.bfloat16
    half.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    double = small(**options, dtype=torch.float64).eval()
    assert double(IMAGES.double()).dtype == torch.float64


def test_refused_arguments():
    for options, message in (
        ({"image_size": 9}, "images of 9 x 9 cannot be cut into patches of 2 x 2"),
        ({"heads": 3}, "dim = 16 must be a multiple of heads = 3"),
        ({"depth": 0}, "depth = 0 must be a whole number of at least 1"),
        ({"pool": "max"}, "pool 'max' is not one of mean, cls"),
        ({"where": "all"}, "where 'all' is not one of both, mixer, network"),
        ({"gate": "iebn"}, "IEBN replaces batch normalisations, but a ViT has none"),
        ({"mixer": "attend"}, "no gate is called 'attend'"),
        ({"mixer": "stepnet", "attention": at.attention.PDEAttention}, "exclude each other"),
        (
            {"mixer": "stepnet", "gate": "se", "where": "mixer"},
            "is a gate itself; use where='network' for another gate",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            small(**options)
    with pytest.raises(TypeError, match="is a Linear, but each layer needs a module of its own"):
        small(attention=nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match="images have 16 x 8 pixels, but this model has position embeddings for 8 x 8"
    ):
        small()(torch.rand(1, 1, 16, 8))
