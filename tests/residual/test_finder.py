"""`probe` and `insert_gates` recognise the same residual blocks, and give them the same names."""

import copy
import warnings

import pytest
import torch
from torch import nn

from attractor.residual import gated_blocks, insert_gates, probe, resnet34, resnet_cifar, vit
from attractor.residual.finder import residual_blocks
from tests.residual import lookalikes
from tests.residual.test_branch import Diffusion, Kuangliu, Named, Timed

IMAGES = torch.randn(2, 3, 32, 32)
TOKENS = torch.randn(2, 7, 16)


class PreNormLayer(nn.Module):
    """Attention and MLP as parts that do not add."""

    def __init__(self, dim=16):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Output(nn.Module):
    """The end of a part in BERT, where it adds."""

    def __init__(self, dim, inside):
        super().__init__()
        self.dense, self.norm = nn.Linear(inside, dim), nn.LayerNorm(dim)

    def forward(self, f, x):
        return self.norm(self.dense(f) + x)


class BertLayer(nn.Module):
    """Attention and MLP add in modules of their own."""

    def __init__(self, dim=16):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.attention_output, self.up = Output(dim, dim), nn.Linear(dim, 2 * dim)
        self.output = Output(dim, 2 * dim)

    def forward(self, x):
        x = self.attention_output(self.attention(x, x, x, need_weights=False)[0], x)
        return self.output(self.up(x).relu(), x)


class ListedLayer(nn.Module):
    """Attention and MLP as a list, as in T5."""

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([SelfAttention(), FeedForward()])

    def forward(self, x):
        for part in self.layer:
            x = part(x)
        return x


