"""What every gate and every network of this wing must bear: copies, threads, tracing, averages, checkpoints.

Gates come from `BY_NAME` and networks from `attractor.residual.__all__`, so that a new one is tested, too.
"""

import copy
import pickle
import threading
from functools import cache

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import attractor.residual as residual
from attractor.residual import Backbone, insert_gates, resnet_cifar, vit
from attractor.residual.attach import SharedGate
from attractor.residual.gates import BY_NAME, make_gate
from attractor.residual.insert import residual_blocks
from attractor.residual.resnet import BasicBlock
from attractor.residual.resnet import ResNet as OwnResNet
from tests.residual import lookalikes

INSERTED = {"identity": False, "where": "all"}


def basic(gate):
    """A network of the blocks of `resnet34`, whose size a test can bear."""
    return insert_gates(OwnResNet(BasicBlock, [2, 2], [6, 12], 3), gate, **INSERTED)


NETWORKS = {
    "resnet_cifar": lambda gate: resnet_cifar(20, 3, gate, width=2, where="all"),
    "preactivation": lambda gate: resnet_cifar(20, 3, gate, width=2, where="all", preactivation=True),
    "resnet34": basic,
    "backbone": lambda gate: Backbone(basic(gate), (0, 1)),
    "vit": lambda gate: vit(8, 4, 8, 2, 2, 3, gate),
    "vit, cls": lambda gate: vit(8, 4, 8, 2, 2, 3, gate, pool="cls"),
    "vit, mixer": lambda gate: vit(8, 4, 8, 2, 2, 3, mixer=gate),
    "written": lambda gate: insert_gates(lookalikes.ResNet(), gate, **INSERTED),
    "intercepted": lambda gate: insert_gates(lookalikes.HiddenResNet(), gate, **INSERTED),
}
FITS = lambda gate, network: not (gate == "iebn" and network.startswith("vit"))
CASES = [(gate, network) for network in NETWORKS for gate in BY_NAME if FITS(gate, network)]
sampled = pytest.mark.sampled(5)
every_gate = pytest.mark.parametrize("gate", BY_NAME)
every_network = pytest.mark.parametrize(("gate", "network"), CASES)


