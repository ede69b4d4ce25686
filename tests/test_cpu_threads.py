"""How a product on the CPU is cut, into tiles, pieces and threads, changes no bit of it."""

from __future__ import annotations

import itertools
import multiprocessing

import numpy as np
import pytest
from test_cpu import SPECS, K, exact, matrix, operand, product, same

from spformat.arrays import threads
from spformat.backends.cpu import operands
from spformat.formats.convert import convert

pytest.importorskip("numba")


@pytest.mark.parametrize("spec", SPECS)
def test_the_number_of_threads_does_not_change_a_bit(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with a tile each, or with rows of the remaining tiles; in passes of one tile, or of all tiles."""
    a = matrix(spec, "bfloat16", (300, 400), integers=False)
    B = operand("bfloat16", (400, 166), integers=False)
    monkeypatch.setattr(operands, "SMALL", 0)
    results = []
    for tiles, together in itertools.product((1, 8), (1, 2)):
        monkeypatch.setattr(operands, "PASS", 400 * 128 * tiles)
        monkeypatch.setattr(operands, "cache_bytes", lambda together=together: 400 * 128 * together)
        for count in (1, 2, 4, 7):
            monkeypatch.setattr(threads, "cores", lambda count=count: count)
            results.append(product(a, B, out_dtype="float32"))
    for again in results[1:]:
        np.testing.assert_array_equal(again.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith("two-four")])
def test_b_in_place_and_in_tiles_give_the_same_bits(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, B = matrix(spec, "float32", integers=False), operand("float32", (K, 96), integers=False)
    tiled = product(a, B)
    monkeypatch.setattr(operands, "PASS", 1)  # no tile is small enough to be worth copying
    monkeypatch.setattr(operands, "fill", None)
    np.testing.assert_array_equal(product(a, B).view(np.uint32), tiled.view(np.uint32))


@pytest.mark.parametrize("count", [1, 3])
def test_columns_of_a_bitmask_worked_out_once_for_many_tiles(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from spformat.backends.cpu import loops

    held = np.random.default_rng(3).random((301, 1000)) < np.linspace(0, 0.2, 301)[:, None]
    x = np.where(held, np.random.default_rng(4).integers(1, 9, held.shape), 0).astype(np.float32)
    x[17, :200] = 3
    a, B = convert(x, "bitmask"), operand("float32", (1000, 96))
    monkeypatch.setattr(operands, "cache_bytes", lambda: 1)
    monkeypatch.setattr(operands, "SMALL", 0)
    monkeypatch.setattr(threads, "cores", lambda: count)
    monkeypatch.setattr(loops, "bitmask", None)
    same(product(a, B), exact(a, B, np.dtype(np.float32)))


def test_pieces_are_even_and_cover_everything() -> None:
    ends = np.cumsum([0, 1000, *[1] * 500, 0, 0])
    for count in (1, 2, 5, 600):
        bounds = operands.Work(lambda *_: None, ends.size - 1, 1, int(ends[-1]), ends).pieces(count)
        assert bounds[0] == 0
        assert bounds[-1] == ends.size - 1
        assert all(x < y for x, y in itertools.pairwise(bounds))
        assert len(bounds) <= count + 1
    assert operands.Work(lambda *_: None, 3, 1, 0).pieces(8) == [0, 1, 2, 3]


def test_an_exception_in_a_thread_reaches_the_caller() -> None:
    def piece(i: int) -> None:
        if i == 5:
            raise RuntimeError("piece 5")

    with pytest.raises(RuntimeError, match="piece 5"):
        threads.run(piece, 50, 4)
    done: list[int] = []
    threads.run(done.append, 100, 4)
    assert sorted(done) == list(range(100))


def _in_child(queue: multiprocessing.Queue) -> None:
    a, B = matrix("csr", "float32", (300, 400)), operand("float32", (400, 64))
    queue.put(bool(np.array_equal(product(a, B), exact(a, B, np.dtype(np.float32)))))


def test_a_forked_process_can_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread pools of compiled code usually do not survive a fork; a conversion worker may be one."""
    monkeypatch.setattr(operands, "SMALL", 0)
    monkeypatch.setattr(threads, "cores", lambda: 2)
    product(matrix("csr", "float32", (300, 400)), operand("float32", (400, 64)))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
