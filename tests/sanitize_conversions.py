"""The conversions, masks and verdicts that sanitize.py runs, each array an allocation of its own, so that none overruns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import cupy as cp
import numpy as np
from cases import params_of
from test_device_masks import CALLS as MASKS
from test_device_masks import any_bits as mask_values
from test_device_masks import to_device as values_on_device
from test_nm_from_csr import PATTERNS, two_four_items, vector_items
from test_quick_check import SCANNED, damaged, matrices, on_device, sound_by_name

from spformat.backends.cuda.runtime.offsets import Offsets
from spformat.errors import StructureError
from spformat.formats.convert import convert
from spformat.formats.meta_orders import META_ORDERS
from spformat.preprocess import masks
from spformat.preprocess.structure import analyse, count_nonzeros


def allocated_alone(part: Callable[[], int]) -> Callable[[], int]:
    """The part without CuPy's memory pool: the tools see a write that leaves an array."""

    @functools.wraps(part)
    def run() -> int:
        cp.cuda.set_allocator(None)
        try:
            return part()
        finally:
            cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)

    return run


@allocated_alone
def packing() -> int:
    """Matrices packed to 2:4, pruned and unpacked by every kernel; allocations of their own, so that none overruns."""
    rng, done = np.random.default_rng(4), 0
    for shape, order in itertools.product(((33, 70), (40, 264), (1, 1), (64, 128)), META_ORDERS):
        x = rng.integers(-3, 4, shape).astype(np.float16)
        wanted = masks.prune_two_four(x, meta_order=order)
        packed = masks.prune_two_four(cp.asarray(x), meta_order=order)
        dense = packed.to_dense()
        assert packed.to("cpu") == convert(dense, "two-four", meta_order=order).to("cpu") == wanted, (shape, order)
        try:
            convert(cp.asarray(x), "two-four")
        except StructureError:
            done += 1
    assert done, "nothing was refused"
    return 4 * done


@allocated_alone
def vector_packing() -> int:
    """Matrices packed to vector n:m, pruned, refused and unpacked, each array an allocation of its own."""
    rng, done = np.random.default_rng(6), 0
    patterns = ((8, 32, 32, 64, 64), (5, 7, 3, 0, 0), (200, 256, 64, 0, 0), (2, 4, 512, 0, 0), (2, 4, 1, 0, 0))
    for (n, m, length, rows, cols), dtype in itertools.product(patterns, ("float16", "float32", "int8")):
        x = rng.integers(-3, 4, (130, 320)).astype(dtype)
        params = {"tile_rows": rows, "tile_cols": cols}
        wanted = masks.prune_vector_nm(x, n, m, length, **params)
        packed = masks.prune_vector_nm(cp.asarray(x), n, m, length, **params)
        assert packed.to("cpu") == wanted, (n, m, length, dtype)
        assert convert(packed.to_dense(), "vector-nm", **wanted.params()).to("cpu") == wanted, (n, m, length, dtype)
        try:
            convert(cp.asarray(x), "vector-nm", **wanted.params())
        except StructureError:
            done += 1
    assert done, "nothing was refused"
    return 4 * done


@allocated_alone
def bitmask_packing() -> int:
    """Matrices turned into Bitmask and back, from dense, CSR and 2:4, each array an allocation of its own."""
    rng, done = np.random.default_rng(12), 0
    for shape, dtype in itertools.product(((33, 70), (3, 9001), (700, 3), (40, 264)), ("float16", "float32", "int8")):
        x = rng.integers(-3, 4, shape).astype(dtype)
        wanted, with_zeros = convert(x, "bitmask"), convert(np.ones_like(x), "csr")
        with_zeros = with_zeros.with_arrays(data=x.reshape(-1))
        for source in (cp.asarray(x), convert(x, "csr").to("cuda"), with_zeros.to("cuda")):
            assert convert(source, "bitmask").to("cpu") == wanted, (shape, dtype)
        on_gpu = wanted.to("cuda")
        assert (on_gpu.to_dense().get() == x).all(), (shape, dtype)
        assert on_gpu.to_csr().to("cpu") == wanted.to_csr(), (shape, dtype)
        fitting = masks.apply(x, masks.magnitude_nm(x, 2, 4))
        packed, bits = convert(fitting, "two-four"), convert(fitting, "bitmask")
        assert convert(packed.to("cuda"), "bitmask").to("cpu") == bits, (shape, dtype)
        assert convert(bits.to("cuda"), "two-four").to("cpu") == packed, (shape, dtype)
        try:
            convert(on_gpu, "two-four")
        except StructureError:
            done += 1
    assert done, "nothing was refused"
    return 8 * done