def stirred(net):
    """A network with weights and statistics as of a trained one, in float64."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
        for name, b in net.named_buffers():
            if "running" in name:
                b.add_(0.2 * torch.rand_like(b))
    return net.double()


@cache
def kept(gate, network):
    torch.manual_seed(0)
    return stirred(NETWORKS[network](gate)).eval()


def made(gate, network):
    """A network of its own for each test."""
    return copy.deepcopy(kept(gate, network))


def images(n=3, seed=0):
    return torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def flat(out):
    return torch.cat([o.flatten(1) for o in out], 1) if isinstance(out, tuple) else out


def alone(gate):
    """A gate by itself, and what it is called with."""
    torch.manual_seed(0)
    f, x = torch.randn(2, 3, 8, 5, 6, dtype=torch.float64).unbind(0)
    return stirred(make_gate(gate, 8)).eval(), f, x


def gated(gate, f, x):
    gate.start()
    return gate(f, x)


def test_all_networks_are_in_the_table():
    """One that is new in `attractor.residual` goes into NETWORKS."""
    functions = {
        name for name in residual.__all__ if callable(getattr(residual, name)) and name.islower()
    }
    tools = {"compare_profiles", "gated_blocks", "insert_gates", "kendall", "probe", "spearman"}
    assert functions - tools == {
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet_backbone",
        "resnet_cifar",
        "vit",
    }


def intercepted(net):
    return [m for m in net.modules() if hasattr(m, "handover")]


def test_both_ways_of_attaching_gates_occur():
    for gate in ("se", "stepnet", "dia"):
        assert not intercepted(kept(gate, "written"))
        assert len(intercepted(kept(gate, "intercepted"))) >= 4


# Copies


@sampled
@every_network
def test_copies(gate, network):
    net, x = made(gate, network), images()
    want = flat(net(x))
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(flat(again(x)), want)
        with torch.no_grad():
            for p in again.parameters():
                p.add_(0.1)
        assert not torch.equal(flat(again(x)), want)
        assert torch.equal(flat(net(x)), want)


@sampled
@every_network
def test_a_copy_during_a_forward(gate, network):
    """As `nn.DataParallel` and averages of weights may make them; nothing of the forward is in it."""
    net, x, found = made(gate, network), images(), []
    want = flat(net(x))
    parts = [m for m in net.modules() if not list(m.children())]
    hooks = [p.register_forward_hook(lambda *_: found.append(copy.deepcopy(net))) for p in parts[::11]]
    assert torch.equal(flat(net(x)), want)
    for hook in hooks:
        hook.remove()
    assert found
    for again in found[::2]:
        for part in again.modules():  # the hooks were copied, too
            for key, hook in list(part._forward_hooks.items()):
                if getattr(hook, "__name__", "") == "<lambda>":
                    del part._forward_hooks[key]
        assert torch.equal(flat(again(x)), want)


# Threads


@sampled
@every_network
def test_eight_threads_at_once(gate, network):
    net, wrong = made(gate, network), []
    inputs = [images(2 + i % 3, seed=i) for i in range(8)]
    with torch.no_grad():
        want = [flat(net(x)) for x in inputs]
    start = threading.Barrier(8)

    def run(i):
        start.wait()
        for _ in range(3):
            with torch.no_grad():
                if not torch.equal(flat(net(inputs[i])), want[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@every_gate
def test_a_gate_in_eight_threads(gate):
    own, f, x = alone(gate)
    sizes = range(3, 11)
    with torch.no_grad():
        want = {
            n: gated(own, f[..., :1].expand(-1, -1, -1, n), x[..., :1].expand(-1, -1, -1, n))
            for n in sizes
        }
    wrong = []

    def run(n):
        for _ in range(10):
            wide = lambda t: t[..., :1].expand(-1, -1, -1, n)
            with torch.no_grad():
                if not torch.equal(gated(own, wide(f), wide(x)), want[n]):
                    wrong.append(n)

    threads = [threading.Thread(target=run, args=(n,)) for n in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# torch.fx


@sampled
@every_network
def test_torch_fx_traces_twice(gate, network):
    net, x = made(gate, network), images()
    want = flat(net(x))
    for _ in range(2):
        graph = torch.fx.symbolic_trace(net)
        for _ in range(2):  # nothing waits for a second call
            assert torch.equal(flat(graph(x)), want)
        assert torch.equal(flat(net(x)), want)
    again = torch.fx.symbolic_trace(graph)  # of the code that was made
    assert torch.equal(flat(again(x)), want)
    assert torch.equal(flat(copy.deepcopy(graph)(x)), want)
    other = images(5, seed=1)
    assert torch.equal(flat(graph(other)), flat(net(other)))


@every_gate
def test_torch_fx_traces_a_gate_in_training(gate):
    class Block(nn.Module):
        def __init__(self, gate):
            super().__init__()
            self.gate = gate

        def forward(self, f, x):
            self.gate.start()
            out = self.gate(f, x)
            self.gate.start()
            return out

    own, f, x = alone(gate)
    block = Block(own).train()
    twin = copy.deepcopy(block)
    for _ in range(2):
        assert torch.equal(torch.fx.symbolic_trace(twin)(f, x), block(f, x))


# Averages


def averages(net):
    return (
        AveragedModel(net, use_buffers=True),
        AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
        AveragedModel(net, avg_fn=lambda old, new, n: 0.9 * old + 0.1 * new, use_buffers=True),
    )


@sampled
@every_network
def test_averages_of_weights_and_buffers(gate, network):
    net, x = made(gate, network), images()
    want = flat(net(x))
    for average in averages(net):
        for _ in range(5):
            average.update_parameters(net)
        torch.testing.assert_close(flat(average.eval()(x)), want, rtol=1e-10, atol=1e-10)
        assert average.module.state_dict().keys() == net.state_dict().keys()


@every_gate
def test_averages_of_a_gate_do_not_change_what_it_is(gate):
    """What is no number, such as frequencies and `identity`, is neither averaged nor rounded down."""
    for identity in (False, True):
        own = stirred(make_gate(gate, 16, identity=identity)).eval()
        f, x = torch.randn(2, 3, 16, 5, 6, dtype=torch.float64).unbind(0)
        want = gated(own, f, x)
        for average in averages(own):
            for _ in range(50):
                average.update_parameters(own)
            average.module.start()
            torch.testing.assert_close(average.eval()(f, x), want, rtol=1e-10, atol=1e-10)
        average = copy.deepcopy(own)
        for _ in range(50):  # as timm's ModelEmaV2
            for old, new in zip(average.state_dict().values(), own.state_dict().values()):
                old.copy_(0.9998 * old + 0.0002 * new)
        torch.testing.assert_close(gated(average, f, x), want, rtol=1e-10, atol=1e-10)
        other = make_gate(gate, 16, identity=not identity, dtype=torch.float64).eval()
        other.load_state_dict({k: (v + v) / 2 for k, v in own.state_dict().items()})
        torch.testing.assert_close(gated(other, f, x), want, rtol=1e-10, atol=1e-10)


@sampled
@every_network
def test_buffers_can_be_averaged(gate, network):
    """Batch normalisations' own counter is the only buffer that is not floats."""
    net = kept(gate, network)
    counters = {name for name, b in net.named_buffers() if not b.is_floating_point()}
    assert all(name.endswith("num_batches_tracked") for name in counters)


