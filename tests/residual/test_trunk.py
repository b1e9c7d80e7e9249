"""Where stages end, by shapes alone and in networks."""

import pytest
import torch
from torch import nn
from torch.nn.functional import avg_pool1d, pad

from attractor.residual import probe
from attractor.residual.stages import stage_numbers

SHAPES = {
    "channels x 4, a quarter of the pixels": ([(16, 32, 32), (64, 16, 16)], [0, 1]),
    "the same, channels last": ([(32, 32, 16), (16, 16, 64)], [0, 1]),
    "up again": ([(64, 16, 16), (16, 32, 32)], [0, 1]),
    "one axis": ([(64, 128), (128, 64), (256, 32)], [0, 1, 2]),
    "volumes": ([(16, 8, 8, 8), (128, 4, 4, 4)], [0, 1]),
    "time alone is pooled": ([(16, 8, 4, 4), (32, 4, 4, 4)], [0, 1]),
    "height alone is pooled": ([(16, 64, 100), (32, 32, 100)], [0, 1]),
    "fewer tokens": ([(64, 16), (16, 64), (16, 64)], [0, 1, 1]),
    "half of the tokens": ([(64, 16), (32, 16)], [0, 1]),
    "channels change their place": ([(8, 4, 4), (4, 4, 8), (8, 4, 4)], [0, 0, 0]),
    "an image becomes tokens": ([(8, 4, 6), (24, 8), (8, 24), (4, 6, 8)], [0, 0, 1, 1]),
    "windows of as many places": ([(32, 2, 2), (32, 1, 4)], [0, 0]),
    "only channels change": ([(8, 4, 4), (16, 4, 4)], [0, 1]),
    "only places change": ([(8, 4, 4), (8, 2, 2)], [0, 1]),
    "vectors": ([(8,), (8,), (16,)], [0, 0, 1]),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_stages_by_shapes(kind):
    shapes, stages = SHAPES[kind]
    assert stage_numbers(shapes) == stages


@pytest.mark.parametrize(
    ("old", "new"),
    [((64, 128), (128, 64)), ((16, 8), (8, 16)), ((4, 4, 8), (2, 8, 8)), ((16, 64, 100), (32, 32, 100))],
)
def test_operations_between_blocks_resolve_ambiguous_shapes(old, new):
    """The same two shapes are one stage or two."""
    assert stage_numbers([old, new], [False, True]) == [0, 1]
    assert stage_numbers([old, new], [False, False]) == [0, 0]


def test_space_becomes_depth():
    """Features in another order, but with other channels and places."""
    assert stage_numbers([(16, 32, 32), (64, 16, 16)], [False, False]) == [0, 1]


# Networks


class Block(nn.Module):
    """``x + conv(conv(x))``, projected where shapes change."""

    def __init__(self, conv, inputs, outputs, stride=1, kernel=3, padding=1):
        super().__init__()
        self.conv = conv(inputs, outputs, kernel, stride, padding)
        self.last = conv(outputs, outputs, 1)
        changes = inputs != outputs or stride != 1
        self.shortcut = conv(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x):
        return self.shortcut(x) + self.last(self.conv(x.relu()).relu())


class Mix(nn.Module):
    """``x + mlp(x)`` of the last axis."""

    def __init__(self, width, norm=False):
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class PadBlock(nn.Module):
    """A shortcut that is cut and padded: nothing is learnt in it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, 2, 1)

    def forward(self, x):
        return pad(x[:, :, ::2], (0, 0, 0, 8)) + self.conv(x.relu())


class ChannelsLast(nn.Module):
    """A block of images ``[batch, height, width, channels]``."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1), nn.Conv2d(outputs, outputs, 1)
        )
        changes = inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x):
        x = x.permute(0, 3, 1, 2)
        f, x = self.block(x.relu()), self.shortcut(x)
        return x.permute(0, 2, 3, 1).contiguous() + f.permute(0, 2, 3, 1).contiguous()


NETWORKS = {
    "one axis": (
        lambda: [Block(nn.Conv1d, 8, 8), Block(nn.Conv1d, 8, 16, 2), Block(nn.Conv1d, 16, 16)],
        (8, 16), [0, 1, 1],
    ),
    "four times the channels": (
        lambda: [Block(nn.Conv2d, 4, 4), Block(nn.Conv2d, 4, 16, 2), Block(nn.Conv2d, 16, 16)],
        (4, 8, 8), [0, 1, 1],
    ),
    "channels last": (
        lambda: [ChannelsLast(4, 4), ChannelsLast(4, 16, 2), ChannelsLast(16, 16)],
        (8, 8, 4), [0, 1, 1],
    ),
    "height alone is pooled": (
        lambda: [Block(nn.Conv2d, 4, 4), Block(nn.Conv2d, 4, 8, (2, 1)), Block(nn.Conv2d, 8, 8)],
        (4, 8, 6), [0, 1, 1],
    ),
    "volumes": (
        lambda: [Block(nn.Conv3d, 4, 4), Block(nn.Conv3d, 4, 8, (2, 1, 1)), Block(nn.Conv3d, 8, 8)],
        (4, 4, 3, 3), [0, 1, 1],
    ),
    "padded": (lambda: [Block(nn.Conv1d, 8, 8), PadBlock(), Block(nn.Conv1d, 16, 16)], (8, 16), [0, 1, 1]),
    "rows and columns in turn": (
        lambda: [Mix(6), Apply(lambda x: x.mT), Mix(10), Apply(lambda x: x.mT), Mix(6)],
        (10, 6), [0, 0, 0],
    ),
    "tokens are pooled": (
        lambda: [Mix(6), Mix(6), Apply(lambda x: avg_pool1d(x.mT, 2).mT), Mix(6), Mix(6)],
        (10, 6), [0, 0, 1, 1],
    ),
    "an image becomes tokens": (
        lambda: [Block(nn.Conv2d, 8, 8), Apply(lambda x: x.flatten(2).mT), Mix(8), Mix(8)],
        (8, 3, 4), [0, 0, 0],
    ),
    "an image becomes tokens behind a norm": (
        lambda: [Block(nn.Conv2d, 8, 8), nn.BatchNorm2d(8), Apply(lambda x: x.flatten(2).mT), Mix(8, True)],
        (8, 3, 4), [0, 0],
    ),
    "a layout with channels last": (
        lambda: [Block(nn.Conv2d, 8, 8), Apply(lambda x: x.permute(0, 2, 3, 1)), Mix(8)],
        (8, 3, 4), [0, 0],
    ),
    "space becomes depth": (
        lambda: [Block(nn.Conv2d, 4, 4), nn.PixelUnshuffle(2), Block(nn.Conv2d, 16, 16)],
        (4, 8, 8), [0, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NETWORKS)
def test_stages_of_networks(kind):
    make, shape, stages = NETWORKS[kind]
    torch.manual_seed(0)
    found = probe(nn.Sequential(*make()), [torch.randn(3, *shape)])
    assert found.stage.tolist() == stages
