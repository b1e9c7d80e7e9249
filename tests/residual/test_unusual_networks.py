"""`probe` on networks that add in unusual ways; each writes down the x and the sum of its own blocks."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attractor.residual import probe

DIM = 8


class Notes:
    """What blocks write down while a network is run by hand, and not while it is probed."""

    pages = None

    @classmethod
    def take(cls, x, after):
        if cls.pages is not None:
            cls.pages.append((x.clone(), after.clone()))
        return after

    @classmethod
    def of(cls, net, batch, call, axis=0):
        cls.pages = []
        net.eval()
        with torch.no_grad():
            call(net, batch)
        pages, cls.pages = cls.pages, None
        size = lambda t: t.to(torch.promote_types(t.dtype, torch.float64)).movedim(axis, 0).flatten(1)
        rows = [(size(after) - size(x)).norm(dim=1) / size(x).norm(dim=1) for x, after in pages]
        return torch.stack(rows, 1)


def check(net, *batches, names, call=lambda net, batch: net(batch), axis=0, rtol=1e-5):
    want = torch.cat([Notes.of(net, batch, call, axis) for batch in batches])
    found = probe(net, list(batches), call=call)
    assert found.names == tuple(names)
    torch.testing.assert_close(found.nsi, want, rtol=rtol, atol=1e-12)
    return found


def mlp(dim=DIM, hidden=12):
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


def normed(x):
    return layer_norm(x, x.shape[-1:])


class Attention(nn.Module):
    def __init__(self, project=nn.Linear):
        super().__init__()
        self.project, self.out = project(DIM, 3 * DIM), project(DIM, DIM)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-3, -2)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


class Layer(nn.Module):
    """Attention and MLP; pre-norm, or post-norm with the norm behind the sum."""

    def __init__(self, attention=Attention, network=mlp, post=False):
        super().__init__()
        self.attention, self.network, self.post = attention(), network(), post

    def forward(self, x):
        start = x
        if self.post:
            x = normed(x + self.attention(x))
            return normed(Notes.take(start, x + self.network(x)))
        x = x + self.attention(normed(x))
        return Notes.take(start, x + self.network(normed(x)))


class Parallel(nn.Module):
    """GPT-J's block, in every order of its sum."""

    def __init__(self, order):
        super().__init__()
        self.attention, self.network, self.order = Attention(), mlp(), order

    def forward(self, x):
        h = normed(x)
        a, m = self.attention(h), self.network(h)
        sums = {"x+(a+m)": lambda: x + (a + m), "x+a+m": lambda: x + a + m, "a+m+x": lambda: a + m + x,
                "m+a+x": lambda: m + a + x, "(m+x)+a": lambda: (m + x) + a}  # fmt: skip
        return Notes.take(x, sums[self.order]())


@pytest.mark.parametrize("order", ["x+(a+m)", "x+a+m", "a+m+x", "m+a+x", "(m+x)+a"])
def test_parallel_attention_and_mlp(order):
    net = nn.Sequential(nn.Linear(DIM, DIM), *[Parallel(order) for _ in range(3)])
    check(net, torch.randn(4, 5, DIM), names="123")


