"""Which blocks a gate goes into: those that add what a part of them returns, whatever their names."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import pad, relu, silu

from attractor.residual import probe
from attractor.residual.gates import BY_NAME
from attractor.residual.insert import gated_blocks, insert_gates, residual_blocks
from tests.residual import lookalikes

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
ANY_AXES = [name for name, kind in BY_NAME.items() if not kind.needs_image]


class Named(nn.Module):
    """Parts with torchvision's names: what forward does with them is for heirs to say."""

    def __init__(self, inputs=8, outputs=8, stride=1, axes=2, shortcut="downsample"):
        super().__init__()
        conv, norm = CONV[axes], NORM[axes]
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        projects = stride > 1 or inputs != outputs
        self.called = shortcut
        setattr(self, shortcut, conv(inputs, outputs, 1, stride) if projects else None)

    def f(self, x):
        return self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))

    def x(self, x):
        shortcut = getattr(self, self.called)
        return x if shortcut is None else shortcut(x)

    def forward(self, x):
        return relu(self.x(x) + self.f(x))


class Twice(nn.Module):
    """A gate of 2."""

    needs_x = False

    def forward(self, f, x=None):
        return 2 * f


# Residual blocks under other names, and of other makes


class Kuangliu(nn.Module):
    """As in the repository pytorch-cifar: an empty shortcut is the identity."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def f(self, x):
        return self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))

    def x(self, x):
        return self.shortcut(x)

    def forward(self, x):
        out = self.f(x)
        out += self.x(x)
        return relu(out)


class Padded(Named):
    """Option A of the first ResNet: the shortcut is cut and padded in forward."""

    def x(self, x):
        more = self.conv1.out_channels - x.shape[1]
        return x if not more else pad(x[:, :, ::2, ::2], (0, 0, 0, 0, more // 2, more // 2))


class Strided(Named):
    """A view of the input, but not the input."""

    def __init__(self):
        super().__init__(8, 8, 2)

    def x(self, x):
        return x[:, :, ::2, ::2]


class Pooled(Named):
    """The shortcut is a pooling."""

    def __init__(self):
        super().__init__(8, 8, 2)
        self.downsample = nn.MaxPool2d(2)


class Inverted(nn.Module):
    """As MobileNetV2's: the branch is one part, and nothing follows the sum."""

    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1),
            nn.ReLU6(),
            nn.Conv2d(2 * width, width, 1),
            nn.BatchNorm2d(width),
        )

    def f(self, x):
        return self.body(x)

    def x(self, x):
        return x

    def forward(self, x):
        return self.x(x) + self.f(x)


class Activated(Named):
    """An activation ends the branch."""

    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def f(self, x):
        return self.act(super().f(x))


class Scaled(Named):
    """As with layer scale; its factor is learnt."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.3))

    def f(self, x):
        return self.scale * super().f(x)


class Slot(Named):
    """Which calls a gate by itself."""

    def __init__(self):
        super().__init__()
        self.gate = None

    def forward(self, x):
        f = self.f(x)
        return relu(self.x(x) + (f if self.gate is None else self.gate(f, x)))


class Lines(nn.Module):
    """Only what it does tells what it is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def f(self, x):
        return self.second(silu(self.first(x)))

    def x(self, x):
        return x

    def forward(self, x):
        return self.f(x) + self.x(x)


RESIDUAL = {
    "torchvision": Named,
    "torchvision, projected": lambda: Named(8, 16, 2),
    "kuangliu": lambda: Kuangliu(8, 8),
    "kuangliu, projected": lambda: Kuangliu(8, 16, 2),
    "another name": lambda: Named(8, 16, 2, shortcut="match"),
    "padded": lambda: Padded(8, 16, 2),
    "strided": Strided,
    "pooled": Pooled,
    "inverted": Inverted,
    "activated": Activated,
    "scaled": Scaled,
    "slot": Slot,
    "lines": Lines,
    "one axis": lambda: Named(axes=1),
    "one axis, projected": lambda: Named(8, 16, 2, axes=1),
    "three axes": lambda: Named(axes=3),
    "three axes, projected": lambda: Named(8, 16, 2, axes=3, shortcut="skip"),
}
IDENTITY = {"torchvision", "kuangliu", "inverted", "activated", "scaled", "slot", "lines", "one axis",
            "three axes"}  # fmt: skip


