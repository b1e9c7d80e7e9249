"""Put the numbers of benchmarks/results/ and experiments/results/ into the tables of README and docs.

``python -m benchmarks.pages`` rewrites what stands between ``<!-- results: NAME -->`` and
``<!-- end -->``; the tests compare.
"""

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from attractor.ode.tuning import TuningReport
from attractor.reproduce import Results, find
from attractor.reproduce import results as kept
from attractor.reproduce.effects import number
from attractor.reproduce.page import anchor
from attractor.reproduce.summary import command as command_line
from attractor.reproduce.summary import largest, mean_text
from attractor.storage.files import write_text
from benchmarks.cases import number as real
from benchmarks.untuned import held
from experiments.pde_artefact import PAIRS, path_shares
from experiments.stepnet_shared import STEPS, compared

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PASSES = {"forward": "forward alone", "both": "with backward"}
# Arms of StepNet's Table 4, as the page on networks calls them.
VARIANTS = {
    "F(x_t)": "stepnet, sees x_t", "F(x_t+1)": "stepnet, sees x_t+1", "F(x_t+1 - x_t)": "stepnet, sees f",
    **{f"adaptor {a}": f"adaptor {a}" for a in "abcd"},
}  # fmt: skip


def load(name: str, folder: str = "benchmarks") -> dict[str, Any]:
    return json.loads((ROOT / folder / "results" / f"{name}.json").read_text())


def measured(name: str) -> bool:
    return (ROOT / "benchmarks" / "results" / f"{name}.json").exists()


def reproduced(name: str, scale: str) -> Results:
    """The runs of an experiment of `attractor reproduce`."""
    return kept.load(find(name), scale, ROOT / "experiments" / "results")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def order() -> str:
    rows = [
        [r["scheme"], str(r["order"]), str(len(r["slopes"])), f"{r['least']:.3f}", f"{r['median']:.3f}"]
        for r in load("order")["schemes"]
    ]
    head = ["scheme", "order", "problems", "least measured", "median"]
    return command("order") + table(head, rows)


def detest() -> str:
    found = load("detest")["rows"]
    columns = [key for key in found[0] if key != "problem"]
    number = lambda x: f"{x:.1e}" if isinstance(x, float) else str(x)
    rows = [[r["problem"], *(number(r[c]) for c in columns)] for r in found]
    text = (
        "The 25 non-stiff problems of Hull, Enright, Fellen and Sedgwick (1972) on [0, 20]: largest "
        "error at the end against SciPy's DOP853 at 1e-12, rk4 with 2,000 and 4,000 steps, dopri5 at "
        "three tolerances with its rate calls.\n\n"
    )
    return command("detest") + text + table(["problem", *columns], rows)


def energy() -> str:
    found = load("energy")
    rows = [[s, f"{x[0]:.1e}", f"{x[4]:.1e}", f"{x[-1]:.1e}"] for s, x in found["tenths"].items()]
    text = (
        f"Hénon-Heiles, {found['steps']:,} steps of {found['dt']}, ten orbits: largest relative energy "
        "error in the first, fifth and last tenth of the time.\n\n"
    )
    return command("energy") + text + table(["scheme", "first", "fifth", "last"], rows)


def control() -> str:
    found = load("control")
    number = lambda x: "" if x is None else f"{1e3 * x:.3g}"
    seconds = lambda group, name: (group.get(name) or {}).get("seconds")
    best = lambda group: min((x["seconds"] for x in group.values() if x), default=None)
    rows, ratios = [], []
    for r in found["rows"]:
        own, peers = best(r["attractor"]), [best(r["scipy"]), best(r.get("diffrax", {}))]
        rows.append([
            r["case"], f"{r['error']:.0e}", f"{r['batch']:,}",
            *(number(seconds(r["attractor"], name)) for name in ("tsit5", "dop853")),
            *map(number, peers),
        ])  # fmt: skip
        fastest = min((x for x in peers if x is not None), default=None)
        if own is not None and fastest is not None:
            ratios.append(fastest / own)
    first = [x["first"] for r in found["rows"] for x in r["attractor"].values() if x]
    text = (
        "Milliseconds to an error, compiled, on a CPU with "
        f"{found['threads']} thread{'s' * (found['threads'] > 1)}: the largest tolerance that reaches it. "
        "SciPy is DOP853 on the same torch rate for the whole batch, and diffrax is the faster one of Tsit5 and "
        "Dopri8, also for the whole batch. The better scheme of this library is "
        f"{min(ratios):.2g} to {max(ratios):.2g} times as fast as the better of both, median "
        f"{statistics.median(ratios):.2g}; a first call takes {statistics.median(first):.1f} s.\n\n"
    )
    head = ["equation", "error", "trajectories", "tsit5", "dop853", "SciPy", "diffrax"]
    return command("control") + text + table(head, rows)


def fields() -> str:
    """Errors and times of plain and corrected grids, and the ratio of times at equal error."""
    kept, rows = load("fields"), []
    ms = lambda seconds: f"{1e3 * seconds:.3g} ms"
    for r in kept["plain"]:
        name, best = min(r["schemes"].items(), key=lambda item: item[1]["seconds"]["100"])
        rows.append([
            f"plain, order {r['order']}, {r['cells']} cells", f"{name}, {best['steps']} steps",
            f"{best['error']:.1e}", ms(best["seconds"]["1"]), ms(best["seconds"]["100"]), "", "",
        ])  # fmt: skip
    for r in kept["hybrid"]:
        gains = [field_gain(kept, r, order) for order in (2, 4)]
        rows.append([
            f"corrected, {r['cells']} cells", f"{round(kept['horizon'] / r['dt'])} steps, radius "
            f"{r['radius']}, degree {r['degree']}", f"{r['error']:.1e}", ms(r["seconds"]["1"]),
            ms(r["seconds"]["100"]), *("no such grid" if math.isinf(g) else f"{g:.2g}x" for g in gains),
        ])  # fmt: skip
    drift = max(r["mean_drift"] for r in kept["hybrid"])
    fits = [r["fit_seconds"] for r in kept["hybrid"]]
    text = (
        f"Burgers' equation with viscosity {kept['viscosity']:g} to t = {kept['horizon']:g}, CPU time of "
        "one thread, compiled: median relative error of 100 fields that no fit has seen, against the exact solution. "
        "Plain grids take the fewest steps that leave the error of the grid. The last columns say how "
        "many times as long the fastest plain grid takes that reaches the error of the corrected one. "
        f"Fits took {min(fits):.0f} to {max(fits):.0f} s; the mean of a field changes by at most "
        f"{drift:.0e}.\n\n"
    )
    head = ["grid", "steps", "error", "1 field", "100 fields", "gain over order 2", "gain over order 4"]
    return command("fields") + text + table(head, rows)


def field_gain(kept: dict[str, Any], row: dict[str, Any], order: int) -> float:
    """Return how many times as long the fastest plain grid takes that is as accurate; inf for none."""
    plain = (s for p in kept["plain"] if p["order"] == order for s in p["schemes"].values())
    times = (s["seconds"]["100"] for s in plain if s["error"] <= row["error"])
    return min(times, default=math.inf) / row["seconds"]["100"]


def fields_summary() -> str:
    """Errors of corrected grids, and the ratios of times to plain grids of order 4."""
    kept = load("fields")
    rows = [r for r in kept["hybrid"] if r["cells"] == 64]
    errors, gains = [r["error"] for r in rows], [field_gain(kept, r, 4) for r in rows]
    return (
        f"errors of {min(errors):.0e} to {max(errors):.0e} in {min(gains):.2g} to {max(gains):.2g} times "
        "less time than on plain grids of order 4 that are as accurate (docs/tutorials/fields.md)"
    )


def stiff() -> str:
    found = load("stiff")
    rows = []
    for r in found["rows"]:
        error = f"{r['error']:.1e}" if r.get("ok", True) else "steps ran out"
        first = f"{r['first_call']:.1f}" if "first_call" in r else ""
        rows.append([
            r["system"], r["solver"], f"{r['rtol']:.0e}", error, f"{r['steps']:.0f}",
            f"{r['seconds']:.3g}", first,
        ])  # fmt: skip
    text = (
        f"Errors at the end, steps per trajectory, and seconds of {found['batch']:,} trajectories: "
        "Robertson's reaction to 1e11, HIRES, the Oregonator and Pollution, by compiled schemes of this "
        f"library, SciPy's Radau ({found['looped']} trajectories, scaled to all) and diffrax's compiled "
        f"Kvaerno5 under vmap ({found['mapped']} trajectories, scaled to all, with {found['most_steps']:,} steps at most), "
        f"with the same tolerances. Errors are those of {found['checked']} trajectories, relative to each "
        "component's largest value at the end, against Radau at 1e-10, which differs from the published "
        f"solutions by at most {max(r['reference_difference'] for r in found['rows']):.0e}.\n\n"
    )
    head = ["system", "solver", "rtol", "error", "steps", "seconds", "first call"]
    return command("stiff") + text + table(head, rows)


