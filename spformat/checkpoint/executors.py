"""Output files written by the workers of any ``concurrent.futures.Executor``: threads, processes or a dask cluster.

The bytes in flight are bounded, and what failed is tried again. All workers see the source and the target folder under
the same paths, so only a description of the work and its outcome are sent. A worker that dies leaves at most a
temporary file behind; its output file is written again, by dask itself or here, with the same bytes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from .. import limits
from ..arrays.interrupts import deferred_interrupts
from ..arrays.threads import cores
from ..errors import InputError, LockedError, SpformatError, UsageError, WriteError
from ..storage.files import Path
from .parts import FileOutcome, FileTask, Written, convert_file
from .shard_input import Progress
from .tensor_plans import TensorOutcome

KINDS = ("threads", "processes", "dask")

_MOST_HASHERS = 8
"""Most threads that hash files while devices, or this machine, convert others."""
_BESIDE = 64 << 20
"""Bytes that a worker needs beside its largest tensor and the converted form of it."""


@dataclass(frozen=True)
class Workers:
    """An executor, and how much work it may be given at once."""

    executor: Executor
    count: int = 0
    """Files that are converted side by side; 0: one for each core of this machine. If the source has fewer shards than
    this, shards are written in pieces."""
    in_flight: int = 0
    """Bytes of memory that running tasks may need together (each needs twice its largest tensor); 0: half of the memory
    of this machine, or the memory limit in force. One task always runs."""
    ahead: int = 0
    """Files beside these that the executor may be given. It has not begun with them, or need not do much more."""
    retries: int = 2
    """How often a task is tried again if it failed for a reason that may pass: an I/O error, a lost worker. A tensor
    that does not fit its target, or a bad file, is never tried again."""

    def with_defaults(self) -> Workers:
        """These workers, with the defaults of this machine in place of 0."""
        budget = limits.current().memory or limits.host_memory() // 2
        return replace(self, count=self.count or cores(), in_flight=self.in_flight or budget)


class OnDevices(Executor):
    """Some threads for each device. A file is converted on the device of the thread that is free first.

    Hashes are computed by other threads: a core hashes 1 to 2 GB a second, less than a device or many cores convert.
    """

    def __init__(self, devices: Sequence[str], share: int = 1) -> None:
        """devices: at least one, as ``parse_devices`` returns them. share: threads for each, which share its memory."""
        self._free: SimpleQueue[str] = SimpleQueue()
        self._share, self.count, self._stopped = share, share * len(devices), threading.Event()
        for device in tuple(devices) * share:
            self._free.put(device)
        self._own = threading.local()
        self._converting = ThreadPoolExecutor(self.count, "spformat-device", self._take_device)
        self._hashing = ThreadPoolExecutor(max(1, min(_MOST_HASHERS, cores() // 2)), "spformat-hashes")

    def workers(self) -> Workers:
        """This executor, given twice as many files as it converts at once: of some only the hashes are missing."""
        return Workers(self, self.count, ahead=self.count)

    def _take_device(self) -> None:
        self._own.device = self._free.get_nowait()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """The outcome of ``convert_file`` (which ``fn`` must be) for a FileTask, whose own device does not count."""
        outcome: Future[Any] = Future()
        self._converting.submit(self._convert, outcome, *args, **options)
        return outcome

    def _convert(self, outcome: Future[FileOutcome], task: FileTask) -> None:
        try:
            task = replace(task, device=self._own.device, share=self._share)
            written = Written(task, self._go_on, self._hashing)
        except BaseException as e:  # carried to whoever asks for the outcome
            outcome.set_exception(e)
            return

        def settle(_: Future[str]) -> None:
            try:
                described = written.outcome()
            except BaseException as e:  # likewise
                outcome.set_exception(e)
            else:
                outcome.set_result(described)

        written.digest_out.add_done_callback(lambda _: written.digest_in.add_done_callback(settle))

    def stop(self) -> None:
        """Let no file be converted further than its current tensor; its task then raises CancelledError."""
        self._stopped.set()

    def _go_on(self, outcome: TensorOutcome) -> None:
        if self._stopped.is_set():
            raise CancelledError

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As of any executor."""
        self._converting.shutdown(wait, cancel_futures=cancel_futures)
        self._hashing.shutdown(wait, cancel_futures=cancel_futures)


