"""Three small language models on the first chapter of Alice in Wonderland, one of which leaks."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attractor.attention import CausalityError, LanguageModel, assert_causal
from attractor.train import parameter_groups

TOKENS, BATCH, EVALUATIONS = 64, 16, 20
RATE, WARMUP = 5e-3, 20
HELD_OUT = 1500  # bytes at the end of the text
BEGIN = "Alice "
ARMS: dict[str, dict[str, Any]] = {
    "standard": {"pde": None},
    "PDE, walls": {"pde": "diffusion", "steps": 4, "walls": "mask"},
    "PDE, no walls": {"pde": "diffusion", "steps": 4, "walls": "sequence"},
}
Tell = Callable[[str, float], None]


def run(seed: int, device: str, tell: Tell, small: bool) -> dict[str, Any]:
    """Train and evaluate three models in the same way."""
    updates = 16 if small else 300
    ids = torch.tensor(list(Path(__file__).with_name("alice.txt").read_bytes()), device=device)
    training, validation = ids[:-HELD_OUT], ids[-HELD_OUT:]
    pieces = validation.unfold(0, TOKENS + 1, TOKENS)
    results: dict[str, Any] = {
        "updates": updates,
        "bytes": len(training),
        "held_out": len(validation),
        "arms": {},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="walls='sequence'")  # the demo shows the leak
        for i, (name, options) in enumerate(ARMS.items()):
            report = lambda fraction, i=i, name=name: tell(f"text, {name}", (i + fraction) / len(ARMS))
            model, line = _train(options, training, pieces, updates, seed, report)
            results["arms"][name] = {
                "line": line,
                "whole": line[-1][1],
                "left_to_right": _left_to_right(model, pieces),
                "causal": _causal(model, validation[None, :48]),
                "writes": _generate(model, 20 if small else 160, seed),
            }
    return results


def _train(
    options: dict[str, Any], training: Tensor, pieces: Tensor, updates: int, seed: int, report: Any
) -> tuple[LanguageModel, list[tuple[int, float]]]:
    """Train a model; return it and (update, held-out loss) pairs during training."""
    torch.manual_seed(seed)
    model = LanguageModel(
        128, dim=96, heads=4, layers=1, hidden=192, max_tokens=TOKENS, dropout=0.0, **options
    ).to(training.device)
    optimiser = torch.optim.AdamW(parameter_groups(model, RATE, decay_vectors=True), betas=(0.9, 0.95))
    batches, line = torch.Generator().manual_seed(seed), []
    every = max(4, updates // EVALUATIONS)
    for update in range(updates + 1):
        if update % every == 0 or update == updates:
            report(update / updates)
            line.append((update, _whole(model, pieces)))
        if update == updates:
            break
        starts = torch.randint(len(training) - TOKENS, (BATCH, 1), generator=batches)
        ids = training[(starts + torch.arange(TOKENS + 1)).to(training.device)]
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (update + 1) / WARMUP)
        model.train()
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval(), line


@torch.no_grad()
def _whole(model: LanguageModel, pieces: Tensor) -> float:
    """Return the loss on whole texts, in nats per byte."""
    logits = model.eval()(pieces[:, :-1])
    return cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten()).item()


@torch.no_grad()
def _left_to_right(model: LanguageModel, pieces: Tensor) -> float:
    """Return the loss if the input is only the text before each byte, as in generation."""
    losses = [cross_entropy(model(pieces[:, :n])[:, -1], pieces[:, n]) for n in range(1, TOKENS + 1)]
    return torch.stack(losses).mean().item()


def _causal(model: LanguageModel, ids: Tensor) -> bool:
    try:
        assert_causal(model, ids)
    except CausalityError:
        return False
    return True


def _generate(model: LanguageModel, tokens: int, seed: int) -> str:
    start = torch.tensor([list(BEGIN.encode())], device=next(model.parameters()).device)
    generator = torch.Generator(start.device).manual_seed(seed)
    ids = model.generate(start, tokens, temperature=0.6, generator=generator)[0].tolist()
    return bytes(i for i in ids if i < 128).decode().replace("\n", " ")


def show(page: Any, results: dict[str, Any]) -> None:
    """Add this part to a page."""
    from attractor.report import live

    arms = results["arms"]
    page.heading("Losses of three models, one of which leaks")
    lines: dict[str, Any] = {k: tuple(map(list, zip(*arm["line"]))) for k, arm in arms.items()}
    colors = {"standard": "#8a949e", "PDE, walls": live.COLORS[0], "PDE, no walls": live.COLORS[1]}
    looks = {k: {"line": {"color": c}} for k, c in colors.items()}
    y = "held-out loss (nats per byte)"
    page.plot("Held-out loss during training", live.lines(lines, x="update", y=y, looks=looks), 400)
    leaking = arms["PDE, no walls"]
    page.text(
        f"Three small models are trained on {results['bytes']:,} bytes of Alice in Wonderland and "
        f"evaluated on {results['held_out']:,} others; in the third, as in the paper, the PDE moves "
        f"weight through the mask. Its loss falls to {leaking['whole']:.2f}, while causal models reach "
        f"{arms['standard']['whole']:.2f} and {arms['PDE, walls']['whole']:.2f}, because every byte "
        "attends to the byte that it has to predict. If the input is only the text before each byte, "
        f"as in generation, its loss is {leaking['left_to_right']:.2f}."
    )
    rows = [
        [name, f"{a['whole']:.2f}", f"{a['left_to_right']:.2f}", "yes" if a["causal"] else "no"]
        for name, a in arms.items()
    ]
    page.table(["loss", "whole text", "left to right", "causal?"], rows)
    page.text(f"Text that the models generate after “{BEGIN.strip()}”:")
    page.command("\n\n".join(f"{name}: {arm['writes']}" for name, arm in arms.items()))
    page.text(
        "at.assert_causal detects such models: it changes later tokens and checks whether earlier "
        "outputs change."
    )


def summary(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, value) lines for the terminal."""
    arms = results["arms"]
    return [
        (f"text, {k}", f"loss {a['whole']:.2f}, left to right {a['left_to_right']:.2f}")
        for k, a in arms.items()
    ]
