"""The added format, registered for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import spformat as sf
from additions.coordinates import COO, DEVICE, HOST
from spformat.formats import edges, unregister


@pytest.fixture
def coo() -> Iterator[type[COO]]:
    """The format and its edges, registered for one test."""
    sf.register(COO)
    edges.register(HOST, DEVICE)
    yield COO
    edges.unregister(HOST, DEVICE)
    unregister("coo")