def convert_files(
    tasks: Iterable[FileTask],
    workers: Workers,
    record: Callable[[FileOutcome], None],
    progress: Progress | None = None,
) -> None:
    """Run each task on a worker, the largest first, and call ``record`` with each outcome when its file is finished.

    After an error that another try cannot repair, and after an interrupt (Ctrl-C, a signal handler that raises), no
    further task is started. The tasks that are running are waited for (after an interrupt ``OnDevices`` leaves them at
    the next tensor), their outcomes are recorded, and then the error is raised. So no worker writes after this function
    has ended.

    progress: called with the outcome of every tensor, in another thread than the caller's.
    """
    stop: Future[None] = Future()

    def each(outcome: FileOutcome) -> None:
        for tensor in outcome.outcomes if progress else ():
            progress(tensor)  # type: ignore[misc]
        record(outcome)

    def stop_once() -> None:
        if isinstance(workers.executor, OnDevices):
            workers.executor.stop()
        if not stop.done():
            stop.set_result(None)

    # The outcomes are recorded in another thread, in which no signal handler runs; this one only waits for it.
    with deferred_interrupts(stop_once, signal.valid_signals()), ThreadPoolExecutor(1, "spformat-outcomes") as recorder:
        recorded = recorder.submit(copy_context().run, _record_all, tasks, workers.with_defaults(), each, stop)
        while not recorded.done():
            # The system may hand a signal to any thread, and Python runs its handler when the main thread wakes.
            wait([recorded], timeout=0.05)
    recorded.result()


def _record_all(
    tasks: Iterable[FileTask], workers: Workers, record: Callable[[FileOutcome], None], stop: Future[None]
) -> None:
    """``convert_files`` in its own thread. It ends early, with CancelledError, when ``stop`` is done.

    Not ``threads.in_order``: memory bounds what runs here, too, and a failed task goes back into the queue. No more
    tasks are submitted than can run, because a task that waits in a cluster cannot be cancelled with certainty.
    """
    waiting = deque(sorted(tasks, key=lambda t: t.file_plan.nbytes, reverse=True))
    running: dict[Future[FileOutcome], FileTask] = {}
    tries: dict[str, int] = {}
    failed: BaseException | None = None
    try:
        while running or (waiting and failed is None):
            load = sum(_memory(t) for t in running.values())
            while waiting and failed is None and _has_room(workers, len(running), load + _memory(waiting[0])):
                task = waiting.popleft()
                load += _memory(task)
                try:
                    running[workers.executor.submit(convert_file, task)] = task
                except (BrokenExecutor, RuntimeError) as e:  # its processes are gone, or it was shut down
                    failed = _explained(e, task)
            if not running:
                break
            awaited: list[Future[Any]] = [*running, *([] if stop.done() else [stop])]
            wait(awaited, return_when=FIRST_COMPLETED)
            if stop.done():
                failed = failed or CancelledError()
            for future in [f for f in running if f.done()]:
                task, error = running.pop(future), _error_of(future)
                if error is None:
                    record(future.result())
                    continue
                if isinstance(error, BrokenExecutor):
                    workers.executor.shutdown()  # waits for its other processes to end
                tries[task.file_plan.name] = tries.get(task.file_plan.name, 0) + 1
                if failed is None and _may_pass(error) and tries[task.file_plan.name] <= workers.retries:
                    # The interrupted try may have published its file already; the same bytes replace it.
                    waiting.appendleft(replace(task, overwrite=True))
                else:
                    failed = failed or _explained(error, task, tries[task.file_plan.name])
    finally:
        wait(running)  # after an error of ``record``
    if failed is not None:
        raise failed


