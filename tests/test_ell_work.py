"""The launch tables of the ELL kernel, walked as spmm_ell_buckets.cu walks them."""

from __future__ import annotations

import numpy as np
import pytest

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.ell_buckets import spmm_ell_buckets
from spformat.backends.cuda.ell_buckets.spmm_ell_buckets import (
    ADDED,
    MAX_BINS,
    NARROW,
    Work,
    apart,
    bin_tables,
    bucket_places,
    order_stretches,
)
from spformat.backends.cuda.runtime.row_work import order_rows
from spformat.formats import CSR, ELLBuckets
from spformat.products.problem import Problem

LENGTHS = {
    "none": [0, 0],
    "mixed": [1, 2, 3, 4, 5, 8, 9, 0, 17, 40, 1, 1, 0, 64],
    "long": [300, 0, 3, 2],
}


def matrix(lengths, K, rng):
    cols = [np.sort(rng.choice(K, n, replace=False)) for n in lengths]
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    indices = np.concatenate(cols).astype(np.int32) if indptr[-1] else np.zeros(0, np.int32)
    data = np.arange(1, indptr[-1] + 1, dtype=np.float32)
    return CSR(shape=(len(lengths), K), indptr=indptr, indices=indices, data=data)


def product(a: ELLBuckets, B, slots, fill, longest, exact=True):
    """C by the index arithmetic of the kernel; NaN where nothing is stored."""
    buckets = list(bucket_places(a.rows_per_bucket, a.split_per_bucket, a.bucket_widths))
    work = order_stretches(a.row_ids, buckets, a.shape[0], longest, exact)
    rows = work.rows
    C = np.full((a.shape[0], B.shape[1]), np.nan)
    partial = np.full((rows.pieces, B.shape[1]), np.nan)

    def gather(at):
        k = a.indices[at]
        live = k >= 0
        return (a.data[at][live, None] * B[k[live]]).sum(axis=0)

    def store(array, row, value):
        assert np.isnan(array[row]).all(), "stored twice"
        array[row] = value

    for table in bin_tables(buckets, work, slots, fill):
        before = C.copy()
        for block in range(table.blocks):
            b = max(i for i in range(table.count) if table.bin[i].first_block <= block)
            entry = table.bin[b]
            local, log_width, log = block - entry.first_block, entry.log_width, entry.log_slots
            first, end, start = entry.first, entry.end, entry.start
            if log_width >= 0 and 1 << log_width < NARROW:
                for slot in range(slots):
                    skip = (local * slots + slot) * (NARROW >> log_width)
                    items = min(NARROW, (end - first - skip) << log_width)
                    for j in range(0, max(0, items), 1 << log_width):
                        at = start + (skip << log_width) + j + np.arange(1 << log_width)
                        store(C, a.row_ids[first + skip + (j >> log_width)], gather(at))
                continue
            for r in range(slots >> log):
                at = first + local * (slots >> log) + r
                if at >= end:
                    continue
                if log_width >= 0:
                    items = start + ((at - first) << log_width) + np.arange(1 << log_width)
                    store(C, a.row_ids[at], gather(items))
                else:
                    begin, packed = rows.records[at]
                    value = gather(begin + np.arange(packed >> 32))
                    if at < table.pieces:
                        _, first_piece, count = rows.cuts[packed & 0xFFFFFFFF]
                        assert first_piece <= at < first_piece + count
                        store(partial, at, value)
                    elif log_width == ADDED:
                        row = packed & 0xFFFFFFFF
                        assert not np.isnan(before[row]).any(), "added before a former launch has stored it"
                        assert (C[row] == before[row]).all(), "added twice in a launch"
                        C[row] += value
                    else:
                        store(C, packed & 0xFFFFFFFF, value)
    for row, first, count in rows.cuts:
        store(C, row, partial[first : first + count].sum(axis=0))
    return C


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("parts", "width"), [(1, None), (1, 1), (1, 64), (3, 4), (20, 2), (1, (8,)), (2, (2, 16))])
@pytest.mark.parametrize(("slots", "fill", "longest"), [(8, 8, 2048), (32, 32, 16)])
def test_every_row_is_stored_once_and_right(monkeypatch, name, parts, width, slots, fill, longest):
    rng = np.random.default_rng(3)
    a = matrix(LENGTHS[name], 400, rng)
    B = rng.integers(-4, 5, (400, 3)).astype(np.float64)
    given = {"widths": width} if isinstance(width, tuple) else {"max_width": width}
    ell = ELLBuckets.from_csr(a, column_parts=parts, **given)
    for exact in (False, True):
        monkeypatch.setattr(spmm_ell_buckets, "PIECES_OF_A_LAUNCH", 0)
        C = product(ell, B, slots, fill, longest, exact)
        np.testing.assert_array_equal(C, a.to_dense().astype(np.float64) @ B)
    monkeypatch.undo()
    C = product(ell, B, slots, fill, longest)
    np.testing.assert_array_equal(C, a.to_dense().astype(np.float64) @ B)


