"""How the documentation is built: `make docs`, into out/docs. Nothing here needs the network."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import attractor

project = "attractor"
author = "the attractor developers"
version = release = attractor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "attractor"
html_static_path = ["_static"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"  # `name` in a docstring is a name
add_module_names = False
toc_object_entries_show_parents = "hide"

# References to attractor's own names must be found; those to other libraries would need the network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!attractor\.).*"),
    (r"py:class", r"attractor\.residual\.insert\.Model"),
    (
        r"py:class",
        r"attractor\.(core\.chunks\.Guard|storage\.objects\.ObjectPath|residual\.gates\.dia\.Memory)",
    ),
    (r"py:class", r"attractor\.attention\.(masks\.Scope|engines\.strips\.Operator)"),
]

LITERAL = re.compile(r"(``.+?``|`.+?`)")


def plain_bars(app, what, name, obj, options, lines) -> None:
    """`|x|` in a docstring is a norm, not a substitution of reStructuredText."""
    for i, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            continue
        parts = LITERAL.split(line)
        parts[::2] = [re.sub(r"(?<!\\)\|", r"\\|", part) for part in parts[::2]]
        lines[i] = "".join(parts)


def plain_fields(app, what, name, obj, options, lines) -> None:
    """Indented lines `name: what it is`, which napoleon left alone, are a list of fields."""
    for i, line in enumerate(lines):
        if found := re.match(r"( {4})(\w+): (?=\S)", line):
            lines[i] = f"{found[1]}:{found[2]}: {line[found.end() :]}"


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", plain_bars, priority=400)
    app.connect("autodoc-process-docstring", plain_fields, priority=600)
