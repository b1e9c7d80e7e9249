"""`probe` against forwards written by hand, and on networks it has never seen."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm, relu

from attractor.core.stiffness import neural_stiffness_index
from attractor.residual import probe, resnet_cifar, vit
from attractor.residual.axes import sample_axis
from attractor.residual.stages import stage_numbers
from attractor.residual.trunk import block_path

CLOSE = dict(rtol=1e-6, atol=0)


def norms(x):
    return x.double().flatten(1).norm(dim=1)


class Squeeze(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.up, self.down = nn.Linear(channels, 2), nn.Linear(2, channels)

    def forward(self, f):
        return torch.sigmoid(self.down(relu(self.up(f.mean((2, 3))))))[:, :, None, None]


class Block(nn.Module):
    """A residual block that writes down its own x, f and F."""

    def __init__(self, inputs, channels, stride=1, pre=False, gate=False, style="plain"):
        super().__init__()
        self.pre, self.style = pre, style
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(inputs if pre else channels), nn.BatchNorm2d(channels)]
        )
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inputs, channels, 3, stride, 1, bias=False),
                nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            ]
        )
        fits = stride == 1 and inputs == channels
        self.shortcut = None if fits else nn.Conv2d(inputs, channels, 1, stride, bias=False)
        self.gate = Squeeze(channels) if gate else None
        self.seen = []

    def forward(self, x):
        if self.pre:
            start = relu(self.norms[0](x), inplace=True)
            f = self.convs[1](relu(self.norms[1](self.convs[0](start))))
            x = x if self.shortcut is None else self.shortcut(start)
        else:
            f = relu(self.norms[0](self.convs[0](x)), inplace=True)
            f = self.norms[1](self.convs[1](f))
            x = x if self.shortcut is None else self.shortcut(x)
        open_ = torch.ones(len(x), 1, 1, 1).to(x) if self.gate is None else self.gate(f)
        self.seen.append([t.clone() for t in (x, f, open_)])
        if self.style == "plain":
            out = x + f * open_
        elif self.style == "branch in place":
            out = f.mul_(open_)
            out += x
        elif self.style == "state in place":
            out = x.add_(f * open_)
        elif self.style == "expanded":
            out = x + open_.expand_as(f) * f
        elif self.style == "alpha":
            self.seen[-1][1] *= 0.3
            out = torch.add(x, f * open_, alpha=0.3)
        elif self.style == "less":
            out = x - f * open_
        elif self.style == "fused":
            out = torch.addcmul(x, f, open_, value=0.5)
            self.seen[-1][1] *= 0.5
        return out if self.pre else relu(out, inplace=True)


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        widths = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1)]
        self.blocks = nn.Sequential(*[Block(*w, **options) for w in widths])
        self.head = nn.Linear(16, 3)
        for p in self.parameters():
            if p.dim() == 1:
                nn.init.uniform_(p, 0.2, 1.5)

    def forward(self, images):
        return self.head(self.blocks(relu(self.stem(images))).mean((2, 3)))


def by_hand(net):
    """NSI of both steps ``[inputs, blocks]`` and mean gates from what the last passes wrote down."""
    rows = []
    for block in net.blocks:
        x, f, gate = (torch.cat(parts) for parts in zip(*block.seen))
        rows.append((norms(f * gate) / norms(x), norms(f) / norms(x), gate.mean((1, 2, 3))))
        block.seen.clear()
    return [torch.stack(column, 1) for column in zip(*rows)]


def forget(net):
    for block in net.blocks:
        block.seen.clear()


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    "style", ["plain", "branch in place", "state in place", "expanded", "alpha", "less", "fused"]
)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("pre", [False, True])
def test_against_a_reference_forward(pre, gate, style):
    net = Net(pre=pre, gate=gate, style=style).eval()
    batches = [torch.randn(6, 3, 8, 8), torch.randn(3, 3, 8, 8)]
    with torch.no_grad():
        [net(b) for b in batches]
    one, ungated, opened = by_hand(net)
    found = probe(net, batches)
    assert found.names == tuple(f"blocks.{i}" for i in range(5))
    assert found.stage.tolist() == [0, 0, 1, 1, 1]
    torch.testing.assert_close(found.nsi, one, **CLOSE)
    torch.testing.assert_close(found.with_step("gate").nsi, ungated, **CLOSE)
    if gate:
        torch.testing.assert_close(found.gates, opened.double(), **CLOSE)
    else:
        assert found.gates.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    net = Net(gate=True).eval().to(dtype)
    found = probe(net, [torch.randn(4, 3, 8, 8)])  # a float32 batch, brought to the network's precision
    measured = [block.seen[-1] for block in net.blocks]
    for b, (x, f, gate) in enumerate(measured):
        want = norms((f * gate).to(dtype)) / norms(x)
        torch.testing.assert_close(
            found.one[:, b], want, rtol=1e-6 if dtype != torch.float64 else 1e-13, atol=0
        )


def test_large_half_precision_features_do_not_overflow():
    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return x + 300 * self.linear(x)

    found = probe(Huge().half(), [torch.randn(2, 64).half() * 100], granularity="addition")
    assert found.nsi.isfinite().all()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("preactivation", [False, True])
@pytest.mark.parametrize(
    "gate", ["none", "se", "cbam", "eca", "sem", "srm", "fca", "iebn", "sge", "dia", "stepnet"]
)
def test_gated_resnets(gate, preactivation):
    net = resnet_cifar(29, gate=gate, preactivation=preactivation, width=4).eval()
    for p in net.parameters():
        if p.dim() == 1:
            nn.init.uniform_(p, -0.5, 1.5)
    images = torch.randn(5, 3, 16, 16)
    want = [[], []]
    with torch.no_grad():
        x = net.relu(net.bn1(net.conv1(images)))
        for stage in net.stages:
            for block in stage:
                if block.gate is not None and block is stage[0]:
                    block.gate.start()
                if preactivation:
                    start = relu(block.bn1(x))
                    f = block.conv1(start)
                    f = block.conv3(relu(block.bn3(block.conv2(relu(block.bn2(f))))))
                    x = x if block.downsample is None else block.downsample(start)
                else:
                    f = relu(block.bn2(block.conv2(relu(block.bn1(block.conv1(x))))))
                    f = block.bn3(block.conv3(f))
                    x = x if block.downsample is None else block.downsample(x)
                gated = f if block.gate is None else block.gate(f, x)
                want[0].append(norms(gated) / norms(x))
                want[1].append(norms(f) / norms(x))
                x = x + gated if preactivation else relu(x + gated)
    found = probe(net, [images])
    assert found.names == tuple(name for name, _ in net.blocks)
    assert found.stage.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    torch.testing.assert_close(found.one, torch.stack(want[0], 1), **CLOSE)
    torch.testing.assert_close(found.gate, torch.stack(want[1], 1), **CLOSE)
    has = [block.gate is not None for _, block in net.blocks]  # IEBN is a normalisation: no gate
    assert (~found.gates.isnan()).all(0).tolist() == has


def test_resnet164():
    found = probe(resnet_cifar(164, gate="stepnet"), [torch.randn(2, 3, 8, 8)])
    assert torch.bincount(found.stage).tolist() == [18, 18, 18]
    assert found.gates.isnan().all(0).nonzero()[:, 0].tolist() == [0, 18, 36]  # projected shortcuts


@pytest.mark.parametrize("gate", ["none", "se", "stepnet", "dia"])
def test_vit_by_block_and_by_addition(gate):
    net = vit(image_size=16, dim=16, depth=3, heads=2, gate=gate).eval()
    images = torch.randn(4, 3, 16, 16)
    states, adds, raw = [], [], []
    with torch.no_grad():
        x = net.patches(images).flatten(2).transpose(1, 2) + net.positions
        for step in (s for layer in net.layers for s in (layer.mix, layer.think)):
            f = step.branch(step.norm(x))
            gated = f
            if step.gate is not None:
                gated = step.gate(step.as_map(f), step.as_map(x)).flatten(2).transpose(1, 2)
            states.append(x)
            adds.append(gated)
            raw.append(f)
            x = x + gated
    net(images)  # a gate with a memory forgets at the end of a pass
    fine = probe(net, [images], granularity="addition")
    assert len(fine.names) == 6
    want = torch.stack([norms(f) / norms(x) for x, f in zip(states, adds)], 1)
    torch.testing.assert_close(fine.one, want, rtol=2e-6, atol=0)
    found = probe(net, [images])
    assert found.names == ("layers.0", "layers.1", "layers.2")
    for kind, parts in (("one", adds), ("gate", raw)):
        sums = [parts[i].double() + parts[i + 1] for i in (0, 2, 4)]
        want = torch.stack([norms(s) / norms(x) for s, x in zip(sums, states[::2])], 1)
        torch.testing.assert_close(getattr(found, kind), want, rtol=3e-6, atol=0)


class Wide(nn.Module):
    """One addition, of a branch as given."""

    def __init__(self, dim, branch, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleList([nn.Linear(dim, dim), nn.Linear(dim, dim)]) for _ in range(depth)]
        )
        self.scale = nn.Parameter(torch.rand(dim))
        self.branch = branch

    def forward(self, x):
        for parts in self.layers:
            x = self.branch(self, x, *parts)
        return x


def parallel(self, x, a, b):
    h = layer_norm(x, x.shape[-1:])
    return x + a(h).tanh() + b(b(h))


def parallel_the_other_way(self, x, a, b):
    h = layer_norm(x, x.shape[-1:])
    return a(a(h)) + b(h) + x


def layer_scale(self, x, a, b):
    return x + b(a(x).relu()) * self.scale


def gate_inside(self, x, a, b):
    return x + b(a(x) * a(x).mean(1, keepdim=True).sigmoid())


def normed_branch(self, x, a, b):
    f = b(a(x).relu())
    return x + f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)


def gelu_inside(self, x, a, b):
    h = a(x)
    return x + b(0.5 * h * (1 + torch.tanh(0.8 * (h + 0.044715 * h.pow(3)))))


def adaptive(self, x, a, b):  # as in DiT: a gate between 0 and 1, then a number
    return x + 0.5 * (b(a(x).relu()) * a(x).mean(1, keepdim=True).sigmoid())


def adaptive_twice(self, x, a, b):
    x = adaptive(self, x, a, b)
    return x + -2 * (a(x.tanh()) * x.mean(1, keepdim=True).sigmoid())


@pytest.mark.parametrize(
    ("branch", "gated"),
    [(parallel, False), (parallel_the_other_way, False), (layer_scale, False), (gate_inside, False),
     (normed_branch, False), (gelu_inside, False), (adaptive, True)],
)  # fmt: skip
def test_recognition_of_steps_and_gates(branch, gated):
    net, x = Wide(8, branch), torch.randn(5, 6, 8)
    found = probe(net, [x])
    assert found.names == ("layers.0", "layers.1", "layers.2")
    assert found.gated == gated
    with torch.no_grad():
        want, ungated = [], []
        for a, b in net.layers:
            after = branch(net, x, a, b)
            want.append(neural_stiffness_index(x, after))
            ungated.append(norms(0.5 * b(a(x).relu())) / norms(x) if gated else want[-1])
            x = after
    torch.testing.assert_close(found.one, torch.stack(want, 1).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.gate, torch.stack(ungated, 1).double(), rtol=1e-5, atol=0)


def test_two_gated_additions_of_one_block():
    net, x = Wide(8, adaptive_twice), torch.randn(5, 6, 8, dtype=torch.float64)
    found = probe(net.double(), [x])
    assert found.names == ("layers.0", "layers.1", "layers.2")
    with torch.no_grad():
        for b, (first, second) in enumerate(net.layers):
            middle = adaptive(net, x, first, second)
            ungated = 0.5 * second(first(x).relu()) - 2 * first(middle.tanh())
            torch.testing.assert_close(found.gate[:, b], norms(ungated) / norms(x), rtol=1e-10, atol=0)
            gates = [t.mean(1, keepdim=True).sigmoid().mean((1, 2)) for t in (first(x), middle)]
            torch.testing.assert_close(found.gates[:, b], sum(gates) / 2, rtol=1e-10, atol=0)
            x = adaptive_twice(net, x, first, second)


def test_steps_inside_a_branch_are_not_on_the_trunk():
    """A block whose branch is itself residual, twice; the last one is not taken apart either."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x):
            h = self.parts[0](x)
            h = h + self.parts[1](h).tanh()
            h = h + self.parts[2](h).tanh()
            return x + self.parts[3](h)

    found = probe(nn.Sequential(*[Nested() for _ in range(4)]), [torch.randn(3, 8)])
    assert found.names == ("0", "1", "2", "3")


