"""The schemes we ship, as their textbooks print them. `get_scheme` finds them by name."""

from difflib import get_close_matches
from typing import TypeAlias

from attractor.core.scheme import Scheme
from attractor.core.splitting import Splitting

AnyScheme: TypeAlias = Scheme | Splitting

EULER = Scheme("euler", [[]], [1], [0], 1)

HEUN = Scheme("heun", [[], [1]], ["1/2", "1/2"], [0, 1], 2)  # "improved Euler" in the AttNS paper

MIDPOINT = Scheme("midpoint", [[], ["1/2"]], [0, 1], [0, "1/2"], 2)

RALSTON = Scheme("ralston", [[], ["2/3"]], ["1/4", "3/4"], [0, "2/3"], 2)

RK3 = Scheme("rk3", [[], ["1/2"], [-1, 2]], ["1/6", "2/3", "1/6"], [0, "1/2", 1], 3)  # Kutta 1901

HEUN3 = Scheme("heun3", [[], ["1/3"], [0, "2/3"]], ["1/4", 0, "3/4"], [0, "1/3", "2/3"], 3)

SSPRK3 = Scheme(  # Shu and Osher 1988: strong stability preserving
    "ssprk3", [[], [1], ["1/4", "1/4"]], ["1/6", "1/6", "2/3"], [0, 1, "1/2"], 3
)

RK4 = Scheme(
    "rk4",
    [[], ["1/2"], [0, "1/2"], [0, 0, 1]],
    ["1/6", "1/3", "1/3", "1/6"],
    [0, "1/2", "1/2", 1],
    4,
)

RK4_38 = Scheme(  # Kutta's 3/8 rule; torchdiffeq's "rk4"
    "rk4_38",
    [[], ["1/3"], ["-1/3", 1], [1, -1, 1]],
    ["1/8", "3/8", "3/8", "1/8"],
    [0, "1/3", "2/3", 1],
    4,
)

ADAPTIVE_HEUN = Scheme("adaptive_heun", [[], [1]], ["1/2", "1/2"], [0, 1], 2, b_low=[1, 0])

FEHLBERG2 = Scheme(  # Fehlberg's RK1(2)
    "fehlberg2",
    [[], ["1/2"], ["1/256", "255/256"]],
    ["1/512", "255/256", "1/512"],
    [0, "1/2", 1],
    2,
    b_low=["1/256", "255/256", 0],
)

BOSH3 = Scheme(  # Bogacki and Shampine 1989
    "bosh3",
    [[], ["1/2"], [0, "3/4"], ["2/9", "1/3", "4/9"]],
    ["2/9", "1/3", "4/9", 0],
    [0, "1/2", "3/4", 1],
    3,
    b_low=["7/24", "1/4", "1/3", "1/8"],
)

DOPRI5 = Scheme(  # Dormand and Prince 1980; dense output: Hairer, Norsett, Wanner I, II.6
    "dopri5",
    [
        [],
        ["1/5"],
        ["3/40", "9/40"],
        ["44/45", "-56/15", "32/9"],
        ["19372/6561", "-25360/2187", "64448/6561", "-212/729"],
        ["9017/3168", "-355/33", "46732/5247", "49/176", "-5103/18656"],
        ["35/384", 0, "500/1113", "125/192", "-2187/6784", "11/84"],
    ],
    ["35/384", 0, "500/1113", "125/192", "-2187/6784", "11/84", 0],
    [0, "1/5", "3/10", "4/5", "8/9", 1, 1],
    5,
    b_low=["5179/57600", 0, "7571/16695", "393/640", "-92097/339200", "187/2100", "1/40"],
    dense=[
        "-12715105075/11282082432",
        0,
        "87487479700/32700410799",
        "-10690763975/1880347072",
        "701980252875/199316789632",
        "-1453857185/822651844",
        "69997945/29380423",
    ],
)

LEAPFROG = Splitting("leapfrog", kick=(0.5, 0.5), drift=(1.0,), order=2)

_W1 = 1 / (2 - 2 ** (1 / 3))  # Yoshida 1990: three leapfrogs of w1, 1 - 2 w1 and w1 steps
_W0 = 1 - 2 * _W1
YOSHIDA4 = Splitting(
    "yoshida4",
    kick=(_W1 / 2, (_W1 + _W0) / 2, (_W0 + _W1) / 2, _W1 / 2),
    drift=(_W1, _W0, _W1),
    order=4,
)

ALL: dict[str, AnyScheme] = {
    scheme.name: scheme for scheme in list(globals().values()) if isinstance(scheme, Scheme | Splitting)
}


def get_scheme(name: str | AnyScheme) -> AnyScheme:
    """The scheme of that name, such as ``"rk4"``; a scheme is handed back as it is."""
    if isinstance(name, Scheme | Splitting):
        return name
    if not isinstance(name, str):
        raise TypeError(f"a scheme is a name, a Scheme or a Splitting, not a {type(name).__name__}")
    if name not in ALL:
        near = get_close_matches(name, ALL, n=1)
        hint = f"; did you mean {near[0]!r}? There are" if near else "; there are"
        raise ValueError(f"no scheme is called {name!r}{hint} {', '.join(ALL)}")
    return ALL[name]
