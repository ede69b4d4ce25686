"""Sparse matrices written as dense ones by a GPU: every bit, nothing outside, and products by way of that.

Sums of matrices: test_expand_sum.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import CASES, params_of
from graphs import assert_captured
from laws import integers
from test_kernels import BIG, LAYOUTS, Guarded, matrix, on_device, problem

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.backends.cuda.bitmask import bitmask_unpack
from spformat.backends.cuda.bsr import expand_bsr
from spformat.backends.cuda.csr import expand_csr
from spformat.backends.cuda.dense import expand_then_dense
from spformat.backends.cuda.dense.expand_then_dense import EXPANDERS, OPERATIONS, SINGLE, ExpandThenDense
from spformat.backends.cuda.ell_buckets import ell_buckets_to_dense
from spformat.backends.cuda.runtime.expansion import leading_dimension
from spformat.backends.cuda.sr_bcrs import expand_sr_bcrs
from spformat.backends.cuda.two_four import two_four_pack
from spformat.backends.cuda.vector_nm import vector_nm_convert
from spformat.formats.base import Format
from spformat.products.problem import ROW, Problem

KERNEL = ExpandThenDense()
SHAPES = ((331, 523), (19, 20011), (20011, 3), (70, 40000))
"""Beside the cases: rows that are cut into pieces, and many rows."""


@pytest.fixture(scope="module")
def cp() -> Any:
    return pytest.importorskip("cupy")


def formats(name: str, dtype: str, shapes: tuple[tuple[int, int], ...] = SHAPES) -> Iterator[Format]:
    """Matrices of a format: every case with special values, and larger ones."""
    cls = next(f for f in sf.FORMATS if f.name == name)
    rng = np.random.default_rng(9)
    for params in params_of(name):
        for make in CASES.values():
            try:
                yield cls.from_dense(make(dtype), **params)
            except sf.errors.StructureError:
                continue
    for params in (*params_of(name), *BIG.get(name, ())):
        for shape in shapes:
            x = matrix(rng, name, params, "float32", shape).astype(VALUE_TYPES[dtype].numpy)
            yield cls.from_dense(x, **params)


def widened(f: Format) -> Format:
    """The same matrix with int64 indices, which only larger ones have."""
    out = f.with_arrays()
    for key, x in f.arrays().items():
        if x.dtype == np.int32:
            object.__setattr__(out, key, x.astype(np.int64))
    return out


def expanded(cp: Any, f: Format, ld: int, offset: int) -> Any:
    """Bits that the device writes for ``f``, on a device, into poisoned memory ``offset`` elements from a boundary."""
    M, K = f.shape
    word, guard = bits(np.zeros(1, f.dtype)).dtype, 256
    raw = cp.full(2 * guard + offset + M * ld, 0x5A, word)
    raw.view("u1").fill(0x5A)
    p = problem(f, 1, f.dtype.name, (ROW, ROW), int(cp.cuda.Device().compute_capability))
    for launch in EXPANDERS[f.name](f, p)(raw.data.ptr + (guard + offset) * word.itemsize, ld, 0):
        launch()
    got = raw.get()
    body = got[guard + offset : guard + offset + M * ld].reshape(M, ld)
    assert (got[: guard + offset].view("u1") == 0x5A).all(), f"{f!r} wrote before the array"
    assert (got[guard + offset + M * ld :].view("u1") == 0x5A).all(), f"{f!r} wrote behind the array"
    pad = np.ascontiguousarray(body[:, K:]).view("u1")
    assert ((pad == 0x5A) | (pad == 0)).all(), f"{f!r} wrote values behind column K"
    return body[:, :K]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("name", sorted(SINGLE))
def test_expanded_bits_are_those_of_the_host(cp: Any, name: str, dtype: str) -> None:
    if dtype not in next(f for f in sf.FORMATS if f.name == name).value_dtypes:
        pytest.skip(f"{name} takes no {dtype}")
    done = 0
    for f in formats(name, dtype):
        K, wanted = f.shape[1], bits(f.to_dense())
        ld = leading_dimension(K, f.dtype.itemsize)
        g = f.to("cuda")
        places = [(g, ld, 0), (widened(g), ld, 0), (g, max(1, K), 1)]
        if name != "two-four":  # whose rows may be no longer than its own padding
            places.append((g, ld + 64, 0))
        for x, ld, offset in places:
            assert (expanded(cp, x, ld, offset) == wanted).all(), f"{x!r} ld={ld} offset={offset}"
            done += 1
    assert done > 40


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(SINGLE))
def test_conversions_write_a_whole_array(cp: Any, name: str) -> None:
    """What can be registered as conversions from a format to dense."""
    for f in formats(name, "float16", SHAPES[:1]):
        g, out = f.to("cuda"), cp.full(f.shape, float("nan"), f.dtype)
        a = g.arrays()
        if name == "ell-buckets":
            ell_buckets_to_dense.ell_buckets_to_dense(g, out)
        elif name in ("bsr", "dbsr"):
            expand_bsr.bsr_to_dense(a.get("row_ids"), a["indptr"], a["indices"], a["data"], out)
        elif name == "two-four":
            two_four_pack.two_four_unpack(a["data"], a["meta"], f.meta_order, out)  # type: ignore[attr-defined]
        elif name == "vector-nm":
            pattern = [f.params()[key] for key in ("n", "m", "vector_length")]
            vector_nm_convert.vector_nm_to_dense(a["indices"], a["data"], *pattern, out)
        else:
            convert = {
                "csr": expand_csr.csr_to_dense,
                "bitmask": bitmask_unpack.bitmask_to_dense,
                "sr-bcrs": expand_sr_bcrs.sr_bcrs_to_dense,
            }[name]
            convert(*a.values(), out)
        assert (bits(out).get() == bits(f.to_dense())).all(), repr(f)


@pytest.fixture
def poisoned(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace is NaN before every expansion."""

    def with_poison(expander: Any) -> Any:
        def poisoning_expander(a: Any, p: Problem) -> Any:
            write, nbytes = expander(a, p), expand_then_dense._dense_bytes(p)

            def launches(x: int, ld: int, stream: int) -> list[Any]:
                return [lambda: cp.cuda.runtime.memsetAsync(x, 0xFF, nbytes, stream), *write(x, ld, stream)]

            return launches

        return poisoning_expander

    for name, expander in list(EXPANDERS.items()):
        monkeypatch.setitem(EXPANDERS, name, with_poison(expander))


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", sorted(SINGLE))
def test_products_are_exact(cp: Any, poisoned: None, name: str, operation: str) -> None:
    cls = next(f for f in sf.FORMATS if f.name == name)
    sm, rng, done = int(cp.cuda.Device().compute_capability), np.random.default_rng(4), 0
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        if dtype not in cls.value_dtypes:
            continue
        drawn = [(p, integers(make(dtype))) for p in params_of(name)[:2] for make in CASES.values()]
        drawn += [(p, matrix(rng, name, p, dtype)) for p in (*params_of(name), *BIG.get(name, ()))]
        for i, (params, x) in enumerate(drawn):
            try:
                f = cls.from_dense(x, **params)
            except sf.errors.StructureError:
                continue
            g = f.to("cuda")
            op = x.T if operation == "spmm_transposed" else x
            wide = "float32" if dtype in ("float16", "bfloat16") else dtype
            for j, n in enumerate((0, 1, 17, 64)):
                layouts, pad, out_dtype = LAYOUTS[(i + j) % 4], 3 * (j % 2), (dtype, wide)[(i // 4 + j) % 2]
                p = problem(f, n, out_dtype, layouts, sm).changed(operation=operation, n=n)
                assert KERNEL.unsupported(p) == []
                B = rng.integers(-2, 3, (op.shape[1], n)).astype(x.dtype)
                out_type = VALUE_TYPES[out_dtype].numpy
                guarded = Guarded(cp, (op.shape[0], n), out_type, layouts[1], pad)
                plan, b = KERNEL.plan(g, p), on_device(cp, B, layouts[0], pad)
                wanted = (op.astype(np.float64) @ B.astype(np.float64)).astype(out_type)
                seen = []
                for _ in range(3):
                    guarded.out.fill(float("nan"))
                    plan(b, out=guarded.out)
                    seen.append(guarded.out.get())
                    assert (seen[-1] == wanted).all(), f"{f!r} {operation} n={n} {layouts} {out_dtype}"
                    assert guarded.intact(), f"{f!r} {operation} n={n} {layouts} {out_dtype}: wrote outside C"
                assert len({np.ascontiguousarray(s).tobytes() for s in seen}) == 1
                done += 1
    assert done > 100


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", sorted(SINGLE))
def test_a_graph_captures_the_whole_product(cp: Any, poisoned: None, name: str, operation: str) -> None:
    rng, sm = np.random.default_rng(6), int(cp.cuda.Device().compute_capability)
    x = matrix(rng, name, params_of(name)[0], "float16")
    f = sf.convert(x, name, **params_of(name)[0])
    op = x.T if operation == "spmm_transposed" else x
    B = rng.integers(-2, 3, (op.shape[1], 33)).astype(x.dtype)
    p = problem(f, 33, "float32", (ROW, ROW), sm).changed(operation=operation, n=33)
    plan, b, out = KERNEL.plan(f.to("cuda"), p), cp.asarray(B), cp.empty((op.shape[0], 33), np.float32)
    assert_captured(cp, plan, b, out, op.astype(np.float64) @ B)


@pytest.mark.gpu
def test_a_plan_does_not_keep_the_matrix(cp: Any) -> None:
    import gc
    import weakref

    for name in sorted(set(EXPANDERS) - {"sum"}):  # a sum has no params: test_expand_sum.py has sums
        f = sf.convert(
            matrix(np.random.default_rng(1), name, params_of(name)[0], "float16"), name, **params_of(name)[0]
        )
        g = f.to("cuda")
        plan, gone = KERNEL.plan(g, problem(f, 8, "float16", (ROW, ROW), 90)), weakref.ref(g)
        del g
        gc.collect()
        assert gone() is None, name
        assert plan.kernel == KERNEL.name
