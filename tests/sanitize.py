"""A few small products of every GPU kernel: what `make gpu` runs once more under compute-sanitizer.

    python tests/sanitize.py [PART ...]                    the parts in this process; without names, all of them
    python tests/sanitize.py --tool compute-sanitizer [--jobs 8] [PART ...]
                                                           each under memcheck and racecheck, in processes of its own

A part is a kernel, two_four_pack, the conversions of a format, scans, epilogues, pieces, expansions or copies. Prints a
line per part; results are compared too, so that the run is a test without the tool, too. ``--planted`` runs a kernel with two
faults instead, one for each tool: a run where it is not reported proves nothing, so that with ``--tool`` this comes
first.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy as cp
import numpy as np
from cases import params_of
from test_device_masks import CALLS as MASKS
from test_device_masks import any_bits as mask_values
from test_device_masks import to_device as values_on_device
from test_kernels import NS, WIDE, Guarded, attempts, matrix, on_device, problem, refuses
from test_nm_from_csr import PATTERNS, two_four_items, vector_items
from test_quick_check import SCANNED, damaged, matrices, sound_by_name
from test_quick_check import on_device as on_the_device

from spformat import plan, spmm
from spformat.backends.cuda import KERNELS
from spformat.backends.cuda.dense.expand_then_dense import EXPANDERS
from spformat.backends.cuda.runtime.expansion import leading_dimension
from spformat.backends.cuda.runtime.offsets import Offsets
from spformat.dispatch import copied_operands
from spformat.errors import StructureError
from spformat.formats.convert import convert
from spformat.formats.two_four import META_ORDERS
from spformat.preprocess import masks
from spformat.preprocess.structure import count_nonzeros
from spformat.products.operations import SPMM
from spformat.products.tiles import forced

AT_MOST = 8
"""Cases of test_kernels.py, spread evenly over a kernel's: the tool is a hundred times slower than the kernel."""

CALLS = ((17, ("row", "row"), 3), (64, ("col", "row"), 0), (1, ("row", "col"), 0), (136, ("row", "row"), 0))
"""N, layouts of B and C, elements between lines."""


FORCED = {"cuda.spmm_two_four_sm90"}
"""Kernels of which each tile is run in turn: products this small would choose one of them only."""


PLANTED = """
extern "C" __global__ void planted(int* out) {
    __shared__ int line[64];
    line[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = line[(threadIdx.x + 37) % 64];  // no barrier between the two warps
    if (threadIdx.x == 0) out[1 << 20] = 1;            // far behind an array of 64
}
"""


def planted() -> None:
    """A race in shared memory and a write out of bounds."""
    cp.RawKernel(PLANTED, "planted")((1,), (64,), (cp.zeros(64, cp.int32),))
    cp.cuda.get_current_stream().synchronize()


