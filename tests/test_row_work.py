"""The work tables of the row-gathering kernels, walked as the kernel walks them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from spformat.backends.cuda.ell_buckets.spmm_ell_buckets import SpmmELLBuckets
from spformat.backends.cuda.runtime import row_work
from spformat.backends.cuda.runtime.launch import MAX_GRID_Y, Operands
from spformat.backends.cuda.runtime.row_tiles import Device, choose_tile, vector_width
from spformat.backends.cuda.runtime.row_work import GROUP, MAX_BINS, bin_table, gather, longest_piece, order_rows
from spformat.errors import LimitError
from spformat.products.problem import Problem

LENGTHS = {
    "none": [],
    "empty": [0, 0, 0],
    "short": [1, 8, 9, 0, 3, 16, 17],
    "skewed": [*([4] * 500), 3000, 0, 129, 64, 65, 70000, 33],
    "one": [5],
    "cut": [2048, 2049, 4096, 4097],
}


def walk(rows, slots, fill):
    """Every (record, part, parts) that the slots of all blocks work on, in the index arithmetic of spmm_csr.cu."""
    table = bin_table(rows, slots, fill)
    done = []
    for block in range(table.blocks):
        b = 0
        while b + 1 < table.count and block >= table.bin[b + 1].first_block:
            b += 1
        entry = table.bin[b]
        log = entry.log_slots
        for slot in range(slots):
            at = entry.first + (block - entry.first_block) * (slots >> log) + (slot >> log)
            if at < entry.end:
                done.append((at, slot & ((1 << log) - 1), 1 << log))
    return done


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("slots", "fill"), [(8, 8), (32, 8), (32, 32), (256, 16)])
def test_every_item_is_worked_on_once(name, slots, fill):
    lengths = np.array(LENGTHS[name], np.int64)
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    rows = order_rows(indptr[:-1], lengths, np.arange(lengths.size), 2048)
    records = rows.records
    done = walk(rows, slots, fill)
    # each record once, by all of its parts, which lie in neighbouring slots
    per_record = {}
    for at, part, parts in done:
        per_record.setdefault(at, []).append((part, parts))
    assert sorted(per_record) == list(range(len(records)))
    assert all([p for p, _ in found] == list(range(found[0][1])) for found in per_record.values())
    items = np.zeros(lengths.sum(), int)
    owner = np.repeat(np.arange(lengths.size), lengths)
    written = np.zeros(lengths.size, int)
    for i, (start, packed) in enumerate(records):
        row, length = packed & 0xFFFFFFFF, packed >> 32
        if i < rows.pieces:
            row, first, count = rows.cuts[row]
            assert first <= i < first + count
        items[start : start + length] += 1
        assert (owner[start : start + length] == row).all()
        if i >= rows.pieces:
            written[row] += 1
    assert (items == 1).all()
    for row, first, count in rows.cuts:
        written[row] += 1
        assert (np.diff(records[first : first + count, 0]) > 0).all()
    assert (written == 1).all()


def test_longest_rows_come_first_and_equal_ones_keep_their_order():
    lengths = np.array([3, 40, 4, 0, 37, 9], np.int64)
    rows = order_rows(np.zeros(6, np.int64), lengths, np.arange(6), 1 << 20)
    assert (rows.records[:, 1] & 0xFFFFFFFF).tolist() == [1, 4, 5, 0, 2, 3]


def test_bins_always_fit_the_table():
    lengths = np.array([(1 << c) * GROUP for c in range(20)], np.int64)
    rows = order_rows(np.zeros(20, np.int64), lengths, np.arange(20), 1 << 30)
    assert bin_table(rows, 1024, GROUP).count <= MAX_BINS


@pytest.mark.parametrize("items", [0, 1, 10**6, 10**12])
def test_a_piece_is_a_fair_share(items):
    longest = longest_piece(items)
    assert longest & (longest - 1) == 0
    assert 2048 <= longest <= 1 << 24
    assert longest <= max(2048, items // 128)


@pytest.mark.parametrize(
    ("n", "ldb", "ldc", "b", "c", "expected"),
    [
        (32, 32, 32, 0, 0, 8),
        (12, 16, 16, 0, 0, 4),
        (17, 24, 24, 0, 0, 1),
        (32, 34, 32, 0, 0, 2),
        (32, 32, 32, 2, 0, 1),
        (32, 32, 32, 0, 8, 4),
    ],
)
def test_vector_width(n, ldb, ldc, b, c, expected):
    assert vector_width(2, 2, n, b, c, ldb, ldc) == expected


@pytest.mark.parametrize("n", [1, 2, 7, 16, 17, 32, 100, 128, 512, 4096])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("items", [0, 10**4, 10**8])
def test_tiles_keep_what_the_kernel_asserts(n, size, items):
    full = max(1, 16 // size)
    vec = full if n % full == 0 else 1
    tile = choose_tile(vec, size, n, 10**5, 10**5, items, Device())
    assert tile.vec * size <= 16
    assert tile.lanes in (1, 2, 4, 8, 16, 32)
    assert tile.batch % tile.depth == 0
    assert tile.fill % tile.batch == 0
    assert tile.threads % 32 == 0


DEVICE = Device()


def test_a_panel_of_b_stays_only_where_it_fits_and_is_read_often():
    def tile(K, rows, items, n=512, device=DEVICE, resident=True):
        return choose_tile(4, 4, n, K, rows, items, device, resident)

    assert tile(512, 2048, 209715).resident
    assert not tile(512, 2048, 209715, resident=False).resident
    assert not tile(512, 2048, 209715, device=Device(smem=99 << 10)).resident
    assert not tile(512, 2048, 20000).resident
    assert not tile(5000, 2048, 10**7).resident
    assert not tile(0, 2048, 0).resident


def test_a_resident_tile_has_one_block_per_sm_and_panel():
    tile = choose_tile(4, 4, 512, 512, 2048, 209715, Device(), True)
    assert tile.blocks_of(1000, 8, Device()) == 132 // 8
    assert tile.blocks_of(5, 8, Device()) == 5
    assert tile.blocks_of(1000, 200, Device()) == 1


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_launches_cover_every_column_once(monkeypatch, cut, dtype):
    """Whatever the width, one launch of each kernel for every slab of columns that a grid holds."""
    lengths = np.array([5000, 3, 0, 9000] if cut else [5, 3, 0, 9], np.int64)
    rows = order_rows(np.zeros(4, np.int64), lengths, np.arange(4), 2048)
    assert bool(rows.pieces) == cut
    monkeypatch.setattr(row_work, "device_of", lambda _: Device())
    buffers = []

    class Buffers:
        def __init__(self, zeros=False):
            self.zeros = zeros

        def buffer(self, stream, nbytes):
            buffers.append((self.zeros, stream, nbytes))
            return 1 + self.zeros

    monkeypatch.setattr(row_work, "Scratch", Buffers)
    made = []

    def kernels(tile):
        made.append(tile)
        main = SimpleNamespace(bind=lambda *arguments: (tile, *arguments))
        return [(main, 40), (main, 7)]

    size, K = np.dtype(dtype).itemsize, 100
    p = Problem.product("csr", (), 4, K, 64, 20, dtype, dtype, "float32", device="cuda", sm=90)
    plan = gather(SpmmELLBuckets(), p, rows, kernels)
    assert made == [plan.tile]
    many = 20_000_000  # more columns than a grid has panels
    for n, ldb, ldc, b, c in ((1, 1, 1, 0, 0), (64, 72, 64, 16, 32), (63, 63, 63, 4, 4), (many, many + 8, many, 8, 8)):
        buffers.clear()
        calls = plan.prepare(Operands(4096 + b, 8192 + c, n, ldb, ldc, 9))
        at = 0
        for main, second in zip(calls[::2], calls[1::2], strict=True):
            tile, grid, stream, held, arrived, b_at, c_at, width, pitch, line, prefetch = main
            assert second == (tile, (tile.blocks_of(7, grid[1], Device()), *grid[1:]), *main[2:])
            assert grid == (tile.blocks_of(40, grid[1], Device()), -(-width // tile.columns), 1)
            assert 0 < grid[1] <= MAX_GRID_Y
            assert (stream, pitch, line) == (9, ldb * size, ldc)
            assert (b_at, c_at) == (4096 + b + at * size, 8192 + c + at * 4)
            assert prefetch == (((K - 1) * ldb + width) * size if tile.prefetch else 0)
            assert (held, arrived) == ((1, 2) if cut else (0, 0))
            if cut:
                wanted = [(False, 9, rows.pieces * width * 4), (True, 9, len(rows.cuts) * grid[1] * 4)]
                assert [buffers.pop(0), buffers.pop(0)] == wanted
            at += width
        assert at == n
        assert len(calls) == 2 * -(-n // (MAX_GRID_Y * calls[0][0].columns))  # no slab but the last is narrower
        assert (len(calls) > 2) == (n == many)
        assert not buffers
    with pytest.raises(LimitError, match="passes 2 GiB"):
        plan.prepare(Operands(0, 0, 1, 2**31, 1, 0))


@pytest.mark.parametrize("n", [1, 7, 8, 37, 64, 203])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_the_tile_that_is_named_runs_for_operands_without_gaps(monkeypatch, n, layout):
    """Also where lines of an odd length allow single elements only; and it is one of those that are compared."""
    monkeypatch.setattr(row_work, "device_of", lambda _: Device())
    rows = order_rows(np.zeros(4, np.int64), np.array([5, 3, 0, 9], np.int64), np.arange(4), 2048)
    p = Problem.product("ell-buckets", (), 4, 100, n, 17, *["float16"] * 3, layout, layout, device="cuda", sm=90)
    main = SimpleNamespace(bind=lambda *arguments: None)
    compiled = []
    plan = gather(SpmmELLBuckets(), p, rows, lambda tile: compiled.append(tile) or [(main, 4)])
    assert compiled == [plan.tile]
    assert plan.tile in SpmmELLBuckets().options(p)
    pitch = n if layout == "row" else 8 * -(-n // 8)  # column-major operands are first copied to aligned rows
    plan.prepare(Operands(4096, 8192, n, pitch, pitch, 9))
    assert set(compiled) == {plan.tile}
