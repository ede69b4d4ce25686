"""A folder for each row: it holds the output of an earlier run, which must survive."""

from __future__ import annotations

from pathlib import Path

import pytest
from catalogue import EARLIER, weights

import spformat as sf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an earlier output in it."""
    sf.save(tmp_path / EARLIER, weights())
    return tmp_path