def test_each_use_of_a_shared_layer_is_a_block():
    layer = Block(8, 8)
    found = probe(nn.Sequential(nn.Conv2d(3, 8, 1), layer, layer, layer), [torch.randn(2, 3, 4, 4)])
    assert found.names == ("1:1", "1:2", "1:3")


def test_a_state_that_is_overwritten_within_its_block():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x += self.a(x)
            x += self.b(x).tanh()
            return x

    net = nn.Sequential(nn.Linear(8, 8), InPlace(), InPlace())
    inputs = torch.randn(4, 8)
    with torch.no_grad():
        x = net[0](inputs)
        y = x + net[1].a(x)
        y = y + net[1].b(y).tanh()
    found = probe(net, [inputs])
    assert found.names == ("1", "2")
    torch.testing.assert_close(found.nsi[:, 0], (norms(y - x) / norms(x)), rtol=1e-5, atol=0)


def test_axes_permuted_within_a_block():
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 8)

        def forward(self, x):
            x = x + self.conv(x)
            x = x.permute(0, 2, 3, 1).contiguous()
            x = x + self.linear(x)
            return x.permute(0, 3, 1, 2)

    net, inputs = nn.Sequential(nn.Conv2d(3, 8, 1), Turning(), Turning()), torch.randn(4, 3, 5, 5)
    with torch.no_grad():
        states = [net[0](inputs)]
        for layer in net[1:]:
            states.append(layer(states[-1]))
    found = probe(net, [inputs])
    assert found.names == ("1", "2")
    assert found.stage.tolist() == [0, 0]
    for b in (0, 1):
        want = neural_stiffness_index(states[b], states[b + 1]).double()
        torch.testing.assert_close(found.nsi[:, b], want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["tokens first", "windows in the batch", "channels last"])
