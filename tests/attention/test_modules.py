"""What torch does with any module it can do with ours: copies, pickles, threads, traces, averages,
checkpoints. A module that is new in the wing fails the first test until it has an entry here."""

import copy
import gc
import importlib
import inspect
import io
import pickle
import pkgutil
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import attractor.attention
from attractor.attention import (
    Classifier,
    LanguageModel,
    PDEAttention,
    PDECache,
    PerformerAttention,
    RandomFeatures,
    Stack,
    pdes,
    performer_attention,
    window_attention,
)
from attractor.attention.models import Embedding, Layer, Residual
from attractor.attention.pdes import LearnedPDE

SIZE = {"dim": 16, "heads": 2, "layers": 2, "hidden": 16}
LONGFORMER = {"attention": window_attention, "window": 3, "global_tokens": 1}
PERFORMER = {"attention": performer_attention, "features": RandomFeatures(8, 16)}


def ids(tokens=12):
    return torch.randint(11, (2, tokens))


def states(tokens=12):
    return torch.randn(2, tokens, 16)


def heads():
    return tuple(torch.randn(3, 2, 2, 12, 8))


def network():
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


# The class, how one is made, and how its inputs are made.
MODULES = {
    "PDEAttention": (PDEAttention, lambda: PDEAttention(16, 2, causal=True, per_head=True), states),
    "PDEAttention, reaction": (PDEAttention, lambda: PDEAttention(16, 2, "reaction_diffusion"), states),
    "PDEAttention, dropout": (PDEAttention, lambda: PDEAttention(16, 2, dropout=0.2), states),
    "PDEAttention, no PDE": (PDEAttention, lambda: PDEAttention(16, 2, None), states),
    "PDEAttention, constant": (PDEAttention, lambda: PDEAttention(16, 2, "wave", learn=False), states),
    "PDEAttention, shared PDE": (PDEAttention, lambda: PDEAttention(16, 2, LearnedPDE("wave")), states),
    "Longformer": (PDEAttention, lambda: PDEAttention(16, 2, **LONGFORMER), states),
    "Performer": (PDEAttention, lambda: PDEAttention(16, 2, causal=True, **PERFORMER), states),
    "PerformerAttention": (PerformerAttention, lambda: PerformerAttention(8, 16), heads),
    "RandomFeatures": (RandomFeatures, lambda: RandomFeatures(16, 5), states),
    "LearnedPDE": (LearnedPDE, lambda: LearnedPDE("advection_diffusion", heads=2), tuple),
    "Residual": (Residual, lambda: Residual(16, network(), "pre", 0.1), states),
    "Layer": (
        Layer,
        lambda: Layer(
            Residual(16, PDEAttention(16, 2), "pre", 0.0), Residual(16, network(), "post", 0.0)
        ),
        states,
    ),
    "Stack": (Stack, lambda: Stack(**SIZE, causal=True, place="after"), states),
    "Embedding": (Embedding, lambda: Embedding(11, 16, 24, 0.1), ids),
    "Classifier": (Classifier, lambda: Classifier(11, 3, **SIZE, padding=0), ids),
    "Classifier, first": (Classifier, lambda: Classifier(11, 3, **SIZE, pooling="first"), ids),
    "LanguageModel": (LanguageModel, lambda: LanguageModel(11, **SIZE, map_dropout=0.1), ids),
    "LanguageModel, Longformer": (LanguageModel, lambda: LanguageModel(11, **SIZE, **LONGFORMER), ids),
    "LanguageModel, Performer": (
        LanguageModel,
        lambda: LanguageModel(11, **SIZE, attention=PerformerAttention(8, 16)),
        ids,
    ),
}
every_module = pytest.mark.parametrize("kind", MODULES)


def made(kind):
    """The module and its inputs, as a tuple."""
    torch.manual_seed(0)
    _, make, inputs = MODULES[kind]
    given = inputs()
    return make(), given if isinstance(given, tuple) else (given,)


def tensor(result):
    """What a module returns, as one tensor: of an equation, its coefficients."""
    if isinstance(result, torch.Tensor):
        return result
    assert is_dataclass(result)
    return torch.cat(
        [x.flatten() for f in fields(result) if torch.is_tensor(x := getattr(result, f.name))]
    )


def run(module, inputs, seed=1):
    torch.manual_seed(seed)
    return tensor(module(*inputs))


def wing():
    """All modules that the wing defines."""
    root = attractor.attention
    names = [x.name for x in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")]
    kernels = [name for name in names if ".kernels." in name]  # which need Triton
    found = set()
    for name in sorted({*names} - {*kernels}):
        members = vars(importlib.import_module(name)).values()
        found |= {x for x in members if inspect.isclass(x) and issubclass(x, nn.Module)}
    return {x for x in found if x.__module__.startswith(root.__name__)}


def test_every_module_of_the_wing_is_tested_here():
    assert wing() == {kind for kind, _, _ in MODULES.values()}


@every_module
def test_a_deep_copy_is_independent(kind):
    module, inputs = made(kind)
    before = run(module, inputs)
    other = copy.deepcopy(module)
    assert torch.equal(run(other, inputs), before)
    own = {x.data_ptr() for x in (*module.parameters(), *module.buffers())}
    assert not own & {x.data_ptr() for x in (*other.parameters(), *other.buffers())}
    with torch.no_grad():
        for x in (*other.parameters(), *other.buffers()):
            x.add_(0.1)
    assert torch.equal(run(module, inputs), before)


@every_module
def test_pickled_and_saved_it_is_the_same(kind):
    module, inputs = made(kind)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert torch.equal(run(other, inputs), run(module, inputs))


def test_eight_threads_at_once():
    work = [
        (module.eval(), inputs) for module, inputs in map(made, MODULES) for _ in range(2)
    ]  # more than there are threads

    def one(pair):
        with torch.no_grad():
            return tensor(pair[0](*pair[1]))

    alone = list(map(one, work))
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(one, work * 4))
    assert all(map(torch.equal, together, alone * 4))


