"""Gates in networks that exist: nothing changes on the first day, and everything works as before."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from attractor.residual.attach import SharedGate
from attractor.residual.gates import BY_NAME, IEBN, SE, StepNet
from attractor.residual.insert import gated_blocks, insert_gates, residual_blocks
from attractor.residual.resnet import resnet50, resnet_cifar

GATES = list(BY_NAME)


def unsettled(model):
    """Normalisations with statistics and weights as of a trained network."""
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.normal_(norm.running_mean, 0, 0.2)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.uniform_(norm.weight, 0.3, 1.0)
        nn.init.normal_(norm.bias, 0, 0.2)
    return model


class TheirBlock(nn.Module):
    """A block as torchvision's and timm's: no slot for a gate, in-place sums, the shortcut computed last."""

    def __init__(self, inputs, outputs, stride=1, bottleneck=True):
        super().__init__()
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        inside = outputs // 4 if bottleneck else outputs
        self.norms = len(kernels)
        for i, kernel in enumerate(kernels, 1):
            last, carries = i == len(kernels), kernel == 3 and (bottleneck or i == 1)
            convolution = nn.Conv2d(inputs if i == 1 else inside, outputs if last else inside, kernel,
                                    stride if carries else 1, kernel // 2, bias=False)  # fmt: skip
            setattr(self, f"conv{i}", convolution)
            setattr(self, f"bn{i}", nn.BatchNorm2d(convolution.out_channels))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        out = x
        for i in range(1, self.norms + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
            if i < self.norms:
                out = self.relu(out)
        if self.downsample is not None:
            x = self.downsample(x)
        out += x
        return self.relu(out)


class Theirs(nn.Module):
    def __init__(self, bottleneck=True):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(TheirBlock(8, 16, 1, bottleneck), TheirBlock(16, 16, 1, bottleneck))
        self.layer2 = nn.Sequential(TheirBlock(16, 32, 2, bottleneck), TheirBlock(32, 32, 1, bottleneck))
        self.fc = nn.Linear(32, 5)

    def forward(self, images):
        x = self.relu(self.bn1(self.conv1(images)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class Logits(nn.Module):
    """A model of transformers that returns a tensor."""

    def __init__(self, kind):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 5}
        config = transformers.ResNetConfig(layer_type=kind, **sizes)
        self.model = transformers.ResNetForImageClassification(config)

    def forward(self, images):
        return self.model(images).logits


FOREIGN = {
    "theirs-basic": partial(Theirs, bottleneck=False),
    "theirs-bottleneck": Theirs,
    "transformers-basic": partial(Logits, "basic"),
    "transformers-bottleneck": partial(Logits, "bottleneck"),
}
OWN = {
    "own": partial(resnet_cifar, 20, 5, width=4),
    "own-pre": partial(resnet_cifar, 20, 5, width=4, preactivation=True),
}


def make(model):
    torch.manual_seed(2)
    return unsettled({**FOREIGN, **OWN}[model]())


def disturb(model, size=0.05):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def big():
    torch.manual_seed(0)
    model = unsettled(resnet50(10))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        outputs = {mode: copy.deepcopy(model).train(mode)(images) for mode in (False, True)}
    return model, images, outputs


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "where"), [*((gate, "default") for gate in GATES), ("stepnet", "all")])
def test_inserted_gates_do_not_change_resnet50(big, gate, where):
    model, images, outputs = big
    for mode in (False, True):
        gated = insert_gates(copy.deepcopy(model).train(mode), gate, where)
        with torch.no_grad():
            torch.testing.assert_close(gated(images), outputs[mode], rtol=0, atol=1e-6)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("where", ["all", pytest.param("identity", marks=pytest.mark.slow)])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("model", [*FOREIGN, *OWN])
def test_inserted_gates_do_not_change_networks_of_others(model, gate, where):
    images = torch.randn(3, 3, 16, 16)
    plain, gated = make(model), insert_gates(make(model), gate, where)
    assert len(gated_blocks(gated)) == (
        len(residual_blocks(plain)) if where == "all" else len(residual_blocks(plain)) // 2
    )
    for mode in (False, True):
        torch.testing.assert_close(
            gated.train(mode)(images), plain.train(mode)(images), rtol=0, atol=1e-6
        )
    before, after = plain.state_dict(), gated.state_dict()
    for name in before:  # statistics too: they moved once
        torch.testing.assert_close(after[name], before[name], rtol=1e-6, atol=1e-6)
    added = after.keys() - before.keys()
    own = {"scale", "shift", "doubled"} if gate == "iebn" else set()
    assert all(".gate." in name or name.rpartition(".")[2] in own for name in added)
    gated.load_state_dict(before, strict=False)

    fresh = insert_gates(make(model), gate, where, identity=False).eval()
    assert (fresh(images) - plain.eval()(images)).abs().max() > 1e-5  # it does act


@pytest.mark.sampled(5)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("model", ["theirs-bottleneck", "transformers-basic", "own"])
def test_copies_states_and_gradients(model, gate):
    images = torch.randn(3, 3, 16, 16)
    gated = insert_gates(make(model), gate, "all")
    gated(images).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gated.parameters())
    if gate != "dia":  # two sigmoids of zero weights: only the last layers learn at first
        for each in gated_blocks(gated).values():
            assert any(p.grad.abs().max() > 0 for p in each.parameters())
    twin = copy.deepcopy(gated).eval()
    kept = gated.eval()(images)
    assert torch.equal(twin(images), kept)
    disturb(twin)
    assert torch.equal(gated(images), kept)
    assert not torch.equal(twin(images), kept)
    gated.load_state_dict(twin.state_dict())
    assert torch.equal(gated(images), twin(images))
    again = pickle.loads(pickle.dumps(twin))
    assert torch.equal(again(images), twin(images))


@pytest.mark.parametrize(
    ("model", "gate"),
    [("theirs-bottleneck", "stepnet"),
     pytest.param("theirs-basic", "dia", marks=pytest.mark.slow),
     pytest.param("transformers-basic", "iebn", marks=pytest.mark.slow),
     pytest.param("transformers-bottleneck", "stepnet", marks=pytest.mark.slow),
     pytest.param("transformers-basic", "cbam", marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.slow
def test_compiles_without_graph_breaks(model, gate):
    gated = disturb(insert_gates(make(model), gate, "all"))
    images = torch.randn(2, 3, 8, 8)
    again = copy.deepcopy(gated)
    whole = torch.compile(again, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(whole(images), gated(images))
    whole(images).sum().backward()
    gated(images).sum().backward()
    for ours, theirs in zip(gated.parameters(), again.parameters()):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(gated.buffers(), again.buffers()):
        torch.testing.assert_close(theirs, ours)


class Spy(nn.Module):
    """A gate of a user's: it looks at x, which it need not announce."""

    def __init__(self):
        super().__init__()
        self.given = []

    def forward(self, f, x=None):
        self.given.append((f.detach().clone(), x.detach().clone()))
        return 0.5 * f