def test_features_with_inputs_in_other_axes(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Wide(8, layer_scale)

        def forward(self, x):  # [batch, tokens, 8]
            if kind == "tokens first":
                return self.net(x.transpose(0, 1))
            return self.net(x.reshape(-1, 3, 8))

    if kind == "channels last":
        net, x = Net(gate=True).eval(), torch.randn(3, 3, 8, 8)
        plain, turned = probe(net, [x]), probe(net.to(memory_format=torch.channels_last), [x])
    else:
        model, x = Model(), torch.randn(5, 6, 8)
        plain, turned = probe(model.net, [x]), probe(model, [x])
    torch.testing.assert_close(turned.nsi, plain.nsi, rtol=2e-6, atol=0)


def test_the_axis_that_counts_inputs():
    assert sample_axis((4, 3, 8, 8), 4) == 0
    assert sample_axis((7, 4, 16), 4) == 1
    assert sample_axis((4 * 9, 49, 16), 4) == -1
    assert sample_axis((5, 5, 16), 5, previous=1) == 1  # as many tokens as inputs
    assert sample_axis((49 * 9, 49, 16), 49, previous=-1) == -1
    assert sample_axis((5, 4, 16), 5, previous=1) == 0
    with pytest.raises(ValueError, match="no axis for the 4 inputs"):
        sample_axis((7, 9), 4)


def test_block_paths():
    path = lambda text: tuple(text.split(".")) if text else ()
    for own, branch, want in [
        ("layer1.0", "layer1.0", "layer1.0"),
        ("", "blocks.3", "blocks.3"),
        ("transformer", "transformer.layers.0.1", "transformer.layers.0"),
        ("encoder.layer.2.attention.output", "encoder.layer.2.attention", "encoder.layer.2"),
        (
            "encoder.layers.encoder_layer_4",
            "encoder.layers.encoder_layer_4.mlp",
            "encoder.layers.encoder_layer_4",
        ),
        ("", "body", "body"),
        ("stage.first", "stage.first.conv", "stage.first"),
    ]:
        assert block_path(path(own), path(branch)) == path(want), (own, branch)


def test_stages_end_where_elements_or_channels_change():
    shapes = [(8, 4, 4), (8, 4, 4), (4, 4, 8), (16, 8), (32, 2, 2), (32, 1, 4), (64, 1, 4)]
    assert stage_numbers(shapes) == [0, 0, 0, 0, 1, 1, 2]


# Batches


class Text(nn.Module):
    """A transformer in small: post-norm, masked attention, as BERT calls its arguments."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
        )

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=None if attention_mask is None else attention_mask == 0)
        return x


def test_padding_does_not_count():
    net = Text()
    ids = torch.randint(50, (3, 10))
    lengths = (10, 6, 3)
    mask = (torch.arange(10) < torch.tensor(lengths)[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids, "unknown": ids}
    found = probe(net, [batch])
    alone = torch.cat(
        [probe(net, [{"input_ids": ids[i : i + 1, :n]}]).nsi for i, n in enumerate(lengths)]
    )
    torch.testing.assert_close(found.nsi, alone, rtol=2e-5, atol=0)
    counted = probe(net, [batch], padding=False)
    assert ((counted.nsi - alone).abs() > 1e-3)[1:].any()
    same = probe(net, [batch], padding=lambda given: given["attention_mask"])
    assert torch.equal(same.nsi, found.nsi)
    assert torch.equal(probe(net, [(batch, ids[:, 0])]).nsi, found.nsi)
    with pytest.raises(ValueError, match=r"\[3, 10, 16\] do not have the 4 tokens"):
        probe(net, [batch], padding=mask[:, :4])
    with pytest.raises(ValueError, match="an input consists of padding only"):
        probe(net, [batch], padding=mask * 0)


def test_packed_tokens():
    """Texts without their padding, one after the other, as with variable-length attention."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Wide(8, layer_scale)

        def forward(self, x, attention_mask):
            return self.net(x[attention_mask > 0])

    model = Packed()
    x, mask = torch.randn(3, 5, 8), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    found = probe(model, [{"x": x, "attention_mask": mask}])
    for i, n in enumerate((5, 2, 4)):
        want = probe(model.net, [x[i : i + 1, :n]])
        torch.testing.assert_close(found.nsi[i : i + 1], want.nsi, rtol=2e-6, atol=0)


def test_batches_of_every_kind():
    net = Net().eval()
    x, y = torch.randn(7, 3, 8, 8), torch.arange(7)
    want = probe(net, [x]).nsi
    same = lambda found: torch.testing.assert_close(found.nsi, want, rtol=2e-6, atol=0)
    same(probe(net, x))
    same(probe(net, [(x[:3], y[:3]), (x[3:], y[3:])]))
    same(probe(net, ([part, None] for part in x.split(2))))
    same(probe(net, [{"images": x}]))
    same(probe(net, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)))
    same(probe(net, [{"data": x}], call=lambda model, batch: model(batch["data"])))
    assert probe(net, [x[:3], x[3:]], limit=5).nsi.shape == (5, 5)
    torch.testing.assert_close(
        probe(net, iter([x[:3], x[3:]]), limit=3).nsi, want[:3], rtol=2e-6, atol=0
    )
    done = []
    probe(net, x.split(3), progress=done.append)
    assert done == [3, 6, 7]


