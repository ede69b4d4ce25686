"""The BSR kernel that expands A on its way to the registers: its table, what it takes, exact products on a GPU or the emulated
one."""

from __future__ import annotations

import functools
import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, assert_stages_fit, equal, hopper, infinite, matrix, product, tile_in
from test_bsr_stream import blocks_of
from test_kernels import on_device, problem

from spformat import BSR, DBSR
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.bsr import spmm_bsr_expanding_sm90a as expanding
from spformat.backends.cuda.bsr.spmm_bsr import sample_problem
from spformat.backends.cuda.runtime.record_products import Tile

KERNEL = expanding.SpmmBSRExpanding()
WIDTHS = expanding.WIDTHS
tile_of = functools.partial(tile_in, expanding.TILES[16])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"params": (("blocksize", (64, 64)),)}, "blocks must be 16 or 32 high, and 16, 32 or 64 wide, got 64x64"),
        ({"params": (("blocksize", (16, 48)),)}, "got 16x48"),
        ({"nnz": 256 << 28}, "28 bits"),
        ({"M": 1 << 18, "K": 1 << 18}, "its table would have 268,435,456 bytes, more than a tenth of the blocks"),
        ({"sm": 100}, "needs sm_90a (wgmma), got sm_100"),
        ({"M": 0}, "A must not be empty"),
        ({"a_dtype": "float32", "b_dtype": "float32", "out_dtype": "float32"}, "a.dtype"),
        ({"device": "cpu", "sm": None}, ".to('cuda')"),
    ],
)
def test_what_it_takes(changes: dict[str, Any], part: str) -> None:
    p = sample_problem("bsr", (16, 16), "bfloat16", "bfloat16", "col", "col").changed(n=100, nnz=256 * 1000)
    assert KERNEL.unsupported(p) == []
    assert any(part in reason for reason in KERNEL.unsupported(p.changed(**changes)))


