"""Transformers with PDE attention: causal, blind to padding, standard without a PDE, stable in training."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from attractor.attention import (
    CausalityError,
    Classifier,
    LanguageModel,
    PDEAttention,
    Stack,
    assert_causal,
    pdes,
)
from attractor.attention.cache import PDECache
from attractor.attention.performer import PerformerAttention, RandomFeatures, performer_attention
from attractor.attention.windows import window_attention

PDES = ["diffusion", "wave", "reaction_diffusion", "advection_diffusion"]
every_pde = pytest.mark.parametrize("pde", [None, *PDES])
moving_pde = pytest.mark.parametrize("pde", PDES)
SMALL = {"dim": 16, "heads": 2, "layers": 2, "hidden": 32, "max_tokens": 24}


def language_model(pde="diffusion", seed=0, **options):
    torch.manual_seed(seed)
    return LanguageModel(13, **{**SMALL, "dropout": 0.0, "pde": pde, **options})


def classifier(pde="diffusion", seed=0, **options):
    torch.manual_seed(seed)
    return Classifier(13, 3, **{**SMALL, "dropout": 0.0, "pde": pde, **options})


def ids(batch=2, tokens=12):
    return torch.randint(1, 13, (batch, tokens), generator=torch.Generator().manual_seed(5))


@pytest.mark.sampled(15)
@every_pde
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_shapes(pde, per_head, tokens):
    x = torch.randn(3, tokens, 16)
    for causal in (False, True):
        attention = PDEAttention(16, 4, pde, causal=causal, per_head=per_head)
        assert attention(x).shape == x.shape
        assert attention(x, torch.ones(3, tokens, dtype=torch.bool)).shape == x.shape
    assert language_model(pde, per_head=per_head)(ids(3, tokens)).shape == (3, tokens, 13)
    for pooling in ("mean", "first"):
        assert classifier(pde, pooling=pooling)(ids(3, tokens)).shape == (3, 3)


@pytest.mark.sampled(6)
@every_pde
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("place", ["each", "after"])
def test_language_models_are_exactly_causal(pde, norm, place):
    model = language_model(pde, norm=norm, place=place, steps=5, per_head=True, dropout=0.1)
    assert_causal(model, ids())
    assert_causal(model.stack, torch.randn(2, 9, 16))  # gradients too


@moving_pde
def test_without_walls_the_leak_is_caught(pde):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = language_model(pde, walls="sequence")
        with pytest.raises(CausalityError, match="output 0 sees its future"):
            assert_causal(model, ids())


@every_pde
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_padding_does_not_matter(pde, pooling):
    model = classifier(pde, pooling=pooling, padding=0).double()
    text = ids(1, 7)
    plain = model(text)
    right = torch.cat((text, torch.zeros(1, 4, dtype=torch.long)), 1)
    left = torch.cat((torch.zeros(1, 4, dtype=torch.long), text), 1)
    torch.testing.assert_close(model(right), plain)
    torch.testing.assert_close(model(left), plain)
    real = right != 0
    other = torch.where(real, right, 5)  # what stands in padded places changes no bit
    assert torch.equal(model(right, real), model(other, real))
    together = model(torch.cat((right, ids(1, 11))))
    torch.testing.assert_close(together[:1], plain)


@every_pde
def test_padded_language_models_predict_the_same(pde):
    model = language_model(pde).double()
    text = ids(1, 7)
    left = torch.cat((torch.ones(1, 3, dtype=torch.long), text), 1)
    real = torch.tensor([[False] * 3 + [True] * 7])
    padded = model(left, real)
    torch.testing.assert_close(padded[:, 3:], model(text))
    padded.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every_pde
def test_packed_documents_do_not_see_each_other(pde):
    model = language_model(pde).double()
    text, documents = ids(1, 10), torch.tensor([[0] * 6 + [1] * 4])
    torch.testing.assert_close(model(text, documents=documents)[:, :6], model(text[:, :6]))
    other = text.clone()
    other[:, :6] = other[:, :6] % 12 + 1
    before, after = model(text, documents=documents), model(other, documents=documents)
    assert torch.equal(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_a_pde_it_is_torch_s_transformer(causal, norm):
    stack = Stack(16, 2, 1, 32, dropout=0.0, norm=norm, pde=None, causal=causal).double()
    peer = nn.TransformerEncoderLayer(
        16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    attention, network = stack.layers[0].attention, stack.layers[0].network
    peer.self_attn.in_proj_weight.data = attention.branch.project.weight.data
    peer.self_attn.in_proj_bias.data = attention.branch.project.bias.data
    peer.self_attn.out_proj.load_state_dict(attention.branch.out.state_dict())
    peer.linear1.load_state_dict(network.branch[0].state_dict())
    peer.linear2.load_state_dict(network.branch[2].state_dict())
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    ahead = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else None
    torch.testing.assert_close(stack(x), stack.norm(peer(x, src_mask=ahead)))
    real = torch.rand(2, 9) > 0.3
    real[:, 0] = True
    found = stack(x, key_padding=real)
    torch.testing.assert_close(
        found, stack.norm(peer(x, src_mask=ahead, src_key_padding_mask=~real)), rtol=1e-10, atol=1e-10
    )


@moving_pde
def test_the_pde_is_all_that_differs(pde):
    standard, moving, still = language_model(None), language_model(pde), language_model(pde, steps=0)
    names = dict(standard.named_parameters())
    assert all(torch.equal(p, names[n]) for n, p in moving.named_parameters() if n in names)
    assert all("_raw" in n for n, _ in moving.named_parameters() if n not in names)
    assert torch.equal(standard(ids()), still(ids()))
    assert (standard(ids()) - moving(ids())).abs().max() > 1e-6


@moving_pde
def test_gradients_reach_the_coefficients(pde):
    for model, target in ((language_model(pde), ids()), (classifier(pde), torch.tensor([0, 2]))):
        logits = model(ids())
        cross_entropy(logits.flatten(0, -2), target.flatten()).backward()
        coefficients = [p for n, p in model.named_parameters() if "_raw" in n]
        assert len(coefficients) == 2 * (2 if pde.endswith("n_diffusion") else 1)
        assert all(p.grad.abs().min() > 0 for p in coefficients)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_coefficients_may_be_fixed_or_shared():
    assert not [n for n, _ in language_model(learn=False).named_parameters() if "_raw" in n]
    shared = language_model(pdes.LearnedPDE("wave", heads=2))
    assert len({id(a.pde) for a in shared.stack.attentions()}) == 1
    assert len({id(a.pde) for a in language_model("wave").stack.attentions()}) == 2
    assert language_model("wave", learn=False).stack.attentions()[0].equation() == pdes.Wave()


@pytest.mark.sampled(4)
@moving_pde
@pytest.mark.parametrize("steps", [4, 8])
def test_violent_training_stays_finite_and_stable(pde, steps):
    model = language_model(pde, steps=steps, per_head=True, max_tokens=12)
    optimiser = torch.optim.SGD(
        [{"params": [p for n, p in model.named_parameters() if ("_raw" in n) == learnt], "lr": lr}
         for learnt, lr in ((False, 0.1), (True, 1e5))]
    )  # fmt: skip
    for _ in range(8):
        loss = cross_entropy(model(ids()[:, :-1]).flatten(0, 1), ids()[:, 1:].flatten())
        assert loss.isfinite()
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
        for attention in model.stack.attentions():
            assert attention.equation().max_dt() >= 1.0


@pytest.mark.sampled(1)
@moving_pde
def test_eight_steps_learn(pde):
    """The paper's Table 4 has NaN there."""
    model = language_model(pde, steps=8, dim=32, layers=1)
    text = (torch.arange(24) % 5 + 1)[None]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(x < 10 for x in losses)  # false for NaN, too
    assert losses[-1] < 0.1 * losses[0]
    assert_causal(model, text)


