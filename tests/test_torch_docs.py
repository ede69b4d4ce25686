"""The blocks of the documentation that need torch run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'spformat[torch]'")

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python torch\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [p for p in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]) if BLOCK.search(p.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after another in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": __name__}
    for code in BLOCK.findall(page.read_text()):
        exec(compile(code, str(page), "exec"), names)


def test_the_page_of_torch_has_code() -> None:
    assert ROOT / "docs" / "torch.md" in PAGES
