"""The CPU backend against float64: every format, value type, width and layout; C starts out as NaN."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from spformat import errors
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends import cpu
from spformat.backends.cpu import KERNELS as EVERY_KERNEL
from spformat.backends.cpu.spmm import KERNELS
from spformat.dispatch import api as dispatch
from spformat.formats import FORMATS, Format, by_name
from spformat.formats.convert import convert
from spformat.products.problem import Problem, result_dtype

pytest.importorskip("numba")

SPECS = (
    "dense",
    "csr",
    "ell-buckets:column_parts=3,max_width=8",
    "bsr:blocksize=5x7",
    "bsr:blocksize=40x16",
    "bsr:blocksize=1x3",
    "dbsr:blocksize=16x16",
    "sr-bcrs:vector_length=6,stride=5",
    "sr-bcrs:vector_length=64,stride=4",
    "vector-nm:n=2,m=8,vector_length=5",
    "vector-nm:n=3,m=7,vector_length=37",
    "vector-nm:n=4,m=8,vector_length=4,tile_rows=8,tile_cols=16",
    "two-four:meta_order=logical",
    "two-four:meta_order=ldmatrix",
    "two-four:meta_order=fragment",
    "two-four:meta_order=cutlass-sm80",
    "bitmask",
)
SAME = [(t, t) for t in VALUE_TYPES]
MIXED = [("bfloat16", "float16"), ("int8", "float32"), ("bfloat16", "float64"), ("float8_e5m2", "bfloat16"),
         ("float32", "bfloat16"), ("float64", "float32"), ("int8", "float8_e4m3fn")]  # fmt: skip
M, K = 75, 203
"""Multiples of no size into which the formats divide a matrix."""


def numpy_type(name: str) -> np.dtype:
    return VALUE_TYPES[name].numpy if name in VALUE_TYPES else np.dtype(name)


def takes(spec: str, dtype: str) -> bool:
    return dtype in by_name(spec.partition(":")[0]).value_dtypes


def pattern(spec: str, shape: tuple[int, int], rng: np.random.Generator, density: float = 0.3) -> np.ndarray:
    """bool [M, K]: random places that fit the format, with empty rows and, if it may, one full row."""
    rows, cols = shape
    held = rng.random(shape) < density
    name, _, params = spec.partition(":")
    if name in ("two-four", "vector-nm"):
        p = dict(item.split("=") for item in params.split(",")) if name == "vector-nm" else {"n": 2, "m": 4}
        n, m, L = int(p["n"]), int(p["m"]), int(p.get("vector_length", 1))
        groups, windows = -(-rows // L), -(-cols // m)
        chosen = np.argsort(rng.random((groups, windows, m)), axis=2) < n
        held &= np.repeat(chosen.reshape(groups, -1), L, axis=0)[:rows, :cols]
    elif rows:
        held[rows // 3] = True
    held[rows // 2 : rows // 2 + 20] = False
    return held


def matrix(spec: str, dtype: str, shape: tuple[int, int] = (M, K), seed: int = 0, *, integers: bool = True) -> Format:
    rng = np.random.default_rng(seed)
    held = pattern(spec, shape, rng)
    values = rng.integers(1, 4, shape) * rng.choice([-1, 1], shape) if integers else rng.standard_normal(shape)
    return convert(np.where(held, values, 0).astype(np.float32).astype(numpy_type(dtype)), spec)


def operand(dtype: str, shape: tuple[int, int], seed: int = 1, *, integers: bool = True) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, shape) if integers else rng.standard_normal(shape)
    return values.astype(np.float32).astype(numpy_type(dtype))


def product(a: Format, B: np.ndarray, **given: object) -> np.ndarray:
    """C by the cpu backend, written over NaN (or a number no sum here reaches)."""
    out = given.pop("out", None)
    if out is None:
        name = given.pop("out_dtype", None) or result_dtype(a.dtype.name, B.dtype.name)
        out = np.empty((a.shape[0], B.shape[1]), numpy_type(str(name)))
    out[...] = -(2**30) if out.dtype == np.int32 else np.nan
    p = dispatch.plan(a, B=B, out=out, backend="cpu")
    assert p.kernel.startswith("cpu.")
    assert p(B, out) is out
    return out


def wide(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x.astype(np.float64)


def exact(a: Format, B: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The product of small integers: every sum is exact, and only the final rounding may change it."""
    return (wide(a.to_dense()) @ wide(B)).astype(dtype)


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(wide(got), wide(wanted))


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("types", SAME + MIXED, ids="-".join)
@pytest.mark.parametrize("spec", SPECS)
def test_integers_are_exact(spec: str, types: tuple[str, str]) -> None:
    if not takes(spec, types[0]):
        pytest.skip("the format does not hold this type")
    a = matrix(spec, types[0])
    B = operand(types[1], (K, 40))
    got = product(a, B)
    assert got.dtype == numpy_type(result_dtype(*types))
    same(got, exact(a, B, got.dtype))


