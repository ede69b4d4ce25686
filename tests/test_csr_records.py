"""Records of a CSR: they hold all of the matrix, and products come from them alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_orders import assert_arrays_come_back, assert_products_come_from_order

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.arrays.library import ceil_div
from spformat.backends.cuda.csr import csr_records
from spformat.backends.cuda.csr.spmm_csr_expanding_sm90a import SpmmCSRExpanding
from spformat.backends.cuda.csr.spmm_csr_records import MAX_COLS, SpmmCSRRecords
from spformat.backends.cuda.dense.expand_then_dense import ExpandThenDense
from spformat.formats import CSR
from spformat.products.problem import Problem

KERNELS = (SpmmCSRExpanding(), ExpandThenDense())
FEW = SpmmCSRRecords()
COLUMNS = {FEW.name: ((1, "row"), (3, "col"), (MAX_COLS, "row"))}
"""Of the products with kernels for few columns."""
SHAPES = ((0, 0), (0, 70), (3, 0), (1, 1), (16, 64), (17, 63), (15, 65), (33, 128), (40, 200), (131, 321))


def drawn(seed: int, shape: tuple[int, int], density: float, dtype: str) -> CSR:
    """Values of random bits (NaN, infinities and zeros, too), some rows without any."""
    rng = np.random.default_rng(seed)
    kept = rng.random(shape) < density
    kept[rng.random(shape[0]) < 0.2] = False
    a = CSR.from_dense(kept.astype(np.uint8).view(np.int8))
    values = rng.integers(0, 1 << 16, a.nnz).astype(np.uint16)
    values[rng.random(a.nnz) < 0.1] = 0
    return CSR(shape=shape, indptr=a.indptr, indices=a.indices, data=values.view(VALUE_TYPES[dtype].numpy))


def problem_of(a: Any, sm: int) -> Problem:
    size = (a.shape[0], a.shape[1], 8, a.nnz)
    params = tuple(a.params().items())
    return Problem.product(a.name, params, *size, *[a.dtype.name] * 3, "row", "row", "cuda", sm=sm)


def columns_of(kernel: Any) -> dict[str, Any]:
    return {"columns": COLUMNS[kernel.name]} if kernel.name in COLUMNS else {}


@pytest.mark.gpu
def test_records_have_fewer_bytes_than_the_format() -> None:
    """4 bytes for an item where the format has 6; beside them a record has 20 bytes and 24 of padding."""
    cp = pytest.importorskip("cupy")
    sm, rng = int(cp.cuda.Device().compute_capability), np.random.default_rng(1)
    for density, most in ((0.5, 0.68), (0.1, 0.69), (0.05, 0.71), (0.03, 0.73)):
        a = sf.convert((rng.random((256, 2048)) < density).astype(np.float16), "csr").to("cuda")
        assert csr_records.records(a, problem_of(a, sm)).nbytes <= most * a.nbytes, f"density {density}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_arrays_come_back(dtype: str) -> None:
    """Bit by bit, for matrices that are ragged, empty, full, and of rows without values; stored zeros, too."""
    cp = pytest.importorskip("cupy")
    sm = int(cp.cuda.Device().compute_capability)
    for i, shape in enumerate(SHAPES):
        for density in (0, 0.02, 0.1, 0.5, 1):
            stored = drawn(i, shape, density, dtype)
            a = stored.to("cuda")
            p = problem_of(a, sm)
            records = csr_records.records(a, p)
            assert records.data.nbytes <= 16 * max(1, csr_records.pieces_at_most(p))
            assert records.count == ceil_div(shape[0], 64) * ceil_div(shape[1], 64)
            assert_arrays_come_back(stored, records.restore(), f"{shape} density {density}")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*KERNELS, FEW], ids=lambda k: k.name)
def test_products_come_from_records_alone(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csr_records, "LEAST_SHARE", 0)
    assert_products_come_from_order(kernel, "csr", lambda i: {}, problem_of, **columns_of(kernel))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*KERNELS, FEW], ids=lambda k: k.name)
@pytest.mark.parametrize(
    "params", [{}, {"column_parts": 3, "max_width": 8}, {"widths": (3, 5, 17)}], ids=lambda x: ",".join(x) or "usual"
)
def test_products_of_ell_buckets_too(kernel: Any, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their arrays come back by a conversion; also of widths that no other kernel takes."""
    monkeypatch.setattr(csr_records, "LEAST_SHARE", 0)
    assert_products_come_from_order(kernel, "ell-buckets", lambda i: params, problem_of, **columns_of(kernel))