@pytest.mark.parametrize("model", FOREIGN)
def test_gates_see_the_branch_and_the_shortcut(model):
    plain, gated = make(model), insert_gates(make(model), lambda channels: Spy(), "all")
    calls = []
    for block in residual_blocks(gated):
        if block.shortcut:
            first = next(
                m
                for m in block.module.get_submodule(block.shortcut).modules()
                if isinstance(m, nn.Conv2d)
            )
            first.register_forward_hook(lambda *_: calls.append(1))
    states = {}
    for block in residual_blocks(plain):
        block.module.register_forward_hook(
            lambda m, args, out, name=block.name: states.update({name: args[0]})
        )
    images = torch.randn(3, 3, 16, 16)
    plain(images)
    gated(images)
    assert len(calls) == 2  # each of the two projections was computed once
    first, *_ = residual_blocks(plain)
    f, x = gated_blocks(gated)[first.name].given[0]
    torch.testing.assert_close(x, first.module.get_submodule(first.shortcut)(states[first.name]))
    for block in residual_blocks(gated):
        f, x = block.gate().given[0]
        assert f.shape == x.shape
    # the block's own sum: relu(x + f / 2)
    last = residual_blocks(gated)[-1]
    outputs = []
    last.module.register_forward_hook(lambda m, args, out: outputs.append(out))
    gated(images)
    f, x = last.gate().given[1]
    torch.testing.assert_close(outputs[0], (x + 0.5 * f).relu())