@pytest.mark.slow
@pytest.mark.parametrize(  # one of every way through the engines; the others take the same
    "pde",
    [None, "wave", "reaction_diffusion"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("diffusion", "advection_diffusion")],
)
def test_compiled_whole(pde):
    model = language_model(pde, layers=1)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(ids()), model(ids()))
    whole(ids()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("pde", [pytest.param(None, marks=pytest.mark.slow), "wave"])
@pytest.mark.slow
def test_classifiers_with_padding_compiled_whole(pde):
    model = classifier(pde, padding=0, layers=1)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    padded = torch.cat((ids(), torch.zeros(2, 2, dtype=torch.long)), 1)
    torch.testing.assert_close(whole(padded), model(padded))


@every_pde
def test_saved_loaded_copied(pde):
    model = language_model(pde, per_head=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    again = language_model(pde, seed=1, per_head=True)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(ids()), model(ids()))
    assert torch.equal(copy.deepcopy(model)(ids()), model(ids()))


@every_pde
def test_half_precision(pde):
    model = language_model(pde)
    truth = model(ids())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (model(ids()).float() - truth).abs().max() < 0.05
    half = copy.deepcopy(model).bfloat16()
    assert half(ids()).dtype == torch.bfloat16
    assert (half(ids()).float() - truth).abs().max() < 0.05
    assert all(p.dtype == torch.float32 for n, p in half.named_parameters() if "_raw" in n)


@pytest.mark.sampled(3)
@every_pde
def test_generated_texts_follow_the_model(pde):
    model = language_model(pde, dropout=0.5, max_tokens=16).double()
    before = ids(2, 3)
    after = model.generate(before, 17, temperature=0)  # beyond max_tokens, too
    assert after.shape == (2, 20)
    assert model.training
    assert torch.equal(after[:, :3], before)
    model.eval()
    for n in range(3, 20):
        assert torch.equal(model(after[:, max(0, n - 16) : n])[:, -1].argmax(-1), after[:, n])
    draw = lambda **o: model.generate(
        before, 12, top_k=4, generator=torch.Generator().manual_seed(2), **o
    )
    assert torch.equal(draw(), draw(cache=False))
    assert not torch.equal(draw(temperature=2.0), after[:, :15])
    assert torch.equal(model.generate(before, 0), before)


def test_dropout_of_maps_is_for_training():
    attention = PDEAttention(16, 2, dropout=0.5)
    x = torch.randn(1, 6, 16)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))
    assert torch.equal(language_model(dropout=0.5).eval()(ids()), language_model()(ids()))