@pytest.mark.gpu
def test_a_matrix_with_few_items_keeps_its_arrays() -> None:
    """Beside the records, if a kernel was named that multiplies from them: none of these is chosen."""
    cp = pytest.importorskip("cupy")
    sm = int(cp.cuda.Device().compute_capability)
    kernel = SpmmCSRExpanding()
    for density, kept in ((0.02, True), (0.2, False)):
        a = drawn(1, (200, 300), density, "float16").to("cuda")
        p = problem_of(a, sm)
        if kernel.unsupported(p):
            pytest.skip(f"{kernel.name}: {kernel.unsupported(p)[0]}")
        kernel.plan(a.ensure_valid(), p)
        assert a.in_kernel_order != kept


def test_kernels_that_read_arrays_are_not_chosen_beside_records() -> None:
    a = CSR.from_dense(np.ones((16, 64), np.float16))
    p = problem_of(a, 90).changed(M=4096, K=4096, nnz=4096 * 410)
    for n in (1, 3, 16, 100, 4096):
        names = {x.kernel for x in sf.explain(p.changed(n=n)).answers if x and x.kernel.startswith("cuda.")}
        assert names == {k.name for k in KERNELS} | {FEW.name for _ in range(n <= MAX_COLS)}, n
    assert "the matrix is kept in records" in str(sf.explain(p))
    assert {x.kernel for x in sf.explain(p.changed(sm=80)).answers if x} > {"cuda.spmm_csr", "cuda.spmm_csr_vector"}
    few = sf.explain(p.changed(nnz=4096 * 160))
    accepted = {x.kernel for x in few.answers if x}
    assert "cuda.spmm_csr" in accepted
    assert not accepted & {FEW.name, KERNELS[0].name}
    assert "the matrix is kept in its arrays" in str(few)
    named = sf.explain(p, backend="cuda.spmm_csr")
    assert named.chosen == "cuda.spmm_csr"


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["csr", "ell-buckets"])
def test_kernels_that_read_arrays_get_new_ones(fmt: str) -> None:
    """By name, of a matrix that is kept in records: the arrays come back once for each plan."""
    cp = pytest.importorskip("cupy")
    sm = int(cp.cuda.Device().compute_capability)
    x = np.random.default_rng(4).choice([-2, -1, 0, 0, 1, 2], (130, 300)).astype(np.float16)
    a = sf.convert(x, fmt).to("cuda").ensure_valid()
    p = problem_of(a, sm).changed(n=17)
    if KERNELS[0].unsupported(p):
        pytest.skip(f"{KERNELS[0].name}: {KERNELS[0].unsupported(p)[0]}")
    KERNELS[0].plan(a, p)
    assert a.in_kernel_order
    B = np.random.default_rng(5).integers(-2, 3, (300, 17)).astype(np.float16)
    readers = [
        k.kernel
        for k in sf.explain(a, cp.asarray(B)).answers
        if "is kept in records" in str(k) and k.kernel.startswith("cuda.")
    ]
    assert len(readers) >= {"csr": 3, "ell-buckets": 1}[fmt]
    restored: list[int] = []
    order = type(a.order_now())
    right = order.restore
    with pytest.MonkeyPatch.context() as m:
        m.setattr(order, "restore", lambda self: restored.append(1) or right(self))
        for name in readers:
            out = sf.spmm(a, cp.asarray(B), backend=name)
            assert (out.get() == x.astype(np.float32) @ B.astype(np.float32)).all(), name
    assert len(restored) <= 3 * len(readers)  # for all arrays of a plan, and for what is derived from them
    assert a.in_kernel_order
