"""Hugging Face models with PDE attention: the same as a dense map by hand, with every mask and cache."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from attractor.attention import (
    CausalityError,
    assert_causal,
    coefficients,
    masks,
    pde_attention,
    pdes,
)

transformers = pytest.importorskip("transformers")
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402

from attractor.integrations import transformers as pde  # noqa: E402
from attractor.integrations.transformers_check import record_calls  # noqa: E402
from attractor.integrations.transformers_masks import Mask  # noqa: E402
from attractor.integrations.transformers_modules import UNSUPPORTED, attention_modules  # noqa: E402
from attractor.integrations.transformers_refinement import SETTING  # noqa: E402

FOUR = list(pde.NAMES)
IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32], [31, 41, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]])
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 50,
         "max_position_embeddings": 64, "initializer_range": 0.4}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def gpt2(**more):
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        n_positions=64,
        vocab_size=50,
        initializer_range=0.4,
        **TOKENS,
        **more,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**more):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TOKENS, **heads, **more))


def mistral(**more):  # a causal sliding window
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5, **more}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **TOKENS, **more))


def bert(**more):
    config = transformers.BertConfig(**SIZES, **TOKENS, num_attention_heads=2, **more)
    return transformers.BertForMaskedLM(config)


def modernbert(**more):  # one full layer, one with a window to both sides
    config = transformers.ModernBertConfig(
        **SIZES, **TOKENS, num_attention_heads=2, local_attention=6, global_attn_every_n_layers=2,
        cls_token_id=1, sep_token_id=2, **more,
    )  # fmt: skip
    return transformers.ModernBertForMaskedLM(config)


DECODERS = {"gpt2": gpt2, "llama": llama, "mistral": mistral}
ENCODERS = {"bert": bert, "modernbert": modernbert}
every_pde = pytest.mark.parametrize("name", FOUR)
every_model = pytest.mark.parametrize("make", [*DECODERS.values(), *ENCODERS.values()])
every_decoder = pytest.mark.parametrize("make", DECODERS.values())


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors here are too small for more
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _registered():
    pde.register()


def build(make, name, **more):
    torch.manual_seed(1)
    return make(attn_implementation=name, **more).double().eval()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def logits(model, ids=IDS, **more):
    return model(ids, **more).logits


@every_pde
@every_model
def test_models_run_unchanged_otherwise(make, name):
    found = logits(build(make, name))
    plain = logits(build(make, "sdpa"))
    assert found.shape == plain.shape
    assert found.isfinite().all()
    assert (found - plain).abs().max() > 1e-4


@every_model
def test_no_steps_and_no_flow_are_sdpa(make):
    plain = logits(build(make, "sdpa"))
    pde.register(steps=0, names={"pde_resting": "wave"})
    close(logits(build(make, "pde_resting")), plain)
    pde.register(names={"pde_still": pdes.Diffusion(0.0)})
    close(logits(build(make, "pde_still")), plain)


def by_hand(q, k, v, allowed, alpha, steps, bend=lambda scores: scores):
    """Diffusion as a matrix for every row: the path of its allowed keys."""
    scores = bend(q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
    A = scores.softmax(-1).nan_to_num(0.0)
    allowed = allowed.expand(A.shape)
    out = torch.zeros_like(A)
    for b, h, i in torch.cartesian_prod(*(torch.arange(s) for s in A.shape[:3])).tolist():
        ok = allowed[b, h, i].double()
        edges = torch.diag(ok[1:] * ok[:-1], 1)
        edges = edges + edges.T
        step = torch.eye(len(ok)).double() + alpha * (edges - torch.diag(edges.sum(0)))
        out[b, h, i] = A[b, h, i] @ torch.linalg.matrix_power(step, steps)
    return out @ v


@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_of_gpt2_by_hand(padded):
    model = build(gpt2, "pde_diffusion").transformer
    real = torch.ones(2, 12).bool()
    if padded:
        real[1, :4] = False
    seen = []
    model.h[0].attn.register_forward_hook(lambda module, args, output: seen.append((args, output[0])))
    with torch.no_grad():
        model(IDS, attention_mask=real.long())
        ((hidden, *_), found), = seen  # fmt: skip
        q, k, v = (
            x.unflatten(-1, (2, 8)).transpose(1, 2) for x in model.h[0].attn.c_attn(hidden).split(16, -1)
        )
        allowed = torch.ones(12, 12).bool().tril() & real[:, None, None]
        want = model.h[0].attn.c_proj(by_hand(q, k, v, allowed, 0.1, 4).transpose(1, 2).flatten(2))
    close(found, want)


def test_grouped_heads_and_windows_by_hand():
    """Mistral's own attention function, called as its module does."""
    model = build(mistral, "pde_diffusion").model
    seen = []
    function = AttentionInterface()["pde_diffusion"]

    def listen(module, query, key, value, mask, **options):
        output = function(module, query, key, value, mask, **options)
        seen.append((query, key, value, output[0]))
        return output

    AttentionInterface.register("pde_diffusion", listen)
    model(IDS)
    AttentionInterface.register("pde_diffusion", function)
    assert len(seen) == 2
    gap = torch.arange(12)[:, None] - torch.arange(12)
    for q, k, v, found in seen:
        assert k.shape[1] == 2
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        close(found, by_hand(q, k, v, (gap >= 0) & (gap < 5), 0.1, 4).transpose(1, 2))
        assert found.is_contiguous()


# Masks


def padded(side, pads=4):
    """IDS with padding around the second text, and what models want to know about it."""
    ids = torch.zeros(2, 12 + pads, dtype=torch.long)
    real = torch.zeros(2, 12 + pads, dtype=torch.long)
    first = [0, pads] if side == "left" else [0, 0]
    for b, (start, n) in enumerate(zip(first, (12 + pads, 12))):
        text = IDS[b].repeat(2)[:n]
        ids[b, start : start + n] = text
        real[b, start : start + n] = 1
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": real, "position_ids": positions}


@pytest.mark.parametrize("side", ["left", "right"])
@every_model
def test_padding_changes_nothing(make, side):
    model = build(make, "pde_advection_diffusion")
    given = padded(side)
    with torch.no_grad():
        found = model(**given).logits
    for b in range(2):
        real = given["attention_mask"][b].bool()
        close(found[b][real], logits(model, given["input_ids"][b : b + 1, real])[0])