def made(kind):
    """A network of that block alone, its norms as of a trained one, and an input."""
    torch.manual_seed(3)
    block = RESIDUAL[kind]().eval()
    for norm in (m for m in block.modules() if isinstance(m, tuple(NORM.values()))):
        nn.init.normal_(norm.running_mean, 0, 0.2)
        nn.init.uniform_(norm.weight, 0.3, 1.0)
    axes = 1 if "one axis" in kind else 3 if "three" in kind else 2
    return nn.Sequential(block), torch.randn(2, 8, *[8] * axes)


@pytest.mark.parametrize("kind", RESIDUAL)
def test_a_gate_of_two_gives_x_plus_twice_f(kind):
    net, x = made(kind)
    block = net[0]
    f, shortcut = block.f(x), block.x(x)
    after = nn.Identity() if kind in ("inverted", "lines") else relu
    torch.testing.assert_close(net(x), after(shortcut + f))
    (found,) = residual_blocks(net)
    assert (found.name, found.channels, found.axes) == ("0", f.shape[1], f.dim())
    assert found.identity == (kind in IDENTITY)
    insert_gates(net, lambda channels: Twice(), "all")
    torch.testing.assert_close(net(x), after(shortcut + 2 * f))
    assert list(gated_blocks(net)) == ["0"]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("gate", BY_NAME)
@pytest.mark.parametrize("kind", RESIDUAL)
def test_inserted_gates_do_not_change_a_bit(kind, gate):
    net, x = made(kind)
    before, state = net(x), copy.deepcopy(net.state_dict())
    (block,) = residual_blocks(net)
    fits = block.axes == 4 or gate in ANY_AXES
    lacks_x = gate == "stepnet" and not block.identity and block.shortcut is None
    if not fits or lacks_x or (gate == "iebn" and kind == "lines"):
        reason = "is for images" if not fits else "looks at x" if lacks_x else "takes the place of"
        with pytest.raises(ValueError, match=reason):
            insert_gates(net, gate, "all")
        assert list(net.state_dict()) == list(state)
        return
    insert_gates(net, gate, "all")
    assert list(gated_blocks(net)) == ["0"]
    if gate == "iebn":  # computes its normalisation in another order
        torch.testing.assert_close(net(x), before, rtol=0, atol=1e-6)
    else:
        assert torch.equal(net(x), before)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    fresh = insert_gates(made(kind)[0], gate, "all", identity=False)
    assert not torch.equal(fresh(x), before)


@pytest.mark.parametrize("gate", ANY_AXES)
def test_gates_treat_spatial_axes_as_one(gate):
    """A volume that is flat in one direction is gated as the image is."""
    torch.manual_seed(0)
    image, volume = Named(), Named(axes=3)
    with torch.no_grad():
        for flat, deep in zip(image.parameters(), volume.parameters()):
            deep.zero_()
            (deep[:, :, 1] if deep.dim() == 5 else deep).copy_(flat)
    nets = [
        insert_gates(nn.Sequential(block), gate, "all", identity=False).eval()
        for block in (image, volume)
    ]
    nets[1][0].gate.load_state_dict(nets[0][0].gate.state_dict())
    x = torch.randn(2, 8, 6, 6)
    torch.testing.assert_close(nets[1](x[:, :, None])[:, :, 0], nets[0](x))


