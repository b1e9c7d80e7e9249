"""The result of a comparison: points of error and work, the numbers m and m*, and the verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from attractor.common.views import html_table, pandas, pictures
from attractor.storage.files import write_json
from attractor.storage.schema import (
    any_of,
    check,
    flag,
    listing,
    mapping,
    null,
    number,
    plain,
    record,
    text,
)

AMOUNT, UNKNOWN = number(0), any_of(number(0), null)  # null is what is infinite, or not known
POINT = record(
    {"method": text(), "setting": number(5e-324), "adaptive": flag, "error": UNKNOWN, "seconds": AMOUNT,
     "rate_calls": number(0, whole=True)},
    {"first_seconds": AMOUNT},
)  # fmt: skip
ABOUT = record(
    {},
    {"batch": number(1, whole=True), "fit_seconds": UNKNOWN, "dtype": text(), "device": text()},
    others=plain,
)
COMPARISON = record(
    {"m": UNKNOWN, "m_star": AMOUNT, "about": ABOUT, "hybrid": POINT, "rival": any_of(POINT, null),
     "points": listing(POINT)},
    {"verdict": text(1000), "pays": any_of(flag, null), "gain": UNKNOWN, "break_even": UNKNOWN,
     "versions": mapping(text()), "command": text(10_000)},
    others=plain,
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One way to solve the problem.

    Attributes:
        method: such as "rk4", "hybrid", "SciPy DOP853".
        setting: the step, or for error control the relative tolerance.
        adaptive: whether the setting is a tolerance.
        error: mean square error over all states, one every dt of the hybrid solver.
        seconds: Wall time, the shortest of several repetitions.
        rate_calls: Calls of the rate for all trajectories together; the network is not counted.
        first_seconds: Wall time of the first call, compilation included.
    """

    method: str
    setting: float
    adaptive: bool
    error: float
    seconds: float
    rate_calls: int
    first_seconds: float = 0.0

    @property
    def preparation(self) -> float:
        """Seconds that the first call took longer than later ones: compilation."""
        return max(0.0, self.first_seconds - self.seconds)

    def __str__(self) -> str:
        return f"{self.method} with {'rtol' if self.adaptive else 'dt'} = {self.setting:.2g}"


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        hybrid: the hybrid solver's point. points: everybody else's, by method.
        m: Plain steps of the hybrid's scheme, or of rk4 without a scheme, that reach the error of one
            of its steps; infinite if none was found to.
        m_star: Cost of a hybrid step in such plain steps.
        rival: The fastest other method at the hybrid's error, its time interpolated between settings;
            None if no other method reached it.
        about: The conditions: batch, horizon, dtype, threads, whether code was compiled, and the seconds
            that the fit took.
    """

    hybrid: Point
    points: tuple[Point, ...]
    m: float
    m_star: float
    rival: Point | None
    about: dict[str, Any]

    def plain(self, method: str) -> list[Point]:
        """The points of one method."""
        return [p for p in self.points if p.method == method]

    @property
    def gain(self) -> float:
        """Time of the fastest other method at the hybrid's error over the hybrid's; infinite if none."""
        return self.rival.seconds / self.hybrid.seconds if self.rival else math.inf

    @property
    def pays(self) -> bool | None:
        """Whether the hybrid is the fastest method at its error; None without compiled code."""
        return self.gain > 1 if self.about.get("compiled") else None

    @property
    def break_even(self) -> float:
        """Number of trajectories from which on the fit and the compilation have paid for themselves.

        Infinite if they never do; 0 if no other method reaches the error.
        """
        if self.rival is None:
            return 0.0
        saved = (self.rival.seconds - self.hybrid.seconds) / self.about.get("batch", 1)
        spent = (self.about.get("fit_seconds") or 0.0) + self.hybrid.preparation - self.rival.preparation
        return max(0.0, spent / saved) if saved > 0 else math.inf

    @property
    def verdict(self) -> str:
        """One line for a person, which names the conditions under which it holds."""
        about = self.about
        mode = "compiled" if about.get("compiled") else "eager mode"
        conditions = [mode, f"{about.get('batch', 1):,} trajectories at once"]
        conditions += [str(about[key]) for key in ("dtype", "device") if key in about]
        own = f"{', '.join(conditions)}; m = {self.m:.3g}, m* = {self.m_star:.3g}"
        if self.rival is None:
            result = "no other method reaches its error"
        elif self.gain > 1:
            result = f"{self.gain:.2g}x faster than {self.rival}, the fastest other method at its error"
        else:
            result = f"{self.rival} is {1 / self.gain:.2g}x faster at its error"
        if self.pays is None:
            return f"not decided: {result} ({own}); compiled code may decide otherwise (compile=True)"
        if not self.pays:
            return f"does not pay: {result} ({own})"
        if not about.get("fit_seconds"):
            return f"pays: {result} ({own})"
        return (
            f"pays from {self.break_even:,.0f} trajectories on: {result} ({own}; the fit took "
            f"{about['fit_seconds']:.0f} s, compilation {self.hybrid.preparation:.0f} s)"
        )

    def __repr__(self) -> str:
        methods = ", ".join(dict.fromkeys(p.method for p in self.points))
        return f"Comparison({self.verdict}; beside {len(self.points)} points of {methods or 'nobody'})"

    def _repr_html_(self) -> str:
        head = ("method", "setting", "mean square error", "milliseconds", "rate calls")
        rows = [
            (p.method, f"{'rtol' if p.adaptive else 'dt'} {p.setting:.2g}", p.error, 1e3 * p.seconds,
             p.rate_calls)
            for p in (self.hybrid, *self.points)
        ]  # fmt: skip
        return html_table(head, rows, self.verdict)

    def to_pandas(self) -> Any:
        """A row a point, the hybrid's first. Needs the extra `report`."""
        return pandas().DataFrame([asdict(p) for p in (self.hybrid, *self.points)])

    def plot(self, path: Path | str | None = None, title: str = "") -> Any:
        """Error against wall time and against rate calls, as a Matplotlib figure.

        Args:
            path: where to write it as a PNG, if anywhere. Needs the extra `report`.
        """
        figures = pictures("figures")
        figure = figures.work_precision(self, title)
        if path is not None:
            figures.write(figure, path)
        return figure

    def save(self, folder: Path | str) -> Path:
        """Write `compare.json`; returns its path."""
        return write_json(Path(folder) / "compare.json", self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return what is saved. Numbers that are not finite are None."""
        known = lambda x: x if x is None or math.isfinite(x) else None
        point = lambda p: {**asdict(p), "error": known(p.error)}
        return {
            "verdict": self.verdict, "pays": self.pays, "m": known(self.m), "m_star": self.m_star,
            "gain": known(self.gain), "break_even": known(self.break_even), "about": self.about,
            "hybrid": point(self.hybrid), "rival": point(self.rival) if self.rival else None,
            "points": list(map(point, self.points)),
        }  # fmt: skip

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """What was saved; JSON has null for what is infinite.

        Raises:
            ValueError: It is no comparison.
        """
        check(saved, COMPARISON, "a comparison")
        number = lambda x: math.inf if x is None else x
        point = lambda p: Point(**{**p, "error": number(p["error"])})
        return cls(
            hybrid=point(saved["hybrid"]),
            points=tuple(map(point, saved["points"])),
            m=number(saved["m"]),
            m_star=saved["m_star"],
            rival=None if saved["rival"] is None else point(saved["rival"]),
            about=saved["about"],
        )


def reach(points: Sequence[Point], target: float) -> Point | None:
    """Return where a method reaches the target, between two of its settings on logarithmic scales.

    Args:
        points: Points of one method, the coarsest first.
        target: The error to reach.

    Returns:
        An interpolated point, or None if no setting reaches the target.
    """
    coarser: Point | None = None
    preparation = max((p.preparation for p in points), default=0.0)  # compiled for the first setting
    for p in points:
        if p.error <= target:
            if coarser is None or not math.isfinite(coarser.error):
                return replace(p, first_seconds=p.seconds + preparation)
            share = math.log(coarser.error / target) / math.log(coarser.error / max(p.error, 1e-300))
            between = lambda a, b: a * (b / a) ** share  # noqa: B023
            seconds = between(coarser.seconds, p.seconds)
            return Point(
                p.method, between(coarser.setting, p.setting), p.adaptive, target, seconds,
                round(between(coarser.rate_calls, p.rate_calls)), seconds + preparation,
            )  # fmt: skip
        coarser = p
    return None


def methods_of(points: Sequence[Point]) -> list[str]:
    """Return the names of the methods, in their order."""
    return list(dict.fromkeys(p.method for p in points))
