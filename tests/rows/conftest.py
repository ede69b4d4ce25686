"""Fixtures of the rows: a folder whose earlier output must survive, and a GPU that must still work afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from catalogue import EARLIER, weights

import spformat as sf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an earlier output in it."""
    sf.save(tmp_path / EARLIER, weights())
    return tmp_path


@pytest.fixture
def cp() -> Any:
    import cupy

    yield cupy
    assert float(cupy.ones(1).sum()) == 1  # the context is alive after whatever the row did
