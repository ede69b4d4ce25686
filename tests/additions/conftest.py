"""The added format, registered for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import spformat as sf
from additions.coordinates import DEVICE, HOST, Coordinates
from spformat.formats import edges, unregister


@pytest.fixture
def added() -> Iterator[type[Coordinates]]:
    """The format and its edges, registered for one test."""
    sf.register(Coordinates)
    edges.register(HOST, DEVICE)
    yield Coordinates
    edges.unregister(HOST, DEVICE)
    unregister("coordinates")
