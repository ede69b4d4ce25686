"""Python's garbage collector while large packages are imported."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """No garbage collection inside the block, which imports many modules.

    The collector would go through all new modules and classes again and again, and find no garbage. Afterwards they
    count as old objects, at which it looks rarely.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # frozen objects of the caller stay frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if collecting:
            gc.enable()