def stiff_summary() -> str:
    """Ratios of times at errors no larger than those of other libraries with the tolerance 1e-4."""
    content = load("stiff")
    rows = content["rows"]
    ours = [r for r in rows if r["solver"].startswith("rodas")]

    def ratios(solver: str) -> list[float]:
        return [
            peer["seconds"] / min(r["seconds"] for r in ours
                                  if r["system"] == peer["system"] and r["error"] <= peer["error"])
            for peer in rows if peer["solver"] == solver and peer["rtol"] == 1e-4
        ]  # fmt: skip

    texts = [
        f"{min(ratios(solver)):,.0f} to {max(ratios(solver)):,.0f} times faster than {name}"
        for solver, name in (
            ("diffrax Kvaerno5", "diffrax's Kvaerno5"),
            ("SciPy Radau", "SciPy's Radau"),
        )
    ]
    fastest = min(r["seconds"] for r in ours if r["rtol"] == 1e-4)
    slowest = max(r["seconds"] for r in ours if r["rtol"] == 1e-4)
    return (
        f"{fastest:.2g} to {slowest:.2g} s at rtol 1e-4; {' and '.join(texts)} at an error no larger, "
        f"their times scaled from {content['mapped']} and {content['looped']} cells (docs/foundation.md)"
    )


def stepping() -> str:
    found = load("stepping")
    seconds, first, error = found["seconds"], found["first_call"], found["rms_from_float64"]
    rows = [
        [
            name,
            f"{s:.4f}",
            f"{first[name]:.1f}",
            f"{seconds['torchdiffeq'] / s:.1f}x",
            f"{error[name]:.1e}",
        ]
        for name, s in seconds.items()
    ]
    rows.append(["SciPy, one trajectory, times 1,000", f"{found['scipy_scaled']:.0f}", "", "", ""])
    text = (
        f"{found['batch']:,} elastic pendulums, {found['steps']:,} steps of rk4, float32, CPU, final states "
        "only; medians of rounds in which everyone runs once. The error is from the same scheme in "
        "float64.\n\n"
    )
    memory = found["peak_states"]
    return (
        command("stepping") + text
        + table(["", "seconds", "first call", "against torchdiffeq", "rounding error"], rows)
        + f"\nPeak memory beside u0 and the result, in states, with `every=`: eager {memory['eager']:.1f}, "
        f"compiled {memory['compiled']:.1f} (rk4's stages + 3 = 7).\n"
    )  # fmt: skip


def stiffness() -> str:
    s = load("stiffness")
    return command("stiffness") + (
        f"TNS of {s['inputs']:,} inputs and {s['blocks']} blocks takes {s['seconds'] * 1e3:.0f} ms; it equals "
        f"the area of the union of rectangles to {s['union_difference']:.0e} and a sum over 2,000 x 2,000 "
        f"thresholds to {s['grid_difference']:.0e} of its value.\n"
    )


def hybrid() -> str:
    found = load("hybrid")["rows"]
    number = lambda x: "blown up" if x is None or x > 1e6 else f"{x:.1e}"
    rows = [
        [
            r["case"],
            str(r["trajectories"]),
            f"{r['seconds']:.0f} s",
            number(r["plain"]),
            span(r["hybrid"]),
        ]
        for r in found
    ]
    head = ["", "fitted from", "in at most", "plain MSE", "hybrid MSE, three seeds"]
    text = command("hybrid") + table(head, rows)
    far = []
    for r in found:
        for name, f in r.get("far", {}).items():
            far.append([f"{r['case']}, {name}", number(f["mean"]), number(f["p99"]), str(f["lost"])])
    return (
        text
        + "\nStarted far outside, at angles up to pi/2 instead of pi/8:\n\n"
        + table(["", "mean MSE", "99 %", "lost"], far)
    )


def untuned() -> str:
    found = [r for r in load("untuned")["rows"] if "failure" not in r]
    text = f"\nThe default beats rk4 at half the step on {better_than_half(found)} of {len(found)}"
    gain = lambda x: "∞" if x is None else f"{x:.2g}"
    rows = [
        [r["system"], f"{r['dt']:g}", *(f"{real(r[k]['final']):.1e}" for k in ("plain", "half", "hybrid")),
         r["chosen"]["correction"], "yes" if r["comparison"]["pays"] else "no", gain(r["comparison"]["gain"]),
         gain(r["check"]["gain"])]
        for r in found
    ]  # fmt: skip
    pays = sum(r["comparison"]["pays"] for r in found)
    right = sum(map(held, found))
    text += f", `compare` says that it pays on {pays}, and a second measurement confirms {right} of {len(found)} verdicts.\n"
    head = ["relative error of final states", "dt", "rk4", "rk4, half the step", "default", "correction",
            "pays", "gain", "gain, second measurement"]  # fmt: skip
    return command("untuned") + table(head, rows) + text


def stages() -> str:
    names = {"attns_state": "AttNS, also of the state", "attns": "AttNS", "neurvec": "NeurVec", "stages": "Stages",
             "attns_m": "AttNS-m", "csm": "CSM", "fsnet": "FSNet"}  # fmt: skip
    found = [r for r in load("stages")["rows"] if r.get("kind") == "network"]
    rows = [
        [f"{r['system']}, dt {r['dt']:g}, width {r['width']}", names[r["correction"]],
         *(f"{real(r[k]['final']):.1e}" for k in ("plain", "half")),
         span([real(x["final"]) for x in r["hybrid"]]), span_of_times([real(x) for x in r["gain"]])]
        for r in found
    ]  # fmt: skip
    head = ["relative error of final states, five seeds", "correction", "rk4", "rk4, half the step", "hybrid",
            "gain over the fastest other solver"]  # fmt: skip
    return command("stages") + table(head, rows)


def linear_maps() -> str:
    """Return a line per system and scheme for the linear map of the stages, at batch 1,000."""
    rows = []
    for r in load("stages")["rows"]:
        if r.get("kind") != "linear":
            continue
        found, cost = r["comparisons"]["1000"], r["m_star"]["1000"]
        few, all_weights = r["weights"]
        rows.append([
            f"{r['system']}, {r['scheme']}, dt {r['dt']:.3g}", f"{few:,} of {all_weights:,}",
            *(f"{real(r[k]['final']):.1e}" for k in ("plain", "half", "hybrid")),
            "∞" if found["m"] is None else f"{found['m']:.3g}",
            f"{cost['unguarded']:.2f}", f"{cost['guarded']:.2f}",
            "∞" if found["gain"] is None else f"{found['gain']:.2g}", "yes" if found["pays"] else "no",
        ])  # fmt: skip
    head = ["relative error of final states", "weights", "plain", "half the step", "linear map", "m",
            "m*", "m*, guarded", "gain", "pays"]  # fmt: skip
    about = "CPU time of one thread, on a machine with other work. The fastest other solver is one of "
    about += "compiled plain schemes, SciPy's, torchdiffeq's and diffrax's.\n"
    text = "`python -m benchmarks.stages --only linear --threads 1 --cpu-time`\n\n"
    return text + table(head, rows) + "\n" + about


def tuned(**fields: Any) -> list[tuple[dict[str, Any], TuningReport]]:
    """Return the rows of tune with these fields, and their reports."""
    rows = [r for r in load("tune")["rows"] if "report" in r]
    return [
        (r, TuningReport.from_json(r["report"]))
        for r in rows
        if all(r[key] == value for key, value in fields.items())
    ]


def least_seconds(row: dict[str, Any], library: str) -> float | None:
    """Return the time of the fastest method of a library at the error; None if there is none."""
    return min((x["seconds"] for x in row.get(library, {}).values() if x is not None), default=None)


