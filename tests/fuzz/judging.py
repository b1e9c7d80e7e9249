"""What every public function must satisfy, whatever it is called with.

Either a result, finite wherever the input is tame, of the documented shape and dtype; or a ValueError
or TypeError (or what a function documents) that the library raised itself, with a message. Nothing
else: no other exception, no hang, no change of the arguments or of anything global.
"""

import contextlib
import dis
import math
import random
import re
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import attractor
from tests.fuzz.strategies import Maker

HOME = str(Path(attractor.__file__).parent)
HERE = str(Path(__file__).parent)
RAISE = dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]
LIMIT = 20.0  # seconds for one call: far more than any needs


class Finding(AssertionError):  # noqa: N818
    """What must not happen, and where it did."""

    def __init__(self, kind: str, where: str, what: str) -> None:
        super().__init__(f"{kind} at {where}: {what}")
        self.kind, self.where, self.what = kind, where, what


@dataclass
class Call:
    """One call.

    Attributes:
        run: takes nothing, calls the function.
        check: given the result of tame arguments: raises AssertionError if it is not as documented.
        again: for other layouts or batches of the same numbers; must give the same result.
        finite: whether the result must be finite; None: if the arguments are tame.
        tolerance: of the comparison with `again`.
    """

    run: Callable[[], Any]
    check: Callable[[Any], None] | None = None
    again: Callable[[], Any] | None = None
    finite: bool | None = None
    tolerance: float = 0.0


def calling(
    function: Callable[..., Any],
    *args: Any,
    check: Callable[[Any], None] | None = None,
    finite: bool | None = None,
    layouts: bool = True,
    tolerance: float = 0.0,
    **options: Any,
) -> Call:
    """A call of a function; with tensors that are not contiguous also one with copies that are."""
    given = [*args, *options.values()]
    odd = any(isinstance(x, Tensor) and not x.is_contiguous() for x in given)
    again = None
    if odd and layouts:
        again = lambda: function(*map(dense, args), **{k: dense(v) for k, v in options.items()})
    return Call(lambda: function(*args, **options), check, again, finite, tolerance)


def dense(x: Any) -> Any:
    return x.detach().contiguous() if isinstance(x, Tensor) else x


@dataclass(frozen=True)
class Target:
    """A public function and how to try it.

    Attributes:
        name: of the function, from `attractor` on.
        make: draws one call of it.
        raises: what it documents besides ValueError and TypeError.
        random: whether it may draw from torch's global generator.
        slow: whether a call takes more than 5 milliseconds.
    """

    name: str
    make: Callable[[Maker], Call]
    raises: tuple[type[BaseException], ...] = ()
    random: bool = False
    slow: bool = False
    needs: str | None = None
    warns: bool = False


TARGETS: dict[str, Target] = {}

# Findings that are reported and not yet mended: where, and a part of what is said.
KNOWN: tuple[tuple[str, str], ...] = ()


def is_known(finding: Finding) -> bool:
    """Whether a finding is in the list of those that are reported."""
    return any(finding.where.startswith(where) and part in finding.what for where, part in KNOWN)


def target(name: str, **options: Any) -> Callable[[Callable[[Maker], Call]], Callable[[Maker], Call]]:
    """Put a function that draws calls into the table."""

    def put(make: Callable[[Maker], Call]) -> Callable[[Maker], Call]:
        assert name not in TARGETS, name
        TARGETS[name] = Target(name, make, **options)
        return make

    return put


def judge(which: Target, maker: Maker, call: Call, limit: float = LIMIT) -> str:
    """Make a call; "result" or the name of the error it is refused with. Raises a Finding."""
    before, copies = global_state(which.random), [(x, x._version) for x in maker.tensors]
    refused: BaseException | None = None
    result = None
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            with time_limit(limit):
                result = call.run()
        except Hang:
            raise Finding("hang", which.name, f"more than {limit:g} s") from None
        except (Exception, SystemExit) as error:
            refused = error
    for name, was, now in zip(before, before.values(), global_state(which.random).values()):
        if was != now:
            restore()
            raise Finding("global state", which.name, f"{name} was {was!r} and is {now!r}")
    for tensor, version in copies:
        if tensor._version != version:
            raise Finding("changed its input", which.name, f"a tensor of shape {list(tensor.shape)}")
    if refused is not None:
        _check_refusal(which, refused)
        return type(refused).__name__
    if (call.finite or (call.finite is None and maker.tame and maker.finite)) and not all_finite(result):
        raise Finding("not finite", which.name, f"from finite arguments: {short(result)}")
    if maker.tame and maker.finite:
        try:
            if call.check is not None:
                call.check(result)
            if call.again is not None:
                alike(result, call.again(), call.tolerance)
        except AssertionError as error:
            raise Finding("not as documented", which.name, str(error)[:400]) from error
    return "result"