@allocated_alone
def ell_buckets() -> int:
    """Matrices converted from CSR to ELL buckets, back, and to dense; each array an allocation of its own."""
    rng, done = np.random.default_rng(12), 0
    params = (*params_of("ell-buckets"), {"column_parts": 1000, "max_width": 2})
    for given, shape, dtype in itertools.product(params, ((33, 70), (300, 333), (19, 9000)), ("float16", "float64")):
        x = np.where(rng.random(shape) < rng.random((shape[0], 1)) ** 3, rng.integers(-3, 4, shape), 0).astype(dtype)
        csr = convert(x, "csr")
        packed = convert(csr.to("cuda"), "ell-buckets", **given)
        assert packed.to("cpu") == convert(csr, "ell-buckets", **given), (given, shape, dtype)
        assert packed.to_csr().to("cpu") == csr, (given, shape, dtype)
        assert (packed.to_dense().get() == x).all(), (given, shape, dtype)
        done += 3
    return done


@allocated_alone
def sr_bcrs() -> int:
    """Matrices to SR-BCRS and back, from dense arrays and CSR, each array an allocation of its own."""
    rng, done = np.random.default_rng(12), 0
    for (t, g), dtype in itertools.product(((8, 16), (3, 5), (1, 1), (256, 3)), ("float16", "float32", "int8")):
        for shape in ((33, 70), (40, 1000), (5, 70_001), (300, 64)):
            x = np.where(rng.random(shape) < 0.05, rng.integers(-3, 4, shape), 0).astype(dtype)
            csr, wanted = convert(x, "csr"), convert(x, "sr-bcrs", vector_length=t, stride=g)
            for given in (cp.asarray(x), csr.to("cuda")):
                assert convert(given, "sr-bcrs", **wanted.params()).to("cpu") == wanted, (t, g, dtype, shape)
            back = wanted.to("cuda")
            assert back.to_csr().to("cpu") == csr, (t, g, dtype, shape)
            assert (back.to_dense().get() == x).all(), (t, g, dtype, shape)
            done += 4
    return done


@allocated_alone
def csr_conversions() -> int:
    """Dense arrays to CSR, back and transposed, and offsets, each array an allocation of its own."""
    rng, done = np.random.default_rng(12), 0
    shapes = ((1, 1), (33, 70), (3, 4099), (2100, 3), (5, 2048), (130, 700))
    for shape, dtype in itertools.product(shapes, ("float16", "float32", "float64", "int8")):
        x = np.where(rng.random(shape) < 0.3, rng.integers(-3, 4, shape), 0).astype(dtype)
        wanted, there = convert(x, "csr"), cp.asarray(x)
        a = convert(there, "csr")
        assert a.to("cpu") == wanted, (shape, dtype)
        assert (a.to_dense().get() == x).all(), (shape, dtype)
        assert a.T.to_csr().to("cpu") == convert(np.ascontiguousarray(x.T), "csr"), (shape, dtype)
        assert count_nonzeros(there) == count_nonzeros(x), (shape, dtype)
        done += 4
    for n in (1, 4097, 70_000):
        counts = rng.integers(0, 9, n).astype(np.uint32)
        assert (Offsets(cp.asarray(counts), 2**31 - 1).indptr()[0].get()[1:] == counts.cumsum()).all(), n
    return done


@allocated_alone
def block_conversions() -> int:
    """Matrices to BSR and DBSR from dense and CSR, back, and transposed; each array an allocation of its own."""
    rng, done = np.random.default_rng(12), 0
    sizes = ((1, 1), (2, 3), (8, 16), (32, 32), (33, 40), (100, 7))
    for blocksize, dtype, shape in itertools.product(sizes, ("float16", "float64"), ((70, 136), (65, 261))):
        x = np.where(rng.random(shape) < 0.03, rng.integers(-3, 4, shape), 0).astype(dtype)
        for name in ("bsr", "dbsr"):
            wanted = convert(x, name, blocksize=blocksize)
            g = convert(cp.asarray(x), name, blocksize=blocksize)
            a = g.to_csr()
            assert g.to("cpu") == wanted == convert(a, name, blocksize=blocksize).to("cpu"), (blocksize, dtype, shape)
            assert a.to("cpu") == wanted.to_csr(), (blocksize, dtype, shape)
            assert (g.to_dense().get() == x).all(), (blocksize, dtype, shape)
            assert g.T.materialize().to("cpu") == wanted.T.materialize(), (blocksize, dtype, shape)
            done += 5
    return done


