"""The compiled converters against the numpy code, the reference: the same arrays, bit for bit, and the same refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cases import codes, nm_places

from spformat.arrays import threads
from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.arrays.magnitudes import magnitude_keys
from spformat.errors import InvariantError, StructureError
from spformat.formats import BSR, CSR, SRBCRS, Bitmask, ELLBuckets, Format, TwoFour, VectorNM, edges
from spformat.formats.fast import compiled
from spformat.preprocess import masks

pytest.importorskip("numba")

SHAPES = [(1, 1), (33, 70), (64, 128), (5, 4099), (200, 37), (97, 256)]
ORDERS = ("logical", "ldmatrix", "fragment", "cutlass-sm80")
NM = (
    {"n": 2, "m": 8, "vector_length": 5},
    {"n": 1, "m": 1, "vector_length": 1},
    {"n": 3, "m": 200, "vector_length": 7},
    {"n": 4, "m": 8, "vector_length": 4, "tile_rows": 8, "tile_cols": 16},
)


@contextmanager
def path(monkeypatch: pytest.MonkeyPatch, *, numba: bool) -> Iterator[None]:
    """Makes every conversion, or none, use compiled code, in small pieces on three threads."""
    assert compiled._usable()
    with monkeypatch.context() as m:
        m.setattr(compiled, "serves", lambda x, elements=None: numba)
        m.setattr(compiled, "PIECE", 1000)
        m.setattr(threads, "cores", lambda: 3)
        yield


def random_places(shape: tuple[int, int], density: float, seed: int) -> np.ndarray:
    held = np.random.default_rng(seed).random(shape) < density
    held[shape[0] // 2] = False
    held[shape[0] // 3] = density > 0
    return held


def check(monkeypatch: pytest.MonkeyPatch, fmt: type[Format], x: np.ndarray, **params: object) -> None:
    """Both ways through both paths, and the compiled result passes ``validate``."""
    with path(monkeypatch, numba=False):
        wanted = fmt.from_dense(x, **params)
        dense = wanted.to_dense()
    with path(monkeypatch, numba=True):
        got = fmt.from_dense(x, **params)
        back = got.to_dense()
    assert got == wanted
    assert {k: v.dtype for k, v in got.arrays().items()} == {k: v.dtype for k, v in wanted.arrays().items()}
    got.validate()
    np.testing.assert_array_equal(bits(back), bits(dense))


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("fmt", [CSR, Bitmask], ids=lambda f: f.name)
def test_csr_and_bitmask(fmt: type[Format], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, shape in enumerate(SHAPES):
        for density in (0.0, 0.1, 0.6, 1.0):
            check(monkeypatch, fmt, codes(dtype, random_places(shape, density, seed), seed))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("order", ORDERS)
def test_two_four(order: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, shape in enumerate(SHAPES):
        check(monkeypatch, TwoFour, codes(dtype, nm_places(shape, 2, 4, 1, seed), seed), meta_order=order)


@pytest.mark.parametrize("shape", [(48, 200), (33, 70), (1, 3), (64, 64), (5, 0)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_two_four_quick_check(order: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code accepts exactly what ``check_memory`` and ``check_canonical`` accept: matrices with one change."""
    rng = np.random.default_rng(shape[1])
    x = rng.integers(-2, 3, shape).astype(np.float16)
    good = masks.prune_two_four(x, meta_order=order)
    seen = set()
    for _ in range(150):
        data, meta = good.data.copy(), good.meta.copy()
        if data.size and rng.random() < 0.5:
            data.reshape(-1)[rng.integers(data.size)] = rng.choice([0.0, -0.0, 1.0, np.nan])
        elif meta.size:
            meta[rng.integers(meta.size)] ^= np.uint16(rng.integers(1, 16) << 4 * rng.integers(4))
        f = good.with_arrays(data=data, meta=meta)
        try:
            f.check_memory()
            f.check_canonical()
            sound = True
        except InvariantError:
            sound = False
        with path(monkeypatch, numba=True):
            assert f.quick_check() is sound, (data, meta)
        seen.add(sound)
    assert seen == ({True} if not good.meta.size else {True, False})


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("blocksize", [(1, 1), (4, 8), (8, 3), (32, 32), (100, 70)], ids=str)
def test_bsr(blocksize: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, shape in enumerate(SHAPES):
        for density in (0.0, 0.02, 1.0):
            check(monkeypatch, BSR, codes(dtype, random_places(shape, density, seed), seed), blocksize=blocksize)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("t", "g"), [(1, 1), (8, 16), (3, 4), (40, 200)])