@every_decoder
def test_packed_texts_do_not_see_each_other(make):
    model = build(make, "pde_wave")
    packed, positions = IDS.flatten()[None, :20], torch.cat((torch.arange(12), torch.arange(8)))[None]
    found = logits(model, packed, position_ids=positions, use_cache=False)
    close(found[:, :12], logits(model, packed[:, :12]))
    close(found[:, 12:], logits(model, packed[:, 12:]))


def config(model, **more):
    model.config._attn_implementation = "pde_diffusion"
    return {
        "config": model.config,
        "inputs_embeds": torch.empty(2, 12, 16),
        "attention_mask": None,
        **more,
    }


REAL = padded("left", 0)["attention_mask"].index_fill(1, torch.tensor([0, 1]), 0)
REQUESTS = {
    "causal": (masking_utils.create_causal_mask, {}),
    "padded": (masking_utils.create_causal_mask, {"attention_mask": REAL}),
    "packed": (masking_utils.create_causal_mask, {"position_ids": torch.arange(12).repeat(2, 1) % 5}),
    "window": (masking_utils.create_sliding_window_causal_mask, {}),
    "padded window": (masking_utils.create_sliding_window_causal_mask, {"attention_mask": REAL}),
    "packed window": (masking_utils.create_sliding_window_causal_mask,
                      {"position_ids": torch.arange(12).repeat(2, 1) % 7}),
    "full": (masking_utils.create_bidirectional_mask, {}),
    "padded full": (masking_utils.create_bidirectional_mask, {"attention_mask": REAL}),
    "full window": (masking_utils.create_bidirectional_sliding_window_mask, {}),
    "padded full window": (masking_utils.create_bidirectional_sliding_window_mask, {"attention_mask": REAL}),
}  # fmt: skip


@pytest.mark.parametrize("kind", REQUESTS)
def test_masks_in_words_are_those_of_transformers(kind):
    create, given = REQUESTS[kind]
    request = config(mistral(), **given)
    if "full" not in kind:
        request["past_key_values"] = None
    found = create(**request)
    assert isinstance(found, Mask)
    request["config"]._attn_implementation = "eager"
    bias = create(**request)
    want = torch.ones(2, 1, 12, 12).bool() if bias is None else (bias == 0).expand(2, 1, 12, 12)
    allowed = masks.allowed(12, found.keys, torch.device("cpu"), **found.arguments())
    got = want.new_ones(2, 1, 12, 12) if allowed is None else allowed.expand(2, 1, 12, 12)
    assert torch.equal(got, want)


def test_windows_wider_than_the_text_are_none():
    request = config(mistral(sliding_window=12), past_key_values=None)
    assert masking_utils.create_sliding_window_causal_mask(**request).window is None
    request["config"].sliding_window = 11
    assert masking_utils.create_sliding_window_causal_mask(**request).window == (10, -1)


def test_other_masks_are_tensors():
    request = config(mistral(), past_key_values=None)
    own = masking_utils.create_causal_mask(**request, and_mask_function=lambda b, h, q, k: k != 3)
    assert own.shape == (2, 1, 12, 12)
    assert not own[..., 3].any()
    assert torch.equal(own[0, 0, :, 4:], torch.ones(12, 12).tril().bool()[:, 4:])
    request["config"].attention_chunk_size = 4
    chunks = masking_utils.create_chunked_causal_mask(**request)
    assert torch.equal(chunks[0, 0], torch.block_diag(*[torch.ones(4, 4).tril()] * 3).bool())
    four = torch.ones(2, 1, 12, 12).bool()
    assert masking_utils.create_causal_mask(**request | {"attention_mask": four}) is four


@every_model
def test_a_mask_of_ones_own(make):
    model = build(make, "pde_diffusion")
    below = torch.ones(2, 1, 12, 12).bool().tril()
    if make in DECODERS.values():
        for mask in (below, torch.zeros(2, 1, 12, 12).double().masked_fill(~below, -torch.inf)):
            window = {"sliding_window": None} if make is mistral else {}
            close(logits(build(make, "pde_diffusion", **window), attention_mask=mask),
                  logits(build(make, "pde_diffusion", **window)))  # fmt: skip
    elif make is bert:
        close(logits(model, attention_mask=torch.ones(2, 1, 12, 12).bool()), logits(model))


# Caches


CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "in chunks": {"prefill_chunk_size": 5},
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("side", [None, "left"])
@every_decoder
def test_cached_generation_equals_uncached(make, side, cache):
    model = build(make, "pde_reaction_diffusion" if make is gpt2 else "pde_diffusion")
    given = padded("left") if side else {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    given.pop("position_ids", None)
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    cached = model.generate(**given, **options, **CACHES[cache])
    uncached = model.generate(**given, **options, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(uncached.logits))  # in float32


@every_pde
@every_decoder
def test_several_queries_against_a_cache(make, name):
    model = build(make, name)
    given = padded("left")
    with torch.no_grad():
        whole = model(**given, use_cache=False).logits
        first = {**{n: x[:, :7] for n, x in given.items()}, "use_cache": True}
        past = model(**first).past_key_values
        rest = {n: x[:, 7:] for n, x in given.items()} | {"attention_mask": given["attention_mask"]}
        later = model(**rest, past_key_values=past).logits
    close(later, whole[:, 7:])


# Causality


@pytest.mark.sampled(3)
@every_pde
@every_decoder
def test_decoders_are_causal(make, name):
    assert_causal(build(make, name), IDS)
    assert_causal(pde.add_pde(make(), pde.NAMES[name]), IDS)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_leaks_are_caught(make):
    pde.register(walls="sequence", names={"pde_leaking": "diffusion"})
    model = build(make, "pde_leaking")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CausalityError, match="sees its future"):
            assert_causal(model, IDS)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_forgotten_mask_is_caught(make):
    def naive(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **more):
        output = pde_attention(
            query, key, value, attention_mask, scale=scaling, enable_gqa=True, pde="diffusion"
        )
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("forgetful", naive)
    with pytest.raises(CausalityError, match="sees its future"):
        assert_causal(build(make, "forgetful"), IDS)
    # ours asks the module, and refuses to guess
    AttentionInterface.register("forgetful", AttentionInterface()["pde_diffusion"])
    model = build(make, "forgetful")
    assert_causal(model, IDS)
    past = model(IDS[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="7 queries, 12 keys and no mask"):
        model(IDS[:, 5:], past_key_values=past)


# Maps


@every_pde
@every_model
def test_maps(make, name):
    model = build(make, name)
    with torch.no_grad():
        told = model(IDS, output_attentions=True)
    close(told.logits, logits(model))
    assert len(told.attentions) == 2
    for A in told.attentions:
        assert A.shape == (2, A.shape[1], 12, 12)
        assert A.dtype == torch.float64
        if make in DECODERS.values():
            assert torch.equal(A, A.tril())
        if name != "pde_reaction_diffusion":
            close(A.sum(-1), torch.ones(A.shape[:-1]).double())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_maps_while_generating(cache):
    model = build(llama, "pde_diffusion")
    made = model.generate(
        IDS,
        max_new_tokens=3,
        do_sample=False,
        output_attentions=True,
        return_dict_in_generate=True,
        **CACHES[cache],
    )
    shapes = [tuple(step[0].shape) for step in made.attentions]
    keys = [12, 13, 14] if cache == "dynamic" else [14] * 3
    assert shapes == [(2, 4, 12 if i == 0 else 1, n) for i, n in enumerate(keys)]
    for step in made.attentions:
        close(step[0].sum(-1), torch.ones(step[0].shape[:-1]).double())


# Learned coefficients


@pytest.mark.sampled(10)
@every_pde
@every_model
def test_coefficients_start_at_the_papers_and_learn(make, name):
    plain = build(make, name)
    model = pde.add_pde(build(make, "sdpa"), pde.NAMES[name], start="paper")
    # float32 parameters of the coefficients, so not to the last bit
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    learned = {n: p for n, p in model.named_parameters() if ".pde." in n}
    names = [n for n in ("alpha", "beta", "c") if hasattr(pdes.get_pde(pde.NAMES[name])(), n)]
    assert len(learned) == 2 * len(names)
    model(IDS).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learned.values())
    with torch.no_grad():
        for p in learned.values():
            p += 1e3
    assert logits(model).isfinite().all()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("per_head", [False, True])
@every_pde
@every_model
def test_a_model_starts_as_it_is_and_has_gradients(make, name, per_head):
    plain = build(make, "sdpa")
    before = logits(plain)
    model = pde.add_pde(plain, pde.NAMES[name], per_head=per_head)
    assert model.config._attn_implementation == name
    span = before.max() - before.min()
    assert (logits(model) - before).abs().max() < 1e-7 * span  # a wave's c is not quite 0
    learned = {n: p for n, p in model.named_parameters() if ".pde." in n}
    model(IDS, labels=IDS).loss.backward()
    assert learned
    assert all((p.grad.abs() > 1e-6).all() for p in learned.values())


def test_a_start_that_does_not_exist():
    with pytest.raises(ValueError, match="start 'identiti' is not one of identity, paper; did you mean"):
        pde.add_pde(gpt2(), "wave", start="identiti")
    told = pde.add_pde(gpt2(), pdes.Wave(0.3))
    assert told.transformer.h[0].attn.pde().c.item() == pytest.approx(0.3)
    assert pde.add_pde(gpt2(), "wave", learn=False).transformer.h[0].attn.pde() == pdes.Wave()


def test_a_set_for_every_head():
    for make, heads in ((gpt2, 2), (llama, 4), (bert, 2), (modernbert, 2)):
        model = pde.add_pde(build(make, "sdpa"), "diffusion", per_head=True)
        learned = [p for n, p in model.named_parameters() if ".pde." in n]
        assert [p.shape for p in learned] == [(heads,)] * 2
        with torch.no_grad():
            learned[0][0] += 1
        model(IDS).logits.sum().backward()
        assert all((p.grad != 0).all() for p in learned)


def test_own_settings_of_a_model():
    strong = pdes.Diffusion(0.3)
    model = pde.add_pde(build(gpt2, "sdpa"), strong, steps=2, dt=1.5, learn=False)
    assert not [n for n, _ in model.named_parameters() if ".pde." in n]
    pde.register(steps=2, dt=1.5, names={"pde_strong": strong})
    assert torch.equal(logits(model), logits(build(gpt2, "pde_strong")))
    pde.register(steps=1)  # for others
    assert torch.equal(logits(model), logits(build(gpt2, "pde_strong")))
    pde.add_pde(model, "diffusion", steps=1, learn=False)
    assert torch.equal(logits(model), logits(build(gpt2, "pde_diffusion")))
    model.set_attn_implementation("pde_wave")
    with pytest.raises(
        ValueError, match="gave this model Diffusion, but its attn_implementation is 'pde_wave'"
    ):
        logits(model)
    model.set_attn_implementation("sdpa")
    close(logits(model), logits(build(gpt2, "sdpa")))


@pytest.mark.sampled(4)
@every_pde
@pytest.mark.parametrize("make", [gpt2, llama, bert, modernbert])
def test_saved_and_loaded(make, name, tmp_path):
    model = pde.add_pde(build(make, "sdpa"), pde.NAMES[name], steps=3, dt=0.5, per_head=True)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if ".pde." in n:
                p += torch.randn_like(p)
    model.save_pretrained(tmp_path)
    again = pde.load(type(model), tmp_path)
    assert type(again) is type(model)
    assert again.config._attn_implementation == name
    assert not again.training
    assert torch.equal(logits(again), logits(model))
    again = type(model).from_pretrained(tmp_path, attn_implementation=name)
    assert torch.equal(logits(again), logits(model))
    fresh = pde.add_pde(build(make, "sdpa"), pde.NAMES[name], steps=3, dt=0.5, per_head=True)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), logits(model))


