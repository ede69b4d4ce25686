"""Sphinx: the Markdown pages of this folder, and the API reference from docstrings.  make docs"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import docstrings  # noqa: E402

project = "spformat"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "pydata_sphinx_theme"
html_title = "spformat"
html_theme_options = {
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "show_prev_next": True,
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_sidebars = {"**": ["site-navigation.html"]}
master_doc = "index"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files outside docs/ (README.md); tests/test_docs.py checks them
autodoc_mock_imports = ["torch", "transformers", "peft"]  # the pages are built without them
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", docstrings.process)
