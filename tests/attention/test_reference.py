"""Whatever a public function accepts, its result is that of the float64 reference, or it raises."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attractor.attention import (
    PDECache,
    RandomFeatures,
    context_parallel_attention,
    pde_attention,
    pdes,
    performer_attention,
    performer_dense,
    trace,
    window_attention,
)
from tests.attention import reference

LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}
WALLS = (-torch.inf, -1e9, -1e4, -2e4, *LOWEST.values(), LOWEST[torch.float32] / 2)
PRECISION = {torch.float64: 1e-11, torch.float32: 3e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
DTYPES = st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16])
PDES = ("diffusion", "wave", "reaction_diffusion", "advection_diffusion", "split")
EXAMPLES = pytest.mark.parametrize("examples", [60, pytest.param(300, marks=pytest.mark.slow)])


@st.composite
def equations(draw, lead=(), learnt=True):
    """A PDE with numbers, with a tensor of one of several shapes, or with learnt coefficients."""
    name = draw(st.sampled_from(PDES))
    split = {"split": True} if name == "split" else {}
    kind = pdes.ReactionDiffusion if split else pdes.get_pde(name)
    heads = lead[-1] if lead else 1
    shapes = [(1, 1, 1), (heads, 1, 1), (*lead, 1, 1), ()]
    if len(lead) > 1:
        shapes += [(lead[-2], 1, 1, 1), (*lead[-2:], 1, 1)]
    if learnt and draw(st.integers(0, 3)) == 0:
        per_head = draw(st.booleans())
        return pdes.LearnedPDE(kind(**split), heads if per_head else None).double()()
    sizes = {"alpha": 0.22, "beta": 0.08, "c": 0.6}
    if draw(st.booleans()):
        return kind(**{f.name: sizes[f.name] for f in fields(kind) if f.name in sizes}, **split)
    shape = draw(st.sampled_from(shapes))
    random = lambda: torch.rand(shape, dtype=torch.float64) * 0.5 + 0.4
    coefficients = {f.name: sizes[f.name] * random() for f in fields(kind) if f.name in sizes}
    return kind(**coefficients, **split)


def tensors_of(pde):
    return {f.name: x for f in fields(pde) if torch.is_tensor(x := getattr(pde, f.name))}


def rounded(pde, dtype):
    """The PDE as an engine for that type has it: with coefficients in float32 at least."""
    return replace(pde, **{n: x.detach().to(dtype).double() for n, x in tensors_of(pde).items()})


def size_of(dtype):
    return dtype.itemsize


@st.composite
def attn_masks(draw, shape, dtype):
    """A mask that broadcasts to a shape: bools, a bias, or a bias with walls written in any way."""
    sizes = [draw(st.sampled_from([1, n])) if draw(st.integers(0, 3)) == 0 else n for n in shape]
    sizes = sizes[draw(st.integers(0, len(sizes) - 1)) :]
    open = torch.rand(sizes) < draw(st.sampled_from([0.3, 0.9]))
    if draw(st.booleans()) and len(sizes) > 1:
        open = torch.ones(sizes, dtype=torch.bool).tril() | (open & draw(st.booleans()))
    kind = draw(st.sampled_from(["bool", "bias", "walls", "walls", "alibi"]))
    if kind == "bool":
        return open
    kinds = [torch.float32, dtype] if dtype.itemsize == 2 else [dtype]
    dtype = draw(st.sampled_from(kinds))
    if kind == "alibi":
        i, j = torch.arange(shape[-2])[:, None], torch.arange(shape[-1])
        return (-draw(st.sampled_from([0.5, 30.0])) * (i - j).abs()).to(dtype)
    bias = draw(st.sampled_from([1.0, 4.0])) * torch.randn(sizes)
    if kind == "walls":
        wall = draw(st.sampled_from(WALLS))
        bias = torch.where(open, bias, bias * draw(st.booleans()) + wall)
    return bias.to(dtype)


@st.composite
def calls(draw, lead=None, square=False, hows=("same", "same", "broadcast", "gqa")):
    """query, key, value and all options of `pde_attention`."""
    torch.manual_seed(draw(st.integers(0, 999)))
    lead = draw(st.sampled_from([(), (2,), (2, 4), (2, 4), (3, 2, 2)])) if lead is None else lead
    queries = draw(st.sampled_from([1, 2, 5, 20, 70, 90]))
    keys = queries if square or draw(st.integers(0, 2)) else draw(st.sampled_from([1, 3, 24, 80]))
    dim, depth = draw(st.sampled_from([(4, 3), (8, 8), (1, 5)]))
    dtype = draw(DTYPES)
    leads = [lead, lead, lead]
    options = {}
    how = draw(st.sampled_from(hows))
    if how == "broadcast" and lead:
        leads = [tuple(draw(st.sampled_from([1, n])) for n in lead) for _ in leads]
        cut = draw(st.integers(0, len(lead)))
        leads[draw(st.integers(0, 2))] = lead[cut:]
    if how == "gqa" and lead:
        leads[1:] = [(*lead[:-1], draw(st.sampled_from([1, lead[-1]])))] * 2
        options["enable_gqa"] = True
    whole = torch.broadcast_shapes(*leads) if how != "gqa" else lead
    shapes = [(*leads[0], queries, dim), (*leads[1], keys, dim), (*leads[2], keys, depth)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]

    options["pde"] = draw(equations(whole))
    options["steps"] = draw(st.sampled_from([0, 1, 2, 4, 6]))
    options["dt"] = draw(st.sampled_from([1.0, 0.5]))
    options["axis"] = axis = draw(st.sampled_from(["key", "key", "key", "query", "both"]))
    options["walls"] = draw(st.sampled_from(["mask", "mask", "mask", "sequence", "periodic"]))
    options["is_causal"] = axis == "key" and draw(st.booleans())
    options["scale"] = draw(st.sampled_from([None, None, 0.3, -0.5, 0.0]))
    # On other axes a row's sum may be close to 0, by which half precisions should not be divided.
    options["renormalise"] = draw(st.integers(0, 5)) == 0 and (axis == "key" or dtype.itemsize == 8)
    if draw(st.booleans()):
        options["attn_mask"] = draw(attn_masks((*whole, queries, keys), dtype))
    if len(whole) == 2 and draw(st.integers(0, 2)) == 0:
        texts = draw(st.sampled_from([1, whole[0]]))
        options["key_padding"] = torch.rand(texts, keys) < draw(st.sampled_from([0.2, 0.8]))
    if len(whole) == 2 and queries == keys and draw(st.integers(0, 3)) == 0:
        texts = draw(st.sampled_from([1, whole[0]]))
        ids = torch.randint(3, (texts, keys))
        options["documents"] = ids if draw(st.booleans()) else ids.sort(-1).values
    if draw(st.integers(0, 3)) == 0:
        sides = st.sampled_from([-1, 0, 2, 9, 40])
        options["window"] = draw(st.one_of(sides, st.tuples(sides, sides)))
    options["method"] = draw(st.sampled_from(["auto", "auto", "dense", "stepped", "tiled"]))
    return tensors, options


def agrees(found, truth, dtype, precision=0.0):
    assert found.shape == truth.shape
    assert found.dtype == dtype
    size = truth.abs().max().clamp(min=1.0)
    error = (found.double() - truth).abs().max()
    assert error <= max(precision, PRECISION[dtype]) * size


def accepted(call, tensors, options):
    """What a call returns; examples that it refuses must be of those that it may refuse."""
    try:
        return call(*tensors, **options)
    except ValueError as error:
        causal = options["axis"] != "key" and "a causal model would see its future" in str(error)
        if not causal and (options["method"] == "auto" or "cannot do this" not in str(error)):
            raise
        assume(False)


def expected(tensors, options):
    dtype = max(torch.float32, tensors[0].dtype, key=size_of)
    pde = rounded(options["pde"], dtype)
    return reference.attend(*tensors, **{**options, "pde": pde})


@EXAMPLES
@pytest.mark.filterwarnings("ignore:walls=")
def test_pde_attention(examples):
    @settings(max_examples=examples)
    @given(calls())
    def check(call):
        tensors, options = call
        found = accepted(pde_attention, tensors, options)
        agrees(found, expected(tensors, options)[0], tensors[0].dtype)

    check()


@EXAMPLES
@pytest.mark.filterwarnings("ignore:walls=")
def test_gradients_of_pde_attention(examples):
    @settings(max_examples=examples // 2)
    @given(calls())
    def check(call):
        tensors, options = call
        tensors = [x.double().requires_grad_() for x in tensors]
        leaves = {n: x.detach().requires_grad_() for n, x in tensors_of(options["pde"]).items()}
        options = {**options, "pde": replace(options["pde"], **leaves)}
        every = [*tensors, *leaves.values()]
        found = accepted(pde_attention, tensors, options)
        grad = torch.randn_like(found)
        slopes = torch.autograd.grad(found, every, grad, allow_unused=True)
        truth, _ = reference.attend(*tensors, **options)
        for x, slope in zip(torch.autograd.grad(truth, every, grad, allow_unused=True), slopes):
            if x is None or slope is None:  # a coefficient that no step needs
                assert not any(y.any() for y in (x, slope) if y is not None)
            else:
                agrees(slope, x, torch.float64, 1e-9)

    check()


@EXAMPLES
def test_the_last_map_of_a_trace_times_the_values_is_the_output(examples):
    @settings(max_examples=examples)
    @given(calls())
    def check(call):
        (query, key, value), options = call
        truth, A = expected((query, key, value), options)
        query = query.expand(*A.shape[:-1], -1)  # texts and heads that only the values have
        seen = trace(query, key, **options)
        assert seen.maps.shape[0] == options["steps"] + 1
        agrees(seen.maps[-1].expand_as(A), A, max(torch.float32, query.dtype, key=size_of), 1e-4)
        if options.get("enable_gqa") and key.ndim > 2:
            value = value.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        found = seen.maps[-1].to(value.dtype) @ value
        agrees(found.expand_as(truth), truth, value.dtype)

    check()


@EXAMPLES
def test_window_attention(examples):
    sides = st.sampled_from([-1, 0, 2, 9, 40])
    windows = st.one_of(sides, st.tuples(sides, sides))

    @settings(max_examples=examples)
    @given(calls(lead=(2, 4), square=True), windows, st.sampled_from([0, 1, 3, 100]), st.booleans())
    def check(call, window, global_tokens, plain):
        tensors, options = call
        names = ("is_causal", "key_padding", "scale", "enable_gqa", "pde", "steps", "dt")
        options = {name: options[name] for name in names if name in options}
        options |= {"window": window, "global_tokens": global_tokens}
        truth, _ = expected(tensors, options | ({"steps": 0} if plain else {}))
        found = window_attention(*tensors, **options | ({"pde": None} if plain else {}))
        agrees(found, truth, tensors[0].dtype)

    check()


@EXAMPLES
def test_context_parallel_attention_of_one_process(examples):
    @settings(max_examples=examples)
    @given(calls(square=True), st.booleans())
    def check(call, plain):
        tensors, options = call
        names = ("is_causal", "scale", "enable_gqa", "pde", "steps", "dt")
        options = {name: options[name] for name in names if name in options}
        truth, _ = expected(tensors, options | ({"steps": 0} if plain else {}))
        given = options | ({"pde": None} if plain else {})
        if not plain and options["steps"] and not options["pde"].linear:
            with pytest.raises(ValueError, match="is not linear"):
                context_parallel_attention(*tensors, **given)
        else:
            agrees(context_parallel_attention(*tensors, **given), truth, tensors[0].dtype)

    check()


@EXAMPLES
def test_performer_attention(examples):
    @settings(max_examples=examples)
    @given(calls(hows=("same", "gqa")), st.booleans(), st.integers(1, 40), st.booleans())
    def check(call, per_head, chunk, plain):
        (query, key, value), options = call
        if "key_padding" in options:
            options["key_padding"] = options["key_padding"].expand(query.shape[0], -1)
        heads = query.shape[-3] if query.ndim > 2 else 1
        features = RandomFeatures(query.shape[-1], 5, heads=heads if per_head else None).projection
        names = ("is_causal", "key_padding", "scale", "enable_gqa", "pde", "steps", "dt")
        options = {name: options[name] for name in names if name in options} | {"features": features}
        own = features[0] if query.ndim == 2 and per_head else features
        alone = {"features": own} | ({"steps": 0} if plain else {})
        truth, _ = expected((query, key, value), options | alone)
        given = options | ({"pde": None} if plain else {})
        agrees(performer_dense(query, key, value, **given)[0], truth, query.dtype)
        if not plain and options["steps"] and not options["pde"].linear:
            with pytest.raises(ValueError, match="is not linear"):
                performer_attention(query, key, value, **given)
        else:
            agrees(performer_attention(query, key, value, chunk=chunk, **given), truth, query.dtype)

    check()


@EXAMPLES
def test_decoding_with_a_cache(examples):
    @settings(max_examples=examples // 2)
    @given(
        calls(lead=(2, 4), square=True, hows=("same", "gqa")),
        st.lists(st.sampled_from([1, 1, 2, 7, 30, 130]), min_size=1, max_size=6),
        st.lists(st.integers(0, 1), min_size=2, max_size=3),
        st.integers(0, 5),
    )
    def check(call, cuts, order, wrong):
        tensors, options = call
        real = options.get("key_padding")
        real = None if real is None else real.expand(2, -1)
        names = ("scale", "pde", "steps", "dt")
        made = {name: options[name] for name in names}
        truth, _ = expected(tensors, made | {"is_causal": True, "enable_gqa": True, "key_padding": real})
        cache, outputs, start, tokens = PDECache(**made, capacity=3), [], 0, tensors[0].shape[2]
        while start < tokens:
            part = slice(start, start + cuts[len(outputs) % len(cuts)])
            padding = None if real is None else real[:, part]
            if wrong:  # guesses that turn out wrong
                cache.attend(*(torch.randn(*x.shape[:2], wrong, x.shape[3]).to(x) for x in tensors))
                cache.crop(-wrong)
            outputs.append(cache.attend(*(x[:, :, part] for x in tensors), padding))
            start = part.stop
        agrees(torch.cat(outputs, 2), truth, tensors[0].dtype)
        # Texts in another order: what comes next sees those that were chosen.
        if real is not None or tokens < 2:
            return
        order = torch.tensor(order)
        cache.crop(-1)
        cache.reorder(order)
        agrees(
            cache.attend(*(x[order, :, -1:] for x in tensors)), truth[order, :, -1:], tensors[0].dtype
        )

    check()
