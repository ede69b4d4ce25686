"""Compile what plans need in several processes, before the first of them runs.

NVRTC takes seconds for a kernel with many tiles. A measurement of hundreds of tiles would wait most of its time for one
core. Which instances a plan needs is known to its kernel alone: each plan is tried, ``jit.noting`` writes down what it
would compile, and what was noted is compiled elsewhere. CuPy keeps compiled kernels on disk, where all processes see
them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any, Self

from ....arrays.library import device_error
from ....errors import DeviceFault, SpformatError
from . import jit
from .jit import Instance

log = logging.getLogger("spformat")

MOST = 16
"""Processes at most: each has a CUDA context of its own."""


class CompileAhead:
    """Worker processes that compile; started when first needed, and ended by the ``with`` statement.

    processes: 1 compiles in this process.
    """

    def __init__(self, processes: int = 0) -> None:
        self.processes = processes or min(MOST, os.cpu_count() or 1)
        self.ready: set[Instance] = set()
        """What was compiled, or tried: a plan that needs it loads it itself, and reports what is wrong with it."""
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def compile_for(self, attempts: Iterable[Callable[[], Any]], enough: Callable[[], bool] = lambda: False) -> int:
        """Try the attempts, which plan products and run them, and compile what they need; how many kernels those were.

        An attempt that needs several kernels is tried again after each. One that fails otherwise is left to its caller,
        whose own try will fail again. enough: asked before each round whether to stop.
        """
        waiting, before = list(attempts), len(self.ready)
        while waiting and not enough():
            with jit.noting(self.ready) as noted:
                waiting = [attempt for attempt in waiting if _waits(attempt)]
            self._compile(tuple(noted))
            self.ready.update(noted)
        return len(self.ready) - before

    def _compile(self, instances: Sequence[Instance]) -> None:
        if self.processes == 1 or len(instances) < 2:
            problems: Iterable[str] = map(compiled, instances)
        else:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.processes, mp_context=context)
            problems = self._pool.map(compiled, instances)
        for problem in filter(None, problems):
            log.warning("%s", problem)


def compiled(instance: Instance) -> str:
    """Compile a kernel, which CuPy then keeps on disk; what went wrong, or nothing."""
    try:
        jit.load(*instance)
    except (SpformatError, RuntimeError, OSError) as e:
        return f"{instance[1]}: not compiled ahead: {str(e)[:200]}"
    return ""


def _waits(attempt: Callable[[], Any]) -> bool:
    """Whether an attempt needs a kernel that is not compiled yet."""
    try:
        attempt()
    except jit.NotCompiled:
        return True
    except (SpformatError, ValueError, TypeError, RuntimeError, MemoryError) as e:
        if isinstance(device_error(e) or e, DeviceFault):
            raise  # no later call would work
    return False
