from fractions import Fraction

import pytest
import torch

import attractor as at
from attractor.core.tableaus import ALL

DECAY = lambda t, u: -u


def test_five_lines_make_a_scheme():
    nystrom = at.Scheme(
        "nystrom3", a=[[], ["2/3"], [0, "2/3"]], b=["1/4", "3/8", "3/8"], c=[0, "2/3", "2/3"], order=3
    )
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    final = at.evolve(DECAY, torch.ones(1, dtype=torch.float64), t, nystrom).final
    assert final.item() == pytest.approx(0.36787944, abs=3e-5)


def test_square_and_ragged_and_headless_rows_are_the_same():
    given = dict(b=["1/6", "2/3", "1/6"], c=[0, "1/2", 1], order=3)
    ragged = at.Scheme("x", [[], ["1/2"], [-1, 2]], **given)
    assert ragged == at.Scheme("x", [[0, 0, 0], ["1/2", 0, 0], [-1, 2, 0]], **given)
    assert ragged == at.Scheme("x", [["1/2"], [-1, 2]], **given)
    assert hash(ragged) == hash(at.Scheme("x", [["1/2"], [-1, 2]], **given))
    assert ragged.a == at.schemes.RK3.a


def test_floats_are_allowed_where_fractions_do_not_exist():
    # Ralston's fourth-order scheme of least truncation error has square roots of 5 in it.
    r = 5**0.5
    c = [0, 0.4, (14 - 3 * r) / 16, 1]
    a = [
        [],
        [0.4],
        [(-2889 + 1428 * r) / 1024, (3785 - 1620 * r) / 1024],
        [(-3365 + 2094 * r) / 6040, (-975 - 3046 * r) / 2552, (467040 + 203968 * r) / 240845],
    ]
    b = [
        (263 + 24 * r) / 1812,
        (125 - 1000 * r) / 3828,
        1024 * (3346 + 1623 * r) / 5924787,
        (30 - 4 * r) / 123,
    ]
    assert at.Scheme("ralston4", a, b, c, 4).order == 4
    with pytest.raises(ValueError, match="claims order 5"):
        at.Scheme("ralston4", a, b, c, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(c=[0, "1/2", "1/3", 1]), r"row 2 of a adds up to 1/2, but c\[2\] is 1/3"),
        (dict(b=["1/6", "1/3", "1/3", "1/3"]), "b adds up to 7/6, not to 1"),
        (dict(b=["1/4", "1/4", "1/4", "1/4"]), "claims order 4, but the conditions of order 3"),
        (
            dict(order=5),
            "claims order 5, but the conditions of order 5 have a residual of .* pass order=4",
        ),
        (dict(order=0), "order 0 must be a whole number"),
        (dict(c=[0, 1]), "c has 2 entries but b has 4"),
        (dict(a=[[], ["1/2"], [0, "1/2"], [0, 0, 0, 1]]), "implicit"),
        (dict(a=[[], ["1/2"], ["1/2"], [0, 0, 1]]), "row 2 of a has 1 entries; it needs 2"),
        (dict(b=["1/6", "1/3", "1/3", "one sixth"]), "write 1, '1/6' or Fraction"),
        (dict(b_low=[1, 1, 0, 0]), "b_low adds up to 2, not to 1"),
        (dict(b_low=[1]), "b_low has 1 entries but b has 4"),
    ],
)
def test_a_wrong_tableau_is_refused(change, message):
    rk4 = dict(
        a=[[], ["1/2"], [0, "1/2"], [0, 0, 1]],
        b=["1/6", "1/3", "1/3", "1/6"],
        c=[0, "1/2", "1/2", 1],
        order=4,
    )
    with pytest.raises(ValueError, match=message):
        at.Scheme("mine", **{**rk4, **change})


