"""Pictures, and self-contained HTML pages that open offline.

This needs the `report` extra (Matplotlib and Plotly), which is imported when a picture is drawn.

>>> from attractor.report import Page
>>> page = Page("Two springs").text("One drifts.").table(["scheme", "error"], [["rk4", 1.5e-6]])
>>> "1.5e-06" in page.html()
True
"""

from types import ModuleType

from attractor.common.lazy import submodule
from attractor.report.page import Page

__all__ = ["Page"]


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name)