def test_a_network_with_other_names():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Sequential(Kuangliu(8, 8), Kuangliu(8, 8)),
        nn.Sequential(Kuangliu(8, 16, 2), Kuangliu(16, 16)),
    ).eval()
    assert [b.name for b in residual_blocks(net)] == ["1.0", "1.1", "2.0", "2.1"]
    insert_gates(net, "stepnet")
    assert list(gated_blocks(net)) == ["1.0", "1.1", "2.1"]
    with pytest.raises(ValueError, match="3 blocks have a gate already"):
        insert_gates(net, "se")
    found = probe(net, [torch.randn(4, 3, 16, 16)])
    assert found.gates.isnan().all(0).tolist() == [False, False, True, False]


# What is none


class Plain(Named):
    def forward(self, x):
        return relu(self.f(x))


class Dense(Named):
    def forward(self, x):
        return torch.cat((x, self.f(x)), 1)


class Encoder(Named):
    """A U-Net's: the part called downsample pools what the convolutions made."""

    def __init__(self):
        super().__init__()
        self.downsample = nn.MaxPool2d(2)

    def forward(self, x):
        return self.downsample(self.f(x))


class Squeezed(Named):
    """Its own attention is multiplied in forward: a gate on bn2 would come before it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid())

    def forward(self, x):
        f = self.f(x)
        return x + f * self.attention(f)


class Curved(Named):
    """A function that is no module, and does not let a factor through, ends the branch."""

    def forward(self, x):
        return x + silu(self.f(x))


class Unasked(Named):
    """It has the attribute that a gate goes into, but means another thing."""

    def __init__(self):
        super().__init__()
        self.gate = None


NONE = {
    "plain": (Plain, "adds nothing to its input"),
    "dense": (Dense, "concatenates its input and its features"),
    "encoder": (Encoder, "adds nothing to its input"),
    "squeezed": (Squeezed, "ends its branch with mul in its own forward, where no hook reaches"),
    "curved": (Curved, "ends its branch with silu in its own forward"),
    "unasked": (Unasked, "has an attribute gate, None, but calls it 0 times"),
}


@pytest.mark.parametrize("kind", NONE)
def test_lookalikes_are_refused_and_not_changed(kind):
    make, reason = NONE[kind]
    net, x = nn.Sequential(make(), make()).eval(), torch.randn(2, 8, 8, 8)
    if kind == "dense":
        net = net[:1]
    before = net(x)
    with pytest.raises(
        ValueError, match=f"Sequential has no residual blocks of convolutions: 0 {reason}"
    ):
        insert_gates(net, "se")
    assert torch.equal(net(x), before)
    assert not any("gate" in name for name in net.state_dict())


@pytest.mark.parametrize("kind", NONE)
def test_lookalikes_among_blocks_give_a_warning_or_an_error(kind):
    make, reason = NONE[kind]
    net = nn.Sequential(Named(), make())
    with pytest.warns(
        UserWarning, match=f"1 modules that look like residual blocks get no gate: 1 {reason}"
    ):
        insert_gates(net, "se")
    assert list(gated_blocks(net)) == ["0"]
    net = nn.Sequential(Named(), make())
    with pytest.raises(ValueError, match=f"block 1 {reason}.*; it can have no gate"):
        insert_gates(net, "se", ["1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        insert_gates(net, "se", ["0"])


class Timed(Named):
    """As in a diffusion model: it takes the time as well."""

    def forward(self, x, time):
        return x + self.f(x + time[:, None, None, None])


class Diffusion(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 1), nn.ModuleList([block(), block()])

    def forward(self, x, time):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, time)
        return x


def test_a_block_with_several_inputs_needs_an_example():
    net, batch = Diffusion(Timed).train(), {"x": torch.randn(3, 3, 8, 8), "time": torch.rand(3)}
    with pytest.raises(
        ValueError, match=r"block blocks.0 could not be run by itself.*time.*; pass example="
    ):
        insert_gates(net, "se")
    state = copy.deepcopy(net.state_dict())
    before = copy.deepcopy(net).eval()(**batch)
    insert_gates(net, "se", example=batch)
    assert net.training
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    assert list(gated_blocks(net)) == ["blocks.0", "blocks.1"]
    assert torch.equal(net.eval()(**batch), before)

    class Late(Timed):
        def forward(self, x, time):
            return self.f(x + time[:, None, None, None])

    with pytest.raises(ValueError, match=r"convolutions: blocks.0 adds nothing to its input"):
        insert_gates(Diffusion(Late), "se", example=batch)


def test_errors_list_modules_that_cannot_run_alone():
    class Odd(Lines):
        def forward(self, x, time):
            return x + self.f(x + time[:, None, None, None])

    net = Diffusion(Odd)
    with pytest.raises(ValueError, match=r"blocks.0 could not be run by itself .*; pass example="):
        insert_gates(net, "se")
    batch = {"x": torch.randn(3, 3, 8, 8), "time": torch.rand(3)}
    before = net(**batch)
    insert_gates(net, "se", ["blocks.1"], example=batch)
    for again in (net, copy.deepcopy(net)):
        assert list(gated_blocks(again)) == ["blocks.1"]  # known without an example
        assert torch.equal(again(**batch), before)


def test_running_blocks_does_not_change_them():
    """Its statistics, its hooks, and random numbers are as they were."""
    seen = []
    net = nn.Sequential(Named(), Named(8, 16, 2)).train()
    net[0].conv1.register_forward_hook(lambda *_: seen.append(1))
    state, hooks = copy.deepcopy(net.state_dict()), len(net[0].conv1._forward_hooks)
    torch.manual_seed(1)
    residual_blocks(net)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert not seen
    assert net.training
    assert len(net[0].conv1._forward_hooks) == hooks
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_a_block_that_fails_on_the_meta_device_runs_with_values():
    class Looking(Named):
        def forward(self, x):
            return self.x(x) + (self.f(x) if float(x.abs().max()) >= 0 else x)

    (found,) = residual_blocks(nn.Sequential(Looking()))
    assert (found.end, found.identity, found.failure) == ("bn2", True, "")


def test_unreachable_branches_with_other_names_give_a_warning():
    class Squeezing(Lines):
        def forward(self, x):
            f = self.f(x)
            return x + f * f.mean((2, 3), keepdim=True).sigmoid()

    net = nn.Sequential(Lines(), Squeezing(), nn.Conv2d(8, 8, 1), Lines())
    with pytest.warns(
        UserWarning,
        match=r"1 modules that look like .* get no gate: 1 ends its branch with mul in its own",
    ):
        insert_gates(net, "se")
    assert list(gated_blocks(net)) == ["0", "3"]


# Networks of timm whose blocks are made in other ways


class Noting(nn.Module):
    """A gate of 2 that keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def forward(self, f, x=None):
        self.given.append((f, x))
        return 2 * f


