"""Loops of steps in C, for rates that are arithmetic on the components of a state.

`evolve(..., compile=True)` on a CPU calls `native_loop` for fixed steps and `native_rounds` under error
control. They trace the rate, the correction and the trust region (`tracing`), write each of them as a
program of scalars for one trajectory (`scalars`, `aten`), and the steps of the scheme around them as C
(`code`, `steps`, `control`), which the C compiler of the machine compiles in about a second
(`compiler`). For Rosenbrock schemes the program of the rate is differentiated (`derivatives`), and
linear systems are solved in C as well (`rosenbrock`). A block of trajectories takes all its steps at
once, in the first cache, so that a step of one trajectory takes a fraction of a microsecond. What
cannot be written in this way is left to torch's compiler.

    loop = native_loop(rate, get_scheme("rk4"), None, None, t, dt, u0, None)
    taken, u, inside, stayed = loop(t, dt, torch.tensor(100), u0, anywhere)
"""

from attractor.core.native.control import native_rounds
from attractor.core.native.steps import native_loop

__all__ = ["native_loop", "native_rounds"]
