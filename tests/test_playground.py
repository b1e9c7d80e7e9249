"""The playground of the docs, in a browser: its numbers are the library's, and every control does something."""

import json
from pathlib import Path

import pytest
import torch

import attractor as at
from attractor.attention.engines.dense import dense
from tests.browser import Browser

PAGE = Path(__file__).parents[1] / "docs" / "_static" / "playground.html"
MASKS = {
    "none": lambda size, n: {},
    "causal": lambda size, n: {"is_causal": True},
    "window": lambda size, n: {"window": size},
    "causal_window": lambda size, n: {"is_causal": True, "window": size},
    "padding": lambda size, n: {"key_padding": (torch.arange(n) < n - size)[None]},
}
EQUATIONS = [
    ("diffusion", at.pdes.Diffusion, {}),
    ("diffusion", at.pdes.Diffusion, {"alpha": 0.45}),
    ("wave", at.pdes.Wave, {"c": 0.0}),
    ("wave", at.pdes.Wave, {"c": 0.9}),
    ("reaction_diffusion", at.pdes.ReactionDiffusion, {}),
    ("reaction_diffusion", at.pdes.ReactionDiffusion, {"alpha": 0.3, "beta": -0.25}),
    ("advection_diffusion", at.pdes.AdvectionDiffusion, {}),
    ("advection_diffusion", at.pdes.AdvectionDiffusion, {"alpha": 0.25, "beta": -0.3}),
]
PICTURES = "JSON.stringify([...document.querySelectorAll('canvas')].map(c => c.toDataURL()))"


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture
def page(browser):
    browser.resize(1280, 900)
    browser.open(PAGE)
    yield browser
    assert browser.errors == []
    assert browser.requests == []


def played(browser, call, **options):
    return browser.evaluate(f"attractorPlayground.{call}({json.dumps(options)})")


@pytest.mark.parametrize(("name", "equation", "coefficients"), EQUATIONS)
def test_maps_are_those_of_the_library(page, name, equation, coefficients):
    n, generator, largest = 13, torch.Generator().manual_seed(5), 0.0
    pde = equation(**coefficients)
    for mask, arguments in MASKS.items():
        for walls in ("mask", "sequence", "periodic"):
            for steps, dt, size in ((1, 1.0, 2), (7, 0.5, 5)):
                scores = 2 * torch.randn(n, n, generator=generator, dtype=torch.float64)
                one = torch.eye(n, dtype=torch.float64)[None, None]
                _, truth = dense(
                    scores[None, None], one, one, scale=1.0, pde=pde, steps=steps, dt=dt, walls=walls,
                    **arguments(size, n),
                )  # fmt: skip
                found = played(
                    page, "evolve", pde=name, dt=dt, steps=steps, walls=walls, mask=mask, size=size,
                    scores=scores.tolist(), **coefficients,
                )  # fmt: skip
                error = (torch.tensor(found, dtype=torch.float64) - truth[0, 0]).abs().max().item()
                largest = max(largest, error)
    assert largest < 1e-12
    limit = played(page, "maxDt", pde=name, **coefficients)
    assert pde.max_dt() == (float("inf") if limit is None else pytest.approx(limit, rel=1e-15))


def test_every_stage_and_measure_is_that_of_a_trace(page):
    generator = torch.Generator().manual_seed(6)
    query, key = torch.randn(2, 1, 1, 11, 5, generator=generator, dtype=torch.float64)
    options = {"mask": "causal", "walls": "sequence", "pde": "wave", "c": 0.5, "steps": 5, "dt": 0.9}
    scores = (query @ key.transpose(-1, -2) / 5**0.5)[0, 0].tolist()
    truth = at.attention.trace(
        query, key, is_causal=True, pde=at.pdes.Wave(c=0.5), steps=5, dt=0.9, walls="sequence"
    )
    maps = torch.tensor(played(page, "trace", scores=scores, **options), dtype=torch.float64)
    assert (maps - truth.maps[:, 0, 0]).abs().max() < 1e-12
    found = page.evaluate(
        f"(o => attractorPlayground.measures(o, attractorPlayground.evolve(o)))"
        f"({json.dumps({**options, 'scores': scores})})"
    )
    assert found["forbidden"] == pytest.approx(truth.leaked[-1].item(), rel=1e-12)
    assert found["future"] == found["forbidden"]  # what a causal mask forbids is the future
    assert found["rowSums"] == pytest.approx(truth.row_mass[-1, 0, 0].tolist(), rel=1e-12)