@pytest.mark.parametrize("n", [0, 1, 7, 16, 17, 32, 1000])
@pytest.mark.parametrize("spec", SPECS)
def test_every_width(spec: str, n: int) -> None:
    a = matrix(spec, "bfloat16")
    B = operand("bfloat16", (K, n))
    same(product(a, B, out_dtype="float32"), exact(a, B, np.dtype(np.float32)))


@pytest.mark.parametrize("types", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"),
                                   ("float64", "float64"), ("float8_e4m3fn", "float16")], ids="-".join)  # fmt: skip
@pytest.mark.parametrize("spec", SPECS)
def test_rounding_stays_within_the_bound(spec: str, types: tuple[str, str]) -> None:
    if not takes(spec, types[0]):
        pytest.skip("the format does not hold this type")
    a = matrix(spec, types[0], (70, 1500), integers=False)
    B = operand(types[1], (1500, 33), integers=False)
    out_dtype = result_dtype(*types)
    got = product(a, B)
    A = wide(a.to_dense())
    reference = A.astype(np.longdouble) @ wide(B).astype(np.longdouble)
    unit = 2.0**-53 if out_dtype == "float64" else 2.0**-24
    last = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(out_dtype, unit)
    items = np.count_nonzero(A, axis=1)[:, None] if a.name != "dense" else 1500
    limit = items * unit * (np.abs(A) @ np.abs(wide(B))) + last * np.abs(reference)
    assert np.all(np.abs(got.astype(np.longdouble) - reference) <= limit)
    assert np.count_nonzero(got) > got.size // 2


@pytest.mark.parametrize("out_dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("types", [("bfloat16", "bfloat16"), ("int8", "int8"), ("float32", "float64")], ids="-".join)
def test_out_may_be_any_float(types: tuple[str, str], out_dtype: str) -> None:
    for spec in ("csr", "dense"):
        a, B = matrix(spec, types[0]), operand(types[1], (K, 33))
        same(product(a, B, out_dtype=out_dtype), exact(a, B, numpy_type(out_dtype)))


@pytest.mark.parametrize("spec", ["csr", "dense", "bitmask"])
def test_int8_reaches_the_ends_of_its_range(spec: str) -> None:
    A = np.full((3, 2500), -128, np.int8)
    A[1] = 127
    B = np.full((2500, 20), -128, np.int8)
    got = product(convert(A, spec), B)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, A.astype(np.int64) @ B.astype(np.int64))


def test_a_sum_too_large_for_the_output_is_infinite() -> None:
    a = convert(np.full((2, 64), 60000, np.float16), "csr")
    assert np.all(product(a, np.ones((64, 3), np.float16)) == np.inf)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_code_means_what_ml_dtypes_says(dtype: str) -> None:
    t = VALUE_TYPES[dtype]
    codes = np.arange(1 << (8 * t.numpy.itemsize)).astype(t.bits).view(t.numpy)
    numbers = codes[np.isfinite(wide(codes))]
    a = convert(numbers[:, None].copy(), "csr")
    same(product(a, np.ones((1, 1), np.float32))[:, 0], numbers)
    one = convert(np.ones((1, 1), np.float32), "csr")
    same(product(one, numbers[None, :])[0], numbers)


# ------------------------------------------------------------------ what must not be read


def assert_unused_rows_do_not_matter(spec: str, shape: tuple[int, int], n: int, poison: float) -> None:
    """The product stays the same if rows of B that no stored value names become ``poison``."""
    nonzero = pattern(spec, shape, np.random.default_rng(5))
    for unused in (slice(16), slice(80, 112), slice(-8, None)):  # row -1 of a tile is the last one of the tile before
        nonzero[:, unused] = False
    a = convert(np.where(nonzero, 2, 0).astype(np.float32).astype(ml_dtypes.bfloat16), spec)
    B = operand("bfloat16", (shape[1], n))
    clean = exact(a, B, np.dtype(np.float32))
    # A zero that is stored, in a block or a vector, may meet its row of B; elements that are not stored may not.
    used = nonzero.any(axis=0)
    if a.name == "vector-nm":
        columns = a.columns()
        used[columns[columns < shape[1]]] = True
    elif a.name in ("bsr", "dbsr"):
        width = a.blocksize[1]
        for block in a.indices:
            used[block * width : (block + 1) * width] = True
    assert not used.all()
    B[~used] = poison
    same(product(a, B, out_dtype="float32"), clean)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("spec", [s for s in SPECS if s != "dense"])
