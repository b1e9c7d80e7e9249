"""Gates that are intercepted, and gates that several blocks share."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from attractor.residual import resnet_cifar, vit
from attractor.residual.attach import SharedGate
from attractor.residual.insert import insert_gates
from tests.residual.lookalikes import HiddenResNet, ResNet


def stage(depth=4):
    """Blocks of one stage with a DIA gate, in float64."""
    torch.manual_seed(0)
    net = resnet_cifar(9 * depth + 2, 3, "dia", width=2).double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return net.layer1.train()


def gradients(blocks, run, x):
    out = run(blocks, x)
    return torch.autograd.grad(out.square().sum(), list(blocks.parameters()))


def features():
    return torch.randn(3, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def each(blocks, x, reentrant=False, which=None, **options):
    for i, block in enumerate(blocks):
        ask = which is None or i in which
        x = checkpoint(block, x, use_reentrant=reentrant, **options) if ask else block(x)
    return x


def nested(blocks, x):
    inner = lambda x: each(blocks[:2], x)
    middle = lambda x: each(blocks[2:], checkpoint(inner, x, use_reentrant=False))
    return checkpoint(middle, x, use_reentrant=False)


RUNS = {
    "each block": each,
    "each block, without stopping early": lambda b, x: each(b, x, early_stop=False),
    "the first": lambda b, x: each(b, x, which={0}),
    "one in the middle": lambda b, x: each(b, x, which={1}),
    "the last": lambda b, x: each(b, x, which={3}),
    "segments": lambda b, x: checkpoint_sequential(b, 2, x, use_reentrant=False),
    "nested": nested,
    "something between blocks": lambda b, x: checkpoint(
        lambda x: [x := 2 * block(x) for block in b][-1], x, use_reentrant=False
    ),
    "by name": lambda b, x: [x := checkpoint(block, x=x, use_reentrant=False) for block in b][-1],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_memory_under_checkpointing(name):
    """The memory of an LSTM goes from block to block, beside their inputs."""
    blocks, x = stage(), features()
    run = RUNS[name]
    plain = lambda b, x: b(x)
    if name == "something between blocks":
        plain = lambda b, x: [x := 2 * block(x) for block in b][-1]
    want = gradients(copy.deepcopy(blocks), plain, x)
    found = gradients(blocks, run, x)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert blocks[0].gate.memory is None
    assert not len(blocks[0].gate.memories._initial)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_a_memory_under_checkpointing_on_a_gpu(name):
    """There a thread of its own runs the backward pass, and blocks again."""
    blocks, x = stage().cuda(), features().cuda()
    plain = lambda b, x: b(x)
    if name == "something between blocks":
        plain = lambda b, x: [x := 2 * block(x) for block in b][-1]
    want = gradients(copy.deepcopy(blocks), plain, x)
    for one, other in zip(gradients(blocks, RUNS[name], x), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert not len(blocks[0].gate.memories._initial)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["each block", "the last"])
def test_reentrant_checkpointing_of_single_blocks_raises_on_a_gpu(name):
    blocks, x = stage().cuda(), features().cuda().requires_grad_()
    with pytest.raises(RuntimeError, match=r"DIA gate.*use_reentrant=False.*whole stages"):
        REENTRANT[name](blocks, x).square().sum().backward()


def test_two_backward_passes_through_one_graph():
    blocks, x = stage(), features()
    loss = each(blocks, x).square().sum()
    first = torch.autograd.grad(loss, list(blocks.parameters()), retain_graph=True)
    blocks(x)  # another forward between
    for one, other in zip(torch.autograd.grad(loss, list(blocks.parameters())), first):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_two_forwards_before_their_backwards():
    """Each block is run again with the memory of its own pass."""
    blocks, x = stage(), features()
    want = [torch.autograd.grad(blocks(s * x).square().sum(), list(blocks.parameters())) for s in (1, 2)]
    losses = [each(blocks, s * x).square().sum() for s in (1, 2)]
    for i in (0, 1):
        for one, other in zip(torch.autograd.grad(losses[i], list(blocks.parameters())), want[i]):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


REENTRANT = {
    "each block": lambda b, x: each(b, x, reentrant=True),
    "the first": lambda b, x: each(b, x, reentrant=True, which={0}),
    "one in the middle": lambda b, x: each(b, x, reentrant=True, which={1}),
    "the last": lambda b, x: each(b, x, reentrant=True, which={3}),
    "segments": lambda b, x: checkpoint_sequential(b, 2, x, use_reentrant=True),
    "inside of another": lambda b, x: checkpoint(
        lambda x: each(b, x, reentrant=True), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", REENTRANT)
def test_reentrant_checkpointing_of_single_blocks_raises(name):
    blocks, x = stage(), features().requires_grad_()
    with pytest.raises(RuntimeError, match=r"DIA gate.*use_reentrant=False.*whole stages"):
        REENTRANT[name](blocks, x).square().sum().backward()
    assert blocks[0].gate.memory is None


def test_reentrant_checkpointing_of_a_whole_stage():
    blocks, x = stage(), features().requires_grad_()
    blocks(x).square().sum().backward()
    want, x.grad = x.grad, None
    checkpoint(blocks, x, use_reentrant=True).square().sum().backward()
    torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_compiled_one_by_one(reentrant):
    """Compiled code knows no storages: what it cannot find raises, and does not start from nothing."""
    want = gradients(stage(), lambda b, x: b(x), features())
    torch._dynamo.reset()
    blocks, x = stage(), features().requires_grad_()
    compiled = [torch.compile(block, backend="aot_eager") for block in blocks]
    run = lambda _, x: [x := block(x) for block in compiled][-1]
    for one, other in zip(gradients(blocks, run, x), want):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    around = torch.compile(lambda x: each(blocks, x), backend="aot_eager")
    for one, other in zip(gradients(blocks, lambda _, x: around(x), x), want):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"DIA gate.*use_reentrant=False.* whole stages"):
        each(compiled, x, reentrant=reentrant).square().sum().backward()


def test_frozen_blocks_are_not_mistaken_for_reentrant_checkpointing():
    """Blocks that run without gradients, before others that have them, are what their owner wants."""
    blocks, x = stage(), features()
    with torch.no_grad():
        half = blocks[:2](x)
    out = blocks[2:](half)
    out.sum().backward()
    with torch.no_grad():
        half = blocks[1](blocks[0](x))
    half.requires_grad_()  # as for gradients with respect to features
    blocks[3](blocks[2](half)).sum().backward()
    assert half.grad is not None


def test_a_failed_forward_releases_the_memory():
    blocks, x = stage().eval(), features()
    hook = blocks[1].conv2.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        blocks(x)
    hook.remove()
    assert blocks[0].gate.memory is None
    with pytest.raises(RuntimeError, match="to have 2 channels"):
        blocks(torch.randn(3, 5, 5, 5, dtype=torch.float64))
    assert torch.equal(blocks(x), stage().eval()(x))


def test_no_memory_is_held_between_forwards():
    """Neither features nor their graph, whether or not a backward pass follows."""
    for net, x in (
        (stage(), features().requires_grad_()),
        (vit(8, 4, 8, 2, 2, 3, "dia"), torch.randn(2, 3, 8, 8)),
        (insert_gates(HiddenResNet(), "stepnet", "all"), torch.randn(2, 3, 8, 8)),
    ):
        seen = []
        part = next(m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear))
        part.register_forward_hook(lambda m, a, out, seen=seen: seen.append(weakref.ref(out)))
        out = net(x)
        del out
        gc.collect()
        assert all(ref() is None for ref in seen)


def test_references_to_shared_gates_have_needs_x():
    for gate, needs in (("dia", False), ("stepnet", True)):
        net = insert_gates(ResNet(), gate, "all")
        assert SharedGate(net.layer1[0].gate).needs_x is needs


@pytest.mark.parametrize("gate", ["se", "stepnet", "dia"])
def test_a_gated_part_called_outside_its_block_raises(gate):
    net = insert_gates(HiddenResNet(), gate, "all")
    with pytest.raises(
        RuntimeError, match=r"BatchNorm2d at the end of a gated branch was called outside"
    ):
        net.layer1[0].bn2(torch.rand(2, 8, 4, 4))
    written = insert_gates(ResNet(), gate, "all")  # the gate is not the part's, but in forward
    plain = nn.BatchNorm2d(8)
    x = torch.rand(2, 8, 4, 4)
    assert torch.equal(written.layer1[0].bn2(x), plain(x))


def test_checkpointing_inside_an_intercepted_block_raises():
    """The end of the branch is run again without its block, so x is not at hand."""

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))

        def forward(self, x):
            return x + (checkpoint(self.body, x, use_reentrant=False) if self.training else self.body(x))

    net = insert_gates(nn.Sequential(Inside()), "stepnet")
    out = net.train()(torch.randn(3, 4, 5, 5))
    with pytest.raises(RuntimeError, match="as checkpointing inside a block's forward does"):
        out.sum().backward()
