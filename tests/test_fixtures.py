"""A fixture that is missing, altered or unlisted fails here; only `make fixtures` writes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent.parent / "fixtures"
MANIFEST = json.loads((FIXTURES / "MANIFEST.json").read_text())["files"]


@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_file_is_the_one_in_the_manifest(name: str) -> None:
    content = (FIXTURES / name).read_bytes()
    assert len(content) == MANIFEST[name]["size"]
    assert hashlib.sha256(content).hexdigest() == MANIFEST[name]["sha256"]


def test_every_file_is_listed_with_its_provenance() -> None:
    listed = {FIXTURES / name for name in MANIFEST} | {FIXTURES / "MANIFEST.json"}
    present = {p for p in FIXTURES.rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}}
    assert present == listed
    assert all(len(row["provenance"]) > 20 for row in MANIFEST.values())


def test_fixtures_stay_small() -> None:
    assert max(row["size"] for row in MANIFEST.values()) <= 500_000  # the large-file hook of pre-commit
    assert sum(row["size"] for row in MANIFEST.values()) < 4_000_000
