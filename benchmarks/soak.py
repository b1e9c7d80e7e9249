"""Does anything stay behind? Memory, open files and threads of this process while functions are called.

    python -m benchmarks.soak                     # 10,000 calls of each hot function
    python -m benchmarks.soak --minutes 60        # and then mixed work for an hour
    python -m benchmarks.soak --minutes 60 --no-hot  # that alone; the file keeps the other part

After a warm-up a hot function may let the process grow by less than 1 MB in 10,000 calls, and must leave
as many files and threads as it found. In mixed work (training, checkpoints, solves, fits, attention, a
cache, the command line) the memory of the last quarter must not exceed that of the second by more than
2 %. Numbers of ``/proc/self``, so Linux only.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_ARENA_MAX", "1")  # of glibc: so that freed memory can be told from leaked

import torch

import attractor as at
from attractor.attention import PDEAttention, PDECache, performer_attention, window_attention
from attractor.attention.performer import RandomFeatures
from attractor.storage.files import write_json
from benchmarks.results import FOLDER, save

CALLS, WARM_UP, ALLOWED = 10_000, 500, 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process in memory, after a collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def handles() -> tuple[int, int]:
    """Open files, and threads."""
    files, threads = (len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))
    return files, threads


def hot_functions() -> dict[str, Callable[[], Any]]:
    """What programs call again and again, on small tensors so that 10,000 calls take seconds."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    query, key, value = randn(3, 1, 2, 16, 8)
    pendulum, lorenz = at.systems.PendulumChain(2), at.systems.Lorenz()
    u = pendulum.sample(4, generator, torch.float64)
    t = torch.linspace(0, 0.5, 6, dtype=torch.float64)
    correction = at.corrections.AttNS(4, width=16, dtype=torch.float64)
    solver = at.HybridSolver(pendulum, "rk4", correction, 0.1)
    f, x = randn(2, 16, 4, 4), randn(2, 16, 4, 4)
    nsi, stage = randn(4, 6).abs(), torch.tensor([0, 0, 0, 1, 1, 1])
    layer, tokens = PDEAttention(16, 2, causal=True), randn(1, 8, 16)
    model = at.attention.LanguageModel(11, dim=8, heads=2, layers=1, hidden=8, max_tokens=16).eval()
    ids = torch.randint(11, (1, 8), generator=generator)
    features = RandomFeatures(8, 16, generator=generator)
    network = at.residual.ResNet(at.residual.resnet.BasicBlock, [1], [4], 3).eval()
    images = randn(2, 3, 8, 8)
    trajectory = at.evolve(pendulum, u, t)

    def cached() -> Any:
        cache = PDECache("diffusion", steps=2)
        cache.attend(query, key, value)
        return cache.attend(query[:, :, :1], key[:, :, :1], value[:, :, :1])

    def trained() -> None:
        layer(tokens).square().sum().backward()
        layer.zero_grad()

    attend: Any = lambda pde, **options: (
        lambda: at.pde_attention(query, key, value, pde=pde, steps=3, **options)
    )
    gates = {
        f"gates.{name}": (lambda gate: lambda: (gate.start(), gate(f, x)))(make(16).eval())
        for name, make in at.gates.BY_NAME.items()
    }
    return {
        **{
            f"pde_attention {p}": attend(p)
            for p in ("diffusion", "wave", "reaction_diffusion", "advection_diffusion")
        },
        "pde_attention causal": attend("diffusion", is_causal=True),
        "pde_attention tiled": attend("reaction_diffusion", method="tiled"),
        "pde_attention padded": attend("wave", key_padding=torch.ones(1, 16, dtype=torch.bool)),
        "window_attention": lambda: window_attention(
            query, key, value, window=3, global_tokens=1, pde="diffusion"
        ),
        "performer_attention": lambda: performer_attention(
            query, key, value, features=features, pde="diffusion"
        ),
        "PDECache.attend": cached,
        "PDEAttention forward and backward": trained,
        "LanguageModel": lambda: model(ids),
        "trace": lambda: at.attention.trace(query, key, pde="diffusion").entropy,
        "assert_causal": lambda: at.assert_causal(lambda x: x.cumsum(-2), tokens[0, :3]),
        "evolve": lambda: at.evolve(pendulum, u, t),
        "evolve, lost": lambda: at.evolve(lambda t, u: 1e200 * u * u, u, t),
        "evolve, error control": lambda: at.evolve(lorenz, torch.ones(2, 3), t, "bosh3", rtol=1e-3),
        "evolve, gradients": lambda: (
            at.evolve(pendulum, u.clone().requires_grad_(), t).final.sum().backward()
        ),
        "odeint": lambda: at.odeint(
            lambda t, y: -y, torch.ones(2), torch.tensor([0.0, 0.1]), method="rk4"
        ),
        "HybridSolver.step": lambda: solver.step(u),
        "HybridSolver.solve": lambda: solver.solve(u, 0.3),
        "AttNS": lambda: correction(u, u, 0.1),
        "System.sample": lambda: lorenz.sample(4, generator),
        "stiffness_index": lambda: at.stiffness.stiffness_index(pendulum, u),
        "stiffness_aware_index": lambda: at.stiffness.stiffness_aware_index(trajectory),
        "total_neural_stiffness": lambda: at.stiffness.total_neural_stiffness(nsi, stage),
        "ResNet": lambda: network(images),
        **gates,
        "a refusal": lambda: refused(query, key, value),
    }