def test_a_network_whose_operations_depend_on_the_batch():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            if x.mean() > 0:  # more operations, and other numbers
                x = (x * 2).tanh()
            if x.shape[0] == 5:  # the first inputs of a batch do not show it
                x = x.sin().cos()
            return self.net(x)

    net = Fickle().eval()
    batches = [torch.rand(4, 3, 8, 8) * sign for sign in (1, -1, 1, -1)] + [torch.rand(5, 3, 8, 8)]
    found = probe(net, batches)
    forget(net.net)
    with torch.no_grad():
        [net(batch) for batch in batches]
    torch.testing.assert_close(found.nsi, by_hand(net.net)[0], **CLOSE)


def test_a_network_that_changes_its_depth_is_refused():
    class Shrinking(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(3, 3), Block(3, 3)])

        def forward(self, x):
            for block in self.blocks[: 1 if x.mean() > 0 else 2]:
                x = block(x)
            return x

    with pytest.raises(ValueError, match="has 1 blocks on one batch and others on the next"):
        probe(Shrinking().eval(), [torch.rand(2, 3, 4, 4), -torch.rand(2, 3, 4, 4)])


# What is left behind


def test_the_model_is_restored():
    net = nn.ModuleDict({"a": Net(), "b": nn.Dropout()})["a"]
    net.train()
    net.blocks[1].eval()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    probe(net, [torch.randn(4, 3, 8, 8)])
    assert net.training
    assert not net.blocks[1].training
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    with pytest.raises(RuntimeError, match="channels"):
        probe(net, [torch.randn(4, 5, 8, 8)])
    assert net.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert torch.is_grad_enabled()