def _check_refusal(which: Target, error: BaseException) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(HOME)]
    last = own[-1] if own else frames[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    told = f"{type(error).__name__}: {error}"[:300]
    if not isinstance(error, (ValueError, TypeError, *which.raises)):
        raise Finding("exception", where, told) from error
    if len(str(error)) < 12:
        raise Finding("no message", where, told) from error
    if isinstance(error, TypeError) and not _from_torch(error):
        return  # Python's own say what was given
    if isinstance(error, which.raises):
        return  # documented as somebody else's: the file system's, torch's
    if not _raised_by_us(error):
        raise Finding("bare error", where, told) from error


def _last(error: BaseException) -> Any:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _raised_by_us(error: BaseException) -> bool:
    """Whether a raise statement of the library, or of a function that stands for a user's, did it."""
    trace = _last(error)
    code = trace.tb_frame.f_code
    return code.co_filename.startswith((HOME, HERE)) and code.co_code[trace.tb_lasti] in RAISE


def _from_torch(error: BaseException) -> bool:
    """Whether it came out of torch: its frames, or one of its functions called from ours."""
    trace = _last(error)
    inside = f"{Path(torch.__file__).parent}" in trace.tb_frame.f_code.co_filename
    own = re.match(r"[a-z_]+\(\)(:| received) ", str(error)) and "unexpected keyword" not in str(error)
    names_it = re.search(r"argument '(dtype|device)'", str(error))  # ours are called the same
    return bool(inside or own) and not names_it


# Looking at results


def tensors_of(result: Any, depth: int = 0) -> Iterator[Tensor | float]:
    """All numbers in a result: tensors, floats, nested as they may be."""
    if isinstance(result, Tensor | float | complex):
        yield result
    elif isinstance(result, np.ndarray):
        yield torch.as_tensor(result.copy())
    elif isinstance(result, nn.Module):
        yield from (x for x in (*result.parameters(), *result.buffers()))
    elif isinstance(result, dict):
        for part in result.values():
            yield from tensors_of(part, depth + 1)
    elif isinstance(result, list | tuple):
        for part in result:
            yield from tensors_of(part, depth + 1)
    elif is_dataclass(result) and not isinstance(result, type) and depth < 4:
        for part in fields(result):
            yield from tensors_of(getattr(result, part.name, None), depth + 1)


def all_finite(result: Any) -> bool:
    for part in tensors_of(result):
        if isinstance(part, Tensor):
            real = part.is_floating_point() or part.is_complex()
            if real and part.device.type != "meta" and not bool(torch.isfinite(part).all()):
                return False
        elif not math.isfinite(abs(part)):
            return False
    return True


def alike(one: Any, other: Any, tolerance: float) -> None:
    """Raises AssertionError unless two results hold nearly the same numbers."""
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=True))
    for a, b in pairs:
        a, b = torch.as_tensor(a).detach(), torch.as_tensor(b).detach()
        assert a.shape == b.shape, f"{list(a.shape)} and {list(b.shape)}"
        assert a.dtype == b.dtype, f"{a.dtype} and {b.dtype}"
        if a.is_floating_point():
            least = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4}.get(a.dtype, 1e-9)
            torch.testing.assert_close(
                a.double(),
                b.double(),
                rtol=max(least, tolerance),
                atol=max(least, tolerance),
                equal_nan=True,
            )
        else:
            assert bool((a == b).all())


def shaped(*shape: int, dtype: torch.dtype | None = None) -> Callable[[Any], None]:
    """A check: the result is a tensor of that shape, and dtype."""

    def check(result: Any) -> None:
        assert isinstance(result, Tensor), f"a {type(result).__name__}"
        assert tuple(result.shape) == tuple(shape), f"{list(result.shape)} in place of {list(shape)}"
        if dtype is not None:
            assert result.dtype == dtype, f"{result.dtype} in place of {dtype}"

    return check


def short(result: Any) -> str:
    return " ".join(repr(result).split())[:200]


# What a call must leave alone


def global_state(random_allowed: bool) -> dict[str, Any]:
    """Everything global that a call might change."""
    state = {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default device": str(torch.get_default_device()),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "python's random": hash(random.getstate()),
        "numpy's random": hash(np.random.get_state()[1].tobytes()),  # type: ignore[union-attr]
    }
    if not random_allowed:
        state["torch's random"] = hash(torch.get_rng_state().numpy().tobytes())
    return state


def restore() -> None:
    """Undo what a finding did, so that it is found once and not in every test after it."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


class Hang(BaseException):
    """A call took too long."""


class Watch:
    """A clock that ticks in this process's own time; setting one for every call would cost more than the call."""

    ticks = 0
    begun: int | None = None  # tick at which the call began that is under way
    limit: float | None = None  # seconds for a call, while the clock runs


@contextmanager
def watched(seconds: float = LIMIT) -> Iterator[None]:
    """Calls judged inside are stopped by one common clock."""

    def tick(*_: Any) -> None:
        Watch.ticks += 1
        if Watch.begun is not None and Watch.ticks - Watch.begun > 4:
            Watch.begun = None
            raise Hang

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, tick)
    signal.setitimer(signal.ITIMER_PROF, seconds / 4, seconds / 4)
    Watch.limit = seconds
    try:
        yield
    finally:
        Watch.limit = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `Hang` in the main thread after so many seconds of this process's own time, or a quarter more."""
    if Watch.limit != seconds and threading.current_thread() is threading.main_thread():
        with watched(seconds), time_limit(seconds):
            yield
        return
    Watch.begun = Watch.ticks
    try:
        yield
    finally:
        Watch.begun = None


def warm_up() -> None:
    """What torch imports when the meta device is first used takes seconds, and is nobody's hang."""
    with contextlib.suppress(RuntimeError):
        torch.ones(2, device="meta").sin() + torch.ones(2)
    with contextlib.suppress(RuntimeError):
        torch.ones(2, 2, device="meta") @ torch.ones(2, 2)


@dataclass
class Tally:
    """What a campaign saw of one target."""

    calls: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, which: Target, maker: Maker, call: Call) -> None:
        """Judge a call and take note."""
        self.calls += 1
        try:
            outcome = judge(which, maker, call)
        except Finding as finding:
            outcome = "known" if is_known(finding) else "finding"
            key = f"{finding.kind} at {finding.where}"
            found = self.known if outcome == "known" else self.findings
            entry = found.setdefault(key, {"count": 0, "what": finding.what})
            entry["count"] += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
