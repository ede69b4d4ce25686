"""What the BSR kernels decide without a GPU, and what they compute with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stand_in_world import World

from spformat import BSR, DBSR
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.bsr import spmm_bsr, spmm_bsr_sm90a
from spformat.formats.csr import CSR
from spformat.products import rates
from spformat.products.kernel import tile_us
from spformat.products.problem import COL, ROW, Problem
from spformat.products.roofline import device_of

BASE = Problem.product("bsr", (("blocksize", (64, 64)),), 4096, 4096, 4096, 0, *["bfloat16"] * 3, ROW, ROW, "cuda", 90)
BERT = Problem.product(
    "bsr", (("blocksize", (32, 32)),), 768, 3072, 512, 768 * 3072 // 5, *["float16"] * 3, ROW, ROW, "cuda", 90
)
"""A layer of pruned BERT: a fifth of the blocks."""
SMALLEST_SHARED_MEMORY = 99 * 1024
"""Bytes a block may have on sm_86 and sm_89, the least of the architectures from sm_80 on."""
HOPPER_SHARED_MEMORY = 227 * 1024


def with_blocksize(p: Problem, height: int, width: int) -> Problem:
    return p.changed(params=(("blocksize", (height, width)),))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"device": "cpu", "sm": None}, "operands are on cpu"),
        ({"sm": 75}, "sm_80"),
        ({"a_dtype": "float64", "b_dtype": "float64", "out_dtype": "float64"}, "a.dtype must be one of"),
        ({"b_dtype": "float16"}, "b.dtype must equal a.dtype"),
        ({"out_dtype": "float16"}, "out.dtype must be bfloat16 or float32"),
        ({"K": 2**31}, "K must be at most"),
    ],
)
def test_any_refusal_names_what_it_got(changes: dict[str, Any], part: str) -> None:
    for kernel in (spmm_bsr.SpmmBSR(), spmm_bsr_sm90a.SpmmBSRHopper()):
        assert kernel.unsupported(BASE) == []
        if changes == {"sm": 75} and kernel.name.endswith("sm90a"):
            part = "sm_90"
        assert any(part in reason for reason in kernel.unsupported(BASE.changed(**changes)))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sm": 100}, "sm_90"),
        ({"params": (("blocksize", (48, 64)),)}, "48x64"),
        ({"params": (("blocksize", (64, 8)),)}, "64x8"),
        ({"a_dtype": "float32", "b_dtype": "float32", "out_dtype": "float32"}, "bfloat16, float16"),
        ({"b_layout": COL, "K": 4097}, "16-byte"),
    ],
)
def test_hopper_refusals_leave_the_problem_to_the_fallback(changes: dict[str, Any], part: str) -> None:
    p = BASE.changed(**changes)
    assert any(part in reason for reason in spmm_bsr_sm90a.SpmmBSRHopper().unsupported(p))
    assert spmm_bsr.SpmmBSR().unsupported(p) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_block_size_gets_a_legal_tile(dtype: str) -> None:
    """The static_asserts of spmm_bsr.cu hold for all heights and all classes of N, and the ring fits."""
    size = VALUE_TYPES[dtype].numpy.itemsize
    for height in range(1, 1025):
        for n in (0, 8, 16, 32, 64, 128, 4096):
            p = with_blocksize(BASE, height, 7).changed(n=n, a_dtype=dtype, b_dtype=dtype, out_dtype=dtype)
            t = spmm_bsr.choose_tile(p)
            assert t.rows % (16 * t.warps_m) == 0, (height, n, t)
            assert t.cols % (16 * t.warps_n) == 0, (height, n, t)
            assert t.threads % (t.cols * size // 16) == 0, (height, n, t)
            assert t.threads % (t.depth * size // 16) == 0, (height, n, t)
            assert t.depth * t.cols * size // 16 % t.threads == 0, (height, n, t)
            assert t.rows >= min(height, 64), (height, n, t)
            assert t.threads <= 1024, (height, n, t)
            assert max(t.smem(size, b_col) for b_col in (False, True)) <= SMALLEST_SHARED_MEMORY, (height, n, t)


@pytest.mark.parametrize("height", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("n", [128, 4096])
def test_hopper_tiles_are_legal(height: int, width: int, n: int) -> None:
    p = with_blocksize(BASE, height, width).changed(n=n)
    for t in spmm_bsr_sm90a.tiles_for(p):
        legal(t, height, width)


def legal(t: spmm_bsr_sm90a.Tile, height: int, width: int) -> None:
    rows, cols = t.extent(height)
    units = t.ring_a // (height * min(width, 64) * 2)
    assert rows % height == 0
    assert rows // height <= 16
    assert cols <= 256
    assert units >= rows // height * (64 // min(width, 64))
    assert units & (units - 1) == 0
    assert 1 <= t.loaders_b <= 3
    assert t.smem(height) + 1024 <= HOPPER_SHARED_MEMORY
    assert t.smem(height) >= t.slots * 64 * cols * 2 + t.ring_a + 4096 * (t.threads // 32 - 4), (
        "room of the warps that store"
    )


def test_few_columns_of_low_blocks_get_low_tiles() -> None:
    """768 x 3072 with 512 columns: 24 tiles of 128 x 128 would leave most multiprocessors idle."""
    few, many = (spmm_bsr_sm90a.choose_tile(with_blocksize(BERT, 32, 32).changed(n=n)) for n in (512, 4096))
    assert few.extent(32) == (32, 128)
    assert many.extent(32) == (96, 256), "128 tiles in one round, not 96"


@pytest.mark.parametrize("group", [1, 2, 8, 16])
def test_merged_slices_list_every_block_once(group: int) -> None:
    """Walking groups, slices and order as the loaders do meets each block, with its column and entry, by column."""
    rng = np.random.default_rng(3)
    keep = rng.random((37, 11)) < 0.3
    keep[5:21] = False
    entries, columns = np.nonzero(keep)
    indptr = np.concatenate([[0], np.cumsum(keep.sum(1))]).astype(np.int32)
    merged = spmm_bsr_sm90a.merge_slices(indptr, columns.astype(np.int32), 11, group, (2, 1), 5)
    assert [x.dtype for x in merged] == [np.dtype(np.int32)] * 3
    assert sorted(merged.plan[:, 3]) == list(range(-(-37 // group)))
    met = []
    for low, high, position, g in merged.plan:
        assert list(merged.slices[low:high, 0]) == sorted(set(merged.slices[low:high, 0]))
        for column, mask, *_ in merged.slices[low:high]:
            for bit in range(group):
                if mask >> bit & 1:
                    block = merged.order[position]
                    position += 1
                    met.append(block)
                    assert (entries[block], columns[block]) == (g * group + bit, column)
    assert sorted(met) == list(range(entries.size))


def test_every_row_gives_the_pointer_of_bsr() -> None:
    row_ids, indptr = np.array([0, 2, 3], np.int32), np.array([0, 2, 5, 7], np.int32)
    assert spmm_bsr.every_row(row_ids, indptr, 6).tolist() == [0, 2, 2, 5, 7, 7, 7]


@pytest.mark.parametrize("groups", [1, 32, 33, 48, 66, 96, 200])
def test_interleaved_groups_even_out_what_a_cta_takes(groups: int) -> None:
    stride = 132
    work = np.random.default_rng(0).gamma(4, size=groups)
    taken = spmm_bsr_sm90a.interleave(work, stride)
    assert sorted(taken) == list(range(groups))
    tiles = (np.arange(groups)[:, None] + stride * np.arange(4)) % groups
    if stride % groups:
        assert np.ptp(work[taken][tiles].sum(1)) < 0.75 * np.ptp(work[tiles].sum(1))


def random_csr(rng: np.random.Generator, M: int, K: int, blocksize: tuple[int, int], dtype: str) -> CSR:
    """Small integers in random blocks; the last block column stays empty."""
    R, C = blocksize
    keep = rng.random((-(-M // R), -(-K // C))) < 0.4
    keep[:, -1] = False
    keep[1::3] = False
    dense = rng.integers(-3, 4, (M, K)) * np.kron(keep, np.ones(blocksize, int))[:M, :K]
    rows, cols = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=M))]).astype(np.int32)
    return CSR(
        shape=(M, K),
        indptr=indptr,
        indices=cols.astype(np.int32),
        data=dense[rows, cols].astype(VALUE_TYPES[dtype].numpy),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "blocksize", [(16, 16), (32, 32), (64, 64), (128, 128), (2, 3), (8, 8), (1, 32), (48, 80), (5, 7)]
)
@pytest.mark.parametrize(
    ("b_layout", "out_layout", "N"),
    [(ROW, ROW, 200), (COL, COL, 40), (ROW, COL, 17), (COL, ROW, 1), (COL, ROW, 203)],
)
def test_exact_on_integers(blocksize: tuple[int, int], dtype: str, b_layout: str, out_layout: str, N: int) -> None:
    """Exact sums from every kernel that takes the problem; C starts as NaN, B holds inf where no block reads it."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(7)
    R, C = blocksize
    M, K = 7 * R + R // 2 + 1, 6 * C + 8
    a = random_csr(rng, M, K, blocksize, dtype)
    value = VALUE_TYPES[dtype].numpy
    B = rng.integers(-3, 4, (K, N)).astype(value)
    want = (a.to_dense().astype(np.float64) @ B.astype(np.float64)).astype(np.float32).astype(value)
    B[-(-K // C) * C - C :] = np.inf
    for cls in (BSR, DBSR):
        on_gpu = cls.from_csr(a, blocksize=blocksize).to("cuda")
        sm = int(cupy.cuda.Device().compute_capability)
        layouts = {"b_layout": b_layout, "out_layout": out_layout, "device": "cuda", "sm": sm}
        params = (("blocksize", blocksize),)
        p = Problem.product(cls.name, params, M, K, N, 0, dtype, dtype, dtype, **layouts)
        for kernel in (spmm_bsr.SpmmBSR(), spmm_bsr_sm90a.SpmmBSRHopper()):
            # Small problems are refused for speed only; the reasons that matter do not depend on M and N.
            if kernel.unsupported(p.changed(M=1 << 20, n=4096)):
                continue
            b = cupy.array(B, order="F" if b_layout == COL else "C")
            out = cupy.full((M, N), np.nan, value, order="F" if out_layout == COL else "C")
            kernel.plan(on_gpu, p)(b, out)
            np.testing.assert_array_equal(cupy.asnumpy(out), want, err_msg=f"{kernel.name} {cls.name}")


@pytest.mark.parametrize("fmt", [BSR, DBSR])
@pytest.mark.parametrize("empty", [False, True])
def test_a_matrix_on_a_device_says_once_how_long_the_row_of_a_block_is(fmt: Any, empty: bool, world: World) -> None:
    counts = np.array([4, 0, 4, 4, 0, 0, 4, 0] if empty else [2, 1, 3, 2, 2, 3, 1, 2])
    x = np.zeros((128, 256), np.float32)
    for row, count in enumerate(counts):
        x[row * 16, : count * 16] = 1
    host = fmt.from_dense(x, blocksize=(16, 16))
    assert host.row_length() == 0  # nobody asks for a matrix on the host
    a = host.alias()
    device = vars(world.cupy)["ndarray"]
    for name, array in host.arrays().items():
        object.__setattr__(a, name, array.view(device))
    world.graphs[world.stream] = []
    assert a.row_length() == 0  # nothing can be read while a graph is recorded
    world.graphs.clear()
    expected = round((counts**2).sum() / counts.sum() * 256)
    assert a.row_length() == expected
    object.__setattr__(a, "indptr", None)
    assert a.row_length() == expected
    p = with_blocksize(BERT, 16, 16).changed(format=a.name, M=128, K=256, nnz=a.stored, row_length=expected)
    assert spmm_bsr.longer_rows(p) == (pytest.approx((4 - 3 / 4) / 2) if empty else 1)


def test_longer_rows_beside_empty_ones_take_longer_than_rows_of_average_length() -> None:
    """Half of the block rows of a 3072 x 768 layer are empty: tiles of 32 x 128 took 13.9 us, not what even rows would
    take, and the kernel for Hopper 11.6 us."""
    even = BERT.changed(M=3072, K=768, nnz=int(0.143 * 3072 * 768))
    halves = even.changed(row_length=int(32 * 32 * (24 * 0.286 + 1 - 0.286)))
    assert spmm_bsr.longer_rows(even) == 1
    assert spmm_bsr.longer_rows(halves) == pytest.approx(2, rel=0.02)
    plain, hopper = spmm_bsr.KERNEL, spmm_bsr_sm90a.KERNEL
    known = rates.constants(plain.name, plain.terms, even)
    tile = plain.tile_named(even, "32x128x32")
    us = {p: tile_us(plain, p, tile, device_of(p), known) for p in (even, halves)}
    assert plain.best(even).tile == tile
    assert plain.best(halves).tile != tile
    assert us[halves] == pytest.approx(13.9, rel=0.05)
    assert us[even] < us[halves] - 2
    assert plain.expected_us(halves) > hopper.expected_us(halves)
    assert halves.changed(n=64).row_length == halves.row_length