def test_orders_above_five_are_checked_too():
    # Butcher's sixth-order scheme.
    a = [
        [],
        ["1/3"],
        [0, "2/3"],
        ["1/12", "1/3", "-1/12"],
        ["-1/16", "9/8", "-3/16", "-3/8"],
        [0, "9/8", "-3/8", "-3/4", "1/2"],
        ["9/44", "-9/11", "63/44", "18/11", 0, "-16/11"],
    ]
    b, c = (
        ["11/120", 0, "27/40", "27/40", "-4/15", "-4/15", "11/120"],
        [0, "1/3", "2/3", "1/3", "1/2", "1/2", 1],
    )
    assert at.Scheme("butcher6", a, b, c, 6).order == 6
    with pytest.raises(ValueError, match="pass order=6"):
        at.Scheme("butcher6", a, b, c, 7)


def test_order_of_the_embedded_weights_is_found():
    assert at.schemes.DOPRI5.order_low == 4
    assert at.schemes.BOSH3.order_low == 2
    assert at.schemes.RK4.order_low == 0


def test_rk4_is_the_one_of_the_paper():
    rk4 = at.get_scheme("rk4")
    assert rk4.b == tuple(map(Fraction, ("1/6", "1/3", "1/3", "1/6")))
    f = lambda t, u: t * u.cos()
    u, h, t = torch.rand(3, dtype=torch.float64), 0.1, 0.5
    j1 = f(t, u)
    j2 = f(t + h / 2, u + h / 2 * j1)
    j3 = f(t + h / 2, u + h / 2 * j2)
    j4 = f(t + h, u + h * j3)
    torch.testing.assert_close(rk4.slope(f, t, u, h), (j1 + 2 * j2 + 2 * j3 + j4) / 6)


def test_rk3_is_the_one_of_the_paper():
    f = lambda t, u: u.cos()
    u, h = torch.rand(3, dtype=torch.float64), 0.1
    k1 = f(0, u)
    k2 = f(0, u + h / 2 * k1)
    k3 = f(0, u - h * k1 + 2 * h * k2)
    torch.testing.assert_close(at.schemes.RK3.slope(f, 0.0, u, h), (k1 + 4 * k2 + k3) / 6)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'dopri5'"):
        at.get_scheme("dopry5")
    with pytest.raises(TypeError, match="scheme is a int; pass a name"):
        at.get_scheme(4)


def test_names_promised_by_the_design_exist():
    promised = "euler heun midpoint ralston rk3 ssprk3 rk4 rk4_38 bosh3 dopri5 leapfrog yoshida4"
    assert set(promised.split()) <= set(ALL)


def test_repr():
    assert repr(at.schemes.DOPRI5) == "Scheme('dopri5', order 5 (error from order 4), 7 stages)"


@pytest.mark.parametrize(
    ("rate", "error", "message"),
    [
        (lambda t, u: u.sum(-1), ValueError, r"returned shape \[3\] for a state of shape \[3, 2\]"),
        (lambda t, u: u.double(), ValueError, r"torch.float64 for a state in torch.float32"),
        (lambda t, u: None, TypeError, "returned a NoneType"),
    ],
)
def test_a_wrong_rate_is_named(rate, error, message):
    with pytest.raises(error, match=message):
        at.evolve(rate, torch.ones(3, 2), torch.linspace(0, 1, 3))


def test_a_pair_that_estimates_nothing_is_refused():
    with pytest.raises(ValueError, match="every error estimate would be 0"):
        at.Scheme("x", [[], [1]], ["1/2", "1/2"], [0, 1], 2, b_low=["1/2", "1/2"])


def test_numbers_of_numpy():
    import numpy as np

    scheme = at.Scheme(
        "x", [[], [1]], np.array([0.5, 0.5]), np.array([0, 1]), 2, b_low=np.array([1.0, 0.0])
    )
    assert scheme.order_low == 1
    assert at.Scheme("x", [[]], [np.float32(1)], [np.int64(0)], 1) == at.Scheme("x", [[]], [1], [0], 1)


@pytest.mark.slow
def test_pickled_in_another_process_it_is_the_same():
    import os
    import pickle
    import subprocess
    import sys

    code = (
        "import pickle, sys, attractor as at; s = pickle.loads(sys.stdin.buffer.read());"
        "assert s == at.schemes.RK4 and hash(s) == hash(at.schemes.RK4)"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(at.schemes.RK4), env=environment, check=True
        )