def test_loaded_by_auto_classes_and_in_half_precision(tmp_path):
    model = pde.add_pde(
        build(gpt2, "sdpa"), pdes.Diffusion(torch.tensor([0.05, 0.4])[:, None, None]), per_head=True
    )
    model.save_pretrained(tmp_path)
    again = pde.load(transformers.AutoModelForCausalLM, tmp_path)
    assert type(again) is transformers.GPT2LMHeadModel
    assert torch.equal(logits(again), logits(model))
    base, info = pde.load(transformers.AutoModel, tmp_path, output_loading_info=True)
    assert type(base) is transformers.GPT2Model
    assert not info["missing_keys"]
    torch.testing.assert_close(base.h[0].attn.pde().alpha.flatten().float(), torch.tensor([0.05, 0.4]))
    half = pde.load(transformers.AutoModelForCausalLM, tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(logits(half).double(), logits(model), rtol=0.1, atol=0.5)
    assert half.transformer.h[1].attn.pde.learned.alpha_raw.dtype == torch.float32


def test_constants_are_loaded_too(tmp_path):
    model = pde.add_pde(
        build(bert, "sdpa"), pdes.ReactionDiffusion(0.2, 0.3, split=True), 3, 0.5, learn=False
    )
    model.save_pretrained(tmp_path)
    again = pde.load(transformers.AutoModelForMaskedLM, tmp_path)
    assert again.bert.encoder.layer[0].attention.self.pde() == pdes.ReactionDiffusion(
        0.2, 0.3, split=True
    )
    assert torch.equal(logits(again), logits(model))


def test_folders_without_coefficients(tmp_path):
    build(gpt2, "sdpa").save_pretrained(tmp_path / "plain")
    with pytest.raises(
        ValueError, match=r"was saved without a PDE: use GPT2LMHeadModel\.from_pretrained, then"
    ):
        pde.load(transformers.GPT2LMHeadModel, tmp_path / "plain")
    model = pde.add_pde(build(gpt2, "sdpa"))
    model.save_pretrained(
        tmp_path / "part", state_dict={n: p for n, p in model.state_dict().items() if ".pde." not in n}
    )
    with pytest.raises(ValueError, match="has no numbers for"):
        pde.load(transformers.GPT2LMHeadModel, tmp_path / "part")


def test_options_of_from_pretrained_mean_what_they_mean_there(tmp_path):
    model = pde.add_pde(build(gpt2, "sdpa"), "wave", steps=2)
    with torch.no_grad():
        model.transformer.h[1].attn.pde.learned.c_raw.fill_(0.0)
    model.save_pretrained(tmp_path)
    for kind in (
        transformers.GPT2ForSequenceClassification,
        transformers.AutoModelForSequenceClassification,
    ):
        given = {"num_labels": 3, "use_cache": False, "attn_pdrop": 0.25, "dtype": torch.float32}
        again = pde.load(kind, tmp_path, **given)
        plain = kind.from_pretrained(tmp_path, **given)
        assert type(again) is type(plain) is transformers.GPT2ForSequenceClassification
        assert again.config.to_dict() == plain.config.to_dict()
        assert again.score.weight.shape == (3, 16)
        assert again.transformer.h[0].attn.attn_dropout.p == 0.25
        assert again.dtype == torch.float32
        found, want = (m.transformer.h[1].attn.pde().c for m in (again, model))
        assert torch.equal(found, want.float())
    placed = pde.load(transformers.GPT2LMHeadModel, tmp_path, device_map="cpu", dtype="auto")
    assert torch.equal(logits(placed), logits(model))
    more = {**model.config.pde_attention, "steps": 7}
    stepped = pde.load(transformers.GPT2LMHeadModel, tmp_path, pde_attention=more)
    assert stepped.transformer.h[0].attn.pde.setting.steps == 7


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "AutoModelForCausalLM"])
def test_a_config_of_ones_own(kind, tmp_path):
    """An object or a folder; one that says nothing of a PDE leaves the saved one as it is."""
    model = pde.add_pde(build(gpt2, "sdpa"), "wave", steps=2)
    model.save_pretrained(tmp_path / "model")
    told = transformers.AutoConfig.from_pretrained(tmp_path / "model", use_cache=False)
    plain = gpt2(use_cache=False).config
    for name, config in {"told": told, "plain": plain}.items():
        config.save_pretrained(tmp_path / name)
        for given in (config, tmp_path / name, str(tmp_path / name)):
            again = pde.load(getattr(transformers, kind), tmp_path / "model", config=given)
            assert again.config.use_cache is False
            assert torch.equal(logits(again), logits(model))
    assert not hasattr(plain, SETTING)  # it is the caller's


def test_options_and_classes_that_do_not_exist(tmp_path):
    pde.add_pde(build(gpt2, "sdpa")).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_lables'"):
        pde.load(transformers.GPT2LMHeadModel, tmp_path, num_lables=3)
    with pytest.raises(
        TypeError, match=r"is 'LlamaModel'; give a class .* transformers\.LlamaModel, and"
    ):
        pde.load("LlamaModel", tmp_path)
    no_models = ("text-classification", tmp_path, transformers.GPT2Config, transformers.PreTrainedModel,
                 nn.Linear, gpt2(), None)  # fmt: skip
    for given in no_models:
        with pytest.raises(
            TypeError, match=r"model_class is .*; give a class .* AutoModelForCausalLM, and"
        ):
            pde.load(given, tmp_path)
    with pytest.raises(ValueError, match="Model type should be one of"):
        pde.load(transformers.AutoModelForImageClassification, tmp_path)


# Models made from parts


def two_berts():
    torch.manual_seed(1)
    sizes = {**SIZES, **TOKENS, "num_attention_heads": 2}
    decoder = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    return transformers.EncoderDecoderModel(
        encoder=transformers.BertModel(transformers.BertConfig(**sizes)),
        decoder=transformers.BertLMHeadModel(decoder),
    ), {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}


