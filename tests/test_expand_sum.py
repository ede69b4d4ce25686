"""Sums of matrices written as dense ones: which are taken, every bit, and exact products on a GPU or the emulated one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import emulator
import numpy as np
import pytest
from cases import codes
from graphs import assert_captured
from test_kernels import LAYOUTS, Guarded, on_device
from test_spmm_sum import described

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, bits, nonzero_mask
from spformat.backends.cuda.csr import overlay_csr
from spformat.backends.cuda.dense.expand_then_dense import EXPANDERS, OPERATIONS, SINGLE, ExpandThenDense
from spformat.backends.cuda.ell_buckets.expand_ell_buckets import derived_bytes
from spformat.backends.cuda.runtime.expansion import leading_dimension
from spformat.backends.cuda.sum.expand_sum import further_parts, written_whole
from spformat.dispatch.composed import SumOfParts
from spformat.formats.base import Format
from spformat.formats.sum import Sum
from spformat.products.problem import Operand, Problem
from spformat.products.roofline import device_of

KERNEL, COMPOSED = ExpandThenDense(), SumOfParts()
PARAMS: dict[str, dict[str, Any]] = {
    "bsr": {"blocksize": (4, 3)}, "dbsr": {"blocksize": (3, 8)}, "sr-bcrs": {"vector_length": 4, "stride": 4},
    "vector-nm": {"n": 2, "m": 4, "vector_length": 4}, "ell-buckets": {"widths": (2, 16)},
}  # fmt: skip
SUMS = {
    "two_four_csr": ("two-four", "csr"),
    "csr_two_four": ("csr", "two-four"),
    "csr_csr": ("csr", "csr"),
    "bsr_ell": ("bsr", "ell-buckets"),
    "ell_dbsr_csr": ("ell-buckets", "dbsr", "csr"),
    "ell_ell_csr": ("ell-buckets", "ell-buckets", "csr"),
    "sr_bcrs_csr": ("sr-bcrs", "csr"),
    "csr_bitmask_csr": ("csr", "bitmask", "csr"),
    "vector_csr": ("vector-nm", "csr"),
}
"""Formats of the parts; wherever the one stands that has to be written whole."""
SHAPES = ((37, 90), (5, 3000), (1203, 6), (1, 1), (0, 7), (7, 0))
TYPES = ("float64", "float32", "bfloat16", "float16", "int8")


def csr_of(x: np.ndarray[Any, Any], stored: np.ndarray[Any, Any]) -> sf.CSR:
    """The elements of x where ``stored``, zeros among them, as a CSR."""
    indptr = np.concatenate(([0], np.cumsum(stored.sum(1)))).astype(np.int32)
    arrays = {"indptr": indptr, "indices": np.nonzero(stored)[1].astype(np.int32), "data": x[stored]}
    return sf.CSR(shape=x.shape, **arrays).validate()


def placed(name: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Where a part has nonzeros, as its format can store them."""
    if 0 in shape:
        return np.zeros(shape, bool)
    M, K = shape
    if name in ("two-four", "vector-nm"):
        groups = -(-M // 4) if name == "vector-nm" else M
        keep = (rng.random((groups, -(-K // 4), 4)).argsort(axis=2) < 2).reshape(groups, -1)[:, :K]
        return np.repeat(keep, 4, axis=0)[:M] if name == "vector-nm" else keep
    keep = rng.random(shape) < 0.2
    keep[M // 2] = M > 1
    keep[: M // 3] = False
    return keep


def sum_of(names: tuple[str, ...], shape: tuple[int, int], dtype: str, seed: int, value: Any = codes) -> Sum:
    """Parts with values of any bits. Those in CSR or ELL buckets also store zeros of both signs, many where another
    part has a value."""
    rng = np.random.default_rng(seed)
    free, parts = np.ones(shape, bool), []
    for i in sorted(range(len(names)), key=lambda i: names[i] in overlay_csr.OVERLAYS):
        name, taken = names[i], placed(names[i], shape, rng) & free
        free &= ~taken
        x = value(dtype, taken, seed + i)
        if name in overlay_csr.OVERLAYS:
            part: Format = csr_of(x, taken | (rng.random(shape) < 0.3))
            part = part if name == "csr" else sf.convert(part, name, **PARAMS[name])
        else:
            x[~taken] = 0
            part = sf.convert(x, name, **PARAMS.get(name, {}))
        parts.append((i, part))
    return Sum.from_parts(part for _, part in sorted(parts, key=lambda pair: pair[0]))


def small(dtype: str, taken: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).choice([-3, -2, -1, 1, 2, 3], taken.shape)
    return np.where(taken, drawn, 0).astype(VALUE_TYPES[dtype].numpy)


def expected_bits(s: Sum) -> Any:
    """The whole part as it is, and over it the nonzeros of the others."""
    whole = written_whole([part.name for part in s.parts])
    wanted = bits(s.parts[whole].to_dense()).copy()
    for i, part in enumerate(s.parts):
        over = part.to_dense()
        if i != whole:
            wanted[nonzero_mask(over)] = bits(over)[nonzero_mask(over)]
    nonzeros = nonzero_mask(s.to_dense())
    assert (nonzero_mask(wanted.view(s.dtype)) == nonzeros).all()
    assert (wanted[nonzeros] == bits(s.to_dense())[nonzeros]).all()
    return wanted


# ------------------------------------------------------------------ without a GPU


def outlined(n: int, *parts: tuple[str, dict[str, Any], int], **changes: Any) -> Problem:
    """A bfloat16 product of a sum of 4096 x 4096 on a GPU of sm_90 that need not exist. parts: (format, parameters,
    stored)"""
    shape, dtype = (4096, 4096), "bfloat16"
    operands = tuple(
        Operand(name, shape, dtype, tuple(params.items()), stored, device="cuda") for name, params, stored in parts
    )
    types, stored = (dtype,) * 3, sum(x.stored for x in operands)
    return Problem.product("sum", (), *shape, n, stored, *types, device="cuda", sm=90, parts=operands).changed(
        **changes
    )


Part = tuple[str, dict[str, Any], int]
TWO_FOUR: Part = ("two-four", {"meta_order": "ldmatrix"}, 4096 * 2048)
ITEMS: Part = ("csr", {}, 4096 * 41)
BLOCKS: Part = ("bsr", {"blocksize": (32, 32)}, 4096 * 410)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_wide_products_of_a_sum_are_expanded_and_narrow_ones_are_not(operation: str) -> None:
    for main, narrow in ((TWO_FOUR, "composed.sum_of_parts"), (BLOCKS, "cuda.spmm_sum_rows")):
        for n, chosen in ((8, narrow), (1024, KERNEL.name), (4096, KERNEL.name)):
            if operation == "spmm" or n == 4096:  # what a transposed product is composed of takes longer
                trace = sf.explain(outlined(n, main, ITEMS, operation=operation))
                assert trace.chosen == chosen, str(trace)


def test_the_composed_sum_counts_that_c_is_read_again_and_rounded() -> None:
    p = outlined(1024, TWO_FOUR, ITEMS)
    first, second = COMPOSED.problems(p)
    parts = sum(sf.explain(q).expected_us or 0 for q in (first, second))
    sums = (sf.explain(q, backend=COMPOSED.name).expected_us for q in (p, p.changed(out_dtype="float32")))
    passes = tuple((us or 0) - parts for us in sums)
    read, rounded = 4 * 4096 * 1024, 6 * 4096 * 1024
    memory = 1e-6 * device_of(p).memory
    assert passes == pytest.approx((2 + (read + rounded) / memory, read / memory))


def test_each_further_part_costs_a_launch_and_a_sector_for_an_item() -> None:
    one, two = outlined(8, TWO_FOUR, ITEMS), outlined(8, TWO_FOUR, ITEMS, ITEMS)
    device = device_of(one)
    (launches, memory), (more, further) = (KERNEL.quantities(p, None, device) for p in (one, two))
    assert (launches, more) == (2, 3)
    nbytes = ITEMS[2] * (32 + 2 + 4) + 4 * 4097
    assert (further - memory) * device.memory == pytest.approx(1e6 * nbytes)
    assert len(KERNEL.quantities(one, None, device)) == len(KERNEL.terms)


def test_what_is_refused() -> None:
    assert KERNEL.unsupported(outlined(8, TWO_FOUR, ITEMS)) == []
    for parts, said in (
        ((TWO_FOUR, ITEMS, BLOCKS), "takes one part that is not in csr or ell-buckets, got part 0 (two-four), part 2 (bsr)"),
        ((TWO_FOUR, ("coo", {}, 7)), "not part 1 (coo)"),
        ((("sum", {}, 7), ITEMS), "not part 0 (sum)"),
        ((), "the problem names no parts"),
    ):  # fmt: skip
        assert said in "; ".join(KERNEL.unsupported(outlined(8, *parts)))


def test_workspace_and_the_part_that_is_written_whole() -> None:
    ell: Part = ("ell-buckets", {}, 1000)
    assert KERNEL.workspace_bytes(outlined(8, TWO_FOUR, ell)) == 4096 * 4096 * 2 + derived_bytes(4096, 1000)
    for names in SUMS.values():
        whole = written_whole(names)
        assert all(name in overlay_csr.OVERLAYS for i, name in enumerate(names) if i != whole)
        assert names[whole] in SINGLE
    assert [x.format for x in further_parts(outlined(8, ITEMS, TWO_FOUR))] == ["csr"]
    assert [x.format for x in further_parts(outlined(8, ITEMS, ell))] == ["ell-buckets"]


def test_the_sums_below_store_zeros_over_values() -> None:
    s = sum_of(SUMS["two_four_csr"], (37, 90), "float16", 1)
    two_four: Any = s.parts[0]
    csr: Any = s.parts[1]
    rows, x = csr.rows(), two_four.to_dense()
    over = ~nonzero_mask(csr.data) & nonzero_mask(x)[rows, csr.indices]
    assert over.sum() > 100
    assert len(set(bits(csr.data)[over].tolist())) == 2, "+0 and -0"
    assert np.isnan(csr.data).any()
    ell: Any = sum_of(SUMS["bsr_ell"], (37, 90), "float16", 1).parts[1]
    assert (~nonzero_mask(ell.data[ell.source != -1])).sum() > 100


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    "chosen", ["bits and float16 and (two_four_csr or bsr_ell or csr_two_four)", "exact and two_four_csr"]
)
def test_on_the_emulated_device(chosen: str) -> None:
    """Tests for a GPU, below, in a process of its own: few, as each instance takes seconds to build."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "emulator.plugin", "-p", "no:cacheprovider", "-m", "gpu"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, __file__, "-k", chosen], capture_output=True, text=True, check=False, env=env, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"[1-9]\d* passed", done.stdout.splitlines()[-1]), done.stdout


# ------------------------------------------------------------------ on a GPU


@pytest.fixture(scope="module")
def cp() -> Any:
    return pytest.importorskip("cupy")


def on_this_gpu(cp: Any, s: Sum, n: int, out: str = "", **more: Any) -> Problem:
    return described(s, n, out, **more).changed(sm=int(cp.cuda.Device().compute_capability))


def widened(f: Format) -> Format:
    """The same CSR with int64 indices, which only larger ones have; other formats as they are."""
    if f.name != "csr":
        return f
    out = f.with_arrays()
    for key in ("indptr", "indices"):
        object.__setattr__(out, key, f.arrays()[key].astype(np.int64))
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("names", SUMS)
def test_expanded_bits_are_those_of_the_host(names: str, dtype: str, cp: Any) -> None:
    done, guard = 0, 256
    for seed, shape in enumerate(SHAPES):
        if any(dtype not in x.value_dtypes for x in sf.FORMATS if x.name in SUMS[names]):
            pytest.skip(f"a part takes no {dtype}")
        s = sum_of(SUMS[names], shape, dtype, seed)
        wanted, (M, K), g = expected_bits(s), shape, s.to("cuda")
        wide = Sum.trusted(shape=shape, parts=tuple(map(widened, g.parts)))
        ld = leading_dimension(K, s.dtype.itemsize)
        for x, pitch, offset in ((g, ld, 0), (wide, max(1, K), 1)):
            raw = cp.full(2 * guard + offset + M * pitch, 0, wanted.dtype)
            raw.view("u1").fill(0x5A)
            at = raw.data.ptr + (guard + offset) * raw.itemsize
            for launch in EXPANDERS["sum"](x, on_this_gpu(cp, s, 1))(at, pitch, 0):
                launch()
            got = raw.get()
            body = got[guard + offset : guard + offset + M * pitch].reshape(M, pitch)
            assert (body[:, :K] == wanted).all(), f"{s!r} ld={pitch}"
            assert (got[: guard + offset].view("u1") == 0x5A).all(), f"{s!r} wrote before the array"
            assert (got[guard + offset + M * pitch :].view("u1") == 0x5A).all(), f"{s!r} wrote behind the array"
            done += 1
    assert done == 2 * len(SHAPES)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("names", SUMS)
def test_products_are_exact(names: str, operation: str, cp: Any) -> None:
    for i, (dtype, shape) in enumerate((("bfloat16", (70, 130)), ("float16", (33, 1025)), ("float32", (129, 40)))):
        s = sum_of(SUMS[names], shape, dtype, i, small)
        x = s.to_dense().astype(np.float64)
        x, g = x.T if operation == "spmm_transposed" else x, s.to("cuda")
        for j, n in enumerate((0, 1, 17, 64)):
            layouts, pad = LAYOUTS[(i + j) % 4], 3 * (j % 2)
            p = on_this_gpu(cp, s, n, "float32").changed(
                operation=operation, b_layout=layouts[0], out_layout=layouts[1], n=n
            )
            assert KERNEL.unsupported(p) == []
            B = np.random.default_rng(j).integers(-2, 3, (x.shape[1], n)).astype(s.dtype)
            guarded = Guarded(cp, (x.shape[0], n), np.float32, layouts[1], pad)
            plan, b = KERNEL.plan(g, p), on_device(cp, B, layouts[0], pad)
            for _ in range(2):
                guarded.out.fill(float("nan"))
                plan(b, out=guarded.out)
                assert (guarded.out.get() == x @ B.astype(np.float64)).all(), f"{s!r} {operation} n={n} {layouts}"
                assert guarded.intact(), f"{s!r} {operation} n={n} {layouts}: wrote outside C"


@pytest.mark.gpu
def test_a_graph_captures_the_whole_product(cp: Any) -> None:
    s = sum_of(SUMS["two_four_csr"], (70, 130), "float16", 3, small)
    B = np.random.default_rng(1).integers(-2, 3, (130, 33)).astype(np.float16)
    plan = KERNEL.plan(s.to("cuda"), on_this_gpu(cp, s, 33, "float32"))
    wanted = s.to_dense().astype(np.float64) @ B
    assert_captured(cp, plan, cp.asarray(B), cp.empty((70, 33), np.float32), wanted)
