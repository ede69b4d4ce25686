"""Threads that stay for the next product: for products that take less time than a thread takes to start.

``arrays.threads`` starts threads for one call, which takes 0.03 to 0.2 ms, and the caller waits until they have
started. These threads wait in compiled code for a product (``team_loops.attend``), and begin with it after less than a
microsecond. When none came for SPIN_NS, they sleep, and the next product wakes them without waiting for them: the
caller takes every piece that no other thread has taken.

A process that forks leaves the threads behind: the child begins without any. One product at a time has the team; a
product that comes meanwhile, from another thread of the caller, is computed by that thread alone.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays import threads
from ...arrays.interrupts import deferred_interrupts
from ...arrays.library import Array
from .board import AWAKE, CALLER, MOST, SPIN, SPIN_NS, STATES, WORDS


class Team:
    """The threads of a process."""

    def __init__(self) -> None:
        self.board = np.zeros(STATES + WORDS * MOST, np.int64)
        self.board[SPIN], self.board[CALLER] = SPIN_NS, -1
        self.size = 1
        """Threads, with the caller."""
        self.products = 0
        self.mutex = threading.Lock()

    def run(self, loop: Callable[..., None], bounds: Array, operands: Any, count: int) -> None:
        """``loop`` of ``team_loops.shared`` for all pieces of ``bounds``, on the caller and count - 1 other threads."""
        while self.size < count:
            with deferred_interrupts():  # two threads with one number would compute the same pieces
                self.board[STATES + WORDS * self.size] = AWAKE
                threading.Thread(target=_attend, args=(self.board, self.size), name="spformat", daemon=True).start()
                self.size += 1
        self.products += 1
        loop(self.board, self.products, count, bounds, operands)

    def dismiss(self) -> None:
        """Have all threads sleep, so that none is in code that is freed when the process ends."""
        self.board[SPIN] = -1
        deadline = time.monotonic() + 1
        while self.board[STATES::WORDS].any() and time.monotonic() < deadline:
            time.sleep(1e-5)


def _attend(board: Array, thread: int) -> None:
    from .team_loops import attend

    attend(board, thread)


_team = Team()
_none = np.zeros(STATES + WORDS, np.int64)


def _reset() -> None:
    global _team
    _team = Team()


os.register_at_fork(after_in_child=_reset)
atexit.register(lambda: _team.dismiss())


def run(loop: Callable[..., None], wanted: int, product: Callable[[int], tuple[Array, Any]]) -> None:
    """loop(lo, hi, thread, *operands) for all pieces of a product, on up to ``wanted`` threads.

    loop: of ``team_loops.shared``. product: (threads) -> (int64 bounds [0, .., units], operands); one thread takes one
    piece, more take up to PIECES each.
    """
    team, count = _team, min(wanted, MOST, threads.available()) if wanted > 1 else 1
    if count > 1 and team.mutex.acquire(blocking=False):
        try:
            bounds, operands = product(count)
            team.run(loop, bounds, operands, count)
        finally:
            team.mutex.release()
    else:
        bounds, operands = product(1)
        loop(_none, 1, 1, bounds, operands)
