"""The records the vector n:m kernels read, checked by carrying a product out the way the kernels do, in numpy."""

import ctypes
import math
import re

import numpy as np
import pytest

from spformat.backends.cuda.runtime import jit
from spformat.backends.cuda.vector_nm.vector_nm_tiles import NO_ROW, Packing, Pattern, Shape, records
from spformat.formats import VectorNM


def drawn(M, K, n, m, L, seed=0):
    """data float64[W, Mp], indices uint8[W, Q], dense [M, K]; small integers, so that every sum is exact."""
    rng = np.random.default_rng(seed)
    Q, windows = -(-M // L), -(-K // m)
    W = windows * n
    indices = np.sort(rng.random((windows, Q, m)).argsort(axis=2)[:, :, :n], axis=2).transpose(0, 2, 1)
    indices = np.ascontiguousarray(indices.reshape(W, Q)).astype(np.uint8)
    data = rng.integers(-4, 5, (W, Q * L)).astype(np.float64)
    data[:, M:] = 0
    columns = (np.arange(W) // n * m)[:, None] + indices
    data[np.repeat(columns >= K, L, axis=1)] = 0
    dense = np.zeros((M, windows * m))
    for q in range(Q):
        rows = slice(q * L, min(M, (q + 1) * L))
        dense[rows, columns[:, q]] = data[:, rows].T
    return data, indices, dense[:, :K]


def product(data, pattern, made, B, tile_rows, group_rows):
    """C as the kernels compute it: stage rows of B, pick a staged row per slot, multiply, for every tile."""
    row_tiles, k_tiles, _ = made.words.shape
    groups = tile_rows // group_rows
    C = np.zeros((row_tiles * tile_rows, B.shape[1]))
    for r in range(row_tiles):
        for k in range(k_tiles):
            words = made.words[r, k]
            rows = np.arange(made.staged) + k * made.tile_cols
            if made.packed:
                rows = words[groups * made.slots :][: made.staged].astype(np.int64)
                live = rows != NO_ROW
                assert not (~live[:-1] & live[1:]).any(), "live rows come first"
                rows = rows[live]
                assert (rows < pattern.K).all(), "a packed tile never names a row past K"
            stage = np.full((made.staged + 1, B.shape[1]), np.nan)
            stage[made.staged] = 0
            stage[: rows.size] = np.where(rows[:, None] < pattern.K, B[np.minimum(rows, pattern.K - 1)], 0)
            table = words[: groups * made.slots].reshape(groups, made.slots)
            for g in range(groups):
                rank, line = table[g] & 0xFFFF, table[g] >> 16
                assert np.array_equal(np.sort(line), np.arange(made.slots)), "every line of A is used once"
                m0 = r * tile_rows + g * group_rows
                u = k * made.tile_kept + np.arange(made.tile_kept)
                lines = np.zeros((made.slots, group_rows))  # lines past tile_kept and past W are zero
                stored = data[u[u < data.shape[0]], m0 : m0 + group_rows]
                lines[: stored.shape[0], : stored.shape[1]] = stored
                C[m0 : m0 + group_rows] += lines[line].T @ stage[rank]
    return C[: pattern.M]


CASES = [
    # M, K, n, m, L, tile_rows, group_rows, kept
    (64, 64, 2, 4, 32, 64, 32, 8),
    (70, 61, 2, 4, 8, 32, 8, 6),
    (37, 50, 5, 7, 5, 32, 1, 10),
    (96, 100, 4, 16, 16, 64, 16, 8),
    (130, 300, 12, 32, 64, 64, 64, 24),
    (64, 520, 200, 256, 32, 64, 32, 16),
    (65, 90, 3, 8, 24, 32, 8, 5),
    (1, 1, 1, 1, 1, 32, 1, 4),
    (33, 40, 1, 4, 128, 64, 64, 3),
]


@pytest.mark.parametrize("banks", [1, 4, 8])
@pytest.mark.parametrize("packed", [None, False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_records_describe_the_product(case, packed, banks):
    M, K, n, m, L, tile_rows, group_rows, kept = case
    data, indices, dense = drawn(M, K, n, m, L)
    pattern = Pattern(M, K, n, m, L)
    made = records(
        indices, pattern, tile_rows=tile_rows, group_rows=group_rows, kept=kept, step=8, banks=banks, packed=packed
    )
    B = np.random.default_rng(1).integers(-4, 5, (K, 3)).astype(np.float64)
    used = (dense != 0).any(axis=0)
    stored = np.zeros(K, bool)
    columns = ((np.arange(indices.shape[0]) // n * m)[:, None] + indices).ravel()
    stored[columns[columns < K]] = True
    B[~stored] = np.inf  # rows that no vector refers to must not affect C
    expected = dense[:, used] @ B[used]
    assert np.array_equal(product(data, pattern, made, B, tile_rows, group_rows), expected)
    assert made.packed or kept % n == 0


@pytest.mark.parametrize("banks", [1, 4])
@pytest.mark.parametrize("case", [c for c in CASES if c[7] % c[2] == 0], ids=str)
def test_a_stored_packing_gives_the_records_that_are_derived(case, banks):
    M, K, n, m, L, tile_rows, group_rows, kept = case
    if tile_rows % L:
        tile_rows, group_rows = L * (-(-tile_rows // L)), math.gcd(group_rows, L)
    _, _, dense = drawn(M, K, n, m, L)
    a = VectorNM.from_dense(dense, n=n, m=m, vector_length=L, tile_rows=tile_rows, tile_cols=kept // n * m)
    stored = Packing.of(a, tile_rows, kept)
    assert stored is not None
    assert Packing.of(a, 2 * tile_rows, kept) is None
    assert Packing.of(a, tile_rows, 2 * kept) is None
    for packed in (None, True, False):
        cut = {
            "tile_rows": tile_rows,
            "group_rows": group_rows,
            "kept": kept,
            "step": 8,
            "banks": banks,
            "packed": packed,
        }
        derived, read = (records(a.indices, Pattern(M, K, n, m, L), **cut, stored=s) for s in (None, stored))
        assert np.array_equal(derived.words, read.words)
        assert (derived.staged, derived.share, derived.packed) == (read.staged, read.share, read.packed)


@pytest.mark.parametrize("packed", [False, True])
def test_records_of_rows_that_are_copied_by_fours(packed):
    """With byte offsets in the slots, staged rows and the list of each tile are filled up to a multiple of four."""
    M, K, n, m, L = 130, 301, 3, 7, 8
    _, indices, _ = drawn(M, K, n, m, L)
    cut = {"tile_rows": 32, "group_rows": 8, "kept": 9, "step": 4, "banks": 1, "packed": packed}
    plain = records(indices, Pattern(M, K, n, m, L), **cut)
    fours = records(indices, Pattern(M, K, n, m, L), **cut, line_bytes=512)
    assert fours.staged == -(-plain.staged // 4) * 4 > plain.staged
    lists = 4 * plain.slots
    slots, zero = plain.words[:, :, :lists] & 0xFFFF, plain.words[:, :, :lists] & 0xFFFF == plain.staged
    assert np.array_equal(fours.words[:, :, :lists], np.where(zero, fours.staged, slots) * 512)
    if not packed:
        return
    before, after = (x.words[:, :, lists:][:, :, : x.staged].astype(np.int64) for x in (plain, fours))
    live, filled = (before != NO_ROW).sum(axis=2), (after != NO_ROW).sum(axis=2)
    assert np.array_equal(filled, -(-live // 4) * 4)
    assert (filled > live).any()
    for old, new, count, all_of_it in zip(
        *(x.reshape(-1, *x.shape[2:]) for x in (before, after, live, filled)), strict=True
    ):
        assert np.array_equal(old[:count], new[:count])
        assert (new[:all_of_it] < K).all()


@pytest.mark.parametrize(
    ("n", "alike", "share", "packed"),
    [(4, 8, 0.125, True), (4, 1, 0.66, True), (8, 1, 0.9, False), (16, 1, 1.0, False), (16, 8, 0.5, True)],
)
def test_packing_follows_the_measured_share(n, alike, share, packed):
    """Tiles of eight groups of 32 rows at n:32; ``alike`` neighbouring groups keep the same columns."""
    _, indices, _ = drawn(2048, 1024, n, 32, 32)
    indices = np.repeat(indices[:, ::alike], alike, axis=1)
    made = records(indices, Pattern(2048, 1024, n, 32, 32), tile_rows=256, group_rows=32, kept=4 * n, step=8, banks=1)
    assert made.share == pytest.approx(share, abs=0.02)
    assert made.packed == packed
    assert made.staged <= (128 if not packed else 128 * (share + 0.2))


def test_spread_puts_different_banks_side_by_side():
    _, indices, _ = drawn(64, 2048, 16, 32, 32)
    pattern = Pattern(64, 2048, 16, 32, 32)

    def doubles(banks, shift):
        made = records(indices, pattern, tile_rows=64, group_rows=32, kept=64, step=8, banks=banks, packed=False)
        rank = (made.words[..., : 2 * made.slots] >> shift & 0xFFFF).reshape(-1, 8) % 8
        return np.mean([8 - np.unique(row).size for row in rank])

    assert doubles(8, 0) < 0.6 * doubles(1, 0)
    assert doubles(8, 16) < 1.2  # lines of A: 2.2 of eight if the rows of B alone decided


def test_windows_per_tile_wastes_few_slots():
    assert Pattern(1, 1, 12, 32, 32).windows_per_tile(16, 128) == 4  # 48 slots, none wasted; 3 windows would waste 12
    assert Pattern(1, 1, 5, 7, 1).windows_per_tile(16, 64) == 3 or Pattern(1, 1, 5, 7, 1).windows_per_tile(16, 64) == 9
    assert Pattern(1, 1, 3, 256, 1).windows_per_tile(16, 64) == 1


def kernel_fields():
    """Names of the 32-bit members of vector_nm::Shape, in order, from the header."""
    text = (jit.INCLUDE / "spformat" / "vector_nm.cuh").read_text()
    body = re.search(r"struct Shape \{(.*?)\};", text, re.DOTALL)[1]
    members = re.findall(r"^\s*(?:u32|int) ([^;]+);", body, re.MULTILINE)
    return [name.strip() for line in members for name in line.split(",")]


def test_shape_has_the_layout_of_the_kernel_parameter():
    words = [name for name, _ in Shape._fields_]
    assert ctypes.sizeof(Shape) == 4 * len(words)
    assert words == kernel_fields()