class Own(nn.Module):
    """An attention of one's own, with a parameter and a part given as an option."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(1)), []

    def forward(self, query, key, value, *, is_causal, pde, steps, dt, features, key_padding=None):
        self.calls.append((pde, steps, is_causal, key_padding is None))
        return self.weight * features(value)


def test_any_attention_plugs_in():
    for make in (language_model, classifier):
        model = make("wave", steps=3, attention=Own(), features=nn.Linear(8, 8))
        attentions = model.stack.attentions()
        model(ids()).sum().backward()
        for attention in attentions:
            ((pde, steps, causal, unpadded),) = attention.attention.calls
            assert isinstance(pde, pdes.Wave)
            assert (steps, causal, unpadded) == (3, make is language_model, True)
            assert attention.attention.weight.grad is not None
            assert attention.parts["features"].weight.grad is not None
        assert attentions[0].attention is not attentions[1].attention
    standard = language_model(None, attention=Own(), features=nn.Identity())
    standard(ids())
    assert standard.stack.attentions()[0].attention.calls[0][:2] == (None, 0)
    with pytest.raises(ValueError, match="only causal attention by pde_attention"):
        standard.stack.attentions()[0].new_cache()
    assert standard.generate(ids(), 2).shape == (2, 14)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pde", [None, "diffusion", "wave", "advection_diffusion"])
def test_longformers_and_performers_are_the_same_classes(pde):
    kinds = [{"attention": window_attention, "window": 3, "global_tokens": 2},
             {"attention": performer_attention, "features": RandomFeatures(8, 16)}]  # fmt: skip
    for kind in kinds:
        model = language_model(pde, steps=2, **kind)
        assert_causal(model, ids())
        assert_causal(model.stack, torch.randn(1, 9, 16))
        names = {n for n, _ in model.named_parameters()}
        assert names == {n for n, _ in language_model(pde).named_parameters()}
        encoder = classifier(pde, steps=2, padding=0, **kind).double()
        text = ids(1, 9)
        padded = torch.cat((text, torch.zeros(1, 3, dtype=torch.long)), 1)
        torch.testing.assert_close(encoder(padded), encoder(text))
    assert len({id(f) for f in model.modules() if isinstance(f, RandomFeatures)}) == 2
    again = language_model(pde, steps=2, **kinds[1], seed=1)
    again.load_state_dict(model.state_dict())  # directions included
    assert torch.equal(again(ids()), model(ids()))


@moving_pde
def test_a_window_is_an_option(pde):
    model = language_model(pde, window=(2, 0), layers=1, steps=2)
    assert_causal(model, ids())
    other = ids()
    other[:, 0] = 12 - other[:, 0]
    changed = (model(ids()) - model(other)).abs().amax((0, 2)) > 0
    assert changed.tolist() == [True] * 3 + [False] * 9
    standard = language_model(None, window=(2, 0), layers=1)
    assert ((standard(ids()) - standard(other)).abs().amax((0, 2)) > 0).tolist() == changed.tolist()


class Mine(nn.Module):
    """An attention of one's own that drops nothing."""

    def forward(self, query, key, value, *, is_causal, pde, steps, dt, size=1.0):
        return size * value


