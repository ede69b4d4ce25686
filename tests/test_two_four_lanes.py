"""2:4 on the tensor cores, lane by lane, without a GPU: metadata orders, ldmatrix, mma.sp operands, swizzles.

numpy stands in for one warp. What a lane holds is written as the PTX ISA gives it for mma.sp m16n8k32 (16-bit types);
what the kernels load is written as the kernels address it. Both must meet in the product.
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_vectors import numbers, vectors

from spformat.formats.meta_orders import META_ORDERS, reorder_meta

LEGAL = np.array([0x4, 0x8, 0x9, 0xC, 0xD, 0xE])
M, K = 64, 192
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


@pytest.fixture
def tile():
    """values [M, K/2], nibbles [M, K/4], words [M, K/16] and the dense matrix they stand for; all values distinct."""
    rng = np.random.default_rng(24)
    nibbles = LEGAL[rng.integers(0, 6, (M, K // 4))]
    values = rng.permutation(M * K // 2).reshape(M, K // 2).astype(np.int64) + 1
    dense = np.zeros((M, K // 4, 4), np.int64)
    positions = np.stack([nibbles & 3, nibbles >> 2], -1)
    np.put_along_axis(dense, positions, values.reshape(M, K // 4, 2), 2)
    words = (nibbles.reshape(M, K // 16, 4) << np.array([0, 4, 8, 12])).sum(-1).astype(np.uint16)
    return values, nibbles, words, dense.reshape(M, K)


def closed_form(order: str, r: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Offset of word(r, q): the formulas of docs/formats/two-four.md."""
    h, i = r % 16 // 8, r % 8
    return {
        "logical": r * (K // 16) + q,
        "ldmatrix": (8 * (r // 16) + i) * (K // 8) + 2 * q + h,
        "fragment": 64 * ((r // 16) * (K // 64) + q // 4) + 8 * i + 2 * (q % 4) + h,
        "cutlass-sm80": 2 * M * (q // 2) + 64 * (r // 32) + 8 * i + 4 * (r % 32 // 16) + 2 * (q % 2) + h,
    }[order]


def stored(words: np.ndarray, order: str) -> np.ndarray:
    r, q = np.indices(words.shape)
    out = np.full(words.size, 0xFFFF, np.uint16)
    out[closed_form(order, r, q)] = words
    return out


def ldmatrix(rows: np.ndarray, transposed: bool = False) -> np.ndarray:
    """[32, tiles, 2] items each lane receives; ``rows`` [8*tiles, 8]: what lane 8j+i's address points at."""
    tiles = rows.reshape(-1, 8, 8)
    if transposed:
        return np.stack([tiles[:, 2 * T, G], tiles[:, 2 * T + 1, G]], -1).transpose(1, 0, 2)
    return np.stack([tiles[:, G, 2 * T], tiles[:, G, 2 * T + 1]], -1).transpose(1, 0, 2)


def mma_sp(a: np.ndarray, b: np.ndarray, e: np.ndarray, selector: int) -> np.ndarray:
    """D [16, 8] of mma.sp m16n8k32 from registers: a [32, 4, 2] items, b [32, 4, 2], e [32] words."""
    A, B = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    for register in range(4):
        for pair in range(2):
            B[2 * T + 8 * register + pair, G] = b[:, register, pair]
    for row in range(16):
        for group in range(8):
            source = 4 * (row % 8) + 2 * selector + group // 4  # lanes t = 2*selector, 2*selector + 1 of the row's quad
            nibble = int(e[source]) >> (16 * (row // 8) + 4 * (group % 4)) & 15
            assert nibble in LEGAL
            holder = 4 * (row % 8) + group % 4
            low, high = a[holder, row // 8 + 2 * (group // 4)]
            A[row, 4 * group + (nibble & 3)] += low
            A[row, 4 * group + (nibble >> 2)] += high
    return A @ B


def a_registers(values: np.ndarray, row: int, col: int) -> np.ndarray:
    """[32, 4, 2]: ldmatrix.x4 of 16 rows x 16 values, lane 8j+i addressing row 8*(j%2)+i, chunk j//2."""
    j, i = LANE // 8, LANE % 8
    lines = values[row + 8 * (j % 2) + i][:, col : col + 16].reshape(32, 2, 8)[LANE, j // 2]
    return ldmatrix(lines)


@pytest.mark.parametrize("order", META_ORDERS)
def test_closed_forms_are_the_package_orders(tile, order):
    words = tile[2]
    assert np.array_equal(stored(words, order), reorder_meta(words.ravel(), (M, K), "logical", order))


@pytest.mark.parametrize("order", ["ldmatrix", "fragment"])
def test_metadata_registers(tile, order):
    """ldmatrix on the 16-byte lines of either order gives lane 4i+t: word(16T+i, 4b+t) | word(16T+i+8, 4b+t) << 16."""
    words = tile[2]
    meta = stored(words, order)
    for row_tile in range(M // 16):
        for block in range(K // 64):
            i = np.arange(8)
            if order == "ldmatrix":  # spmm_two_four.cu: (tile*8 + i) * slabs*8 + slab*8
                start = (row_tile * 8 + i) * (K // 64) * 8 + block * 8
            else:  # tile*slabs*64 + slab*64 + i*8
                start = (row_tile * (K // 64) + block) * 64 + i * 8
            lines = meta[start[:, None] + np.arange(8)]
            e = ldmatrix(lines)[:, 0].astype(np.uint32) @ np.array([1, 1 << 16], np.uint32)
            want = words[16 * row_tile + G, 4 * block + T].astype(np.uint32)
            want |= words[16 * row_tile + G + 8, 4 * block + T].astype(np.uint32) << 16
            assert np.array_equal(e, want)
            if order == "fragment":  # ... and so does one 128-byte load
                flat = meta.view(np.uint32).reshape(M // 16, K // 64, 32)
                assert np.array_equal(flat[row_tile, block], want)


def metadata(words: np.ndarray, row_tile: int, block: int) -> np.ndarray:
    flat = stored(words, "fragment").view(np.uint32).reshape(M // 16, K // 64, 32)
    return flat[row_tile, block]


@pytest.mark.parametrize("selector", [0, 1])
def test_product_with_ldmatrix_operands(tile, selector):
    values, _, words, dense = tile
    B = np.random.default_rng(1).integers(-9, 10, (K, 8))
    for row_tile in range(M // 16):
        for block in range(K // 64):
            k = 64 * block + 32 * selector
            a = a_registers(values, 16 * row_tile, k // 2)
            b = ldmatrix(B[k + LANE], transposed=True)  # row-major B: lane l addresses row l
            D = mma_sp(a, b, metadata(words, row_tile, block), selector)
            assert np.array_equal(D, dense[16 * row_tile : 16 * row_tile + 16, k : k + 32] @ B[k : k + 32])
            j, i = LANE // 8, LANE % 8  # column-major B: lane 8j+i addresses column i, chunk j
            by_column = ldmatrix(B.T[i][:, k : k + 32].reshape(32, 4, 8)[LANE, j])
            assert np.array_equal(by_column, b)


def test_records(tile):
    """two_four_records.cu: 288 words per 16 rows and 64 columns feed both products of a slab, 16 and 4 bytes a lane."""
    values, _, words, dense = tile
    pairs = values.reshape(M, K // 4, 2)  # what the kernel reads as u32
    B = np.random.default_rng(2).integers(-9, 10, (K, 8))
    for record in range(M // 16 * (K // 64)):
        row_tile, block = divmod(record, K // 64)
        thread = np.arange(64)  # one per 16 bytes of values
        s, g, t = thread // 32, thread % 32 // 4, thread % 4
        line, first = 16 * row_tile + g, 16 * block + 8 * s + t
        loaded = np.stack([pairs[line + 8 * (r % 2), first + 4 * (r // 2)] for r in range(4)], 1)
        for r in range(4):  # the documented place of word r
            columns = 32 * block + 16 * s + 2 * t + 8 * (r // 2)
            assert np.array_equal(loaded[:, r, 0], values[16 * row_tile + g + 8 * (r % 2), columns])
            assert np.array_equal(loaded[:, r, 1], values[16 * row_tile + g + 8 * (r % 2), columns + 1])
        D = np.zeros((16, 8), np.int64)
        for s in range(2):
            assert np.array_equal(loaded[32 * s : 32 * s + 32], a_registers(values, 16 * row_tile, 32 * block + 16 * s))
            b = ldmatrix(B[64 * block + 32 * s + LANE], transposed=True)
            D += mma_sp(loaded[32 * s : 32 * s + 32], b, metadata(words, row_tile, block), s)
        k = slice(64 * block, 64 * block + 64)
        assert np.array_equal(D, dense[16 * row_tile : 16 * row_tile + 16, k] @ B[k])


def test_records_of_the_golden_matrix():
    """The offsets of docs/formats/two-four.md, "Order of the registers", against words read off the PTX lane map."""
    golden, same = vectors("two-four-records"), vectors("two-four-meta-orders")
    r, g = np.indices((32, 32))
    h, i, b = r % 16 // 8, r % 8, g // 16
    place = 288 * (r // 16 * 2 + b) + 128 * (g % 16 // 8) + 16 * i + 4 * (g % 4) + 2 * (g % 8 // 4) + h
    assert np.array_equal(place, golden["place"])
    words = np.array(golden["words"], np.uint32).reshape(-1)
    assert np.array_equal(words[place], numbers(same["data"]).view(np.uint32))
    meta = numbers(same["orders"]["logical"]["meta"]).reshape(32, 8).astype(np.uint32)
    row, q = np.array([[*range(8), *range(16, 24)]]).T, np.arange(8)
    at = 288 * (row // 16 * 2 + q // 4) + 256 + 4 * (row % 8) + q % 4
    assert np.array_equal(words[at], meta[row, q] | meta[row + 8, q] << 16)
    assert np.array_equal(np.sort(np.r_[place.ravel(), at.ravel()]), np.arange(4 * 288))


def swizzled(line_bytes: int, row: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """include/spformat/ldmatrix.cuh."""
    chunks = min(line_bytes // 16, 8)
    rows = 8 // chunks
    return row * line_bytes + ((chunk ^ row // rows % chunks) * 16)


def assert_no_conflict(addresses: np.ndarray) -> None:
    """The eight 16-byte rows of each 8x8 tile lie in eight different bank groups."""
    assert (np.sort(addresses.reshape(-1, 8) % 128 // 16, 1) == np.arange(8)).all()


@pytest.mark.parametrize("line_bytes", [16, 32, 64, 128, 256, 512])
def test_swizzle_is_a_permutation_without_conflicts(line_bytes):
    row, chunk = np.indices((64, line_bytes // 16))
    at = swizzled(line_bytes, row, chunk)
    assert np.array_equal(np.sort(at.ravel()), np.arange(at.size) * 16)
    assert_no_conflict(at.T.reshape(-1, 8, 8))
    # A kernel steps k or n chunks by exclusive or on a lane's address, and rows by whole groups of eight.
    steps = np.arange(min(line_bytes // 16, 8))
    assert np.array_equal(at[:, : len(steps)], at[:, :1] ^ steps[None] * 16)
    assert np.array_equal(at[8:], at[:-8] + 8 * line_bytes)
