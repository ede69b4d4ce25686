"""The threads that stay for the next product with few columns: results, forks, callers at the same time, the end."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_cpu import exact, matrix, operand, product, same

from spformat.arrays import threads
from spformat.backends.cpu import few, team
from spformat.backends.cpu.board import STATES, WORDS

pytest.importorskip("numba")
from spformat.formats.fast.simd import WIDE  # needs numba

SPECS = (
    "csr",
    "bsr:blocksize=16x16",
    "sr-bcrs:vector_length=8,stride=16",
    "vector-nm:n=2,m=8,vector_length=16",
    "bitmask",
)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> team.Team:
    """A team of its own, for products however small, on three threads."""
    mine = team.Team()
    monkeypatch.setattr(team, "_team", mine)
    monkeypatch.setattr(few, "FEW_SMALL", 0)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    return mine


@pytest.mark.parametrize("n", [1, 7, 16])
@pytest.mark.parametrize("spec", SPECS)
def test_product_after_product(shared: team.Team, spec: str, n: int) -> None:
    """Threads that help with one product see the operands of the next, and nothing of the one before."""
    if spec == "bitmask" and 4 not in WIDE:
        pytest.skip("this processor does not spread lanes over set bits (AVX-512): bitmask has no loop for few columns")
    cases = [(matrix(spec, "float32", (rows, 203), seed=rows), operand("float32", (203, n))) for rows in (301, 75, 16)]
    wanted = [exact(a, B, np.dtype(np.float32)) for a, B in cases]
    for _ in range(200):
        for (a, B), w in zip(cases, wanted, strict=True):
            np.testing.assert_array_equal(product(a, B), w)
    assert shared.products == 600
    assert shared.size == 3


def test_every_piece_is_taken_once(shared: team.Team) -> None:
    from spformat.backends.cpu.team_loops import shared as share
    from spformat.formats.fast.numba_cache import compiled

    @compiled
    def count(lo: int, hi: int, thread: int, taken: np.ndarray, by: np.ndarray) -> None:
        for i in range(lo, hi):
            taken[i] += 1
            by[i] = thread

    taken, by = np.zeros(1000, np.int64), np.zeros(1000, np.int64)
    bounds = np.array([0, 0, 1, 7, 400, 401, 800, 999, 1000])
    for i in range(1, 301):
        team.run(share(count, "count"), 3, lambda _: (bounds, (taken, by)))
        assert np.all(taken == i)
    assert set(by.tolist()) <= {0, 1, 2}


def test_callers_at_the_same_time(shared: team.Team) -> None:
    """One of them has the team, the others compute alone."""
    a, B = matrix("bsr:blocksize=16x16", "float32", (301, 203)), operand("float32", (203, 5))
    wanted, wrong = exact(a, B, np.dtype(np.float32)), []

    def call() -> None:
        for _ in range(300):
            if not np.array_equal(product(a, B), wanted):
                wrong.append(threading.get_ident())

    callers = [threading.Thread(target=call) for _ in range(4)]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    assert not wrong


def test_inside_alone_nobody_is_woken(shared: team.Team) -> None:
    a, B = matrix("csr", "float32", (301, 203)), operand("float32", (203, 5))
    with threads.alone():
        same(product(a, B), exact(a, B, np.dtype(np.float32)))
    assert shared.size == 1


def test_threads_sleep_when_no_product_comes(shared: team.Team) -> None:
    a, B = matrix("csr", "float32", (301, 203)), operand("float32", (203, 5))
    for _ in range(3):
        product(a, B)
        for _ in range(1000):
            if not shared.board[STATES::WORDS].any():
                break
            time.sleep(0.01)
        assert not shared.board[STATES::WORDS].any()  # asleep, and woken by the next product


def _in_child(queue: multiprocessing.Queue) -> None:
    a, B = matrix("csr", "float32", (301, 203)), operand("float32", (203, 5))
    right = all(np.array_equal(product(a, B), exact(a, B, np.dtype(np.float32))) for _ in range(50))
    queue.put((right, team._team.products, team._team.size))


def test_a_forked_process_has_a_team_of_its_own(shared: team.Team) -> None:
    product(matrix("csr", "float32", (301, 203)), operand("float32", (203, 5)))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    with shared.mutex:  # as another thread of the parent may hold it
        child.start()
    assert queue.get(timeout=60) == (True, 50, 3)
    child.join(60)
    assert child.exitcode == 0


def test_a_process_may_end_right_after_a_product() -> None:
    code = (
        "import numpy as np, spformat as sf\n"
        "from spformat.backends.cpu import few\n"
        "few.FEW_SMALL = 0\n"
        "a = sf.convert(np.eye(512, dtype=np.float32), 'csr')\n"
        "for _ in range(20): c = sf.spmm(a, np.ones((512, 3), np.float32))\n"
        "assert (c == 1).all()\n"
    )
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