def test_inserted_and_built_gates_have_the_same_names():
    """A state of a network built with gates loads into a plain one they were inserted into."""
    for gate in GATES:
        built = resnet_cifar(20, 5, gate, width=4, gate_options={"identity": True}).eval()
        inserted = insert_gates(resnet_cifar(20, 5, width=4), gate).eval()
        disturb(built)
        inserted.load_state_dict(built.state_dict())
        images = torch.randn(2, 3, 16, 16)
        assert torch.equal(inserted(images), built(images))
    theirs = insert_gates(Theirs(), "stepnet", "all")
    assert {name for name, _ in theirs.named_modules() if name.endswith("gate")} == {
        "layer1.0.gate", "layer1.1.gate", "layer2.0.gate", "layer2.1.gate"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("default", ["layer1.1", "layer2.1", "layer3.1"]),
        ("identity", ["layer1.1", "layer2.1", "layer3.1"]),
        ("all", [f"layer{s}.{b}" for s in (1, 2, 3) for b in (0, 1)]),
        ([3, "layer1.0"], ["layer1.0", "layer2.1"]),
        ([-1], ["layer3.1"]),
        ({"layer2.0"}, ["layer2.0"]),
        (range(2), ["layer1.0", "layer1.1"]),
        (lambda name, block: block.conv3.out_channels == 32, ["layer2.0", "layer2.1"]),
    ],
)
def test_selection_of_blocks_for_gates(where, names):
    model = resnet_cifar(20, 5, width=4)
    assert insert_gates(model, "stepnet", where) is model
    assert list(gated_blocks(model)) == names
    assert list(gated_blocks(insert_gates(resnet_cifar(20, width=4), "se"))) == [
        n for n, _ in model.blocks
    ]


def test_refused_arguments():
    model = resnet_cifar(20, 5, width=4)
    with pytest.raises(
        ValueError, match=r"there is no block 'layer4.0'; the blocks are 0 to 5, called layer1.0"
    ):
        insert_gates(model, "se", ["layer4.0"])
    with pytest.raises(ValueError, match="there is no block 6"):
        insert_gates(model, "se", [6])
    with pytest.raises(ValueError, match="where 'layer1' is not one of default, all, identity"):
        insert_gates(model, "se", "layer1")
    with pytest.raises(ValueError, match="selects none of the 6 blocks"):
        insert_gates(model, "se", [])
    with pytest.raises(ValueError, match="no gate is called 'sey'"):
        insert_gates(model, "sey")
    assert not gated_blocks(model)
    assert insert_gates(model, "none") is insert_gates(model, None) is model
    for gate in ("se", "iebn", "dia"):
        gated = insert_gates(resnet_cifar(20, 5, width=4), gate, [1])
        with pytest.raises(ValueError, match=r"1 blocks have a gate already, the first is layer1.1"):
            insert_gates(gated, "eca", [2])
    for nothing in (nn.Linear(3, 3), nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))):
        with pytest.raises(
            ValueError, match="has no residual blocks of convolutions: no module with convolutions adds"
        ):
            insert_gates(nothing, "se")
    unnormed = Theirs()
    for name in ("layer1.0.bn1", "layer1.1.bn2"):
        unnormed.set_submodule(name, nn.GroupNorm(2, 4))
    insert_gates(unnormed, "iebn")  # those there are
    assert sum(isinstance(m, IEBN) for m in unnormed.modules()) == 1 + 12 - 2
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(Theirs())
    with pytest.raises(
        ValueError, match="takes the place of BatchNorm2d; the blocks' normalisations are none"
    ):
        insert_gates(synced, "iebn")
    outside = insert_gates(Theirs(), "se")
    with pytest.raises(
        RuntimeError, match="a BatchNorm2d at the end of a gated branch was called outside"
    ):
        outside.layer1[0].bn3(torch.rand(1, 16, 4, 4))


def test_gates_have_the_dtype_device_and_mode_of_their_block():
    gated = insert_gates(make("theirs-basic").double().eval(), "stepnet", "all")
    assert all(p.dtype == torch.float64 for p in gated.parameters())
    assert not any(m.training for m in gated.modules())
    assert gated(torch.rand(1, 3, 16, 16, dtype=torch.float64)).dtype == torch.float64
    meta = insert_gates(Theirs().to("meta"), "se")
    assert all(p.device.type == "meta" for p in meta.parameters())


def test_gates_by_function():
    gated = insert_gates(make("theirs-basic"), partial(StepNet, adaptor="c"))
    assert all(gate.adaptor == "c" and gate.identity for gate in gated_blocks(gated).values())
    assert list(gated_blocks(gated)) == ["layer1.1", "layer2.1"]  # as of the class itself
    wide = insert_gates(make("theirs-basic"), lambda channels: SE(channels) if channels > 16 else None)
    assert list(gated_blocks(wide)) == ["layer2.0", "layer2.1"]
    options = insert_gates(make("theirs-basic"), "se", reduction=2)
    assert (
        gated_blocks(options)["layer1.0"].state_dict().keys() == SE(16, reduction=2).state_dict().keys()
    )
    shapes = lambda gate: {name: p.shape for name, p in gate.state_dict().items()}
    assert shapes(gated_blocks(options)["layer1.0"]) == shapes(SE(16, reduction=2))