def test_rows_of_b_that_nothing_uses_do_not_matter(spec: str, poison: float) -> None:
    assert_unused_rows_do_not_matter(spec, (M, K), 96, poison)


def test_columns_past_the_last_are_not_read() -> None:
    """Fillers of the last window and columns of an edge block lie at columns >= K. In tiles of B the row after the

    last one of a tile is row 0 of the next: NaN here.
    """
    for shape, spec in (((5, 5), "vector-nm:n=3,m=4,vector_length=2"), ((4, 7), "bsr:blocksize=2x4"),
                        ((9, 9), "vector-nm:n=3,m=4,vector_length=8,tile_rows=16,tile_cols=8")):  # fmt: skip
        x = np.ones(shape, np.float32)
        x[:, ::4] = 0
        x[:, -1] = 3
        a = convert(x, spec)
        B = np.ones((shape[1], 64), np.float32)
        B[0] = np.nan
        if a.name == "bsr":
            x[:, :4] = 0
            a = convert(x, spec)
        same(product(a, B), np.repeat(x.sum(axis=1, dtype=np.float64)[:, None], 64, axis=1))


@pytest.mark.parametrize("spec", [s for s in SPECS if s.startswith("two-four")])
def test_fillers_of_a_group_are_not_multiplied(spec: str) -> None:
    x = np.zeros((3, 70), np.float16)
    x[:, 5::8] = 1.5
    B = np.full((70, 20), np.inf, np.float16)
    B[5::8] = 2
    same(product(convert(x, spec), B), np.full((3, 20), 3.0 * len(range(5, 70, 8))))


# ------------------------------------------------------------------ operands


