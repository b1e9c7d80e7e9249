"""How cost grows: with trajectories, dimension, tokens and processes. CPU, small; what is larger is computed.

``python -m benchmarks.scale`` measures (some minutes, two processes of one thread each) and writes the
tables of docs/scale.md; ``python -m benchmarks.scale pages`` writes only the tables.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attractor import evolve, pde_attention, systems
from attractor.attention import LanguageModel, Parts, context_parallel_attention
from attractor.storage.files import write_text
from attractor.train import Recipe, train
from benchmarks.results import FOLDER, save

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
BLOCK = re.compile(r"(<!-- scale: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
STEPS, HEADS, DIM = 4, 4, 32  # of the attention measured
ROUNDS = 3


def seconds(run: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Processor time of the quickest of some rounds, after one that does not count.

    Not the wall clock: others may use the machine, and processes wait for each other.
    """
    run()
    found = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return min(found)


# ---- measured in one process


def trajectories() -> list[dict[str, Any]]:
    """100 steps of rk4 of the elastic pendulum, float64."""
    system, t, rows = systems.ElasticPendulum(), torch.linspace(0, 1, 101, dtype=torch.float64), []
    for count in (1, 100, 10_000, 100_000):
        u0 = system.sample(count, torch.Generator().manual_seed(0), torch.float64)
        spent = seconds(lambda u0=u0: evolve(system, u0, t, "rk4", every=100), 3)
        rows.append(
            {"trajectories": count, "milliseconds": 1e3 * spent, "ns": 1e9 * spent / count / 100}
        )
    return rows


def dimension() -> list[dict[str, Any]]:
    """10 steps of rk4 of 1,000 trajectories: a chain of springs, and one of pendulums."""
    t, rows = torch.linspace(0, 0.1, 11, dtype=torch.float64), []
    for size in (2, 4, 8, 16):
        row: dict[str, Any] = {"size": size}
        for name, system in (
            ("springs", systems.SpringMass(n=10 * size)),
            ("links", systems.PendulumChain(links=size)),
        ):
            u0 = system.sample(1000, torch.Generator().manual_seed(0), torch.float64)
            row[name] = 1e3 * seconds(lambda s=system, u0=u0: evolve(s, u0, t, "rk4", every=10), 3)
        rows.append(row)
    return rows


def tokens() -> list[dict[str, Any]]:
    """Causal diffusion, forward and backward."""
    rows = []
    for count in (1024, 2048, 4096, 8192):
        given = [torch.randn(1, HEADS, count, DIM, requires_grad=True) for _ in range(3)]
        row: dict[str, Any] = {"tokens": count}
        for name, options in (("stepped", {"steps": STEPS}), ("without a PDE", {"steps": 0})):
            run = lambda g=given, o=options: (
                pde_attention(*g, is_causal=True, pde="diffusion", **o).sum().backward()
            )
            row[name] = 1e3 * seconds(run, 3)
        rows.append(row)
    return rows


# ---- measured in one and two processes


def worker(folder: str) -> None:
    """Context-parallel attention and a training, in as many processes as there are."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"attention": [], "training": None}
    for count in (2048, 8192):
        for zigzag in (False, True):
            parts = Parts.split(count, processes, zigzag)
            given = [torch.randn(1, HEADS, parts.tokens, DIM) for _ in range(3)]
            own = [parts.take(x, rank).requires_grad_() for x in given]
            for is_causal in (False, True):

                def run(own=own, parts=parts, is_causal=is_causal) -> None:
                    out = context_parallel_attention(
                        *own, "diffusion", steps=STEPS, is_causal=is_causal, parts=parts
                    )
                    out.sum().backward()
                    dist.barrier()

                spent, sent = seconds(run), counted(run)
                found["attention"].append(
                    {
                        "tokens": count,
                        "zigzag": zigzag,
                        "causal": is_causal,
                        "milliseconds": 1e3 * spent,
                        "sent": sent,
                    }
                )
    found["training"] = train_once(rank)
    everyone: list[Any] = [None] * processes
    dist.all_gather_object(everyone, found)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


def counted(run: Callable[[], None]) -> int:
    """Bytes that this process sends meanwhile, from one process to another."""
    total, real = 0, dist.batch_isend_irecv

    def counting(operations: list[Any]) -> Any:
        nonlocal total
        total += sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return real(operations)

    dist.batch_isend_irecv = counting
    try:
        run()
    finally:
        dist.batch_isend_irecv = real
    return total


def train_once(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = LanguageModel(
        256, dim=128, heads=4, layers=4, hidden=256, max_tokens=128, dropout=0.0, pde="diffusion"
    )
    ids = torch.randint(256, (256, 129), generator=torch.Generator().manual_seed(1))
    batches = list(ids.split(32 // dist.get_world_size()))

    def loss(model: Any, ids: Any) -> Any:
        return torch.nn.functional.cross_entropy(
            model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none"
        )

    recipe = Recipe(epochs=2, optimiser="adamw", learning_rate=1e-3, precision="fp32", crop=0)
    began = time.process_time()
    rows = train(model, batches, None, recipe, loss=loss, device="cpu").rows
    spent = time.process_time() - began
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "losses": [row["train_loss"] for row in rows],
        "milliseconds_a_step": 1e3 * spent / (2 * 256 // 32),
    }  # fmt: skip


def in_processes(count: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
                   "-m", "benchmarks.scale", "worker", folder]  # fmt: skip
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(Path(folder, "found.json").read_text())


# ---- computed


def exchanged(
    tokens: int, processes: int, causal: bool, key_heads: int = HEADS, dim: int = DIM, steps: int = STEPS,
    size: int = 4, wide: int = 4, zigzag: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Bytes that a process in the middle sends in a forward and backward of a layer, for one text.

    Parts of equal length, longer than twice the reach; value dim = dim. `size` and `wide` are bytes of
    a number, and of one in which gradients are summed. Heads of query that share a key are not counted.
    """
    token, own, runs = key_heads * dim, tokens / processes, 1 + zigzag
    halo = (
        runs * (3 if causal else 2) * steps * token * size
    )  # steps keys and twice as many values, or both sides
    ring = (processes - 1) * own * 2 * token
    return {"halo": 2 * halo if processes > 1 else 0, "ring": ring * (2 * size + wide)}


