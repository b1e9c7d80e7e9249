"""Benchmarks: results of `attractor bench --out` and of the programs in benchmarks/."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attractor.report import live
from attractor.report.page import Page
from attractor.report.runs.run import ORIGIN, Run, flat, look, read_json
from attractor.storage.schema import listing, plain, record, text

ABOUT = "Times and errors, each compared with a peer in the same run."
BENCHMARK = record({}, {**ORIGIN, "torch": text(), "rows": listing(plain)}, plain)
PLAIN = (str, int, float, bool, type(None))
WIDEST = 10  # columns of a table
DULL = (".graph", "peak_mb", ".ours", ".dense")


def read(path: Path, name: str) -> Run:
    """Read the run in a JSON file with lists of rows."""
    content = read_json(path, BENCHMARK)
    tables = {
        k: v
        for k, v in content.items()
        if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)
    }
    rest = {k: v for k, v in content.items() if k not in (*tables, "command", "versions")}
    failures = sum("failed" in row for rows in tables.values() for row in rows)
    versions = content.get("versions") or ({"torch": content["torch"]} if "torch" in content else {})
    settings = {k: v for k, v in rest.items() if isinstance(v, PLAIN) or k in ("machine", "ceilings")}
    return Run(
        "benchmark",
        name,
        path,
        numbers={"rows": sum(map(len, tables.values())), "failed": failures or None},
        settings=settings,
        versions=versions,
        command=content.get("command", ""),
        content={"tables": tables, "rest": {k: v for k, v in rest.items() if k not in settings}},
    )


def show(page: Page, runs: Sequence[Run]) -> None:
    """Show ratios of attention to its peer if there are any, then all tables."""
    for passes, title in (("forward", "forward"), ("both", "forward and backward")):
        curves: dict[str, live.Line] = {}
        looks: dict[str, Any] = {}
        for i, run in enumerate(runs):
            rows = [r for r in run.content["tables"].get("rows", ()) if isinstance(r.get(passes), dict)]
            for j, kind in enumerate(dict.fromkeys(r["kind"] for r in rows if "ratio" in r[passes])):
                points = sorted((r["tokens"], r[passes]["ratio"]) for r in rows if r["kind"] == kind)
                label = f"{run.name}: {kind}" if len(runs) > 1 else kind
                curves[label] = [x for x, _ in points], [y for _, y in points]
                looks[label] = look(j, i)
        if curves:
            figure = live.lines(
                curves, x="tokens", y=f"times the peer, {title}", log="x", looks=looks, marks=True
            )
            figure["layout"]["xaxis"] |= {"tickvals": sorted({t for x, _ in curves.values() for t in x})}
            caption = (
                "Time of PDE attention divided by the time of attention without a PDE in the same run; "
                "1 means equal times."
            )
            page.plot(f"Ratio to the peer, {title}", figure, 360, caption)
    for run in runs:
        for key, rows in run.content["tables"].items():
            page.text(f"{run.name}: {key}")
            kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
            for row in rows:  # group rows with the same columns
                kinds.setdefault(tuple(row), []).append(row)
            for group in kinds.values():
                _table(page, group)
        for key, value in run.content["rest"].items():
            lines = flat(value) if isinstance(value, dict) else {key: str(value)[:200]}
            if lines:
                page.text(f"{run.name}: {key}")
                page.table(["", ""], [[k, v] for k, v in list(lines.items())[:60]])


def _table(page: Page, rows: Sequence[dict[str, Any]]) -> None:
    """Show a table with at most `WIDEST` columns, preferably those that vary."""
    lines = [{k: v for k, v in flat(row).items() if isinstance(v, PLAIN)} for row in rows]
    keys = [k for k in dict.fromkeys(k for line in lines for k in line) if not k.endswith(DULL)]
    varying = [k for k in keys if len({str(line.get(k)) for line in lines}) > 1]
    columns = sorted((varying or keys)[:WIDEST], key=lambda k: not isinstance(lines[0].get(k), str))
    page.table(columns, [[line.get(k) for k in columns] for line in lines])
