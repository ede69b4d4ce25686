"""Which of its tiles a kernel uses: the one that expects to be fastest, or the one that a measurement asks for."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Tile = TypeVar("Tile")
_forced: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("spformat_forced_tile", default=None)


@contextlib.contextmanager
def forced(kernel: str, text: str) -> Iterator[None]:
    """Inside the block, ``fastest`` gives the tile of this text to the kernel of this name; others choose freely."""
    token = _forced.set((kernel, text))
    try:
        yield
    finally:
        _forced.reset(token)


def fastest(kernel: str, tiles: Iterable[Tile], expected_us: Callable[[Tile], float]) -> Tile:
    """The one of ``tiles`` with the least expected time, the first of equal ones; or the one that is forced."""
    options = list(tiles)
    asked = _forced.get()
    if asked is not None and asked[0] == kernel:
        named = [t for t in options if str(t) == asked[1]]
        if named:
            return named[0]
    return min(options, key=expected_us)