def main() -> None:
    torch.set_num_threads(1)
    one = {"trajectories": trajectories(), "dimension": dimension(), "tokens": tokens()}
    several = {str(count): in_processes(count) for count in (1, 2)}
    save("scale", {**one, "processes": several})
    write_pages()


# ---- the page


def load() -> dict[str, Any]:
    return json.loads((FOLDER / "scale.json").read_text())


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def few(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def megabytes(x: float) -> str:
    return f"{x / 1e6:,.0f}" if x >= 1e8 else f"{x / 1e6:.3g}"


def growth_of_solving() -> str:
    found = load()
    rows = [
        [f"{r['trajectories']:,}", few(r["milliseconds"]), few(r["ns"])] for r in found["trajectories"]
    ]
    text = table(["trajectories", "100 steps, ms", "a step of one, ns"], rows)
    rows = [
        [str(20 * r["size"]), few(r["springs"]), str(2 * r["size"]), few(r["links"])]
        for r in found["dimension"]
    ]
    head = ["dimension of a chain of springs", "10 steps, ms", "of a chain of pendulums", "10 steps, ms"]
    return text + "\n" + table(head, rows)


def growth_with_tokens() -> str:
    rows = [
        [
            f"{r['tokens']:,}",
            few(r["stepped"]),
            few(r["without a PDE"]),
            f"{r['stepped'] / r['without a PDE']:.2f}",
        ]
        for r in load()["tokens"]
    ]
    return table(["tokens", f"{STEPS} steps of diffusion, ms", "no PDE, ms", "ratio"], rows)


def growth_with_processes() -> str:
    found, rows = load()["processes"], []
    for r in found["1"][0]["attention"]:
        if r["zigzag"]:
            continue
        alike = [
            [x for x in own["attention"] if (x["tokens"], x["causal"]) == (r["tokens"], r["causal"])]
            for own in found["2"]
        ]
        apart, zigzag = (max(own[n]["milliseconds"] for own in alike) for n in (0, 1))
        sent = max(own[0]["sent"] for own in alike)
        expected = sum(exchanged(r["tokens"], 2, r["causal"]).values())
        rows.append(
            [f"{r['tokens']:,}{', causal' if r['causal'] else ''}", few(r["milliseconds"]), few(apart), few(zigzag),
             megabytes(sent), megabytes(expected)]
        )  # fmt: skip
    head = [
        "tokens",
        "one process, ms",
        "two, a run each",
        "two, zigzag",
        "sent by one, MB",
        "computed, at most",
    ]
    one, two = found["1"][0]["training"], found["2"][0]["training"]
    apart = max(abs(a - b) / abs(a) for a, b in zip(one["losses"], two["losses"]))
    return table(head, rows) + (
        f"\nTraining a language model of {one['parameters']:,} parameters, 32 texts of 128 tokens a step: "
        f"{few(one['milliseconds_a_step'])} ms in one process, {few(two['milliseconds_a_step'])} ms in two, which "
        f"exchange {megabytes(4 * one['parameters'])} MB of gradients; losses in float32 agree to {apart:.0e}.\n"
    )


def large_exchanges() -> str:
    rows = []
    for processes in (2, 8, 64):
        found = exchanged(1 << 20, processes, True, key_heads=32, dim=128, size=2, wide=4)
        memory = (1 << 20) / processes * 32 * 128 * 2
        rows.append(
            [str(processes), f"{(1 << 20) // processes:,}", megabytes(found["halo"]), megabytes(found["ring"]),
             megabytes(4 * memory)]
        )  # fmt: skip
    return table(["processes", "tokens each", "halo, MB", "ring, MB", "q, k, v and output, MB"], rows)


def filled(text: str) -> str:
    return BLOCK.sub(lambda m: m[1] + globals()[m[2]]() + m[3], text)


def write_pages() -> None:
    write_text(PAGE, filled(PAGE.read_text()))
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2])
    elif sys.argv[1:2] == ["pages"]:
        write_pages()
    else:
        main()