def _has_room(workers: Workers, running: int, load: int) -> bool:
    return not running or (running < workers.count + workers.ahead and load <= workers.in_flight)


def _memory(task: FileTask) -> int:
    return 2 * task.largest + _BESIDE


def _error_of(future: Future[Any]) -> BaseException | None:
    return future.exception() if not future.cancelled() else RuntimeError("cancelled by the executor")


def _may_pass(error: BaseException) -> bool:
    """Whether another try may succeed: after an I/O error or a lost worker, but not after an error in the input."""
    if isinstance(error, (BrokenExecutor, LockedError)) or not isinstance(error, Exception):
        return False
    return isinstance(error, OSError) or not isinstance(error, SpformatError)


def _explained(error: BaseException, task: FileTask, tries: int = 1) -> BaseException:
    if isinstance(error, SpformatError) or not isinstance(error, Exception):
        return error
    again = "finished files are kept: run again with --resume (resume=True)"
    wrapped = WriteError(
        f"{task.file_plan.name}: failed {tries} time(s) on the executor, last {type(error).__name__}: {error}; {again}",
        path=task.folder,
    )
    wrapped.__cause__ = error
    return wrapped


@contextmanager
def open_workers(kind: str, count: int = 0, scheduler: str = "", paths: Sequence[Path] = ()) -> Iterator[Workers]:
    """Workers for a ``with`` block: "threads" or "processes" of this machine, or "dask".

    count: how many; 0: one for each core. scheduler: address of a dask scheduler, whose workers are used as they are;
    without one, a LocalCluster of ``count`` processes is started. paths: files and folders of the conversion; each
    worker of a cluster must see them.

    Raises UsageError (an unknown kind, dask is not installed, workers of another release) and InputError (no scheduler
    at that address, a worker that does not see a path).
    """
    check_kind(kind, scheduler)
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

        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, mp_context=context, initializer=_in_worker_process) as executor:
            yield Workers(executor, count)


def check_kind(kind: str, scheduler: str = "") -> None:
    """UsageError for an executor that there is not, or that has no scheduler."""
    if kind not in KINDS:
        raise UsageError(f"executor: expected one of {', '.join(KINDS)}, got {kind!r}")
    if scheduler and kind != "dask":
        raise UsageError(f"scheduler: only with the executor dask, got {kind!r}")


def _in_worker_process() -> None:
    """Runs at the start of a worker process. It ends at once when its parent is gone, and leaves the signals that a
    terminal sends to all processes of a command to the parent, which waits for the files that are being written."""
    import multiprocessing
    import signal
    import threading

    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="spformat-parent").start()


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
            reports = client.run(_worker_report, paths)
            _check_workers(reports)
            threads, memory = (sum(r[key] for r in reports.values()) for key in ("threads", "memory"))
            yield Workers(client.get_executor(pure=False), threads, memory // 2)
    finally:
        if cluster is not None:
            cluster.close()


def _worker_report(paths: list[str], dask_worker: Any = None) -> dict[str, Any]:
    """Runs on a worker: its release, which of the paths it does not see, its threads and its memory in bytes."""
    from .. import __version__

    hidden = [p for p in paths if not os.path.exists(p)]
    manager = dask_worker.memory_manager
    return {
        "release": __version__, "hidden": hidden, "threads": dask_worker.state.nthreads,
        "memory": manager.memory_limit or limits.host_memory(),
    }  # fmt: skip


def _check_workers(reports: dict[str, dict[str, Any]]) -> None:
    from .. import __version__

    for address, worker in reports.items():
        if worker["release"] != __version__:
            got = f"{worker['release']} on {address}"
            raise UsageError(f"executor dask: expected workers with spformat {__version__}, got {got}")
    blind = {address: worker["hidden"] for address, worker in reports.items() if worker["hidden"]}
    if blind:
        address, hidden = next(iter(blind.items()))
        raise InputError(
            f"{len(blind)} of {len(reports)} dask workers do not see it, first {address}: the cluster needs a file "
            "system that all of its machines mount under one path",
            path=hidden[0],
        )
