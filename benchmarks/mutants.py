"""Mutation check: how many small random faults in ``src/`` do the tests notice?

Each mutant changes one expression of the library: a comparison, an operator, a constant, a condition, or a
call whose result is not used. The mutant is applied to a copy of the repository, and the tests run there
until the first failure, the tests that mirror the changed file first. A mutant that no test notices
survives; some survivors are equivalent to the original.

    python -m benchmarks.mutants --count 40 --seed 0                          # the tests of `make test`
    python -m benchmarks.mutants --only 3,17 --markers "slow and not gpu" --tests tests/attention   # those of test-all

Results are written to benchmarks/results/mutants.json after each mutant; a mutant that has a result for the
same selection of tests is not run again. Results of other sources are discarded.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from attractor.storage.files import write_json

ROOT = Path(__file__).parents[1]
SOURCES = "src/attractor"
RESULTS = ROOT / "benchmarks/results/mutants.json"
QUICK = "not slow and not gpu"
LIMIT = 3600  # seconds that the tests of one mutant may take
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Mod: ast.Add,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed expression.

    Attributes:
        file: path below the repository's root.
        line: number of the line.
        before, after: the expression and what replaces it.
        start, stop: positions in the source, in characters.
    """

    file: str
    line: int
    before: str
    after: str
    start: int
    stop: int


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node in _expressions(ast.parse(source)):
        for changed in _changes(node):
            start = place(node.lineno, node.col_offset)
            stop = place(node.end_lineno, node.end_col_offset)
            before, after = source[start:stop], ast.unparse(ast.fix_missing_locations(changed))
            after = f"({after})" if isinstance(node, ast.expr) else after
            name = path.relative_to(ROOT).as_posix()
            yield Mutant(name, node.lineno, before, after, start, stop)


def _expressions(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, no text of messages, no default of a type checker."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.JoinedStr):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield node
                yield from _expressions(node)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(op)](), node.right)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield node.operand
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value if value else 1.0)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()


def choose(count: int, seed: int) -> list[Mutant]:
    """Mutants drawn evenly from all of the library's."""
    files = sorted((ROOT / SOURCES).rglob("*.py"))
    everything = [mutant for path in files for mutant in mutants_of(path)]
    return random.Random(seed).sample(everything, count)


def judge(mutant: Mutant, folder: Path, markers: str, tests: list[str]) -> dict[str, object]:
    """Whether a test fails with this mutant in place, which one, and how long it took."""
    path = folder / mutant.file
    source = path.read_text()
    path.write_text(source[: mutant.start] + mutant.after + source[mutant.stop :])
    began = time.monotonic()
    try:
        for group in [tests] if tests else _groups(mutant.file, folder):
            failed = _run(group, folder, markers)
            if failed is not None:
                return {"caught": True, "by": failed, "seconds": round(time.monotonic() - began)}
    finally:
        path.write_text(source)
    return {"caught": False, "seconds": round(time.monotonic() - began)}


def _groups(file: str, folder: Path) -> list[list[str]]:
    """The tests of the changed file's folder and the contracts first, then all."""
    room = Path(file).relative_to(SOURCES).parts[0].removesuffix(".py")
    near = [name for name in (f"tests/{room}", "tests/contracts.py") if (folder / name).exists()]
    return [near, ["tests"]]


def _run(tests: list[str], folder: Path, markers: str) -> str | None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        markers,
        *tests,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(folder)]),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return "time limit"
    if done.returncode in (0, 5):  # 5: no test was selected
        return None
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0][:200] if failures else f"exit status {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markers", default=QUICK, help="pytest's -m expression")
    parser.add_argument("--only", default="", help="numbers of the mutants to run, separated by commas")
    parser.add_argument(
        "--tests", nargs="*", default=[], help="files and folders of tests; all by default"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    chosen = choose(options.count, options.seed)
    suite = " in ".join([options.markers, *([" ".join(options.tests)] if options.tests else [])])
    only = {int(x) for x in options.only.split(",") if x} or set(range(len(chosen)))
    saved = json.loads(options.out.read_text()) if options.out.exists() else {}
    if saved.get("seed") != options.seed:
        saved = {"seed": options.seed, "mutants": {}}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "repository"
        shutil.copytree(
            ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "out", ".*_cache", "carry")
        )
        for number, mutant in enumerate(chosen):
            row = saved["mutants"].get(str(number), {})
            if any(row.get(key) != value for key, value in asdict(mutant).items()):  # of other sources
                row = saved["mutants"][str(number)] = {**asdict(mutant), "verdicts": {}}
            if number not in only or suite in row["verdicts"]:
                continue
            row["verdicts"][suite] = judge(mutant, folder, options.markers, options.tests)
            print(number, f"{mutant.file}:{mutant.line}", mutant.before[:40], "->", mutant.after[:40],
                  row["verdicts"][suite], flush=True)  # fmt: skip
            write_json(options.out, saved)
    verdicts = [row["verdicts"].get(suite) for row in saved["mutants"].values()]
    judged = [verdict for verdict in verdicts if verdict]
    print(f"{sum(v['caught'] for v in judged)} of {len(judged)} mutants were caught ({suite})")


if __name__ == "__main__":
    main()