def vit_and_gpt2():
    torch.manual_seed(1)
    sizes = {n: SIZES[n] for n in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    config = transformers.ViTConfig(
        **sizes, num_attention_heads=2, image_size=16, patch_size=4, initializer_range=0.4
    )
    return transformers.VisionEncoderDecoderModel(
        encoder=transformers.ViTModel(config), decoder=gpt2(add_cross_attention=True)
    ), {"pixel_values": torch.randn(2, 3, 16, 16).double(), "decoder_input_ids": IDS}


from_parts = pytest.mark.parametrize("make", [two_berts, vit_and_gpt2])


@from_parts
def test_every_part_is_reached(make):
    model, given = make()
    model.double().eval()
    with torch.no_grad():
        plain = model(**given).logits
        pde.add_pde(model, "diffusion", learn=False)
        modules = attention_modules(model)
        assert {name.split(".")[0] for name in modules} == {"encoder", "decoder"}
        assert {m.config._attn_implementation for m in modules.values()} == {"pde_diffusion"}
        with record_calls("pde_diffusion") as (callers, _):
            found = model(**given).logits
        assert callers == {*modules.values()}
        assert (found - plain).abs().max() > 1e-4
        assert pde.check(model, **given) == []
        # of one part alone, which is another model
        model.encoder.set_attn_implementation("sdpa")
        assert (model(**given).logits - found).abs().max() > 1e-6
        model.set_attn_implementation("sdpa")
        close(model(**given).logits, plain)


@from_parts
def test_a_name_arrives_in_every_part(make):
    """transformers alone sets a part's config, while its modules keep the one they were made with."""
    model, given = make()
    model.double().set_attn_implementation("pde_diffusion")
    assert {m.config._attn_implementation for m in attention_modules(model).values()} == {
        "pde_diffusion"
    }
    assert pde.check(model, **given) == []


@from_parts
def test_a_part_with_another_attention_is_told(make):
    model, given = make()
    model.double().set_attn_implementation("pde_diffusion")
    missed = [name for name in attention_modules(model) if name.startswith("encoder.")]
    other = copy.deepcopy(attention_modules(model)[missed[0]].config)
    other._attn_implementation = "sdpa"
    for name in missed:
        model.get_submodule(name).config = other
    with pytest.warns(
        UserWarning, match=rf"is not 'pde_diffusion' \({missed[0]} and 1 more\).* add_pde"
    ):
        assert pde.check(model, **given) == missed
    if make is two_berts:  # the other has no mask that could be read
        of = r"^(?!this model)\w+ computes .*did not get its attn_implementation.*check\(model\)"
        with pytest.raises(pde.BypassError, match=of):
            model(**given)


def test_a_model_made_from_parts_is_saved_and_loaded(tmp_path):
    model, given = two_berts()
    model.eval()
    pde.add_pde(model, "wave", steps=2)
    with torch.no_grad():
        model.encoder.encoder.layer[1].attention.self.pde.learned.c_raw += 1
    model.save_pretrained(tmp_path)
    again = pde.load(transformers.EncoderDecoderModel, tmp_path)
    assert torch.equal(again(**given).logits, model(**given).logits)
    assert pde.check(again) == []


# Models that are not reached


def test_models_that_are_reached():
    for make in (*DECODERS.values(), *ENCODERS.values()):
        model = build(make, "pde_diffusion").train()
        model.get_input_embeddings().eval()
        modes = [m.training for m in model.modules()]
        assert pde.check(model) == []
        assert [m.training for m in model.modules()] == modes
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa', not one of PDE attention"):
        pde.check(build(gpt2, "sdpa"))


def bloom(**more):
    config = transformers.BloomConfig(
        hidden_size=16, n_layer=1, n_head=2, vocab_size=50, **TOKENS, **more
    )
    return transformers.BloomForCausalLM(config)


def reformer(**more):
    config = transformers.ReformerConfig(
        hidden_size=16, num_attention_heads=2, attention_head_size=8, feed_forward_size=16, vocab_size=50,
        attn_layers=["local"], axial_pos_embds=False, max_position_embeddings=64, is_decoder=True,
        local_attn_chunk_length=4, **more,
    )  # fmt: skip
    return transformers.ReformerModelWithLMHead(config)


def gpt_oss(**more):  # attention sinks
    config = transformers.GptOssConfig(
        **SIZES | {"max_position_embeddings": 131072}, **TOKENS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_local_experts=2, num_experts_per_tok=1, **more,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


def deepseek_v32(**more):  # an indexer that picks keys
    config = transformers.DeepseekV32Config(
        **SIZES, **TOKENS, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=8,
        n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, first_k_dense_replace=2,
        q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
        index_head_dim=8, index_n_heads=2, index_topk=4, **more,
    )  # fmt: skip
    return transformers.DeepseekV32ForCausalLM(config)


def longformer(**more):
    config = transformers.LongformerConfig(
        **SIZES, **TOKENS, num_attention_heads=2, attention_window=4, **more
    )
    return transformers.LongformerForMaskedLM(config)


def gptj(**more):  # looks its attention class up by name
    config = transformers.GPTJConfig(
        n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=50, n_positions=64, **TOKENS, **more
    )
    return transformers.GPTJForCausalLM(config)


def mamba(**more):  # has no attention
    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=50, **TOKENS, **more
    )
    return transformers.MambaForCausalLM(config)


BYPASSING = {
    "BloomForCausalLM": bloom,
    "ReformerModelWithLMHead": reformer,
    "LongformerForMaskedLM": longformer,
    "GPTJForCausalLM": gptj,
    "MambaForCausalLM": mamba,
}


@pytest.mark.parametrize("name", BYPASSING)
def test_models_that_it_cannot_reach_refuse_its_name(name, tmp_path):
    make = BYPASSING[name]
    with pytest.raises(pde.BypassError, match=f"^{name} "):
        build(make, "pde_diffusion")
    model = build(make, "eager")
    with pytest.raises(pde.BypassError, match=f"^{name} "):
        model.set_attn_implementation("pde_diffusion")
    assert model.config._attn_implementation == "eager"
    assert logits(model).isfinite().all()
    model.save_pretrained(tmp_path)
    with pytest.raises(pde.BypassError, match=f"^{name} "):
        type(model).from_pretrained(tmp_path, attn_implementation="pde_diffusion")
    with pytest.raises(ValueError, match="has no attention that PDE attention could reach"):
        pde.add_pde(model)
    assert logits(type(model).from_pretrained(tmp_path)).isfinite().all()


def test_models_that_bypass_it_and_have_its_name_say_so():
    for make in (bloom, reformer):
        model = build(make, "eager")
        model.config._attn_implementation = "pde_diffusion"  # which nothing can see
        with pytest.warns(
            UserWarning, match="'pde_diffusion' does not reach it, it stays ordinary attention"
        ):
            missed = pde.check(model, input_ids=IDS)
        assert len(missed) == 1
        model.config._attn_implementation = "eager"
        with pytest.warns(UserWarning, match="computes attention by itself .* stays ordinary attention"):
            missed = pde.check(model, input_ids=IDS)
        assert missed
        assert all("attention" in name for name in missed)
    with pytest.raises(ValueError, match=r"set_attn_implementation\. If .* did not accept .* add_pde"):
        pde.check(build(gpt2, "eager"))


@pytest.mark.parametrize("make", [gpt_oss, deepseek_v32])
def test_models_that_need_more_refuse_its_name(make):
    with pytest.raises(
        pde.BypassError, match=r"'s attention needs .* \(model\.layers\.0\.self_attn and"
    ):
        make(attn_implementation="pde_wave")


def test_inputs_that_check_makes():
    vit = vit_and_gpt2()[0].encoder
    vit.set_attn_implementation("pde_diffusion")
    assert pde.check(vit) == []
    both, _ = vit_and_gpt2()
    both.set_attn_implementation("pde_diffusion")
    assert pde.check(both) == []
    config = transformers.ASTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    audio = transformers.ASTModel(config)
    audio.set_attn_implementation("pde_diffusion")
    with pytest.raises(
        ValueError, match=r"ASTModel does not run with the inputs .* pass inputs for its"
    ):
        pde.check(audio)
    config = transformers.WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, vocab_size=50,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, **TOKENS | {"eos_token_id": 2},
    )  # fmt: skip
    speech = transformers.WhisperForConditionalGeneration(config)
    speech.set_attn_implementation("pde_diffusion")
    features = torch.zeros(1, 80, 3000)
    assert pde.check(speech, input_features=features, decoder_input_ids=IDS[:1]) == []


