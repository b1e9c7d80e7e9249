"""A cache gives what one call on all tokens gives, however the tokens come."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attractor.attention import cache as module
from attractor.attention import pde_attention, pdes
from attractor.attention.cache import PDECache
from attractor.attention.models import LanguageModel

PDES = {
    "diffusion": pdes.Diffusion(0.2),
    "wave": pdes.Wave(0.4),
    "reaction": pdes.ReactionDiffusion(0.2, 0.1),
    "split": pdes.ReactionDiffusion(0.2, 0.1, split=True),
    "advection": pdes.AdvectionDiffusion(0.2, 0.1),
}
every_pde = pytest.mark.parametrize("pde", PDES)


def qkv(tokens=40, batch=2, heads=4, key_heads=2, dtype=torch.float64):
    shapes = [(batch, heads, tokens, 4), (batch, key_heads, tokens, 4), (batch, key_heads, tokens, 3)]
    return [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]


def each_head(pde, heads):
    """The same PDE with a coefficient for each head."""
    names = [n for n in ("alpha", "beta", "c") if hasattr(pde, n)]
    sizes = torch.linspace(1.0, 0.3, heads, dtype=torch.float64)[:, None, None]
    more = {"split": pde.split} if hasattr(pde, "split") else {}
    return type(pde)(**{n: sizes * getattr(pde, n) for n in names}, **more)


def fed(cache, q, k, v, cuts, real=None):
    """Outputs of tokens that come in pieces of those sizes."""
    parts, start = [], 0
    for size in cuts:
        part = slice(start, start + size)
        padding = None if real is None or real[:, part].all() else real[:, part]
        parts.append(cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], padding))
        start += size
    return torch.cat(parts, 2)


def close(found, truth):
    assert found.shape == truth.shape
    assert (found - truth).abs().max() <= 1e-12 * truth.abs().max()


@pytest.mark.sampled(40)
@every_pde
@pytest.mark.parametrize("steps", [0, 1, 4, 7])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("own", [False, True])
def test_token_by_token(pde, steps, key_heads, own):
    q, k, v = qkv(30, key_heads=key_heads)
    equation = each_head(PDES[pde], 4) if own else PDES[pde]
    truth = pde_attention(
        q, k, v, is_causal=True, enable_gqa=True, pde=equation, steps=steps, method="dense"
    )
    cache = PDECache(equation, steps, capacity=4)
    close(fed(cache, q, k, v, [1] * 30), truth)
    assert len(cache) == 30


@settings(max_examples=50)
@given(
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    pde=st.sampled_from(sorted(PDES)),
    steps=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4)]),
    own=st.booleans(),
    pads=st.lists(st.integers(0, 9), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)
def test_any_cuts(cuts, pde, steps, heads, own, pads, seed):
    torch.manual_seed(seed)
    tokens = sum(cuts)
    q, k, v = qkv(tokens, heads=heads[0], key_heads=heads[1])
    real = torch.arange(tokens) >= torch.tensor(pads)[:, None]
    equation = each_head(PDES[pde], heads[0]) if own else PDES[pde]
    truth = pde_attention(
        q,
        k,
        v,
        is_causal=True,
        enable_gqa=True,
        pde=equation,
        steps=steps,
        key_padding=real,
        method="dense",
    )
    found = fed(PDECache(equation, steps), q, k, v, cuts, real)
    assert (found - truth).abs().max() <= 1e-12 * truth.abs().max().clamp(min=1e-3)


def test_padding_anywhere():
    q, k, v = qkv()
    real = torch.rand(2, 40) > 0.2
    truth = pde_attention(
        q, k, v, is_causal=True, enable_gqa=True, pde="wave", key_padding=real, method="dense"
    )
    for cuts in ([1] * 40, [5] * 8, [40], [3, 30, 7]):
        close(fed(PDECache("wave"), q, k, v, cuts, real), truth)


@every_pde
def test_long_prompts_come_in_blocks_of_rows(pde):
    q, k, v = qkv(270, batch=1, heads=2, key_heads=1)
    truth = pde_attention(q, k, v, is_causal=True, enable_gqa=True, pde=PDES[pde], method="dense")
    for cuts in ([3, 267], [120, 150]):
        close(fed(PDECache(PDES[pde]), q, k, v, cuts), truth)


@every_pde
def test_crop_forgets(pde):
    q, k, v = qkv()
    cache = PDECache(PDES[pde])
    truth = fed(PDECache(PDES[pde]), q, k, v, [40])
    fed(cache, q, k, v, [10, 1, 1, 1])
    for kept in (13, 12, 9, 3, 0):  # from each point on, guesses that turn out wrong, then the truth
        cache.crop(kept)
        cache.attend(*(torch.randn_like(x[:, :, :6]) for x in (q, k, v)))
        cache.crop(-6)
        assert len(cache) == kept
        rest = [x[:, :, kept:] for x in (q, k, v)]
        close(fed(cache, *rest, [1, 2, 40 - kept - 3]), truth[:, :, kept:])
    for wrong in (41, -41):
        with pytest.raises(ValueError, match="the cache holds 40 tokens"):
            cache.crop(wrong)


def test_crop_forgets_padding():
    q, k, v = qkv()
    cache = PDECache("diffusion")
    cache.attend(*(x[:, :, :9] for x in (q, k, v)), torch.rand(2, 9) > 0.5)
    cache.crop(0)
    close(fed(cache, q, k, v, [1] * 40), fed(PDECache("diffusion"), q, k, v, [40]))


@every_pde
def test_reorder_is_a_choice_of_texts(pde):
    q, k, v = qkv(batch=3)
    real = torch.arange(40) >= torch.tensor([[0], [4], [7]])
    order = torch.tensor([2, 0, 0, 1, 2])
    cache = PDECache(PDES[pde])
    fed(cache, q[:, :, :20], k[:, :, :20], v[:, :, :20], [12, 1, 7], real)
    cache.reorder(order)
    found = fed(cache, *(x[order, :, 20:] for x in (q, k, v)), [1] * 20)
    truth = pde_attention(
        q, k, v, is_causal=True, enable_gqa=True, pde=PDES[pde], key_padding=real, method="dense"
    )
    close(found, truth[order][:, :, 20:])


@every_pde
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(pde, dtype):
    q, k, v = qkv(60, dtype=dtype)
    options = dict(is_causal=True, enable_gqa=True, pde=PDES[pde], method="dense")
    truth = pde_attention(*(x.double() for x in (q, k, v)), **options)
    dense = (pde_attention(q, k, v, **options).double() - truth).abs().max()
    found = fed(PDECache(PDES[pde]), q, k, v, [1] * 60)
    assert found.dtype == dtype
    assert (found.double() - truth).abs().max() <= 2 * dense


class Counted:
    """A linear PDE that counts what it touches."""

    linear, reach, touched = True, 1, 0

    def check(self, dt, axis="key"):
        pass

    def step(self, u, velocity, line, dt):
        self.touched += u.numel()
        return u + 0.1 * line.laplacian(u), velocity


def test_a_token_costs_no_steps_over_its_row():
    q, k, v = qkv(200)
    equation = Counted()
    cache = PDECache(equation)
    fed(cache, q[:, :, :20], k[:, :, :20], v[:, :, :20], [20])
    fed(cache, *(x[:, :, 20:21] for x in (q, k, v)), [1])
    equation.touched = 0
    fed(cache, *(x[:, :, 21:] for x in (q, k, v)), [1] * 179)
    assert equation.touched == 0  # two small matrices, made once


def test_buffers_grow_by_doubling_and_inputs_are_not_kept():
    q, k, v = qkv(100)
    cache = PDECache("diffusion", capacity=8)
    sizes = []
    for i in range(100):
        cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v)))
        sizes.append(cache._key.shape[2])
    assert sorted(set(sizes)) == [8, 16, 32, 64, 128]
    key = k.clone()
    cache.crop(0)
    out = cache.attend(q, key, v)
    key.zero_()
    close(cache.attend(*(x[:, :, -1:] for x in (q, k, v))), _last(q, k, v))
    assert not out.requires_grad


def _last(q, k, v):
    again = [torch.cat((x, x[:, :, -1:]), 2) for x in (q, k, v)]
    return pde_attention(*again, is_causal=True, enable_gqa=True, pde="diffusion")[:, :, -1:]


def test_gradients_are_not_followed():
    q, k, v = (x.requires_grad_() for x in qkv())
    cache = PDECache(pdes.Diffusion(torch.full((4, 1, 1), 0.1, requires_grad=True)))
    assert not fed(cache, q, k, v, [20, 1, 19]).requires_grad


def test_learnt_coefficients_and_models():
    q, k, v = qkv()
    learned = pdes.LearnedPDE("advection_diffusion", heads=4).double()
    truth = pde_attention(q, k, v, is_causal=True, enable_gqa=True, pde=learned(), steps=3)
    close(fed(PDECache(learned(), 3), q, k, v, [5] * 8), truth.detach())
    model = LanguageModel(11, dim=16, heads=2, layers=2, hidden=16, pde="wave", steps=3, per_head=True)
    model = model.eval().double()
    ids = torch.randint(11, (2, 30))
    caches = [attention.new_cache() for attention in model.stack.attentions()]
    cuts = [7, 1, 1, 1, 5, 1, 14]
    states = torch.cat([model.states(part, caches=caches) for part in ids.split(cuts, 1)], 1)
    close(states, model.states(ids).detach())


@pytest.mark.parametrize("pde", [None, "diffusion", "reaction_diffusion"])
def test_padded_texts_have_the_positions_of_their_real_tokens(pde):
    torch.manual_seed(0)
    model = (
        LanguageModel(11, dim=16, heads=2, layers=2, hidden=16, max_tokens=24, pde=pde).eval().double()
    )
    torch.nn.init.normal_(model.embed.positions.weight)
    ids, real = torch.randint(11, (2, 14)), torch.ones(2, 14, dtype=torch.bool)
    real[0, :4] = False
    whole = model.states(ids, real).detach()
    for cuts in ([9, 5], [2, 12], [6, 1, 1, 6]):
        caches = [attention.new_cache() for attention in model.stack.attentions()]
        begin, *pieces = ids.split(cuts, 1)
        parts = [model.states(begin, real[:, : cuts[0]], caches=caches)]
        for piece in pieces:
            where = len(caches[0])
            padding = real[:, where : where + piece.shape[1]]
            parts.append(model.states(piece, None if padding.all() else padding, caches=caches))
        close(torch.cat(parts, 1)[real], whole[real])
        assert caches[0].real_tokens.tolist() == [[10], [14]]


def test_keys_are_scored_in_float32():
    torch.manual_seed(0)
    q, k, v = (x.bfloat16() for x in torch.randn(3, 1, 4, 200, 128))
    cache = PDECache("diffusion", 0)
    cache.attend(q[:, :, :199], k[:, :, :199], v[:, :, :199])
    q = 8 * q[:, :, 199:]
    cache.attend(q, k[:, :, 199:], v[:, :, 199:])
    truth = (q.double() @ k.double().mT / 128**0.5).softmax(-1)
    assert (cache._attention_map(q, 199)[0] - truth).abs().max() < 1e-5


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@every_pde
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("own", [False, True])
def test_a_copy_is_a_cache_of_its_own(pde, how, own):
    q, k, v = qkv()
    equation = each_head(PDES[pde], 4) if own else PDES[pde]
    cache = PDECache(equation, 2, capacity=64)  # room for both in one buffer
    fed(cache, q[:, :, :20], k[:, :, :20], v[:, :, :20], [12, 1, 7])
    other = COPIES[how](cache)
    parts = [x[:, :, 20:] for x in (q, k, v)]
    truth = pde_attention(q, k, v, is_causal=True, enable_gqa=True, pde=equation, steps=2)[:, :, 20:]
    wrong = [torch.randn_like(x) for x in parts]
    assert (fed(other, *wrong, [3, 1, 16]) - truth).abs().max() > 0.1
    assert (len(cache), len(other)) == (20, 40)
    close(fed(cache, *parts, [1, 5, 14]), truth)
    other.crop(20)
    close(fed(other, *parts, [20]), truth)


@pytest.mark.parametrize("learnt", [False, True])
def test_a_model_s_cache_can_be_copied(learnt):
    model = LanguageModel(11, dim=16, heads=2, layers=1, hidden=16, learn=learnt).eval()
    ids = torch.randint(11, (2, 10))
    caches = [attention.new_cache() for attention in model.stack.attentions()]
    model.states(ids[:, :6], caches=caches)
    others = [copy.deepcopy(cache) for cache in caches]
    truth = model.states(ids)[:, 6:]
    torch.testing.assert_close(model.states(ids[:, 6:], caches=caches), truth)
    torch.testing.assert_close(model.states(ids[:, 6:], caches=others), truth)


def test_keys_and_values_are_freed_without_the_garbage_collector():
    cache = PDECache("diffusion")
    fed(cache, *qkv(), [20, 1, 19])
    held = [weakref.ref(x) for x in (cache, *vars(cache).values()) if x is cache or torch.is_tensor(x)]
    assert len(held) >= 4
    gc.disable()
    try:
        del cache
        assert not [x for x in held if x() is not None]
    finally:
        gc.enable()


def state(cache):
    tensors = {n: x[:, :, : len(cache)].clone() for n, x in vars(cache).items() if torch.is_tensor(x)}
    return (cache._length, cache._final_length, cache._padding_end), tensors


@pytest.mark.sampled(40)
@every_pde
@pytest.mark.parametrize("before", [0, 1, 15])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("place", ["_append", "_finalise", "_attend_rows", "pde_attention", "product"])
def test_what_raises_leaves_the_cache_as_it_was(pde, before, padded, place, monkeypatch):
    """Wherever it raises: memory may run out, and anybody may press Ctrl-C."""
    q, k, v = qkv()
    cache = PDECache(PDES[pde], 2, capacity=4)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, :3] = not padded
    if before:
        fed(cache, *(x[:, :, :before] for x in (q, k, v)), [before], real[:, :before])
    numbers, tensors = state(cache)

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place.startswith("_"):
            found = getattr(PDECache, place)
            after = lambda *args: (found(*args), fail())
            patch.setattr(PDECache, place, after)
        else:
            patch.setattr(module, {"product": "_grouped_matmul"}.get(place, place), fail)
        try:
            cache.attend(
                *(x[:, :, before : before + 9] for x in (q, k, v)), real[:, before : before + 9]
            )
        except KeyboardInterrupt:
            again, others = state(cache)
            assert again == numbers
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensors[n], others[n]) for n in tensors)
        else:
            cache.crop(before)  # this place is not passed
    truth = fed(PDECache(PDES[pde], 2), q, k, v, [40], real)[:, :, before:]
    parts = [x[:, :, before:] for x in (q, k, v)]
    close(fed(cache, *parts, [1, 6, 33 - before], real[:, before:]), truth)


def test_coefficients_that_do_not_suit_the_heads_are_refused_and_nothing_is_taken_in():
    cache = PDECache(pdes.Diffusion(torch.full((8, 1, 1), 0.1)))
    for tokens in (9, 1):
        one = torch.randn(1, 1, tokens, 4)
        with pytest.raises(ValueError, match="does not suit 1 heads"):
            cache.attend(one, one, one)
        assert len(cache) == 0
        assert cache._key is None


def test_an_order_that_fails_changes_no_tensor(monkeypatch):
    cache = PDECache("diffusion")
    fed(cache, *qkv(), [40])
    before = state(cache)[1]
    monkeypatch.setattr(cache, "_stepped", torch.zeros(1))  # whose texts cannot be chosen
    with pytest.raises(IndexError):
        cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(cache._key[:, :, :40], before["_key"])
    assert torch.equal(cache._value[:, :, :40], before["_value"])


def test_coefficients_of_texts_are_reordered_with_them():
    q, k, v = qkv()
    alpha = torch.tensor([0.05, 0.4], dtype=torch.float64).view(2, 1, 1, 1)
    cache = PDECache(pdes.Diffusion(alpha))
    fed(cache, *(x[:, :, :20] for x in (q, k, v)), [20])
    order = torch.tensor([1, 0, 1])
    cache.reorder(order)
    truth = pde_attention(
        q[order], k[order], v[order], is_causal=True, enable_gqa=True, pde=pdes.Diffusion(alpha[order])
    )
    close(fed(cache, *(x[order, :, 20:] for x in (q, k, v)), [1] * 20), truth[:, :, 20:])


def test_coefficients_are_those_of_the_start():
    q, k, v = qkv()
    alpha = torch.full((4, 1, 1), 0.3, dtype=torch.float64, requires_grad=True)
    truth = fed(PDECache(pdes.Diffusion(0.3)), q, k, v, [40])
    cache = PDECache(pdes.Diffusion(alpha))
    first = cache.attend(*(x[:, :, :20] for x in (q, k, v)))
    with torch.no_grad():
        alpha.fill_(0.01)
    close(torch.cat((first, fed(cache, *(x[:, :, 20:] for x in (q, k, v)), [1] * 20)), 2), truth)


def test_a_pde_without_reach_takes_whole_rows():
    class Own:
        linear = True

        def check(self, dt, axis="key"):
            pass

        def step(self, u, velocity, line, dt):
            return u + 0.1 * dt * line.laplacian(u), velocity

    q, k, v = qkv()
    truth = fed(PDECache(pdes.Diffusion(0.1)), q, k, v, [40])
    close(fed(PDECache(Own()), q, k, v, [11, 1, 28]), truth)


def test_errors_teach():
    q, k, v = qkv()
    for wrong, message in {
        "query": "a cache does not have the rows of later tokens; use axis='key'",
        "both": "use axis='key'",
    }.items():
        with pytest.raises(ValueError, match=message):
            PDECache("diffusion", axis=wrong)
    for wrong in ("sequence", "periodic"):
        with pytest.raises(ValueError, match="a cache does not have these keys yet; use walls='mask'"):
            PDECache("diffusion", walls=wrong)
    with pytest.raises(ValueError, match="dt = 9 is unstable"):
        PDECache("diffusion", dt=9.0)
    with pytest.raises(ValueError, match="steps = -1 must be"):
        PDECache("diffusion", -1)
    cache = PDECache("diffusion")
    cache.attend(q, k, v)
    with pytest.raises(ValueError, match=r"does not match the cache's \[2, 2, 40, 4\]"):
        cache.attend(q[:1], k[:1], v[:1])
    with pytest.raises(ValueError, match="every new token needs a query, a key and a value"):
        cache.attend(q[:, :, :1], k, v)
    with pytest.raises(ValueError, match="must be \\[2, 40\\]"):
        cache.attend(q, k, v, torch.ones(2, 3).bool())
    with pytest.raises(ValueError, match="must divide query's"):
        cache.attend(q[:, :3], k, v)
    with pytest.raises(ValueError, match=r"must be \[batch, heads, new tokens, dim\]"):
        cache.attend(q[0], k[0], v[0])