class LoRA(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


class Adapted(nn.Module):
    """A branch with an adapter behind, which is a residual block itself."""

    def __init__(self, branch):
        super().__init__()
        self.branch, self.adapter = branch, mlp(hidden=3)

    def forward(self, x):
        f = self.branch(x)
        return f + self.adapter(f)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("kind", ["lora", "adapter"])
def test_additions_inside_branches(kind, post, depth):
    if kind == "lora":
        network = lambda: nn.Sequential(LoRA(DIM, 12), nn.GELU(), LoRA(12, DIM))
        layer = lambda: Layer(lambda: Attention(LoRA), network, post)
    else:
        layer = lambda: Layer(lambda: Adapted(Attention()), lambda: Adapted(mlp()), post)
    net = nn.Sequential(nn.Linear(DIM, DIM), *[layer() for _ in range(depth)])
    check(net, torch.randn(4, 5, DIM), names="123"[:depth])


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("how", ["x + x0", "a x + b x0", "x + a old"])
def test_additions_of_older_states_are_not_steps(how, post):
    """The embedding again in every layer, or a U-shaped transformer's shortcuts: the trunk goes on."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.rand(6, 2) + 0.2)
            self.layers = nn.ModuleList([Layer(post=post) for _ in range(6)])

        def forward(self, x):
            x = first = self.stem(x)
            old = []
            for i, (layer, (a, b)) in enumerate(zip(self.layers, self.scale)):
                if how == "x + x0":
                    x = x + first
                elif how == "a x + b x0":
                    x = a * x + b * first
                elif i >= 3:
                    x = x + a * old.pop()
                x = layer(x)
                old += [x] if i < 3 else []
            return x

    check(Mixing(), torch.randn(4, 5, DIM), names=[f"layers.{i}" for i in range(6)])


def test_blocks_under_a_long_shortcut():
    class Group(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(Layer(), Layer())

        def forward(self, x):
            return x + self.layers(x)

    net = nn.Sequential(nn.Linear(DIM, DIM), Group(), Group())
    names = ["1.layers.0", "1.layers.1", "2.layers.0", "2.layers.1"]
    check(net, torch.randn(4, 5, DIM), names=names)


def test_a_condition_computed_after_the_state():
    """As in DiT: the first block is not torn apart by what its gates were made from."""

    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.network = Attention(), mlp()
            self.modulate = nn.Linear(DIM, 6 * DIM)

        def forward(self, x, c):
            a, b, first, d, e, second = self.modulate(c)[:, None].chunk(6, -1)
            start = x
            x = x + first * self.attention(normed(x) * (1 + a) + b)
            return Notes.take(start, x + second * self.network(normed(x) * (1 + d) + e))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.condition = nn.Linear(DIM, DIM), nn.Linear(3, DIM)
            self.layers = nn.ModuleList([Conditioned() for _ in range(3)])

        def forward(self, x, c):
            x, c = self.stem(x), self.condition(c)
            for layer in self.layers:
                x = layer(x, c)
            return x

    batch = {"x": torch.randn(4, 5, DIM), "c": torch.randn(4, 3)}
    names = [f"layers.{i}" for i in range(3)]
    found = check(Net(), batch, names=names, call=lambda net, batch: net(**batch))
    assert not found.gates.isnan().any()


def test_each_use_of_a_list_of_parts_is_a_block():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleList([Attention(), mlp()])])

        def forward(self, x):
            for _ in range(3):
                start, (attention, network) = x, self.layers[0]
                x = x + attention(x)
                x = Notes.take(start, x + network(x))
            return x

    check(Shared(), torch.randn(4, 5, DIM), names=[f"layers.0:{i}" for i in (1, 2, 3)])


@pytest.mark.parametrize("tokens", [4, 5, 6])
def test_tokens_first_even_if_there_are_as_many_as_inputs(tokens):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(Layer(), Layer())

        def forward(self, x):
            return self.layers(x.transpose(0, 1)).transpose(0, 1)

    batches = [torch.randn(n, tokens, DIM) for n in (5, 3)]
    check(Turned(), *batches, names=["layers.0", "layers.1"], axis=1)


@pytest.mark.parametrize("rows", [4, 5])
def test_transposed_rows_and_columns(rows):
    """Axial attention: with as many rows as columns only the numbers tell."""

    class Axial(nn.Module):
        def __init__(self):
            super().__init__()
            self.along, self.across = Attention(), Attention()

        def forward(self, x):
            start = x
            x = (x + self.along(x)).transpose(1, 2).contiguous()
            return Notes.take(start, (x + self.across(x)).transpose(1, 2))

    net = nn.Sequential(nn.Linear(DIM, DIM), Axial(), Axial())
    check(net, torch.randn(3, rows, 4, DIM), names="12")


class Experts(nn.Module):
    """The best of many networks for each token; those that no token chose are not called."""

    def __init__(self, experts):
        super().__init__()
        self.router = nn.Linear(DIM, experts)
        self.experts = nn.ModuleList([mlp(hidden=4) for _ in range(experts)])

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            own = (choice == i).nonzero()[:, 0]
            if len(own):
                out.index_add_(0, own, expert(tokens[own]) * weight[own, None])
        return out.view_as(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("experts", "tokens"), [(3, 2), (40, 30)])
def test_a_mixture_of_experts(experts, tokens):
    net = nn.Sequential(*[Layer(network=lambda: Experts(experts)) for _ in range(3)])
    check(net, *torch.randn(4, 3, tokens, DIM), names="012")


def test_constants_created_in_forward():
    """Their memory may lie where a feature was; they are constants all the same."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.gate = mlp(), nn.Linear(DIM, 1)

        def forward(self, x):
            f = self.branch(x)
            gate = self.gate(f).sigmoid()
            gone = [f.sin() for _ in range(50)]
            del gone
            return Notes.take(x, x + f * gate * torch.tensor(0.5))

    net = nn.Sequential(nn.Linear(DIM, DIM), *[Gated() for _ in range(4)])
    assert not check(net, torch.randn(4, DIM), names="1234").gates.isnan().any()


class Stem(nn.Module):
    """A U-Net of residual blocks, its shortcuts by concatenation."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)
        self.first, self.middle = nn.ModuleList([Conv(4, 4), Conv(4, 4)]), Conv(8, 8)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, 2), nn.ModuleList([Conv(8, 4), Conv(4, 4)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.first:
            x = block(x)
        x = torch.cat((x, self.up(self.middle(self.down(x)))), 1)
        for block in self.last:
            x = block(x)
        return x


class Conv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm, self.a = nn.GroupNorm(2, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.b = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x):
        f = self.b(self.a(self.norm(x).relu_()).relu_())
        x = self.shortcut(x)
        return Notes.take(x, x + f)


def test_a_u_net():
    found = check(
        Stem(), torch.randn(3, 3, 8, 8), names=["first.0", "first.1", "middle", "last.0", "last.1"]
    )
    assert found.stage.tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointed_layers(reentrant):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    check(Saving().train(), torch.randn(4, 5, DIM), names=["layers.0", "layers.1"])


def test_single_inputs_in_inference_mode():
    net, x = nn.Sequential(nn.Linear(DIM, DIM), Layer(), Layer()), torch.randn(1, 5, DIM)
    want = check(net, x, names="12")
    with torch.inference_mode():
        assert torch.equal(probe(net, [x]).nsi, want.nsi)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_parts(how):
    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = (
                torch.jit.script(mlp())
                if how == "script"
                else torch.jit.trace(mlp(), torch.ones(2, DIM))
            )

        def forward(self, x):
            return Notes.take(x, x + self.branch(x))

    net = nn.Sequential(nn.Linear(DIM, DIM), Scripted(), Scripted())
    check(net, *torch.randn(3, 4, DIM), names="12")


def test_complex_features():
    class Wave(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.cfloat))

        def forward(self, x):
            return Notes.take(x, x + (x @ self.weight).tanh())

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.layers = nn.Linear(DIM, DIM), nn.Sequential(Wave(), Wave())

        def forward(self, x):
            return self.layers(torch.fft.fft(self.stem(x)))

    check(Spectral(), torch.randn(4, DIM), names=["layers.0", "layers.1"])


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def test_a_network_without_parameters_and_batches_with_names():
    class Fourier(nn.Module):
        def forward(self, x):
            for _ in range(3):
                x = Notes.take(x, x + torch.fft.fft(x).real.tanh())
            return x

    batch = Pair(torch.randn(4, DIM, dtype=torch.float64), torch.arange(4))
    names = ["model:1", "model:2", "model:3"]  # in their own precision: nothing says another
    check(Fourier(), batch, names=names, call=lambda net, batch: net(batch.images), rtol=1e-12)


def test_tokens_in_the_last_axis():
    """Padding is left out wherever the tokens are: SqueezeBERT's features are [batch, dim, tokens]."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Embedding(20, DIM)
            self.layers = nn.ModuleList([nn.Conv1d(DIM, DIM, 1) for _ in range(2)])

        def forward(self, input_ids, attention_mask=None):
            x = self.stem(input_ids).transpose(1, 2)
            for layer in self.layers:
                x = x + layer(x).tanh()
            return x

    net, ids = Turned(), torch.randint(20, (3, 5))
    mask = torch.tensor([[1] * 5, [1] * 2 + [0] * 3, [1] * 4 + [0]])
    found = probe(net, [{"input_ids": ids, "attention_mask": mask}])
    for i, n in enumerate((5, 2, 4)):
        alone = probe(net, [{"input_ids": ids[i : i + 1, :n]}])
        torch.testing.assert_close(found.nsi[i : i + 1], alone.nsi, rtol=2e-6, atol=0)


def test_tokens_that_are_flattened_behind_a_norm():
    """Post-norm OPT: the second sum of a layer is [batch * tokens, dim]."""

    class Flat(Layer):
        def forward(self, x):
            start, shape = x, x.shape
            x = normed(x + self.attention(x)).flatten(0, 1)
            x = Notes.take(start, (x + self.network(x)).view(shape))
            return normed(x)

    check(nn.Sequential(nn.Linear(DIM, DIM), Flat(), Flat()), torch.randn(4, 5, DIM), names="12")


# What cannot be told apart, or is no residual step, as `probe` says


def test_networks_without_residual_additions_are_refused():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(DIM * (i + 1), DIM) for i in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.cat((x, layer(x).relu()), -1)
            return x

    class Highway(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x):
            gate = self.gate(x).sigmoid()
            return gate * self.f(x).relu() + (1 - gate) * x

    for net in (Dense(), nn.Sequential(Highway(), Highway())):
        with pytest.raises(ValueError, match="adds no branch to its input"):
            probe(net, [torch.randn(4, DIM)])


def test_learnt_latents_are_a_state_after_an_addition():
    class Latents(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents, self.layers = (
                nn.Parameter(torch.randn(1, 6, DIM)),
                nn.Sequential(Layer(), Layer()),
            )
            self.cross = nn.MultiheadAttention(DIM, 2, batch_first=True)

        def forward(self, x):
            z = self.latents.expand(len(x), -1, -1)
            return self.layers(z + self.cross(z, x, x)[0])

    check(Latents(), torch.randn(4, 20, DIM), names=["layers.0", "layers.1"])