def test_no_feature_map_is_held_after_a_forward():
    """After a forward no block holds a feature map."""
    gated = insert_gates(make("theirs-bottleneck"), "stepnet", "all")
    waits = lambda net: any(
        m.handover.value is not None for m in net.modules() if hasattr(m, "handover")
    )
    gated(torch.rand(2, 3, 16, 16))
    assert not waits(gated)
    with pytest.raises(ValueError, match="one sample"):
        gated(torch.rand(1, 3, 16, 16))
    assert not waits(gated)
    gated.layer2[1].conv3.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gated(torch.rand(2, 3, 16, 16))
    assert not waits(gated)
    gated.layer2[1].conv3._forward_hooks.clear()
    for again in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):  # of a broken forward, too
        again(torch.rand(2, 3, 16, 16))


def test_gates_survive_the_replacement_of_normalisations():
    """DDP's synchronised normalisations are new modules, without the hooks of the old ones."""
    gated = disturb(insert_gates(make("theirs-bottleneck"), "stepnet")).eval()
    images = torch.rand(2, 3, 16, 16)
    before = gated(images)
    gated = nn.SyncBatchNorm.convert_sync_batchnorm(gated)
    assert isinstance(gated.layer1[1].bn3, nn.SyncBatchNorm)
    for _ in range(2):
        torch.testing.assert_close(gated(images), before, rtol=1e-5, atol=1e-6)


def test_a_gate_follows_timms_own_attention():
    class Attentive(TheirBlock):
        def __init__(self):
            super().__init__(16, 16)
            self.se = SE(16)

        def forward(self, x):
            f = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
            return (x + self.se(self.bn3(self.conv3(f)))).relu()

    net, x = (
        insert_gates(nn.Sequential(Attentive()), lambda channels: Spy()).eval(),
        torch.randn(2, 16, 4, 4),
    )
    out = net(x)
    (f, shortcut), *_ = net[0].gate.given
    assert torch.equal(shortcut, x)
    torch.testing.assert_close(out, (x + 0.5 * f).relu())


class Before(nn.Module):
    """A pre-activation block without a slot for a gate; its projection starts from the activated x."""

    def __init__(self, inputs, outputs, stride=1, order=("bn1", "conv1", "bn2", "conv2")):
        super().__init__()
        parts = {
            "bn1": nn.BatchNorm2d(inputs),
            "conv1": nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            "bn2": nn.BatchNorm2d(outputs),
            "conv2": nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        }
        for name in order:
            self.add_module(name, parts[name])
        projects = stride > 1 or inputs != outputs
        self.downsample = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if projects else None

    def forward(self, x):
        activated = self.bn1(x).relu()
        if self.downsample is not None:
            x = self.downsample(activated)
        return x + self.conv2(self.bn2(self.conv1(activated)).relu())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("where", ["all", "identity"])
@pytest.mark.parametrize("gate", GATES)
def test_preactivation_of_others_is_gated_after_the_last_convolution(gate, where):
    torch.manual_seed(0)
    net = unsettled(nn.Sequential(Before(3, 8), Before(8, 16, 2), Before(16, 16))).eval()
    images = torch.randn(2, 3, 8, 8)
    if (gate, where) == ("stepnet", "all"):
        with pytest.raises(ValueError, match=r"downsample of another tensor.*where='identity'"):
            insert_gates(net, gate, where)
        return
    gated = insert_gates(copy.deepcopy(net), gate, where)
    torch.testing.assert_close(gated(images), net(images), rtol=0, atol=1e-6)
    spied = insert_gates(nn.Sequential(net[2]), lambda channels: Spy())
    x = torch.randn(2, 16, 4, 4)
    out = spied(x)
    f, shortcut = net[2].gate.given[0]
    assert torch.equal(shortcut, x)
    torch.testing.assert_close(out, x + 0.5 * f)


def test_the_end_of_a_branch_by_names():
    ends = lambda block: residual_blocks(nn.Sequential(block))[0].end
    first = ("bn1", "bn2", "conv1", "conv2")
    assert ends(Before(8, 8)) == ends(Before(4, 8, order=first)) == "conv2"  # by order, by channels
    assert ends(Before(4, 8, order=("conv1", "bn1", "conv2", "bn2"))) == "conv2"
    with pytest.raises(ValueError, match=r"block 0 has registered bn2 before all .* in which forward"):
        ends(Before(8, 8, order=first))
    assert {block.end for block in residual_blocks(make("own-pre"))} == {"conv3"}
    assert {block.end for block in residual_blocks(make("own"))} == {"bn3"}