def test_load_does_not_take_another_attention(tmp_path):
    model = pde.add_pde(gpt2(), "wave").eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'sdpa', but .* was saved with 'pde_wave'; leave it out"):
        pde.load(transformers.GPT2LMHeadModel, tmp_path, attn_implementation="sdpa")
    for name in ("pde_wave", None):
        again = pde.load(transformers.GPT2LMHeadModel, tmp_path, attn_implementation=name).eval()
        assert torch.equal(logits(again), logits(model))
    again.set_attn_implementation("sdpa")
    assert not torch.equal(logits(again), logits(model))


def named(make, name):
    """A model whose config has a name that it would refuse."""
    model = build(make, "eager")
    model.config._attn_implementation = name
    return model


def test_a_model_that_bypasses_it_cannot_leak():
    """Bloom adds the mask itself, and with None, as sdpa's function makes it, it sees the future."""
    AttentionInterface.register("unheard", AttentionInterface()["pde_diffusion"])
    AttentionMaskInterface.register("unheard", masking_utils.sdpa_mask)
    with pytest.raises(CausalityError):
        assert_causal(named(bloom, "unheard"), IDS)
    with pytest.raises(pde.BypassError, match=r"^BloomAttention computes its attention itself"):
        logits(named(bloom, "pde_diffusion"))


def test_a_model_that_stops_half_way_is_not_called_good():
    model = build(llama, "pde_diffusion")
    read = lambda module, args, given: given["attention_mask"][0]
    model.model.layers[1].register_forward_pre_hook(read, with_kwargs=True)
    with pytest.warns(UserWarning, match=r"\(model\.layers\.1\.self_attn\)"):
        assert pde.check(model) == ["model.layers.1.self_attn"]


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (gpt_oss, r"s_aux \(attention sinks\)"),
        (deepseek_v32, r"indices \(an indexer's choice of keys\)"),
    ],
)
def test_attention_that_does_more_is_refused_before_it_runs(make, needs):
    model = make()
    before, parameters = model.config.to_dict(), [n for n, _ in model.named_parameters()]
    name = model.config._attn_implementation
    of = rf"attention needs {needs}, which PDE .* \(model\.layers\.0\.self_attn and 1 more\)"
    with pytest.raises(ValueError, match=rf"{of}: use another attn_implementation for this model"):
        pde.add_pde(model)
    assert model.config.to_dict() == before  # nothing was changed
    assert model.config._attn_implementation == name
    assert [n for n, _ in model.named_parameters()] == parameters
    model.config._attn_implementation = "pde_diffusion"
    with pytest.warns(UserWarning, match=f"{of}: running it raises"):
        missed = pde.check(model, input_ids=IDS)
    assert missed == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_sinks_that_a_module_does_not_have_are_no_need():
    model = gpt_oss()
    for layer in model.model.layers:
        layer.self_attn.sinks = None
    assert pde.check(pde.add_pde(model), input_ids=IDS) == []
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"\(model\.layers\.1\.self_attn\): use another"):
        pde.add_pde(model)


class Both(nn.Module):
    """A model with attention of its own beside a model of transformers."""

    def __init__(self):
        super().__init__()
        self.inner = gpt2()
        self.attention = nn.MultiheadAttention(16, 2)
        self.config = self.inner.config

    def set_attn_implementation(self, name):
        self.inner.set_attn_implementation(name)


def test_a_part_that_is_not_reached():
    with pytest.warns(UserWarning, match=r"Both computes attention by itself \(attention\)"):
        model = pde.add_pde(Both())
    assert len([n for n, _ in model.named_parameters() if ".pde." in n]) == 2


# Arguments


def attend(queries=6, keys=6, mask=None, causal=True, name="pde_diffusion", heads=2, **more):
    module = nn.Module()
    module.is_causal = causal
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 4).double() for h, n in ((heads, queries), (2, keys), (2, keys)))
    return AttentionInterface()[name](module, q, k, v, mask, **more)[0], (q, k, v)


@pytest.mark.parametrize("argument", UNSUPPORTED)
def test_what_it_does_not_know_raises(argument):
    attend(**{argument: None})
    with pytest.raises(ValueError, match=rf"'pde_diffusion' does not know {argument} \(.*\), which"):
        attend(**{argument: 30.0})


def test_packed_lengths_without_positions_raise():
    attend(cu_seq_lens_q=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="give position_ids that start again"):
        attend(cu_seq_lens_q=torch.tensor([0, 3, 6]))


