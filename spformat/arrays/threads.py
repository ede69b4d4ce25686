"""Independent pieces of host work on several threads.

Threads live for one call and end with it. So a process that forks afterwards (a pool of conversion workers) inherits
no dead threads and no locked runtime; numba's own OpenMP layer aborts on those. Several threads are faster than one
only if the pieces release the GIL (compiled loops, zlib, large numpy copies).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

from .interrupts import deferred_interrupts

T = TypeVar("T")


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_alone = threading.local()


@contextmanager
def alone() -> Iterator[None]:
    """Inside the block ``run`` uses the calling thread alone: for tasks of a pool that keeps every core busy
    already."""
    before, _alone.here = getattr(_alone, "here", False), True
    try:
        yield
    finally:
        _alone.here = before


def available() -> int:
    """Threads that a product may use: one for each core, or one inside ``alone``."""
    return 1 if getattr(_alone, "here", False) else cores()


def run(piece: Callable[[int], None], count: int, threads: int | None = None) -> None:
    """Call ``piece(0) .. piece(count-1)``, each once, on the calling thread and up to ``threads - 1`` others.

    threads: default: one for each core. A thread takes the next piece when it has finished one. If a piece raises, the
    first exception is raised here after all threads have stopped; so is what a signal handler raises meanwhile, because
    threads that went on would write into memory that the caller uses for something else by then.
    """
    others = 0 if getattr(_alone, "here", False) else min(threads or cores(), count) - 1
    if others <= 0:
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

    with deferred_interrupts(stop=lambda: errors.append(InterruptedError())):
        team = []
        for _ in range(others):
            thread = threading.Thread(target=work, name="spformat", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads
                break
            team.append(thread)
        work()
        for thread in team:
            thread.join()
    if errors:
        raise errors[0]


def in_order(pool: Executor, tasks: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """The result of each task, in the order of the tasks, while up to ``ahead`` later ones wait or run in ``pool``.

    The next task is taken from ``tasks`` when the next result is asked for, so few are in memory at a time. A task runs
    in a copy of the caller's context, under its limits. An exception of a task is raised in place of its result.

    Hand-written because ``Executor.map`` submits all tasks at once; its bound ``buffersize`` comes with Python 3.14.
    """
    futures: deque[Future[T]] = deque()
    try:
        for task in tasks:
            futures.append(pool.submit(copy_context().run, task))
            if len(futures) > ahead:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()