# Checkpointing


class Checkpointed(nn.Module):
    def __init__(self, part, reentrant):
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, *args):
        return checkpoint(self.part, *args, use_reentrant=self.reentrant)


def block_names(net):
    if hasattr(net, "layers"):
        return [name for name, m in net.named_modules() if name.endswith((".mix", ".think"))]
    return [block.name for block in residual_blocks(net)]


def wrap(net, names, reentrant):
    for name in names:
        holder, _, own = name.rpartition(".")
        holder = net.get_submodule(holder)
        holder._modules[own] = Checkpointed(holder._modules[own], reentrant)
    return net


def gradients(net, x):
    x = x.clone().requires_grad_()
    flat(net(x)).square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]


def stages_of(net):
    return (
        ["layers"]
        if hasattr(net, "layers")
        else [n for n, _ in net.named_children() if n[:5] == "layer"]
    )


@sampled
@every_network
def test_checkpointing_without_reentry_has_the_gradients_of_a_plain_run(gate, network):
    x, net = images(), made(gate, network).train()
    want = gradients(copy.deepcopy(net), x)
    names, stages = block_names(net), stages_of(net)
    for wrapped in (
        wrap(copy.deepcopy(net), names, False),
        wrap(copy.deepcopy(net), names[1::2], False),
        wrap(copy.deepcopy(net), stages, False),
        Checkpointed(copy.deepcopy(net), False),
        Checkpointed(wrap(copy.deepcopy(net), names, False), False),  # nested
    ):
        for found, expected in zip(gradients(wrapped, x), want, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for cell in (m for m in wrapped.modules() if hasattr(m, "memory")):
            assert cell.memory is None
            assert len(cell.memories._initial) == 0


@sampled
@every_network
def test_reentrant_checkpointing_has_the_gradients_of_a_plain_run_or_raises(gate, network):
    x, net = images(), made(gate, network).train()
    want = gradients(copy.deepcopy(net), x)
    names, stages = block_names(net), stages_of(net)
    for wrapped in (wrap(copy.deepcopy(net), stages, True), Checkpointed(copy.deepcopy(net), True)):
        for found, expected in zip(gradients(wrapped, x), want, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    shared = any(isinstance(m, SharedGate) for m in net.modules())
    for some in (names, names[:1], names[-1:], names[1::2]):
        wrapped = wrap(copy.deepcopy(net), some, True)
        if shared and any(hasattr(net.get_submodule(name).gate, "start") for name in some):
            with pytest.raises(RuntimeError, match=r"DIA gate.*use_reentrant=False.* whole stages"):
                gradients(wrapped, x)
        else:
            for found, expected in zip(gradients(wrapped, x), want, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@sampled
@every_network
def test_statistics_under_checkpointing_move_as_those_of_torch(gate, network):
    """A batch normalisation of a gate counts as often as the block's own do, in every kind of run."""
    for reentrant in (False, True):
        if reentrant and gate == "dia":
            continue
        net = made(gate, network).train()
        names = block_names(net)
        gradients(wrap(net, names, reentrant), images())
        for name in names:
            block = net.get_submodule(name)
            norms = [(n, m) for n, m in block.named_modules() if isinstance(m, nn.BatchNorm2d)]
            own = {m.num_batches_tracked.item() for n, m in norms if ".gate." not in n}
            gates = {m.num_batches_tracked.item() for n, m in norms if ".gate." in n}
            assert gates <= (own or {2})


@every_gate
def test_a_checkpointed_gate(gate):
    own, f, x = alone(gate)
    for part in (f, x):
        part.requires_grad_()
    own.train()
    run = lambda f, x: gated(own, f, x).square().sum()
    leaves = [f, *own.parameters()]
    want = torch.autograd.grad(run(f, x), leaves)
    for found, expected in zip(
        torch.autograd.grad(checkpoint(run, f, x, use_reentrant=False), leaves), want
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# Synchronised normalisations


@sampled
@every_network
def test_synchronised_normalisations(gate, network):
    net, x = made(gate, network), images()
    want = flat(net(x))
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in synced.modules())
    assert synced.state_dict().keys() == kept(gate, network).state_dict().keys()
    for again in (synced, copy.deepcopy(synced), pickle.loads(pickle.dumps(synced))):
        for _ in range(2):
            torch.testing.assert_close(flat(again(x)), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(flat(torch.fx.symbolic_trace(synced)(x)), want, rtol=1e-12, atol=1e-12)


# States


@sampled
@every_network
def test_state_dicts_round_trip_and_older_ones_load(gate, network):
    net, x = made(gate, network), images()
    want = flat(net(x))
    state = net.state_dict()
    facts = [k for k in state if k.endswith(".doubled")]
    assert facts
    older = {k: v for k, v in state.items() if k not in facts}
    floats = {k: v.double() if k in facts else v for k, v in state.items()}
    for saved in (state, older, floats, dict(state)):
        torch.manual_seed(1)
        other = NETWORKS[network](gate).double().eval()
        assert not torch.equal(flat(other(x)), want)
        other.load_state_dict(saved, strict=True)
        assert torch.equal(flat(other(x)), want)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**state, f"{facts[0]}er": torch.ones(1)})
    first = next(k for k in state if k not in facts)
    with pytest.raises(RuntimeError, match=rf"Missing key.*{first}"):
        other.load_state_dict({k: v for k, v in state.items() if k != first})


# The same numbers as a forward written by hand


def by_hand(net, x):
    """The networks of torchvision's blocks, step by step."""
    plain = nn.Module.__call__  # of parts that are intercepted, too
    x = net.relu(net.bn1(net.conv1(x)))
    for stage in (net.layer1, net.layer2):
        memory = None
        for block in stage:
            gate = getattr(block, "gate", None)
            f = plain(block.bn2, block.conv2(block.bn1(block.conv1(x)).relu()))
            x = x if block.downsample is None else plain(block.downsample, x)
            if gate is not None:
                memory = memory or getattr(gate, "owner", (gate,))[0]
                if gate is memory:
                    memory.start()
                f = f * memory.weights(f, x) if isinstance(gate, SharedGate) else f * gate.weights(f, x)
            x = (x + f).relu()
        if memory is not None:
            memory.start()
    return net.fc(x.mean((2, 3)))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("network", ["resnet34", "written", "intercepted"])
@every_gate
def test_against_a_reference_forward(gate, network):
    net, x = made(gate, network), images(4)
    with torch.no_grad():
        torch.testing.assert_close(net(x), by_hand(net, x), rtol=1e-12, atol=1e-12)
        net.train()
        twin = copy.deepcopy(net)
        torch.testing.assert_close(twin(x), by_hand(net, x), rtol=1e-12, atol=1e-12)
    for (name, ours), theirs in zip(twin.named_buffers(), net.buffers()):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)


# Compiled forms


@pytest.mark.filterwarnings("ignore:The TorchScript type system")  # of torch.fx.GraphModule
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.slow
@every_gate
def test_torch_jit_script(gate):
    net, x = made(gate, "written"), images()
    if gate == "dia":
        with pytest.raises(NotImplementedError, match=r"DIA passes a memory .* torch\.jit\.trace"):
            torch.jit.script(net)
        net = torch.fx.symbolic_trace(net)
    want = net(x)
    scripted = torch.jit.script(net)
    assert torch.equal(scripted(x), want)
    assert torch.equal(net(x), want)
    if gate not in ("dia", "iebn"):
        own, f, x = alone(gate)
        assert torch.equal(torch.jit.script(own)(f, x), own(f, x))
        with pytest.raises(
            NotImplementedError, match="cannot be scripted, since the source of its block"
        ):
            torch.jit.script(made(gate, "intercepted"))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.slow
@every_network
def test_traced_and_exported_networks(gate, network):
    net, x = made(gate, network), images()
    want = flat(net(x))
    traced = torch.jit.trace(net, x, check_trace=False)
    torch.testing.assert_close(flat(traced(x)), want, rtol=1e-12, atol=1e-12)
    exported = torch.export.export(net, (x,)).module()
    torch.testing.assert_close(flat(exported(x)), want, rtol=1e-12, atol=1e-12)
    assert torch.equal(flat(net(x)), want)


@pytest.mark.slow
@every_gate
@pytest.mark.parametrize("network", ["written", "intercepted", "resnet_cifar"])
def test_compiled_networks(gate, network):
    net, x = made(gate, network).train(), images()
    twin = copy.deepcopy(net)
    whole = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(whole(x), net(x), rtol=1e-10, atol=1e-10)
