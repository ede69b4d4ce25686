"""Units of work on any ``concurrent.futures.Executor``: bounded bytes in flight, another try for what failed.

Threads, processes of this machine, or a dask cluster. Workers see the source and the target folder under the same
paths; nothing but a description of the work and its outcome travels. A worker that dies leaves at most a temporary
file behind; its unit is done again, by dask itself or here, and gives the same bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from .. import limits
from ..arrays.threads import cores
from ..errors import InputError, SpformatError, UsageError, WriteError
from ..storage.files import Path
from .parts import Converted, Task, convert_unit

KINDS = ("threads", "processes", "dask")

_BESIDE = 64 << 20
"""Bytes a worker needs beside its tensor and what that becomes."""


@dataclass(frozen=True)
class Workers:
    """An executor and what may be asked of it at once."""

    executor: Executor
    count: int = 0
    """Units that run side by side; 0: the cores of this machine. With fewer shards than this, shards are cut."""
    in_flight: int = 0
    """Bytes of memory that running units may need together (twice their largest tensor each); 0: half of what this
    machine has, or the memory limit in force. One unit always runs."""
    retries: int = 2
    """Further tries of a unit that failed for a reason that may pass: I/O errors, lost workers. Never of a tensor
    that does not fit or a bad file."""

    def filled(self) -> Workers:
        """With the defaults of this machine for what is 0."""
        budget = limits.current().memory or limits.host_memory() // 2
        return replace(self, count=self.count or cores(), in_flight=self.in_flight or budget)


def convert_units(tasks: Iterable[Task], workers: Workers) -> Iterator[Converted]:
    """What each task gives, in the order they finish, the largest started first.

    After an error that no further try can mend, nothing more is started; what runs is waited for and its results
    are given before the error is raised.
    """
    workers = workers.filled()
    waiting = deque(sorted(tasks, key=lambda t: t.unit.nbytes, reverse=True))
    running: dict[Future[Converted], Task] = {}
    tries: dict[str, int] = {}
    failed: BaseException | None = None
    try:
        while running or (waiting and failed is None):
            load = sum(_memory(t) for t in running.values())
            while waiting and failed is None and (not running or load + _memory(waiting[0]) <= workers.in_flight):
                task = waiting.popleft()
                load += _memory(task)
                try:
                    running[workers.executor.submit(convert_unit, task)] = task
                except (BrokenExecutor, RuntimeError) as e:  # its processes are gone, or it was shut down
                    failed = _explained(e, task)
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task, error = running.pop(future), _error_of(future)
                if error is None:
                    yield future.result()
                    continue
                tries[task.unit.name] = tries.get(task.unit.name, 0) + 1
                if _may_pass(error) and tries[task.unit.name] <= workers.retries:
                    # The file of a try that was cut off may be there already, with the right bytes or none.
                    waiting.appendleft(replace(task, overwrite=True))
                else:
                    failed = failed or _explained(error, task, tries[task.unit.name])
    finally:
        for future in running:
            future.cancel()
    if failed is not None:
        raise failed


def _memory(task: Task) -> int:
    return 2 * task.largest + _BESIDE


def _error_of(future: Future[Any]) -> BaseException | None:
    return future.exception() if not future.cancelled() else RuntimeError("cancelled by the executor")


def _may_pass(error: BaseException) -> bool:
    """Whether another try could end otherwise: I/O and lost workers, but not what the input itself is."""
    if isinstance(error, BrokenExecutor) or not isinstance(error, Exception):
        return False
    return isinstance(error, OSError) or not isinstance(error, SpformatError)


def _explained(error: BaseException, task: Task, tries: int = 1) -> BaseException:
    if isinstance(error, SpformatError) or not isinstance(error, Exception):
        return error
    again = "finished units are kept: run again with --resume (resume=True)"
    wrapped = WriteError(
        f"{task.unit.name}: failed {tries} time(s) on the executor, last {type(error).__name__}: {error}; {again}",
        path=task.folder,
    )
    wrapped.__cause__ = error
    return wrapped


@contextmanager
def open_workers(kind: str, count: int = 0, scheduler: str = "", paths: Sequence[Path] = ()) -> Iterator[Workers]:
    """Workers for a ``with`` block: "threads" or "processes" of this machine, or "dask".

    count: how many; 0: one a core. scheduler: address of a dask scheduler, whose workers are used as they are;
    without one a LocalCluster of ``count`` processes is started. paths: files and folders of the conversion; every
    worker of a cluster is asked whether it sees them.

    Raises UsageError (an unknown kind, dask not installed, workers of another release), InputError (no scheduler
    there, a worker that does not see a path).
    """
    if kind not in KINDS:
        raise UsageError(f"executor: expected one of {', '.join(KINDS)}, got {kind!r}")
    if scheduler and kind != "dask":
        raise UsageError(f"scheduler: only with the executor dask, got {kind!r}")
    count = count or cores()
    if kind == "dask":
        with _dask(count, scheduler, [os.path.abspath(p) for p in paths]) as workers:
            yield workers
    elif kind == "threads":
        with ThreadPoolExecutor(count) as executor:
            yield Workers(executor, count)
    else:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as executor:
            yield Workers(executor, count)


@contextmanager
def _dask(count: int, scheduler: str, paths: list[str]) -> Iterator[Workers]:
    try:
        import distributed
    except ImportError as e:
        raise UsageError("executor dask: dask.distributed is not installed: pip install 'spformat[dask]'") from e
    cluster = None
    if not scheduler:
        cluster = distributed.LocalCluster(
            n_workers=count, threads_per_worker=1, processes=True, dashboard_address=None
        )
    try:
        try:
            client = distributed.Client(scheduler or cluster, timeout="20s")
        except (OSError, ValueError) as e:
            raise InputError(f"no dask scheduler answers there: {e}", path=scheduler) from e
        with client:
            client.wait_for_workers(1, timeout=60)
            said = client.run(_report, paths)
            _check_workers(said)
            threads, memory = (sum(s[key] for s in said.values()) for key in ("threads", "memory"))
            yield Workers(client.get_executor(pure=False), threads, memory // 2)
    finally:
        if cluster is not None:
            cluster.close()


def _report(paths: list[str], dask_worker: Any = None) -> dict[str, Any]:
    """What a worker says of itself: its release, which of the paths it does not see, its threads and memory."""
    from .. import __version__

    hidden = [p for p in paths if not os.path.exists(p)]
    manager = dask_worker.memory_manager
    return {
        "release": __version__, "hidden": hidden, "threads": dask_worker.state.nthreads,
        "memory": manager.memory_limit or limits.host_memory(),
    }  # fmt: skip


def _check_workers(said: dict[str, dict[str, Any]]) -> None:
    from .. import __version__

    for address, worker in said.items():
        if worker["release"] != __version__:
            got = f"{worker['release']} on {address}"
            raise UsageError(f"executor dask: expected workers with spformat {__version__}, got {got}")
    blind = {address: worker["hidden"] for address, worker in said.items() if worker["hidden"]}
    if blind:
        address, hidden = next(iter(blind.items()))
        raise InputError(
            f"{len(blind)} of {len(said)} dask workers do not see it, first {address}: the cluster needs a file system "
            "that all of its machines mount under one path",
            path=hidden[0],
        )
