"""Conversions spread over executors: the bytes of one run, with tasks that fail and bounds on what is under way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import sparse
from test_parts import SHARDED, SINGLE, tree, whole

import spformat as sf
from spformat.checkpoint import Part, Workers, convert_checkpoint, executors, merge_parts


@pytest.mark.parametrize("source", [SHARDED, SINGLE], ids=["two shards", "one"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads_give_the_bytes_of_one(tmp_path: Path, source: Path, count: int) -> None:
    expected, seen = whole(tmp_path, source), []
    with ThreadPoolExecutor(count) as pool:
        report = convert_checkpoint(source, tmp_path / "out", executor=Workers(pool, count), progress=seen.append)
    assert tree(tmp_path / "out") == expected
    assert {o.name for o in seen} == {o.name for o in report.outcomes}
    # One thread, that of the test, converts an array job's part; several convert it side by side.
    for i in (1, 2):
        with ThreadPoolExecutor(count) as pool:
            convert_checkpoint(source, tmp_path / "parts", part=Part(i, 2), executor=pool)
    merge_parts(tmp_path / "parts")
    assert tree(tmp_path / "parts") == expected


def test_processes_give_the_bytes_of_one_and_typed_errors(tmp_path: Path) -> None:
    import multiprocessing

    expected = whole(tmp_path)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        convert_checkpoint(SHARDED, tmp_path / "out", executor=pool)
        assert tree(tmp_path / "out") == expected
        with pytest.raises(sf.errors.StructureError, match=r"tensor '.*': two-four") as e:
            convert_checkpoint(SHARDED, tmp_path / "no", "two-four", executor=pool)
        assert (e.value.unit, e.value.limit) == ("group", 2)
    assert tree(tmp_path / "no") == {}


class Inline(Executor):
    """Runs a task when it is submitted; fails the first tries, and counts the tasks that are under way at once."""

    def __init__(self, failures: Iterator[Exception] | None = None) -> None:
        self.failures = failures or iter(())
        self.tries: list[str] = []

    def submit(self, work: Any, /, task: Any, *_: Any, **__: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tries.append(task.file_plan.name)
        error = next(self.failures, None)
        try:
            if error is not None:
                raise error
            future.set_result(work(task))
        except Exception as e:
            future.set_exception(e)
        return future


def test_what_may_pass_is_tried_again(tmp_path: Path) -> None:
    expected = whole(tmp_path)
    pool = Inline(iter((ConnectionError("worker lost"), sf.errors.WriteError("no space left"))))
    convert_checkpoint(SHARDED, tmp_path / "out", executor=Workers(pool, 2))
    assert tree(tmp_path / "out") == expected
    assert len(pool.tries) == 4

    pool = Inline(iter([ConnectionError("worker lost")] * 6))
    with pytest.raises(sf.errors.WriteError, match=r"failed 3 time\(s\).*ConnectionError: worker lost; .*--resume"):
        convert_checkpoint(SHARDED, tmp_path / "no", executor=Workers(pool, 2))
    for error in (BrokenProcessPool("killed"), sf.errors.IntegrityError("damaged")):
        pool = Inline(iter([error]))
        with pytest.raises((sf.errors.WriteError, sf.errors.IntegrityError), match=r"killed|damaged"):
            convert_checkpoint(SHARDED, tmp_path / f"no-{type(error).__name__}", executor=Workers(pool, 1))
        assert len(set(pool.tries)) == len(pool.tries)


class Slow(Executor):
    """Finishes a task only when nothing more is submitted; counts what is under way."""

    def __init__(self) -> None:
        self.pool, self.now, self.most = ThreadPoolExecutor(8), 0, 0

    def submit(self, work: Any, /, task: Any, *_: Any, **__: Any) -> Future[Any]:
        self.now += 1
        self.most = max(self.most, self.now)

        def run() -> Any:
            import time

            time.sleep(0.02)
            done = work(task)
            self.now -= 1
            return done

        return self.pool.submit(run)


def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": sparse(rng, (64, 64), "float32", 0.3) for i in range(16)}
    sf.save_dense(tmp_path / "in.safetensors", tensors)
    (one,) = {2 * x.nbytes for x in tensors.values()}
    for room, most in ((1, 1), (3 * (one + executors._BESIDE), 3)):
        pool = Slow()
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / f"out{most}", executor=Workers(pool, 8, room))
        assert pool.most == most
        assert tree(tmp_path / f"out{most}") == tree(tmp_path / "out1")
