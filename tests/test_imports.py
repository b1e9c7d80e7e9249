"""Imports flow up: common <- storage, core <- train, data, jobs <- wings <- report and others <- cli."""

import ast
import functools
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import attractor

ROOT = Path(attractor.__file__).parent
GROUND, WINGS, UPPER = (
    {"common", "storage", "core", "train", "data", "jobs"},
    {"ode", "residual", "attention"},
    {"integrations", "report", "bench", "reproduce", "demo", "cli"},
)
OPTIONAL = {"typer", "rich", "matplotlib", "plotly", "scipy", "transformers", "timm", "torchvision", "ray",
            "accelerate", "safetensors", "tokenizers", "datasets", "PIL", "jax", "torchdiffeq",
            "onnx", "onnxscript", "onnxruntime", "pandas", "huggingface_hub"}  # fmt: skip


@functools.cache
def imports(path):
    """Modules of attractor that a file imports, as dotted names without the package's own."""
    return set(_imports(path))


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name.removeprefix("attractor.") for name in names if name.startswith("attractor."))


@functools.cache
def rooms():
    """(room, file, rooms it imports from) for every file of the package."""
    return [
        (path.relative_to(ROOT).parts[0], path, {name.split(".")[0] for name in imports(path)})
        for path in sorted(ROOT.rglob("*.py"))
        if len(path.relative_to(ROOT).parts) > 1
    ]


def test_every_room_is_known():
    assert {room for room, _, _ in rooms()} <= GROUND | WINGS | UPPER


def test_imports_flow_up():
    for room, path, used in rooms():
        allowed = GROUND if room in WINGS else GROUND | WINGS | UPPER
        if room in GROUND:
            allowed = {"common": set(), "storage": {"common"}, "core": {"common"}}.get(
                room, {"common", "storage", "core"}
            )
        allowed = allowed - {"cli"}  # nobody calls the command line
        folders = {name for name in used - {room} if (ROOT / name).is_dir()}
        assert folders <= allowed, f"{path} imports {folders - allowed}"


def test_there_are_no_circles():
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in ROOT.rglob("*.py")}
    graph = {
        name: {used for used in imports(path) if used in modules and used != name}
        for name, path in modules.items()
        if not name.endswith("__init__")
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_import_is_light():
    code = (
        "import sys, attractor; print(*{m.split('.')[0] for m in sys.modules});"
        "assert 'attractor.ode' not in sys.modules; attractor.train.train; attractor.data.images.load;"
        "assert 'attractor.ode' not in sys.modules; attractor.ode.theory; attractor.systems.Lorenz"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not OPTIONAL & set(loaded.stdout.split())


@pytest.mark.parametrize("code", ["import attractor", "import attractor.cli"])
def test_packages_and_commands_load_torch_when_it_is_needed(code):
    code = f"import sys; {code}; print(*sorted({{'torch', 'numpy', 'matplotlib'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not loaded.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("wing", sorted(WINGS))
def test_wings_bring_neither_compilers_nor_kernels(wing):
    found = "sorted({'torch._inductor', 'torch._dynamo', 'triton'} & set(sys.modules))"
    code = f"import sys, torch; before = {found}; import attractor.{wing}; assert {found} == before, {found}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_of_the_surface():
    assert set(attractor.__all__) <= set(dir(attractor))
    for name in attractor.__all__:
        assert getattr(attractor, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        attractor.nothing  # noqa: B018


DOCUMENTED = [
    ROOT.parents[1] / "README.md",
    *sorted((ROOT.parents[1] / "docs").rglob("*.md")),
    *sorted((ROOT.parents[1] / "examples").glob("*.py")),
]
RESOLVE = """
import os, sys
import attractor
for name in sys.argv[1:]:
    child = os.fork()  # in which nothing but attractor itself is imported yet
    if child == 0:
        try:
            thing = attractor
            for part in name.split("."):
                thing = getattr(thing, part)
        except AttributeError as error:
            print(f"attractor.{name}: {error}", flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


def documented():
    """Names of the package in pages and examples, as ``at.fit`` or ``attractor.train.train``."""
    name = re.compile(r"(?<![\w./-])(?:at|attractor)\.((?!py\b|json\b)[A-Za-z_][\w.]*\w)")
    found = {n for path in DOCUMENTED for n in name.findall(path.read_text())}
    return sorted(found - {"to"})


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="makes a process for every name")
def test_documented_names_are_there_before_anything_else_is_imported():
    names = documented()
    assert {"train", "train.checkpoint", "ode.theory.convergence_bound", "data.images"} <= set(names)
    command = [sys.executable, "-c", RESOLVE, *names, "jobs.each", "report.Page", "integrations.hub"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_nothing_unsafe_is_loaded():
    forbidden = ("torch.load(", "import pickle", "eval(", "exec(", "allow_pickle")
    for path in ROOT.rglob("*.py"):
        text = path.read_text().replace(".eval()", "")
        assert not [word for word in forbidden if word in text], path


def test_no_upward_imports_by_name():
    """The ground and `residual` import no module by a computed name, which the tests above would not see."""
    for room, path, _ in rooms():
        if room in {"common", "storage", "core", "residual"} and path.name != "lazy.py":
            assert "import_module" not in path.read_text(), path
