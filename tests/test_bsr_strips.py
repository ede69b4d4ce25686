"""The BSR kernel in which several block rows share the rows of B that they load: its tables, what it takes, exact products on a
GPU or the emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, product
from test_bsr_stream import blocks_of, few, ragged
from test_kernels import Guarded, problem

from spformat import BSR, DBSR
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.bsr import spmm_bsr_strips_sm90a as strips
from spformat.backends.cuda.bsr.spmm_bsr import sample_problem
from spformat.products.problem import Problem

KERNEL = strips.KERNEL
LAYOUTS = [(b, c) for b in ("row", "col") for c in ("row", "col")]
SIZES = [(32, 32), (16, 16), (32, 64), (16, 32), (32, 16), (16, 128)]


def large(n: int, **changes: Any) -> Problem:
    """4096 x 4096, 20 % of the blocks of 32 x 32, torch's layouts."""
    p = sample_problem("bsr", (32, 32), "bfloat16", "bfloat16", "col", "col")
    return p.changed(n=n, nnz=3277 * 1024, **changes)


# ------------------------------------------------------------------ without a GPU


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"params": (("blocksize", (64, 64)),)}, "16 or 32 high, and 16, 32 or a multiple of 64 wide, got 64x64"),
        ({"params": (("blocksize", (32, 96)),)}, "got 32x96"),
        ({"sm": 100}, "needs sm_90 (wgmma), got sm_100"),
        ({"K": 4097}, "multiple of 8, got K = 4097"),
        ({"a_dtype": "float32", "b_dtype": "float32", "out_dtype": "float32"}, "a.dtype"),
        ({"device": "cpu", "sm": None}, ".to('cuda')"),
    ],
)
def test_what_it_takes(changes: dict[str, Any], part: str) -> None:
    assert KERNEL.unsupported(large(100)) == []
    assert KERNEL.unsupported(large(100, params=(("blocksize", (16, 128)),))) == []
    assert any(part in reason for reason in KERNEL.unsupported(large(100, **changes)))


def test_tiles_fit_a_multiprocessor() -> None:
    for t in strips.TILES:
        assert 3 <= t.stages <= 8
        assert t.resident * (t.smem + 16 * t.stages + 16 + strips.RESERVED) <= strips.SHARED
    assert len({str(t) for t in strips.TILES}) == len(strips.TILES)


