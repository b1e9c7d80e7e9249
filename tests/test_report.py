import pytest

from attractor.report import Page


def test_page_escapes_what_it_shows(tmp_path):
    page = Page("a < b").section("<script>").text("x & y").command("attractor demo --out '<x>'")
    page.table(["name", "value"], [["<b>", 0.000123456], ["n", None], ["k", 12345]])
    html = page.write(tmp_path / "p.html").read_text()
    assert "<script>" not in html
    assert "<b>" not in html
    for shown in ("a &lt; b", "x &amp; y", "0.000123", "–", "12345"):
        assert shown in html


def test_figures_are_inline():
    pytest.importorskip("matplotlib")
    from attractor.report import figures

    errors = {"rk4": [(0.1, 1e-3), (0.05, 1e-4)], "euler": [(0.1, float("inf"))]}
    html = (
        Page("x")
        .figure('error "curve"', figures.convergence(errors), figures.convergence(errors))
        .html()
    )
    assert html.count("<svg") == 2
    assert 'aria-label="error &quot;curve&quot;"' in html
