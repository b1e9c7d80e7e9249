"""What the argument `batches` of `probe` means, and what a model is called with."""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from attractor.residual import insert_gates, probe
from attractor.residual.batch import arguments_of, batches_of, is_batch

X, Y = torch.randn(7, 3, 8, 8), torch.arange(7)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x.relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 4, 1), nn.Sequential(Block(), Block())

    def forward(self, images):
        return self.blocks(self.stem(images))


class Pair(nn.Module):
    """Two inputs are needed, and a third may be given."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, images, shift, scale=None):
        return self.net(images + shift) * (1 if scale is None else scale)


class Listed(nn.Module):
    """One argument that is a list."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, parts):
        return self.net(parts[0] + parts[1])


class Any(nn.Module):
    """Any number of inputs."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, *parts):
        return self.net(sum(parts))


class Sample(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


ONE = {
    "a tensor": lambda: X,
    "inputs and labels": lambda: (X, Y),
    "inputs, labels and more": lambda: (X, Y, None, ["names"] * 7),
    "inputs alone": lambda: (X,),
    "a named tuple": lambda: Sample(X, Y),
    "soft labels": lambda: (X, torch.rand(7, 10)),
    "masks of the size of images": lambda: (X, torch.zeros(7, 8, 8, dtype=torch.long)),
    "a mapping": lambda: {"images": X, "labels": Y},
    "a mapping and labels": lambda: ({"images": X}, Y),
    "an ordered mapping with more": lambda: OrderedDict(images=X, index=Y),
    "a list in a tuple": lambda: ([X], Y),
}
SEVERAL = {
    "a list of tensors": lambda: [X[:3], X[3:6], X[6:]],
    "a list of pairs": lambda: [(X[:3], Y[:3]), (X[3:], Y[3:])],
    "a list of lists, as loaders yield them": lambda: [[X[:3], Y[:3]], [X[3:], Y[3:]]],
    "a list of pairs of equal shape": lambda: [(X[:3], X[:3]), (X[3:], X[3:])],
    "a list of mappings": lambda: [{"images": X[:3]}, {"images": X[3:]}],
    "a loader of images": lambda: DataLoader(X, batch_size=3),
    "a loader of pairs": lambda: DataLoader(TensorDataset(X, Y), batch_size=3),
    "a generator": lambda: (part for part in X.split(3)),
    "a generator of pairs": lambda: zip(X.split(3), Y.split(3)),
    "pieces of unequal length": lambda: X.split(3),
}


@pytest.mark.parametrize("kind", [*ONE, *SEVERAL])
def test_all_forms_of_batches_give_the_same_profile(net, kind):
    want = probe(net, [X]).nsi
    found = probe(net, {**ONE, **SEVERAL}[kind]())
    torch.testing.assert_close(found.nsi, want, rtol=1e-5, atol=0)
    assert is_batch({**ONE, **SEVERAL}[kind](), net) is (kind in ONE)


def test_labels_are_not_inputs(net):
    assert probe(net, (X, Y)).nsi.shape == (7, 2)
    assert probe(net, (X, Y), limit=4).nsi.shape == (4, 2)
    tokens = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4), Residual())
    ids = torch.randint(20, (5, 6))
    assert probe(tokens, (ids, torch.arange(5))).nsi.shape == (5, 1)  # labels that it could read, too


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x).tanh()


AMBIGUOUS = {
    "pieces of equal length": lambda: X[:6].split(3),
    "an image and its target": lambda: (X, torch.rand_like(X)),
    "two mappings": lambda: ({"images": X}, {"images": X}),
    "pairs in a tuple": lambda: ((X, Y), (X, Y)),
}


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_ambiguous_batches_are_refused(net, kind):
    batches = AMBIGUOUS[kind]()
    with pytest.raises(
        ValueError, match=r"batches is a tuple whose elements 0 and 1 are alike.*\[batch\]"
    ):
        probe(net, batches)
    probe(net, list(batches))
    if kind == "an image and its target":
        assert probe(net, [batches]).nsi.shape == (7, 2)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([X, Y], r"batch 0 is a float tensor with 4 axes, but batch 1 is a integer tensor with 1 axes; .*"
         r"one batch, a tuple \(inputs, labels\)"),
        ([X, X[0]], "batch 1 is a float tensor with 3 axes"),
        ([X, (X, Y)], "batch 0 is a float tensor with 4 axes, but batch 1 is a tuple that begins with"),
        ([{"images": X}, X], "batch 0 is a mapping, but batch 1 is a float tensor"),
        ([(X[0], 3)], "with a number beside it, a single sample; pass batches"),
        ([(X, Y), (X[0], 3)], "batch 1 is a tuple that begins with a float tensor with 3 axes"),
        ([()], "a batch is empty"),
        ([], "batches held nothing"),
        ([None], "without a tensor"),
        ({"pictures": X}, r"a batch has 'pictures', but forward of Net needs images; .* or pass call="),
    ],
)  # fmt: skip
def test_inconsistent_batches_are_refused(net, batches, message):
    with pytest.raises(ValueError, match=message):
        probe(net, batches)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            TensorDataset(X, Y),
            r"batches is a TensorDataset, a Dataset of single samples; pass DataLoader",
        ),
        ("images", "batches is a str; pass a tensor"),
        (3, "batches is a int; pass a tensor"),
        (None, "batches is a NoneType; pass a tensor"),
    ],
)
def test_objects_that_are_not_batches_are_refused(net, batches, message):
    with pytest.raises(TypeError, match=message):
        probe(net, batches)


def test_an_iterable_dataset_may_yield_batches(net):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(X.split(4))

    assert probe(net, Stream()).nsi.shape == (7, 2)


def test_a_model_with_several_inputs():
    torch.manual_seed(0)
    pair, shift = Pair().eval(), torch.randn(7, 3, 1, 1)
    want = probe(pair.net, [X + shift]).nsi
    for batches in (
        (X, shift),
        (X, shift, Y),
        [(X[:3], shift[:3]), (X[3:], shift[3:])],
        {"images": X, "shift": shift},
        ((X, shift), Y),
        [[[X, shift], Y]],
        DataLoader(TensorDataset(X, shift), batch_size=4),
    ):
        torch.testing.assert_close(probe(pair, batches).nsi, want, rtol=1e-5, atol=0)
    same = X.flip(0)
    torch.testing.assert_close(probe(pair, (X, same)).nsi, probe(pair.net, [X + same]).nsi)
    with pytest.raises(
        ValueError, match=r"forward of Pair needs 2 inputs \(images, shift\); pass them all"
    ):
        probe(pair, [(X,)])
    with pytest.raises(ValueError, match="forward of Pair needs shift"):
        probe(pair, {"images": X})
    with pytest.raises(ValueError, match="the number of inputs is ambiguous"):
        probe(pair, [(X, shift[:4])])


def test_models_that_take_a_list_or_any_arguments():
    torch.manual_seed(0)
    listed, anything = Listed().eval(), Any().eval()
    want = probe(listed.net, [X + 1]).nsi
    torch.testing.assert_close(
        probe(listed, [([X, torch.ones_like(X)], Y)]).nsi, want, rtol=1e-5, atol=0
    )
    with pytest.raises(ValueError, match=r"not known which are inputs; pass call=lambda model, batch"):
        probe(anything, [(X, Y)])
    found = probe(anything, [(X, Y)], call=lambda model, batch: model(batch[0]))
    torch.testing.assert_close(found.nsi, probe(anything.net, [X]).nsi)
    torch.testing.assert_close(probe(anything, X).nsi, found.nsi)


def test_a_model_that_needs_labels_gets_them():
    class Needs(nn.Module):
        def forward(self, x, labels):
            return x

    batch = {"x": X, "labels": Y, "index": Y}
    assert arguments_of(Needs(), batch)[1].keys() == {"x", "labels"}
    assert arguments_of(Net(), {"images": X, "labels": Y})[1].keys() == {"images"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_models_without_a_signature():
    traced = torch.jit.trace(Net().eval(), X)
    assert arguments_of(traced, (X, Y)) == ((X,), {})
    assert arguments_of(torch.compile(Net()), (X, Y)) == ((X,), {})


def test_an_example_of_insert_gates_is_one_batch():
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x, time):
            return x + self.conv(x * time[:, None, None, None])

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Timed()

        def forward(self, x, time):
            return self.block(x, time)

    time = torch.rand(7)
    for example in ((X, time), [X, time, Y], {"x": X, "time": time}, ((X, time), Y)):
        net = insert_gates(Denoiser(), "se", example=example)
        assert net.block.gate.channels == 3


def test_batches_are_read_one_at_a_time(net):
    """A stream is not read ahead, so that `limit` ends an endless one."""
    drawn = []

    def endless():
        while True:
            drawn.append(1)
            yield X

    assert probe(net, endless(), limit=10).nsi.shape == (10, 2)
    assert len(drawn) == 2
    assert next(batches_of(endless(), net)) is X


def test_a_mask_tensor_is_refused_for_several_batches():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.block = nn.Embedding(9, 4), Residual()

        def forward(self, ids):
            return self.block(self.embedding(ids))

    model, ids, mask = Text(), torch.randint(9, (3, 5)), torch.ones(3, 5)
    assert probe(model, [ids], padding=mask).nsi.shape == (3, 1)
    with pytest.raises(ValueError, match="padding is a tensor, which marks the tokens of one batch"):
        probe(model, [ids, ids], padding=mask)
    assert probe(model, [ids, ids], padding=lambda batch: mask).nsi.shape == (6, 1)


def test_several_axes_with_the_length_of_the_mask_raise():
    class Pairs(nn.Module):
        """Features of all pairs of tokens."""

        def __init__(self):
            super().__init__()
            self.block = Residual()

        def forward(self, x):
            return self.block(x[:, :, None] + x[:, None])

    with pytest.raises(ValueError, match="have 2 axes as long as the mask's 5 tokens"):
        probe(Pairs(), [torch.randn(3, 5, 4)], padding=torch.tensor([[1, 1, 1, 0, 0]] * 3))