def tune() -> str:
    """Return a line per error and batch, and the equations at the error that most people ask for."""
    rows = []
    median = lambda values: f"{statistics.median(values):.3g}x ({len(values)})" if values else "-"
    for batch in sorted({r["batch"] for r, _ in tuned()}):
        for error in sorted({r["error"] for r, _ in tuned(batch=batch)}, reverse=True):
            part = tuned(batch=batch, error=error)
            gains = [report.speedup for _, report in part if report.winner.is_hybrid]
            rows.append([
                f"{error:g}, {batch:,} trajector{'y' if batch == 1 else 'ies'}",
                f"{len(gains)} of {len(part)}", span_of_times(gains),
                *(
                    median([
                        seconds / report.winner.seconds
                        for r, report in part
                        if (seconds := least_seconds(r, library)) is not None
                    ])
                    for library in ("scipy", "diffrax")
                ),
            ])  # fmt: skip
    head = ["error", "a hybrid wins", "hybrid over the best plain scheme",
            "winner over SciPy's fastest method, median (cases)", "over diffrax's, median (cases)"]  # fmt: skip
    machines = {f"{r['machine']['processor']}, {r['machine']['threads']} threads" for r, _ in tuned()}
    return (
        command("tune") + table(head, rows)
        + f"\nBudget of {load('tune')['budget']:g} s. SciPy's methods are DOP853, and LSODA and Radau for one "
        "trajectory; diffrax's are Tsit5 and Dopri8, compiled, where they were measured. Measured on: "
        f"{'; '.join(sorted(machines))}. With an error of 1e-6 and 1,000 trajectories:\n\n"
        + tuning_rows(tuned(error=1e-6, batch=1000))
    )  # fmt: skip


def tuning() -> str:
    """Return all measurements of tune."""
    return command("tune") + tuning_rows(tuned())


def tuning_rows(found: list[tuple[dict[str, Any], TuningReport]]) -> str:
    milliseconds = lambda x: "-" if x is None else f"{1e3 * x:.3g} ms"
    rows = [
        [
            r["case"], f"{r['error']:g}", f"{r['batch']:,}", str(report.winner),
            milliseconds(report.winner.seconds),
            milliseconds(report.plain.seconds if report.plain else None),
            milliseconds(least_seconds(r, "scipy")), milliseconds(least_seconds(r, "diffrax")),
            "-" if report.break_even is None else f"{report.break_even:,.0f}",
        ]
        for r, report in found
    ]  # fmt: skip
    head = ["", "error", "trajectories", "winner", "time", "best plain scheme", "SciPy", "diffrax",
            "break-even"]  # fmt: skip
    return table(head, rows)


def tuned_summary() -> str:
    """Return how the winners for an error of 1e-6 compare with SciPy, in one sentence."""
    found = tuned(error=1e-6, batch=1000)
    gains = [
        seconds / report.winner.seconds
        for r, report in found
        if (seconds := least_seconds(r, "scipy")) is not None
    ]
    hybrids = sum(report.winner.is_hybrid for _, report in found)
    return (
        f"{len(found)} equations: {span_of_times(gains)} times faster than SciPy's DOP853, median "
        f"{statistics.median(gains):.2g}; the winner is a hybrid {hybrids} times (docs/hybrid.md)"
    )


def sweep() -> str:
    found = [r for r in load("sweep")["rows"] if "failure" not in r]
    rows = []
    for r in found:
        plain, scipy = (
            min(
                (x for x in r["rivals"] if x["name"].startswith("SciPy") == other),
                key=lambda x: x["seconds"],
            )
            for other in (False, True)
        )
        own = statistics.median(x["own"] for x in r["single"])
        even = scipy["break_even"]
        rows.append([
            f"{r['system'].removesuffix(' sweep')}, {r['scheme']}, dt {r['dt']:g}, width {r['width']}",
            *(f"{r[k]['final']:.1e}" for k in ("plain", "half", "hybrid")), f"{own:.1e}",
            f"{1e3 * r['seconds']:.3g} ms", f"{1e3 * plain['seconds']:.3g} ms ({plain['name']})",
            f"{1e3 * scipy['seconds']:.3g} ms", "never" if even is None else f"{even:,.0f}",
        ])  # fmt: skip
    head = ["relative error of final states", "plain", "half the step", "one fit for all", "a fit per parameter",
            "time", "fastest plain scheme at that error", "SciPy DOP853 at that error",
            "break-even against SciPy, trajectories"]  # fmt: skip
    pays = sum(any(x["break_even"] is not None for x in r["rivals"][:-1]) for r in found)
    return (
        command("sweep") + table(head, rows)
        + f"\nAgainst the fastest compiled plain scheme the hybrid pays in {pays} of {len(rows)} cases.\n"
    )  # fmt: skip