@pytest.mark.parametrize("example", [None, torch.randn(2, 3, 16, 16)], ids=["no example", "example"])
def test_ghost_bottlenecks_are_gated(example):
    """What ends their branch has the channels of no convolution: it concatenates two halves."""
    torch.manual_seed(0)
    net, x = lookalikes.GhostNet().eval(), torch.randn(2, 3, 16, 16)
    before = net(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = residual_blocks(net, example)
        gated = insert_gates(copy.deepcopy(net), "stepnet", "all", example=example)
        twice = insert_gates(copy.deepcopy(net), lambda channels: Noting(), "all", example=example)
    assert [block.name for block in found] == ["blocks.0.0", "blocks.1.0", "blocks.1.1"]
    assert [block.end for block in found] == ["ghost2"] * 3
    assert [block.channels for block in found] == [10, 14, 14]
    assert [block.identity for block in found] == [True, False, True]
    assert torch.equal(gated(x), before)
    twice(x)
    block = twice.blocks[1][0]
    (f, shortcut), *_ = block.gate.given
    given = twice.blocks[0](twice.stem(x))
    torch.testing.assert_close(shortcut, block.shortcut(given))
    torch.testing.assert_close(block(given), shortcut + 2 * f)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block", [lookalikes.DlaBasic, lookalikes.DlaBottleneck])
@pytest.mark.parametrize("residual_root", [False, True])
def test_trees_of_dla_are_gated_on_an_example(block, residual_root):
    """Their shortcut may be an argument, and roots take a list."""
    torch.manual_seed(0)
    net, x = lookalikes.DLA(block, residual_root).eval(), torch.randn(2, 3, 16, 16)
    before = net(x)
    leaves = ["level2.tree1", "level2.tree2"]
    leaves += [f"level3.tree{i}.tree{j}" for i in (1, 2) for j in (1, 2)]
    roots = ["level2.root", "level3.tree1.root", "level3.tree2.root"] if residual_root else []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = residual_blocks(net, x)
        twice = insert_gates(copy.deepcopy(net), lambda channels: Noting(), "all", example=x)
    assert sorted(b.name for b in found) == sorted(leaves + roots)
    # A projection in the tree around a block is none of the block's own, but no identity either.
    assert {b.name for b in found if not b.identity} == {"level2.tree1", "level3.tree1.tree1"}
    for gate in ("se", "stepnet", "dia"):
        gated = insert_gates(copy.deepcopy(net), gate, "all", example=x)
        assert torch.equal(gated(x), before)
        assert list(gated_blocks(gated)) == [b.name for b in found]
    assert not torch.allclose(twice(x), before)
    tree = twice.level2
    bottom = tree.downsample(twice.base_layer(x))
    for part, shortcut in ((tree.tree1, tree.project(bottom)), (tree.tree2, None)):
        (f, given), *_ = part.gate.given
        if shortcut is not None:
            torch.testing.assert_close(given, shortcut)
        torch.testing.assert_close(
            part(twice.base_layer(x), shortcut) if shortcut is not None else part(given),
            relu(given + 2 * f),
        )
    if residual_root:
        (f, given), *_ = tree.root.gate.given
        torch.testing.assert_close(given, part(tree.tree1(twice.base_layer(x), tree.project(bottom))))


def test_trees_of_dla_without_an_example_give_a_warning():
    net = lookalikes.DLA()
    with pytest.warns(
        UserWarning, match=r"get no gate: level2.tree1 could not be run by itself.*example="
    ):
        insert_gates(net, "se")
    assert "level2.tree2" in gated_blocks(net)
    assert "level2.tree1" not in gated_blocks(net)


def test_a_function_of_another_argument_is_not_a_branch():
    """What is made from another argument alone is no function of x."""

    class Conditioned(Named):
        def forward(self, x, condition):
            return x + self.f(condition)

    batch = {"x": torch.randn(2, 3, 8, 8), "time": torch.randn(2, 8, 8, 8)}
    with pytest.raises(ValueError, match=r"convolutions: blocks.0 adds nothing to its input"):
        insert_gates(Diffusion(Conditioned), "se", example=batch)


def test_channels_in_the_last_axis_are_refused_with_a_reason():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.LayerNorm(8)

        def forward(self, x):
            return x + self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Last(), Last())

        def forward(self, x):
            return self.blocks(x.permute(0, 2, 3, 1))

    reason = (
        r"blocks.0 adds \[5, 6, 8\] per input, whose first axis is not the channels of one of its conv"
    )
    with pytest.raises(ValueError, match=reason):
        insert_gates(Net(), "se", example=torch.randn(2, 8, 5, 6))


@pytest.mark.slow
def test_ghostnet_and_dla_of_timm():
    timm = pytest.importorskip("timm")
    x = torch.randn(2, 3, 64, 64)
    for name, blocks in (("ghostnet_050", 16), ("dla34", 12), ("dla102", 42)):
        torch.manual_seed(0)
        net = timm.create_model(name, num_classes=5).eval()
        before = net(x)
        for gate in ("se", "stepnet"):
            gated = insert_gates(copy.deepcopy(net), gate, "all", example=x)
            assert len(gated_blocks(gated)) == blocks
            torch.testing.assert_close(gated(x), before, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(torch.fx.symbolic_trace(gated)(x), before, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(torch.jit.script(gated)(x), before, rtol=1e-5, atol=1e-5)
