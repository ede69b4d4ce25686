"""The BSR kernel whose stored blocks are shared out evenly: its tables, what it takes and expects, exact products on a GPU or the
emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import hopper
from test_kernels import Guarded, on_device, problem

import spformat as sf
from spformat import BSR, DBSR
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.bsr import spmm_bsr_stream_sm90a as stream
from spformat.backends.cuda.bsr.spmm_bsr import sample_problem
from spformat.backends.cuda.runtime import row_tiles
from spformat.products.problem import Problem

KERNEL = stream.KERNEL
LAYOUTS = [(b, c) for b in ("row", "col") for c in ("row", "col")]


def large(n: int, **changes: Any) -> Problem:
    """4096 x 4096, 20 % of the blocks of 64 x 64, torch's layouts."""
    p = sample_problem("bsr", (64, 64), "bfloat16", "bfloat16", "col", "col")
    return p.changed(n=n, nnz=820 * 4096, **changes)


# ------------------------------------------------------------------ without a GPU


def test_it_is_chosen_for_tens_of_columns() -> None:
    assert sf.explain(large(40)).chosen == KERNEL.name
    assert sf.explain(large(4)).chosen not in (None, KERNEL.name)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"params": (("blocksize", (32, 64)),)}, "blocks must be multiples of 64 high and wide, got 32x64"),
        ({"params": (("blocksize", (64, 96)),)}, "got 64x96"),
        ({"sm": 100}, "needs sm_90 (wgmma), got sm_100"),
        ({"K": 4097}, "multiple of 8, got K = 4097"),
        ({"a_dtype": "float32", "b_dtype": "float32", "out_dtype": "float32"}, "a.dtype"),
        ({"device": "cpu", "sm": None}, ".to('cuda')"),
    ],
)
def test_what_it_takes(changes: dict[str, Any], part: str) -> None:
    assert KERNEL.unsupported(large(100)) == []
    assert KERNEL.unsupported(large(100, params=(("blocksize", (192, 128)),))) == []
    assert any(part in reason for reason in KERNEL.unsupported(large(100, **changes)))


def test_tiles_fit_a_multiprocessor() -> None:
    for t in stream.TILES:
        assert 3 <= t.stages <= 8
        assert t.resident * (t.smem + 16 * t.stages + 16 + stream.RESERVED) <= stream.SHARED
    assert len({str(t) for t in stream.TILES}) == len(stream.TILES)
    assert {t.cols for t in stream.TILES} == set(stream.WIDTHS)