def test_more_bins_than_a_table_holds():
    a = matrix([9] * 30, 400, np.random.default_rng(0))
    ell = ELLBuckets.from_csr(a, column_parts=40, max_width=16)
    buckets = list(bucket_places(ell.rows_per_bucket, ell.split_per_bucket, ell.bucket_widths))
    direct = [b._replace(split=0) for b in buckets]
    none = np.zeros(0, np.int64)
    tables = bin_tables(direct, Work(order_rows(none, none, none, 16), ()), 32, 8)
    assert len(direct) > MAX_BINS
    assert [t.count for t in tables] == [MAX_BINS] * (len(direct) // MAX_BINS) + [len(direct) % MAX_BINS]


def test_parts_have_launches_where_many_pieces_would_need_a_workspace():
    rng = np.random.default_rng(0)
    a = matrix(rng.integers(3, 30, 2000), 400, rng)
    ell = ELLBuckets.from_csr(a, column_parts=4, max_width=8)
    buckets = list(bucket_places(ell.rows_per_bucket, ell.split_per_bucket, ell.bucket_widths))
    work = order_stretches(ell.row_ids, buckets, 2000, 2048)
    assert work.rows.pieces == 0
    assert {g.part for g in work.groups if g.adds} == {1, 2, 3}
    tables = bin_tables(buckets, work, 32, 8)
    assert len(tables) == 4
    # The blocks of a launch hold several short records: far fewer than one block each.
    assert sum(t.blocks for t in tables) < len(work.rows.records) / 4
    assert order_stretches(ell.row_ids, buckets, 2000, 2048, exact=False).rows.pieces > 4000
    assert not apart(4096, 4)
    assert apart(4097, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "n", "layout"), [("float32", 64, "row"), ("float32", 17, "col"), ("float16", 1, "row"),
                                                    ("bfloat16", 130, "col")])  # fmt: skip
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_parts_add_to_c_one_launch_after_another(monkeypatch, dtype, n, layout, index):
    """Exact sums into a C of NaN, the same bits again; rows in one, some and all parts, empty rows, long rows."""
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(spmm_ell_buckets, "PIECES_OF_A_LAUNCH", 0)
    rng = np.random.default_rng(n)
    lengths = rng.integers(0, 40, 300)
    lengths[[0, 9, 299]] = 2600, 0, 900
    a = matrix(lengths, 3000, rng)
    a = a.with_arrays(data=rng.integers(-3, 4, a.nnz).astype(VALUE_TYPES[dtype].numpy))
    ell = ELLBuckets.from_csr(a, column_parts=4, max_width=8)
    B = rng.integers(-3, 4, (3000, n)).astype(VALUE_TYPES[dtype].numpy)
    p = Problem.product("ell-buckets", tuple(ell.params().items()), 300, 3000, n, a.nnz, dtype, dtype, "float32", layout,
                        layout, "cuda", int(cupy.cuda.Device().compute_capability))  # fmt: skip
    plan = spmm_ell_buckets.SpmmELLBuckets().plan(ell.to("cuda"), p)
    C = cupy.full((300, n), np.nan, np.float32, order="C" if layout == "row" else "F")
    for _ in range(2):
        C[:] = np.nan
        plan(cupy.asarray(B, order="C" if layout == "row" else "F"), C)
        np.testing.assert_array_equal(C.get(), a.to_dense().astype(np.float64) @ B.astype(np.float64))
