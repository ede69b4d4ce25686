"""CSR to 2:4 and vector n:m and back on a device against the numpy code: same bits, same refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import values

from spformat import CSR, TwoFour, VectorNM
from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.arrays.library import has_dtype
from spformat.backends.cuda.runtime.queue import Kernels
from spformat.backends.cuda.two_four import two_four_csr
from spformat.backends.cuda.vector_nm import vector_nm_csr
from spformat.errors import StructureError
from spformat.formats.meta_orders import META_ORDERS, meta_places
from spformat.preprocess import masks

Host = np.ndarray[Any, Any]
SHAPES = ((1, 1), (33, 70), (64, 128), (5, 4099), (40, 264), (200, 1000), (0, 8), (8, 0), (3, 40_000), (300, 5))
PATTERNS = (
    {"n": 2, "m": 4, "vector_length": 1}, {"n": 8, "m": 32, "vector_length": 32}, {"n": 3, "m": 7, "vector_length": 3},
    {"n": 200, "m": 256, "vector_length": 64}, {"n": 1, "m": 1, "vector_length": 512},
    {"n": 2, "m": 8, "vector_length": 16, "tile_rows": 32, "tile_cols": 64},
)  # fmt: skip


def items(shape: tuple[int, int], dtype: str, seed: int, keep: Host) -> CSR:
    """The items of any bits where ``keep`` is True, zeros of both signs among them."""
    rng = np.random.default_rng(seed)
    keep &= rng.random(shape) < rng.choice([1.0, 0.7, 0.05])
    x = values(rng, (int(keep.sum()),), dtype)
    row = VALUE_TYPES[dtype]
    bits(x)[rng.random(x.size) < 0.1] = 0
    bits(x)[rng.random(x.size) < 0.1] &= row.bits.type(~row.zero_mask & (2 ** (8 * row.bits.itemsize) - 1))  # -0
    indptr = np.concatenate(([0], np.cumsum(keep.sum(axis=1)))).astype(np.int32)
    return CSR(shape=shape, indptr=indptr, indices=keep.nonzero()[1].astype(np.int32), data=x)


def two_four_items(shape: tuple[int, int], dtype: str, seed: int) -> CSR:
    x = np.random.default_rng(seed).normal(size=shape)
    return items(shape, dtype, seed, masks.magnitude_nm(x, 2, 4))


def vector_items(shape: tuple[int, int], dtype: str, seed: int, params: dict[str, Any]) -> CSR:
    x = np.random.default_rng(seed).normal(size=shape)
    keep = masks.magnitude_vector_nm(x, params["n"], params["m"], params["vector_length"])
    return items(shape, dtype, seed, keep)


# ------------------------------------------------------------------ without a GPU


class Counters:
    """What kernels that refuse would report."""

    address = 0

    def __init__(self, count: int, code: int) -> None:
        self._words = count, 2**64 - 1 - code

    def get(self) -> tuple[int, int]:
        return self._words


def every_argument_has_a_letter(
    self: Kernels, name: str, signature: Any, blocks: int, *args: Any, smem: int = 0
) -> None:
    assert len(signature) == len(args), name
    assert 0 <= blocks < 2**31
    assert smem <= vector_nm_csr.TILE


def test_what_the_kernels_count_becomes_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "queue", every_argument_has_a_letter)
    x = np.zeros((37, 90), np.float16)
    x[5, 8:11], x[20, :4], x[36, 88:] = 1, 2, 3
    a = CSR.from_dense(x)
    params = TwoFour.resolve_params({}, a)
    with pytest.raises(StructureError) as wanted:
        TwoFour._from_csr(a, **params)
    code = (5 * (128 // 4) + 2) * 8 + 3  # Kp = 128
    monkeypatch.setattr(two_four_csr, "Counters", lambda: Counters(2, code))
    with pytest.raises(StructureError) as got:
        two_four_csr.from_csr(a, params)
    assert (str(got.value), got.value.fields) == (str(wanted.value), wanted.value.fields)

    params = VectorNM.resolve_params({"n": 2, "m": 4, "vector_length": 3}, a)
    with pytest.raises(StructureError) as wanted:
        VectorNM._from_csr(a, **params)
    code = ((5 // 3) * 23 + 2) * 512 + 3  # 23 windows in 90 columns
    monkeypatch.setattr(vector_nm_csr, "Counters", lambda: Counters(2, code))
    with pytest.raises(StructureError) as got:
        vector_nm_csr.from_csr(a, params)
    assert (str(got.value), got.value.fields) == (str(wanted.value), wanted.value.fields)


@pytest.mark.parametrize("order", META_ORDERS)
def test_steps_lead_to_the_words(order: str) -> None:
    """As the kernel computes them, against the form that compiled loops use."""
    shape = (96, 256)
    s, (rows, shift, outer, inner) = two_four_csr._steps(shape, order), meta_places(shape, order)
    for r in range(shape[0]):
        assert r // 32 * s.r32 + r % 32 // 16 * s.r16 + r % 16 // 8 * s.r8 + r % 8 * s.r1 == rows[r]
    assert (s.shift, s.outer, s.inner) == (shift, outer, inner)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_tiles_fit_in_shared_memory(size: int) -> None:
    for vectors in range(1, 257):
        rows, pitch = vector_nm_csr._tile(vectors, size)
        assert vectors * pitch * size <= vector_nm_csr.TILE
        assert pitch >= rows >= 8
        assert pitch * size // max(4, size) % 2 == 1


# ------------------------------------------------------------------ on a GPU


def same(a: Any, on_device: Any) -> None:
    b = on_device.to("cpu")
    assert a == b
    assert [x.dtype for x in a.arrays().values()] == [x.dtype for x in b.arrays().values()]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [t for t in TwoFour.value_dtypes if has_dtype("cuda", t)])
@pytest.mark.parametrize("order", META_ORDERS)
def test_two_four_like_numpy(order: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = []
    for seed, shape in enumerate(SHAPES):
        a = two_four_items(shape, dtype, seed)
        b = TwoFour._from_csr(a, meta_order=order)
        if all(shape):
            cases.append((a, b, b._to_csr()))
    monkeypatch.setattr(TwoFour, "_encode", None)
    monkeypatch.setattr(TwoFour, "_live", None)
    for a, b, back in cases:
        same(b, TwoFour.from_csr(a.to("cuda"), meta_order=order))
        same(back, b.to("cuda").to_csr())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [t for t in sorted(VALUE_TYPES) if has_dtype("cuda", t)])
@pytest.mark.parametrize("params", PATTERNS, ids=str)
def test_vector_nm_like_numpy(params: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = []
    for seed, shape in enumerate(SHAPES):
        a = vector_items(shape, dtype, seed, params)
        b = VectorNM._from_csr(a, **VectorNM.resolve_params(params, a))
        if all(shape):
            cases.append((a, b, b._to_csr()))
    monkeypatch.setattr(VectorNM, "_from_csr", None)
    monkeypatch.setattr(VectorNM, "_to_csr", None)
    for a, b, back in cases:
        same(b, VectorNM.from_csr(a.to("cuda"), **params))
        same(back, b.to("cuda").to_csr())


@pytest.mark.gpu
def test_refusals_like_numpy() -> None:
    rng = np.random.default_rng(9)
    for shape in SHAPES:
        x = (rng.random(shape) < 0.6).astype(np.float32)
        a = CSR.from_dense(x)
        for fmt, params in ((TwoFour, {}), *((VectorNM, p) for p in PATTERNS[:3])):
            try:
                wanted: Any = fmt._from_csr(a, **fmt.resolve_params(params, a))
            except StructureError as refused:
                with pytest.raises(StructureError) as got:
                    fmt.from_csr(a.to("cuda"), **params)
                assert (str(got.value), got.value.fields) == (str(refused), refused.fields)
            else:
                same(wanted, fmt.from_csr(a.to("cuda"), **params))
