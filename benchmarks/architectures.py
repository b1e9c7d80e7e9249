"""Which models of transformers take PDE attention by its name, and which refuse it.

    python -m benchmarks.architectures            all causal, masked and sequence-to-sequence classes
    python -m benchmarks.architectures gpt2 t5    those of some model types

Each class is built with a small random config, in float64, and run on a padded batch with attention
``"eager"``, with PDE attention of no steps, and with diffusion of four steps. A class passes if the first two
agree to 1e-5 and the third differs, or if it refuses the name. The table in docs/how-to/hugging-face.md is
made from the result.
"""

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.results import save

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
}
TOLERANCE = 1e-5
MOST = 30_000_000  # parameters of a model that counts as small
WIDTH, HEADS, LAYERS = 32, 4, 2
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "emb_dim", "width", "model_dim", "encoder_hidden_size", "decoder_hidden_size", "lru_width", "attention_hidden_size", "mamba_d_model", "input_embedding_size", "d_embed"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_hidden_groups", "encoder_num_hidden_layers", "decoder_num_hidden_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads", "attn_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "feed_forward_size", "intermediate_size_mlp", "block_ff_dim", "expert_ffn_hidden_size", "ffn_hidden_size", "dense_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "v_head_dim", "d_head", "global_head_dim", "swa_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "low_rank_v_input", "lora_rank_decay"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_primary_experts", "router_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", "index_n_heads"), 2),
    "n_group": 1, "topk_group": 1, "index_topk": 4, "vocab_size": 99, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8,
    "decoder_vocab_size": 99, "num_buckets": 4,
}  # fmt: skip
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
LEAVE_OUT: Any = object()
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "qwen3_next"), HYBRID),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), HYBRID),
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 99, "mask_token_id": 3, "pad_token_id": 0},
    "falcon": {"head_dim": LEAVE_OUT},
    "flaubert": {"n_words": 99},
    "funnel": {"num_hidden_layers": LEAVE_OUT, "block_sizes": [2]},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"rope_parameters": ROPE, "head_dim": 8},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"rope_parameters": ROPE, "head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 1},
    "prophetnet": {"num_hidden_layers": LEAVE_OUT},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"], "local_attn_chunk_length": 4},
    "xlm": {"n_words": 99},
    "xlstm": {"v_head_dim": LEAVE_OUT},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
BATCH, TOKENS, PADDING = 2, 16, 4


def classes(kinds: Any = KINDS) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield the kind, the model type, the class and the class of its config."""
    from transformers.models.auto import modeling_auto

    for kind in kinds:
        for config, models in getattr(modeling_auto, KINDS[kind]).items():
            for model in models if isinstance(models, tuple) else (models,):
                yield kind, config.model_type, model, config


def small(config_class: Any, depth: int = 0) -> Any:
    """Return a small config, with parts that are small as well."""
    known = config_class()

    def of(name: str) -> Any:
        try:
            return getattr(known, name, None)
        except Exception:  # what differs between layers
            return None

    values = {name: x for name, x in {**SIZES, **IDS}.items() if isinstance(of(name), int)}
    values |= {name: 0.0 for name in vars(known) if "dropout" in name and isinstance(of(name), float)}
    for name in config_class.sub_configs:
        part = of(name)
        if part is not None and depth < 3:
            values[name] = small(type(part), depth + 1)
    if values.get("num_key_value_heads") and of("num_key_value_heads") == of("num_attention_heads"):
        values["num_key_value_heads"] = HEADS
    values |= SPECIAL.get(config_class.model_type, {})
    config = config_class(**{name: x for name, x in values.items() if x is not LEAVE_OUT})
    config.use_cache = False
    return config


def config_for(model_class: Any, config_class: Any, kind: str) -> Any:
    """Return the small config of a class, which may be that of a part: a text, or a decoder."""
    config = small(config_class)
    wanted = getattr(model_class, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        parts = [getattr(config, name, None) for name in config.sub_configs]
        config = next((part for part in parts if isinstance(part, wanted)), config.get_text_config())
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    config._experts_implementation = "eager"  # the others take no float64
    return config


def inputs(config: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the inputs of a padded batch, and which outputs are of tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (BATCH, TOKENS), generator=generator)
    real = torch.ones_like(ids)
    real[1, TOKENS - PADDING :] = 0
    ids = ids.masked_fill(real == 0, 0)
    given = {"input_ids": ids, "attention_mask": real}
    if getattr(config, "is_encoder_decoder", False):
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": real}
    return given, real.bool()


def build(model_class: Any, config: Any, name: str, dtype: torch.dtype = torch.float64) -> Any:
    config = copy.deepcopy(config)
    config._attn_implementation = name
    torch.manual_seed(0)
    model = (
        model_class._from_config(config) if hasattr(model_class, "_from_config") else model_class(config)
    )
    return model.to(dtype).eval()


@torch.no_grad()
def stirred(model: Any) -> Any:
    """Return the model with noise on its weights: some models start with gates that are closed."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(0.05 * noise.to(parameter.dtype))
    return model