def test_no_hooks_stay_where_one_is_refused():
    class Refusing(nn.Linear):
        def register_forward_hook(self, *args, **options):
            raise RuntimeError("no hooks here")

    net = nn.Sequential(Net(), Refusing(3, 3))
    with pytest.raises(RuntimeError, match="no hooks here"):
        probe(net, [torch.randn(2, 3, 8, 8)])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert net.training


def test_threads_restore_the_settings_of_the_process():
    start = threading.Barrier(3)

    def one():
        net, x = Net().eval(), torch.randn(2, 3, 8, 8)
        start.wait()
        for _ in range(3):
            probe(net, [x])

    threads = [threading.Thread(target=one) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.slow
def test_memory_does_not_grow_with_batches():
    net = Net(gate=True).eval()
    features, alive = [], []

    def keep(module, args, output):
        module.seen.clear()
        features.append(weakref.ref(output))

    for block in net.blocks:
        block.register_forward_hook(keep)

    def count(_):
        gc.collect()
        assert all(ref() is None for ref in features)
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        tensors = [t for t in tensors if t.layout is torch.strided]
        memory = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        alive.append(sum(memory.values()))

    inputs = torch.randn(8, 3, 8, 8)
    probe(net, (inputs for _ in range(7)), progress=count)
    rows = 4 * 8 * 5 * 8  # four numbers for each input and block, in float64
    assert max(alive[i + 1] - alive[i] for i in range(2, 6)) <= rows


def test_compiled_networks_run_eagerly():
    net, x = Net().eval(), torch.randn(4, 3, 8, 8)
    want = probe(net, [x])
    found = probe(torch.compile(net, backend="eager"), [x])
    assert found.names == want.names
    assert found.model == "Net"
    torch.testing.assert_close(found.nsi, want.nsi, **CLOSE)


def test_fused_encoder_layers_run_unfused():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 3).eval(), torch.randn(4, 6, 16)
    fused = []
    with torch.no_grad(), torch.profiler.profile() as profile:
        net(x)
    fused = [e.key for e in profile.key_averages() if "transformer_encoder_layer" in e.key]
    assert fused  # otherwise this test tests nothing
    assert probe(net, [x]).names == ("layers.0", "layers.1", "layers.2")


def test_autocast():
    net, x = Net().eval(), torch.randn(4, 3, 8, 8)
    want = probe(net, [x])
    with torch.autocast("cpu", torch.bfloat16):
        found = probe(net, [x])
    torch.testing.assert_close(found.nsi, want.nsi, rtol=0.02, atol=0)