@pytest.mark.parametrize("blocksize", SIZES)
def test_steps_name_every_block_of_every_strip(blocksize: tuple[int, int]) -> None:
    (R, C), rng = blocksize, np.random.default_rng(1)
    M, K = 11 * R - 3, 9 * C - 8
    keep = rng.random((11, 9)) < 0.3
    keep[1::3] = False
    x = rng.integers(1, 9, (M, K)) * np.kron(keep, np.ones(blocksize, int))[:M, :K]
    a = BSR.from_dense(x.astype(np.float16), blocksize=blocksize)
    table = strips.steps_of(a.indptr, a.indices, (M, K), blocksize)
    assert all(t.dtype == np.int32 and t.flags["C_CONTIGUOUS"] for t in table)
    U, H = min(64, C), 64 // R
    rows, stored, got, empty = a.data.reshape(-1, C), a.indices.size, np.zeros((11 * R, 9 * C)), []
    begins = table.rows[:, :: R // 16]  # first rows of C of the block rows of each strip
    there = begins[begins < M]
    assert sorted(there) == list(range(0, M, R)), "every block row is in one strip"
    for at, (strip, first, end, _) in enumerate(table.places):
        assert first <= at < end
        assert (table.places[first:end, 0] == strip).all()
        if table.units[at, 0] < 0:
            assert end == first + 1
            empty.append(strip)
            continue
        for k, blocks in zip(table.units[at], table.blocks[at], strict=True):
            assert (k < 9 * C) == bool((blocks < stored * R).any()), "a unit has blocks unless it fills a step up"
            for row, y in zip(begins[strip], blocks, strict=True):
                if y < stored * R:
                    got[row : row + R, k : k + U] += rows[y : y + R, k % C : k % C + U]
    assert begins.shape[1] == H
    assert (got[:M, :K] == x).all()
    assert len(empty) == -(-11 // H) - -(-int(keep.any(1).sum()) // H), (
        "rows without blocks share strips with no others"
    )


@pytest.mark.parametrize("high", [1, 2, 4])
@pytest.mark.parametrize(("filled", "empty"), [(0, 9), (9, 0), (5, 6), (60, 7), (7, 60), (64, 64), (1, 33)])
def test_strips_without_blocks_stand_evenly_between_the_others(filled: int, empty: int, high: int) -> None:
    rows = np.random.default_rng(filled).permutation(filled + empty)
    order = strips._spread(np.sort(rows[:filled]), np.sort(rows[filled:]), high)
    assert sorted(order) == list(range(filled + empty)), "every block row once"
    whole = len(order) // high * high
    with_blocks = np.isin(order, rows[:filled])
    has = with_blocks[:whole].reshape(-1, high).any(1)
    assert has.sum() + with_blocks[whole:].any() == -(-filled // high), "rows without blocks share at most one strip"
    assert (np.diff(order[with_blocks]) > 0).all(), "rows with blocks keep their order"
    for kind in {True, False} if has.any() and not has.all() else ():
        between = np.diff(np.flatnonzero(np.concatenate([[True], has == kind, [True]])))  # the ends count as strips
        fewest = (has != kind).sum() / ((has == kind).sum() + 1)
        assert between.max() <= 2 * fewest + 3, "no long run of strips of the other kind"


# ------------------------------------------------------------------ products, on a GPU


def exact(
    shape: tuple[int, int, int], tile: strips.Tile, layouts: tuple[str, str], *, blocksize: tuple[int, int] = (32, 32),
    dtype: str = "bfloat16", out: str = "bfloat16", pad: int = 0, form: Any = BSR, kind: str = "",
) -> None:  # fmt: skip
    """Small integers in blocks, of which some rows have none."""
    (M, K, N), rng = shape, np.random.default_rng(sum(shape))
    x = blocks_of(rng, M, K, blocksize, kind).astype(VALUE_TYPES[dtype].numpy)
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    a = form.from_dense(x, blocksize=blocksize)
    assert_exact(product(KERNEL, tile, a, B, out, layouts, pad + ragged(layouts[0], N)), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", strips.TILES, ids=str)
def test_every_tile(tile: strips.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 3)
    number = strips.TILES.index(tile)
    types = ("float16", "float32") if number % 3 == 2 else ("bfloat16", "bfloat16")
    exact((331, 392, tile.cols + 5), tile, LAYOUTS[number % 4], dtype=types[0], out=types[1],
          blocksize=SIZES[number % len(SIZES)])  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("form", [BSR, DBSR])
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("blocksize", SIZES)
def test_layouts_and_rows_without_blocks(
    blocksize: tuple[int, int], layouts: tuple[str, str], form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, 2)
    exact((523, 520, 43), strips.Tile(48, 2), layouts, blocksize=blocksize, form=form)


@pytest.mark.gpu
@pytest.mark.parametrize("processors", [1, 2, 5, 132])
@pytest.mark.parametrize("kind", ["", "one", "last"])
def test_shares(kind: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of threads with everything, tiles of many, and one for each step."""
    few(monkeypatch, processors)
    exact((300, 1000, 40), strips.Tile(16, 1), ("col", "row"), kind=kind)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_operands_that_are_not_aligned(layouts: tuple[str, str]) -> None:
    """The copy engine cannot read B, so the kernel for sm_80 runs; C starts anywhere."""
    exact((200, 264, 43), strips.Tile(48, 1), layouts, pad=1)


@pytest.mark.gpu
def test_c_starts_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 3)
    cp = pytest.importorskip("cupy")
    x = blocks_of(np.random.default_rng(2), 200, 264, (32, 32)).astype(np.float16)
    a = BSR.from_dense(x, blocksize=(32, 32)).to("cuda")
    plan = KERNEL.plan_with(a, problem(a, 40, "float16", ("row", "row"), 90), strips.Tile(32, 1))
    guarded = Guarded(cp, (200, 40), np.float16, "row", 3)
    plan(cp.ones((264, 40), np.float16), out=guarded.out)
    assert (guarded.out.get() == x.sum(1, keepdims=True)).all()
    assert guarded.intact()


@pytest.mark.gpu
def test_no_blocks() -> None:
    cp = pytest.importorskip("cupy")
    a = BSR.from_dense(np.zeros((130, 200), np.float16), blocksize=(32, 32)).to("cuda")
    guarded = Guarded(cp, (130, 24), np.float16, "row", 0)
    KERNEL.plan(a, problem(a, 24, "float16", ("row", "row"), 90))(cp.ones((200, 24), np.float16), out=guarded.out)
    assert (guarded.out.get() == 0).all()


@pytest.mark.gpu
def test_a_plan_for_several_numbers_of_columns() -> None:
    """Sums and flags are shared by launches of other extents; none, one and more columns than a tile."""
    cp = pytest.importorskip("cupy")
    x = blocks_of(np.random.default_rng(0), 200, 264, (32, 32)).astype(np.float16)
    a = BSR.from_dense(x, blocksize=(32, 32)).to("cuda")
    plan = KERNEL.plan_with(a, problem(a, 24, "float16", ("row", "row"), 90), strips.Tile(16, 1))
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
import test_bsr_strips as t


def equal():
    with pytest.MonkeyPatch.context() as patch:
        t.few(patch, 9)
        t.exact((300, 2000, 40), t.strips.Tile(32, 2), ({layout!r}, "row"))
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
        ("barrier::wait(full + 8 * stage, phase);", "", "deadlock|more arrivals at an mbarrier than its phase has"),
        ("barrier::wait(empty + 8 * stage, phase ^ 1);", "", "deadlock|more arrivals|in flight|DIFFERENT"),
        ("barrier::init(full + 8 * s, LOADERS)", "barrier::init(full + 8 * s, 1)",
         "deadlock|more arrivals|in flight|DIFFERENT"),
        ("share = shares - 1 - blockIdx.x", "share = blockIdx.x",
         "a thread that waits for another block that does not run yet"),
        ("k, 0) >= 0)", "k, 0) >= -1)", "deadlock|DIFFERENT|a block ends while"),
        ("some ? end : at", "end", "deadlock|DIFFERENT"),
        ("s * UNIT_A / 16 + 2 * k", "2 * k", "DIFFERENT"),
        ("block % H * BOX_A", "0", "DIFFERENT|shared"),
        ("units[next * S + unit]", "units[first % count * S + unit]", "deadlock|DIFFERENT|a block ends while"),
        ("step = 0, col0 += TN", "step = 0", "DIFFERENT"),
    ],
    ids=["none", "sums begin with 1", "nobody adds", "one share adds", "copy not waited for", "stage not free",
         "one loading warp waited for", "waits for later blocks", "empty strips copied", "empty strips multiplied",
         "one unit for all", "one place for all blocks", "units of the first step", "columns of the first tile"],
)  # fmt: skip
def test_a_planted_defect_is_found(old: str, new: str, text: str) -> None:
    seen = printed(PLANTED.format(old=old, new=new, layout="row" if len(old) % 2 else "col"))
    assert (seen.split() == ["equal"] * 3) == (text == "equal")
    assert re.search(text, seen), seen