def test_without_a_mask():
    plain = {"pde": "diffusion", "enable_gqa": True}
    for causal in (True, False):
        found, (q, k, v) = attend(causal=causal)
        close(found, pde_attention(q, k, v, is_causal=causal, **plain).transpose(1, 2))
        found, (q, k, v) = attend(causal=causal, sliding_window=3)
        window = (2, 0) if causal else 2
        close(found, pde_attention(q, k, v, window=window, **plain).transpose(1, 2))
        found, (q, k, v) = attend(causal=not causal, is_causal=causal, heads=4)
        close(found, pde_attention(q, k, v, is_causal=causal, **plain).transpose(1, 2))
    found, (q, k, v) = attend(queries=1)
    close(found, pde_attention(q, k, v, **plain).transpose(1, 2))
    found, (q, k, v) = attend(queries=1, sliding_window=3)
    close(found, pde_attention(q, k[:, :, -3:], v[:, :, -3:], **plain).transpose(1, 2))
    found, (q, k, v) = attend(queries=3, causal=False)
    close(found, pde_attention(q, k, v, **plain).transpose(1, 2))
    for shape in ((2, 6), (6, 6)):
        with pytest.raises(ValueError, match=r"it must be \[batch, heads or 1, queries, keys\]"):
            attend(mask=torch.ones(shape).bool())


@pytest.mark.parametrize("wall", [-1e9, -1e4, -2e4, -65504.0, torch.finfo(torch.float32).min / 2])
def test_a_mask_written_with_large_numbers_is_a_wall(wall):
    below = torch.ones(1, 1, 6, 6).bool().tril()
    written = torch.zeros(1, 1, 6, 6).masked_fill(~below, wall)
    bias = torch.randn(1, 2, 6, 6).double()
    for more in ({}, {"position_bias": bias}, {"softcap": 0.7}, {"position_bias": bias, "softcap": 0.7}):
        found, want = (attend(mask=x, causal=False, **more)[0] for x in (written.double(), below))
        close(found, want)
    found = attend(position_bias=bias + written, causal=False)[0]  # as T5 does it
    close(found, attend(position_bias=bias, mask=below, causal=False)[0])


