"""Forward functions with a gate in them: what is written, what is kept, and what is left alone."""

import copy
import functools
import inspect
import pickle
import traceback

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attractor.residual.branch import Source
from attractor.residual.insert import insert_gates
from attractor.residual.rewriting import gated_class
from tests.residual.lookalikes import Basic, HiddenResNet, ResNet

X = Source("x")


class Twice(nn.Module):
    """A gate of 2 that counts its calls."""

    def __init__(self):
        super().__init__()
        self.given = []

    def forward(self, f, x=None):
        self.given.append((f, x))
        return 2 * f


class Parts(nn.Module):
    """A convolution and its norm; heirs have a forward."""

    scale = 0.5

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.skip = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), None

    def f(self, x):
        return self.norm(self.conv(x))


def written(block, source=X):
    """The block with a gate in its forward."""
    kind = gated_class(block, "norm", source, flat=False)
    assert kind is not None
    block.gate, block.__class__ = Twice(), kind
    return block.eval()


def plain(block, x):
    """x and f as the parts make them."""
    return x, block.norm(block.conv(x))


def test_the_rewritten_source():
    class Block(Parts):
        def forward(self, x):
            """Add."""
            out = self.norm(self.conv(x))  # the end of the branch
            return x + out

    block, x = written(Block()), torch.randn(2, 4, 5, 5)
    start, f = plain(block, x)
    torch.testing.assert_close(block(x), start + 2 * f)
    assert torch.equal(block.gate.given[0][1], x)
    source = inspect.getsource(block.forward)
    assert "gate_x = x" in source
    assert "out = self.gate_branch(self.norm(self.conv(x)), gate_x)" in source
    assert isinstance(block, Block)
    assert type(block).__name__ == "Block"
    assert block.forward.__doc__ == "Add."
    assert type(block) is type(written(Block()))  # one class for all blocks of a kind


def test_defaults_closures_and_variables_stay():
    outside = torch.tensor(3.0)

    class Base(Parts):
        def extra(self, x):
            return x

    class Block(Base):
        def extra(self, x):
            raise AssertionError

        def forward(self, x, times: float = 2.0, *, shift: float = 0.25, gate_x=None):
            x = super().extra(x)
            keep = lambda y: y * outside
            return x + keep(self.norm(self.conv(x))) * times + shift

    block, x = written(Block()), torch.randn(2, 4, 5, 5)
    start, f = plain(block, x)
    torch.testing.assert_close(block(x), start + 2 * 3 * 2 * f + 0.25)
    torch.testing.assert_close(block(x, 1.0, shift=0.0), start + 2 * 3 * f)
    outside.fill_(1.0)
    torch.testing.assert_close(block(x), start + 2 * 2 * f + 0.25)
    assert inspect.signature(block.forward) == inspect.signature(Block().forward)


def test_an_argument_that_forward_reassigns():
    class Block(Parts):
        def forward(self, x):
            shortcut = x
            x = self.norm(self.conv(x))
            x += shortcut
            return x.relu()

    block, x = written(Block()), torch.randn(2, 4, 5, 5)
    start, f = plain(block, x)
    torch.testing.assert_close(block(x), (start + 2 * f).relu())
    assert torch.equal(block.gate.given[0][1], x)


def test_every_branch_of_a_forward_is_gated():
    class Block(Parts):
        def forward(self, x):
            if self.norm is not None and x.shape[0] > 2:
                return x + self.norm(self.conv(x)) if self.norm else x
            return x - self.norm(self.conv(x))

    block = written(Block())
    for n, sign in ((2, -1), (3, 1)):
        x = torch.randn(n, 4, 5, 5)
        start, f = plain(block, x)
        torch.testing.assert_close(block(x), start + sign * 2 * f)


