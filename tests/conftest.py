import hashlib
import os
import signal
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import settings

# What makes commands colourful or wide elsewhere must not reach tests that read their output.
for _name in (
    "FORCE_COLOR",
    "PY_COLORS",
    "GITHUB_ACTIONS",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "COLUMNS",
):
    os.environ.pop(_name, None)

if (
    not torch.cuda.is_available()
):  # kernels are tested in Triton's interpreter; said before its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs are deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _quicker_interpreter():
    """Two thirds of the time of Triton's interpreter are not for these tests.

    It looks for overflows of whole numbers, which small tensors cannot have. It patches its language at
    every call of a device function, though what is patched stays so until the launch ends. And it looks
    up the same types of NumPy again and again.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter

        patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope
        type_of, types = interpreter._get_np_dtype, {}
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
    except (ImportError, AttributeError, TypeError):  # there is no Triton, or another one
        return

    def once(function):
        languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        if languages and not any(tl.core.is_builtin(x.load) for x in languages):
            return nothing()
        return patch(function)

    def looked_up(kind):
        name = kind.scalar.name
        if name not in types:
            types[name] = type_of(kind)
        return types[name]

    interpreter._patch_lang, interpreter._get_np_dtype = once, looked_up


if os.environ.get("TRITON_INTERPRET") == "1":
    _quicker_interpreter()

settings.register_profile("fast", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("fast")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # torch gives up on a function after eight recompilations


@pytest.fixture(autouse=True)
def _closed_figures():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(autouse=True, scope="session")
def _short_races():
    """Nobody reads the times that are measured here."""
    import attractor.ode.race

    attractor.ode.race.ENOUGH = 0.0


@pytest.fixture(params=["native", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request, monkeypatch):
    """What makes code for compile=True: loops in C where they are possible, or torch's compiler alone.

    A C++ compiler takes a minute, the others a second.
    """
    from attractor.core import compiling, control, grid

    if request.param != "native":
        monkeypatch.setattr(grid, "native_loop", lambda *step: None)
        monkeypatch.setattr(control, "native_rounds", lambda *step: None)
    if request.param == "aot_eager":
        compile = torch.compile

        def made(run, options=None):
            compile(run, options=options)  # which looks at the options, and compiles at the first call
            return compile(run, backend=request.param)

        monkeypatch.setattr(torch, "compile", made)
    compiling._compiled.cache_clear()
    yield request.param
    compiling._compiled.cache_clear()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items):
    sampled = {}
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            sampled.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in sampled.values():
        # By a hash, so that every parameter varies within a small sample.
        cases.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        count = cases[0].get_closest_marker("sampled").args[0]
        for item in cases[count:]:
            item.add_marker(pytest.mark.slow)
