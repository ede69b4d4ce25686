"""Sphinx: the Markdown pages of this folder.  make docs"""

project = "spformat"
extensions = ["myst_parser"]
html_theme = "pydata_sphinx_theme"
html_title = "spformat"
html_theme_options = {"show_toc_level": 2}
master_doc = "index"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files outside docs/ (README.md); tests/test_docs.py checks them