@torch.no_grad()
def run(model: Any) -> torch.Tensor:
    given, real = inputs(model.config)
    output = model(**given)
    return (output.logits if "logits" in output else output[0])[real]


def measure(model_class: Any, config_class: Any, kind: str) -> dict[str, Any]:
    """Return what became of a class: "PDE attention", "refused", "wrong" or "not built", and why."""
    from attractor.integrations import transformers as hf

    dtype, tolerance, least = torch.float64, TOLERANCE, 1e-11
    try:
        config = config_for(model_class, config_class, kind)
        with torch.device("meta"):
            count = sum(p.numel() for p in build(model_class, config, "eager").parameters())
        if count > MOST:
            return {"outcome": "not built", "why": f"{count:,} parameters"}
        try:
            eager = stirred(build(model_class, config, "eager"))
            want = run(eager)
        except RuntimeError:  # some have parts that are float32 always
            dtype, least = torch.float32, 1e-5
            eager = stirred(build(model_class, config, "eager", dtype))
            want = run(eager)
        if not want.isfinite().all():
            build(model_class, config, "pde_diffusion")
            return {"outcome": "not built", "why": "outputs are not finite"}
    except hf.BypassError as error:
        return {"outcome": "refused", "why": reason(error)}
    except Exception as error:
        return {"outcome": "not built", "why": reason(error)}
    found = {}
    try:
        for name in ("pde_resting", "pde_diffusion"):
            model = build(model_class, config, name, dtype)
            model.load_state_dict(eager.state_dict())
            found[name] = run(model)
    except (hf.BypassError, ValueError) as error:
        return {"outcome": "refused", "why": reason(error)}
    except Exception as error:
        return {"outcome": "wrong", "why": reason(error)}
    size = want.abs().max()
    resting, moved = (((x - want).abs().max() / size).item() for x in found.values())
    row = {"difference": resting, "moved": moved}
    if not resting <= tolerance:
        return {"outcome": "wrong", "why": "differs from eager attention", **row}
    if not moved > least:
        return {"outcome": "wrong", "why": "silently ordinary attention", **row}
    return {"outcome": "PDE attention", **row}


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def sweep(types: Any = (), kinds: Any = KINDS) -> list[dict[str, Any]]:
    from attractor.integrations import transformers as hf

    hf.register()
    hf.register(steps=0, names={"pde_resting": "diffusion"})
    rows = []
    for kind, model_type, model_class, config_class in classes(kinds):
        if types and model_type not in types:
            continue
        row = {"kind": kind, "type": model_type, "class": model_class.__name__}
        rows.append(row | measure(model_class, config_class, kind))
        print(*(str(x) for x in rows[-1].values()), sep=" | ", flush=True)
    return rows


def main() -> None:
    import warnings

    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = sweep(sys.argv[1:])
    for kind in KINDS:
        print(kind, dict(Counter(row["outcome"] for row in rows if row["kind"] == kind)))
    if not sys.argv[1:]:
        save("architectures", {"transformers": transformers.__version__, "rows": rows})


if __name__ == "__main__":
    main()
