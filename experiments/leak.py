"""What a language model is worth that reads its answers: PDE attention with walls and without.

The paper reports validation perplexities near 2 for PDE transformers of 2.9 million parameters (Table 2:
1.97, where standard attention has 20,748). Such numbers appear when a causal map is diffused through its
own mask: weight flows onto later keys, every token reads the one it has to predict, and left to right,
where there is no later token to read, the same model predicts worse than any other.

Three models under one recipe on WikiText-2 (same start, same batches, same steps): standard attention,
PDE attention with walls, PDE attention without. Each is evaluated as the paper does, on whole texts
(teacher forcing), and honestly, each token from nothing but the text before it; `assert_causal` gives
its verdict. With ``--steps 8``, where the paper's Table 4 has NaN: four PDEs with walls and eight steps.

    python -m experiments.leak --data FOLDER --quick                   # minutes on a CPU
    python -m experiments.leak --data FOLDER --device cuda             # the real one, on a GPU
    python -m experiments.leak --data FOLDER --device cuda --steps 8

FOLDER (or ATTRACTOR_DATA) holds wikitext2_train.txt.xz, wikitext2_valid.txt.xz and, for the real one,
bert_base_uncased_vocab.txt. Arms that are in the results with the same recipe are not run again.
"""

import argparse
import hashlib
import json
import math
import platform
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attractor.attention import CausalityError, LanguageModel, assert_causal
from attractor.attention.diagnostics import coefficients
from attractor.attention.pdes import BY_NAME
from attractor.core.files import write_json
from attractor.data import text

RESULTS = Path(__file__).parent / "results"
CLAIM = (
    "The paper reports perplexities near 2 (Table 2: 1.97, at 1,024 tokens); a map that is not causal, "
    "here by diffusion through its mask, gives such numbers: every token reads the one it has to "
    "predict. Left to right, with no later token to read, the same model is worse than either of the "
    "others; with walls nothing leaks."
)


@dataclass(frozen=True)
class Recipe:
    """What all arms have in common. The defaults are the paper's model (Table 8) at length 256."""

    dim: int = 256
    heads: int = 8
    layers: int = 4
    hidden: int = 512
    tokens: int = 256
    dropout: float = 0.1
    tokenizer: str = "wordpiece"
    vocabulary: int | None = None
    batch: int = 32
    updates: int = 2000
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    evaluate_every: int = 200
    valid_windows: int = 1024
    honest_windows: int = 128
    honest_positions: int = 16
    seed: int = 0


QUICK = Recipe(
    dim=64, heads=4, layers=2, hidden=128, tokens=64, tokenizer="bytes", batch=16, updates=600,
    learning_rate=3e-3, warmup=50, evaluate_every=50, valid_windows=128, honest_windows=32,
    honest_positions=8,
)  # fmt: skip


def arms(steps: int, pdes: list[str]) -> dict[str, dict[str, Any]]:
    """Name -> what differs from the other arms."""
    if steps == 8:
        return {f"{pde}, walls, 8 steps": {"pde": pde, "steps": 8} for pde in BY_NAME}
    found: dict[str, dict[str, Any]] = {"standard": {"pde": None}}
    for pde in pdes:
        found[f"{pde}, walls"] = {"pde": pde, "steps": steps}
        found[f"{pde}, no walls"] = {"pde": pde, "steps": steps, "walls": "sequence"}
    return found


def tokenizer_of(recipe: Recipe, lines: list[str], folder: str | None) -> Any:
    """The recipe's tokenizer."""
    if recipe.tokenizer == "words":
        return text.Words.of(lines, recipe.vocabulary)
    return text.Bytes() if recipe.tokenizer == "bytes" else text.WordPiece(folder)