@pytest.mark.parametrize("wall", [-1e9, -1e4, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_with_a_mask_of_ones_own_is_causal(kind, wall):
    pde.register()
    model = build(DECODERS[kind], "pde_diffusion")
    mask = torch.zeros(1, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1) > 0, wall)
    assert_causal(lambda ids: model(ids, attention_mask=mask).logits, IDS[:1])
    close(model(IDS[:1], attention_mask=mask).logits, model(IDS[:1]).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
def test_maps_are_those_of_the_output_under_autocast_too(dtype):
    pde.register()
    model = build(llama, "pde_reaction_diffusion").float()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None), torch.no_grad():
        plain, looked = model(IDS), model(IDS, output_attentions=True)
    assert len(looked.attentions) == 2
    few = 0.1 if dtype else 1e-4
    torch.testing.assert_close(looked.logits, plain.logits, rtol=few, atol=few)


def test_a_refused_name_leaves_nothing_registered():
    before = pdes.Diffusion(0.123)
    pde.register(names={"pde_first": before})
    for names in (
        {"pde_first": "wave", "eager": "wave"},
        {"pde_first": "wave", "pde_b": pdes.Diffusion(9.0)},
    ):
        with pytest.raises(ValueError, match=r"no name for PDE attention|unstable"):
            pde.register(names=names)
        assert AttentionInterface()["pde_first"].setting.equation is before
    assert "pde_b" not in AttentionInterface()


def test_add_pde_that_fails_changes_nothing(monkeypatch):
    model = gpt2().eval()
    truth, names = model(IDS).logits, [n for n, _ in model.named_parameters()]
    heads, counted = pde.number_of_heads, []

    def counting(module):
        counted.append(module)
        return (
            heads(module) if len(counted) < 2 else 3
        )  # coefficients for 2 heads do not suit the second

    monkeypatch.setattr(pde, "number_of_heads", counting)
    with pytest.raises(ValueError, match="has 2 numbers"):
        pde.add_pde(model, pdes.Diffusion(torch.tensor([0.1, 0.2])[:, None, None]), per_head=True)
    assert len(counted) == 2
    assert [n for n, _ in model.named_parameters()] == names
    assert torch.equal(model(IDS).logits, truth)


def test_masks_on_their_way_can_be_copied():
    mask = Mask((2, 1, 4, 4), 4, is_causal=True, key_padding=torch.ones(2, 4).bool())
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.is_causal
        assert torch.equal(other.key_padding, mask.key_padding)


@pytest.mark.parametrize("learn", [True, False])
def test_a_model_with_a_pde_can_be_copied_and_pickled(learn):
    model = pde.add_pde(gpt2().eval(), "wave", per_head=True, learn=learn)
    truth = model(IDS).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(IDS).logits, truth)
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)
    assert torch.equal(averaged(IDS).logits, truth)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_a_cache_of_a_generation_can_be_copied(kind):
    """transformers' own caches hold keys and values as they are; decoding goes on from a copy."""
    pde.register()
    model = build(DECODERS[kind], "pde_wave")
    whole = model(IDS).logits
    start = model(IDS[:, :8], use_cache=True).past_key_values
    other = copy.deepcopy(start)
    model(IDS.flip(1)[:, 8:], past_key_values=other)
    close(model(IDS[:, 8:], past_key_values=start).logits, whole[:, 8:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = pde.add_pde(gpt2(), "diffusion").train()
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        torch.manual_seed(0)
        model(IDS, labels=IDS).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_parameter_groups_keep_coefficients_from_decay():
    model = pde.add_pde(gpt2(), pdes.Diffusion(0.1), per_head=True)
    groups = pde.parameter_groups(model, 1e-2, weight_decay=0.5, coefficient_lr=0.1)
    assert [g["lr"] for g in groups] == [1e-2, 1e-2, 0.1]
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0, 0.0]
    assert {*groups[2]["params"]} == {p for n, p in model.named_parameters() if ".pde." in n}
    assert sum(len(g["params"]) for g in groups) == len([*model.parameters()])
    optimiser = torch.optim.AdamW(groups)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(100):
        optimiser.step()
    for row in coefficients(model):
        assert (row["min"], row["max"]) == (pytest.approx(0.1, abs=1e-7), pytest.approx(0.1, abs=1e-7))
    assert pde.parameter_groups(model, 1e-2)[2]["lr"] == 1e-2
    assert len(pde.parameter_groups(gpt2(), 1e-2)) == 2  # nothing learnt


def test_a_bias_of_positions():
    bias = torch.randn(1, 2, 6, 6).double()
    below = torch.ones(1, 1, 6, 6).bool().tril()
    lowest = torch.zeros(1, 1, 6, 6).double().masked_fill(~below, torch.finfo(torch.float64).min)
    found, (q, k, v) = attend(position_bias=bias)
    want = pde_attention(q, k, v, bias.masked_fill(~below, -torch.inf), pde="diffusion").transpose(1, 2)
    close(found, want)
    for mask in (below, lowest):
        close(attend(position_bias=bias, mask=mask, causal=False)[0], want)


def test_capped_scores_by_hand():
    bend = lambda scores: 0.7 * torch.tanh(scores / 0.7)
    below = torch.ones(1, 1, 6, 6).bool().tril()
    lowest = torch.zeros(1, 1, 6, 6).double().masked_fill(~below, torch.finfo(torch.float64).min)
    for heads in (2, 4):
        found, (q, k, v) = attend(softcap=0.7, heads=heads)
        k, v = (x.repeat_interleave(heads // 2, 1) for x in (k, v))
        want = by_hand(q, k, v, below, 0.1, 4, bend).transpose(1, 2)
        close(found, want)
        assert (found - attend(heads=heads)[0]).abs().max() > 1e-2
        for mask in (below, lowest):
            close(attend(softcap=0.7, heads=heads, mask=mask, causal=False)[0], want)
    close(attend(softcap=1e9)[0], attend()[0])


def gemma2(**more):  # capped scores, one layer with a window
    config = transformers.Gemma2Config(
        **SIZES, **TOKENS, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=5,
        query_pre_attn_scalar=8, **{"attn_logit_softcapping": 0.5, **more},
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def test_gemma_2_and_its_capped_scores():
    pde.register(names={"pde_still": pdes.Diffusion(0.0)})
    eager = logits(build(gemma2, "eager"))
    # whose softmax is in float32
    torch.testing.assert_close(logits(build(gemma2, "pde_still")), eager, rtol=1e-4, atol=1e-5)
    assert (logits(build(gemma2, "pde_still", attn_logit_softcapping=None)) - eager).abs().max() > 1e-2
    model = pde.add_pde(build(gemma2, "eager"))
    assert pde.check(model) == []
    assert_causal(model, IDS)
    given = padded("left")
    with torch.no_grad():
        found = model(**given).logits
    for b in range(2):
        real = given["attention_mask"][b].bool()
        close(found[b][real], logits(model, given["input_ids"][b : b + 1, real])[0])
    options = {"max_new_tokens": 6, "do_sample": False}
    cached = model.generate(IDS, **options)
    assert torch.equal(cached, model.generate(IDS, **options, use_cache=False))
    model(IDS).logits.square().sum().backward()
    attention = model.model.layers[0].self_attn
    assert all(p.grad.abs().max() > 0 for p in (attention.q_proj.weight, *attention.pde.parameters()))


def test_dropout_and_scaling_are_passed_on():
    found, (q, k, v) = attend(scaling=0.3)
    close(found, pde_attention(q, k, v, is_causal=True, scale=0.3, pde="diffusion").transpose(1, 2))
    assert attend(dropout=1.0)[0].abs().max() == 0


# Registration


def test_registering_again_changes_the_setting():
    model = build(gpt2, "pde_diffusion")
    before = logits(model)
    assert pde.register() == FOUR
    assert torch.equal(logits(model), before)
    pde.register(steps=8)
    assert not torch.equal(logits(model), before)
    pde.register()
    assert torch.equal(logits(model), before)
    assert all(AttentionMaskInterface()[name] is pde.make_mask for name in FOUR)


@pytest.mark.parametrize(
    ("message", "options"),
    {
        "dt = 7 is unstable": {"dt": 7.0},
        "steps = -1 must be": {"steps": -1},
        "walls 'none' is not one of": {"walls": "none"},
        "method 'magic' is not one of": {"method": "magic"},
        "no PDE is called 'heat'": {"names": {"pde_heat": "heat"}},
        "'my_sdpa' is no name for PDE attention: transformers gives 'sdpa' a meaning": {"names": {"my_sdpa": "wave"}},
        "'a/b' is no name": {"names": {"a/b": "wave"}},
        "'eager' is no name for PDE attention: it is taken": {"names": {"eager": "wave"}},
        "'paged' is no name": {"names": {"paged": "wave"}},
    }.items(),
)  # fmt: skip
def test_errors_teach(message, options):
    AttentionInterface.register("paged", print)
    with pytest.raises(ValueError, match=message):
        pde.register(**options)
    del AttentionInterface._global_mapping["paged"]


def test_adding_what_cannot_be_added():
    with pytest.raises(ValueError, match="unstable"):
        pde.add_pde(gpt2(), pdes.Diffusion(0.9))
    with pytest.raises(ValueError, match="Own is not one of diffusion"):
        pde.add_pde(gpt2(), Own())


class Own(pdes.Diffusion):
    """A PDE of one's own."""


def test_an_equation_of_ones_own():
    pde.register(names={"pde_own": Own(0.2)})
    pde.register(names={"pde_same": pdes.Diffusion(0.2)})
    assert torch.equal(logits(build(llama, "pde_own")), logits(build(llama, "pde_same")))


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="Dynamo of torch 2.11 stumbles over transformers' lazy imports"
)
@pytest.mark.parametrize("make", [llama, pytest.param(bert, marks=pytest.mark.slow)])
def test_models_can_be_compiled_whole(make):
    model = pde.add_pde(build(make, "sdpa"))
    given = {"input_ids": IDS, "attention_mask": REAL}
    more = {"use_cache": False} if make is llama else {}
    with torch.no_grad():
        whole = torch.compile(model, fullgraph=True, backend="aot_eager")(**given, **more).logits
        close(whole[:, 2:], model(**given).logits[:, 2:])