def refused(query: Any, key: Any, value: Any) -> None:
    """An error holds frames, and these hold tensors: they must go with it."""
    with contextlib.suppress(ValueError):
        at.pde_attention(query, key[..., :3], value, pde="diffusion")


def hot(name: str, function: Callable[[], Any], calls: int) -> dict[str, Any]:
    """Growth of the process in so many calls after a warm-up; the smaller of two rounds is the leak."""
    for _ in range(WARM_UP):
        function()
    growths, before = [], handles()
    started = time.perf_counter()
    for _ in range(2):  # what an allocator takes once, such as a fuller arena, it does not take twice
        start = resident()
        for _ in range(calls // 2):
            function()
        growths.append(resident() - start)
    seconds = time.perf_counter() - started
    return {
        "function": name,
        "calls": calls,
        "growth_bytes": sum(growths),
        "growth_of_halves": growths,
        "files": [before[0], handles()[0]],
        "threads": [before[1], handles()[1]],
        "microseconds": 1e6 * seconds / calls,
        "ok": sum(growths) < ALLOWED and before == handles(),
    }


# Mixed work


def mixed_jobs(folder: Path) -> dict[str, Callable[[int], Any]]:
    """Work of every wing, each a fraction of a second; the argument is a seed."""
    from typer.testing import CliRunner

    from attractor.cli import app
    from attractor.data import text
    from attractor.residual import resnet_cifar
    from attractor.train import Recipe, train

    pendulum = at.systems.PendulumChain(2)

    def fit(seed: int) -> None:
        solver = at.fit(at.systems.HarmonicOscillator(), dt=0.2, horizon=1.0, trajectories=16, width=16, seed=seed,
                        correction="attns")  # fmt: skip
        solver.save(folder / "solver")
        at.HybridSolver.load(folder / "solver").solve(
            torch.ones(3, 2, dtype=torch.float64), 1.0, guard=True
        )

    def training(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        batches = [
            (torch.randn(16, 3, 8, 8, generator=generator), torch.randint(3, (16,), generator=generator))
            for _ in range(2)
        ]
        model, out = resnet_cifar(20, 3, gate="stepnet", width=4), folder / "run"
        anew = {"out": out, "resume": False}  # every seed has other batches and weights
        train(model, batches, None, Recipe(epochs=1, batch=16, warmup=0.5), **anew)
        anew["out"] = folder / "other"
        train(model, batches, None, Recipe(epochs=2, batch=16, warmup=0.5), **anew)

    def writing(seed: int) -> None:
        model = at.attention.LanguageModel(
            257, dim=16, heads=2, layers=2, hidden=16, max_tokens=32, pde="wave"
        )
        ids = text.stream(["a line", "another"], text.Bytes())[None, :8]
        model.generate(ids, 8, generator=torch.Generator().manual_seed(seed))
        model(ids).logsumexp(-1).sum().backward()

    def probing(seed: int) -> None:
        at.probe(resnet_cifar(11, 3, gate="se", width=4), [torch.randn(4, 3, 8, 8)]).summary()

    def command(seed: int) -> None:
        assert CliRunner().invoke(app, ["fit", "lorentz"]).exit_code == 2

    return {
        "evolve": lambda seed: at.evolve(pendulum, pendulum.sample(20), torch.linspace(0, 2, 101)),
        "adaptive": lambda seed: at.evolve(at.systems.Lorenz(), torch.ones(5, 3), torch.tensor([0.0, 2.0]), "dopri5", rtol=1e-5),
        "attention": lambda seed: at.pde_attention(*torch.randn(3, 2, 4, 64 + seed % 64, 16), is_causal=True, pde="diffusion"),
        "reaction": lambda seed: at.pde_attention(*torch.randn(3, 1, 2, 64 + seed % 64, 16), pde="reaction_diffusion"),
        "fit": fit, "training": training, "language model": writing, "probing": probing, "command": command,
    }  # fmt: skip


def mixed(minutes: float, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Mixed work for so many minutes, looked at about a hundred times."""
    import shutil

    samples: list[dict[str, float]] = []
    counts: dict[str, int] = {}
    skipped: dict[str, str] = {}
    started = looked = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = mixed_jobs(folder)
        for seed in itertools.count():
            for job, run in list(jobs.items()):
                if job in skipped:
                    continue
                try:
                    run(seed)
                except Exception as error:
                    if seed:
                        raise
                    skipped[job] = f"{type(error).__name__}: {error}"[:300]  # not here at all
                    continue
                counts[job] = counts.get(job, 0) + 1
            for old in folder.iterdir():
                shutil.rmtree(old, ignore_errors=True)
            now = time.monotonic()
            if now - looked >= 0.6 * minutes or seed == 0:
                looked = now
                files, threads = handles()
                samples.append(
                    {
                        "seconds": now - started,
                        "resident": resident(),
                        "files": files,
                        "threads": threads,
                    }
                )
                tell(samples[-1])
            if now - started >= 60 * minutes:
                break
    quarter = max(1, len(samples) // 4)
    second = statistics.median(s["resident"] for s in samples[quarter : 2 * quarter] or samples)
    last = statistics.median(s["resident"] for s in samples[-quarter:])
    same = (
        all(samples[quarter][key] == samples[-1][key] for key in ("files", "threads"))
        if len(samples) > quarter
        else True
    )
    return {
        "minutes": minutes,
        "rounds": counts,
        "skipped": skipped,
        "second_quarter_bytes": second,
        "last_quarter_bytes": last,
        "growth": last / second - 1,
        "python_threads": threading.active_count(),
        "ok": last <= 1.02 * second and same and not skipped,
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument(
        "--only", action="append", default=[], help="hot functions whose name has this in it"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="of mixed work, after the hot functions"
    )
    parser.add_argument("--no-hot", action="store_true", help="mixed work alone")
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/soak.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, function in ({} if options.no_hot else hot_functions()).items():
        if options.only and not any(part in name for part in options.only):
            continue
        row = hot(name, function, options.calls)
        rows.append(row)
        print(
            f"{name:38} {row['calls']:6,} calls {row['microseconds']:8.0f} µs  {row['growth_bytes'] / 1024:+7.0f} KiB  "
            f"files {row['files']} threads {row['threads']}  {'ok' if row['ok'] else 'GROWS'}",
            flush=True,
        )
    path = options.out or FOLDER / "soak.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    content: dict[str, Any] = {key: before[key] for key in ("hot", "mixed") if key in before}
    if not options.no_hot:
        content["hot"] = rows
    if options.minutes:
        tell = lambda s: print(
            f"{s['seconds']:7.0f} s  {s['resident'] / 2**20:8.1f} MiB  {s['files']} files  {s['threads']} threads",
            flush=True,
        )
        content["mixed"] = mixed(options.minutes, tell)
        found = content["mixed"]
        print(
            f"mixed work: {found['rounds']}, memory {found['growth']:+.2%}, skipped {found['skipped']}, {'ok' if found['ok'] else 'GROWS'}"
        )
    if options.out:
        write_json(options.out, content)
    else:
        save("soak", content)
    good = [row["ok"] for row in rows] + ([content["mixed"]["ok"]] if options.minutes else [])
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
