"""`add_pde` starts as the model it is given, and learns from there.

    python -m benchmarks.identity                                   a small GPT-2, minutes on a CPU
    python -m benchmarks.identity --size gpt2 --device cuda --data FOLDER
    python -m benchmarks.identity --model FOLDER --device cuda --data FOLDER

The first part measures how far coefficients move in 250 updates of AdamW at 1e-3 from the identity,
where the data were made with larger ones: by `LearnedPDE`, and by the logistic function of earlier
versions, which started at 0.001 since it does not reach 0.

The second part is a GPT-2: weights of transformers in FOLDER with their tokenizer, or random ones that
are first trained without a PDE, on bytes. It compares the logits before and after `add_pde`, fine-tunes
on WikiText-2 (a folder of it by --data or by ATTRACTOR_DATA), and reports the coefficients and the
validation loss, beside the same model fine-tuned on the same batches without a PDE.
"""

import argparse
import copy
from typing import Any

import torch
from torch import Tensor

from attractor.attention import coefficients, pde_attention
from attractor.attention.pdes import BY_NAME, LearnedPDE
from attractor.data import text
from benchmarks.results import save

UPDATES, RATE = 250, 1e-3
TRUTH = {
    "diffusion": (0.3,),
    "wave": (0.3,),
    "reaction_diffusion": (0.3, 0.2),
    "advection_diffusion": (0.3, 0.2),
}
SIZES = {
    "small": {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 256},
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024},
}


def reach(name: str) -> dict[str, Any]:
    """Return the coefficients after all updates, by both parameterisations, and those of the data."""
    kind = BY_NAME[name]
    q, k, v = torch.randn(3, 4, 1, 32, 8, generator=torch.Generator().manual_seed(0))
    attend = lambda pde: pde_attention(q, k, v, is_causal=True, pde=pde, steps=4)
    want = attend(kind(*TRUTH[name]))
    learned = LearnedPDE(kind(*(0.0 for _ in TRUTH[name])))
    logits = torch.nn.ParameterList([torch.tensor([0.001 / 0.499]).logit()[:, None, None]])

    def logistic() -> Any:
        c = 0.5 * logits[0].sigmoid()
        return kind(2 * c if name == "wave" else c, *[0.0] * (len(TRUTH[name]) - 1))

    rows = {"name": name, "truth": TRUTH[name]}
    for way, module, equation in (("raw", learned, learned), ("logistic", logits, logistic)):
        optimiser = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0)
        for _ in range(UPDATES):
            optimiser.zero_grad()
            (attend(equation()) - want).square().mean().backward()
            optimiser.step()
        values = {n: x.item() for n, x in vars(equation()).items() if isinstance(x, Tensor)}
        rows[way] = values
        print(f"{name}, {way}: {values} after {UPDATES} updates, data made with {TRUTH[name]}")
    return rows


def batches(ids: Tensor, tokens: int, count: int, updates: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pieces = text.windows(ids, tokens - 1)
    return [pieces[torch.randint(len(pieces), (count,), generator=generator)] for _ in range(updates)]


def train(model: Any, groups: Any, rows: list[Tensor], device: str) -> list[float]:
    optimiser = torch.optim.AdamW(groups)
    losses = []
    model.train()
    for ids in rows:
        ids = ids.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@torch.no_grad()
def evaluate(model: Any, rows: list[Tensor], device: str) -> float:
    model.eval()
    losses = [model(ids.to(device), labels=ids.to(device)).loss.item() for ids in rows]
    return sum(losses) / len(losses)


def fine_tune(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from attractor.integrations import transformers as hf

    device, tokens = options.device, options.tokens
    torch.manual_seed(0)
    lines = {
        s: [x for x in text.lines("wikitext2", s, options.data) if x.strip()] for s in ("train", "valid")
    }
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        ids = {s: torch.tensor(tokenizer("\n".join(x))["input_ids"]) for s, x in lines.items()}
        model: Any = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        ids = {s: text.stream(x, text.Bytes()) for s, x in lines.items()}
        size = SIZES[options.size]
        model = GPT2LMHeadModel(GPT2Config(**size, vocab_size=257, bos_token_id=10, eos_token_id=10))
    model.to(device)
    draw = lambda updates, seed: batches(ids["train"], tokens, options.batch, updates, seed)
    valid = batches(ids["valid"], tokens, options.batch, 16, 9)
    if not options.model and options.pretrain:
        losses = train(model, hf.parameter_groups(model, 1e-3), draw(options.pretrain, 0), device)
        print(f"trained without a PDE: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    report: dict[str, Any] = {
        "model": options.model or options.size, "device": device, "tokens": tokens, "batch": options.batch,
        "pretrain": options.pretrain, "updates": options.updates, "lr": options.lr,
        "coefficient_lr": options.coefficient_lr, "pde": options.pde, "steps": options.steps,
    }  # fmt: skip
    for arm in ("without", "with"):
        copied = copy.deepcopy(model).eval()
        with torch.no_grad():
            before = copied(valid[0].to(device)).logits
        if arm == "with":
            hf.add_pde(copied, options.pde, options.steps, per_head=options.per_head)
            with torch.no_grad():
                after = copied(valid[0].to(device)).logits
            span = (before.max() - before.min()).item()
            report["logits"] = {"difference": (after - before).abs().max().item(), "range": span}
            report["logits"]["ratio"] = report["logits"]["difference"] / span
            print("logits:", report["logits"])
        start = evaluate(copied, valid, device)
        groups = hf.parameter_groups(copied, options.lr, coefficient_lr=options.coefficient_lr)
        train(copied, groups, draw(options.updates, 1), device)
        report[arm] = {"loss before": start, "loss after": evaluate(copied, valid, device)}
        print(arm, "a PDE:", report[arm])
    report["coefficients"] = coefficients(copied)
    for row in report["coefficients"]:
        print(
            f"{row['name']} {row['coefficient']} {row['mean']:.5f} ({row['min']:.5f} to {row['max']:.5f})"
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="folder or name of a GPT-2 of transformers; by default random weights")
    add("--size", choices=SIZES, default="small", help="of the model with random weights")
    add("--data", help="folder with WikiText-2")
    add("--device", default="cpu")
    add("--pde", choices=BY_NAME, default="diffusion")
    add("--steps", type=int, default=4)
    add("--per-head", action="store_true")
    add("--pretrain", type=int, default=300, help="updates without a PDE of random weights")
    add("--updates", type=int, default=500)
    add("--batch", type=int, default=4)
    add("--tokens", type=int, default=128)
    add("--lr", type=float, default=5e-5)
    add("--coefficient-lr", type=float, default=1e-3)
    add("--out", default="identity", help="name of the file of results")
    options = parser.parse_args()
    save(options.out, {"reach": [reach(name) for name in TRUTH], "fine_tuning": fine_tune(options)})


if __name__ == "__main__":
    main()
