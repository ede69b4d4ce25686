"""Results of a pool in the order of the tasks, with few tasks under way."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spformat import limits
from spformat.arrays import threads
from spformat.arrays.interrupts import deferred_interrupts


def test_results_come_in_the_order_of_the_tasks_under_the_limits_of_the_caller() -> None:
    release = threading.Event()

    def first() -> tuple[int, int | None]:
        assert release.wait(10)  # ends after the second
        return 0, limits.current().memory

    def second() -> tuple[int, int | None]:
        release.set()
        return 1, limits.current().memory

    with limits.using(memory=12345), ThreadPoolExecutor(2) as pool:
        assert list(threads.in_order(pool, [first, second], 1)) == [(0, 12345), (1, 12345)]


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_few_tasks_are_taken_before_their_results_are(ahead: int) -> None:
    taken = []

    def tasks() -> Iterator[Callable[[], int]]:
        for i in range(20):
            taken.append(i)
            yield lambda i=i: i

    with ThreadPoolExecutor(3) as pool:
        for i, result in enumerate(threads.in_order(pool, tasks(), ahead)):
            assert result == i
            assert len(taken) == min(20, i + 1 + ahead)


def test_an_error_comes_in_its_turn_and_cancels_what_waits() -> None:
    done, started, release = [], threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert release.wait(10)

    def fail() -> None:
        raise KeyError("here")

    with ThreadPoolExecutor(1) as pool:
        results = threads.in_order(pool, [lambda: 7, fail, wait, lambda: done.append(1)], 3)
        assert next(results) == 7
        with pytest.raises(KeyError, match="here"):
            assert started.wait(10)
            next(results)
        release.set()
    assert done == []


def test_after_an_interrupt_no_thread_works_on() -> None:
    """It would write into memory that the caller uses for something else by then."""
    finished, begun, before = [], threading.Event(), set(threading.enumerate())

    def piece(i: int) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.wait(10)
            return
        begun.set()
        time.sleep(0.1)  # the main thread waits for this one
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        finished.append(i)

    with pytest.raises(KeyboardInterrupt):
        threads.run(piece, 40, 2)
    assert len(finished) == 1  # this piece is finished, and no other one is begun
    assert set(threading.enumerate()) <= before


def test_where_no_thread_can_be_started_the_caller_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[int] = []
    threads.run(done.append, 5, 4)
    assert done == [0, 1, 2, 3, 4]


def test_a_handler_that_an_interrupted_block_left_is_not_wrapped_again() -> None:
    """Otherwise each interrupt at the end of a block would add a call to every later one."""

    def original(*_: Any) -> None: ...

    def left(*_: Any) -> None: ...

    left.puts_off, left.is_over = original, lambda: True  # type: ignore[attr-defined]
    before = signal.signal(signal.SIGUSR1, left)
    try:
        with deferred_interrupts():
            assert signal.getsignal(signal.SIGUSR1) not in (left, original)
        assert signal.getsignal(signal.SIGUSR1) is original
    finally:
        signal.signal(signal.SIGUSR1, before)
