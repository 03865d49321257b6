"""Configuration of Sphinx for the documentation: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE / "extensions"),
    str(HERE.parent / "solver"),
    str(HERE.parent / "server"),
    str(HERE.parent),
]

import remat  # noqa: E402

project = "remat"
author = "the authors of remat"
version = release = remat.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "atlas",
    "mathml",
    "documents",
    "results",
    "settings",
    "strategies",
]
exclude_patterns = ["extensions", "README.md"]
default_role = "py:obj"
smartquotes = False

myst_enable_extensions = ["deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = "remat"
html_static_path = ["static"]
html_css_files = ["remat.css"]
html_copy_source = False
html_show_copyright = False