class SelfAttention(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class FeedForward(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.linear(x).relu()


class Patches(nn.Module):
    """A vision transformer."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.layers = nn.Sequential(*(PreNormLayer() for _ in range(3)))

    def forward(self, images):
        return self.layers(self.patches(images).flatten(2).mT).mean(1)


class Loop(nn.Module):
    """The network adds the outputs of its blocks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Hybrid(nn.Module):
    """Blocks of convolutions, then of attention."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.convolutions = nn.Sequential(Named(16, 16), Named(16, 16))
        self.layers = nn.Sequential(PreNormLayer(), PreNormLayer())

    def forward(self, x):
        return self.layers(self.convolutions(self.stem(x)).flatten(2).mT)


def kuangliu():
    return nn.Sequential(nn.Conv2d(3, 8, 1), Kuangliu(8, 8), Kuangliu(8, 16, 2), Kuangliu(16, 16))


def encoder(first=False):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


# Networks of convolutions, whose blocks take gates.
CONVOLUTIONAL = {
    "torchvision's names": lambda: (lookalikes.ResNet(), IMAGES),
    "no source": lambda: (lookalikes.HiddenResNet(), IMAGES),
    "ghost": lambda: (lookalikes.GhostNet(), IMAGES),
    "kuangliu": lambda: (kuangliu(), IMAGES),
    "resnet34": lambda: (resnet34(10), IMAGES),
    "cifar": lambda: (resnet_cifar(20), IMAGES),
    "cifar, pre-activation": lambda: (resnet_cifar(20, preactivation=True), IMAGES),
    "diffusion": lambda: (Diffusion(Timed), {"x": IMAGES, "time": torch.rand(2)}),
}
# Networks with blocks that take no gates.
OTHERS = {
    "post-norm": lambda: (encoder(), TOKENS),
    "pre-norm": lambda: (encoder(first=True), TOKENS),
    "plain": lambda: (nn.Sequential(*(PreNormLayer() for _ in range(3))), TOKENS),
    "bert": lambda: (nn.Sequential(*(BertLayer() for _ in range(3))), TOKENS),
    "t5": lambda: (nn.Sequential(*(ListedLayer() for _ in range(3))), TOKENS),
    "patches": lambda: (Patches(), IMAGES),
    "vit": lambda: (vit(patch=8, dim=16, depth=2), IMAGES),
    "loop": lambda: (Loop(), IMAGES),
    "hybrid": lambda: (Hybrid(), IMAGES),
}


def names(blocks):
    return list(dict.fromkeys(block.home for block in blocks))


@pytest.mark.parametrize("kind", [*CONVOLUTIONAL, *OTHERS])
def test_probe_and_insert_gates_recognise_the_same_blocks(kind):
    torch.manual_seed(0)
    network, batch = {**CONVOLUTIONAL, **OTHERS}[kind]()
    network.eval()
    profile = probe(network, batch)
    blocks = residual_blocks(network, batch)
    assert names(blocks) == list(profile.names)
    assert (kind in CONVOLUTIONAL) == (not any(block.obstacle for block in blocks))
    if kind in CONVOLUTIONAL and kind != "diffusion":
        alone = residual_blocks(network)
        assert [block.name for block in alone] == [block.name for block in blocks]
        assert names(alone) == list(profile.names)


@pytest.mark.parametrize("kind", CONVOLUTIONAL)
def test_a_profile_selects_the_blocks_that_it_measured(kind):
    torch.manual_seed(0)
    network, batch = CONVOLUTIONAL[kind]()
    network.eval()
    profile, example = probe(network, batch), batch if kind == "diffusion" else None
    gated = insert_gates(copy.deepcopy(network), "se", where=profile, example=example)
    assert list(gated_blocks(gated)) == list(profile.names)
    within = profile.names[-1].rpartition(".")[0]
    if "." in within or within.startswith("layer"):
        profile = probe(network, batch, within=within, granularity="addition")
        gated = insert_gates(copy.deepcopy(network), "se", where=profile, example=example)
        assert all(name.startswith(within) for name in gated_blocks(gated))


def test_compiled_blocks():
    network = lookalikes.GhostNet().eval()
    names_before = names(residual_blocks(network, IMAGES))
    for stage in network.blocks:
        for i, block in enumerate(stage):
            stage[i] = torch.compile(block, backend="eager")
    assert names(residual_blocks(network, IMAGES)) == names_before
    assert list(probe(network, IMAGES).names) == names_before


def test_a_profile_of_another_network_is_refused():
    profile = probe(lookalikes.GhostNet(), IMAGES)
    with pytest.raises(
        ValueError, match=r"profile of GhostNet measured blocks.0.0.* of this ResNet are layer1.0, la"
    ):
        insert_gates(lookalikes.ResNet(), "se", where=profile)


def test_errors_state_why_blocks_take_no_gate():
    network = encoder()
    with pytest.raises(
        ValueError, match=r"no residual blocks of convolutions: layers.0 adds .*; layers.1 adds"
    ):
        insert_gates(network, "se", where=probe(network, TOKENS), example=TOKENS)
    with pytest.raises(ValueError, match="adds the outputs of several blocks in its own forward"):
        insert_gates(Loop(), "se")
    hybrid = Hybrid()
    with pytest.warns(UserWarning, match=r"2 modules that look like residual blocks .*: layers.0 adds"):
        insert_gates(hybrid, "se", where=probe(hybrid, IMAGES), example=IMAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert list(gated_blocks(hybrid)) == ["convolutions.0", "convolutions.1"]


def test_the_search_does_not_change_the_network():
    network = lookalikes.ResNet().train()
    state = copy.deepcopy(network.state_dict())
    residual_blocks(network, IMAGES)
    assert network.training
    assert not any(module._forward_pre_hooks for module in network.modules())
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


TIMM = ["resnet18", "resnetv2_50", "vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_networks_of_timm(name):
    timm = pytest.importorskip("timm")
    network = timm.create_model(name, num_classes=5).eval()
    batch = torch.randn(2, 3, 224, 224)
    assert names(residual_blocks(network, batch)) == list(probe(network, batch).names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "vit_b_16", "convnext_tiny"])
def test_networks_of_torchvision(name):
    models = pytest.importorskip("torchvision").models
    network = models.get_model(name, weights=None).eval()
    batch = torch.randn(2, 3, 224, 224)
    assert names(residual_blocks(network, batch)) == list(probe(network, batch).names)