def layouts(dtype: str, n: int) -> dict[str, np.ndarray]:
    B = operand(dtype, (K, n))
    padded = np.zeros((K, n + 5), B.dtype)
    padded[:, 2 : 2 + n] = B
    return {
        "row": B,
        "col": np.asfortranarray(B),
        "leading": padded[:, 2 : 2 + n],
        "every-second": np.repeat(B, 2, 1)[:, ::2],
        "reversed": B[::-1, ::-1].copy()[::-1, ::-1],
        "one-row-for-all": np.broadcast_to(B[:1], B.shape),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("n", [5, 64])
def test_any_layout_of_b(dtype: str, n: int) -> None:
    for spec in ("csr", "bsr:blocksize=5x7", "dense"):
        a = matrix(spec, dtype)
        for name, B in layouts(dtype, n).items():
            B.flags.writeable = False
            got = product(a, B, out_dtype="float32")
            np.testing.assert_array_equal(got, exact(a, B, got.dtype), err_msg=f"{spec} {name}")


@pytest.mark.parametrize("n", [1, 17, 64])
@pytest.mark.parametrize("spec", ["csr", "vector-nm:n=2,m=8,vector_length=5", "dense"])
def test_any_layout_of_out(spec: str, n: int) -> None:
    a, B = matrix(spec, "float32"), operand("float32", (K, n))
    wanted = exact(a, B, np.dtype(np.float32))
    around = np.zeros((M + 4, n + 6), np.float32)
    for out in (np.empty((M, n), np.float32), np.empty((M, n), np.float32, order="F"), around[2:-2, 3:-3],
                np.empty((M, 2 * n), np.float32)[:, ::2]):  # fmt: skip
        same(product(a, B, out=out), wanted)
    around[2:-2, 3:-3] = 0
    assert not around.any()  # nothing outside was touched


def test_out_is_made_in_the_layout_asked_for() -> None:
    a, B = matrix("csr", "float32"), operand("float32", (K, 9))
    p = dispatch.plan(a, n=9, out_layout="col", backend="cpu")
    assert p(B).flags.f_contiguous
    same(p(B), exact(a, B, np.dtype(np.float32)))


def test_operands_that_do_not_fit_are_refused() -> None:
    a, B = matrix("csr", "float32"), operand("float32", (K, 9))
    p = dispatch.plan(a, B=B, backend="cpu")
    with pytest.raises(ValueError, match=f"B: expected shape \\({K}, N\\)"):
        p(B[1:])
    with pytest.raises(TypeError, match="B: this plan takes float32, got float64"):
        p(B.astype(np.float64))
    with pytest.raises(ValueError, match="out: expected shape"):
        p(B, np.empty((M, 8), np.float32))
    with pytest.raises(TypeError, match="out: this plan writes float32"):
        p(B, np.empty((M, 9), np.float64))
    square = convert(np.eye(4, dtype=np.float32), "csr")
    C = np.ones((4, 4), np.float32)
    with pytest.raises(ValueError, match="overlap"):
        dispatch.plan(square, B=C, backend="cpu")(C, C)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_reasons(kernel: object) -> None:
    def ask(**changes: object) -> str:
        given = {"a_dtype": "bfloat16", "b_dtype": "bfloat16", "out_dtype": "bfloat16"} | changes
        return "; ".join(kernel.unsupported(Problem.product("csr", (), 4, 4, 8, 4, **given)))

    assert ask() == ""
    assert ask(a_dtype="int8", b_dtype="int8", out_dtype="int32") == ""
    assert "move them with .to('cpu')" in ask(device="cuda")
    assert "out.dtype must be one of" in ask(out_dtype="int32")
    assert "out.dtype must be one of" in ask(out_dtype="float8_e5m2")
    assert "a.dtype must be one of" in ask(a_dtype="float8_e8m0fnu")


def test_every_format_has_a_kernel() -> None:
    for operation in ("spmm", "spmm_transposed"):
        own = [k for k in EVERY_KERNEL if not k.name.startswith("cpu.expand_then_")]
        assert {name for k in own for o, name in k.takes if o == operation} >= {f.name for f in FORMATS}


def test_torch_multiplies_only_where_somebody_has_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    a = convert(np.eye(1024, dtype=ml_dtypes.bfloat16), "csr")
    with pytest.raises(errors.NoKernelError, match="torch is not imported in this process: import torch first"):
        dispatch.plan(a, n=64, backend="cpu.expand_then_torch")


# ------------------------------------------------------------------ edges


@pytest.mark.parametrize("shape", [(0, 9), (9, 0), (0, 0), (9, 13)])
@pytest.mark.parametrize("spec", SPECS)
def test_nothing_stored_gives_zeros(spec: str, shape: tuple[int, int]) -> None:
    a = convert(np.zeros(shape, np.float16), spec)
    B = np.full((shape[1], 35), 1 if a.name == "dense" else np.nan, np.float16)
    if a.name == "vector-nm":
        B[...] = 1  # its fillers are stored
    got = product(a, B)
    assert got.shape == (shape[0], 35)
    assert not got.any()


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith("two-four")])
def test_rows_longer_than_a_list(spec: str) -> None:
    """Several lists for a row: each continues the sums of the list before."""
    a = matrix(spec, "float32", (50, 3000), seed=3)
    B = operand("float32", (3000, 48))
    same(product(a, B), exact(a, B, np.dtype(np.float32)))


def test_columns_that_are_decoded_fit_their_type() -> None:
    for kernel in KERNELS:
        fmt = min(kernel.formats)
        wide = Problem.product(format=fmt, params=(), M=1, K=2**31, n=16, nnz=1, a_dtype="bfloat16", b_dtype="bfloat16",
                       out_dtype="float32")  # fmt: skip
        refused = any("K must be" in r for r in kernel.unsupported(wide))
        assert refused == (fmt in ("two-four", "bitmask"))


# ------------------------------------------------------------------ numba


def test_numba_is_only_imported_for_a_product() -> None:
    code = (
        "import sys, numpy as np\n"
        "from spformat.dispatch import api as dispatch\nfrom spformat.formats.convert import convert\n"
        "a = convert(np.eye(3, dtype=np.float32), 'csr')\n"
        "assert dispatch.explain(a, np.eye(3, dtype=np.float32)).chosen == 'cpu.spmm_csr'\n"
        "assert 'numba' not in sys.modules, 'numba was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture
def numba_is_looked_up() -> Iterator[None]:
    """Whether numba is installed is remembered; the test looks again, and what it sees is forgotten."""
    cpu._has_numba.cache_clear()
    yield
    cpu._has_numba.cache_clear()


@pytest.mark.usefixtures("numba_is_looked_up")
def test_without_numba_the_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name != "numba" and find(name, *more))
    assert cpu.BACKEND.missing() == ["numba is not installed: pip install 'spformat[cpu]'"]
    a = matrix("csr", "float32")
    assert dispatch.explain(a, operand("float32", (K, 2))).chosen == "reference.spmm"
