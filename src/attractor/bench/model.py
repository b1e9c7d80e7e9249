"""Benchmark of a transformers model with PDE attention against the same weights with ``sdpa``.

    train           a training step, forward and backward, causal
    checkpointed    the same on one long text, with gradient checkpointing
    padded          the same on a batch whose first row is padded on the left by a quarter
    packed          the same on rows of packed texts, which position_ids separate
    compiled        the same through ``torch.compile``, with a quarter of the layers
    dropout         the same with attention dropout of 0.1
    generate        one token of ``generate``, batch 8, with a dynamic cache
    left_padded     the same with prompts of different lengths
    static          the same with a static cache, whose steps ``generate`` compiles into CUDA graphs

Weights are random. Times are medians over rounds, and each round times both implementations.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attractor.storage.limits import read_json

KINDS = (
    "train", "checkpointed", "padded", "packed", "compiled", "dropout", "generate", "left_padded",
    "static",
)  # fmt: skip
PEER = "sdpa"
GENERATED = ("generate", "left_padded", "static")

# The sizes of Llama 3.2 1B, with a smaller vocabulary.
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
}  # fmt: skip
SMALL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 32_768,
}  # fmt: skip
NAMES = {"llama": LLAMA, "small": SMALL}

# Tokens and batch of a training step, those of one long text, and the prompt and batch of generation.
SIZES = {"cuda": ((4096, 4), (16_384, 1), (1024, 8)), "cpu": ((256, 2), (512, 1), (64, 2))}
NEW_TOKENS = {"cuda": 48, "cpu": 8}
ROUNDS = {"cuda": 7, "cpu": 3}
TEXTS = 8  # packed texts per row


def config_of(name: str, **changes: Any) -> Any:
    """Return a configuration of transformers.

    Args:
        name: A name of `NAMES`, a JSON file, or a folder that holds ``config.json``.
        changes: Further entries, such as ``num_hidden_layers=4``.

    Raises:
        ValueError: There is no such name or file, or it holds no configuration of a causal model.
    """
    from transformers import AutoConfig

    if name in NAMES:
        values = dict(NAMES[name])
    else:
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"{name!r} is neither a file, nor a folder with config.json, nor {' or '.join(NAMES)}"
            )
        values = read_json(path, link=True)
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"{name} holds no model_type, so it is no configuration of transformers")
    values |= changes
    return AutoConfig.for_model(values.pop("model_type"), **values)


def measure(
    kind: str,
    config: Any,
    *,
    device: str,
    dtype: torch.dtype,
    pde: str = "diffusion",
    steps: int = 4,
    learn: bool = False,
    per_head: bool = False,
    tokens: int | None = None,
    batch: int | None = None,
    rounds: int | None = None,
) -> dict[str, Any]:
    """Return seconds and peak memory of one case for both implementations, and their ratios.

    Args:
        kind: One of `KINDS`.
        config: What `config_of` returns; it is not changed.
        device, dtype: Device and dtype of the model.
        pde, steps: The PDE and the number of its steps.
        learn, per_head: As in `add_pde`; without both, the coefficients are the defaults of the PDE.
        tokens, batch: Sizes; None for those of `SIZES`.
        rounds: Number of rounds; None for that of `ROUNDS`.
    """
    from transformers import AutoModelForCausalLM

    from attractor.integrations import transformers as hf

    place = torch.device(device).type
    train, long, prompt = SIZES["cuda" if place == "cuda" else "cpu"]
    usual = long if kind == "checkpointed" else prompt if kind in GENERATED else train
    tokens, batch = tokens or usual[0], batch or usual[1]
    hf.register(steps=steps)
    config = type(config)(**config.to_dict())
    if kind == "compiled":
        config.num_hidden_layers = max(1, config.num_hidden_layers // 4)
    if kind == "dropout":
        config.attention_dropout = config.attn_pdrop = 0.1
    config._attn_implementation = PEER
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    ours = f"pde_{pde}"
    if learn or per_head:
        hf.add_pde(model, pde, steps, learn=True, per_head=per_head)
    ids = torch.randint(
        config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0)
    ).to(device)  # fmt: skip
    make = _generation if kind in GENERATED else _training
    call = make(model, ids, kind)
    rounds = rounds or ROUNDS["cuda" if place == "cuda" else "cpu"]
    try:
        timings = _in_turns(
            model, call, (PEER, ours), rounds, device, separate=kind in ("compiled", "static")
        )
    finally:
        torch._dynamo.reset()
        del model, call
        gc.collect()
        if place == "cuda":
            torch.cuda.empty_cache()
    seconds = {name: statistics.median(times) for name, (times, _) in timings.items()}
    peak = {name: memory for name, (_, memory) in timings.items()}
    divisor = NEW_TOKENS["cuda" if place == "cuda" else "cpu"] if kind in GENERATED else 1
    row = {
        "kind": kind, "model": config.model_type, "layers": config.num_hidden_layers, "tokens": tokens,
        "batch": batch, "pde": pde, "steps": steps, "learn": learn or per_head, "per_head": per_head,
        "device": device, "dtype": str(dtype).removeprefix("torch."),
        "unit": "s per token" if kind in GENERATED else "s per step",
        "peer_seconds": seconds[PEER] / divisor, "seconds": seconds[ours] / divisor,
        "ratio": seconds[ours] / seconds[PEER],
    }  # fmt: skip
    if place == "cuda":
        row |= {"peer_peak_gib": peak[PEER], "peak_gib": peak[ours], "memory": peak[ours] / peak[PEER]}
    return row


def _training(model: Any, ids: Tensor, kind: str) -> Callable[[], None]:
    """Return a function that takes one training step, without the optimiser."""
    batch, tokens = ids.shape
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if kind == "padded":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, : tokens // 4] = 0
    if kind == "packed":
        each = max(1, tokens // TEXTS)
        inputs["position_ids"] = (torch.arange(tokens, device=ids.device) % each).expand(batch, -1)
    model.train()
    if kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    forward = torch.compile(model) if kind == "compiled" else model

    def step() -> None:
        model.zero_grad(set_to_none=True)
        forward(**inputs).loss.backward()

    return step


def _generation(model: Any, ids: Tensor, kind: str) -> Callable[[], None]:
    """Return a function that generates the tokens of `NEW_TOKENS` after a prompt."""
    batch, tokens = ids.shape
    new = NEW_TOKENS["cuda" if ids.is_cuda else "cpu"]
    attention_mask = torch.ones_like(ids)
    if kind == "left_padded":
        for row in range(batch):
            attention_mask[row, : row * tokens // (2 * batch)] = 0
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "attention_mask": attention_mask}
    if kind == "static":
        options["cache_implementation"] = "static"
    model.eval()
    model.generation_config.eos_token_id = None

    def generate() -> None:
        # The difference of two lengths does not contain the prompt; see `_in_turns`.
        model.generate(ids, max_new_tokens=1 + new, min_new_tokens=1 + new, **options)

    def prefill() -> None:
        model.generate(ids, max_new_tokens=1, min_new_tokens=1, **options)

    generate.without = prefill  # type: ignore[attr-defined]
    return generate


@contextmanager
def _peak(device: str) -> Iterator[list[float]]:
    """Yield a list to which the peak memory in GiB is appended at the end of the context; 0 on a CPU."""
    peak: list[float] = []
    if torch.device(device).type != "cuda":
        yield peak
        peak.append(0.0)
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    yield peak
    torch.cuda.synchronize()
    peak.append(torch.cuda.max_memory_allocated() / 2**30)


def _in_turns(
    model: Any, call: Callable[[], None], names: Sequence[str], rounds: int, device: str, separate: bool
) -> dict[str, tuple[list[float], float]]:
    """Return the seconds of each round and the peak memory, by implementation.

    Args:
        model, call, device: The model, a function that runs it, and its device.
        names: Values of ``attn_implementation``.
        rounds: Number of rounds.
        separate: Whether all rounds of one implementation come before those of the next, for compiled
            code.
    """
    without = getattr(call, "without", None)
    timings: dict[str, tuple[list[float], float]] = {}
    for name in names:
        if separate:
            torch._dynamo.reset()
        model.set_attn_implementation(name)
        for _ in range(3 if separate else 2):
            call()
        with _peak(device) as peak:
            call()
        timings[name] = [], peak[0]
        if separate:
            timings[name][0].extend(_seconds(call, without, device) for _ in range(rounds))
    for _ in range(0 if separate else rounds):
        for name in names:
            model.set_attn_implementation(name)
            call()
            timings[name][0].append(_seconds(call, without, device))
    return timings


def _seconds(call: Callable[[], None], without: Callable[[], None] | None, device: str) -> float:
    """Return the duration of a call minus that of the other call, in seconds."""

    def duration(function: Callable[[], None]) -> float:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds = duration(call)
    return seconds - duration(without) if without is not None else seconds
