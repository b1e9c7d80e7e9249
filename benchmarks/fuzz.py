"""Every public function with thousands of inputs that a user might give it by mistake.

    python -m benchmarks.fuzz                     # all of them, a process a core
    python -m benchmarks.fuzz --only pdes --calls 500

10,000 inputs for a function whose call takes under 5 ms, 300 for the others; what must hold is in
`tests/fuzz/judging.py`, the functions and their arguments in `tests/fuzz/targets`. A finished function
without findings is kept in ``benchmarks/results/fuzz.json`` and not run again before it is asked for by ``--again``.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

FAST, SLOW = 10_000, 300
PORTION = 250
QUICK = 5e-3  # seconds: below it a function is tried FAST times


def campaign(name: str, calls: int | None, seed: int, seconds: float = float("inf")) -> dict[str, Any]:
    """Try one function; what was seen."""
    import torch
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st
    from hypothesis.errors import HypothesisException

    from tests.fuzz.judging import TARGETS, Call, Tally, watched
    from tests.fuzz.strategies import Maker

    torch.set_num_threads(1)
    which, tally = TARGETS[name], Tally()
    spent = [0.0]
    wanted = calls or (SLOW if which.slow else FAST)

    @st.composite
    def examples(draw: Any) -> tuple[Maker, Any]:
        maker = Maker(draw)
        try:
            return maker, which.make(maker)
        except HypothesisException:
            raise
        except Exception as error:  # the target's own fault; the campaign goes on
            told = f"{type(error).__name__}: {error}"
            return maker, Call(lambda: broken(told))

    def once(limit: int, number: int) -> None:
        @seeded(number)
        @settings(max_examples=limit, deadline=None, database=None, phases=(Phase.generate,),
                  suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet)  # fmt: skip
        @given(examples())
        def trial(example: tuple[Maker, Any]) -> None:
            if tally.calls >= wanted or time.perf_counter() - started > seconds:
                return
            begin = time.perf_counter()
            tally.add(which, *example)
            spent[0] += time.perf_counter() - begin

        with watched():
            trial()

    started = time.perf_counter()
    for number in range(10 * wanted):  # in portions: what Hypothesis remembers makes it slow
        before = tally.calls
        once(min(PORTION, wanted - tally.calls), 1_000_003 * seed + number)
        if tally.calls >= wanted or tally.calls == before or time.perf_counter() - started > seconds:
            break
    return {
        "calls": tally.calls,
        "milliseconds": 1e3 * spent[0] / max(1, tally.calls),
        "slow": which.slow,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "findings": tally.findings,
        "known": tally.known,
        "seed": seed,
    }


def broken(told: str) -> None:
    """Stand for a call that a target could not make."""
    raise RuntimeError(f"the target is broken: {told}")


def work(job: tuple[str, int | None, int, float]) -> tuple[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    import tests.fuzz.targets  # noqa: F401

    return job[0], campaign(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", action="append", default=[], help="functions whose name has this in it"
    )
    parser.add_argument("--calls", type=int, help="instead of 10,000 and 300")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--again", action="store_true", help="also what is in the file already")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for a function at most")
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/fuzz.json")
    options = parser.parse_args()

    import tests.fuzz.targets  # noqa: F401
    from attractor.storage.files import write_json
    from benchmarks.results import FOLDER, save
    from tests.fuzz.judging import TARGETS
    from tests.fuzz.surface import missing_package

    path = options.out or FOLDER / "fuzz.json"
    done = json.loads(path.read_text())["functions"] if path.exists() else {}
    done = {name: row for name, row in done.items() if name in TARGETS}
    enough = lambda name: (
        name in done
        and not done[name]["findings"]
        and done[name]["calls"] >= (options.calls or (SLOW if TARGETS[name].slow else FAST))
    )
    names = [n for n in TARGETS if not options.only or any(part in n for part in options.only)]
    names = [n for n in names if not missing_package(TARGETS[n]) and (options.again or not enough(n))]
    jobs = [(n, options.calls, options.seed, options.seconds) for n in names]

    def keep() -> None:
        rows = dict(sorted(done.items()))
        total = sum(row["calls"] for row in rows.values())
        content = {
            "calls": total,
            "findings": sum(len(r["findings"]) for r in rows.values()),
            "functions": rows,
        }
        if options.out:
            write_json(options.out, content)
        else:
            save("fuzz", content)

    context = multiprocessing.get_context("spawn")
    with context.Pool(min(options.processes, max(1, len(jobs))), maxtasksperchild=64) as pool:
        for name, row in pool.imap_unordered(work, jobs):
            done[name] = row
            print(
                f"{name:52} {row['calls']:6,} calls {row['milliseconds']:7.2f} ms  {len(row['findings'])} findings",
                flush=True,
            )
            for key, entry in row["findings"].items():
                print(f"    {entry['count']:5} x {key}: {entry['what'][:220]}", flush=True)
            write_json(path, {"functions": done})
    keep()
    found = sum(len(done[n]["findings"]) for n in names)
    print(f"{len(names)} functions, {sum(done[n]['calls'] for n in names):,} calls, {found} findings")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
