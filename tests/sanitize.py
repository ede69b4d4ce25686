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
from sanitize_conversions import PARTS as CONVERSIONS
from sanitize_conversions import allocated_alone
from test_kernels import NS, WIDE, Guarded, attempts, matrix, on_device, problem, refuses
from test_rest_of_tiles import KERNELS as RECORD_KERNELS
from test_rest_of_tiles import assert_rests_are_exact, two_of_six
from test_spmm_sum import PAIRS, integers, product

from spformat import decompose, plan, spmm
from spformat.backends.cuda import KERNELS
from spformat.backends.cuda.dense.expand_then_dense import EXPANDERS
from spformat.backends.cuda.ell_buckets import spmm_ell_buckets
from spformat.backends.cuda.runtime import expanding
from spformat.backends.cuda.runtime.expansion import leading_dimension
from spformat.backends.cuda.sum import spmm_sum
from spformat.dispatch import copied_operands
from spformat.formats.convert import convert
from spformat.preprocess import masks
from spformat.products.operations import SPMM
from spformat.products.tiles import forced

AT_MOST = 8
"""Cases of test_kernels.py, spread evenly over a kernel's: the tool is a hundred times slower than the kernel."""

CALLS = (
    (17, ("row", "row"), 3),
    (64, ("col", "row"), 0),
    (1, ("row", "col"), 0),
    (136, ("row", "row"), 0),
    (9, ("col", "col"), 5),
)
"""N, layouts of B and C, elements between lines."""


FORCED = {
    "cuda.spmm_two_four_sm90", "cuda.spmm_two_four_shares_sm90a", "cuda.spmm_vector_nm_expanding_sm90a",
    "cuda.spmm_bitmask_expanding_sm90a", "cuda.spmm_bsr_stream_sm90a", "cuda.spmm_bsr_strips_sm90a",
    "cuda.spmm_vector_nm_tokens_tc", "cuda.spmm_csr_expanding_sm90a", "cuda.spmm_csr_records",
    "cuda.spmm_sr_bcrs_expanding_sm90a", "cuda.spmm_bsr_expanding_sm90a",
}  # fmt: skip
"""Kernels of which other tiles are run in turn: products this small would choose a few of them only."""
STRIDE = 7
"""Between the tiles of two products, so that few products have tiles of every kind."""


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
            tiles = list(kernel.options(p)) if kernel.name in FORCED else []
            with forced(kernel.name, str(tiles[done * STRIDE % len(tiles)])) if tiles else contextlib.nullcontext():
                plan = kernel.plan(g, p)
            plan(on_device(cp, B, layouts[0], pad), out=guarded.out)
            wanted = (x.astype(np.float64) @ B.astype(np.float64)).astype(f.dtype)
            assert (guarded.out.get() == wanted).all(), f"{kernel.name} {f!r} n={n} {layouts}"
            assert guarded.intact(), f"{kernel.name} {f!r} n={n} {layouts}: wrote outside C"
            done += 1
    return done


def pieces() -> int:
    """Rows so long that several blocks share one, and the last block adds up; parts of K with a launch each. Several
    widths, calls one after another."""
    rng, done = np.random.default_rng(8), 0
    spmm_ell_buckets.PIECES_OF_A_LAUNCH = 0
    x = np.where(rng.random((40, 9000)) < 0.002, rng.integers(-2, 3, (40, 9000)), 0)
    for row, items in {0: 9000, 7: 2049, 39: 4097}.items():
        x[row, rng.permutation(9000)[:items]] = 1
    for spec, dtype in itertools.product(
        ("csr", "ell-buckets", "ell-buckets:column_parts=3"), (np.float32, np.float16)
    ):
        g = convert(x.astype(dtype), spec).to("cuda")
        for n in (17, 64, 1):
            B = rng.integers(-1, 2, (9000, n)).astype(dtype)
            guarded = Guarded(cp, (40, n), np.dtype(np.float32), "row", 3)
            for _ in range(2):
                guarded.out.fill(float("nan"))
                spmm(g, cp.asarray(B), guarded.out, f"cuda.spmm_{g.name.replace('-', '_')}")
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


@allocated_alone
def expansions() -> int:
    """Matrices of every format, and sums, written as dense ones, each array an allocation of its own, so that none overruns."""
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
    for rules, dtype in itertools.product(PAIRS.values(), ("float16", "float32")):
        for shape in ((33, 70), (19, 9000)):
            x = integers(shape, dtype, done)
            f = decompose(x, *rules)
            out = cp.full(shape, float("nan"), x.dtype)
            for launch in EXPANDERS["sum"](f.to("cuda"), problem(f, 8, dtype, ("row", "row"), sm))(
                out.data.ptr, shape[1], 0
            ):
                launch()
            assert (out.get() == x).all(), repr(f)
            done += 1
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


def sums() -> int:
    """Sums of parts in one launch: every combination of parts and type, tiles in one task and in several."""
    done, usual = 0, spmm_sum.LEAST_WORK
    for (rules, dtype), least in itertools.product(
        itertools.product(PAIRS.values(), ("float32", "bfloat16")), (usual, 8)
    ):
        spmm_sum.LEAST_WORK = least
        for M, K, n in ((70, 130, 40), (200, 97, 136)):
            x = integers((M, K), dtype, done)
            B = np.random.default_rng(done).integers(-2, 3, (K, n)).astype(x.dtype)
            got = product(cp, decompose(x, *rules).to("cuda"), B, ("row", ("row", "col")[done % 2]), "float32", 3)
            assert (got == x.astype(np.float64) @ B.astype(np.float64)).all(), f"{rules} {dtype} {M}x{K}, n={n}"
            done += 1
    spmm_sum.LEAST_WORK = usual
    return done


def rests() -> int:
    """Tiles of C that are left over: a launch that does not wait for the one before it until its own tiles are stored."""
    done, usual = 0, expanding.rest_of
    vars(expanding)["rest_of"] = two_of_six
    names = ("64x64, 4 blocks rest in parts 3", "192x128 rest in parts 2")
    for (kernel, fmt, params), name, layout in itertools.product(RECORD_KERNELS, names, ("row", "col")):
        assert_rests_are_exact(kernel, fmt, params, name, layout)
        done += 2
    vars(expanding)["rest_of"] = usual
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
    tools, clean = ("memcheck", "racecheck"), True
    for tool in tools:
        if under(program, tool, "--planted").returncode != REPORTED:
            print(f"{tool} does not report the planted fault: nothing was checked", flush=True)
            return False
    print(f"{' and '.join(tools)} report the planted fault; ours:", flush=True)
    runs = list(itertools.product(tools, parts))
    with ThreadPoolExecutor(jobs) as pool:
        for (tool, part), done in zip(runs, pool.map(lambda run: under(program, *run), runs), strict=True):
            said = [line for line in done.stdout.splitlines() if line.startswith(part) or "SUMMARY" in line]
            print(f"  {tool} {'; '.join(said) or part}", flush=True)
            if done.returncode:
                clean = False
                print(done.stdout[-4000:], done.stderr[-4000:], f"exit code {done.returncode}", sep="\n", flush=True)
    return clean


def main() -> None:
    others = {
        **CONVERSIONS,
        "epilogues": (epilogues, "products"),
        "pieces": (pieces, "products"),
        "expansions": (expansions, "matrices"),
        "copies": (copies, "products"),
        "sums": (sums, "products"),
        "rests": (rests, "products"),
    }
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
