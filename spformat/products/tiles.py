"""Force the tile of a kernel, for measurements and tests; otherwise the least expected time decides."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_forced: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("spformat_forced_tile", default=None)


@contextlib.contextmanager
def forced(kernel: str, text: str) -> Iterator[None]:
    """Inside the block the kernel of this name chooses among its tiles of this text; others choose freely.

    A kernel that has no such tile for a problem chooses freely too.
    """
    token = _forced.set((kernel, text))
    try:
        yield
    finally:
        _forced.reset(token)


def forced_tile(kernel: str) -> str | None:
    """The text of the tile that a kernel is forced to use, or None."""
    choice = _forced.get()
    return choice[1] if choice is not None and choice[0] == kernel else None