def run(kernel: Any, sm: int) -> int:
    """Products computed; an AssertionError for a wrong one."""
    done = 0
    rng = np.random.default_rng(3)
    cases = list(attempts(kernel, sm))
    for f, x in cases[:: -(-len(cases) // AT_MOST) or 1]:
        g = f.to("cuda")
        for n, layouts, pad in ((WIDE[0], ("row", "row"), 0),) if refuses(kernel, f, NS, sm) else CALLS:
            p = problem(f, n, f.dtype.name, layouts, sm)
            if kernel.unsupported(p):
                continue
            B = rng.integers(-2, 3, (x.shape[1], n)).astype(f.dtype)
            guarded = Guarded(cp, (x.shape[0], n), f.dtype, layouts[1], pad)
            tiles = kernel.tiles if kernel.name in FORCED else ()
            with forced(kernel.name, str(tiles[done % len(tiles)])) if tiles else contextlib.nullcontext():
                plan = kernel.plan(g, p)
            plan(on_device(cp, B, layouts[0], pad), out=guarded.out)
            wanted = (x.astype(np.float64) @ B.astype(np.float64)).astype(f.dtype)
            assert (guarded.out.get() == wanted).all(), f"{kernel.name} {f!r} n={n} {layouts}"
            assert guarded.intact(), f"{kernel.name} {f!r} n={n} {layouts}: wrote outside C"
            done += 1
    return done


def packing() -> int:
    """Matrices packed to 2:4, pruned and unpacked by every kernel; allocations of their own, so that none overruns."""
    cp.cuda.set_allocator(None)
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
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    assert done, "nothing was refused"
    return 4 * done


def vector_packing() -> int:
    """Matrices packed to vector n:m, pruned, refused and unpacked, each array an allocation of its own."""
    cp.cuda.set_allocator(None)
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
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    assert done, "nothing was refused"
    return 4 * done


def bitmask_packing() -> int:
    """Matrices turned into Bitmask and back, from dense, CSR and 2:4, each array an allocation of its own."""
    cp.cuda.set_allocator(None)
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
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    assert done, "nothing was refused"
    return 8 * done


def ell_buckets() -> int:
    """Matrices converted from CSR to ELL buckets, back, and to dense; each array an allocation of its own."""
    cp.cuda.set_allocator(None)
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
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    return done


def sr_bcrs() -> int:
    """Matrices to SR-BCRS and back, from dense arrays and CSR, each array an allocation of its own."""
    cp.cuda.set_allocator(None)
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
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    return done


def csr_conversions() -> int:
    """Dense arrays to CSR, back and transposed, and offsets, each array an allocation of its own."""
    cp.cuda.set_allocator(None)
    rng, done = np.random.default_rng(12), 0
    shapes = ((1, 1), (33, 70), (3, 4099), (2100, 3), (5, 2048))
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
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    return done


def block_conversions() -> int:
    """Matrices to BSR and DBSR from dense and CSR, back, and transposed; each array an allocation of its own."""
    cp.cuda.set_allocator(None)
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
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    return done


def pruning() -> int:
    """Masks of every kind, with ties and values that are not finite, each array an allocation of its own."""
    cp.cuda.set_allocator(None)
    done = 0
    for (name, given), dtype in itertools.product(MASKS.values(), ("float16", "float32", "float64", "int8")):
        for shape in ((33, 70), (40, 256), (130, 333)):
            x = mask_values(shape, dtype, done)
            wanted = getattr(masks, name)(x, *given, nonfinite="keep")
            mask = getattr(masks, name)(values_on_device(x), *given, nonfinite="keep")
            assert (mask.get() == wanted).all(), (name, given, dtype, shape)
            done += 1
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    return done


def from_csr() -> int:
    """CSR to 2:4 and vector n:m and back, refused matrices among them, each array an allocation of its own."""
    cp.cuda.set_allocator(None)
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
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    assert refused, "nothing was refused"
    return done
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    return done


def scans() -> int:
    """Verdicts on sound matrices and hostile ones, each array an allocation of its own, against the named checks."""
    cp.cuda.set_allocator(None)
    rng, done = np.random.default_rng(7), 0
    for fmt in SCANNED:
        for a in itertools.islice(matrices(fmt, "float16"), 0, None, 3):
            few = list(damaged(a, rng))
            for b in (a, *(few[i] for i in rng.permutation(len(few))[:6])):
                assert on_the_device(b).quick_check() == sound_by_name(b), (b, b.arrays())
                done += 1
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    return done


def pieces() -> int:
    """Rows so long that several blocks share one, and the last block adds up. Several widths, calls one after another."""
    rng, done = np.random.default_rng(8), 0
    x = np.where(rng.random((40, 9000)) < 0.002, rng.integers(-2, 3, (40, 9000)), 0)
    for row, items in {0: 9000, 7: 2049, 39: 4097}.items():
        x[row, rng.permutation(9000)[:items]] = 1
    for spec, dtype in itertools.product(("csr", "ell-buckets"), (np.float32, np.float16)):
        g = convert(x.astype(dtype), spec).to("cuda")
        for n in (17, 64, 1):
            B = rng.integers(-1, 2, (9000, n)).astype(dtype)
            guarded = Guarded(cp, (40, n), np.dtype(np.float32), "row", 3)
            for _ in range(2):
                guarded.out.fill(float("nan"))
                spmm(g, cp.asarray(B), guarded.out, f"cuda.spmm_{spec.replace('-', '_')}")
                assert (guarded.out.get() == x @ B.astype(np.float64)).all(), f"{spec} {dtype} n={n}"
                assert guarded.intact(), f"{spec} {dtype} n={n}: wrote outside C"
                done += 1
    return done


def epilogues() -> int:
    """Products with alpha, beta and bias, fused (2:4) and in a pass of their own (CSR); C between guards."""
    rng, done = np.random.default_rng(5), 0
    x = rng.integers(-3, 4, (70, 200)).astype(np.float16)
    x = masks.apply(x, masks.magnitude_nm(x, 2, 4))
    bias = rng.integers(-2, 3, 70).astype(np.float16)
    on = {name: convert(x, name).to("cuda") for name in ("two-four", "csr")}
    kernels = [(k, g) for k in KERNELS for name, g in on.items() if name in k.formats]
    for (kernel, g), n, layout in itertools.product(kernels, (17, 136), ("row", "col")):
        B, old = rng.integers(-2, 3, (200, n)).astype(np.float16), rng.integers(-2, 3, (70, n)).astype(np.float16)
        guarded = Guarded(cp, old.shape, np.dtype(np.float16), layout, 3)
        guarded.out[...] = cp.asarray(old)
        b = on_device(cp, B, layout, 0)
        if kernel.unsupported(SPMM.problem(g, b, guarded.out)):
            continue
        spmm(g, b, guarded.out, kernel.name, alpha=0.5, beta=-2, bias=cp.asarray(bias))
        wanted = (0.5 * (x.astype(np.float64) @ B) - 2.0 * old + bias[:, None]).astype(np.float16)
        assert (guarded.out.get() == wanted).all(), f"{kernel.name} n={n} {layout}"
        assert guarded.intact(), f"{kernel.name} n={n} {layout}: wrote outside C"
        done += 1
    return done


def expansions() -> int:
    """Matrices of every format written as dense ones, each array an allocation of its own, so that none overruns."""
    cp.cuda.set_allocator(None)
    rng, done, sm = np.random.default_rng(10), 0, int(cp.cuda.Device().compute_capability)
    for (name, expander), dtype in itertools.product(EXPANDERS.items(), ("float16", "float32")):
        if (name, dtype) == ("two-four", "float32"):
            continue
        for params, shape in itertools.product(params_of(name)[:3], ((33, 70), (40, 1000), (19, 9000))):
            x = matrix(rng, name, params, dtype, shape)
            f = convert(x, name, **params)
            for ld in {leading_dimension(shape[1], x.dtype.itemsize), shape[1]}:
                out = cp.full((shape[0], ld), float("nan"), x.dtype)
                write = expander(f.to("cuda"), problem(f, 8, dtype, ("row", "row"), sm))
                for launch in write(out.data.ptr, ld, 0):
                    launch()
                assert (out.get()[:, : shape[1]] == x).all(), f"{f!r} ld={ld}"
                done += 1
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
    return done


def copies() -> int:
    """Products with copies of B and C, in every layout, of odd extents; operands between guards."""
    rng, done = np.random.default_rng(11), 0
    x = np.where(rng.random((67, 301)) < 0.3, rng.integers(-3, 4, (67, 301)), 0)
    for dtype, n, layouts in itertools.product(
        ("float16", "float32", "float64"), (2, 9, 331), itertools.product(("row", "col"), repeat=2)
    ):
        g, B = convert(x.astype(dtype), "csr").to("cuda"), rng.integers(-2, 3, (301, n)).astype(dtype)
        guarded = Guarded(cp, (67, n), np.dtype(dtype), layouts[1], 3)
        b = on_device(cp, B, layouts[0], 5)
        for layouts_of_copies in copied_operands.KERNEL.options(SPMM.problem(g, b, guarded.out)):
            with forced(copied_operands.KERNEL.name, str(layouts_of_copies)):
                guarded.out.fill(float("nan"))
                plan(g, B=b, out=guarded.out, backend=copied_operands.KERNEL.name)(b, out=guarded.out)
            assert (guarded.out.get() == x @ B.astype(np.float64)).all(), f"{dtype} n={n} {layouts}"
            assert guarded.intact(), f"{dtype} n={n} {layouts}: wrote outside C"
            g._plans.clear()
            done += 1
    return done


REPORTED = 9
"""Exit code of the tool when it found something."""


def under(program: str, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This script with ``arguments`` under a tool of ``program``. CuPy's own kernels are not checked."""
    options = ("--tool", tool, "--kernel-name-exclude", "kernel_substring=cupy_", "--error-exitcode", str(REPORTED))
    return subprocess.run(
        (program, *options, sys.executable, __file__, *arguments), text=True, capture_output=True, check=False
    )


def sanitize(program: str, parts: list[str], jobs: int) -> bool:
    """Whether both tools report the planted fault and nothing of ours. What they report is printed."""
    clean = True
    for tool in ("memcheck", "racecheck"):
        if under(program, tool, "--planted").returncode != REPORTED:
            print(f"{tool} does not report the planted fault: nothing was checked", flush=True)
            return False
        print(f"{tool}: reports the planted fault; ours:", flush=True)
        with ThreadPoolExecutor(jobs) as pool:
            for part, done in zip(parts, pool.map(lambda p, t=tool: under(program, t, p), parts), strict=True):
                said = [line for line in done.stdout.splitlines() if line.startswith(part) or "SUMMARY" in line]
                print(f"  {tool} {'; '.join(said) or part}", flush=True)
                if done.returncode:
                    clean = False
                    print(
                        done.stdout[-4000:], done.stderr[-4000:], f"exit code {done.returncode}", sep="\n", flush=True
                    )
    return clean


def main() -> None:
    others = {
        "two_four_pack": (packing, "conversions"), "vector_nm_convert": (vector_packing, "conversions"),
        "bitmask_convert": (bitmask_packing, "conversions"),
        "ell_buckets": (ell_buckets, "conversions"),
        "scans": (scans, "verdicts"),
        "epilogues": (epilogues, "products"),
        "csr_convert": (csr_conversions, "conversions"),
        "bsr_convert": (block_conversions, "conversions"),
        "masks": (pruning, "masks"),
        "nm_from_csr": (from_csr, "conversions"),
        "sr_bcrs_convert": (sr_bcrs, "conversions"),
        "pieces": (pieces, "products"), "expansions": (expansions, "matrices"),
        "copies": (copies, "products"),
    }  # fmt: skip
    known = [*others, *(k.name for k in KERNELS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=known, metavar="PART", help=", ".join(known))
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--tool", metavar="PROGRAM", help="compute-sanitizer, or where it lies")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="parts under the tool at a time")
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - set(known)):
        parser.error(f"no part is called {', '.join(unknown)}")
    if options.planted:
        return planted()
    if options.tool:
        sys.exit(not sanitize(options.tool, options.parts, options.jobs))
    sm = int(cp.cuda.Device().compute_capability)
    for part in options.parts:
        if part in others:
            work, what = others[part]
            print(f"{part}: {work()} {what}", flush=True)
    for kernel in (k for k in KERNELS if k.name in options.parts):
        done = run(kernel, sm)
        print(f"{kernel.name}: {done} products", flush=True)
        assert done or not kernel.name.endswith("sm90a") or sm != 90, f"{kernel.name}: nothing to try"


if __name__ == "__main__":
    main()