def test_parts_behind_properties_are_rewritten():
    """As in MMDetection: ``self.norm2`` is a property."""

    class Block(Parts):
        @property
        def last(self):
            return getattr(self, "norm")  # noqa: B009

        def forward(self, x):
            def inner(x):
                return x + self.last(self.conv(x))

            return checkpoint(inner, x, use_reentrant=False) if x.requires_grad else inner(x)

    block, x = written(Block()), torch.randn(2, 4, 5, 5)
    start, f = plain(block, x)
    torch.testing.assert_close(block(x), start + 2 * f)
    block.zero_grad()
    (block(x.requires_grad_()) ** 2).sum().backward()  # run again in the backward pass, with the gate
    found = block.conv.weight.grad.clone()
    block.zero_grad()
    start, f = plain(block, x)
    ((start + 2 * f) ** 2).sum().backward()
    torch.testing.assert_close(found, block.conv.weight.grad)


def helper(self, x):
    return x + self.f(x)


def looped(self, x):
    out = x
    for part in (self.conv, self.norm):
        out = part(out)
    return x + out


def checkpointed(self, x):
    out = self.conv(x)
    return x + (checkpoint(self.norm, out, use_reentrant=False) if self.training else self.norm(out))


def private(self, x):
    self.__x = x
    return x + self.norm(self.conv(x))


@functools.wraps(helper)
def wrapped(self, x):
    return x + self.norm(self.conv(x))


HIDDEN = {"helper": helper, "looped": looped, "checkpointed": checkpointed, "private": private}


@pytest.mark.parametrize("forward", [*HIDDEN.values(), wrapped], ids=[*HIDDEN, "wrapped"])
def test_a_forward_that_hides_a_call_is_not_rewritten(forward):
    block = type("Block", (Parts,), {"forward": forward})()
    assert gated_class(block, "norm", X, flat=False) is None


def test_a_forward_without_source_or_of_one_instance_is_not_rewritten():
    names = {}
    exec("def forward(self, x):\n    return x + self.norm(self.conv(x))", names)
    block = type("Block", (Parts,), {"forward": names["forward"]})()
    assert gated_class(block, "norm", X, flat=False) is None

    class Block(Parts):
        def forward(self, x):
            return x + self.norm(self.conv(x))

    block = Block()
    block.forward = lambda x: x
    assert gated_class(block, "norm", X, flat=False) is None


class Mixed(Parts):
    """Another way in training, which is intercepted."""

    def forward(self, x):
        out = self.conv(x)
        return x + (self.get_submodule("norm")(out) if self.training else self.norm(out))


def test_rewritten_forwards_are_checked_in_training_mode():
    """A gate that only evaluation would call is intercepted instead."""
    net, x = insert_gates(nn.Sequential(Mixed()), lambda channels: Twice()), torch.randn(3, 4, 5, 5)
    assert type(net[0]) is Mixed
    for training in (False, True):
        net.train(training)
        net[0].gate.given.clear()
        net(x)
        assert len(net[0].gate.given) == 1


def test_tracebacks_show_the_rewritten_line():
    class Block(Parts):
        def forward(self, x):
            return x + self.norm(self.conv(x))

    block = written(Block())
    with pytest.raises(RuntimeError) as error:
        block(torch.randn(2, 5, 5, 5))
    lines = [frame.line for frame in traceback.extract_tb(error.tb)]
    assert "return x + self.gate_branch(self.norm(self.conv(x)), gate_x)" in lines


def test_copies_and_pickles_have_the_gate():
    net = insert_gates(ResNet(), "stepnet", "all", identity=False).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    want = net(x)
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(again(x), want)
        assert type(again.layer1[0]) is type(net.layer1[0])
        assert isinstance(again.layer1[0], Basic)


def test_rewritten_and_intercepted_networks_agree():
    torch.manual_seed(0)
    one, other = ResNet().double(), HiddenResNet().double()
    other.load_state_dict(one.state_dict())
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    for gate in ("se", "stepnet", "dia", "srm"):
        nets = []
        for net in (one, other):
            torch.manual_seed(1)
            nets.append(insert_gates(copy.deepcopy(net), gate, "all", identity=False))
        for training in (True, False):
            torch.testing.assert_close(
                nets[0].train(training)(x), nets[1].train(training)(x), rtol=1e-12, atol=1e-12
            )
        assert nets[0].state_dict().keys() == nets[1].state_dict().keys()