UNKNOWN = {
    "droput": lambda **o: PDEAttention(16, 2, **o),
    "walss": lambda **o: PDEAttention(16, 2, None, **o),
    "windw": lambda **o: PDEAttention(16, 2, attention=window_attention, window=3, **o),
    "feature": lambda **o: PDEAttention(
        16, 2, attention=performer_attention, features=RandomFeatures(8), **o
    ),
    "count": lambda **o: PDEAttention(16, 2, attention=PerformerAttention(8), **o),
    "sise": lambda **o: PDEAttention(16, 2, attention=Mine(), **o),
    "head": lambda **o: Stack(16, 2, 1, 16, **o),
    "norms": lambda **o: Stack(16, 2, 0, 16, **o),
    "poling": lambda **o: classifier(**o),
    "map_droput": lambda **o: language_model(**o),
    "axs": lambda **o: language_model(place="after", **o),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_misspelt_arguments_are_refused(name):
    with pytest.raises(TypeError, match=f"no argument '{name}'"):
        UNKNOWN[name](**{name: 0.1})


def test_a_shared_pde_must_be_stable_for_the_steps_taken():
    """Tensors are not checked in a call, so coefficients learnt for smaller steps would blow up."""
    for options, learned in (
        ({"dt": 2.0}, pdes.LearnedPDE("diffusion")),
        ({"axis": "both"}, pdes.LearnedPDE("diffusion")),
    ):
        with pytest.raises(ValueError, match="make the LearnedPDE with these"):
            PDEAttention(16, 2, learned, **options)
    PDEAttention(16, 2, pdes.LearnedPDE("diffusion", dt=2.0), dt=0.5)
    PDEAttention(16, 2, pdes.LearnedPDE("diffusion", axis="both"), axis="both")


def test_the_nearest_argument_is_named():
    with pytest.raises(TypeError, match="did you mean 'dropout'"):
        PDEAttention(16, 2, droput=0.1)
    with pytest.raises(TypeError, match="window_attention takes no such option; did you mean 'window'"):
        PDEAttention(16, 2, attention=window_attention, windows=3)


@pytest.mark.parametrize("attention", [None, window_attention, Mine()], ids=["default", "window", "own"])
def test_arguments_under_another_name_are_refused(attention):
    """They would be overwritten, or be active in evaluation."""
    for name, own in (("is_causal", "causal"), ("dropout_p", "dropout"), ("key_padding", "forward")):
        with pytest.raises(
            TypeError, match=f"{name} is set by PDEAttention itself; use its argument .*{own}"
        ):
            PDEAttention(16, 2, attention=attention, **{name: True})


def test_options_are_checked_without_a_pde_too():
    for wrong in ({"axis": "keys"}, {"walls": "none"}, {"method": "fast"}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} '{wrong[name]}' is not one of"):
            PDEAttention(16, 2, None, **wrong)


def test_models_and_stacks_take_no_unknown_inputs():
    for model, x in ((Stack(16, 2, 0, 16), torch.randn(1, 3, 16)), (language_model(), ids())):
        with pytest.raises(TypeError, match="unexpected keyword"):
            model(x, keypadding=None)


@pytest.mark.parametrize("attention", [Mine(), PerformerAttention(8, 16)], ids=["own", "performer"])
def test_dropout_is_refused_where_nothing_can_be_dropped(attention):
    with pytest.raises(
        ValueError, match=r"dropout = 0.1 drops entries of the map, .* takes no dropout_p"
    ):
        PDEAttention(16, 2, attention=attention, dropout=0.1)
    with pytest.raises(ValueError, match="takes no dropout_p"):
        language_model(attention=attention, map_dropout=0.1)
    with pytest.raises(TypeError, match="dropout_p"):
        PerformerAttention(8)(*torch.randn(3, 1, 2, 5, 8), dropout_p=0.1)


def test_what_can_have_a_cache():
    can = lambda **options: PDEAttention(16, 2, **{"causal": True, **options}).can_cache
    assert can()
    assert can(axis="key", walls="mask", method="dense")
    assert can(pde=None)
    for cannot in (
        {"axis": "query"}, {"axis": "both"}, {"axis": "query", "pde": None}, {"walls": "sequence"},
        {"walls": "periodic"}, {"causal": False}, {"window": 3}, {"scale": 2.0}, {"renormalise": True},
        {"attention": window_attention, "window": 3}, {"attention": PerformerAttention(8)},
    ):  # fmt: skip
        assert not can(**cannot), cannot
        layer = PDEAttention(16, 2, **{"causal": True, **cannot})
        with pytest.raises(ValueError, match="only causal attention by pde_attention"):
            layer.new_cache()
        with pytest.raises(ValueError, match="only causal attention by pde_attention"):
            layer(torch.randn(1, 3, 16), cache=PDECache("diffusion"))


def test_caches_of_other_attentions_are_refused():
    layer, x = PDEAttention(16, 2, "wave", 3, causal=True), torch.randn(1, 3, 16)
    for other in (PDECache("diffusion", 3), PDECache("wave", 4), PDECache("wave", 3, dt=0.5)):
        with pytest.raises(ValueError, match="make the cache with new_cache"):
            layer(x, cache=other)
    layer(x, cache=PDECache("wave", 3))
    dropping = PDEAttention(16, 2, causal=True, dropout=0.5)
    with pytest.raises(ValueError, match="a cache is for inference"):
        dropping(x, cache=dropping.new_cache())
    dropping.eval()(x, cache=dropping.new_cache())


@pytest.mark.parametrize("place", ["each", "after"])
def test_every_attention_needs_its_cache(place):
    """With fewer, layers would be left out; with the last one twice, texts would be mixed up."""
    model = language_model(place=place).eval()
    caches = [attention.new_cache() for attention in model.stack.attentions()]
    for wrong in (caches[:1], [*caches, caches[0]]):
        with pytest.raises(ValueError, match=f"pass one for each of {len(caches)} attentions"):
            model.states(ids(), caches=wrong)
    caches[-1].attend(*torch.randn(3, 2, 2, 4, 8))
    with pytest.raises(ValueError, match="all must hold the same text"):
        model.states(ids(), caches=caches)


def test_what_raises_leaves_all_caches_as_they_were():
    model = language_model().eval()
    caches = [attention.new_cache() for attention in model.stack.attentions()]
    text = ids()
    truth = model.states(text)
    model.states(text[:, :5], caches=caches)
    last = model.stack.layers[-1].network.branch
    model.stack.layers[-1].network.branch = nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        model.states(text[:, 5:], caches=caches)
    model.stack.layers[-1].network.branch = last
    assert [len(cache) for cache in caches] == [5, 5]
    torch.testing.assert_close(model.states(text[:, 5:], caches=caches), truth[:, 5:])

    layer, x = PDEAttention(16, 2, causal=True), torch.randn(1, 3, 16)
    cache = layer.new_cache()
    layer.out = nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        layer(x, cache=cache)
    assert len(cache) == 0


TABLES = {  # of the paper
    7: (Classifier, {"classes": 2}),
    8: (LanguageModel, {}),
    9: (LanguageModel, {"layers": 2, "window": (256, 0)}),
    10: (LanguageModel, {"max_tokens": 512}),
    11: (LanguageModel, {"max_tokens": 512, "pde": pdes.AdvectionDiffusion(0.10, 0.03)}),
    12: (LanguageModel, {"max_tokens": 512, "steps": 8}),
}


@pytest.mark.parametrize("table", TABLES)
def test_the_paper_s_configurations(table):
    make, options = TABLES[table]
    with torch.device("meta"):
        moving, standard = make(30_522, **options), make(30_522, **{**options, "pde": None})
    extra = sum(p.numel() for p in moving.parameters()) - sum(p.numel() for p in standard.parameters())
    layers = options.get("layers", 4)
    assert extra == layers * (2 if table == 11 else 1)
    layer = sum(p.numel() for p in standard.stack.layers[0].parameters())
    dim = 128 if table == 7 else 256
    assert layer == 4 * dim * (dim + 1) + 2 * dim * 2 * dim + 3 * dim + 4 * dim


def test_made_on_the_meta_device_and_reset():
    with torch.device("meta"):
        attention = PDEAttention(8, 2)
    attention.to_empty(device="cpu")
    attention.pde.reset_parameters()
    assert attention.equation().alpha.item() == pytest.approx(0.1)


WRONG = {
    "dim = 10 must be a multiple of heads = 4": lambda: PDEAttention(10, 4),
    "steps = -1 must be a whole number": lambda: PDEAttention(8, 2, steps=-1),
    "dropout = 1 is not a probability below 1": lambda: PDEAttention(8, 2, dropout=1),
    "no PDE is called 'heat'": lambda: PDEAttention(8, 2, "heat"),
    "is not an equation; pass one": lambda: PDEAttention(8, 2, pdes.Diffusion, learn=False),
    "dt = 7 is unstable for Diffusion": lambda: PDEAttention(8, 2, dt=7.0, learn=False),
    "alpha = 0.1 of Diffusion must lie between 0 and": lambda: PDEAttention(8, 2, dt=7.0),
    "norm 'middle' is not one of pre, post": lambda: classifier(norm="middle"),
    "place 'before' is not one of each, after": lambda: classifier(place="before"),
    "pooling 'max' is not one of mean, first": lambda: classifier(pooling="max"),
    "25 tokens are more than the 24": lambda: language_model()(ids(1, 25)),
    r"ids \[12\] of torch.int64 must be integers \[batch, tokens\]": lambda: language_model()(ids()[0]),
    "of torch.float32 must be integers": lambda: language_model()(torch.rand(1, 4)),
    "at least one token": lambda: language_model().generate(ids(1, 0), 2),
    "temperature = -1 must be": lambda: language_model().generate(ids(), 2, temperature=-1),
    "use axis='key'": lambda: language_model(axis="query")(ids()),
    "documents and a cache were both given": lambda: language_model().states(
        ids(), documents=0 * ids(), caches=[PDECache("wave")] * 2
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_teach(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


@pytest.mark.gpu
@every_pde
def test_on_a_gpu(pde):
    model = language_model(pde).cuda()
    assert (model(ids().cuda()).cpu() - language_model(pde)(ids())).abs().max() < 1e-4
    assert_causal(model, ids().cuda())
    assert_causal(model.bfloat16(), ids().cuda())