@pytest.mark.parametrize("scheme", ["euler", "heun", "rk4"])
def test_the_stiff_equation_is_solved_as_the_library_does(page, scheme):
    for stiffness, dt in ((3.0, 0.1), (40.0, 0.04), (100.0, 0.05)):
        matrix = torch.tensor(
            [[-(1 + stiffness), stiffness - 1], [stiffness - 1, -(1 + stiffness)]], dtype=torch.float64
        )
        rate = lambda t, u, matrix=matrix / 2: u @ matrix
        u0 = torch.tensor([[1.5, 0.5]], dtype=torch.float64)
        t = dt * torch.arange(11, dtype=torch.float64)
        truth = at.evolve(rate, u0, t, scheme).u[:, 0]
        arguments = {"stiffness": stiffness, "dt": dt, "scheme": scheme}
        found = torch.tensor(played(page, "solve", **arguments, end=10 * dt), dtype=torch.float64)
        assert ((found - truth).abs() / truth.abs().clamp(min=1)).max() < 1e-10
        fitted = at.fit(
            rate, dt=dt, horizon=5 * dt, scheme=scheme, correction="linear", trajectories=10,
            sample=lambda n, generator: torch.randn(n, 2, generator=generator, dtype=torch.float64),
        )  # fmt: skip
        exact = torch.tensor(played(page, "correction", **arguments), dtype=torch.float64)
        u = torch.eye(2, dtype=torch.float64)
        learnt = fitted.correction(u, rate(0.0, u), dt) - fitted.correction(0 * u, 0 * u, dt)
        assert (learnt - exact).abs().max() < 1e-6 * exact.abs().max()
        solved = played(page, "solve", **arguments, end=10 * dt, matrix=exact.tolist())
        end = played_exact(stiffness, 10 * dt)
        assert solved[-1] == pytest.approx(end, abs=1e-9)


def played_exact(stiffness, t):
    slow, quick = torch.exp(torch.tensor([-t, -stiffness * t], dtype=torch.float64)).tolist()
    return [slow + quick / 2, slow - quick / 2]


def test_a_wrong_name_says_what_there_is(page):
    said = page.evaluate(
        "(() => { try { attractorPlayground.maxDt({pde: 'heat'}) } catch (e) { return e.message } })()"
    )
    assert "heat" in said
    assert "advection_diffusion" in said


def test_every_control_changes_the_picture(page):
    page.move("#pg-mask", "causal_window")  # so that the window's size counts
    seen = {page.evaluate(PICTURES)}
    ranges = "[...document.querySelectorAll('input, select')].map(e => [e.id, e.tagName, e.min, e.max])"
    tried = []
    order = {"pg-beta": "reaction_diffusion", "pg-c": "wave"}  # coefficients that not every PDE has
    for name, tag, low, high in page.evaluate(ranges):
        tried.append(name)
        if name in order:
            page.move("#pg-pde", order[name])
        if tag == "SELECT":
            options = page.evaluate(f"[...document.querySelector('#{name}').options].map(o => o.value)")
        else:
            middle = (float(low) + float(high)) / 2
            options = [
                low,
                high,
                round(middle) if name in ("pg-steps", "pg-row", "pg-seed", "pg-size") else middle,
            ]
        before = page.evaluate(PICTURES)
        found = []
        for option in options:
            page.move(f"#{name}", option)
            found.append(page.evaluate(PICTURES))
        assert len({before, *found}) >= 3, f"{name} changes nothing"
        seen.update(found)
        if name == "pg-mask":
            page.move("#pg-mask", "causal_window")
        if name == "pg-steps":
            page.move("#pg-steps", 5)
        if name in order:
            page.move("#pg-pde", "diffusion")
            page.move("#pg-alpha", 0.2)
    assert len(tried) == 16
    assert len(seen) > 40


def test_what_is_told_is_what_is_drawn(page):
    told = lambda: page.evaluate("document.querySelector('#pg-told').innerText")
    assert "2.5" in told()  # 1 / (2 * 0.2)
    assert "unstable" not in told()
    page.move("#pg-dt", 3)
    assert "unstable" in told()
    page.move("#pg-dt", 1)
    masked = "document.querySelector('#pg-told').lastElementChild.innerText"
    assert page.evaluate(masked).split("\n")[-1] == "0"
    page.move("#pg-walls", "sequence")
    assert page.evaluate(masked).split("\n")[-1] != "0"


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_is_wide_enough(page, dark):
    page.resize(390, 844, phone=True, dark=dark)
    page.open(PAGE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    bright = lambda colour: sum(map(int, colour[4:-1].split(",")[:3])) > 384
    assert bright(ink) == dark
    assert bright(paper) != dark