def run(
    options: dict[str, Any],
    recipe: Recipe,
    train: Tensor,
    valid: Tensor,
    size: int,
    device: str,
    save: Any,
) -> tuple[LanguageModel, dict[str, Any]]:
    """Trains one arm; `save` is called with what is known after every evaluation."""
    torch.manual_seed(recipe.seed)
    model = LanguageModel(
        size, dim=recipe.dim, heads=recipe.heads, layers=recipe.layers, hidden=recipe.hidden,
        max_tokens=recipe.tokens, dropout=recipe.dropout, **options,
    ).to(device)  # fmt: skip
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    batches = torch.Generator().manual_seed(recipe.seed + 1)
    offsets = torch.arange(recipe.tokens + 1)
    arm: dict[str, Any] = {
        "options": options, "recipe": asdict(recipe), "device": named(device),
        "torch": torch.__version__, "parameters": sum(p.numel() for p in model.parameters()),
        "finished": False, "history": [],
    }  # fmt: skip
    began, running = time.perf_counter(), None
    for update in range(recipe.updates + 1):
        if update % recipe.evaluate_every == 0 or update == recipe.updates:
            row = {"update": update, "train_loss": None if running is None else running.item()}
            row |= evaluate(model, valid, recipe, device)
            arm["history"].append(row)
            arm["seconds"] = time.perf_counter() - began
            save(arm)
            told = ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
            print(f"  {update:6} {told} [{arm['seconds']:.0f} s]", flush=True)
        if update == recipe.updates:
            break
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * pace(update, recipe)
        starts = torch.randint(len(train) - recipe.tokens, (recipe.batch, 1), generator=batches)
        ids = train[starts + offsets].to(device, non_blocking=True)
        model.train()
        with half(device):
            logits = model(ids[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        running = loss.detach() if running is None else 0.98 * running + 0.02 * loss.detach()
    return model, arm


def pace(update: int, recipe: Recipe) -> float:
    """A part of the learning rate: linear warm-up, then half a cosine down to a tenth."""
    if update < recipe.warmup:
        return (update + 1) / recipe.warmup
    done = (update - recipe.warmup) / max(1, recipe.updates - recipe.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def evaluate(model: LanguageModel, valid: Tensor, recipe: Recipe, device: str) -> dict[str, Any]:
    """Validation perplexity by teacher forcing, and on a sample of tokens also left to right.

    Left to right, the model is given the text before a token and nothing else, as it is when it writes.
    """
    model.eval()
    pieces = valid[: recipe.valid_windows]
    losses = [forced(model, piece.to(device), device) for piece in pieces.split(recipe.batch)]
    each = torch.cat(losses)
    step = recipe.tokens / (recipe.honest_positions + 1)
    lengths = [max(1, round(step * (i + 1))) for i in range(recipe.honest_positions)]
    spread = torch.linspace(0, len(pieces) - 1, min(recipe.honest_windows, len(pieces))).long()
    after = []
    for piece in pieces[spread].to(device).split(4 * recipe.batch):
        for n in lengths:
            with half(device):
                logits = model.logits(model.states(piece[:, :n])[:, -1])
            after.append(cross_entropy(logits.float(), piece[:, n], reduction="none"))
    same = [n - 1 for n in lengths]
    before = [
        forced(model, piece, device)[:, same].flatten()
        for piece in pieces[spread].to(device).split(recipe.batch)
    ]
    perplexity = lambda parts: torch.cat(parts).double().mean().exp().item()
    return {
        "perplexity": each.double().mean().exp().item(),
        "sample_forced": perplexity(before),
        "sample_left_to_right": perplexity(after),
    }


def forced(model: LanguageModel, ids: Tensor, device: str) -> Tensor:
    """The loss at every token ``[batch, tokens]`` when the whole text is given."""
    with half(device):
        logits = model(ids[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return loss.view(len(ids), -1)


def verdict(model: LanguageModel, ids: Tensor) -> dict[str, Any]:
    """What `assert_causal` says of a model."""
    try:
        assert_causal(model, ids)
    except CausalityError as error:
        return {"causal": False, "position": error.position, "size": error.size, "message": str(error)}
    return {"causal": True, "message": "no bit of any output changes with a later token"}


def half(device: str) -> Any:
    """bfloat16 on a GPU."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.startswith("cuda") else nullcontext()


def named(device: str) -> str:
    """The device's own name."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or device


def picture(results: dict[str, Any], path: Path) -> None:
    """Validation perplexity over training, a line an arm; dashed, the honest one of those that leak."""
    from attractor.report.figures import plt, write

    figure, axis = plt.subplots(figsize=(8, 5))
    for i, (name, arm) in enumerate(results["arms"].items()):
        if "8 steps" in name:
            continue
        x = [row["update"] for row in arm["history"]]
        color = "#c0392b" if name == "diffusion, no walls" else plt.get_cmap("tab10")(i % 10)
        axis.semilogy(x, [row["perplexity"] for row in arm["history"]], color=color, label=name)
        if "no walls" in name:
            honest = [row["sample_left_to_right"] for row in arm["history"]]
            axis.semilogy(x, honest, "--", color=color, label=f"{name}: the same model, left to right")
    recipe = next(iter(results["arms"].values()))["recipe"]
    if recipe["tokenizer"] == "wordpiece":  # of other tokens perplexities are other numbers
        axis.axhline(1.97, color="#1b1f24", lw=0.9, ls=":", label="the paper's 1.97 (on WikiText-103)")
    tokens = recipe["tokenizer"].removesuffix("s")
    axis.set(xlabel="updates", ylabel=f"validation perplexity of a {tokens}")
    axis.set_title(f"WikiText-2, one recipe: {recipe['layers']} layers of {recipe['dim']}", fontsize=11)
    axis.grid(color="#d8dde3", lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.text(0.5, -0.01, CLAIM, ha="center", va="top", fontsize=8, wrap=True)
    write(figure, path)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs what the command line asks for, and returns the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder of the text files; ATTRACTOR_DATA if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a small model, for a CPU")
    parser.add_argument(
        "--steps", type=int, default=4, help="of the maps; 8: four PDEs, with walls only"
    )
    parser.add_argument(
        "--pdes", default="diffusion", help="with walls and without, such as diffusion,wave"
    )
    parser.add_argument("--updates", type=int, help="how long to train, if not as the recipe says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no new arm after so long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    torch.set_float32_matmul_precision("high")
    warnings.filterwarnings("ignore", message="walls='sequence' lets attention flow")
    recipe = replace(QUICK if given.quick else Recipe(), seed=given.seed)
    if given.updates:
        every = min(recipe.evaluate_every, given.updates)
        recipe = replace(
            recipe, updates=given.updates, warmup=given.updates // 10 + 1, evaluate_every=every
        )

    began = time.perf_counter()
    lines = {split: text.lines("wikitext2", split, given.data) for split in ("train", "valid")}
    tokenizer = tokenizer_of(recipe, lines["train"], given.data)
    ids = {split: text.stream(found, tokenizer) for split, found in lines.items()}
    pieces = text.windows(ids["valid"], recipe.tokens)
    print(f"{len(ids['train']):,} and {len(ids['valid']):,} tokens of {tokenizer.size:,}", flush=True)

    path = given.out / ("leak_quick.json" if given.quick else "leak.json")
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"arms": {}}
    results |= {
        "claim": CLAIM,
        "data": {s: {"tokens": len(x), "sha256": hashlib.sha256(x.numpy().tobytes()).hexdigest()}
                 for s, x in ids.items()},
        "vocabulary": tokenizer.size,
    }  # fmt: skip
    for name, options in arms(given.steps, given.pdes.split(",")).items():
        known = results["arms"].get(name, {})
        if known.get("finished") and known["recipe"] == asdict(recipe):
            print(f"{name}: there already")
            continue
        if time.perf_counter() - began > given.seconds:
            print(f"{name}: left for another time")
            continue
        print(name, flush=True)

        def save(arm: dict[str, Any], name: str = name) -> None:
            results["arms"][name] = arm
            write_json(path, results)

        model, arm = run(options, recipe, ids["train"], pieces, tokenizer.size, given.device, save)
        sample = pieces[:1, : min(48, recipe.tokens)].to(given.device)
        arm |= {"causality": verdict(model, sample), "coefficients": coefficients(model)}
        arm["text"] = tokenizer.decode(model.generate(sample[:, :16], 32, temperature=0)[0].tolist())
        # One loss that is NaN would stay in the running mean for ever.
        numbers = [row[key] for row in arm["history"][1:] for key in ("train_loss", "perplexity")]
        arm |= {"finite": all(map(math.isfinite, numbers)), "finished": True}
        save(arm)
        print(f"  {arm['causality']['message']}\n  {arm['text']}", flush=True)
    if any("8 steps" not in name for name in results["arms"]):
        picture(results, path.with_suffix(".png"))
    print(f"-> {path}")
    return results


if __name__ == "__main__":
    main()
