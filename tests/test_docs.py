"""The documentation builds without a warning, all of its code runs, and every number has its result file."""

import doctest
import functools
import importlib
import importlib.util
import json
import math
import os
import pkgutil
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import attractor
from tests import browser
from tests.fuzz.surface import public

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODULES = [m.name for m in pkgutil.walk_packages(attractor.__path__, "attractor.")]
# Links out of the pages: open one before it is added, since no test has a network.
EXTERNAL = {"https://docs.ray.io"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


# Code


# Pages whose code takes more than two seconds.
LONG_PAGES = {
    "README.md", "docs/attention.md", "docs/hybrid.md", "docs/networks.md", "docs/how-to/export.md",
    "docs/how-to/pretrained-gates.md", "docs/tutorials/dynamics.md", "docs/tutorials/kinetics.md",
    "docs/tutorials/fields.md",
    "docs/tutorials/sequences.md", "docs/tutorials/vision.md",
}  # fmt: skip


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=pytest.mark.slow if str(p.relative_to(ROOT)) in LONG_PAGES else ())
        for p in PAGES
    ],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.compile", lambda function, **_: function)  # which takes minutes here
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, f"{page.name}:\n{block}", "exec"), names)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("module", MODULES)
def test_doctests(module):
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # kernels are written in it, and nothing needs them
            raise
        pytest.skip("triton is not installed")
    assert doctest.testmod(found).failed == 0


