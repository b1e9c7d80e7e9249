"""The table of targets: importing this fills `judging.TARGETS`."""

from tests.fuzz.judging import warm_up
from tests.fuzz.targets import attention, core, data, integrations, ode, residual  # noqa: F401

warm_up()
