"""Sparse matrices written as dense ones on a device, and the products by way of that: *expand, then dense product*."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import CASES, params_of
from stand_in_world import World
from test_kernels import LAYOUTS

import spformat as sf
from spformat.arrays.dtypes import bits
from spformat.backends.cuda.bitmask import expand_bitmask
from spformat.backends.cuda.bsr import expand_bsr
from spformat.backends.cuda.dense import expand_then_dense
from spformat.backends.cuda.dense.expand_then_dense import OPERATIONS, ExpandThenDense
from spformat.backends.cuda.ell_buckets import expand_ell_buckets
from spformat.backends.cuda.ell_buckets.expand_ell_buckets import derived_bytes, slots_by_row
from spformat.backends.cuda.runtime import cublas, cublas_handle, jit, record_runs, row_images
from spformat.backends.cuda.runtime.expansion import leading_dimension
from spformat.backends.cuda.runtime.launch import Operands
from spformat.backends.cuda.sr_bcrs import expand_sr_bcrs
from spformat.backends.vendor import CublasGemm
from spformat.products.problem import COL, Problem

KERNEL = ExpandThenDense()


def sizes() -> Iterator[tuple[int, int, int]]:
    """(M, elements of a row, bytes of one)"""
    for itemsize in (1, 2, 4, 8):
        for M, K in itertools.product((1, 7, 300, 70_000, 600_000), (1, 3, 64, 1000, 4096, 8192, 100_003)):
            for ld in (K, leading_dimension(K, itemsize)):
                yield M, ld, itemsize


def test_rows_start_on_16_bytes() -> None:
    for itemsize, K in itertools.product((1, 2, 4, 8), (0, 1, 3, 64, 511, 513, 11008, 100_003)):
        ld = leading_dimension(K, itemsize)
        assert ld >= max(1, K)
        assert ld * itemsize % 16 == 0
        assert (ld - K) * itemsize < (16 if K * itemsize < 1024 else 128) or K == 0


def test_images_of_rows_cover_the_matrix_once_and_fit() -> None:
    for M, ld, itemsize in sizes():
        cut = row_images.cut(M, ld, itemsize)
        assert cut.rows in (1, 2, 4, 8, 16, 32)
        assert (cut.rows * cut.width) * itemsize <= row_images.IMAGE
        assert (cut.segments - 1) * cut.width < ld <= cut.segments * cut.width
        assert cut.rows == 1 or (cut.segments, cut.width) == (1, ld)
        assert (cut.tasks // cut.segments - 1) * cut.rows < M <= cut.tasks // cut.segments * cut.rows
        assert cut.tasks <= cut.blocks * row_images.WARPS
        assert cut.segments == 1 or cut.width * itemsize % 16 == 0


@pytest.mark.parametrize(("longest", "rows"), [(16 + 64 * 64 * 4, 64), (144 + 2048, 16)])
def test_runs_of_records_fit_every_device(longest: int, rows: int) -> None:
    """Records without zeros: no device of sm_80 or later has less than 99 KB for a block. Pitch and records of a run
    are those of the headers."""
    text = (jit.INCLUDE / "spformat" / "dense_rows.cuh").read_text()
    columns = int(re.findall(r"IMAGE_COLUMNS = (\d+);", text)[0])
    assert f"IMAGE_PITCH = IMAGE_COLUMNS * 2 + {record_runs.PITCH - 2 * columns};" in text
    assert columns // 64 == record_runs.EACH
    assert rows * record_runs.PITCH + record_runs.EACH * longest <= 99 << 10


def test_segments_of_a_bitmask_cover_a_row() -> None:
    for M, ld, _ in sizes():
        segments, width = expand_bitmask.cut(M, ld)
        assert width % expand_bitmask.STEP == 0
        assert (segments - 1) * width < ld <= segments * width


@pytest.mark.parametrize("blocksize", [(1, 1), (2, 3), (5, 7), (16, 16), (64, 64), (48, 80), (1024, 1), (1024, 1024)])
def test_pieces_of_block_rows_cover_them_and_fit(blocksize: tuple[int, int]) -> None:
    R, C = blocksize
    for _, ld, itemsize in sizes():
        aligned = ld * itemsize % 16 == 0
        cut = expand_bsr.cut(ld, blocksize, itemsize, aligned)
        assert cut.blocks <= expand_bsr.MOST
        assert (cut.segments - 1) * cut.blocks * C < ld <= cut.segments * cut.blocks * C
        assert (cut.strips - 1) * cut.height < R <= cut.strips * cut.height
        assert not aligned or cut.segments == 1 or cut.blocks * C * itemsize % 16 == 0


@pytest.mark.parametrize("t", [1, 3, 8, 32, 255, 256])
def test_segments_of_a_row_tile_cover_it_and_fit(t: int) -> None:
    for _, ld, itemsize in sizes():
        segments, width = expand_sr_bcrs.cut(ld, t, itemsize)
        assert width * itemsize % 16 == 0
        assert (segments - 1) * width < ld <= segments * width
        assert t * width * itemsize <= expand_sr_bcrs.IMAGES


@pytest.mark.parametrize("params", params_of("ell-buckets"))
def test_slots_by_row_are_the_items_of_the_csr(params: dict[str, Any]) -> None:
    for case, make in CASES.items():
        csr = sf.convert(make("float32"), "csr")
        a = sf.convert(csr, "ell-buckets", **params)
        indptr, slots = slots_by_row(a)
        assert (indptr == csr.indptr).all(), case
        assert (a.indices[slots] == csr.indices).all(), case
        assert (bits(a.data)[slots] == bits(csr.data)).all(), case
        assert indptr.nbytes + slots.nbytes <= derived_bytes(a.shape[0], a.stored)


def asked(fmt: str, shape: tuple[int, int], **changed: Any) -> Problem:
    types = ("float32",) * 3
    return Problem.product(fmt, (), *shape, 8, 2, *types, device="cuda", sm=90).changed(**changed)


def test_what_is_taken() -> None:
    as_csr = ("dense", "coo", "csc")  # the last two by way of CSR, which has the same arrays
    names = {f.name for f in sf.FORMATS if f.name not in as_csr} | {"sum"}
    assert KERNEL.takes == {(o, name) for o in OPERATIONS for name in names}
    assert KERNEL.unsupported(asked("csr", (4, 3))) == []
    assert KERNEL.unsupported(asked("csr", (4, 3), b_layout=COL, operation="spmm_transposed")) == []
    half = {"a_dtype": "bfloat16", "b_dtype": "bfloat16"}
    assert KERNEL.unsupported(asked("csr", (4, 3), **half)) == []
    for refused, said in (
        ({"device": "cpu"}, "operands are on cpu"), ({"a_dtype": "int8"}, "a.dtype must be one of float64"),
        ({"b_dtype": "float16"}, "b.dtype must equal"), ({"out_dtype": "float64"}, "out.dtype must be one of float32"),
        ({"b_layout": "strided"}, "row- or column-major"), ({**half, "sm": 75}, "needs sm_80"),
        ({"sm": 75}, "needs sm_80"),
    ):  # fmt: skip
        (reason, *_) = KERNEL.unsupported(asked("csr", (4, 3), **refused))
        assert said in reason


def test_workspace_is_the_dense_copy_and_what_is_derived() -> None:
    big = asked("csr", (4096, 8192))
    assert KERNEL.workspace_bytes(big) == 4096 * 8192 * 4
    assert KERNEL.workspace_bytes(big.changed(K=8193)) == 2 * 4096 * 8192 * 4  # rooms are powers of two
    ell = big.changed(format="ell-buckets", nnz=1000)
    assert KERNEL.workspace_bytes(ell) == 4096 * 8192 * 4 + 8 * 4097 + 4 * 1000
    assert KERNEL.workspace_bytes(asked("csr", (0, 0))) == 1


def block(address: int, rows: int, cols: int, ld: int) -> Any:
    """The column-major float32 matrix [rows, cols] at an address."""
    assert ld >= max(1, rows)
    size = max(0, (cols - 1) * ld + rows) if rows else 0
    flat = np.frombuffer((ctypes.c_float * size).from_address(address), np.float32) if size else np.zeros(0, "f4")
    return np.lib.stride_tricks.as_strided(flat, (rows, cols), (4, 4 * ld))


def host_gemm(
    handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, a: int, _a: int, lda: int, b: int, _b: int,
    ldb: int, beta: int, c: int, _c: int, ldc: int, compute: int, algorithm: int,
) -> int:  # fmt: skip
    """cublasGemmEx for float32 on the host."""
    assert (handle, _a, _b, _c, compute, algorithm) == (77, 0, 0, 0, 68, -1)
    first = block(a, k, m, lda).T if op_a else block(a, m, k, lda)
    second = block(b, n, k, ldb).T if op_b else block(b, k, n, ldb)
    target, scales = block(c, m, n, ldc), [ctypes.c_float.from_address(x).value for x in (alpha, beta)]
    target[...] = scales[0] * (first @ second) + (scales[1] * target if scales[1] else 0)
    return 0


def arranged(world: World, x: Any, layout: str) -> Any:
    a = world.array(*x.shape, order="F" if layout == COL else "C")
    a[...] = x
    return a


@pytest.fixture
def library(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The stand-in world with a cuBLAS that computes on the host."""

    def create(out: Any) -> int:
        out._obj.value = 77
        return 0

    functions = cublas_handle.Library(create, lambda *_: 0, lambda *_: 0, host_gemm)
    monkeypatch.setattr(cublas_handle, "library", lambda: functions)
    monkeypatch.setattr(cublas_handle, "HANDLES", cublas_handle.Handles())
    return world


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_products_for_every_layout(library: World, operation: str, layouts: tuple[str, str]) -> None:
    rng = np.random.default_rng(2)
    for M, K, n in ((5, 3, 4), (3, 5, 1), (1, 7, 2), (6, 1, 3)):
        x = rng.integers(-3, 4, (M, K)).astype(np.float32)
        op = x.T if operation == "spmm_transposed" else x
        B = rng.integers(-3, 4, (op.shape[1], n)).astype(np.float32)
        p = asked("dense", (M, K), operation=operation, b_layout=layouts[0], out_layout=layouts[1])
        a = sf.formats.dense.Dense.from_dense(x)
        a = a.trusted(shape=a.shape, data=a.data.view(type(library.array(1))))
        out = arranged(library, np.full((op.shape[0], n), np.nan), layouts[1])
        CublasGemm().plan(a, p).run(arranged(library, B, layouts[0]), out)
        assert (out == op @ B).all()


