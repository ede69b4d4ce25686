"""docs/papers.md: every file it names exists, and every figure of ours stands on the page that it links."""

from __future__ import annotations

import importlib
import re

import pytest
from test_docs import DOCS, ROOT

PAGE = (DOCS / "papers.md").read_text()
ROWS = [
    line for line in PAGE.splitlines() if (line.startswith("|") and "results/" in line) or "(performance.md) |" in line
]


def test_the_files_and_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|cu))`", PAGE))
    assert len(named) >= 15
    missing = [name for name in named if not (ROOT / name).exists() and not list((ROOT / "spformat").rglob(name))]
    assert missing == []
    for module, names in {
        "spformat.preprocess.schedule": ("tca", "TCASchedule", "mma_of_whole_fragments", "mma_of_full_fragments"),
        "spformat.preprocess.masks": ("error",),
    }.items():
        assert all(name in PAGE and hasattr(importlib.import_module(module), name) for name in names)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_our_figures_are_those_of_the_page(row: str) -> None:
    ours = row.strip("| ").split(" | ")[-1]
    link = re.search(r"\((results/[\w.-]+\.md|performance\.md)\)", ours)
    if link is None:  # words, and a page for them
        assert not re.search(r"\d(x| us)", ours)
        return
    source = (DOCS / link[1]).read_text()
    figures = re.findall(r"\d+\.\d+(?=x)|\d+(?:\.\d+)?(?= us)|\d{4}(?= to | GB)", ours[: link.start()])
    assert figures
    assert [f for f in figures if not re.search(rf"(?<![\d.]){re.escape(f)}(?![\d]|\.\d)", source)] == []
