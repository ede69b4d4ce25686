"""Independent pieces of host work on several threads.

Threads live for one call: nothing outlives it, so a process that forks afterwards (a pool of conversion
workers) inherits no dead threads and no locked runtime, which numba's own OpenMP layer aborts on. Pieces must
release the GIL (compiled loops, zlib, large numpy copies) to gain anything.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_alone = threading.local()


@contextmanager
def alone() -> Iterator[None]:
    """``run`` stays on the calling thread: for members of a team, whose work keeps every core busy already."""
    before, _alone.here = getattr(_alone, "here", False), True
    try:
        yield
    finally:
        _alone.here = before


def run(piece: Callable[[int], None], count: int, threads: int | None = None) -> None:
    """``piece(0) .. piece(count-1)``, each once, on the calling thread and up to ``threads - 1`` more (default: cores).

    Threads take the next piece when they finish one. The first exception is raised here after all have stopped.
    """
    helpers = 0 if getattr(_alone, "here", False) else min(threads or cores(), count) - 1
    if helpers <= 0:
        for i in range(count):
            piece(i)
        return
    numbers = itertools.count()  # next() is atomic
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors and (i := next(numbers)) < count:
                piece(i)
        except BaseException as e:  # carried to the caller, whatever it is
            errors.append(e)

    team = [threading.Thread(target=work, name="spformat", daemon=True) for _ in range(helpers)]
    for t in team:
        t.start()
    work()
    for t in team:
        t.join()
    if errors:
        raise errors[0]
