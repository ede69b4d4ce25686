"""Every GPU kernel against float64, over cases, types, layouts and N: exact integers first, then K-scaled bounds.

A kernel is tried with what its own ``unsupported`` accepts. C is filled with NaN and stands between guard
bands; rows of B that no nonzero uses hold infinity; the same call twice gives the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from cases import CASES, params_of
from graphs import assert_captured
from laws import integers

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, nonzero_mask
from spformat.backends.cuda import KERNELS
from spformat.backends.vendor import BACKEND as VENDOR
from spformat.formats.base import Format
from spformat.products.problem import Problem, result_dtype

pytestmark = pytest.mark.gpu

GUARD = 4096
"""Poisoned bytes before and after C."""

ALL = (*(k for k in KERNELS if k.formats != {"sum"}), *VENDOR.kernels())
"""Sums: test_spmm_sum.py."""
NS = (0, 1, 7, 17, 64, 257, 1000)
WIDE = (6144, 6200)
"""For kernels that leave narrow products to another one."""
PARTS = 4
LAYOUTS = (("row", "row"), ("col", "row"), ("row", "col"), ("col", "col"))

BIG: dict[str, tuple[dict[str, Any], ...]] = {
    "bsr": ({"blocksize": (32, 32)}, {"blocksize": (64, 64)}, {"blocksize": (128, 128)}, {"blocksize": (48, 80)}),
    "dbsr": ({"blocksize": (32, 32)}, {"blocksize": (64, 64)}),
    "sr-bcrs": ({"vector_length": 16, "stride": 8}, {"vector_length": 32, "stride": 16}),
    "vector-nm": tuple(
        {"n": n, "m": m, "vector_length": length}
        for n, m, length in ((1, 2, 8), (1, 4, 16), (3, 8, 32), (8, 32, 32), (12, 32, 64), (32, 64, 128), (5, 7, 256))
    ),
}
"""Parameters tried on the larger matrices below, beside those of the cases."""


@pytest.fixture(scope="module")
def cp() -> Any:
    return pytest.importorskip("cupy")


def problem(f: Format, n: int, out_dtype: str, layouts: tuple[str, str], sm: int) -> Problem:
    return Problem.product(
        f.name, tuple(f.params().items()), *f.shape, n, f.stored, f.dtype.name, f.dtype.name, out_dtype,
        *layouts, device="cuda", sm=sm,
    )  # fmt: skip


def matrix(
    rng: np.random.Generator, name: str, params: dict[str, Any], dtype: str, shape: tuple[int, int] = (331, 523)
) -> np.ndarray[Any, Any]:
    """A larger matrix that fits the format; by default no dimension is a multiple of anything."""
    M, K = shape
    x = rng.choice([-3, -2, -1, 1, 2, 3], (M, K)).astype(VALUE_TYPES[dtype].numpy)
    if name == "vector-nm":
        n, m, L = params["n"], params["m"], params["vector_length"]
        groups, windows = -(-M // L), -(-K // m)
        keep = rng.random((groups, windows, m)).argsort(axis=2) < n
        keep = np.repeat(keep.reshape(groups, -1), L, axis=0)[:M, :K]
    elif name == "two-four":
        keep = (rng.random((M, -(-K // 4), 4)).argsort(axis=2) < 2).reshape(M, -1)[:, :K]
    elif "blocksize" in params:
        R, C = params["blocksize"]
        keep = np.kron(rng.random((-(-M // R), -(-K // C))) < 0.4, np.ones((R, C), bool))[:M, :K]
    else:
        keep = rng.random((M, K)) < 0.1
        keep[100:180] = False
        keep[17] = True
    keep[:, 50:60] = False  # columns no nonzero uses
    return np.where(keep, x, np.zeros((), x.dtype))


class Guarded:
    """An out array of NaN between guard bands of 0xA5."""

    def __init__(self, cp: Any, shape: tuple[int, int], dtype: Any, layout: str, pad: int) -> None:
        rows, cols = shape
        lines, line = (rows, cols) if layout == "row" else (cols, rows)
        size = np.dtype(dtype).itemsize
        self.raw = cp.full(2 * GUARD + lines * (line + pad) * size, 0xA5, cp.uint8)
        body = self.raw[GUARD : self.raw.size - GUARD].view(dtype).reshape(lines, line + pad)
        whole = body[:, :line]
        self.out = whole if layout == "row" else whole.T
        self.out.fill(float("nan"))
        self.body, self.line = body, line

    def intact(self) -> bool:
        ends = bool((self.raw[:GUARD] == 0xA5).all()) and bool((self.raw[-GUARD:] == 0xA5).all())
        gap = np.ascontiguousarray(self.body.get()[:, self.line :]).view(np.uint8)
        return ends and bool((gap == 0xA5).all())


def on_device(cp: Any, B: np.ndarray[Any, Any], layout: str, pad: int) -> Any:
    rows, cols = B.shape
    if layout == "row":
        whole = cp.zeros((rows, cols + pad), B.dtype)
        whole[:, :cols] = cp.asarray(B)
        return whole[:, :cols]
    whole = cp.zeros((cols, rows + pad), B.dtype)
    whole[:, :rows] = cp.asarray(np.ascontiguousarray(B.T))
    return whole[:, :rows].T


def attempts(kernel: Any, sm: int) -> Iterator[tuple[Format, np.ndarray[Any, Any]]]:
    """Formats of cases and of larger matrices that this kernel may take."""
    rng = np.random.default_rng(5)
    for fmt in sf.FORMATS:
        if fmt.name not in kernel.formats:
            continue
        for dtype in ("float32", "float16", "bfloat16", "float64"):
            if dtype not in fmt.value_dtypes:
                continue
            drawn = [(p, integers(make(dtype))) for p in params_of(fmt.name) for make in CASES.values()]
            big = (*params_of(fmt.name)[:2], *BIG.get(fmt.name, ()))
            drawn += [(p, matrix(rng, fmt.name, p, dtype)) for p in big]
            if kernel.name.endswith("sm90a") and dtype in ("float16", "bfloat16"):  # they refuse small products
                drawn += [(p, matrix(rng, fmt.name, p, dtype, (1157, 1192))) for p in big]
            for params, x in drawn:
                try:
                    f = fmt.from_dense(x, **params)
                except sf.errors.StructureError:
                    continue
                if not refuses(kernel, f, (*NS, *WIDE), sm):
                    yield f, x


def refuses(kernel: Any, f: Format, ns: tuple[int, ...], sm: int) -> bool:
    """Whether no N of these is taken."""
    p = (problem(f, n, result_dtype(f.dtype.name, f.dtype.name), LAYOUTS[0], sm) for n in ns)
    return all(kernel.unsupported(each) for each in p)


@pytest.mark.parametrize("part", range(PARTS))  # so that several processes share the matrices of a kernel
@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_integers_are_exact(kernel: Any, part: int, cp: Any) -> None:
    sm = int(cp.cuda.Device().compute_capability)
    rng = np.random.default_rng(11)
    ran = 0
    for f, x in itertools.islice(attempts(kernel, sm), part, None, PARTS):
        g = f.to("cuda")
        unused = ~nonzero_mask(x).any(axis=0)
        # A stored zero may meet infinity: only formats and rows where nothing is stored can promise its absence.
        sparse = f.name in ("csr", "bitmask", "ell-buckets") and not kernel.multiplies_zeros
        poison = unused if sparse else np.zeros_like(unused)
        big = x.shape[0] > 300
        for i, n in enumerate(WIDE if refuses(kernel, f, NS, sm) else NS if big else (1, 17)):
            layouts = LAYOUTS[(i + x.shape[0]) % 4]
            for out_dtype in {result_dtype(f.dtype.name, f.dtype.name), "float32"}:
                p = problem(f, n, out_dtype, layouts, sm)
                if kernel.unsupported(p):
                    continue
                line = n if layouts[1] == "row" else x.shape[0]
                pad = (0, 3, 8, -line % 8)[(i + x.shape[1]) % 4]  # the last: lines on 16-byte boundaries
                B = rng.integers(-2, 3, (x.shape[1], n)).astype(f.dtype)
                wanted = x.astype(np.float64) @ B.astype(np.float64)
                B[poison] = np.inf
                dev = on_device(cp, B, layouts[0], pad)
                guarded = Guarded(cp, (x.shape[0], n), VALUE_TYPES[out_dtype].numpy, layouts[1], pad)
                plan = kernel.plan(g, p)
                try:
                    plan(dev, out=guarded.out)
                except sf.errors.UsageError:
                    continue  # a vendor library that wants other alignment says so
                first = guarded.out.get()
                where = f"{kernel.name} {f!r} n={n} {layouts} out={out_dtype} pad={pad} {plan.tile}"
                rounded = wanted.astype(VALUE_TYPES[out_dtype].numpy)
                bad = np.argwhere(first.astype(np.float64) != rounded.astype(np.float64))
                assert not len(bad), f"{where}: {len(bad)} wrong, first {bad[0]}: {first[tuple(bad[0])]}"
                assert guarded.intact(), f"{where}: wrote outside C"
                for _ in range(3):  # the launches that the plan keeps, run again
                    guarded.out.fill(float("nan"))
                    plan(dev, out=guarded.out)
                    assert (guarded.out.get().view(np.uint8) == first.view(np.uint8)).all(), f"{where}: bits differ"
                ran += 1
    assert ran or kernel.name == "vendor.cusparselt", f"{kernel.name}: nothing to try"


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
@pytest.mark.parametrize("draw", ["normal", "positive", "wide"])
def test_errors_stay_under_the_bound(kernel: Any, draw: str, cp: Any) -> None:
    """|C - ref| <= u_out |C| + 2 (ceil(K/16) + 1) 2^-24 (|A| @ |B|), the bound of blocked float32 sums.

    Half a subnormal step of float16 comes on top, where a result is that small.
    """
    sm = int(cp.cuda.Device().compute_capability)
    rng = np.random.default_rng(12)
    worst = 0.0
    for f, x in attempts(kernel, sm):
        if x.shape[0] < 300 or f.dtype.name == "float64":
            continue
        size = {"normal": rng.standard_normal, "positive": rng.random}.get(draw)
        v = size(x.shape) if size else rng.standard_normal(x.shape) * 2.0 ** rng.integers(-8, 9, x.shape)
        x = np.where(nonzero_mask(x), v.astype(f.dtype), np.zeros((), f.dtype))
        g = type(f).from_dense(x, **f.params()).to("cuda")
        n = WIDE[0] if refuses(kernel, f, (136,), sm) else 136
        p = problem(f, n, f.dtype.name, LAYOUTS[0], sm)
        if kernel.unsupported(p):
            continue
        B = rng.standard_normal((x.shape[1], n)).astype(f.dtype)
        try:
            C = kernel.plan(g, p)(cp.asarray(B)).get().astype(np.float64)
        except sf.errors.UsageError:
            continue  # a vendor library that wants other alignment says so
        A64, B64 = x.astype(np.float64), B.astype(np.float64)
        ref, magnitude = A64 @ B64, np.abs(A64) @ np.abs(B64)
        unit, tiny = {"float32": (2.0**-24, 0), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 0)}[f.dtype.name]
        bound = unit * np.abs(ref) + tiny + 2 * (-(-x.shape[1] // 16) + 1) * 2.0**-24 * magnitude
        if f.dtype.name == "float32":
            bound += getattr(kernel, "product_error", 0.0) * magnitude
        ratio = np.max(np.abs(C - ref) / np.maximum(bound, 1e-30))
        assert ratio <= 1, f"{kernel.name} {f!r}: error is {ratio:.2f} of the bound"
        worst = max(worst, float(ratio))
    print(f"{kernel.name} {draw}: worst error {worst:.2f} of the bound")


@pytest.mark.parametrize("spec", ["csr", "ell-buckets:max_width=64"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_long_rows_are_cut_and_whoever_comes_last_adds_the_pieces(cp: Any, spec: str, dtype: str) -> None:
    """Exact for every width, one after another on one stream: each leaves the counters as the next one needs them."""
    rng, (M, K) = np.random.default_rng(13), (60, 30_011)
    keep = rng.random((M, K)) < 0.001
    for row, items in {0: 30_011, 7: 2049, 8: 4096, 30: 9000, 59: 20_000}.items():
        keep[row, rng.permutation(K)[:items]] = True
    keep[31] = False
    x = np.where(keep, rng.integers(1, 3, (M, K)) * np.where(np.arange(K) % 2, 1, -1), 0).astype(dtype)
    a = sf.convert(x, spec).to("cuda")
    exact = x.astype(np.float64)
    other = cp.cuda.Stream(non_blocking=True)
    for n in (1, 7, 32, 130, 512, 3, 32, 1000, 130):
        B = rng.integers(-1, 2, (K, n)).astype(dtype)
        wanted = (exact @ B.astype(np.float64)).astype("float32")
        dev = cp.asarray(B)
        plan = sf.plan(a, B=dev, out=cp.empty((M, n), "float32"))
        for stream in (cp.cuda.Stream.null, other, cp.cuda.Stream.null):
            cp.cuda.runtime.deviceSynchronize()
            with stream:
                for _ in range(3):
                    out = cp.full((M, n), float("nan"), "float32")
                    plan(dev, out=out)
                    assert (out.get() == wanted).all(), f"{plan.kernel} {plan.tile} n={n}"


def test_refusals_before_launch(cp: Any) -> None:
    x = integers(CASES["even"]("float16"))
    a = sf.convert(x, "csr").to("cuda")
    B = cp.ones((128, 16), cp.float16)
    with pytest.raises(ValueError, match="B: expected"):
        sf.spmm(a, B[:100])
    square, both = sf.convert(x[:, :64], "csr").to("cuda"), cp.ones((64, 16), cp.float16)
    with pytest.raises(ValueError, match="overlaps"):
        sf.spmm(square, both, out=both)
    with pytest.raises(sf.errors.UsageError, match="nothing is copied"):
        sf.spmm(a, cp.asnumpy(B))
    with pytest.raises(sf.errors.UsageError, match="nothing is copied"):
        sf.spmm(sf.convert(x, "csr"), B)
    hostile = a.with_arrays(indices=cp.full(a.indices.shape, 10**6, a.indices.dtype))
    with pytest.raises(sf.errors.IndexBoundsError):
        sf.spmm(hostile, B)
    assert float(cp.ones(1)[0]) == 1.0  # the context is alive


def test_streams_and_graphs(cp: Any) -> None:
    x = integers(CASES["blocks"]("bfloat16"))
    B = np.random.default_rng(1).integers(-2, 3, (70, 24)).astype(x.dtype)
    wanted = x.astype(np.float64) @ B.astype(np.float64)
    for name in ("csr", "ell-buckets", "bsr:blocksize=16x16", "dbsr:blocksize=16x16", "sr-bcrs", "bitmask"):
        a, dev = sf.convert(x, name).to("cuda"), cp.asarray(B)
        out = cp.empty((80, 24), x.dtype)
        assert_captured(cp, sf.plan(a, B=dev, out=out), dev, out, wanted, captures=2)


def test_converters_give_the_same_bits_on_the_device(cp: Any) -> None:
    for fmt in sf.FORMATS:
        for params in params_of(fmt.name):
            for case, make in CASES.items():
                for dtype in ("float32", "bfloat16", "float16"):
                    x = make(dtype)
                    try:
                        host = fmt.from_dense(x, **params)
                    except sf.errors.StructureError as e:
                        with pytest.raises(sf.errors.StructureError) as again:
                            fmt.from_dense(cp.asarray(x), **params)
                        if e.unit != "dtype":
                            assert again.value.fields == e.fields
                        continue
                    where = f"{fmt.name} {params} {case} {dtype}"
                    device = fmt.from_dense(cp.asarray(x), **params)
                    assert device == host, where
                    assert device.validate().to_csr() == host.to_csr(), where
                    assert fmt.from_csr(host.to_csr().to("cuda"), **params) == fmt.from_csr(host.to_csr(), **params)
                    assert device.to_dense().get().tobytes() == host.to_dense().tobytes(), where


@pytest.mark.parametrize("large", ["C", "B"])
@pytest.mark.parametrize("fmt", ["csr", "ell-buckets", "bsr", "dbsr", "sr-bcrs", "vector-nm", "two-four", "bitmask"])
def test_offsets_past_two_to_the_31(fmt: str, large: str, cp: Any) -> None:
    """C of 2.2e9 elements, or B of as many: every kernel that accepts, checked at both ends and round 2^31."""
    rng = np.random.default_rng(8)
    N = 33_000
    M, K = (67_000, 64) if large == "C" else (96, 67_008)
    keep = (rng.random((M, K // 4, 4)).argsort(axis=2) < 2).reshape(M, K)
    keep &= rng.random((M, K)) < (1.0 if large == "C" else 0.02)
    bfloat16 = VALUE_TYPES["bfloat16"].numpy
    x = np.where(keep, rng.integers(1, 4, (M, K)), 0).astype(bfloat16)
    params = {"vector-nm": {"n": 2, "m": 4, "vector_length": 1}, "bsr": {"blocksize": (64, 64)}}.get(fmt, {})
    a = sf.convert(x, fmt, **params).to("cuda")
    B = cp.random.default_rng(9).integers(-2, 3, (K, N), dtype=np.int8).astype(bfloat16)
    assert max(M * N, K * N) > 2**31
    edge = 2**31 // N
    rows = np.r_[0:40, edge - 20 : edge + 20, M - 40 : M] if large == "C" else np.arange(M)
    A32 = cp.asarray(x[rows].astype(np.float32))
    out = cp.empty((M, N), bfloat16)
    tried = 0
    for kernel in KERNELS:
        p = problem(a, N, "bfloat16", LAYOUTS[0], int(cp.cuda.Device().compute_capability))
        if fmt not in kernel.formats or kernel.unsupported(p):
            continue
        out.fill(float("nan"))
        kernel.plan(a, p)(B, out=out)
        for at in range(0, N, 4096):
            wanted = (A32 @ B[:, at : at + 4096].astype(np.float32)).astype(bfloat16)
            got = out[cp.asarray(rows), at : at + 4096]
            assert bool((got.view(np.uint16) == wanted.view(np.uint16)).all() or (got == wanted).all()), kernel.name
        tried += 1
    assert tried
    del out, B, a
    cp.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("fmt", ["csr", "ell-buckets", "bsr", "dbsr", "sr-bcrs", "vector-nm", "two-four", "bitmask"])
def test_matrices_of_more_than_two_to_the_31_elements(fmt: str, cp: Any) -> None:
    """A of 2.2e9 elements, a few nonzeros all over it and in its corners: every kernel that accepts is exact."""
    rng = np.random.default_rng(10)
    M, K, N = 36_000, 60_008, 16
    at = np.unique(np.r_[rng.integers(0, M * (K // 4), 20_000), 0, 2**31 // 4 - 1, 2**31 // 4, M * (K // 4) - 1])
    keys = 4 * at + rng.integers(0, 4, at.size)  # one nonzero a group of four columns
    values = rng.integers(1, 4, at.size).astype(VALUE_TYPES["bfloat16"].numpy)
    csr = sf.CSR.from_coordinates((M, K), keys // K, keys % K, values)
    params = {"vector-nm": {"n": 2, "m": 4, "vector_length": 1}, "bsr": {"blocksize": (64, 64)}}.get(fmt, {})
    a = sf.convert(csr.to("cuda"), fmt, **params)
    B = rng.integers(-2, 3, (K, N)).astype(values.dtype)
    plain = scipy.sparse.csr_array((values.astype(np.float64), (keys // K, keys % K)), (M, K))
    wanted = plain @ B.astype(np.float64)
    tried = 0
    for kernel in KERNELS:
        for layouts in LAYOUTS:
            p = problem(a, N, "bfloat16", layouts, int(cp.cuda.Device().compute_capability))
            if fmt not in kernel.formats or kernel.unsupported(p):
                continue
            out = cp.full((M, N), float("nan"), values.dtype, order="C" if layouts[1] == "row" else "F")
            kernel.plan(a, p)(on_device(cp, B, layouts[0], 0), out=out)
            assert (out.get().astype(np.float64) == wanted).all(), f"{kernel.name} {layouts}"
            tried += 1
    assert tried
    del a
    cp.get_default_memory_pool().free_all_blocks()