def span_of_times(values: list[float]) -> str:
    """Return the smallest and the largest of some ratios."""
    if not values:
        return "-"
    low, high = (f"{x:.2g}" if x < 100 else f"{x:,.0f}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def better_than_half(rows: list[dict[str, Any]]) -> int:
    """Return on how many equations the default of `fit` has a smaller error than half the step."""
    return sum(real(r["hybrid"]["final"]) < real(r["half"]["final"]) for r in rows)


def compare() -> str:
    number = lambda x, digits=2: "∞" if x is None else f"{x:.{digits}g}"
    rows = [
        [r["case"], "linear" if r["width"] is None else str(r["width"]), r["precision"], f"{r['error']:.1e}",
         number(r["m"], 3), f"{r['m_star']:.3g}", number(r["m"] and r["m"] / r["m_star"]), number(r["gain"])]
        for r in load("compare")["rows"]
    ]  # fmt: skip
    head = ["", "width", "network in", "MSE", "m", "m*", "m / m*", "gain over the quickest other"]
    text = command("compare") + table(head, rows)
    if any(r["gain"] is None for r in load("compare")["rows"]):
        text += "\n∞: nothing else that was tried reaches the hybrid's error.\n"
    return text


def fastest() -> str:
    """Return a line per case and batch of what ``objective="time"`` found."""
    found = load("compare")["fastest"]
    rows = [
        [
            r["case"], f"{r['batch']:,}", f"polynomial of degree {r['degree']}, dt {r['dt']:.3g}" if r["degree"]
            else f"{r['scheme']}, {r['correction']}, dt {r['dt']:.3g}",
            f"{r['fit_seconds']:.0f} s", f"{r['error']:.1e}", f"{r['milliseconds']:.3g} ms",
            "∞" if r["gain"] is None else f"{r['gain']:.3g}x",
            "never" if r["break_even"] is None else f"{r['break_even']:,.0f}",
        ]
        for r in found
    ]  # fmt: skip
    head = ["", "trajectories", "hybrid", "fit", "MSE", "time", "gain over the fastest other solver",
            "pays from, trajectories"]  # fmt: skip
    machine = found[0]["machine"]
    about = f"CPU time of {machine['threads']} thread, on a machine with other work: "
    about += f"{machine['processor']}.\n"
    text = "`python -m benchmarks.compare --fastest --threads 1 --cpu-time`\n\n"
    return text + table(head, rows) + "\n" + about


def corrections() -> str:
    found = load("corrections")
    systems = list(dict.fromkeys(r["system"] for r in found["rows"]))
    text = command("corrections").replace("corrections`", "corrections --device cuda --workers 8`")
    for recipe, title in (
        ("default", "Default recipe, 2,000 trajectories (1,000), five seeds"),
        (
            "paper",
            f"The paper's recipe, Table 4's trajectories, {found['epochs']} of 500 epochs, three seeds",
        ),
    ):
        rows = []
        for name in dict.fromkeys(r["correction"] for r in found["rows"]):
            cells = []
            for system in systems:
                for part in (0.5, 1.0):
                    key = (system, recipe, name, part)
                    r = next(r for r in found["rows"]
                             if (r["system"], r["recipe"], r["correction"], r["data"]) == key)  # fmt: skip
                    cells.append(span(list(r["errors"].values())))
            rows.append([name, *cells])
        head = [title, *(f"{s}, {p}" for s in systems for p in ("50 %", "100 %"))]
        text += table(head, rows) + "\n"
    plain = {r["system"]: r["plain"] for r in found["rows"]}
    return text + "Plain rk4: " + ", ".join(f"{s} {plain[s]:.1e}" for s in systems) + ".\n"


def chaos() -> str:
    found = load("chaos")
    number = lambda x: "lost" if x is None else f"{x:.1e}"
    rows = [
        [f"rk4, dt = {found['dt'] / int(m):.3g}", *map(number, errors)]
        for m, errors in found["plain"].items()
    ]
    for r in found["rows"]:
        what = r["correction"] + (", slope and state" if r.get("state") else "")
        width = f", width {r['width']}" if r["width"] else ""
        adam = f", {r['adam_steps']:,} Adam steps" if r["adam_steps"] else ""
        name = f"{what}{width}{adam}, {r['trajectories']:,} trajectories"
        rows.append([name, *map(number, r["errors"])])
    head = [f"10 links, dt = {found['dt']}, MSE up to", "T = 2.5", "T = 5", "T = 10"]
    return command("chaos").replace("chaos`", "chaos --device cuda`") + table(head, rows)


def theory() -> str:
    found = load("theory")
    number = lambda x: "> 1e308" if x is None else f"{x:.1e}"
    rows = []
    for r in found["constants"]:
        for horizon, c in r["convergence"].items():
            parts = (c[k] for k in ("actual", "propagated", "classical", "theorem"))
            rows.append(
                [
                    f"{r['case']}, T = {horizon}",
                    number(r["bound"]),
                    number(r["observed"]),
                    *map(number, parts),
                ]
            )
    head = [
        "",
        "Lipschitz bound of Q",
        "observed",
        "largest error",
        "carried by Jacobians",
        "classical",
        "Theorem 5.1",
    ]
    text = command("theory") + table(head, rows)
    over = found["over_dt"]
    rows = [
        [k, *(f"{e:.1e}" for e in r["errors"]), f"{statistics.mean(r['orders']):.1f}"]
        for k, r in over["rows"].items()
    ]
    text += f"\nError at t = {over['horizon']:g} of the 2-link pendulum, the correction fitted anew at every dt:\n\n"
    text += table(["dt", *(f"{dt:g}" for dt in over["dt"]), "mean order"], rows)
    text += "\nShare of |u''| below a level (Table 6), in per cent:\n"
    for system, t in found["table_6"].items():
        rows = [
            [k, *(f"{x:.1f}" for x in t[k])] for k in ("paper", "states", "components", "trajectories")
        ]
        text += "\n" + table([system, *map(str, t["levels"])], rows)
    return text


def attention() -> str:
    text = command("attention")
    if not measured("attention"):
        return text + "Not measured yet.\n"
    found = load("attention")
    rows = {(r["tokens"], r["causal"], r["method"], r["pass"]): r for r in found["rows"]}
    known = ("sdpa", "dense", "stepped", "tiled", "split", "windowed")
    methods = [m for m in known if any(r["method"] == m for r in found["rows"])]

    def cell(key: tuple[int, bool, str]) -> str:
        passes = [rows.get((*key, kind)) for kind in ("forward", "both")]
        if not any(passes):
            return ""
        times = pair(passes, "milliseconds", size)
        return times if key[2] == "sdpa" else f"{times} ({pair(passes, 'ratio', times_sdpa)})"

    cases = list(dict.fromkeys((r["tokens"], r["causal"]) for r in found["rows"]))
    text += (
        f"Milliseconds, forward / forward and backward, in brackets times SDPA's: batch {found['batch']}, "
        f"{found['heads']} heads of {found['dim']}, {found['steps']} steps, float32, CPU. Diffusion, but for "
        "`tiled` and `split`: reaction-diffusion, as it is and split.\n\n"
    )
    text += table(
        ["tokens", *methods],
        [[f"{n:,}{', causal' if causal else ''}", *(cell((n, causal, m)) for m in methods)]
         for n, causal in cases],
    )  # fmt: skip
    text += "\nPeak memory beyond inputs, outputs and their gradients, in MB, causal:\n\n"
    text += table(
        ["tokens", *methods],
        [[f"{n:,}", *(pair([rows.get((n, True, m, kind)) for kind in ("forward", "both")], "peak_mb", size)
                      for m in methods)]
         for n, causal in cases if causal],
    )  # fmt: skip
    return text + (windows(found) if found.get("windows") else "")


def hybrid_gpu() -> str:
    found = load("hybrid_gpu")["results"]
    cells = []
    for r in found["step"]:
        took = r["microseconds a step"]
        cells.append(
            [f"{r['width']:,}", f"{r['batch']:,}", f"{took['plain, torch']:.1f}",
             f"{took['plain, ours, all in one']:.2f}", f"{took['hybrid, all in one']:.2f}",
             f"{r['m*']:.2f}", f"{r['m*, all in one']:.1f}"]
        )  # fmt: skip
    text = (
        "`python -m benchmarks.hybrid_gpu --what step`\n\n"
        f"Microseconds of a step, elastic pendulum, rk4, float32, {found['device']}; all as graphs. A plain step "
        "is measured twice: compiled by torch, a launch a step, and fifty steps in one kernel of ours, as the "
        "hybrid's are.\n\n"
    )
    head = ["width", "states", "plain, torch", "plain, in one kernel", "hybrid, in one kernel",
            "m*, over torch's", "m*, both in one kernel"]  # fmt: skip
    return text + table(head, cells)


def fine_data() -> str:
    """What fine data cost, in one kernel and otherwise."""
    found, who = load("fine_data"), ("loop, compiled", "loop", "diffrax")
    cells = [
        [f"{r['case']} pendulum", f"{r['trajectories']:,}", f"{r['seconds']['kernel']:.2f}",
         *(f"{r['over kernel'][w]:.1f}" for w in who),
         *(f"{r['first'][w]:.1f}" for w in ("kernel", "loop, compiled", "diffrax"))]
        for r in found["rows"]
    ]  # fmt: skip
    text = (
        command("fine_data")
        + f"{found['rows'][0]['steps']} states each, 16 steps of dopri5 between them, float64, {found['device']}: "
        "seconds by the kernel, and how many times as long the same steps take as a loop compiled by torch, as it "
        "is, and with diffrax (jit, vmap). A first call compiles; its seconds are the last three columns (the "
        "kernel's later ones found theirs compiled).\n\n"
    )
    head = ["", "trajectories", "kernel, s", "compiled loop", "loop", "diffrax",
            "first: kernel", "first: compiled", "first: diffrax"]  # fmt: skip
    return text + table(head, cells)


def gradients() -> str:
    """What an update of a correction's weights costs, but for Adam."""
    found = load("gradients")
    cells = [
        [f"{r['width']:,}", f"{r['batch']:,}",
         *(f"{r['microseconds'][who]:.0f}" for who in ("kernels", "compiled", "torch")),
         f"{r['over compiled']:.1f}"]
        for r in found["rows"]
    ]  # fmt: skip
    text = (
        command("gradients")
        + f"Microseconds on an {found['device']}, all as graphs: Q of random states of four components, the mean "
        "square error, and the gradients of all weights, in float32; kernels, torch compiled, and as it is.\n\n"
    )
    head = ["width", "states", "kernels", "torch, compiled", "torch", "compiled over kernels"]
    return text + table(head, cells)


def verdict_gpu() -> str:
    """Whether a hybrid step pays on a GPU, beside plain steps in one kernel and diffrax."""
    found = load("hybrid_gpu")["results"]
    rivals = list(dict.fromkeys(m for r in found["verdict"] for m in r["gains"]))
    cells = [
        [f"{r['case']}, width {r['width']:,}", f"{r['error']:.0e}", f"{r['milliseconds']:.2f}",
         *(f"{r['gains'][m]:.3g}" if r["gains"].get(m) else "" for m in rivals)]
        for r in found["verdict"]
    ]  # fmt: skip
    text = (
        "`python -m benchmarks.hybrid_gpu --what verdict`\n\n"
        f"{found['verdict'][0]['batch']:,} states to the horizon on an {found['device']}, states in float64, "
        "steps of 0.1: the hybrid's mean square error at the end and its milliseconds, then how many times as "
        "long others take to that error. rk4 and dopri5 are fixed steps of ours, all in one kernel, as the "
        "hybrid's are; diffrax is compiled (jit, vmap) with error control.\n\n"
    )
    return text + table(["", "error", "ms", *rivals], cells)


def bench() -> str:
    """Attention on a GPU, of `attractor bench`."""
    found = load("bench")
    top = found["ceilings"]
    rows = [r for r in found["rows"] if "forward" in r]
    first = rows[0]
    text = (
        "`attractor bench --device cuda --out benchmarks/results/bench.json`\n\n"
        f"{found['device']}, torch {found['torch']}, {found['dtype']}, {first['heads']} heads of "
        f"{first['dim']}, {first['steps']} steps; a copy moves {top['copy_gb_s'] / 1e3:.2f} TB/s and a "
        f"product makes {top['matrix_tflop_s']:.0f} TFLOP/s in the same run. Milliseconds, in brackets the "
        "ratio to SDPA (windows: to the same without a PDE), medians over rounds; up to "
        f"{max((r['tokens'] for r in rows if r['forward']['graph']), default=0):,} tokens as replays of "
        "graphs, both sides. Peak memory is beyond the inputs, outputs included, ours and theirs.\n\n"
    )
    cell = lambda r, passes: f"{size_ms(r[passes]['ms'])} ({r[passes]['ratio']:.2f})"
    cells = [
        [r["kind"], f"{r['tokens']:,}", str(r["batch"]), cell(r, "forward"), cell(r, "both"),
         f"{100 * r['forward']['of_matrix_rate']:.0f} %",
         f"{size(r['both']['peak_mb'])}, {size(r['both']['peer_peak_mb'])}",
         f"{r['speedup_over_dense']:.0f}x" if "speedup_over_dense" in r else ""]
        for r in rows
    ]  # fmt: skip
    head = ["", "tokens", "batch", "forward", "with backward", "of matrix rate", "peak MB",
            "over dense"]  # fmt: skip
    return text + table(head, cells)


def cluster() -> str:
    """Shards made by engines, and by a cluster that loses a node."""
    found = load("cluster")
    rows = [[name, f"{x:.0f}"] for name, x in found["seconds"].items()]
    return (
        f"`python -m benchmarks.cluster`\n\n{found['data']['trajectories']:,} elastic pendulums to t = "
        f"{found['data']['horizon']:g} in {found['killed']['of_shards']} shards, on a Ray cluster of two nodes "
        "(`ray start` twice on one machine, one CPU and 100 MB of object store each). When half of the "
        "shards are there, all processes of the second node get SIGKILL. All four ways give the same hash: "
        f"{'yes' if found['equal'] else 'no'}. The machine has {found['machine']['cores']} cores; its load "
        f"was {found['load_before']:.0f} before the run.\n\n"
        f"{table(['', 'seconds'], rows)}"
    )


def simulated_jobs() -> str:
    """Return durations of simulated jobs on up to 1,000 workers."""
    result = load("workers")
    costs, first = result["costs"], result["workers"][0]
    kinds = {True: "trajectories", False: "results"}
    rows = [
        [kinds[row["data"]], once_per(row["mtbf"]), f"{row['workers']:,}", *outcome_of(row)]
        for row in result["workers"]
    ]
    return (
        f"{command('workers')}{result['work_hours']:,.0f} hours of one core in shards of {first['seconds']:g} s, "
        f"simulated; means of {result['seeds']} seeds. Trajectories are "
        f"{costs['shard_bytes'] / costs['shard_seconds'] / 1e6:.1f} MB per second of work, and results "
        f"{result['workers'][-1]['size'] / 1e3:.0f} kB per shard. Measured on this machine: 1,000 elastic "
        f"pendulums to t = 5 take {costs['shard_seconds']:.2f} s and {costs['shard_bytes'] / 1e6:.2f} MB; a worker "
        f"starts in {costs['startup']:.1f} s; an artifact costs the command {1e3 * costs['overhead']:.1f} ms and "
        f"{1e9 * costs['hash_seconds_per_byte']:.1f} ns per byte for the hash.\n\n"
        + table(["artifacts", "one failure per", "workers", *OUTCOME], rows)
    )


OUTCOME = [
    "hours", "speed-up", "efficiency", "lost: slow machines", "failures", "command", "GB", "begun again",
    "job ends with an error",
]  # fmt: skip


def outcome_of(row: dict[str, Any]) -> list[str]:
    """Return the cells of a simulated job."""
    lost = [share_of(max(row["lost"][cause], 0.0)) for cause in ("stragglers", "failures", "command")]
    return [
        f"{row['hours']:,.3g}" if row["hours"] < 100 else f"{row['hours']:,.0f}", f"{row['speedup']:,.3g}"
        if row["speedup"] < 100 else f"{row['speedup']:,.0f}", share_of(row["efficiency"]), *lost,
        f"{row['bytes'] / 1e9:,.3g}" if row["bytes"] < 1e11 else f"{row['bytes'] / 1e9:,.0f}",
        f"{row['begun_again']:,.0f}", probability(row["death_probability"]),
    ]  # fmt: skip


def share_of(x: float) -> str:
    return f"{100 * x:.3g} %" if x >= 0.01 else f"{100 * x:.1f} %"


def probability(x: float) -> str:
    return f"{x:.2g}" if x >= 1e-3 else f"{x:.0e}" if x else "0"


def once_per(seconds: float) -> str:
    """Return a mean time between failures in words."""
    return f"{seconds / 3600:,.0f} h"


def shard_durations() -> str:
    """Return what the duration of a shard changes, on 1,000 simulated workers."""
    result = load("workers")
    middle = [row for row in result["workers"] if not row["data"] and row["workers"] == 1_000]
    order = lambda row: (-row["mtbf"], row["seconds"], row["copies"])
    rows = [
        [once_per(row["mtbf"]), f"{row['seconds']:g} s", f"{row['shards']:,}", "yes" if row["copies"] else "no",
         *outcome_of(row)]
        for row in sorted([*middle, *result["durations"], *result["copies"]], key=order)
    ]  # fmt: skip
    long = ", ".join(
        f"{probability(row['death_probability'])} for shards of {row['seconds'] / 3600:g} h with one failure per "
        f"{once_per(row['mtbf'])}"
        for row in result["long_shards"]
    )
    text = table(["one failure per", "shard", "shards", "copies", *OUTCOME], rows)
    return f"{text}\nProbability that the job ends with `WorkerDiedError`, computed: {long}.\n"


def command_limits() -> str:
    """Return how many workers one command serves."""
    rows = []
    for row in load("workers")["limits"]:
        values = [row["efficiency"].get(factor) for factor in ("0.5", "1.0", "2.0")]
        share = ["not simulated" if x is None else share_of(x) for x in values]
        rows.append(
            ["trajectories" if row["data"] else "results", f"{row['seconds']:g} s", f"{row['size'] / 1e6:.3g}",
             f"{row['link']:,.0f}", f"{row['command']:,.0f}", *share]
        )  # fmt: skip
    head = ["artifacts", "shard", "MB per shard", "workers that fill the link", "workers that fill the command",
            "efficiency with half of these", "with these", "with twice these"]  # fmt: skip
    return table(head, rows)


def failing_training() -> str:
    """Return the useful fraction of a training on machines that fail."""
    rows = [
        [once_per(row["mtbf"]), f"{row['processes']:,}", f"{row['job_mtbf'] / 60:,.3g}"
         if row["job_mtbf"] < 6e4 else f"{row['job_mtbf'] / 60:,.0f}", f"{row['step_seconds']:.2f}",
         share_of(row["useful"]), f"{row['young'] / 60:.2g}", f"{row['daly'] / 60:.2g}",
         share_of(row["useful_daly"]), share_of(1 - 0.99 ** row["processes"])]
        for row in load("workers")["training"]
    ]  # fmt: skip
    head = ["one failure per", "machines", "minutes between failures", "seconds per step", "useful, every 10 min",
            "Young's interval, min", "Daly's, min", "useful, Daly's", "chance of a slow machine"]  # fmt: skip
    return table(head, rows)


def elastic_cluster() -> str:
    """Jobs on a cluster that loses a node and gains another one during each of them."""
    content = load("elastic_cluster")
    data, (experiment, scale, seeds) = content["data"], content["experiment"]
    yes = {True: "yes", False: "no"}
    rows = []
    for job, row in content["jobs"].items():
        alone = row.get("one_process_seconds")
        rows.append([
            job, str(row["shards"]), str(len(row["begun_again"])), str(row["new_node_shards"]),
            yes[row["equal"]], f"{row['longest_pause']:.0f}", f"{row['seconds']:.0f}",
            "–" if alone is None else f"{alone:.0f}",
        ])  # fmt: skip
    text = (
        "The cluster has a head and one more node, each started by `ray start` with one CPU. During each "
        "job the second node is killed by SIGKILL, and a new node is started at once. Fine data and fit: "
        f"{data['trajectories']:,} elastic pendulums to t = {data['horizon']:g}, and a fit to them. Sweep: "
        f"`tune` for {len(content['jobs']['sweep of tune']['errors'])} equations, error "
        f"{content['tuning']['error']:g}. Reproduce: all arms of `{experiment}` at scale {scale} with "
        f"{seeds} seeds. The result is as expected if data, weights and metrics equal, bit for bit, those "
        "of one undisturbed process, or if the sweep has a solver that reaches the error for every "
        "equation. The longest pause is that between two messages of the engine, which reports each "
        "complete or lost shard. Seconds on the cluster include the start of workers on each node. The machine has "
        f"{content['machine']['cores']} cores, which other programs used as well; its load was "
        f"{content['load_before']:.0f} before the run.\n\n"
    )
    head = [
        "job", "shards", "begun again", "computed by the new node", "as expected", "longest pause, seconds",
        "seconds", "one process, seconds",
    ]  # fmt: skip
    return command("elastic_cluster") + text + table(head, rows)


def size_ms(x: float) -> str:
    return f"{x:.3f}" if x < 1 else f"{x:.3g}"


def windows(found: dict[str, Any]) -> str:
    """Sliding windows with global tokens at lengths where no map would fit."""
    rows = {(r["tokens"], r.get("method", "diffusion"), r["pass"]): r for r in found["windows"]}
    methods = list(dict.fromkeys(method for _, method, _ in rows))
    lengths = list(dict.fromkeys(tokens for tokens, _, _ in rows))
    passes = lambda n, m: [rows.get((n, m, kind)) for kind in ("forward", "both")]
    cells = [
        [
            f"{n:,}",
            *(pair(passes(n, m), key, size) for key in ("milliseconds", "peak_mb") for m in methods),
        ]
        for n in lengths
    ]
    head = ["tokens", *(f"{m}, {unit}" for unit in ("ms", "MB") for m in methods)]
    what = ""
    if "window" in found:
        left, n = found["window"][0], found["global_tokens"]
        what = f" of {left} tokens back with {n} global tokens"
    return f"\nCausal windows{what}, forward / forward and backward:\n\n" + table(head, cells)


def pair(rows: list[dict[str, Any] | None], key: str, number: Any) -> str:
    """One number of each row, a dash where there is none."""
    if not any(rows):
        return ""
    return " / ".join("–" if r is None or r[key] is None else number(r[key]) for r in rows)


def size(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.1f}"


def times_sdpa(x: float) -> str:
    return f"{x:.0f}x" if x >= 10 else f"{x:.1f}x" if x >= 2 else f"{x:.2f}x"


def leak() -> str:
    """Language models that are causal and one that is not, of `attractor reproduce pde-leak`."""
    found = reproduced("pde-leak", "gpu")
    config = found.runs[found.arms[0]][found.seeds[0]]["config"]
    size, recipe = config["size"], config["recipes"][config["recipe"]]
    both = lambda arm, metric: mean_text(found.mean(arm, metric), found.spread(arm, metric))
    rows = [
        [arm, *(both(arm, m) for m in ("perplexity", "sample_forced", "left_to_right")),
         "causal" if found.mean(arm, "causal") == 1 else "leaks"]
        for arm in found.arms
    ]  # fmt: skip
    windows, positions = config["honest"]
    text = (
        "`attractor reproduce pde-leak --scale gpu --device cuda --data FOLDER`\n\n"
        f"WikiText-2, WordPiece, {size['layers']} layers of {size['dim']}, {config['length']} tokens, "
        f"{recipe['updates']:,} updates of {recipe['batch_tokens']:,} tokens, mean and deviation over "
        f"{len(found.seeds)} seeds, {', '.join(found.devices())}. The sample is {windows * positions:,} "
        "tokens.\n\n"
    )
    head = ["validation perplexity", "teacher forcing", "the sample, teacher forcing",
            "the sample, left to right", "`assert_causal`"]  # fmt: skip
    return text + table(head, rows)


def artefact_results() -> Results:
    """The runs of `attractor reproduce pde-artefact` at the largest scale that is complete."""
    found = largest(find("pde-artefact"), ROOT / "experiments" / "results")
    assert found is not None
    return found


def artefact() -> str:
    """The models of the PDE paper's first public code, each evaluated in several ways."""
    found = artefact_results()
    experiment = find("pde-artefact")
    configs = {arm: next(iter(runs.values()))["config"] for arm, runs in found.runs.items()}
    config = configs[found.arms[0]]
    size, recipe = config["size"], config["recipe"]
    tokens = {"wordpiece": "word pieces", "words": "words"}[config["tokenizer"]]
    both = lambda arm, metric: mean_text(found.mean(arm, metric), found.spread(arm, metric))
    metrics = ("perplexity", "fast_off", "real_off", "sample_forced", "left_to_right")
    rows = [
        [arm, number(experiment.numbers[arm]), *(both(arm, metric) for metric in metrics)]
        for arm in sorted(found.arms, key=lambda arm: arm.startswith("PDE"))
    ]
    updates = found.mean(found.arms[0], "updates")
    text = (
        f"`{command_line(experiment, found.scale)}`\n\n"
        f"Lines of WikiText-2 in {tokens}, {size['layers']} layers of {size['dim']}, {updates:,.0f} updates of "
        f"{recipe['batch']} lines, mean and deviation over {min(map(len, found.runs.values()))} seeds, "
        f"{', '.join(found.devices())}. Validation perplexity; all columns of a row are of the same weights. The "
        f"sample is {config['sample']:,} tokens that are no padding.\n\n"
    )
    if config["shorten"] > 1:
        text += f"Lines have 1/{config['shorten']} of the tokens named, and the paper's numbers are of word pieces.\n\n"
    head = ["", "the paper", "padding counted, fast path", "padding counted, no fast path",
            "padding not counted", "the sample, given the whole line", "the sample, left to right"]  # fmt: skip
    lengths = [configs[arm]["length"] for arm, _ in PAIRS]
    each = lambda values: in_words([f"{x:.3g}" for x in values])
    nats = [[found.mean(arm, metric) for arm, _ in PAIRS] for metric in ("pad_on", "pad_off")]
    return (
        text + table(head, rows)
        + f"\nAt {in_words([f'{n:,}' for n in lengths])} tokens a padding token costs the standard transformer "
        f"{each(nats[0])} nats with the fast path and {each(nats[1])} without it. The fast path is "
        f"{in_words([f'{100 * x:.1f}' for x in path_shares(found)])} % of the gap between the two models, in "
        "logarithms.\n"
    )  # fmt: skip


def steps() -> str:
    """Language models by the number of steps, of `attractor reproduce pde-table4`."""
    found = reproduced("pde-table4", "gpu")
    config = found.runs["standard"][0]["config"]
    value = lambda arm: perplexity(found.mean(arm, "perplexity"))
    counts = (1, 2, 4, 8)
    rows = [["standard", value("standard"), *[""] * len(counts)]] + [
        [name, "", *(value(f"{name}, {n} steps") for n in counts)]
        for name in ("PDE, causal", "PDE, without walls")
    ]
    finite = min(found.mean(arm, "finite") for arm in found.arms) == 1
    text = (
        "`attractor reproduce pde-table4 --scale gpu --device cuda --data FOLDER`\n\n"
        f"As above, with {config['length']} tokens and one seed; validation perplexity by the number of steps "
        f"of diffusion. {'No run gave NaN' if finite else 'Some run gave NaN'}.\n\n"
    )
    return text + table(["", "0", *map(str, counts)], rows)


def repeats() -> str:
    """Kernels whose results differ in a bit from one time to the next."""
    found = load("repeats")
    kinds = list(dict.fromkeys(r["kind"] for r in found["rows"] if not r["kind"].startswith("hybrid")))
    differ = {(r["kind"], r["deterministic_asked"]): r["differ"] for r in found["rows"]}
    what = lambda names: ", ".join(f"gradients of {n}" if n != "output" else n for n in names) or "none"
    rows = [[kind, *(what(differ[kind, asked]) for asked in (False, True))] for kind in kinds]
    rows += [[k, what(d), ""] for (k, _), d in differ.items() if k.startswith("hybrid")]
    text = (
        f"{found['repeats']} times one input of {found['tokens']:,} tokens, {found['dtype']}, {found['device']}, "
        "forward and backward: what differs from the first time in any bit, as torch runs by default and after "
        "`torch.use_deterministic_algorithms(True)`.\n\n"
    )
    return command("repeats") + text + table(["", "by default", "deterministic"], rows)


def again() -> str:
    """What a clean clone gives."""
    found = load("again")
    names = {"x86_64": "x86-64", "aarch64": "ARM"}
    rows = [
        [
            f"[{r['experiment']}](results.md#{anchor(find(r['experiment']))})", str(r["runs"]),
            f"{r['equal']:,} of {r['numbers']:,}",
            "" if not r["largest"] else f"{r['largest']:.0e} ({r['of']})",
            "; ".join(f"{names.get(a, a)}, now {names.get(b, b)}" for a, b in r["devices"]),
        ]
        for r in found["rows"]
    ]  # fmt: skip
    each = " ".join(r["experiment"] for r in found["rows"])
    head = ["", "runs", "numbers equal to the last digit", "largest difference, as a part", "made on"]
    return f"`python -m benchmarks.again {each} --data FOLDER`\n\n" + table(head, rows)


def probing() -> str:
    found = load("probing")
    rows = [
        [r["network"], str(r["blocks"]), f"{r['milliseconds']:.0f}", f"{r['batch_ratio']:.2f}x",
         f"{r['call_ratio']:.2f}x"]
        for r in found["rows"]
    ]  # fmt: skip
    text = (
        f"Batch {found['batch']} on a CPU: a plain forward in milliseconds, a further batch of a probe and "
        "a whole call of `probe` with one batch (which first looks at the graph), as multiples of it.\n\n"
    )
    return command("probing") + text + table(["network", "blocks", "forward", "batch", "call"], rows)


def training() -> str:
    found = load("training")
    rows = [
        [r["loop"] + (f", {r['gate']}" if r["gate"] != "none" else ""), f"{r['milliseconds_per_step']:.1f}",
         f"{r['seconds_per_epoch']:.2f}", f"{r['speedup']:.2f}x" if "speedup" in r else "",
         f"{r['first_epoch_seconds']:.1f}", f"{r['peak_mb'] / 1e3:.1f}" if "peak_mb" in r else ""]
        for r in found["rows"]
    ]  # fmt: skip
    text = (
        f"ResNet{found['depth']}, batch {found['batch']}, {found['precision']}, {found['device']}: a step "
        f"(median of {found['rounds']} rounds of {found['steps']} steps), the same for an epoch of CIFAR, how "
        f"much faster than an ordinary PyTorch loop in the same run, the first {found['steps']} steps with all "
        "that is captured and compiled in them (in those of the first two rows cuDNN also chooses its "
        "algorithms, which the others find chosen), and the most memory.\n\n"
    )
    head = ["", "ms/step", "s/epoch", "", "first, s", "memory, GB"]
    return command("training") + text + table(head, rows)


def training_gates() -> str:
    found = load("training_gates")
    by = {(r["gate"], r["loop"]): r["milliseconds_per_step"] for r in found["rows"]}
    gates, loops = (list(dict.fromkeys(r[k] for r in found["rows"])) for k in ("gate", "loop"))
    loops.remove("plain, channels_last")
    rows = [
        [gate, *(f"{by[gate, loop]:.1f} ({by[gate, loop] / by['none', loop]:.2f})" for loop in loops)]
        for gate in gates
    ]
    text = (
        f"`python -m benchmarks.training --depth {found['depth']} --gate {' '.join(gates)} --steps "
        f"{found['steps']} --rounds {found['rounds']} --out benchmarks/results/training_gates.json`\n\n"
        f"What a gate costs, ResNet{found['depth']}, batch {found['batch']}, {found['device']}: milliseconds a "
        "training step, and as a multiple of the same loop's without a gate.\n\n"
    )
    return text + table(["gate", *loops], rows)


def all_gates() -> Results:
    """The runs of Table 1, and those of Table 4 that are not among them."""
    trained, varied = (reproduced(f"stepnet-table{n}", "gpu") for n in (1, 4))
    runs = {**trained.runs, **{arm: varied.runs[arm] for arm in varied.arms if arm in VARIANTS}}
    return replace(trained, arms=list(runs), runs=runs)


def gates() -> str:
    papers = {**find("stepnet-table1").numbers, **find("stepnet-table4").numbers}
    both = all_gates()
    config = both.runs["none"][0]["config"]
    text = (
        "`attractor reproduce stepnet-table1 stepnet-table4 --scale gpu --device cuda --data FOLDER`\n\n"
        f"CIFAR-10, ResNet{config['network']['depth']}, {config['recipe']['epochs']} epochs, batch "
        f"{config['recipe']['batch']}, {both.devices()[0]}; test accuracy after the last epoch, mean and "
        "deviation over seeds, and the gain over no gate at the same seeds with its standard error, of so few "
        "seeds no more than a hint. The paper's gains are of ResNet164 after 164 epochs. TNS is of "
        f"{config['probed']} test images, before training and after: with step 1, and with the gate as the "
        "step.\n\n"
    )
    cells = [
        [VARIANTS.get(arm, arm), *gains_of(both, arm), paper_gain(papers, arm),
         f"{both.mean(arm, 'parameters'):,.0f}", *stiffness_of(both, arm)]
        for arm in both.arms
    ]  # fmt: skip
    head = ["gate", "seeds", "accuracy, %", "gain", "paper's gain", "parameters", "TNS, step 1",
            "TNS, step F"]  # fmt: skip
    each = "; ".join(
        f"{VARIANTS.get(arm, arm)} {', '.join(f'{gain:+.2f}' for gain in both.paired(arm, 'none'))}"
        for arm in both.arms
        if arm != "none"
    )
    stiff = [
        max(
            100 * x
            for arm in both.arms
            for step in STEPS
            for x in both.values(arm, f"proportion_{step}{end}")
        )
        for end in ("_initial", "")
    ]
    what = STEPS | {f"{step}_initial": f"{name}, before training" for step, name in STEPS.items()}
    over = {"models": "all trained models", "arms": "means over seeds"}
    found = compared(both)
    correlated = [
        [f"{what[column]}, {models}", *(f"{c[kind]:+.2f} (p {c[f'{kind}_p']:.2f})" for kind in kinds)]
        for kinds in [("kendall", "spearman")]
        for of, models in over.items()
        for column, c in found[of].correlations.items()
    ]
    return (
        f"{text}{table(head, cells)}\nGains seed by seed: {each}.\n\nOf a network's blocks on all inputs at most "
        f"{stiff[0]:.0f} % are stiff (both thresholds 0.5) before training, at most {stiff[1]:.0f} % after.\n\n"
        "Rank correlation of TNS with accuracy. p is the part of all orders that correlate as strongly; models "
        "of one gate are not independent, so theirs is too small.\n\n"
        f"{table(['TNS', 'Kendall', 'Spearman'], correlated)}"
    )


def gates_cifar100() -> str:
    found = reproduced("stepnet-table1-cifar100", "gpu")
    papers = find("stepnet-table1-cifar100").numbers
    cells = [
        [arm, *gains_of(found, arm), paper_gain(papers, arm), *stiffness_of(found, arm)]
        for arm in found.arms
    ]
    head = ["gate", "seeds", "accuracy, %", "gain", "paper's gain", "TNS, step 1", "TNS, step F"]
    correlations = compared(found)["models"].correlations
    told = ", ".join(
        f"{correlations[step]['kendall']:+.2f} (p {correlations[step]['kendall_p']:.2f}) with {name}"
        for step, name in STEPS.items()
    )
    models = sum(len(found.runs[arm]) for arm in found.arms)
    return (
        "`attractor reproduce stepnet-table1-cifar100 --scale gpu --device cuda --data FOLDER`\n\n"
        "CIFAR-100, all else as above.\n\n"
        f"{table(head, cells)}\nRank correlation (Kendall) of TNS with accuracy over all {models} trained "
        f"models: {told}.\n"
    )


def gates_digits() -> str:
    found = reproduced("stepnet-table1", "cpu")
    config = next(iter(found.runs["none"].values()))["config"]
    cells = [
        [arm, *gains_of(found, arm), f"{found.mean(arm, 'parameters'):,.0f}", *stiffness_of(found, arm)]
        for arm in found.arms
    ]
    head = ["gate", "seeds", "accuracy, %", "gain", "parameters", "TNS, step 1", "TNS, step F"]
    text = (
        f"`attractor reproduce stepnet-table1 --scale cpu`: ResNet{config['network']['depth']} of width "
        f"{config['network']['width']}, {config['recipe']['epochs']} epochs, {found.seconds() / 60:.0f} min of "
        "training, one core each. Of the 360 test images one is 0.28 %.\n\n"
    )
    return text + table(head, cells)


def gains_of(results: Results, arm: str) -> list[str]:
    """Seeds, accuracy and gain over no gate at the same seeds: three cells."""
    accuracy = results.values(arm)
    gain = "" if arm == "none" else with_error(*mean_and_error(results.paired(arm, "none")), sign="+")
    return [str(len(accuracy)), with_error(statistics.mean(accuracy), results.spread(arm)), gain]


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """A mean, and its standard error of two or more."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.mean(values), error


def paper_gain(numbers: Any, arm: str) -> str:
    return "" if arm == "none" else f"{numbers[arm] - numbers['none']:+.2f}"


def with_error(x: float, error: float | None, sign: str = "") -> str:
    return f"{x:{sign}.2f}" + ("" if error is None else f" ± {error:.2f}")


def stiffness_of(results: Results, arm: str) -> list[str]:
    """TNS of an arm before and after training, a cell a step."""
    return [
        f"{results.mean(arm, f'tns_{step}_initial'):.2f}, {results.mean(arm, f'tns_{step}'):.2f}"
        for step in STEPS
    ]


def perplexity(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:,.1f}" if x < 1e5 else f"{x:.0e}"


def span(values: list) -> str:
    """Smallest to largest, in few characters."""
    if any(v is None for v in values):
        lost = sum(v is None for v in values)
        return "lost" if lost == len(values) else f"{lost} of {len(values)} lost"
    low, high = f"{min(values):.1e}", f"{max(values):.1e}"
    return low if low == high else f"{low} to {high}"


def summary() -> str:
    s, e, o = load("stepping"), load("energy")["tenths"], load("order")["schemes"]
    compiled = s["seconds"]["attractor compiled"]
    diffrax = min(v for k, v in s["seconds"].items() if k.startswith("diffrax"))
    untouched = [r for r in load("untuned")["rows"] if "failure" not in r]
    rows = [
        ["1,000 elastic pendulums, 1,000 rk4 steps, compiled, CPU",
         f"{compiled * 1e3:.0f} ms, after compiling for {s['first_call']['attractor compiled']:.0f} s: "
         f"{s['seconds']['torchdiffeq'] / compiled:.0f} times faster than torchdiffeq, "
         f"{compiled / diffrax:.2f} of diffrax's time"],
        ["order of convergence of all schemes, median of 14 to 21 problems each",
         f"largest shortfall {max(r['order'] - r['median'] for r in o):.3f}"],
        ["hybrid step of 0.1 fitted in seconds, mean square error against plain rk4",
         ", ".join(f"{r['case'].split(',')[0]} {max(r['hybrid']):.0e} ({r['plain']:.0e})"
                   for r in load("hybrid")["rows"][:2])],
        ["the same on other systems: better than rk4 at half the step",
         f"on {better_than_half(untouched)} of {len(untouched)} (docs/hybrid.md)"],
        ["the fastest way to an error of 1e-6, 1,000 trajectories at a time (`at.tune`)", tuned_summary()],
        ["Burgers' equation on 64 corrected cells, 100 fields, compiled, CPU", fields_summary()],
        [f"four stiff mechanisms in {load('stiff')['batch']:,} cells at once, compiled, CPU", stiff_summary()],
        ["energy error after 100,000 steps of Hénon-Heiles",
         f"leapfrog {e['leapfrog'][-1]:.3f} (first tenth {e['leapfrog'][0]:.3f}), "
         f"rk4 {e['rk4'][-1]:.2f} (first tenth {e['rk4'][0]:.2f})"],
        *attention_summary(),
        model_summary(),
    ]  # fmt: skip
    return table(["", ""], rows).replace("---:", "---")


def model_summary() -> list[str]:
    """Return the costs of a whole model for the README."""
    result = load("model")
    ratio = {row["case"]: row["ratio"] for row in result["rows"] if not row["learn"]}
    cases = {
        "train": "training step",
        "padded": "padded",
        "compiled": "compiled",
        "static": "generated token with a static cache",
    }
    return [
        f"a Llama of 1B parameters with diffusion in every layer, {result['device']}: {', '.join(cases.values())}",
        f"{', '.join(f'{ratio[case]:.2f}' for case in cases)} times SDPA's time (docs/how-to/hugging-face.md)",
    ]


def attention_summary() -> list[list[str]]:
    rows = []
    stepped = [] if not measured("attention") else [
        r for r in load("attention")["rows"]
        if r["method"] == "stepped" and r["causal"] and r["tokens"] >= 2048
    ]  # fmt: skip
    if stepped:
        by = {p: [r["ratio"] for r in stepped if r["pass"] == p] for p in PASSES}
        most = max(r["tokens"] for r in stepped)
        rows.append(
            [f"causal diffusion of attention maps, 4 steps, 2,048 to {most:,} tokens, CPU",
             "; ".join(f"{what} {min(by[p]):.2f} to {max(by[p]):.2f}" for p, what in PASSES.items())
             + " times the time of SDPA"]
        )  # fmt: skip
    found = artefact_results()
    three = [
        ", ".join(number(found.mean(pair[i], metric)) for pair in PAIRS)
        for i, metric in ((0, "perplexity"), (0, "fast_off"), (1, "perplexity"))
    ]
    rows.append(
        ["Table 2 of the PDE attention paper, perplexities of padded lines at three lengths "
         f"(scale {found.scale}): standard transformer, evaluated on torch's fast path; the same weights without it; "
         "PDE transformer",
         f"{'; '.join(three)} (docs/attention.md)"]
    )  # fmt: skip
    found = reproduced("pde-leak", "gpu")
    each = ", ".join(mean_text(found.mean(arm), found.spread(arm)) for arm in found.arms)
    alone = found.mean(found.arms[-1], "left_to_right")
    rows.append(
        ["WikiText-2 perplexity, one recipe, three seeds: standard, diffusion with walls, without",
         f"{each}, which is a leak: left to right {alone:.0e} (docs/attention.md)"]
    )  # fmt: skip
    return rows


def architectures() -> str:
    """Which model types of transformers take PDE attention by its name."""
    result = load("architectures")
    lines = [command("architectures"), f"transformers {result['transformers']}:\n\n"]
    rows = []
    for kind in dict.fromkeys(row["kind"] for row in result["rows"]):
        of_kind = [row for row in result["rows"] if row["kind"] == kind]
        names = {
            outcome: sorted({row["type"] for row in of_kind if row["outcome"] == outcome})
            for outcome in ("PDE attention", "refused", "not built")
        }
        rows += [[kind, outcome, str(len(types)), ", ".join(types)] for outcome, types in names.items()]
    head = ["classes", "", "model types", ""]
    lines.append(
        "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---", "---", "---:", "---"], *rows])
    )
    return "".join(lines)


def identity() -> str:
    """How far coefficients move from the identity."""
    result = load("identity")
    rows = []
    for row in result["reach"]:
        for name, value in row["raw"].items():
            truth = row["truth"][list(row["raw"]).index(name)]
            before = row["logistic"].get(name)
            rows.append(
                [row["name"].replace("_", "-"), name, f"{truth:g}", f"{value:.3f}",
                 "" if before is None else f"{before:.4f}"]
            )  # fmt: skip
    head = ["PDE", "coefficient", "of the data", "from 0", "logistic, from 0.001"]
    lines = [head, ["---", "---", "---:", "---:", "---:"], *rows]
    return command("identity") + "".join(f"| {' | '.join(line)} |\n" for line in lines)


CASES = {
    "train": "training step",
    "checkpointed": "training step with gradient checkpointing",
    "padded": "training step, a row padded on the left by a quarter",
    "packed": "training step, eight packed texts per row",
    "compiled": "training step through `torch.compile`, 4 layers",
    "dropout": "training step, attention dropout of 0.1",
    "generate": "generated token, dynamic cache",
    "left_padded": "generated token, prompts padded on the left",
    "static": "generated token, static cache, compiled into CUDA graphs",
}


def model() -> str:
    """What PDE attention costs in a whole model."""
    result = load("model")
    rows = []
    for row in result["rows"]:
        coefficients = ", learnt coefficients" if row["learn"] else ""
        rows.append(
            [CASES[row["case"]] + coefficients, f"{row['batch']} x {row['tokens']:,}",
             f"{1e3 * row['peer_seconds']:.4g} ms", f"{1e3 * row['seconds']:.4g} ms",
             f"{row['ratio']:.2f}", f"{row['memory']:.2f}"]
        )  # fmt: skip
    head = ["", "batch and tokens", "sdpa", "PDE", "ratio", "memory"]
    lines = [head, ["---", "---", "---:", "---:", "---:", "---:"], *rows]
    return (
        "`attractor bench --what model --device cuda --out benchmarks/results/model.json`\n\n"
        f"{result['device']}, torch {result['torch']}, {result['dtype']}:\n\n"
        + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    )


def in_words(items: list[str]) -> str:
    """Join items with commas and an "and"."""
    return f"{', '.join(items[:-1])} and {items[-1]}"


def null() -> str:
    """Return how often each direction occurs under equal arms."""
    content = load("null")
    draws = content["draws"]
    words = ("supported", "contradicted", "inconclusive")
    percent = lambda x, n: f"{100 * x / n:.1f} %"
    rows = [
        [r["rule"], str(r["comparisons"]), *(percent(r[word], draws) for word in words)]
        for r in content["rules"]
    ]
    one = [r for r in content["claims"] if r["comparisons"] == 1]
    several = [r for r in content["claims"] if r["comparisons"] > 1 and not r["barred"]]
    for what, group in (("claims of one comparison", one), ("claims of several comparisons", several)):
        sums = [sum(r[word] for r in group) for word in words]
        rows.append([
            f"experiments, {len(group)} {what}", str(round(statistics.fmean(r["comparisons"] for r in group))),
            *(percent(x, sum(sums)) for x in sums),
        ])  # fmt: skip
    single = {word: sum(r["single"][word] for r in content["claims"]) for word in words}
    total = sum(single.values())
    rows.append([
        f"experiments, all {total:,} comparisons one by one", "1",
        *(percent(single[word], total) for word in words),
    ])  # fmt: skip
    head = [f"{draws:,} draws each, equal arms", "comparisons", *words]
    return command("null") + table(head, rows)


def command(name: str) -> str:
    return f"`python -m benchmarks.{name}`\n\n"


def filled(text: str) -> str:
    """The page with its tables made from today's results."""
    return BLOCK.sub(lambda m: m[1] + globals()[m[2]]() + m[3], text)


def main() -> None:
    for page in PAGES:
        write_text(page, filled(page.read_text()))
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