# Tutorials and the README do the same in small.
LONG = {"causal_text.py", "duffing.py", "fastest_solver.py"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "example",
    [pytest.param(p, marks=pytest.mark.slow) if p.name in LONG else p for p in EXAMPLES],
    ids=lambda p: p.name,
)
def test_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(example)])
    monkeypatch.setattr("torch.compile", lambda function, **_: function)  # needs a module with the code
    try:
        exec(compile(example.read_text(), str(example), "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code:
            raise
        pytest.skip("it has said which package it needs")


@every_page
def test_commands_exist_with_their_options(page):
    """Every `attractor ...` of a page: its command is one, and has the options it is given."""
    if page.name == "cli.md":
        return  # which shows mistakes, too
    from typer.main import get_command

    from attractor.cli import app

    commands = get_command(app).commands
    for name, rest in re.findall(
        r"(?:^|`|\$ )\s*attractor ([a-z]+)\b([^`\n]*)", page.read_text(), re.MULTILINE
    ):
        assert name in commands, f"{page.name}: attractor {name}{rest}"
        known = {option for p in commands[name].params for option in (*p.opts, *p.secondary_opts)}
        used = set(re.findall(r"(?<!\S)(--?[a-z][a-z0-9-]*)", rest.partition("  ")[0]))
        assert used <= known | {"--help", "--debug"}, f"{page.name}: attractor {name}{rest}"


def test_examples_are_listed_with_those_that_become_notebooks():
    listed = re.findall(r"\]\(\.\./examples/(\w+\.py)\)( \*)?", (DOCS / "examples.md").read_text())
    assert sorted(name for name, _ in listed) == [path.name for path in EXAMPLES]
    assert sorted(name for name, star in listed if star) == [
        p.name for p in tool("notebooks").in_cells()
    ]


def test_notebooks_hold_the_code_of_the_examples(tmp_path):
    pytest.importorskip("jupytext")
    made = tool("notebooks").convert(tmp_path)
    assert len(made) >= 9
    for path in made:
        cells = json.loads(path.read_text())["cells"]
        example = (ROOT / "examples" / f"{path.stem}.py").read_text()
        assert cells[0]["cell_type"] == "markdown"
        assert "".join(cells[0]["source"])[:40] in example
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert code
        for block in code:
            assert block in example
        compile("\n".join(code), str(path), "exec")


def test_pictures_are_drawn_by_their_script():
    pytest.importorskip("matplotlib")
    pictures = tool("pictures")
    for draw in (pictures.network, pictures.attention, pictures.kinetics):
        figure = draw()
        assert all(axis.has_data() for axis in figure.axes)
        pictures.plt.close(figure)
    for name in pictures.PICTURES:
        drawn = (DOCS / "images" / f"{name}.svg").read_text()
        assert drawn.startswith("<?xml")
        assert "<script" not in drawn
        assert "<path" in drawn


@pytest.mark.slow
def test_all_pictures_are_drawn_by_their_script(tmp_path):
    tool("pictures").main(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.svg")} == set(tool("pictures").PICTURES)


@functools.cache
def tool(name):
    """A script beside the pages."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The build


@pytest.mark.slow
def test_the_documentation_builds(tmp_path):
    """Without a warning; every public name is on a page; the playground works in it."""
    pytest.importorskip("sphinx")
    for package in ("furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(package)
    out = tmp_path / "html"
    said = subprocess.run(
        [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-b", "html",
         "-d", str(tmp_path / "trees"), str(DOCS), str(out)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert not re.search(r"WARNING|ERROR", said.stderr), said.stderr
    pages = {path.relative_to(out).with_suffix("").as_posix() for path in out.rglob("*.html")}
    missing = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")} - pages
    assert not missing

    from sphinx.util.inventory import InventoryFile

    known = InventoryFile.loads((out / "objects.inv").read_bytes(), uri="")
    named = {name for kind, names in known.data.items() if kind.startswith("py:") for name in names}
    lost = [name for name in public() if name not in named]
    assert not lost, f"public, and on no page of docs/reference: {', '.join(lost)}"

    if any(map(shutil.which, browser.NAMES)) and importlib.util.find_spec("websockets"):
        with browser.Browser() as seen:
            for phone, width in ((False, 1280), (True, 390)):
                seen.resize(width, 900, phone=phone, dark=phone)
                seen.open(out / "playground.html")
                drawn = "document.querySelector('#pg-after').toDataURL()"
                before = seen.evaluate(drawn)
                seen.move("#pg-steps", 20)
                assert seen.evaluate(drawn) != before
                assert seen.evaluate("document.documentElement.scrollWidth") <= width
                assert (seen.errors, seen.requests) == ([], [])


# Links


def links(page):
    """Targets of links and images, outside of code."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(<?([^)\s>]+)>?\)", text)


@functools.cache
def anchors(page):
    """The headings of a page as addresses, made as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower())
        slug, more = plain.replace(" ", "-"), 0
        while (name := f"{slug}-{more}" if more else slug) in found:
            more += 1
        found.add(name)
    return found


@every_page
def test_links_lead_somewhere(page):
    for target in links(page):
        if ":" in target:
            assert re.fullmatch(r"https://[\w.-]+(/[\w./#%~-]*)?", target), f"{target} is not an address"
            assert target in EXTERNAL, f"{page.name} links to {target}: open it, and add it to EXTERNAL"
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), (
                f"{page.name} links to {target}, and there is no such heading"
            )


def test_no_external_link_is_kept_for_nothing():
    used = {target for page in PAGES for target in links(page) if ":" in target}
    assert used == EXTERNAL


def test_files_that_readers_look_for():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", ".ci/run"):
        assert (ROOT / name).stat().st_size > 0
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def test_constraints_pin_versions_without_addresses():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line), line


# Numbers


@every_page
def test_numbers_are_those_of_the_result_files(page):
    from benchmarks.pages import filled

    assert filled(page.read_text()) == page.read_text()


def when_not():
    """What docs/when-not.md says in numbers, made from the files it names."""
    from benchmarks.pages import load, reproduced

    compared = load("compare")["rows"]
    chain = next(r for r in compared if (r["case"], r["width"]) == ("10-link pendulum", 1024))
    yield f"m = {chain['m']:.3g} plain steps"
    yield f"m* = {chain['m_star']:.3g} of them"
    two = [r["gain"] for r in compared if r["case"].startswith("2-link")]
    paying = [gain for gain in two if gain > 1]
    yield f"{min(paying):.1f} to {max(paying):.1f} times for the widths"
    assert next(r for r in compared if (r["case"], r["width"]) == ("2-link pendulum", 64))["gain"] < 1
    gpu = {r["case"]: r["gains"] for r in load("hybrid_gpu")["results"]["verdict"]}
    yield f"same error in {gpu['10-link']['rk4']:.3g} of the time"
    yield f"{gpu['2-link']['dopri5']:.3g} of its time"
    trained = reproduced("stepnet-table1", "gpu")
    gains = [statistics.mean(trained.paired(arm, "none")) for arm in trained.arms if arm != "none"]
    yield f"{min(gains):+.2f} to {max(gains):+.2f} points"
    own = reproduced("stepnet-table1-protocol", "gpu")
    gains = [statistics.mean(own.paired(arm, "none")) for arm in own.arms if arm != "none"]
    yield f"three of them gain {min(gains):+.1f} to {max(gains):+.1f}"
    yield f"gains {trained.mean('none') - own.mean('none'):+.1f} without any gate"
    leak = reproduced("pde-leak", "gpu")
    standard, causal, _ = (leak.mean(arm, "perplexity") for arm in leak.arms)
    yield f"from {standard:.1f} to {causal:.1f}"
    mixed = reproduced("pde-mixing", "gpu").mean("mixed values, a channel")
    assert round(3 * (standard - mixed) / (standard - causal)) == 2
    yield f"five a channel, it is {mixed:.1f}"
    read = reproduced("pde-characters", "gpu")
    yield f"bytes they have {read.mean('diffusion'):.1f} and {read.mean('standard'):.1f} %"
    yield f"the wave {read.mean('wave'):.1f}"
    seeds = read.values("standard")
    yield f"seeds are {min(seeds):.1f} to {max(seeds):.1f}"
    table = reproduced("pde-table1", "gpu")
    both = {
        data: " and ".join(f"{table.mean(f'{data}, {m}, tuned, 1e-3'):.1f}" for m in ("diffusion", "standard"))
        for data in ("IMDb", "AG News", "SST-2")
    }  # fmt: skip
    yield f"{both['IMDb']} % on IMDb, {both['AG News']} on AG News, {both['SST-2']} on SST-2"
    ratios = {
        (r["kind"], r["tokens"]): r["forward"]["ratio"] for r in load("bench")["rows"] if "forward" in r
    }
    yield f"1,024 tokens takes {ratios['causal', 1024]:.2f} times"
    yield f"{ratios['causal', 65536]:.2f} times (`benchmarks/results/bench.json`)"
    reaction = [ratio for (kind, _), ratio in ratios.items() if kind == "reaction"]
    yield f"{min(reaction):.1f} to {max(reaction):.1f} times"
    windows = {
        r["tokens"]: r["ratio"] for r in load("attention")["rows"]
        if (r["method"], r["causal"], r["pass"]) == ("windowed", False, "forward")
    }  # fmt: skip
    yield f"takes {windows[512]:.1f} times SDPA"
    yield f"takes {windows[8192]:.2f} ("


def papers():
    """What docs/papers.md says in numbers of ours."""
    from benchmarks.pages import all_gates, load, reproduced
    from experiments.stepnet_shared import compared

    errors, pendulums = reproduced("attns-normalised", "gpu"), ("spring-mass", "2-link", "elastic")
    ratios = lambda recipe: tuple(
        errors.typical(f"{s}: AttNS, {recipe}") / errors.typical(f"{s}: NeurVec, {recipe}")
        for s in pendulums
    )
    yield "{:.2g}, {:.2g} and {:.2g} times NeurVec's error on spring-mass".format(*ratios("paper"))
    yield "the ratio is {:.2g}, {:.2g} and {:.2g};".format(*ratios("normalised"))
    yield "solved for, {:.2g}, {:.1g} and {:.2g}.".format(*ratios("default"))
    fall = [
        math.log10(errors.typical(f"{s}: {what}, paper") / errors.typical(f"{s}: {what}, normalised"))
        for s in pendulums for what in ("AttNS", "NeurVec")
    ]  # fmt: skip
    assert (round(min(fall)), round(max(fall))) == (3, 5)
    half = reproduced("attns-fig4", "gpu")
    of = lambda s, what, recipe="paper": half.typical(f"{s}: {what}, {recipe}")
    both = [f"{of('elastic', what):.1e}" for what in ("AttNS", "FSNet")]
    yield "on the elastic pendulum, {}, FSNet next with {}".format(*both)
    yield f"CSM has {of('2-link', 'CSM'):.1e} and AttNS {of('2-link', 'AttNS'):.1e}"
    fair = {
        s: [of(s, what, "default") for what in ("AttNS", "NeurVec", "CSM", "FSNet")]
        for s in pendulums[1:]
    }
    assert max(fair["elastic"]) < 1.01 * min(fair["elastic"])
    yield f"have {max(fair['elastic']):.1e} on the first and at most {max(fair['2-link']):.1e} on"
    parts = reproduced("attns-table2", "gpu")
    skip = {
        s: [parts.typical(f"{s}: {what}, paper") for what in ("with skip", "AttNS")] for s in pendulums
    }
    passed = {s: parts.typical(f"{s}: with identity, paper") for s in pendulums}
    yield "does on the 2-link pendulum, {:.1e} instead of {:.1e}".format(*skip["2-link"])
    yield f"hands the input on, {passed['2-link']:.1e}"
    learnt, without = skip["spring-mass"]
    yield f"both help: {learnt:.1e} and {passed['spring-mass']:.1e} instead of {without:.1e}"
    sizes = reproduced("attns-table1", "gpu")
    wide = [sizes.typical(f"spring-mass: width {w}, long, paper") for w in (512, 1024, 2048)]
    yield "{:.1e}, {:.1e} and {:.1e} for widths of 512".format(*wide)
    case = next(r for r in load("theory")["constants"] if r["case"] == "elastic pendulum, rk4, default")
    bound = case["convergence"]["10"]
    yield f"the error is {bound['actual']:.1e} and the bound {bound['theorem']:.1e}"
    trained = all_gates()
    rank = compared(trained)["models"].correlations
    yield f"is {rank['one']['kendall']:+.2f} with step 1 and {rank['gate']['kendall']:+.2f} with"
    gain = {arm: f"{statistics.mean(trained.paired(arm, 'none')):+.2f}" for arm in trained.arms}
    yield f"SRM gained {gain['srm']} points over no gate, ECA {gain['eca']}, StepNet {gain['stepnet']}"
    hundred = reproduced("stepnet-table1-cifar100", "gpu")
    rank = compared(hundred)["models"].correlations
    yield f"CIFAR-100 {rank['one']['kendall']:+.2f} and {rank['gate']['kendall']:+.2f}"
    yield f"(p {rank['gate']['kendall_p']:.2f})"
    tns = lambda arm, end="": f"{hundred.mean(arm, f'tns_gate{end}'):.2f}"
    yield f"falls from {tns('none', '_initial')} to {tns('none')}"
    three = ("se", "eca", "srm")
    yield "rise from {}, {} and {}".format(*(tns(arm, "_initial") for arm in three))
    yield "to {}, {} and {}. StepNet ends at {}".format(*map(tns, (*three, "stepnet")))
    gain = [statistics.mean(hundred.paired(arm, "none")) for arm in ("srm", "eca", "stepnet")]
    yield "{:+.2f}, {:+.2f} and {:+.2f} on CIFAR-100".format(*gain)
    own = reproduced("stepnet-table1-protocol", "gpu")
    gain = [statistics.mean(own.paired(arm, "none")) for arm in ("se", "srm", "stepnet")]
    yield "SE {:+.1f}, SRM {:+.1f} and StepNet {:+.1f}".format(*gain)
    spread = statistics.stdev(own.values("none"))
    yield f"{own.mean('none'):.1f} ± {spread:.1f} % instead of {trained.mean('none'):.1f}"
    yield f"with StepNet it is {own.mean('stepnet'):.1f} instead of {trained.mean('stepnet'):.1f}"
    assert all(own.mean(arm) < trained.mean(arm) for arm in own.arms)
    leak = reproduced("pde-leak", "gpu")
    standard, causal, leaking = (leak.mean(arm, "perplexity") for arm in leak.arms)
    yield f"{leaking:.3f} when it sees the text, and {leak.mean(leak.arms[-1], 'left_to_right'):.1e} when"
    yield f"transformer {standard:.1f} and causal diffusion {causal:.1f}"
    mixed = reproduced("pde-mixing", "gpu").mean("mixed values, a channel")
    yield f"no equation, it is {mixed:.1f}"
    steps = reproduced("pde-table4", "gpu")
    four, eight = (steps.mean(f"PDE, causal, {n} steps") for n in (4, 8))
    assert min(steps.mean(arm, "finite") for arm in steps.arms) == 1
    yield f"perplexity {eight:.1f} with eight, {four:.1f} with four"
    windows = reproduced("pde-table3", "gpu")
    ahead, honest = (
        [f"{m}, {k}" for m in ("Longformer", "PDE-Longformer")] for k in ("two-sided", "causal")
    )
    alone = windows.mean(ahead[0], "left_to_right")
    yield f"{windows.mean(ahead[0]):.3f} without any PDE, and {alone:,.0f} from left to right"
    yield f"With PDE steps it is {windows.mean(ahead[1]):.3f}"
    yield "they help, {1:.1f} instead of {0:.1f}".format(*map(windows.mean, honest))
    smooth = reproduced("pde-theorem2", "cpu")
    yield f"it grows to {smooth.mean('reaction-diffusion, causal', 'variance'):.1f} times its start"
    table = reproduced("pde-table1", "gpu")
    gains = [
        table.mean(f"{data}, diffusion, tuned, 1e-3") - table.mean(f"{data}, standard, tuned, 1e-3")
        for data in ("IMDb", "AG News", "SST-2")
    ]
    yield "{:+.2f}, {:+.2f} and {:+.2f} points".format(*gains)
    longest = reproduced("pde-table2", "gpu")
    own = [longest.mean(arm) for arm in longest.arms if arm.endswith("1024, paper's recipe")]
    assert len(own) == 3
    yield f"where standard attention is, at {own[0]:,.0f}"
    assert max(own) - min(own) < 1
    yield "{:.0f}, {:.0f} and {:.0f} nats per line".format(
        *(math.log(x) * n for x, n in ((12.65, 256), (3.74, 512), (1.97, 1024)))
    )


def hybrid():
    """What docs/hybrid.md says of a training to its end."""
    from benchmarks.pages import reproduced

    errors = reproduced("attns-normalised", "gpu")
    error = lambda recipe: [errors.typical(f"{s}: AttNS, {recipe}") for s in ("spring-mass", "2-link")]
    yield "an error of {:.1e} on spring-mass and {:.1e} on the 2-link pendulum".format(*error("paper"))
    yield "recipe leaves {:.1e} and {:.1e}.".format(*error("default"))


@pytest.mark.parametrize("said", [when_not, papers, hybrid], ids=lambda f: f.__name__)
def test_sentences_have_the_numbers_of_the_result_files(said):
    page = DOCS / f"{said.__name__.replace('_', '-')}.md"
    text = re.sub(r"\s+", " ", page.read_text())
    for sentence in said():
        assert sentence in text, f"{page.name} does not say: {sentence}"


# Licences and the source distribution


def test_data_of_others_are_credited():
    notice = (ROOT / "NOTICE").read_text()
    for path in re.findall(r"^src/\S+", notice, re.MULTILINE):
        assert (ROOT / path).exists(), path
    kept = {
        p.relative_to(ROOT).as_posix() for p in (ROOT / "src").rglob("*") if p.suffix in (".npz", ".txt")
    }
    assert {path for path in kept if "egg-info" not in path} <= set(notice.split())
    assert "E. Alpaydin and C. Kaynak" in notice
    assert "CC BY 4.0" in notice
    assert "CC BY 4.0" in (ROOT / "docs/networks.md").read_text()


def test_the_source_distribution_holds_what_its_tests_read():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    needed = {"src", "tests", "docs", "examples", "benchmarks", "experiments", ".ci", "Makefile",
              "constraints.txt", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE",
              "NOTICE"}  # fmt: skip
    assert needed <= set(included)
    assert all((ROOT / name).exists() for name in included)
    assert set(project["project"]["license-files"]) == {"LICENSE", "NOTICE"}