def test_kernels_that_torch_does_not_dispatch():
    """As Triton's: memory is made by torch, and filled by something that it does not see."""

    class Kernel(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            out = torch.empty(x.shape)
            out.numpy()[:] = x.numpy() @ self.weight.detach().numpy()
            return out

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = Kernel()

        def forward(self, x):
            return x + self.kernel(x)

    net, x = nn.Sequential(nn.Linear(8, 8), Layer(), Layer()), torch.randn(4, 8)
    found = probe(net, [x])
    assert found.names == ("1", "2")
    with torch.no_grad():
        x = net[0](x)
        want = norms(x @ net[1].kernel.weight) / norms(x)
    torch.testing.assert_close(found.nsi[:, 0], want, rtol=1e-5, atol=0)


def test_a_model_with_a_fixed_batch_size():
    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Wide(8, layer_scale)

        def forward(self, x):
            return self.net(x.view(6, 4, 8))

    model, x = Strict(), torch.randn(6, 4, 8)
    torch.testing.assert_close(probe(model, [x]).nsi, probe(model.net, [x]).nsi, rtol=2e-6, atol=0)


def test_a_random_model_is_refused():
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Wide(8, layer_scale)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            for _ in range(self.calls):
                x = x.sin()
            return self.net(x)

    with pytest.raises(ValueError, match="runs other operations in a second call"):
        probe(Random(), [torch.randn(4, 3, 8)])


def test_initial_is_probed_on_the_same_inputs():
    trained, fresh = Net().eval(), Net().eval()
    found = probe(trained, (torch.full((2, 3, 8, 8), float(i + 1)) for i in range(3)), initial=fresh)
    alone = probe(fresh, [torch.full((2, 3, 8, 8), float(i + 1)) for i in range(3)], settle=True)
    torch.testing.assert_close(found.initial.nsi, alone.nsi, **CLOSE)
    with pytest.raises(ValueError, match="initial is the model itself"):
        probe(trained, [torch.randn(2, 3, 8, 8)], initial=trained)
    with pytest.raises(ValueError, match=r"has blocks \[1\], this one \[2, 3\]"):
        probe(trained, [torch.randn(2, 3, 8, 8)], initial=nn.Sequential(Block(3, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(step="two"), "step = 'two'; it is one of 'one', 'gate'"),
        (dict(granularity="layer"), "granularity = 'layer'"),
        (dict(limit=0), "limit = 0"),
        (dict(batches=[]), "batches held nothing"),
        (dict(batches=["text"]), "without a tensor"),
        (dict(batches=[()]), "a batch is empty"),
        (dict(within="stagez"), r"within = 'stagez'; Net has no module of that path, .* did you mean"),
        (dict(within="stem"), "adds no branch to its input in its module 'stem'"),
        (dict(model=nn.Linear(3, 3)), "Linear has no residual blocks: it adds no branch"),
        (dict(mean="both"), "mean = 'both'"),
    ],
)
def test_error_messages(change, message):
    given = dict(model=Net().eval(), batches=[torch.randn(2, 3, 8, 8)]) | change
    if isinstance(given["model"], nn.Linear):
        given["batches"] = [torch.randn(2, 3)]
    with pytest.raises(ValueError, match=message):
        probe(**given)


def test_a_model_on_several_devices_refuses_a_device():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(ValueError, match=r"lies on cpu, meta, so device='cpu' would not be undone"):
        probe(net, [torch.randn(2, 3)], device="cpu")
    assert net.training


def test_other_objects_than_modules_are_refused():
    with pytest.raises(TypeError, match="model is a function; probe takes an nn"):
        probe(lambda x: x, [torch.zeros(1)])


# Networks of others, from small configurations

SMALL = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
TEXT = SMALL | dict(vocab_size=100)
IMAGE = SMALL | dict(image_size=32, patch_size=8)
SWIN = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 3], num_heads=[2, 4], window_size=4)
FAMILIES = [
    ("resnet", dict(embedding_size=8, hidden_sizes=[16, 32, 64], depths=[2, 3, 1]), [2, 3, 1]),
    ("resnet", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"), [2, 2]),
    ("convnext", dict(hidden_sizes=[8, 16, 32, 64], depths=[2, 2, 3, 1]), [2, 2, 3, 1]),
    ("regnet", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 3], groups_width=8), [2, 3]),
    ("vit", IMAGE, [3]),
    ("swin", SWIN, [2, 3]),
    ("bert", TEXT, [3]),
    ("albert", TEXT | dict(embedding_size=16), [3]),
    ("distilbert", dict(dim=32, n_layers=3, n_heads=4, hidden_dim=64, vocab_size=100), [3]),
    ("deberta-v2", TEXT | dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8), [3]),
    ("modernbert", TEXT | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2), [3]),
    ("gpt2", dict(n_embd=32, n_layer=3, n_head=4, vocab_size=100), [3]),
    ("gptj", dict(n_embd=32, n_layer=3, n_head=4, vocab_size=100, rotary_dim=4), [3]),
    ("llama", TEXT | dict(num_key_value_heads=2), [3]),
    ("gemma2", TEXT | dict(num_key_value_heads=2, head_dim=8, pad_token_id=0), [3]),
    ("mixtral", TEXT | dict(num_key_value_heads=2), [3]),
    ("phi", TEXT, [3]),
    ("xlnet", dict(d_model=32, n_layer=3, n_head=4, d_inner=64, vocab_size=100), [3]),
    ("mamba", dict(hidden_size=32, num_hidden_layers=3, vocab_size=100), [3]),
]  # fmt: skip


def made(kind, options):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **options)).eval()


def inputs_for(model, n=3):
    if not hasattr(model.config, "vocab_size"):
        return (
            torch.randn(n, 3, 64, 64)
            if model.config.model_type == "convnext"
            else torch.randn(n, 3, 32, 32)
        )
    mask = torch.ones(n, 12, dtype=torch.long)
    mask[1, 7:] = 0
    batch = {"input_ids": torch.randint(5, 90, (n, 12))}
    return batch if model.config.model_type == "mamba" else batch | {"attention_mask": mask}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("kind", "options", "stages"), FAMILIES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_transformers(kind, options, stages):
    model = made(kind, options)
    found = probe(model, [inputs_for(model)])
    assert torch.bincount(found.stage).tolist() == stages
    assert found.nsi.isfinite().all()
    assert not found.gated


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "vit"])
def test_transformers_against_their_hidden_states(kind):
    """Pre-norm blocks end in the sum itself; BERT's hidden states lie behind a norm, its x before one."""
    options = {k: o for k, o, _ in FAMILIES}[kind]
    model = made(kind, options).double()
    batch = inputs_for(model)
    found = probe(model, [batch])
    real = batch["attention_mask"].bool() if isinstance(batch, dict) else None
    sums = []
    layers = {"bert": lambda: model.encoder.layer, "gpt2": lambda: model.h, "llama": lambda: model.layers,
              "vit": lambda: model.layers}[kind]()  # fmt: skip
    for layer in layers:
        if kind == "bert":
            layer.output.LayerNorm.register_forward_pre_hook(lambda m, args: sums.append(args[0]))
        else:
            layer.register_forward_hook(
                lambda m, args, out: sums.append(out if isinstance(out, torch.Tensor) else out[0])
            )
    starts = []
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda m, args, kwargs: starts.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(**batch) if isinstance(batch, dict) else model(batch.double())
    for b, (x, after) in enumerate(zip(starts, sums)):
        weight = torch.ones(x.shape[:2]) if real is None else real
        x, after = x * weight[..., None], after * weight[..., None]
        torch.testing.assert_close(found.nsi[:, b], norms(after - x) / norms(x), rtol=1e-10, atol=0)