@pytest.mark.parametrize("height", expanding.HEIGHTS)
@pytest.mark.parametrize("number", range(len(expanding.TILES[16])), ids=lambda i: str(expanding.TILES[16][i]))
def test_stages_fit_a_multiprocessor(number: int, height: int) -> None:
    tile: Tile = expanding.TILES[height][number]
    room = KERNEL.expected_room(sample_problem("bsr", (height, 16), "bfloat16", "bfloat16", "col", "col"))
    assert_stages_fit(tile, room, tile.resident)
    assert str(tile) == str(expanding.TILES[16][number])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_names_every_block(width: int) -> None:
    rng = np.random.default_rng(width)
    keep = rng.random((7, 9)) < 0.4
    keep[1::3] = False
    M, K = 7 * 16 - 3, 9 * width - 8
    x = rng.integers(1, 9, (M, K)) * np.kron(keep, np.ones((16, width), int))[:M, :K]
    a = BSR.from_dense(x.astype(np.float16), blocksize=(16, width))
    steps, together = -(-K // 64), 64 // width
    table = expanding.starts_of(a.indptr, a.indices, steps, width)
    assert table.dtype == np.uint32
    assert table.shape == (7 * steps + 1,)
    got = np.zeros((7, steps * together), int)
    for i, start in enumerate(table[:-1]):
        for j in np.flatnonzero([int(start) >> 28 + j & 1 for j in range(together)]):
            got[i // steps, i % steps * together + j] = 1
        blocks = int(table[i + 1] & (1 << 28) - 1) - int(start & (1 << 28) - 1)
        assert blocks == got.reshape(-1, together)[i].sum()
    assert (got[:, :9] == keep).all()
    assert not got[:, 9:].any()


def test_the_table_lists_block_rows_that_have_blocks_first() -> None:
    x = np.zeros((100, 130), np.float16)
    x[20, 5] = x[50, 129] = x[99, 64] = 1
    for form in (BSR, DBSR):
        a = form.from_dense(x, blocksize=(16, 32))
        table, filled = expanding.table_of(a.indptr, a.indices, getattr(a, "row_ids", None), 7, 3, 32)
        assert filled == 3
        assert table.dtype == np.uint32
        assert (table[:10] == expanding.starts_of(np.arange(4), a.indices, 3, 32)).all()
        assert table[10:].tolist() == [1, 3, 6, 0, 2, 4, 5]


def test_tiles_without_blocks_count_as_some_steps() -> None:
    p = sample_problem("dbsr", (32, 32), "bfloat16", "bfloat16", "col", "col")
    p = p.changed(M=1024, K=1024, n=128, nnz=256 << 10, row_length=8 << 10)  # 8 blocks in each of 32 block rows
    kernel, tiles = expanding.SpmmBSRExpanding(), {str(t): t for t in expanding.TILES[32]}
    whole, parts = tiles["64x64, 4 blocks"], tiles["64x64, 4 blocks parts 4"]  # 16 steps along K, and 4
    assert kernel.tiles_of_c(p, whole) == 16 * 2
    half = p.changed(row_length=16 << 10)  # 16 blocks in each of 16 block rows, or nearly so
    assert kernel.tiles_of_c(half, whole) == round((9 + 7 * 6 / 16) * 2)
    assert kernel.tiles_of_c(half, parts) == 16 * 2


CASES = [
    # tile, M, K, N, layouts, gap, types, blocks, form, which block rows have blocks (test_bsr_stream.blocks_of)
    ((2, 16, 3, 1), 300, 131, 13, ("col", "row"), 0, "bfloat16", "bfloat16", (16, 16), BSR, ""),
    ((2, 16, 3, 8), 331, 523, 16, ("row", "col"), 8, "float16", "float16", (16, 32), BSR, ""),
    ((1, 16, 6, 3), 333, 523, 1, ("row", "row"), 3, "float16", "float32", (16, 64), BSR, ""),
    ((1, 16, 4, 2), 333, 524, 1, ("row", "col"), 1, "bfloat16", "bfloat16", (16, 16), DBSR, ""),
    ((1, 32, 6, 3), 333, 523, 27, ("row", "row"), 0, "bfloat16", "bfloat16", (16, 32), DBSR, ""),
    ((1, 64, 4, 4), 100, 523, 64, ("col", "col"), 5, "bfloat16", "bfloat16", (16, 16), BSR, ""),
    ((1, 64, 3, 1), 100, 523, 64, ("row", "row"), 0, "float16", "float32", (16, 16), BSR, ""),
    ((1, 128, 3, 2), 100, 264, 140, ("row", "col"), 0, "bfloat16", "bfloat16", (16, 64), DBSR, ""),
    ((1, 128, 2, 1), 333, 264, 140, ("col", "row"), 0, "bfloat16", "bfloat16", (16, 16), BSR, ""),
    ((2, 32, 3, 1), 131, 264, 24, ("col", "col"), 8, "bfloat16", "bfloat16", (16, 16), BSR, ""),
    ((2, 64, 2, 7), 130, 200, 64, ("col", "col"), 6, "bfloat16", "bfloat16", (16, 32), BSR, ""),
    ((2, 64, 1, 1), 331, 528, 61, ("col", "col"), 0, "bfloat16", "bfloat16", (16, 16), BSR, ""),
    ((2, 128, 1, 1), 264, 523, 136, ("row", "row"), 0, "bfloat16", "bfloat16", (16, 16), DBSR, ""),
    ((3, 128, 1, 2), 331, 528, 203, ("col", "col"), 0, "bfloat16", "bfloat16", (16, 16), BSR, ""),
    ((2, 192, 1, 4), 136, 264, 264, ("row", "row"), 8, "float16", "float16", (16, 32), BSR, ""),
    ((2, 256, 1, 1), 200, 1331, 264, ("row", "row"), 0, "float16", "float16", (16, 16), BSR, ""),
    ((2, 256, 1, 3), 136, 264, 203, ("col", "col"), 0, "bfloat16", "bfloat16", (16, 64), BSR, ""),
    ((3, 128, 1, 1), 136, 1, 264, ("col", "row"), 0, "float16", "float32", (16, 16), BSR, ""),
    ((1, 16, 6, 1), 333, 131, 9, ("col", "col"), 0, "bfloat16", "bfloat16", (16, 16), BSR, "last"),
    ((2, 64, 1, 3), 333, 523, 61, ("row", "row"), 1, "float16", "float16", (16, 64), DBSR, "one"),
    ((2, 16, 3, 8), 331, 523, 16, ("col", "row"), 0, "bfloat16", "bfloat16", (32, 32), BSR, ""),
    ((1, 32, 6, 3), 333, 523, 27, ("row", "col"), 5, "float16", "float32", (32, 16), DBSR, ""),
    ((1, 64, 4, 4), 100, 523, 64, ("col", "col"), 0, "bfloat16", "bfloat16", (32, 64), BSR, ""),
    ((3, 128, 1, 2), 331, 528, 203, ("row", "row"), 0, "float16", "float16", (32, 32), DBSR, ""),
    ((2, 192, 1, 1), 333, 264, 264, ("col", "col"), 8, "bfloat16", "bfloat16", (32, 32), BSR, "last"),
    ((2, 256, 1, 2), 200, 267, 203, ("row", "col"), 0, "bfloat16", "bfloat16", (32, 16), BSR, "one"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{tile_of(*c[0])} {c[4]} {c[5]} {c[8]} {c[9].name} {c[10]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    tile, M, K, N, layouts, gap, dtype, out, size, form, kind = case
    rng = np.random.default_rng(N)
    x = blocks_of(rng, M, K, size, kind).astype(VALUE_TYPES[dtype].numpy)
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    a, tiles = form.from_dense(x, blocksize=size), expanding.TILES[size[0]]
    assert_exact(product(KERNEL, tile_in(tiles, *tile), a, B, out, layouts, gap), x, B)


@pytest.mark.gpu
def test_no_block_at_all() -> None:
    x, B = np.zeros((40, 136), np.float16), np.ones((136, 20), np.float16)
    assert_exact(
        product(KERNEL, tile_of(2, 32, 3, 1), BSR.from_dense(x, blocksize=(16, 16)), B, "float16", ("row", "row"), 0),
        x,
        B,
    )


@pytest.mark.gpu
def test_blocks_on_another_boundary() -> None:
    """The copy engine reads 16 bytes from a multiple of 16; such blocks are copied, once for all plans."""
    cp = hopper()
    rng = np.random.default_rng(1)
    x = matrix(rng, 100, 140, 0.5, "float16")
    a = BSR.from_dense(x, blocksize=(16, 16)).to("cuda")
    room = cp.empty(a.data.size + 1, a.data.dtype)
    room[1:] = a.data.reshape(-1)
    moved = BSR(
        shape=a.shape, indptr=a.indptr, indices=a.indices, data=room[1:].reshape(a.data.shape), blocksize=(16, 16)
    )
    B = rng.integers(-3, 4, (140, 24)).astype(np.float16)
    p = problem(a, 24, "float16", ("row", "row"), 90)
    plan = KERNEL.plan_with(moved, p, tile_of(2, 32, 3, 1))
    out = cp.empty((100, 24), np.float16)
    plan(on_device(cp, B, "row", 0), out=out)
    assert_exact(out.get(), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(16, 16), (32, 64)], ids=str)
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("tile", [(2, 16, 3, 8), (2, 128, 1, 1), (3, 128, 1, 2)], ids=lambda t: str(tile_of(*t)))
def test_zeros_meet_no_infinity(tile: tuple[int, int, int, int], layout: str, size: tuple[int, int]) -> None:
    """Block rows without blocks, which come last, lie before and between the others."""
    hopper()
    rng = np.random.default_rng(3)
    x = matrix(rng, 136, 140, 0.5, "bfloat16")
    x[:32] = x[64:96] = 0
    B, wanted = infinite(rng, x, 72)
    a, tiles = BSR.from_dense(x, blocksize=size), expanding.TILES[size[0]]
    assert equal(product(KERNEL, tile_in(tiles, *tile), a, B, "bfloat16", (layout, layout), 4), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(2, 32, 3, 1), (2, 64, 1, 3)], ids=lambda t: str(tile_of(*t)))
def test_rows_without_blocks_read_nothing_behind_the_table(
    monkeypatch: pytest.MonkeyPatch, tile: tuple[int, ...]
) -> None:
    """Where an infinite value of B meets such a row, its sums are computed again, over no blocks at all."""
    cp, right = hopper(), expanding.table_of

    def among_others(*arguments: Any) -> tuple[Any, int]:
        table, filled = right(*arguments)
        room = cp.full(table.size + 256, 0xFFFFFFFF, "uint32")
        room[: table.size] = table
        return room[: table.size], filled

    monkeypatch.setattr(expanding, "table_of", among_others)
    rng = np.random.default_rng(3)
    x = matrix(rng, 136, 140, 0.5, "bfloat16")
    x[:32] = x[64:96] = x[112:] = 0
    B, wanted = infinite(rng, x, 72)
    a = BSR.from_dense(x, blocksize=(16, 16))
    assert equal(product(KERNEL, tile_of(*tile), a, B, "bfloat16", ("row", "row"), 0), wanted)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, source="bsr/spmm_bsr_expanding_sm90a.cu")
stand_in.install(90)
import numpy as np
from exact import equal, infinite, matrix, product, tile_in
from test_bsr_expanding import BSR, KERNEL
from spformat.backends.cuda.bsr.spmm_bsr_expanding_sm90a import TILES

rng = np.random.default_rng(0)
x = matrix(rng, 136, 816, 0.3, "bfloat16")
x[16:48, 64:192], x[:, 272:288] = 0, 0
(B, wanted), a, tile = infinite(rng, x, 72), BSR.from_dense(x, blocksize=(32, 16)), tile_in(TILES[32], 2, {cols}, {resident}, {parts})
three_runs(lambda: equal(product(KERNEL, tile, a, B, "bfloat16", ("row", "row"), 0), wanted), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("cols", "resident", "parts", "old", "new"),
    [
        (16, 3, 1, "there & bit ?", "true ?"),
        (16, 3, 4, "block * BLOCK", "i * BLOCK"),
        (64, 1, 1, "lane / 16 * 16;", "0;"),
        (256, 1, 1, "__popc(start >> 28) * BLOCK", "__popc(start >> 29) * BLOCK"),
        (16, 3, 1, "return start >> 28; }", "return 15; }"),
        (16, 3, 1, "left &= left - 1, values += ROWS * Width", "left &= left - 1"),
        (16, 3, 1, "if (to_float(values[k]) != 0) sum", "sum"),
        (16, 3, 1, "% (Height / 16) * 16", "% 1"),
    ],
    ids=["no zeros", "places", "columns", "bytes", "no block", "next block", "zeros and infinity", "rows of a block"],
)
def test_a_planted_defect_is_found(cols: int, resident: int, parts: int, old: str, new: str) -> None:
    source = PLANTED.format(cols=cols, resident=resident, parts=parts, old=old, new=new)
    assert re.search("DIFFERENT|bytes|race|outside", printed(source))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(("cols", "resident", "parts"), [(16, 3, 1), (16, 3, 4), (64, 1, 1), (256, 1, 1)])
def test_without_a_defect_all_is_equal(cols: int, resident: int, parts: int) -> None:
    source = PLANTED.format(cols=cols, resident=resident, parts=parts, old="", new="")
    assert printed(source).split() == ["equal"] * 3
