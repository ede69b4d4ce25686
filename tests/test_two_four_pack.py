"""Packing to 2:4 and back on a device against the numpy code, the reference: same bits, same refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import values

from spformat import Dense, TwoFour
from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.backends.cuda.two_four import two_four_pack
from spformat.backends.cuda.two_four.two_four_pack import TwoFourPack
from spformat.errors import StructureError, UsageError
from spformat.formats import edges
from spformat.formats.convert import convert
from spformat.preprocess import masks

ORDERS = ("logical", "ldmatrix", "fragment", "cutlass-sm80")
DTYPES = ("float16", "bfloat16")
SHAPES = [(1, 1), (33, 70), (64, 128), (5, 4099), (40, 264), (200, 1000), (0, 8), (8, 0), (97, 513)]
INFINITE = {"float16": 0x7C00, "bfloat16": 0x7F80}


def any_bits(shape: tuple[int, int], dtype: str, seed: int) -> np.ndarray[Any, Any]:
    """Specials, zeros of both signs, and in places few different magnitudes, so that there are ties."""
    rng = np.random.default_rng(seed)
    x = values(rng, shape, dtype)
    raw = x.view(np.uint16)
    raw[rng.random(shape) < 0.2] = 0
    raw[rng.random(shape) < 0.1] = 0x8000
    edge = INFINITE[dtype]  # beside it the largest finite value and two NaN, of both signs
    tied = np.array([0, 1, 0x8001, edge - 1, edge, edge | 0x8000, edge + 1, edge + 2, 0x8000], np.uint16)
    few = rng.random((shape[0], 1)) < 0.5
    raw[...] = np.where(few, rng.choice(tied, shape), raw)
    return x


def fitting(shape: tuple[int, int], dtype: str, seed: int) -> np.ndarray[Any, Any]:
    """2:4, zeros of both signs."""
    x = any_bits(shape, dtype, seed)
    return masks.apply(x, masks.magnitude_nm(x, 2, 4, nonfinite="keep"))


def to_device(x: np.ndarray[Any, Any]) -> Any:
    cupy = pytest.importorskip("cupy")
    return cupy.asarray(x.view(np.uint16)).view(x.dtype)


# ------------------------------------------------------------------ without a GPU


@pytest.mark.parametrize("dtype", DTYPES)
def test_pruned_equals_mask_and_conversion(dtype: str) -> None:
    x = any_bits((37, 90), dtype, 1)
    wanted = TwoFour.from_dense(masks.apply(x, masks.magnitude_nm(x, 2, 4, nonfinite="keep")), meta_order="fragment")
    assert masks.prune_two_four(x, meta_order="fragment", nonfinite="keep") == wanted
    assert masks.prune_two_four(Dense.from_dense(x), nonfinite="keep") == wanted.with_meta_order("ldmatrix")


def test_pruning_refuses() -> None:
    x = np.ones((4, 8), np.float16)
    with pytest.raises(StructureError, match="float64"):
        masks.prune_two_four(x.astype(np.float64))
    with pytest.raises(UsageError, match="nonfinite"):
        masks.prune_two_four(x, nonfinite="drop")
    with pytest.raises(UsageError, match="meta_order"):
        masks.prune_two_four(x, meta_order="random")
    x[2, 5] = np.inf
    with pytest.raises(StructureError, match="row 2, column 5"):
        masks.prune_two_four(x)


def test_what_the_kernel_reports_becomes_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host arrays in place of a device's: the stand-in for the kernel fills the arrays that it gets, and may refuse."""
    x, ones = fitting((33, 70), "float16", 3), np.ones((4, 8), np.float16)
    a, pruned = TwoFour.from_dense(x, meta_order="cutlass-sm80"), masks.prune_two_four(ones)
    dense, refusal = a.to_dense(), (0, 0, 0)

    def pack(
        x: Any, order: str, data: Any, meta: Any, prune: bool = False, counted: bool = True
    ) -> tuple[int, int, int]:  # fmt: skip
        made = pruned if prune else a
        assert order == made.meta_order
        data[...], meta[...] = made.data, made.meta
        return refusal

    def unpack(data: Any, meta: Any, order: str, out: Any) -> None:
        assert order == "cutlass-sm80"
        out[...] = dense

    monkeypatch.setattr(edges, "is_cupy", lambda x: True)
    monkeypatch.setattr(two_four_pack, "two_four_pack", pack)
    monkeypatch.setattr(two_four_pack, "two_four_unpack", unpack)
    monkeypatch.setattr(TwoFour, "_encode", None)
    b = TwoFour.from_dense(x, meta_order="cutlass-sm80")
    assert b == a
    np.testing.assert_array_equal(bits(b.to_dense()), bits(dense))
    assert masks.prune_two_four(ones) == pruned
    refusal = (5, 3 * 32 + 2, 4)  # Kp = 128: 32 groups a row
    with pytest.raises(StructureError) as e:
        TwoFour.from_dense(x, meta_order="cutlass-sm80")
    assert (e.value.count, e.value.first, e.value.found) == (5, (3, 2), 4)
    assert masks.prune_two_four(ones, nonfinite="keep") == pruned
    ones[2, 5] = np.inf
    with pytest.raises(StructureError, match="row 2, column 5"):
        masks.prune_two_four(ones)


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pack", [two_four_pack.BLOCK, TwoFourPack(64, 64)], ids=str)
def test_packed_like_numpy(pack: TwoFourPack, order: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []
    for seed, shape in enumerate(SHAPES):
        x, y = fitting(shape, dtype, seed), any_bits(shape, dtype, seed + 50)
        kept = masks.apply(y, masks.magnitude_nm(y, 2, 4, nonfinite="keep"))
        exact, pruned = TwoFour.from_dense(x, meta_order=order), TwoFour.from_dense(kept, meta_order=order)
        wanted.append((x, y, exact, pruned, exact.to_dense()))
    monkeypatch.setattr(TwoFour, "_encode", None)  # the general code must not run: the kernel does
    monkeypatch.setattr(TwoFour, "_live", None)
    monkeypatch.setattr(two_four_pack, "BLOCK", pack)
    for x, y, exact, pruned, dense in wanted:
        got = convert(to_device(x), "two-four", meta_order=order)
        assert got.to("cpu") == exact
        np.testing.assert_array_equal(got.to_dense().view("u2").get(), bits(dense))
        assert masks.prune_two_four(to_device(y), meta_order=order, nonfinite="keep").to("cpu") == pruned


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_streams(dtype: str) -> None:
    """A matrix that starts off a 16-byte boundary, one with a pitch, and one on another stream."""
    cupy = pytest.importorskip("cupy")
    x = fitting((50, 128), dtype, 8)
    wanted = TwoFour.from_dense(x)
    flat = cupy.zeros(x.size + 1, VALUE_TYPES[dtype].numpy)
    off = flat[1:].reshape(x.shape)
    off.view("u2")[...] = cupy.asarray(x.view(np.uint16))
    assert off.data.ptr % 16
    wide = cupy.zeros((50, 200), "u2")
    wide[:, :128] = cupy.asarray(x.view(np.uint16))
    for source in (off, wide.view(x.dtype)[:, :128]):
        assert convert(source, "two-four").to("cpu") == wanted
    with cupy.cuda.Stream(non_blocking=True):
        y = to_device(x)
        assert convert(y, "two-four").to("cpu") == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_refusals_like_numpy(dtype: str) -> None:
    for seed, shape in enumerate(SHAPES):
        if 0 in shape or shape == (1, 1):
            continue
        x = any_bits(shape, dtype, seed) if seed % 2 else fitting(shape, dtype, seed)
        if seed % 2 == 0:
            x[shape[0] // 2, 4:7] = 1
            x[shape[0] - 1, 0:4] = 1
        seen = []
        for source in (x, to_device(x)):
            with pytest.raises(StructureError) as e:
                convert(source, "two-four")
            seen.append((str(e.value), e.value.count, e.value.first, e.value.found, e.value.limit, e.value.unit))
        assert seen[0] == seen[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_nonfinite_refused_like_numpy(value: str, dtype: str) -> None:
    x = np.ones((70, 130), VALUE_TYPES[dtype].numpy)
    x[69, 129] = x[3, 77] = float(value)
    seen = []
    for source in (x, to_device(x)):
        with pytest.raises(StructureError) as e:
            masks.prune_two_four(source)
        seen.append((str(e.value), e.value.count, e.value.first))
    assert seen[0] == seen[1]
    assert seen[0][1:] == (2, (3, 77))
    x[69, 129] = x[3, 77] = 2
    assert masks.prune_two_four(to_device(x)).to("cpu") == masks.prune_two_four(x)