def test_encoder_and_decoder_of_one_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=2, num_heads=4,
                                   vocab_size=100)  # fmt: skip
    model = transformers.T5Model(config)
    batch = {"input_ids": torch.randint(5, 90, (3, 12)), "attention_mask": torch.ones(3, 12),
             "decoder_input_ids": torch.randint(5, 90, (3, 5))}  # fmt: skip
    encoder = probe(model, [batch], within="encoder")
    assert encoder.names == tuple(f"encoder.block.{i}" for i in range(3))
    alone = probe(transformers.T5EncoderModel(config), [{"input_ids": batch["input_ids"]}])
    assert alone.names == encoder.names
    fine = probe(model, [batch], within="decoder", granularity="addition")
    assert len(fine.names) == 6  # attention, cross-attention and network in two blocks


TIMM = {
    "resnet50": [3, 4, 6, 3],
    "seresnet50": [3, 4, 6, 3],
    "convnext_atto": [2, 2, 6, 2],
    "vit_tiny_patch16_224": [12],
    "swin_tiny_patch4_window7_224": [2, 2, 6, 2],
    "efficientnet_b0": [1, 1, 2, 2, 3],  # blocks with a shortcut
    "regnety_002": [1, 1, 4, 7],
    "res2net50_26w_4s": [3, 4, 6, 3],
    "edgenext_xx_small": [2, 2, 6, 2],
    "maxvit_tiny_tf_224": [2, 2, 5, 2],
}


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, pretrained=False)
    size = model.default_cfg["input_size"][-1] if "net" not in name else 96
    found = probe(model, [torch.randn(2, 3, size, size)])
    assert torch.bincount(found.stage).tolist() == TIMM[name]
    gates = (~found.gates.isnan()).all(0)
    assert gates.all() if name == "seresnet50" else not gates.any()


TORCHVISION = {
    "resnet18": [2, 2, 2, 2],
    "resnet50": [3, 4, 6, 3],
    "vit_b_16": [12],
    "swin_t": [2, 2, 6, 2],
    "convnext_tiny": [3, 3, 9, 3],
    "mobilenet_v2": [1, 2, 3, 2, 2],
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name):
    models = pytest.importorskip("torchvision").models
    size = 224 if name == "vit_b_16" else 64
    found = probe(models.get_model(name), [torch.randn(2, 3, size, size)])
    assert torch.bincount(found.stage).tolist() == TORCHVISION[name]


@pytest.mark.gpu
def test_on_a_gpu():
    net, x = Net(gate=True).eval(), torch.randn(6, 3, 8, 8)
    want = probe(net, [x])
    found = probe(net, [x], device="cuda")
    assert next(net.parameters()).device.type == "cpu"
    torch.testing.assert_close(found.nsi, want.nsi, rtol=1e-3, atol=0)
    torch.testing.assert_close(found.gates, want.gates, rtol=1e-3, atol=0)


def test_fresh_normalisations_use_the_first_batch_and_are_restored():
    torch.manual_seed(0)
    model = resnet_cifar(20, gate="stepnet")
    images = torch.randn(16, 3, 32, 32)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    profile = probe(model, [images[:8], images[8:]], settle=True)
    beside = probe(model, [images[:8], images[8:]], initial=copy.deepcopy(model))
    assert torch.equal(beside.initial.one, profile.one)
    assert not torch.equal(beside.one, profile.one)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    settled = copy.deepcopy(model).train()
    for norm in settled.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 1.0
    with torch.no_grad():
        settled(images[:8])
    torch.testing.assert_close(profile.one, probe(settled, [images]).one, rtol=1e-4, atol=1e-5)


def test_one_image_is_enough_for_norms_of_maps():
    torch.manual_seed(0)
    model, images = resnet_cifar(20, gate="se", width=4), torch.randn(4, 3, 16, 16)
    settled = copy.deepcopy(model).train()
    for norm in settled.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 1.0
    with torch.no_grad():
        settled(images[:1])
    one_by_one = list(images.split(1))
    expected = probe(settled, one_by_one).one
    torch.testing.assert_close(probe(model, one_by_one, settle=True).one, expected)
    beside = probe(model, one_by_one, initial=copy.deepcopy(model)).initial
    torch.testing.assert_close(beside.one, expected)
    pooled = resnet_cifar(20, gate="stepnet", width=4)  # it normalises means over space
    for options in ({"settle": True}, {"initial": copy.deepcopy(pooled)}):
        with pytest.raises(ValueError, match=r"first batch has one input.*begin with a larger batch"):
            probe(pooled, one_by_one, **options)