def test_alpha_and_beta_are_the_librarys(library: World) -> None:
    x, B = np.eye(3, dtype=np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)
    out = library.array(3, 2)
    out[...] = 10
    p = asked("dense", (3, 3))
    operands = Operands(B.ctypes.data, out.data.ptr, 2, 2, 2, 7)
    cublas.gemm(p, alpha=2, beta=-1)(x.ctypes.data, 3, operands)()
    assert (out == 2 * B - 10).all()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_matrix_is_expanded_before_every_product(
    library: World, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    written: list[tuple[int, int]] = []

    def writer(address: int, ld: int, stream: int) -> list[Any]:
        assert stream == 7

        def write() -> None:
            written.append((address, ld))
            block(address, ld, 5, ld)[:] = np.nan  # what a kernel leaves behind K is not to be read
            block(address, 3, 5, ld)[:] = x.T

        return [write]

    monkeypatch.setitem(expand_then_dense.EXPANDERS, "csr", lambda a, p: writer)
    op = x.T if operation == "spmm_transposed" else x
    B, out = library.array(op.shape[1], 2), library.array(op.shape[0], 2)
    B[...] = np.arange(B.size).reshape(B.shape)
    matrix = SimpleNamespace(is_validated=True, order_now=lambda: None, spans=tuple)
    matrix.alias = lambda: matrix
    plan = KERNEL.plan(matrix, asked("csr", (5, 3), operation=operation))
    for _ in range(4):
        out.fill(np.nan)
        plan.run(B, out)
        assert (out == op @ B).all()
    assert len(written) == 4
    assert set(written) == {(written[0][0], 4)}  # rows of 16 bytes


@pytest.mark.gpu
@pytest.mark.parametrize(("short", "kept"), [(1, ("runs",)), (1 << 40, ("slots by row",))])
@pytest.mark.parametrize(("shape", "parts"), [((33, 513), 1), ((7, 130), 4), ((5, 4200), 3), ((40, 17), 2)])
def test_ell_buckets_by_runs_and_by_slots(
    short: int, kept: tuple[str, ...], shape: tuple[int, int], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of runs where it is short, else one of all slots; padding behind K is in parts without items."""
    import cupy

    monkeypatch.setattr(expand_ell_buckets, "SHORT", short)
    rng = np.random.default_rng(3)
    x = ((rng.random(shape) < 0.5) * rng.integers(1, 9, shape)).astype(np.float32)  # 16-bit values may be in records
    a = sf.convert(x, "ell-buckets", column_parts=parts).to("cuda")
    b = rng.integers(-3, 4, (shape[1], 5)).astype(np.float32)
    got = sf.spmm(a, cupy.asarray(b), backend="cuda.expand_then_dense").get()
    assert (got == x @ b).all()
    assert kept[0] in str(list(a._kernel_arrays))
