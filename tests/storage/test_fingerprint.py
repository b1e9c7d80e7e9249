"""Equal definitions have equal fingerprints; whatever changes what is computed changes the fingerprint."""

import argparse
import copy
import functools
import io
import os
import random
import subprocess
import sys
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attractor.residual.gates import SE as OURS
from attractor.storage import fingerprint as module
from attractor.storage.fingerprint import differences, fingerprint, outline

SMOOTHING = 0.1
OPTIONS = SimpleNamespace(alpha=0.5, folder="a")

leaves = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")])
    | st.text(max_size=2) | st.binary(max_size=2)
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(-2, 2), inner, max_size=3)
    ),
    max_leaves=8,
)


def typed(value):
    """A value with all of its types, so that 1, 1.0 and True differ, and NaN equals itself."""
    if isinstance(value, dict):
        return "dict", frozenset((typed(k), typed(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(typed, value))
    return type(value).__name__, repr(value)


@given(values, values)
def test_fingerprints_are_equal_where_values_are(one, other):
    assert (fingerprint(one) == fingerprint(other)) == (typed(one) == typed(other))
    assert fingerprint(copy.deepcopy(one)) == fingerprint(one)
    if isinstance(one, dict):
        assert fingerprint(dict(reversed(one.items()))) == fingerprint(one)


class SE(nn.Module):
    """Shares its name with a gate of the library."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels

    def forward(self, x):
        return x


@dataclass
class Settings:
    alpha: float = 0.5


def code(text, **outside):
    """What a cell of a notebook defines as `made`."""
    space = {"__name__": "__main__", "torch": torch, "nn": nn, **outside}
    exec(text, space)
    return space["made"]


def closing_over(value):
    return lambda x: x * value


DIFFERENT = {
    "dtypes": (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "numbers": (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-30])),
    "kinds": (torch.zeros(3), np.zeros(3, np.float32)),
    "complex numbers": (torch.tensor([1j]), torch.tensor([-1j])),
    "sparse": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    "arrays of objects": (np.array([1, "a"], object), np.array([1, "b"], object)),
    "constants of code": (code("made = lambda x: x + 1"), code("made = lambda x: x + 2")),
    "operations": (code("made = lambda x: x + 1"), code("made = lambda x: x - 1")),
    "defaults": (code("def made(x, a=1): return a"), code("def made(x, a=2): return a")),
    "keyword defaults": (code("def made(x, *, a=1): return a"), code("def made(x, *, a=2): return a")),
    "closures": (closing_over(0.1), closing_over(0.2)),
    "globals": (code("made = lambda x: x * scale", scale=1), code("made = lambda x: x * scale", scale=2)),
    "globals of inner functions": (
        code("def made(x): return [y * scale for y in x]", scale=1),
        code("def made(x): return [y * scale for y in x]", scale=2),
    ),
    "called functions": (
        code("def inner(x): return x\ndef made(x): return inner(x)"),
        code("def inner(x): return 2 * x\ndef made(x): return inner(x)"),
    ),
    "attributes that are read": (
        code("made = lambda x: x * args.alpha", args=argparse.Namespace(alpha=1)),
        code("made = lambda x: x * args.alpha", args=argparse.Namespace(alpha=2)),
    ),
    "partials": (functools.partial(max, 1), functools.partial(max, 2)),
    "objects of a method": (Settings(0.1).__eq__, Settings(0.2).__eq__),
    "cached functions": (functools.cache(closing_over(1)), functools.cache(closing_over(2))),
    "methods of a class": (
        code("class made:\n def f(self): return 1"), code("class made:\n def f(self): return 2")),
    "attributes of a class": (code("class made: a = 1"), code("class made: a = 2")),
    "classes of one name": (SE(4), OURS(4)),
    "the same class name elsewhere": (SE, OURS),
    "dropout": (nn.Dropout(0.1), nn.Dropout(0.2)),
    "attributes of a module": (SE(4), SE(5)),
    "hidden state": (argparse.Namespace(a=[torch.zeros(1)]), argparse.Namespace(a=[torch.ones(1)])),
    "values of Python": (timedelta(1), timedelta(2)),
    "fractions": (Fraction(1, 2), Fraction(1, 3)),
    "attributes of lists": (type("L", (list,), {})(), type("M", (list,), {})()),
    "sets": ({1, 2}, {1, 3}),
    "what an object says itself": (SimpleNamespace(fingerprint="a"), SimpleNamespace(fingerprint="b")),
    "paths": (Path("a"), Path("b")),
    "data sets": (
        torch.utils.data.TensorDataset(torch.zeros(2)), torch.utils.data.TensorDataset(torch.ones(2))),
    "subsets": (torch.utils.data.Subset([1, 2], [0]), torch.utils.data.Subset([1, 2], [1])),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_has_another_fingerprint_and_is_named(what):
    one, other = DIFFERENT[what]
    assert fingerprint(one) != fingerprint(other)
    assert differences(outline(one), outline(other), "it")
    again = copy.deepcopy(one)
    assert fingerprint(again) == fingerprint(one)
    assert outline(again) == outline(one)


class Known:
    """Says itself what it is."""

    def __init__(self, fingerprint):
        self.fingerprint, self.read = fingerprint, []


class Counter:
    def __init__(self):
        self.cache = {}

    def __getstate__(self):
        return {}


Pair = namedtuple("Pair", "a b")


def counting():
    count = 0

    def loss(x):
        nonlocal count
        count += 1
        return x

    return loss


def positions():
    """What has another state, though nothing is defined otherwise."""
    used = iter([1, 2])
    next(used)
    yield iter([1, 2]), used
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    yield one, other
    yield random.Random(1), random.Random(2)
    yield np.random.default_rng(1), np.random.default_rng(2)
    yield torch.device("cpu"), torch.device("meta")
    yield io.StringIO("a"), io.StringIO("b")
    yield threading.Lock(), threading.Lock()
    filled = Counter()
    filled.cache["a"] = 1
    yield Counter(), filled
    used = Known("a")
    used.read.append(1)
    yield Known("a"), used
    yield {"a": 1, "b": 2}, {"b": 2, "a": 1}
    yield torch.eye(3), torch.eye(3).t()
    yield torch.zeros(3), torch.zeros(1).expand(3)
    yield nn.Linear(2, 2).requires_grad_(False).weight.zero_(), torch.zeros(2, 2)
    called = counting()
    called(1)
    yield counting(), called
    read = "made = lambda x: x * args.alpha"
    yield (
        code(read, args=argparse.Namespace(alpha=1, out="a")),
        code(read, args=argparse.Namespace(alpha=1, out="b")),
    )
    yield code("made = lambda x: x"), code("# elsewhere\n\n\nmade = lambda x: x")
    trained = nn.Linear(2, 2).eval()
    yield trained, copy.deepcopy(trained).train()


def test_positions_devices_and_places_do_not_count():
    for one, other in positions():
        assert fingerprint(one) == fingerprint(other), (one, other)


def test_objects_of_packages_count_by_their_class_if_asked():
    writers = [torch.utils.data.Subset([1], [i]) for i in (0, 1)]
    assert len({fingerprint(x, foreign="class") for x in writers}) == 1
    assert len({fingerprint(x) for x in writers}) == 2
    assert len({fingerprint(Settings(x), foreign="class") for x in (0.1, 0.2)}) == 2
    writers[1].indices = [0]
    writers[1]._hash = hash("a")  # which is another in every process
    assert fingerprint(writers[0], foreign="public") == fingerprint(writers[1], foreign="public")
    assert fingerprint(writers[0]) != fingerprint(writers[1])
    assert len({fingerprint(torch.utils.data.Subset([1], [i]), foreign="public") for i in (0, 1)}) == 2


def test_cycles_and_depth_end():
    one, other = [1], [1]
    one.append(one)
    other.append(other)
    assert fingerprint(one) == fingerprint(other) != fingerprint([1, [1]])
    deep = []
    for _ in range(2000):
        deep = [deep]
    assert fingerprint(deep) == fingerprint(copy.copy(deep))
    parent = nn.Module()
    parent.child = nn.Linear(1, 1)
    parent.child.parent = (parent,)
    assert fingerprint(parent) == fingerprint(copy.deepcopy(parent))
    assert fingerprint(OrderedDict(a=1)) != fingerprint(Pair(1, 2))


def test_large_tensors_are_sampled(monkeypatch):
    monkeypatch.setattr(module, "WHOLE", 1000)
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "BLOCKS", 10)
    x = torch.arange(1000)
    other = x.clone()
    other[0] += 1
    assert fingerprint(x) == fingerprint(x.clone()) != fingerprint(other)
    last = x.clone()
    last[-1] += 1
    assert fingerprint(x) != fingerprint(last)
    assert fingerprint(x.numpy()) == fingerprint(x.numpy().copy()) != fingerprint(last.numpy())


def test_differences_are_short():
    (message,) = differences({"": "x" * 100_000}, {"": "mean"}, "loss")
    assert len(message) < 400
    assert message.endswith("..., not mean")


def test_differences_are_readable():
    one, other = (SimpleNamespace(alpha=a, data=torch.full((2,), a), name="x") for a in (0.1, 0.2))
    told = differences(outline(one), outline(other), "loss")
    assert told == ["loss.alpha = 0.1, not 0.2", "another loss.data"]
    assert differences(outline(1), outline(2), "seed") == ["seed = 1, not 2"]
    assert differences(outline(max), outline(min), "loss") == ["another loss"]
    told = differences(outline(closing_over), outline(counting), "loss")
    assert told == ["loss = 'closing_over', not 'counting'"]
    assert differences(outline([1]), outline(one), "data") == ["another data"]


SCRIPT = """
import sys, torch
from attractor.storage.fingerprint import fingerprint
from tests.storage import test_fingerprint as t
print(*(fingerprint(x) for pair in t.DIFFERENT.values() for x in pair))
"""


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process():
    def told(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        return done.stdout.split()

    torch.manual_seed(0)
    first, second = told("1"), told("2")
    fixed = [i for i in range(len(first)) if i // 2 != list(DIFFERENT).index("classes of one name")]
    assert [first[i] for i in fixed] == [second[i] for i in fixed]
    assert len(first) == 2 * len(DIFFERENT)