class Encoder(nn.Module):
    def __init__(self, layers, vocabulary=None, channels=3):
        super().__init__()
        self.embed = nn.Linear(channels, 16) if vocabulary is None else nn.Embedding(vocabulary, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(layers)
        )

    def forward(self, x, mask=None):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=None if mask is None else mask == 0)
        return x


class Translator(nn.Module):
    """An encoder, and a longer decoder, which is the trunk."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(2, 50), Encoder(3, 50)

    def forward(
        self, input_ids, decoder_input_ids=None, attention_mask=None, decoder_attention_mask=None
    ):
        about = self.encoder(input_ids, attention_mask).mean()
        given = input_ids.roll(1, 1) if decoder_input_ids is None else decoder_input_ids
        return self.decoder(given, decoder_attention_mask) * about


class Pair(nn.Module):
    """A text, and an image of as many tokens, which is the trunk."""

    def __init__(self):
        super().__init__()
        self.text, self.vision = Encoder(2, 50), Encoder(3)

    def forward(self, input_ids, pixel_values, attention_mask=None):
        return self.text(input_ids, attention_mask).mean() + self.vision(pixel_values)


def test_a_mask_applies_to_its_own_tokens_only():
    torch.manual_seed(0)
    net, ids, mask = Translator().eval(), torch.randint(50, (2, 8)), torch.ones(2, 8).long()
    mask[1, 3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    both = batch | {"decoder_input_ids": ids.flip(1)}
    for given in (batch, both):  # the decoder's tokens are all real
        assert probe(net, [given]).names[0].startswith("decoder")
        assert torch.equal(probe(net, [given]).nsi, probe(net, [given], padding=False).nsi)
    own = probe(net, [both | {"decoder_attention_mask": mask}]).nsi
    alone = probe(net, [{"input_ids": ids[1:], "decoder_input_ids": ids.flip(1)[1:, :3]}]).nsi
    torch.testing.assert_close(own[1:], alone, rtol=2e-5, atol=0)
    inside = probe(net, [both], within="encoder").nsi
    alone = probe(net, [{"input_ids": ids[1:, :3]}], within="encoder").nsi
    torch.testing.assert_close(inside[1:], alone, rtol=2e-5, atol=0)

    net, images = Pair().eval(), torch.randn(2, 8, 3)
    seen = probe(net, [batch | {"pixel_values": images}])
    assert seen.names[0].startswith("vision")
    assert torch.equal(seen.nsi, probe(net.vision, [images]).nsi)


class Steps(nn.Module):
    """Linear layers over ``[batch, tokens, width]``, or convolutions over ``[batch, width, tokens]``."""

    def __init__(self, width, part):
        super().__init__()
        self.layers = nn.ModuleList(part(width, width) for _ in range(3))

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


@pytest.mark.parametrize("width", [6, 8])
def test_the_token_axis_with_as_many_channels_as_tokens(width):
    torch.manual_seed(0)
    x, mask = torch.randn(2, 6, width), torch.ones(2, 6)
    mask[1, 2:] = 0
    net = Steps(width, nn.Linear)
    found = probe(net, [{"x": x, "attention_mask": mask}]).nsi[1:]
    torch.testing.assert_close(found, probe(net, [x[1:, :2]]).nsi, rtol=1e-5, atol=0)
    net, x = Steps(width, lambda a, b: nn.Conv1d(a, b, 1)), x.mT
    found = probe(net, [{"x": x, "attention_mask": mask}]).nsi[1:]
    torch.testing.assert_close(found, probe(net, [x[1:, :, :2]]).nsi, rtol=1e-5, atol=0)


def test_an_ambiguous_token_axis_raises():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv1d(6, 6, 1), nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(self.conv(x.mT).mT)

    net = Steps(6, lambda a, b: Mixed())
    for tokens in (6, 7):
        mask = torch.ones(2, tokens)
        mask[1, 2:] = 0
        batch = {"x": torch.randn(2, tokens, 6), "attention_mask": mask}
        if tokens == 6:
            with pytest.raises(ValueError, match=r"\[2, 6, 6\] have 2 axes.*to another length"):
                probe(net, [batch])
        else:
            probe(net, [batch])


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Steps(8, nn.Linear)

    def forward(self, masked_image, scale=1.0, edges=None):
        return self.net(masked_image * scale)


def test_the_batch_size_comes_from_all_tensors_of_a_mapping():
    x, net = torch.randn(4, 8), Conditioned().eval()
    expected = probe(net, [x]).nsi
    assert expected.shape == (4, 3)
    batches = [
        {"masked_image": x},  # no mask
        {"scale": torch.ones(1), "masked_image": x},
        {"scale": torch.tensor(1.0), "masked_image": x, "some_mask": torch.ones(7, 7)},
    ]
    for batch in batches:
        assert torch.equal(probe(net, [batch]).nsi, expected)
    with pytest.raises(ValueError, match=r"differ \(masked_image 4, edges 2\); each must have as many"):
        probe(net, [{"masked_image": x, "edges": torch.zeros(2, 9)}])
    text = Text()
    ids, places = torch.randint(50, (3, 8)), torch.arange(8)[None]
    assert probe(text, [{"position_ids": places, "input_ids": ids}]).nsi.shape == (3, 3)