@pytest.mark.parametrize("kind", [kind for kind, x in MODULES.items() if x[2] in (ids, states)])
def test_symbolic_traces_of_networks_that_contain_it(kind):
    module, inputs = made(kind)
    net = nn.Sequential(module.eval())
    for _ in range(2):
        graph = torch.fx.symbolic_trace(net)
        assert torch.equal(run(graph, inputs), run(module, inputs))
        net = copy.deepcopy(net)
    fewer = tuple(x[:, :-3] for x in inputs)  # no shape is fixed
    assert torch.equal(run(graph, fewer), run(module, fewer))


@pytest.mark.parametrize(
    "kind", [kind for kind, x in MODULES.items() if x[0] in (Stack, Classifier, LanguageModel)]
)
def test_symbolic_traces_of_models(kind):
    model, inputs = made(kind)
    model.eval()
    optional = {
        n: None for n, p in inspect.signature(model.forward).parameters.items() if p.default is None
    }
    graph = torch.fx.symbolic_trace(model, optional)
    assert torch.equal(graph(*inputs, *optional.values()), model(*inputs))


def test_symbolic_traces_of_random_features_as_an_attention():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = PerformerAttention(8, 16)

        def forward(self, query, key, value):
            return self.attend(query, key, value, is_causal=True)

    module, inputs = Heads(), heads()
    assert torch.equal(torch.fx.symbolic_trace(module)(*inputs), module(*inputs))


def test_an_attention_alone_is_no_graph():
    with pytest.raises(TypeError, match="trace a network that contains it"):
        torch.fx.symbolic_trace(
            PDEAttention(16, 2), dict.fromkeys(("key_padding", "documents", "cache"))
        )


@every_module
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5)], ids=["mean", "ema"])
def test_averages_of_models(kind, average):
    module, inputs = made(kind)
    averaged = AveragedModel(module, multi_avg_fn=average, use_buffers=True)
    before = {n: x.detach().clone() for n, x in (*module.named_parameters(), *module.named_buffers())}
    averaged.update_parameters(module)
    with torch.no_grad():
        for x in module.parameters():
            x.add_(1.0)
    averaged.update_parameters(module)
    for name, x in (*averaged.module.named_parameters(), *averaged.module.named_buffers()):
        moved = 0.5 if name in dict(module.named_parameters()) else 0.0
        torch.testing.assert_close(x, before[name] + moved)
    assert run(averaged.eval(), inputs).isfinite().all()


@pytest.mark.parametrize("kind", [kind for kind in MODULES if kind != "LearnedPDE"])  # no activations
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(kind, reentrant):
    module, inputs = made(kind)
    module.train()
    unused = torch.zeros((), requires_grad=True)  # for ids: the reentrant kind needs such an input
    call = lambda unused, *x: module(*x) + 0 * unused
    found = []
    for remade in (False, True):
        leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        module.zero_grad()
        torch.manual_seed(2)
        out = checkpoint(call, unused, *leaves, use_reentrant=reentrant) if remade else module(*leaves)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        slopes = [x.grad for x in (*leaves, *module.parameters()) if x.requires_grad]
        found.append([out.detach(), *slopes])
    for plain, again in zip(*found, strict=True):
        assert (plain is None) == (again is None)
        if plain is not None:
            torch.testing.assert_close(plain, again, rtol=1e-6, atol=1e-7)


@every_module
def test_it_is_freed_without_the_garbage_collector(kind):
    module, inputs = made(kind)
    run(module, inputs)
    remnants = [weakref.ref(x) for x in (module, *module.parameters())]
    gc.disable()
    try:
        del module
        assert not [x for x in remnants if x() is not None]
    finally:
        gc.enable()


@pytest.mark.slow
def test_pickles_are_read_by_another_process(tmp_path):
    kinds = {kind: made(kind) for kind in MODULES}
    cache = PDECache(pdes.Diffusion(torch.full((2, 1, 1), 0.2)), 3)
    cache.attend(*heads())
    token = tuple(torch.randn(3, 2, 2, 1, 8))
    work = [(module.eval(), inputs, run(module, inputs)) for module, inputs in kinds.values()]
    file = tmp_path / "work.pkl"
    file.write_bytes(pickle.dumps((work, (cache, token))))
    program = """
import pickle, sys, torch
from dataclasses import fields
work, (cache, token) = pickle.load(open(sys.argv[1], "rb"))
for module, inputs, truth in work:
    torch.manual_seed(1)
    out = module(*inputs)
    if not torch.is_tensor(out):
        numbers = [getattr(out, f.name) for f in fields(out)]
        out = torch.cat([x.flatten() for x in numbers if torch.is_tensor(x)])
    torch.testing.assert_close(out, truth)
torch.save(cache.attend(*token), sys.argv[2])
"""
    there = tmp_path / "out.pt"
    subprocess.run([sys.executable, "-c", program, file, there], check=True)
    torch.testing.assert_close(torch.load(there), cache.attend(*token))