def test_hooks_of_a_shortcut_run_once_and_the_gate_sees_what_they_make():
    torch.manual_seed(0)
    net, calls = unsettled(Theirs()).eval(), []
    for block in (net.layer1[0], net.layer2[0]):
        block.downsample.register_forward_pre_hook(lambda m, args: (2 * args[0],))
        block.downsample.register_forward_hook(lambda m, args, out: calls.append(m) or 0.5 * out)
    images = torch.randn(2, 3, 8, 8)
    before = net(images)
    calls.clear()
    gated = insert_gates(net, "stepnet", "all")
    torch.testing.assert_close(gated(images), before, rtol=0, atol=1e-6)
    assert calls == [net.layer1[0].downsample, net.layer2[0].downsample]


@pytest.mark.parametrize("gate", ["se", "stepnet", "dia"])
def test_blocks_may_be_called_by_name(gate):
    x = torch.randn(2, 8, 4, 4)
    for plain in (TheirBlock(8, 16, 2), TheirBlock(8, 8)):
        block = insert_gates(nn.Sequential(plain).eval(), gate, "all")[0]
        assert torch.equal(block(x=x), block(x))


class Flat(nn.Module):
    """Blocks of several stages side by side."""

    def __init__(self):
        super().__init__()
        self.block1, self.block2 = TheirBlock(3, 8), TheirBlock(8, 8)
        self.block3, self.block4 = TheirBlock(8, 16, 2), TheirBlock(16, 16)

    def forward(self, x):
        return self.block4(self.block3(self.block2(self.block1(x))))


def test_a_shared_gate_needs_no_modules_around_stages():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    for net in (Flat(), nn.Sequential(*Flat().children())):
        before = unsettled(net).eval()(images)
        torch.testing.assert_close(insert_gates(net, "dia")(images), before, rtol=0, atol=1e-6)
        shared = [isinstance(gate, SharedGate) for gate in gated_blocks(net).values()]
        assert shared == [False, True, False, True]


def test_a_shared_gate_is_not_for_data_parallel():
    """Its copies would all use the first one's gate."""
    gated = insert_gates(Theirs(), "dia")
    with pytest.raises(RuntimeError, match=r"DIA is one gate for several.*DistributedDataParallel"):
        [module._replicate_for_data_parallel() for module in gated.modules()]


def test_torchvision():
    models = pytest.importorskip("torchvision.models")
    images = torch.randn(2, 3, 64, 64)
    for theirs in (models.resnet18, models.resnet50):
        torch.manual_seed(0)
        plain = unsettled(theirs(weights=None))
        for gate in GATES:
            gated = insert_gates(copy.deepcopy(plain), gate, "all")
            for mode in (False, True):
                expected = copy.deepcopy(plain).train(mode)(images)
                torch.testing.assert_close(gated.train(mode)(images), expected, rtol=0, atol=1e-6)
            assert gated.state_dict().keys() >= plain.state_dict().keys()
            gated.load_state_dict(plain.state_dict(), strict=False)
    ours = resnet50(gate="stepnet", where="all")
    insert_gates(plain, "stepnet", "all", identity=False).load_state_dict(ours.state_dict())
    torch.testing.assert_close(plain.eval()(images), ours.eval()(images), rtol=1e-5, atol=1e-5)


def test_timm():
    timm = pytest.importorskip("timm")
    images = torch.randn(2, 3, 64, 64)
    for name in ("resnet18", "resnet50", "resnet50d", "seresnet50"):
        torch.manual_seed(0)
        plain = unsettled(timm.create_model(name, num_classes=10))
        for gate in GATES:
            gated = insert_gates(copy.deepcopy(plain), gate, "all")
            expected = copy.deepcopy(plain).eval()(images)
            torch.testing.assert_close(gated.eval()(images), expected, rtol=0, atol=1e-6)


def test_parts_keep_their_class():
    """Reflection still works on what is intercepted or has another forward."""
    gated = insert_gates(make("theirs-bottleneck"), "stepnet", "all")
    shortcut = gated.layer1[0].downsample
    assert isinstance(shortcut, nn.Sequential)
    assert len(shortcut) == 2
    assert isinstance(shortcut[0], nn.Conv2d)
    assert type(copy.deepcopy(shortcut)) is type(shortcut)
    assert isinstance(gated.layer1[0], TheirBlock)
    assert str(gated.layer1[0]).startswith("TheirBlock(")
