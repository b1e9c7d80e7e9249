"""The C compiler of the machine."""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

SECONDS = 60  # after which a compiler is given up
# For functions of vectors in glibc's libmvec, which loops over lanes call. Without -fno-builtin the
# compiler would join sines and cosines to a function that has no such counterpart.
VECTOR_MATH = ("-DVECTOR_MATH", "-fno-builtin", "-lmvec", "-lm", "-Wl,--no-undefined")


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
