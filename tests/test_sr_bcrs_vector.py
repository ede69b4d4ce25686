"""SR-BCRS with 1 to 16 columns: what the kernel takes, its tiles, exact products on a GPU or the emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, equal, hopper, product
from test_kernels import on_device, problem

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime.column_panels import smem
from spformat.backends.cuda.sr_bcrs import spmm_sr_bcrs_vector as vector
from spformat.products.problem import Problem
from spformat.products.roofline import shared_limit

KERNEL = vector.SpmmSRBCRSVector()


def layer(M: int, K: int, n: int, dtype: str = "bfloat16", **changes: Any) -> Problem:
    """A tenth of the vectors of a linear layer, torch's layouts."""
    layouts, params = ("row", "row") if n == 1 else ("col", "col"), (("vector_length", 8), ("stride", 16))
    p = Problem.product("sr-bcrs", params, M, K, n, M * K // 10, dtype, dtype, dtype, *layouts, device="cuda", sm=90)
    return p.changed(**changes)


def drawn(seed: int, shape: tuple[int, int], density: float, length: int, dtype: str) -> np.ndarray[Any, Any]:
    """Small integers in columns of ``length`` rows, a fifth of them zero."""
    rng = np.random.default_rng(seed)
    keep = np.repeat(rng.random((shape[0] // length + 1, shape[1])) < density, length, axis=0)[: shape[0]]
    x = rng.integers(-3, 4, shape) * (keep & (rng.random(shape) < 0.8))
    return x.astype(VALUE_TYPES[dtype].numpy)


# ------------------------------------------------------------------ without a GPU


def test_what_it_takes() -> None:
    assert KERNEL.unsupported(layer(4096, 4096, 16)) == KERNEL.unsupported(layer(8, 110000, 1)) == []
    (refusal,) = KERNEL.unsupported(layer(4096, 4096, 17))
    assert refusal == "takes at most 16 columns, got up to 17"
    (refusal,) = KERNEL.unsupported(layer(64, 200000, 1))
    assert re.fullmatch(r"keeps columns of B in shared memory: K must be at most 11\d,\d{3}, got 200,000", refusal), (
        refusal
    )
    assert "float32" in "".join(KERNEL.unsupported(layer(64, 64, 1, "float32")))


def test_tiles_fit_and_have_as_many_columns_as_fit() -> None:
    limit = shared_limit(90)
    for K in (1, 300, 4096, 14336, 28000, 110000):
        for n in (1, 2, 7, 8, 16):
            p = layer(512, K, n)
            tiles = KERNEL.options(p)
            assert tiles
            for t in tiles:
                needed = smem(t.columns, p) + t.threads // 32 * 32 * t.columns * 4
                assert t.resident * (needed + 1024) <= limit + 1024
                assert t.resident * t.threads == (512 if t.columns == 8 else 1024)
            widest = max(t.columns for t in tiles)
            assert widest >= min(n, 8) or vector.tile(2 * widest, p) is None


@pytest.mark.parametrize("n", [1, 2, 4])
def test_it_is_chosen_for_few_columns(n: int) -> None:
    for size in (1024, 8192):
        assert sf.explain(layer(size, size, n, epilogue=True), backend="cuda").chosen == KERNEL.name


# ------------------------------------------------------------------ exact products

CASES = [
    # columns, M, K, N, vector_length, stride, layouts, gap, types
    (1, 331, 4001, 1, 8, 16, ("row", "row"), 0, "bfloat16", "bfloat16"),
    (1, 70, 2600, 1, 4, 5, ("col", "col"), 3, "float16", "float32"),
    (8, 331, 523, 8, 8, 16, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (8, 60, 12031, 7, 32, 16, ("row", "col"), 1, "float16", "float16"),
    (2, 300, 1523, 5, 3, 7, ("col", "row"), 8, "bfloat16", "float32"),
    (4, 300, 523, 16, 16, 4, ("row", "row"), 0, "float16", "float16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} columns {c[3]} {c[6]} {c[8]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    columns, M, K, N, length, stride, layouts, gap, dtype, out = case
    for density in (0.02, 0.3, 1):
        x = drawn(N, (M, K), density, length, dtype)
        B = np.random.default_rng(N).integers(-3, 4, (K, N)).astype(x.dtype)
        a = sf.convert(x, "sr-bcrs", vector_length=length, stride=stride)
        t = vector.tile(columns, problem(a, N, out, layouts, 90))
        assert t is not None
        assert_exact(product(KERNEL, t, a, B, out, layouts, gap), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
def test_the_epilogue_is_applied_once(layout: str) -> None:
    cp, rng = hopper(), np.random.default_rng(2)
    x = drawn(2, (77, 501), 0.2, 8, "bfloat16")
    B = rng.integers(-3, 4, (501, 10)).astype(x.dtype)
    bias, before = rng.integers(-9, 9, 77).astype(np.float32), rng.integers(-9, 9, (77, 10)).astype(np.float32)
    a = sf.convert(x, "sr-bcrs").validate().to("cuda")
    p = problem(a, 10, "float32", (layout, layout), 90).changed(epilogue=True)
    plan, there = KERNEL.plan(a, p), on_device(cp, B, layout, 3)
    out = cp.asarray(np.ascontiguousarray(before.T)).T if layout == "col" else cp.asarray(before)
    for alpha, beta in ((2.0, -1.0), (0.0, 1.0), (1.0, 0.0)):
        out[:] = cp.asarray(before)
        plan(there, out=out, alpha=alpha, beta=beta, bias=cp.asarray(bias))
        wanted = alpha * (x.astype(np.float64) @ B.astype(np.float64)) + beta * before + bias[:, None]
        np.testing.assert_array_equal(out.get(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("length", [2, 8])
def test_places_without_values_meet_no_infinity(length: int, layout: str) -> None:
    """With vectors of two rows a slot has rows of other vectors, which are zeros that the format does not store."""
    rng = np.random.default_rng(3)
    x = drawn(3, (136, 1036), 0.1, length, "bfloat16")
    B = rng.integers(-3, 4, (1036, 6)).astype(x.dtype)
    B[5, 3:], B[70, 1], B[71, 2] = np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        every = x.astype(np.float32)[:, :, None] * B.astype(np.float32)[None]
    wanted = np.where((x != 0)[:, :, None], every, 0).sum(axis=1).astype(x.dtype)
    a = sf.convert(x, "sr-bcrs", vector_length=length, stride=16)
    t = vector.tile(8, problem(a, 6, "bfloat16", (layout, layout), 90))
    assert equal(product(KERNEL, t, a, B, "bfloat16", (layout, layout), 0), wanted)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, source="sr_bcrs/spmm_sr_bcrs_vector.cu")
stand_in.install(90)
import numpy as np
from exact import equal, product
from test_sr_bcrs_vector import KERNEL, drawn, problem, sf, vector

x = drawn(0, (200, 701), 0.3, 8, "bfloat16")
B = np.random.default_rng(0).integers(-3, 4, (701, 5)).astype(x.dtype)
B[350, 4] = np.inf
with np.errstate(invalid="ignore"):
    every = x.astype(np.float32)[:, :, None] * B.astype(np.float32)[None]
wanted = np.where((x != 0)[:, :, None], every, 0).sum(axis=1).astype(x.dtype)
a = sf.convert(x, "sr-bcrs")
t = vector.tile(8, problem(a, 5, "bfloat16", ("col", "col"), 90))
three_runs(lambda: equal(product(KERNEL, t, a, B, "bfloat16", ("col", "col"), 1), wanted), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  __syncthreads();\n\n  for (i64 panel", "  for (i64 panel"),
        ("    __syncthreads();\n    for (int i", "    for (int i"),
        ("step + 1 < steps, eight", "true, eight"),
        ("if (!isfinite(total))", "if (false)"),
        ("fold<2, NC>(sum, lane), ", ""),
    ],
    ids=["B not waited for", "sums not waited for", "a step past the last", "zeros times infinity", "lanes"],
)
def test_a_planted_defect_is_found(old: str, new: str) -> None:
    said = printed(PLANTED.format(old=old, new=new))
    assert re.search("DIFFERENT|outside|behind", said), said


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
def test_without_a_defect_all_is_equal() -> None:
    assert printed(PLANTED.format(old="", new="")).split() == ["equal"] * 3