def test_sr_bcrs(t: int, g: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, shape in enumerate(SHAPES):
        for density in (0.0, 0.1, 1.0):
            x = codes(dtype, random_places(shape, density, seed), seed)
            check(monkeypatch, SRBCRS, x, vector_length=t, stride=g)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("params", [{}, {"max_width": 2}, {"column_parts": 3}, {"column_parts": 7, "max_width": 4}],
                         ids=str)  # fmt: skip
def test_ell_buckets(params: dict[str, int], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From dense and from a CSR that holds zeros of both signs, and back to both."""
    for seed, shape in enumerate(SHAPES):
        for density in (0.0, 0.1, 1.0):
            x = codes(dtype, random_places(shape, density, seed), seed)
            check(monkeypatch, ELLBuckets, x, **params)
            a = CSR.from_dense(x)
            data = a.data.copy()
            data[::3] = np.array([0.0, -0.0, 1.0])[seed % 3].astype(data.dtype)
            a = a.with_arrays(data=data)
            with path(monkeypatch, numba=False):
                wanted = ELLBuckets.from_csr(a, **params)
                back = wanted.to_csr()
            with path(monkeypatch, numba=True):
                got = ELLBuckets.from_csr(a, **params)
                assert (got, got.to_csr()) == (wanted, back)
                np.testing.assert_array_equal(bits(got.to_dense()), bits(back.to_dense()))


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("params", NM, ids=str)
def test_vector_nm(params: dict[str, int], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, shape in enumerate(SHAPES):
        held = nm_places(shape, params["n"], params["m"], params["vector_length"], seed)
        check(monkeypatch, VectorNM, codes(dtype, held, seed), **params)


def test_all_sixteen_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of each mask, with every legal value beside a zero of either sign."""
    masks = np.arange(16)[:, None] >> np.arange(4) & 1
    for mask in masks:
        x = codes("bfloat16", mask[None, :].astype(bool), int(mask.sum()))
        if mask.sum() <= 2:
            check(monkeypatch, TwoFour, x)
        else:
            with path(monkeypatch, numba=True), pytest.raises(StructureError) as e:
                TwoFour.from_dense(x)
            assert (e.value.found, e.value.first) == (mask.sum(), (0, 0))


def refusal(fmt: type[Format], x: np.ndarray, **params: object) -> tuple[object, ...]:
    with pytest.raises(StructureError) as e:
        fmt.from_dense(x, **params)
    return str(e.value), e.value.count, e.value.first, e.value.found, e.value.limit, e.value.unit


@pytest.mark.parametrize("seed", range(4))
def test_refusals_name_the_same_offender(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many offenders in many pieces: the count is of all, the first is the first in row-major order."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((130, 203)).astype(np.float16)
    x[rng.random(x.shape) < (0.2, 0.6, 0.8, 0.9)[seed]] = -0.0
    for fmt, params in ((TwoFour, {}), (VectorNM, {"n": 2, "m": 8, "vector_length": 3})):
        with path(monkeypatch, numba=False):
            wanted = refusal(fmt, x, **params)
        with path(monkeypatch, numba=True):
            assert refusal(fmt, x, **params) == wanted


def test_stored_zeros_of_a_csr_come_back_with_their_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    a = CSR(shape=(2, 3), indptr=np.array([0, 2, 3], np.int32), indices=np.array([0, 2, 1], np.int32),
            data=np.array([-0.0, 0.0, 5.0], np.float32))  # fmt: skip
    with path(monkeypatch, numba=True):
        got = a.to_dense()
    np.testing.assert_array_equal(got.view(np.uint32), np.array([[0x80000000, 0, 0], [0, 0x40A00000, 0]], np.uint32))


def test_only_large_host_arrays_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    large = np.broadcast_to(np.float16(0), (4096, 2048))  # 16 MB
    medium = large[:512]
    assert compiled.serves(large)
    assert not compiled.serves(large[:63])
    assert compiled.serves(medium[:1], large.size)
    monkeypatch.setitem(sys.modules, compiled._LOOPS, compiled)
    assert compiled.serves(medium)
    monkeypatch.delitem(sys.modules, compiled._LOOPS)
    monkeypatch.setattr(compiled, "_bytes_so_far", 0)
    assert not compiled.serves(medium)
    monkeypatch.setattr(compiled, "_usable", lambda: False)
    assert not compiled.serves(large)


def test_many_arrays_are_worth_what_a_large_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a small model, converted one at a time."""
    monkeypatch.delitem(sys.modules, compiled._LOOPS, raising=False)
    monkeypatch.setattr(compiled, "_bytes_so_far", 0)
    medium = np.broadcast_to(np.float16(0), (512, 2048))  # 2 MB
    assert [compiled.serves(medium) for _ in range(33)] == [False] * 31 + [True] * 2
    monkeypatch.setattr(compiled, "_bytes_so_far", 0)
    assert not any(compiled.serves(medium[:63]) for _ in range(1000))  # numpy is as fast


def test_a_numba_that_does_not_import_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (compiled._LOOPS, "spformat.formats.fast.numba_cache"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)  # import numba raises ImportError
    compiled._usable.cache_clear()
    try:
        x = np.zeros((4096, 2048), np.float16)
        x[::64, 5] = 1
        assert not compiled.serves(x)
        assert CSR.from_dense(x).nnz == 64
    finally:
        compiled._usable.cache_clear()


@pytest.mark.parametrize("edge", edges.edges_of("cpu"), ids=lambda e: f"{e.source}-{e.target}")
def test_an_edge_of_the_host_is_asked_for_large_arrays_only(edge: edges.Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    large = np.broadcast_to(np.float16(0), (4096, 2048))
    assert edge in edges.find(edge.source, edge.target, large)
    assert edge not in edges.find(edge.source, edge.target, large[:63])
    monkeypatch.setattr(compiled, "_usable", lambda: False)
    assert edge not in edges.find(edge.source, edge.target, large)


OTHER_MACHINE = """
import numpy as np, ml_dtypes
from spformat.formats import CSR, Bitmask, ELLBuckets, VectorNM
from spformat.formats.fast import compiled, simd
from spformat.arrays.dtypes import bits
assert not simd.WIDE
rng = np.random.default_rng(0)
held = rng.random((66, 139)) < 0.4
vectors = np.repeat(rng.random((11, 35, 4)).argsort(axis=2) < 2, 6, axis=0).reshape(66, 140)[:, :139]
for dtype in (ml_dtypes.bfloat16, np.float32):
    for fmt, some, params in ((CSR, held, {}), (Bitmask, held, {}), (ELLBuckets, held, {"column_parts": 2}),
                              (VectorNM, vectors, {"n": 2, "m": 4, "vector_length": 6})):
        x = np.where(some, rng.standard_normal(some.shape), -0.0).astype(dtype)
        results = []
        for numba in (False, True):
            compiled.serves = lambda x, elements=None: numba
            made = fmt.from_dense(x, **params)
            results.append((made, bits(made.to_dense()).tobytes()))
        assert results[0] == results[1], (fmt, dtype)
"""


def test_a_machine_without_wide_instructions(tmp_path: Path) -> None:
    """The same arrays where lanes cannot be packed together."""
    env = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", OTHER_MACHINE], check=True, timeout=300, env=env)


def test_importing_spformat_does_not_import_numba() -> None:
    code = (
        "import sys, spformat, spformat.formats, spformat.formats.convert, spformat.storage.container\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_compiled_code_starts_without_scipy_linalg_and_leaves_numba_whole() -> None:
    """A third of numba's start is its search for scipy's BLAS, which our loops do not need; np.dot still finds it."""
    script = (
        "import sys, numpy as np, numba, spformat as sf\n"
        "from spformat.formats.fast import compiled; x = np.zeros((1024, 4096)); compiled._warm_up()\n"
        "sf.convert(x, 'bitmask'); assert 'scipy.linalg' not in sys.modules, 'scipy.linalg is imported'\n"
        "dot = numba.njit(lambda a, b: np.dot(a, b))\n"
        "assert dot(np.eye(3), np.eye(3)).trace() == 3 and 'scipy.linalg' in sys.modules\n"
    )
    pytest.importorskip("numba")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("order", ORDERS)
def test_two_four_pruned(order: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any bits, and rows of few different magnitudes: ties, infinities and NaN of both signs."""
    infinite = {"float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    tied = np.array([0, 1, 0x8001, infinite - 1, infinite, infinite | 0x8000, infinite + 1, infinite + 2], np.uint16)
    for seed, shape in enumerate(SHAPES):
        x = codes(dtype, random_places(shape, 0.8, seed), seed)
        x.view(np.uint16)[::2] = np.random.default_rng(seed).choice(tied, x[::2].shape)
        with path(monkeypatch, numba=False):
            wanted = masks.prune_two_four(x, meta_order=order, nonfinite="keep")
        with path(monkeypatch, numba=True):
            assert masks.prune_two_four(x, meta_order=order, nonfinite="keep") == wanted
        refusals = []
        for numba in (False, True):
            with path(monkeypatch, numba=numba), pytest.raises(StructureError) as e:
                masks.prune_two_four(x)
            refusals.append((str(e.value), e.value.count, e.value.first))
        assert refusals[0] == refusals[1]
        finite = np.where(magnitude_keys(x) < infinite, x, np.zeros((), x.dtype))
        with path(monkeypatch, numba=True):
            assert masks.prune_two_four(finite).meta_order == "ldmatrix"
