"""Files that survive interruptions and refuse what they do not know.

Every file is written beside its place, synchronised and renamed (`files`), read within limits
(`limits`), and checked against one schema per format (`schema`, `tensor_specs`). `fingerprint` says
whether a value or the code of a function is what it was when a file was written.

>>> from attractor.storage.schema import check, number, record
>>> check({"dt": 0.1}, record({"dt": number(0)}), "solver.json", ValueError)
"""

from types import ModuleType

from attractor.common.lazy import submodule


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name)
