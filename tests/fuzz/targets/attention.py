"""PDEs, attention, its modules, caches and diagnostics."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import attractor as at
from attractor.attention import (
    Classifier,
    LanguageModel,
    Parts,
    PDEAttention,
    PDECache,
    PerformerAttention,
    RandomFeatures,
    Stack,
    coefficients,
    context_parallel_attention,
    explain,
    hybrid_errors,
    performer_attention,
    performer_dense,
    trace,
    window_attention,
)
from attractor.attention.pdes import LearnedPDE, Line, Plane, evolve, for_length, get_pde, take_steps
from tests.fuzz.judging import Call, calling, shaped, target
from tests.fuzz.strategies import FLOATS, WIDE, Maker

NAMES = ["diffusion", "wave", "reaction_diffusion", "advection_diffusion"]
CLASSES = {
    n: getattr(at.pdes, n) for n in ("Diffusion", "Wave", "ReactionDiffusion", "AdvectionDiffusion")
}


def a_pde(m: Maker, heads: int = 1) -> Any:
    """An equation, with numbers or a tensor of them, or its name."""
    if m.strange():
        return m.pick((None, "diffusio", 3, at.pdes.Diffusion, LearnedPDE("wave"), "", at.pdes.Diffusion(3.0),
                       at.pdes.Diffusion(torch.full((7, 1, 1), 0.1)), object()))  # fmt: skip
    if m.chance(30):
        return m.pick(NAMES)
    each = torch.rand(heads, 1, 1, generator=m.generator()) * 0.2
    return m.pick((at.pdes.Diffusion(0.2), at.pdes.Diffusion(each), at.pdes.Wave(0.3), at.pdes.Wave(0.0),
                   at.pdes.ReactionDiffusion(), at.pdes.ReactionDiffusion(split=True), at.pdes.AdvectionDiffusion(),
                   at.pdes.Diffusion(0.0), at.pdes.ReactionDiffusion(each, -0.1)))  # fmt: skip


def heads_and_tokens(
    m: Maker, least: int = 0, dtypes: Any = FLOATS
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """query, key, value and the sizes."""
    batch = m.sizes(0, 2, 2)
    size = {
        "batch": batch, "heads": m.pick((2, 1, 4)), "queries": m.whole_number(1, 9) if not m.chance(4) else 0,
        "dim": m.pick((4, 1, 3, 8)), "value": m.pick((4, 1, 2)),
    }  # fmt: skip
    size["keys"] = size["queries"] if m.chance(70) else m.whole_number(least, 9)
    size["shared"] = m.chance(15) and size["heads"] % 2 == 0
    key_heads = size["heads"] // 2 if size["shared"] else size["heads"]
    dtype = m.pick(dtypes)
    make = lambda heads, tokens, dim: m.tensor(
        (*batch, heads, tokens, dim),
        [dtype],
        fill=m.pick(("normal", "normal", "large", "zeros", "tiny")),
        grad=True,
    )
    query, key = (
        make(size["heads"], size["queries"], size["dim"]),
        make(key_heads, size["keys"], size["dim"]),
    )
    return query, key, make(key_heads, size["keys"], size["value"]), size


def common(m: Maker, size: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"is_causal": m.boolean(), "enable_gqa": size["shared"] or m.chance(5)}
    if m.chance(30):
        options["scale"] = m.number(0.1, 1.0)
    if m.chance(60):
        options["steps"] = m.whole(0, 5)
    if m.chance(40):
        options["dt"] = m.number(0.1, 1.0)
    if m.chance(25):
        options["key_padding"] = m.bools((*size["batch"], size["keys"]))
    return options


def arguments(m: Maker, dtypes: Any = FLOATS) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    query, key, value, size = heads_and_tokens(m, dtypes=dtypes)
    options = common(m, size)
    options["pde"] = a_pde(m, size["heads"])
    shape = (*size["batch"], size["heads"], size["queries"], size["keys"])
    if m.chance(30):
        mask = m.bools(shape[m.whole_number(0, len(shape) - 1) :])
        if isinstance(mask, Tensor) and m.flag():
            mask = torch.zeros(mask.shape).masked_fill(
                ~mask.bool(), m.pick((-torch.inf, -1.0, -1e9, -1e4, torch.finfo(torch.float32).min))
            )
        options["attn_mask"] = mask
    if m.chance(15):
        options["documents"] = m.integers((*size["batch"], size["keys"]), 0, 2)
    if m.chance(25):
        one = lambda: m.whole(-1, 5)
        options["window"] = one() if m.flag() else (one(), one())
    if m.chance(25):
        options["axis"] = m.choice(["key", "query", "both"])
    if m.chance(20):
        options["walls"] = m.choice(["mask", "sequence", "periodic"])
    if m.chance(25):
        options["method"] = m.choice(["auto", "dense", "stepped", "tiled", "fused"])
    if m.chance(15):
        options["renormalise"] = m.boolean()
    return (query, key, value), options, size


@target("attractor.pde_attention", random=True, warns=True)
def _pde_attention(m: Maker) -> Call:
    tensors, options, size = arguments(m)
    if m.chance(10):
        options["dropout_p"] = m.number(0.0, 1.0)
    shape = (*size["batch"], size["heads"], size["queries"], size["value"])
    check = lambda r: shaped(*shape, dtype=tensors[0].dtype)(r)
    return calling(
        at.pde_attention,
        *tensors,
        check=check,
        layouts="dropout_p" not in options,
        tolerance=1e-3,
        **options,
    )


@target("attractor.attention.explain", random=True, warns=True)
def _explain(m: Maker) -> Call:
    tensors, options, _ = arguments(m)
    return calling(explain, *tensors, **options)


@target("attractor.attention.window_attention", random=True)
def _window(m: Maker) -> Call:
    query, key, value, size = heads_and_tokens(m)
    options = common(m, size)
    one = lambda: m.whole(-1, 5)
    options["window"] = one() if m.flag() else (one(), one())
    if m.chance(50):
        options["global_tokens"] = m.whole(0, 4)
    if m.chance(70):
        options["pde"] = a_pde(m, size["heads"])
    shape = (*size["batch"], size["heads"], size["queries"], size["value"])
    check = lambda r: shaped(*shape, dtype=query.dtype)(r)
    return calling(window_attention, query, key, value, check=check, tolerance=1e-3, **options)


def some_features(m: Maker, dim: int) -> Any:
    draw = torch.randn(dim, 6, generator=m.generator())
    if m.strange():
        return m.pick(
            (
                None,
                "features",
                torch.randn(dim + 1, 6, generator=m.generator()),
                draw[0],
                draw.to("meta"),
                3,
            )
        )
    return draw if m.flag() else RandomFeatures(dim, 6, generator=m.generator())


for _name, _function in (
    ("performer_attention", performer_attention),
    ("performer_dense", performer_dense),
):

    @target(f"attractor.attention.{_name}")
    def _performer(m: Maker, function: Any = _function) -> Call:
        query, key, value, size = heads_and_tokens(m, least=1)
        options = common(m, size)
        options["features"] = some_features(m, size["dim"])
        if m.chance(60):
            options["pde"] = a_pde(m, size["heads"])
        if function is performer_attention and m.chance(20):
            options["chunk"] = m.whole(1, 6)

        def check(result: Any) -> None:
            output = result[0] if isinstance(result, tuple) else result
            shaped(*size["batch"], size["heads"], size["queries"], size["value"], dtype=query.dtype)(
                output
            )

        return calling(function, query, key, value, check=check, tolerance=1e-2, **options)


@target("attractor.attention.RandomFeatures")
def _features(m: Maker) -> Call:
    generator = m.choice([m.generator()])
    return calling(RandomFeatures, m.whole(1, 5), m.whole(1, 9), heads=m.choice([None, 2]), orthogonal=m.flag(),
                   generator=generator if generator is not None else m.generator())  # fmt: skip


@target("attractor.attention.RandomFeatures.forward")
def _features_forward(m: Maker) -> Call:
    dim = m.whole_number(1, 4)
    features = RandomFeatures(dim, 6, generator=m.generator())
    x = m.tensor((*m.sizes(0, 2), dim), FLOATS, fill=m.pick(("normal", "ones", "zeros")))
    return calling(
        features,
        x,
        check=lambda r: shaped(*x.shape[:-1], 6, dtype=x.dtype)(r),
        finite=False,
        tolerance=1e-2,
    )


@target("attractor.attention.RandomFeatures.redraw", random=True)
def _redraw(m: Maker) -> Call:
    features = RandomFeatures(3, 6, generator=m.generator())
    return calling(features.redraw, m.choice([m.generator()], odd=(7,)))


@target("attractor.attention.PerformerAttention")
def _performer_module(m: Maker) -> Call:
    return calling(
        PerformerAttention, m.whole(1, 5), m.whole(1, 9), generator=m.generator(), chunk=m.whole(1, 9)
    )


@target("attractor.attention.PerformerAttention.redraw", random=True)
def _performer_redraw(m: Maker) -> Call:
    return calling(PerformerAttention(3, 4, generator=m.generator()).redraw, m.choice([m.generator()]))


@target("attractor.attention.PerformerAttention.forward")
def _performer_forward(m: Maker) -> Call:
    query, key, value, size = heads_and_tokens(m, least=1)
    module = PerformerAttention(size["dim"], 6, generator=m.generator())
    options = common(m, size)
    options["pde"] = m.choice(["diffusion", None])
    return calling(module, query, key, value, tolerance=1e-2, **options)


# Modules


@cache
def layer(dim: int, heads: int, causal: bool, pde: str | None, dtype: torch.dtype) -> PDEAttention:
    state = torch.get_rng_state()
    made = PDEAttention(dim, heads, pde, causal=causal).to(dtype).eval().requires_grad_(False)
    torch.set_rng_state(state)
    return made


@target("attractor.attention.PDEAttention", random=True)
def _pde_module(m: Maker) -> Call:
    heads = m.whole(1, 4)
    dim = heads * m.whole_number(1, 4) if isinstance(heads, int) and m.chance(90) else m.whole(1, 9)
    options: dict[str, Any] = {
        "pde": m.choice([*NAMES, None], odd=(at.pdes.Diffusion(9.0), LearnedPDE("wave")))
    }
    options |= {
        "steps": m.whole(0, 4),
        "causal": m.boolean(),
        "learn": m.boolean(),
        "per_head": m.boolean(),
    }
    if m.chance(40):
        options["dt"] = m.number(0.1, 1.0)
    if m.chance(30):
        options["dropout"] = m.number(0.0, 0.9)
    return calling(PDEAttention, dim, heads, **options)


def a_layer(m: Maker, causal: bool | None = None) -> tuple[PDEAttention, int, torch.dtype]:
    dtype, heads = m.pick(WIDE), m.pick((2, 1))
    dim = heads * m.pick((4, 2))
    return (
        layer(dim, heads, m.flag() if causal is None else causal, m.pick((*NAMES, None)), dtype),
        dim,
        dtype,
    )


@target("attractor.attention.PDEAttention.forward")
def _pde_forward(m: Maker) -> Call:
    module, dim, dtype = a_layer(m)
    batch, tokens = m.pick((2, 1, 0)), m.whole_number(0, 8)
    x = m.tensor((batch, tokens, dim), [dtype], fill=m.pick(("normal", "large")))
    padding = m.maybe(lambda: m.bools((batch, tokens)))
    documents = m.integers((batch, tokens), 0, 2) if m.chance(20) else None
    return calling(
        module, x, padding, documents, check=lambda r: shaped(*x.shape, dtype=dtype)(r), tolerance=1e-3
    )


@target("attractor.attention.PDEAttention.equation")
def _equation(m: Maker) -> Call:
    m.seed()
    return calling(a_layer(m)[0].equation)


@target("attractor.attention.PDEAttention.new_cache")
def _new_cache(m: Maker) -> Call:
    m.seed()
    return calling(a_layer(m)[0].new_cache, m.whole(1, 9))


@target("attractor.attention.PDECache")
def _cache(m: Maker) -> Call:
    options: dict[str, Any] = {"steps": m.whole(0, 5), "dt": m.number(0.1, 1.0)}
    if m.chance(30):
        options |= {"axis": m.choice(["key", "query"]), "walls": m.choice(["mask", "periodic"])}
    if m.chance(30):
        options |= {"capacity": m.whole(1, 9), "scale": m.number(0.1, 1.0)}
    return calling(PDECache, a_pde(m), **options)


def filled_cache(m: Maker) -> tuple[PDECache, torch.dtype]:
    dtype = m.pick(WIDE)
    held = PDECache(m.pick((*NAMES, at.pdes.Wave(0.2))), steps=m.whole_number(0, 3), capacity=2)
    for tokens in [m.whole_number(1, 4) for _ in range(m.whole_number(0, 2))]:
        held.attend(
            *(torch.randn(2, 2, tokens, 4, generator=m.generator(), dtype=dtype) for _ in range(3))
        )
    return held, dtype


@target("attractor.attention.PDECache.attend")
def _attend(m: Maker) -> Call:
    held, dtype = filled_cache(m)
    new = m.whole_number(1, 3)
    make = lambda: m.tensor((2, 2, new, 4), [dtype], fill=m.pick(("normal", "large", "zeros")))
    query, key, value = make(), make(), make()
    padding = m.bools((2, new)) if m.chance(20) else None
    return calling(held.attend, query, key, value, padding, layouts=False,
                   check=lambda r: shaped(*query.shape, dtype=dtype)(r))  # fmt: skip


@target("attractor.attention.PDECache.reorder")
def _reorder(m: Maker) -> Call:
    held, _ = filled_cache(m)
    return calling(held.reorder, m.integers((m.whole_number(0, 3),), 0, 1))


@target("attractor.attention.PDECache.crop")
def _crop(m: Maker) -> Call:
    held, _ = filled_cache(m)
    return calling(held.crop, m.whole(-2, 4))


@target("attractor.attention.Stack", random=True)
def _stack(m: Maker) -> Call:
    options: dict[str, Any] = {"norm": m.choice(["pre", "post"]), "place": m.choice(["each", "after"])}
    if m.chance(50):
        options |= {"dropout": m.number(0.0, 0.9), "map_dropout": m.number(0.0, 0.9)}
    if m.chance(50):
        options |= {"pde": m.choice(NAMES), "steps": m.whole(0, 3), "causal": m.flag()}
    return calling(Stack, 4, m.whole(1, 2), m.whole(0, 2), m.whole(1, 8), **options)


@cache
def stack(dtype: torch.dtype, causal: bool, pde: str | None, place: str) -> Stack:
    state = torch.get_rng_state()
    made = Stack(4, 2, 2, 8, causal=causal, pde=pde, place=place).to(dtype).eval().requires_grad_(False)
    torch.set_rng_state(state)
    return made


@target("attractor.attention.Stack.forward")
def _stack_forward(m: Maker) -> Call:
    dtype = m.pick(WIDE)
    module = stack(dtype, m.flag(), m.pick((*NAMES, None)), m.pick(("each", "after")))
    batch, tokens = m.pick((2, 1)), m.whole_number(0, 6)
    x = m.tensor((batch, tokens, 4), [dtype], fill=m.pick(("normal", "large")))
    masks = {"key_padding": m.bools((batch, tokens))} if m.chance(30) else {}
    return calling(module, x, check=lambda r: shaped(*x.shape, dtype=dtype)(r), tolerance=1e-3, **masks)


@target("attractor.attention.Stack.attentions")
def _attentions(m: Maker) -> Call:
    m.seed()
    return calling(stack(torch.float32, m.flag(), m.pick((*NAMES, None)), "each").attentions)


def model_options(m: Maker) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dim": 4,
        "heads": m.whole(1, 2),
        "layers": m.whole(0, 2),
        "hidden": m.whole(1, 8),
    }
    options |= {"max_tokens": m.whole(1, 9), "dropout": m.number(0.0, 0.9)}
    if m.chance(50):
        options |= {"pde": m.choice([*NAMES, None]), "steps": m.whole(0, 3)}
    if m.chance(5):
        options["unknown"] = 1
    return options


@target("attractor.attention.Classifier", random=True)
def _classifier(m: Maker) -> Call:
    extra = {"pooling": m.choice(["mean", "first"]), "padding": m.choice([None, 0, 3])}
    return calling(Classifier, m.whole(1, 9), m.whole(1, 4), **extra, **model_options(m))


@target("attractor.attention.LanguageModel", random=True)
def _language_model(m: Maker) -> Call:
    return calling(LanguageModel, m.whole(1, 9), **model_options(m))


@cache
def language_model(pde: str | None) -> LanguageModel:
    state = torch.get_rng_state()
    made = (
        LanguageModel(11, dim=8, heads=2, layers=2, hidden=8, max_tokens=8, pde=pde)
        .eval()
        .requires_grad_(False)
    )
    torch.set_rng_state(state)
    return made


@cache
def classifier(pde: str | None, pooling: str, padding: int | None) -> Classifier:
    state = torch.get_rng_state()
    made = Classifier(
        11,
        3,
        dim=8,
        heads=2,
        layers=1,
        hidden=8,
        max_tokens=8,
        pde=pde,
        pooling=pooling,
        padding=padding,
    )
    torch.set_rng_state(state)
    return made.eval().requires_grad_(False)


@target("attractor.attention.Classifier.forward")
def _classify(m: Maker) -> Call:
    model = classifier(m.pick((*NAMES, None)), m.pick(("mean", "first")), m.pick((None, 0)))
    batch, tokens = m.pick((2, 1, 0)), m.whole_number(1, 8)
    ids = m.integers((batch, tokens), 0, 10)
    padding = m.bools((batch, tokens)) if m.chance(40) else None
    return calling(model, ids, padding, check=lambda r: shaped(batch, 3)(r), tolerance=1e-3)


for _name in ("forward", "states"):

    @target(f"attractor.attention.LanguageModel.{_name}")
    def _lm_forward(m: Maker, name: str = _name) -> Call:
        model = language_model(m.pick((*NAMES, None)))
        batch, tokens = m.pick((2, 1, 0)), m.whole_number(0, 8)
        ids = m.integers((batch, tokens), 0, 10)
        padding = m.bools((batch, tokens)) if m.chance(30) else None
        documents = m.integers((batch, tokens), 0, 2) if m.chance(20) else None
        return calling(getattr(model, name), ids, padding, documents,
                       check=lambda r: shaped(batch, tokens, 11 if name == "forward" else 8)(r), tolerance=1e-3)  # fmt: skip


@target("attractor.attention.LanguageModel.logits")
def _logits(m: Maker) -> Call:
    states = m.tensor((*m.sizes(0, 2), 8), [torch.float32])
    return calling(
        language_model(None).logits, states, check=lambda r: shaped(*states.shape[:-1], 11)(r)
    )


@target("attractor.attention.LanguageModel.generate", slow=True)
def _generate(m: Maker) -> Call:
    model = language_model(m.pick((*NAMES, None)))
    ids = m.integers((m.pick((2, 1)), m.whole_number(1, 9)), 0, 10)
    tokens = m.whole(0, 3)
    options = {
        "temperature": m.number(0.1, 2.0),
        "top_k": m.choice([None, 1, 3, 99], odd=(0, -1)),
        "cache": m.boolean(),
    }
    return calling(model.generate, ids, tokens, generator=m.generator(), layouts=False,
                   check=lambda r: shaped(ids.shape[0], ids.shape[1] + tokens)(r), **options)  # fmt: skip


@target("attractor.assert_causal", raises=(at.CausalityError,), slow=True)
def _assert_causal(m: Maker) -> Call:
    ids = m.flag()
    model = m.choice(
        [language_model(m.pick((*NAMES, None)))]
        if ids
        else [torch.nn.Identity(), lambda x: x.cumsum(-2), lambda x: {"a": (x,)}],
        odd=(lambda x: 3, lambda x: x.flip(-2), lambda x: x[:1] * torch.nan, torch.nn.Linear(3, 3)),
    )
    n = m.pick((3, 2, 1, 5))
    inputs = m.integers((2, n), 0, 10) if ids else m.tensor((n, 3), WIDE)
    return calling(at.assert_causal, model, inputs, m.number(0.0, 1.0), layouts=False)


# Diagnostics


@target("attractor.attention.trace", warns=True)
def _trace(m: Maker) -> Call:
    (query, key, _), options, size = arguments(m, WIDE)

    def check(seen: Any) -> None:
        steps = options.get("steps", 4)
        shaped(steps + 1, *size["batch"], size["heads"], size["queries"], size["keys"])(seen.maps)

    return calling(trace, query, key, check=check, tolerance=1e-3, **options)


@target("attractor.attention.PDETrace.measures")
def _measures(m: Maker) -> Call:
    tokens = m.whole_number(1, 6)
    query, key = (torch.randn(1, 2, tokens, 4, generator=m.generator()) for _ in range(2))
    seen = trace(query, key, is_causal=m.flag(), pde=m.pick(NAMES), steps=m.whole_number(0, 3))
    return calling(seen.measures)


@target("attractor.attention.hybrid_errors")
def _hybrid_errors(m: Maker) -> Call:
    shape = (*m.sizes(0, 2), m.whole_number(1, 5), m.whole_number(1, 5))
    dtype = m.pick(WIDE)
    exact, cheap = m.tensor(shape, [dtype]), m.tensor(shape, [dtype])
    where = m.choice([Line(), Line(-2), Line(periodic=True)])
    return calling(hybrid_errors, exact, cheap, where, pde=a_pde(m), steps=m.whole(0, 4), dt=m.number(0.1, 1.0),
                   finite=False, tolerance=1e-3)  # fmt: skip


@target("attractor.attention.coefficients")
def _coefficients(m: Maker) -> Call:
    m.seed()
    model = m.choice(
        [stack(torch.float32, False, m.pick(NAMES), "each"), nn.Linear(2, 2), nn.Sequential()]
    )
    return calling(coefficients, model, finite=False)


# PDEs


def a_line(m: Maker, n: int) -> Any:
    if m.strange():
        return m.pick(
            (
                None,
                "line",
                Line(5),
                Line(open=torch.ones(n + 3, dtype=torch.bool)),
                Line(0),
                Line(-1, torch.ones(2)),
            )
        )
    walls = torch.rand(max(n - 1, 0), generator=m.generator()) < 0.7
    return m.pick(
        (Line(), Line(open=walls), Line(periodic=True), Line().adjoint, Line(open=walls).adjoint)
    )


COEFFICIENT = {
    "Diffusion": ["alpha"],
    "Wave": ["c"],
    "ReactionDiffusion": ["alpha", "beta"],
    "AdvectionDiffusion": ["alpha", "beta"],
}

for _name in CLASSES:
    _place = f"attractor.attention.pdes.{_name}"

    def some(m: Maker, name: str) -> Any:
        """One that can be made."""
        values = {k: m.pick((0.1, 0.0, 0.05, torch.full((2, 1, 1), 0.1))) for k in COEFFICIENT[name]}
        return CLASSES[name](**values)

    @target(_place)
    def _construct(m: Maker, name: str = _name) -> Call:
        m.seed()
        values: dict[str, Any] = {k: m.number(0.0, 0.2) for k in COEFFICIENT[name]}
        if name == "ReactionDiffusion" and m.flag():
            values["split"] = m.boolean()
        return calling(CLASSES[name], finite=False, **values)

    @target(f"{_place}.max_dt")
    def _max_dt(m: Maker, name: str = _name) -> Call:
        m.seed()
        return calling(some(m, name).max_dt, m.choice(["key", "query", "both"]), finite=False)

    @target(f"{_place}.check")
    def _check(m: Maker, name: str = _name) -> Call:
        m.seed()
        return calling(some(m, name).check, m.number(0.0, 9.0), m.choice(["key", "query", "both"]))

    @target(f"{_place}.interval")
    def _interval(m: Maker, name: str = _name) -> Call:
        m.seed()
        return calling(
            some(m, name).interval,
            m.choice(COEFFICIENT[name]),
            m.number(0.1, 1.0),
            m.choice(["key", "both"]),
        )

    if hasattr(CLASSES[_name], "to_unit"):

        @target(f"{_place}.to_unit")
        def _to_unit(m: Maker, name: str = _name) -> Call:
            m.seed()
            return calling(some(m, name).to_unit, m.number(0.1, 1.0), m.choice(["key", "both"]))

        @target(f"{_place}.from_unit")
        def _from_unit(m: Maker, name: str = _name) -> Call:
            unit = {k: torch.rand(2, 1, 1, generator=m.generator()) for k in COEFFICIENT[name]}
            axis = m.choice(["key", "both"])
            return calling(CLASSES[name].from_unit, unit, m.number(0.1, 1.0), axis)

    @target(f"{_place}.step")
    def _step(m: Maker, name: str = _name) -> Call:
        n = m.whole_number(1, 6)
        dtype = m.pick(WIDE)
        u = m.tensor((2, m.whole_number(1, 4), n), [dtype])
        velocity = m.tensor(u.shape, [dtype]) if isinstance(u, Tensor) and m.chance(30) else None
        line = m.pick((Line(), Line(periodic=True), Line().adjoint))
        return calling(some(m, name).step, u, velocity, line, m.number(0.1, 1.0), tolerance=1e-3)


@target("attractor.attention.pdes.ReactionDiffusion.start")
def _start(m: Maker) -> Call:
    u = m.tensor((2, 3), WIDE, fill=m.pick(("zeros", "ones")))
    return calling(at.pdes.ReactionDiffusion(split=m.flag()).start, u, m.number(0.0, 4.0))


for _name, _function in (("evolve", evolve), ("take_steps", take_steps)):

    @target(f"attractor.attention.pdes.{_name}")
    def _steps(m: Maker, function: Any = _function) -> Call:
        n = m.whole_number(1, 6)
        u = m.tensor((*m.sizes(0, 1), m.whole_number(1, 4), n), WIDE, fill=m.pick(("ones", "zeros")))
        pde = m.choice([c() for c in CLASSES.values()], odd=(at.pdes.Diffusion, LearnedPDE("wave")))
        return calling(function, pde, u, a_line(m, n), m.whole(0, 4), m.number(0.1, 1.0), tolerance=1e-3)


@target("attractor.attention.pdes.for_length")
def _for_length(m: Maker) -> Call:
    m.seed()
    options = {"reference": m.whole(1, 1000), "dt": m.number(0.1, 1.0), "gamma": m.number(-1.0, 1.0)}
    return calling(for_length, a_pde(m), m.whole(1, 1000), **options)


@target("attractor.attention.pdes.get_pde")
def _get_pde(m: Maker) -> Call:
    m.seed()
    return calling(get_pde, m.choice(NAMES), finite=False)


@target("attractor.attention.pdes.LearnedPDE")
def _learned(m: Maker) -> Call:
    m.seed()
    return calling(
        LearnedPDE,
        a_pde(m),
        m.choice([None, 1, 2], odd=(0, -1)),
        m.number(0.1, 1.0),
        m.choice(["key", "both"]),
    )


@target("attractor.attention.pdes.LearnedPDE.forward")
def _learned_forward(m: Maker) -> Call:
    learned = LearnedPDE(m.pick(NAMES), m.pick((None, 2)))
    with torch.no_grad():
        for p in learned.parameters():
            p.copy_(torch.randn(p.shape, generator=m.generator()) * m.pick((1.0, 10.0, 1e4)))

    def check(pde: Any) -> None:
        assert pde.max_dt("key") >= 1 - 1e-5, f"max_dt = {pde.max_dt('key')}"

    return calling(learned, check=check)


@target("attractor.attention.pdes.LearnedPDE.reset_parameters")
def _learned_reset(m: Maker) -> Call:
    m.seed()
    return calling(LearnedPDE(m.pick(NAMES), m.pick((None, 2))).reset_parameters)


@target("attractor.attention.pdes.Line")
def _line(m: Maker) -> Call:
    m.seed()
    return calling(
        Line, m.choice([-1, -2], odd=(0, 5)), m.maybe(lambda: m.bools((3,))), m.flag(), m.flag()
    )


@target("attractor.attention.pdes.Plane")
def _plane(m: Maker) -> Call:
    m.seed()
    return calling(Plane, a_line(m, 3), a_line(m, 3))


for _name in ("laplacian", "gradient"):

    @target(f"attractor.attention.pdes.Line.{_name}")
    def _on_line(m: Maker, name: str = _name) -> Call:
        n = m.whole_number(1, 6)
        u = m.tensor((*m.sizes(0, 2), n), FLOATS)
        line = a_line(m, n)
        return calling(lambda u: getattr(line, name)(u) if isinstance(line, Line) else u, u,
                       check=lambda r: shaped(*u.shape, dtype=u.dtype)(r), tolerance=1e-2)  # fmt: skip

    @target(f"attractor.attention.pdes.Plane.{_name}")
    def _on_plane(m: Maker, name: str = _name) -> Call:
        u = m.tensor((*m.sizes(0, 2), m.whole_number(1, 4), m.whole_number(1, 4)), FLOATS)
        plane = Plane(Line(-1, periodic=m.flag()), Line(-2, periodic=m.flag()))
        return calling(
            getattr(plane, name), u, check=lambda r: shaped(*u.shape, dtype=u.dtype)(r), tolerance=1e-2
        )


# Several processes; here there is one


@target("attractor.attention.context_parallel_attention")
def _context_parallel(m: Maker) -> Call:
    query, key, value, size = heads_and_tokens(m, least=1)
    options = {name: given for name, given in common(m, size).items() if name != "key_padding"}
    pde = a_pde(m, size["heads"]) if m.chance(80) else None
    shape = (*size["batch"], size["heads"], size["queries"], size["value"])
    check = lambda r: shaped(*shape, dtype=query.dtype)(r)
    return calling(
        context_parallel_attention, query, key, value, pde, check=check, tolerance=1e-3, **options
    )


@target("attractor.attention.Parts")
def _parts(m: Maker) -> Call:
    m.seed()
    good = [(((0, 2),), ((2, 5),)), (((0, 1), (2, 3)), ((1, 2),))]
    return calling(
        Parts,
        m.choice(good, odd=((), ((),), (((0, 2), (1, 3)),), (((2, 0),),), ((0, 1),), ((("a", 1),),))),
    )


@target("attractor.attention.Parts.split")
def _parts_split(m: Maker) -> Call:
    m.seed()
    return calling(Parts.split, m.whole(4, 20), m.whole(1, 2), m.boolean())


@target("attractor.attention.Parts.positions")
def _parts_positions(m: Maker) -> Call:
    m.seed()
    return calling(Parts.split(9, 3, m.flag()).positions, m.choice([0, 1, 2], odd=(3, -4)))


@target("attractor.attention.Parts.take")
def _parts_take(m: Maker) -> Call:
    x = m.tensor((2, 9, 3), FLOATS)
    return calling(
        Parts.split(9, 3, m.flag()).take,
        x,
        m.choice([0, 1, 2], odd=(3, -4)),
        m.choice([1, -2], odd=(0, 7)),
    )


@target("attractor.attention.Parts.join")
def _parts_join(m: Maker) -> Call:
    parts = Parts.split(6, 2, m.flag())
    pieces: Any = [m.tensor((2, 3, 4), [torch.float32]) for _ in range(2)]
    return calling(parts.join, m.pick((pieces[:1], None, [])) if m.strange() else pieces, layouts=False)