@pytest.mark.parametrize("blocksize", [(64, 64), (128, 64), (64, 192), (128, 128)])
def test_steps_name_every_piece_of_every_strip(blocksize: tuple[int, int]) -> None:
    (R, C), rng = blocksize, np.random.default_rng(1)
    M, K = 5 * R - 40, 4 * C - 8  # with R = 128 the last strip is not the last one of its block row
    keep = rng.random((5, 4)) < 0.5
    keep[1] = False
    x = rng.integers(1, 9, (M, K)) * np.kron(keep, np.ones(blocksize, int))[:M, :K]
    a = BSR.from_dense(x.astype(np.float16), blocksize=blocksize)
    table = stream.steps_of(a.indptr, a.indices, M, blocksize)
    assert table.steps.dtype == table.places.dtype == np.int32
    assert len(table.steps) == len(table.places)
    rows, got, empty = a.data.reshape(-1, C), np.zeros((5 * R, 4 * C)), []
    for at, ((k, y), (strip, first, end, _)) in enumerate(zip(table.steps, table.places, strict=True)):
        assert first <= at < end
        assert (table.places[first:end, 0] == strip).all()
        if k < 0:
            empty.append(strip)
        else:
            got[64 * strip :, k:][:64, :64] += rows[y : y + 64, k % C : k % C + 64]
    strips = -(-M // 64)
    assert (got[:M, :K] == x).all()
    assert sorted(set(table.places[:, 0])) == list(range(strips))
    assert empty == [s for s in range(strips) if not keep[s * 64 // R].any()]


# ------------------------------------------------------------------ products, on a GPU


def blocks_of(
    rng: np.random.Generator, M: int, K: int, blocksize: tuple[int, int], kind: str = ""
) -> np.ndarray[Any, Any]:
    """Small integers in random blocks; one row has them all, others none. kind: "one" row has all blocks, or "last"."""
    grid = -(-M // blocksize[0]), -(-K // blocksize[1])
    keep = rng.random(grid) < 0.4
    keep[1::3] = False
    keep[grid[0] // 2] = True
    if kind == "one":
        keep[:] = False
        keep[grid[0] // 2] = True
    if kind == "last":
        keep[:] = False
        keep[-1, -1] = True
    return np.asarray(rng.integers(-3, 4, (M, K)) * np.kron(keep, np.ones(blocksize, int))[:M, :K])


def exact(
    shape: tuple[int, int, int], tile: stream.Tile, layouts: tuple[str, str], *, blocksize: tuple[int, int] = (64, 64),
    dtype: str = "bfloat16", out: str = "bfloat16", pad: tuple[int, int] = (0, 0), form: Any = BSR, kind: str = "",
) -> None:  # fmt: skip
    """Small integers, three runs with the same bits, NaN in C before, nothing written around it. pad: of B's lines and C's."""
    cp = hopper()
    (M, K, N), rng = shape, np.random.default_rng(sum(shape))
    value, result = VALUE_TYPES[dtype].numpy, VALUE_TYPES[out].numpy
    x = blocks_of(rng, M, K, blocksize, kind).astype(value)
    B = rng.integers(-3, 4, (K, N)).astype(value)
    wanted = (x.astype(np.float64) @ B.astype(np.float64)).astype(result)
    a = form.from_dense(x, blocksize=blocksize).to("cuda")
    p = problem(a, N, out, layouts, 90)
    assert not KERNEL.unsupported(p)
    plan, there = KERNEL.plan_with(a, p, tile), on_device(cp, B, layouts[0], pad[0])
    for _ in range(3):
        guarded = Guarded(cp, (M, N), result, layouts[1], pad[1])
        plan(there, out=guarded.out)
        got = guarded.out.get()
        assert guarded.intact(), "wrote outside C"
        assert np.array_equal(got.astype(np.float64), wanted.astype(np.float64)), f"{(got != wanted).sum()} wrong"


def few(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    """As on a device of so many multiprocessors: longer shares."""
    device = row_tiles.device_of(0)._replace(sms=processors)
    monkeypatch.setattr(row_tiles, "device_of", lambda *_: device)


def ragged(layout: str, N: int) -> int:
    """Padding with which lines of B start on 16-byte boundaries."""
    return -N % 8 if layout == "row" else 0


@pytest.mark.gpu
@pytest.mark.parametrize("tile", stream.TILES, ids=str)
def test_every_tile(tile: stream.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 3)
    number = stream.TILES.index(tile)
    layouts = LAYOUTS[number % 4]
    N = tile.cols + 5
    types = ("float16", "float32") if number % 3 == 2 else ("bfloat16", "bfloat16")
    exact((331, 392, N), tile, layouts, dtype=types[0], out=types[1], pad=(ragged(layouts[0], N), 0))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [BSR, DBSR])
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("cols", [16, 48, 128])
def test_layouts_and_rows_without_blocks(
    cols: int, layouts: tuple[str, str], form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, 2)
    exact((523, 520, 43), stream.Tile(cols, 2), layouts, pad=(ragged(layouts[0], 43), 3), form=form)


@pytest.mark.gpu
@pytest.mark.parametrize("processors", [1, 2, 5, 132])
@pytest.mark.parametrize("kind", ["", "one", "last"])
def test_shares(kind: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block with everything, tiles of many blocks, and a block for each step."""
    few(monkeypatch, processors)
    exact((300, 1000, 40), stream.Tile(16, 1), ("col", "row"), kind=kind)


@pytest.mark.gpu
@pytest.mark.parametrize("blocksize", [(128, 128), (64, 192), (192, 64)])
def test_larger_blocks(blocksize: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 3)
    exact((600, 584, 72), stream.Tile(64, 3), ("col", "col"), blocksize=blocksize, out="float32")


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_operands_that_are_not_aligned(layouts: tuple[str, str]) -> None:
    """The copy engine cannot read B, so the kernel for sm_80 runs; C starts anywhere."""
    exact((200, 264, 43), stream.Tile(48, 1), layouts, pad=(1 + ragged(layouts[0], 43), 1))


@pytest.mark.gpu
def test_no_blocks() -> None:
    cp = pytest.importorskip("cupy")
    a = BSR.from_dense(np.zeros((130, 200), np.float16), blocksize=(64, 64)).to("cuda")
    guarded = Guarded(cp, (130, 24), np.float16, "row", 0)
    KERNEL.plan(a, problem(a, 24, "float16", ("row", "row"), 90))(cp.ones((200, 24), np.float16), out=guarded.out)
    assert (guarded.out.get() == 0).all()


@pytest.mark.gpu
def test_a_plan_for_several_numbers_of_columns() -> None:
    """Sums and flags are shared by launches of other extents; none, one and more columns than a tile."""
    cp = pytest.importorskip("cupy")
    x = blocks_of(np.random.default_rng(0), 200, 264, (64, 64)).astype(np.float16)
    a = BSR.from_dense(x, blocksize=(64, 64)).to("cuda")
    plan = KERNEL.plan_with(a, problem(a, 24, "float16", ("row", "row"), 90), stream.Tile(16, 1))
    for n in (24, 0, 8, 1, 7, 304, 24):
        guarded = Guarded(cp, (200, n), np.float16, "row", 0)
        plan(cp.ones((264, n), np.float16), out=guarded.out)
        assert (guarded.out.get() == x.sum(1, keepdims=True)).all()
        assert guarded.intact()


# ------------------------------------------------------------------ planted defects, in the emulator

PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, header="spformat/even_shares.cuh")
stand_in.install(90)
import pytest
import test_bsr_stream as t


def equal():
    with pytest.MonkeyPatch.context() as patch:
        t.few(patch, 3)
        t.exact((300, 1000, 40), t.stream.Tile(32, 3), ("row", "row"))
    return True


three_runs(equal, planted, timeout=4.0)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("", "", "equal"),
        ("float acc[TN / 2] = {};", "float acc[TN / 2] = {1.0f};", "DIFFERENT"),
        ("if (end < tile_end)", "if (end < 0)", "DIFFERENT"),
        ("share + 1 + others) < tile_end)", "share + 1 + others) < 0)", "DIFFERENT"),
        ("share * (steps / blocks) + min(share, steps % blocks)", "share * (steps / blocks)", "DIFFERENT"),
        ("barrier::wait(full + 8 * stage, phase);", "", "deadlock|more arrivals at an mbarrier than its phase has"),
        ("barrier::wait(empty + 8 * stage, phase ^ 1);", "", "deadlock|more arrivals|in flight|DIFFERENT"),
        ('"r"(1u)', '"r"(0u)', "a thread that waits for another block that does not run yet"),
        ("share = blocks - 1 - blockIdx.x", "share = blockIdx.x",
         "a thread that waits for another block that does not run yet"),
        ("k < 0) continue;", "k < -1) continue;", "deadlock|DIFFERENT|no multiple of 16 bytes"),
        ("some ? end : at", "end", "deadlock|DIFFERENT"),
        ("BCol ? 2 : 128", "BCol ? 2 : 64", "DIFFERENT|swizzle"),
    ],
    ids=["none", "sums begin with 1", "nobody adds", "one share adds", "steps left out", "copy not waited for",
         "stage not free", "flag not set", "waits for later blocks", "empty strips copied", "empty strips multiplied",
         "step of B"],
)  # fmt: skip
def test_a_planted_defect_is_found(old: str, new: str, text: str) -> None:
    seen = printed(PLANTED.format(old=old, new=new))
    assert (seen.split() == ["equal"] * 3) == (text == "equal")
    assert re.search(text, seen), seen
