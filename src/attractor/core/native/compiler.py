"""The C compiler of the machine, and the libraries that it has made of traced functions."""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from attractor.core.native.scalars import FUNCTIONS
from attractor.core.native.tracing import ScalarFunction

SECONDS = 60  # after which a compiler is given up
# For functions of vectors in glibc's libmvec, which loops over lanes call. Without -fno-builtin the
# compiler would join sines and cosines to a function that has no such counterpart.
VECTOR_MATH = ("-DVECTOR_MATH", "-fno-builtin", "-lmvec", "-lm", "-Wl,--no-undefined")


TYPES = {torch.float32: "float", torch.float64: "double"}
VECTOR_BYTES = 64
CACHE = 24_000  # bytes of the stages of a block, to stay in the first cache
MOST_LIBRARIES = 64  # of compiled steps
MOST_STATEMENTS = 6_000  # of a step's functions, which C compilers handle in seconds

_LIBRARIES: dict[Any, tuple[Any, ctypes.CDLL | None]] = {}


def lanes_of(dtype: torch.dtype, trajectories: int, blocks: int) -> int:
    """Return the number of trajectories in a block: those of a vector, or of two if that is faster.

    Args:
        blocks: How many numbers of each trajectory a step keeps.
    """
    lanes = VECTOR_BYTES // dtype.itemsize
    return 2 * lanes if trajectories > lanes and 2 * VECTOR_BYTES * blocks <= CACHE else lanes


def library_of(
    functions: Sequence[ScalarFunction],
    key: Any,
    source: Callable[[], str],
    macros: Sequence[str],
    vector_math: bool = False,
) -> ctypes.CDLL | None:
    """Return a library for traced functions, the same as long as their programs are, or None.

    Args:
        key: What the source depends on besides the programs.
        source: Returns the source text, if it has to be compiled.
        macros: Definitions ``NAME=VALUE``.
        vector_math: Whether the source calls elementary functions in any case.
    """
    programs = [f.program for f in functions]
    key = (*map(id, programs), key, *macros)
    if key not in _LIBRARIES:
        while len(_LIBRARIES) >= MOST_LIBRARIES:
            _LIBRARIES.pop(next(iter(_LIBRARIES)))
        library = None
        if sum(f.statements for f in functions) <= MOST_STATEMENTS:
            math = vector_math or any(kind in FUNCTIONS for f in functions for kind in f.kinds)
            text = source()
            library = compiled_library(text, tuple(macros), math) or compiled_library(
                text, tuple(macros)
            )
        _LIBRARIES[key] = programs, library  # the programs, so that no other one has their ids
    return _LIBRARIES[key][1]


@lru_cache(maxsize=256)
def compiled_library(
    source: str, macros: tuple[str, ...] = (), vector_math: bool = False
) -> ctypes.CDLL | None:
    """Return the library that the C compiler makes of a source text; None if there is no compiler.

    Args:
        macros: Definitions ``NAME=VALUE``.
        vector_math: Whether the macro VECTOR_MATH is defined and libmvec linked; None is returned where
            there is no such library.
    """
    name = os.environ.get("CC", "cc")
    compiler = shutil.which(name) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    arm = platform.machine() in ("aarch64", "arm64")
    native = ["-mcpu=native"] if arm else ["-march=native", "-mprefer-vector-width=512"]
    options = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
    libraries = VECTOR_MATH if vector_math else ("-lm",)
    with tempfile.TemporaryDirectory() as folder:
        text, library = Path(folder) / "source.c", Path(folder) / "library.so"
        text.write_text(source)
        for extra in ([*native, "-fopenmp"], native, []):  # the fastest that this compiler accepts
            definitions = [f"-D{macro}" for macro in macros]
            command = [
                compiler,
                *options,
                *extra,
                *definitions,
                str(text),
                "-o",
                str(library),
                *libraries,
            ]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
                return ctypes.CDLL(str(library))
            except (OSError, subprocess.SubprocessError):
                continue
    return None
