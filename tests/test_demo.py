import json
import math
import types

import pytest
import torch
from typer.testing import CliRunner

from attractor import demo
from attractor.cli import app
from attractor.demo import attention, solvers, text
from attractor.ode.compare import Comparison, Point
from attractor.report import live
from tests.browser import Browser

runner = CliRunner()
quiet = lambda what, done: None

# What a figure shows: pixels of its canvases, data of its plots.
SHOWN = """(() => {
  const figure = document.querySelector(%s).closest("figure");
  const pixels = [...figure.querySelectorAll("canvas")].map(c => c.toDataURL());
  const data = [...figure.querySelectorAll(".js-plotly-plot")].map(p => JSON.stringify(p.data));
  return [...pixels, ...data].join();
})()"""
CONTROLS = """[...document.querySelectorAll("input, select, button")].map(e => ({
  id: e.id, kind: e.type, values: e.type === "range" ? [e.min, e.max] : [...(e.options || [])].map(o => o.value),
}))"""


@pytest.mark.slow
def test_the_small_demo_writes_numbers_and_a_page_where_everything_moves(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    monkeypatch.setattr("attractor.ode.race.ENOUGH", 0.05)
    result = runner.invoke(app, ["demo", "--small", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "report.html") in result.output
    assert max(len(line) for line in result.output.splitlines()[:-1]) <= 80

    results = json.loads((tmp_path / "results.json").read_text())
    parts = results["parts"]
    assert list(parts) == ["solvers", "networks", "attention", "text"]
    assert '"drawn"' not in (tmp_path / "results.json").read_text()
    for pendulum in ("pendulum", "chain"):
        off = parts["solvers"][pendulum]["off_at_end"]
        assert off["AttNS"]["median"] < off["RK4"]["median"]
    assert parts["solvers"]["compare"]["verdict"]
    for gate in parts["networks"]["gates"].values():
        assert 0 < gate["accuracy"] < 1
        assert len(gate["nsi"]) == len(gate["stage"]) == 9
    assert [arm["causal"] for arm in parts["text"]["arms"].values()] == [True, True, False]
    for arm in parts["text"]["arms"].values():
        assert arm["line"][-1] == [16, arm["whole"]]
        assert arm["whole"] < arm["line"][0][1]
        if arm["causal"]:  # the text after a byte tells it nothing
            assert arm["left_to_right"] == pytest.approx(arm["whole"], rel=1e-5)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")

    page = tmp_path / "report.html"
    assert page.stat().st_size < 8e6
    with Browser(1280, 900) as browser:
        browser.open(page)
        _everything_moves(browser)
        _nothing_leaks_through_walls(browser)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ink = browser.evaluate("document.querySelector('.js-plotly-plot').layout.font.color")
        browser.resize(390, 844, phone=True, dark=True)
        browser.wait_for(
            f"document.querySelector('.js-plotly-plot').layout.font.color !== {json.dumps(ink)}"
        )
        browser.open(page)
        assert browser.evaluate("innerWidth") == 390
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert browser.errors == []
        assert browser.requests == []


def _everything_moves(browser):
    """Every slider, choice, tick and button changes the picture it belongs to."""
    controls = browser.evaluate(CONTROLS)
    kinds = [c["kind"] for c in controls]
    expected = {"range": 4, "select-one": 4, "checkbox": 2, "button": 3}
    assert {kind: kinds.count(kind) for kind in kinds} == expected
    for control in controls:
        if control["kind"] == "button":
            browser.evaluate(
                f"{_element(control)}.textContent === 'Pause' && {_element(control)}.click()"
            )
    for control in controls:
        shown, name = SHOWN % json.dumps(f"#{control['id']}"), f"#{control['id']}"
        before = browser.evaluate(shown)
        if control["kind"] == "button":
            browser.evaluate(f"{_element(control)}.scrollIntoView({{block: 'center'}})")
            browser.evaluate(f"{_element(control)}.click()")
            browser.wait_for(f"{shown} !== {json.dumps(before)}")
            browser.evaluate(f"{_element(control)}.click()")
            browser.evaluate("new Promise(done => setTimeout(done, 100))")
            before = browser.evaluate(shown)
            browser.evaluate("new Promise(done => setTimeout(done, 500))")
            assert browser.evaluate(shown) == before, f"{name} does not pause"
        elif control["kind"] == "checkbox":
            browser.evaluate(f"{_element(control)}.click()")
            browser.wait_for(f"{shown} !== {json.dumps(before)}")
        else:
            seen = []
            for value in control["values"]:
                browser.move(name, value)
                seen.append(browser.evaluate(shown))
            assert len(set(seen)) == len(seen) > 1, f"{name} does not change its picture"


def _element(control):
    return f"document.getElementById({json.dumps(control['id'])})"


def _nothing_leaks_through_walls(browser):
    """The numbers beside the map, as a reader sees them."""
    numbers = "document.getElementById('map-numbers').textContent"
    browser.move("#map-pde", "diffusion")
    browser.move("#map-step", "12")
    browser.move("#map-walls", True)
    assert "row sums 1.0000weight on future keys 0," in browser.evaluate(numbers)
    browser.move("#map-walls", False)
    assert "row sums 1.0000weight on future keys 0.2" in browser.evaluate(numbers)


def test_walls_keep_the_future_out_and_rows_whole():
    found = attention.run(0, "cpu", quiet, small=False)
    assert len(found["pdes"]) == 4
    for name, arms in found["pdes"].items():
        assert arms["walls"]["future"] == [0.0] * 13
        assert arms["no walls"]["future"][0] == 0
        assert all(weight > 0.01 for weight in arms["no walls"]["future"][1:])
        for arm in arms.values():
            sums = arm["row_sum_low"] + arm["row_sum_high"]
            if name == "reaction-diffusion":
                assert max(sums) > 1.01
            else:
                assert sums == pytest.approx([1.0] * 26, abs=1e-12)
    for name, arms in found["drawn"].items():
        for told, maps in arms.items():
            square = torch.tensor(maps[-1]).view(32, 32)
            assert bool(square.triu(1).any()) == (told == "no walls"), name


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(monkeypatch):
    monkeypatch.setattr(text, "ARMS", {"standard": {"pde": None}})
    small = lambda seed: text.run(seed, "cpu", quiet, small=True)
    first = small(3)
    assert first == small(3)
    assert first != small(4)


@pytest.mark.slow
def test_a_part_that_fails_leaves_the_others_whole(monkeypatch, tmp_path):
    def broken(*_):
        raise ArithmeticError("two and two make five")

    told = []
    parts = dict(demo.PARTS)
    for name in ("solvers", "networks", "text"):
        parts[name] = types.SimpleNamespace(run=broken), parts[name][1]
    monkeypatch.setattr(demo, "PARTS", parts)
    results = demo.run(tell=lambda what, done: told.append(done))
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    assert results["parts"]["text"]["failed"] == "ArithmeticError: two and two make five"
    assert "pdes" in results["parts"]["attention"]
    pytest.importorskip("matplotlib")
    page = demo.write(results, tmp_path).read_text()
    assert page.count("two and two make five") == 3
    assert "attractorMaps(" in page
    told = runner.invoke(app, ["demo", "--out", str(tmp_path)])
    assert told.exit_code == 1
    assert told.output.count("two and two make five") == 3
    told = runner.invoke(app, ["demo", "--json", "--out", str(tmp_path)])
    assert told.exit_code == 1
    assert json.loads(told.stdout)["parts"]["attention"]["tokens"] == 32


def test_a_comparison_as_a_picture_to_touch():
    point = lambda method, error, seconds, adaptive=False: Point(
        method, 0.1, adaptive, error, seconds, 40
    )
    points = point("rk4", 1e-2, 1.0), point("rk4", math.inf, 2.0), point("dopri5", 1e-9, 3.0, True)
    found = Comparison(point("hybrid", 1e-6, 1.5), points, 4.0, 1.5, None, {})
    rk4, dopri5, hybrid = live.work_precision(found)["data"]
    assert (rk4["x"], rk4["y"]) == ([1.0, 2.0], [1e-2, None])  # what is lost is a gap
    assert (rk4["line"]["dash"], dopri5["line"]["dash"]) == ("solid", "dot")
    assert (hybrid["x"], hybrid["y"], hybrid["marker"]["symbol"]) == ([1.5], [1e-6], "star")
    assert len({trace["marker"]["color"] for trace in (rk4, dopri5, hybrid)}) == 3
    assert live.work_precision(found, "rate_calls")["data"][0]["x"] == [40, 40]


def test_controls_escape_what_they_show():
    assert "<b>" not in live.choice("a", "<b>", {"<b>": "<b>"}) + live.tick("a", "<b>") + live.button(
        "a", "<b>"
    )
    assert 'min="0" max="12"' in live.slider("a", "<b>", 0, 12, 3)


def test_frames_between_steps_follow_the_motion():
    t = torch.linspace(0, 2, 3, dtype=torch.float64).view(-1, 1, 1)
    cubic = torch.cat((t**3 - t, t), -1)
    rate = lambda _, u: torch.stack((3 * u[..., 1] ** 2 - 1, torch.ones_like(u[..., 1])), -1)
    frames = solvers._between(rate, cubic, 1.0)
    fine = torch.linspace(0, 2, 2 * solvers.FRAMES + 1, dtype=torch.float64)
    assert torch.allclose(frames[:, 0, 0], fine**3 - fine, atol=1e-12)


def test_masses_hang_where_angles_say():
    chain = solvers.CHAIN.bobs(torch.tensor([math.pi / 2, 0.0, 0.0, 9.0, 9.0, 9.0]))
    assert torch.allclose(chain, torch.tensor([[1.0, 0.0], [1.0, -1.0], [1.0, -2.0]]), atol=1e-6)
    ball = solvers.PENDULUM.bobs(torch.tensor([0.0, 3.5, 0.0, 0.0]))
    assert torch.allclose(ball, torch.tensor([[0.0, -3.5]]))