@allocated_alone
def pruning() -> int:
    """Masks of every kind, with ties and values that are not finite, each array an allocation of its own."""
    done = 0
    for (name, given), dtype in itertools.product(MASKS.values(), ("float16", "float32", "float64", "int8")):
        for shape in ((33, 70), (40, 256), (130, 333)):
            x = mask_values(shape, dtype, done)
            wanted = getattr(masks, name)(x, *given, nonfinite="keep")
            mask = getattr(masks, name)(values_on_device(x), *given, nonfinite="keep")
            assert (mask.get() == wanted).all(), (name, given, dtype, shape)
            done += 1
    return done


@allocated_alone
def pruned_conversions() -> int:
    """Matrices pruned to a format in one step, with many ties, and counted, each array an allocation of its own."""
    rng, done = np.random.default_rng(12), 0
    targets = ("csr", "bitmask", "bsr:blocksize=8x16", "dbsr:blocksize=3x5")
    for shape, dtype in itertools.product(((33, 70), (300, 333), (3, 9000)), ("float16", "float32", "float64", "int8")):
        x = rng.integers(-3, 4, shape).astype(dtype)
        for target, sparsity in itertools.product(targets, (0.1, 0.9)):
            wanted = masks.prune(x, target, sparsity=sparsity, norm="l1")
            assert masks.prune(cp.asarray(x), target, sparsity=sparsity, norm="l1").to("cpu") == wanted, (target, dtype)
            done += 1
        one, other = analyse(x), analyse(cp.asarray(x))
        assert (one.row_lengths == other.row_lengths).all(), (shape, dtype)
        assert (one.window_max, one.blocks, one.tile_columns) == (other.window_max, other.blocks, other.tile_columns)
        done += 1
    return done


@allocated_alone
def from_csr() -> int:
    """CSR to 2:4 and vector n:m and back, refused matrices among them, each array an allocation of its own."""
    done = refused = 0
    for shape, dtype in itertools.product(((33, 70), (5, 4099), (130, 264)), ("float16", "float32", "int8")):
        cases = [("two-four", {"meta_order": o}, two_four_items(shape, dtype, i)) for i, o in enumerate(META_ORDERS)]
        cases += [("vector-nm", p, vector_items(shape, dtype, i, p)) for i, p in enumerate(PATTERNS)]
        for name, params, a in cases:
            wanted = convert(a, name, **params)
            got = convert(a.to("cuda"), name, **params)
            assert got.to("cpu") == wanted, (name, params, shape, dtype)
            assert got.to_csr().to("cpu") == wanted.to_csr(), (name, params, shape, dtype)
            done += 2
        try:
            convert(convert(np.ones(shape, dtype), "csr").to("cuda"), "two-four")
        except StructureError:
            refused += 1
    assert refused, "nothing was refused"
    return done


@allocated_alone
def scans() -> int:
    """Verdicts on sound matrices and hostile ones, each array an allocation of its own, against the named checks."""
    rng, done = np.random.default_rng(7), 0
    for fmt in SCANNED:
        for a in itertools.islice(matrices(fmt, "float16"), 0, None, 3):
            few = list(damaged(a, rng))
            for b in (a, *(few[i] for i in rng.permutation(len(few))[:6])):
                assert on_device(b).quick_check() == sound_by_name(b), (b, b.arrays())
                done += 1
    return done


PARTS = {
    "two_four_pack": (packing, "conversions"),
    "vector_nm_convert": (vector_packing, "conversions"),
    "bitmask_convert": (bitmask_packing, "conversions"),
    "ell_buckets": (ell_buckets, "conversions"),
    "csr_convert": (csr_conversions, "conversions"),
    "bsr_convert": (block_conversions, "conversions"),
    "sr_bcrs_convert": (sr_bcrs, "conversions"),
    "nm_from_csr": (from_csr, "conversions"),
    "masks": (pruning, "masks"),
    "prune": (pruned_conversions, "conversions"),
    "scans": (scans, "verdicts"),
}
"""Part -> (what runs it, what it counts)."""
