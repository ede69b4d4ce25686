"""Masks that a device writes against those of the host: same bits, same refusals, and the general code is not asked."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import values

from spformat.arrays.dtypes import VALUE_TYPES, bits, largest_finite
from spformat.arrays.magnitudes import magnitude_keys
from spformat.backends.cuda.masks import block_norms, magnitude_mask, masks_edges
from spformat.backends.cuda.masks.keys import KINDS, keys_of
from spformat.errors import StructureError, UsageError
from spformat.formats import edges
from spformat.preprocess import masks, ranking

Host = np.ndarray[Any, Any]
DTYPES = sorted(VALUE_TYPES)
SHAPES = ((1, 1), (33, 64), (7, 1000), (130, 333), (64, 512), (1, 5000), (0, 5), (5, 0))
CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "half": ("magnitude", (0.5,)), "few": ("magnitude", (0.97,)), "all": ("magnitude", (0,)), "none": ("magnitude", (1,)),
    **{f"{n}:{m}": ("magnitude_nm", (n, m)) for n, m in ((2, 4), (1, 2), (3, 8), (5, 16), (8, 32), (4, 7), (100, 256))},
    **{f"{n}:{m} {L}": ("magnitude_vector_nm", (n, m, L)) for n, m, L in ((2, 4, 8), (8, 32, 32), (3, 7, 1), (4, 16, 512))},
    **{f"{R}x{C}": ("magnitude_blocks", ((R, C), 0.6)) for R, C in (
        (1, 1), (2, 3), (16, 16), (32, 32), (64, 8), (1000, 1), (1, 1000))},
    "no block": ("magnitude_blocks", ((4, 4), 1)),
}  # fmt: skip
NORMS = {"magnitude_vector_nm", "magnitude_blocks"}


def any_bits(shape: tuple[int, int], dtype: str, seed: int) -> Host:
    """Every kind of value; in half of the rows few magnitudes, so that there are ties."""
    rng = np.random.default_rng(seed)
    x = values(rng, shape, dtype)
    raw, edge, most = bits(x), largest_finite(dtype), int(np.iinfo(bits(x).dtype).max)
    tied = np.array([0, 1, edge - 1, edge, min(edge + 1, most), min(edge + 2, most), most, most // 2 + 1], raw.dtype)
    few = rng.random((shape[0], 1)) < 0.5
    raw[...] = np.where(few, rng.choice(tied, shape), raw)
    return x


def tiny(shape: tuple[int, int], dtype: str) -> Host:
    """Subnormal values and the first normal ones."""
    row = VALUE_TYPES[dtype]
    normal = bits(np.array([ml_dtypes.finfo(row.numpy).smallest_normal], row.numpy))[0]
    raw = np.random.default_rng(4).integers(0, int(normal) * 3 // 2, shape).astype(row.bits)
    return np.asarray(raw.view(row.numpy))


def outcome(name: str, x: Any, given: tuple[Any, ...], **options: Any) -> Any:
    """The mask on the host, or what the refusal says."""
    try:
        mask = getattr(masks, name)(x, *given, **options)
    except StructureError as e:
        return str(e), e.fields
    return mask if isinstance(mask, np.ndarray) else mask.get()


# ------------------------------------------------------------------ without a GPU


class Counters:
    """Two words on the host: what the stand-ins count into."""

    def __init__(self) -> None:
        self.words = np.zeros(2, np.uint64)
        self.address = self.words

    def get(self) -> tuple[int, int]:
        return int(self.words[0]), int(self.words[1])


def count_odd(x: Host, odd: Any) -> None:
    if isinstance(odd, np.ndarray):
        odd[0] += int((magnitude_keys(x) > largest_finite(x.dtype)).sum())


@pytest.mark.parametrize("call", CALLS)
def test_the_edges_do_around_the_kernels_what_is_to_be_done(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The general code stands in for the kernels: same arguments, same arrays."""
    name, given = CALLS[call]
    cases = [any_bits(s, d, 1) for s, d in itertools.product(((37, 70), (0, 3)), ("float16", "int8"))]
    cases += [np.abs(x) for x in (np.arange(12.0).reshape(3, 4),)]
    wanted = [outcome(name, x, given, nonfinite=how) for x in cases for how in ("keep", "refuse")]

    def largest(x: Host, count: int, mask: Host, odd: Any) -> None:
        count_odd(x, odd)
        mask[...] = ranking.keep_largest(lambda s: magnitude_keys(x[s]), [slice(0, x.shape[0])], x.shape, count, np)

    def nm(x: Host, n: int, m: int, mask: Host, odd: Any, repeat: int = 1) -> None:
        count_odd(x, odd)
        mask[...] = np.repeat(ranking.keep_nm(magnitude_keys(x), n, m), repeat, axis=0)[: mask.shape[0]]

    def norms(x: Host, blocksize: tuple[int, int], norm: str, out: Host, odd: Any) -> None:
        count_odd(x, odd)
        out[...] = ranking.block_norms(x, *blocksize, ranking.power_of(x, norm))

    def of_blocks(keep: Host, blocksize: tuple[int, int], mask: Host) -> None:
        mask[...] = np.kron(keep, np.ones(blocksize, bool))[: mask.shape[0], : mask.shape[1]]

    monkeypatch.setattr(magnitude_mask, "mask_of_largest", largest)
    monkeypatch.setattr(masks_edges, "nm_mask", nm)
    monkeypatch.setattr(block_norms, "block_norms", norms)
    monkeypatch.setattr(block_norms, "mask_of_blocks", of_blocks)
    monkeypatch.setattr(masks_edges, "Counters", Counters)
    monkeypatch.setattr(edges, "is_cupy", lambda x: True)
    taken = []
    take = edges.take
    monkeypatch.setattr(edges, "take", lambda *a: taken.append(take(*a)) or taken[-1])
    got = [outcome(name, x, given, nonfinite=how) for x in cases for how in ("keep", "refuse")]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_equal(a, b)
    assert [t is None for t in taken] == [x.size == 0 for x in cases for _ in range(2)]


def test_digits_are_all_bits_of_a_key() -> None:
    for dtype in DTYPES:
        keys, every = keys_of(np.dtype(VALUE_TYPES[dtype].numpy)), magnitude_keys(any_bits((50, 50), dtype, 2))
        assert int(every.max()) >> keys.bits == 0
        digits = magnitude_mask.digits(keys.bits)
        assert sum(width for _, width in digits) == keys.bits
        assert [shift for shift, _ in digits] == [sum(w for _, w in digits[i + 1 :]) for i in range(len(digits))]
        assert all(0 < width <= magnitude_mask.DIGIT for _, width in digits)
    assert set(KINDS) == set(VALUE_TYPES)


def test_parameters_are_refused_before_values() -> None:
    x = np.full((4, 4), np.nan, np.float32)
    with pytest.raises(UsageError, match="sparsity"):
        masks.magnitude(x, 2)
    with pytest.raises(UsageError, match="norm"):
        masks.magnitude_vector_nm(x, 1, 2, 1, norm="max")
    with pytest.raises(UsageError, match="sparsity"):
        masks.magnitude_blocks(x, (2, 2), -1)


# ------------------------------------------------------------------ on a GPU


def to_device(x: Host, apart: int = 0) -> Any:
    """x on the device, ``apart`` elements behind a boundary."""
    cupy = pytest.importorskip("cupy")
    room = cupy.zeros(x.size + apart, bits(x).dtype)
    room[apart:] = cupy.asarray(bits(x).reshape(-1))
    return room[apart:].view(x.dtype).reshape(x.shape)


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general code is there for empty arrays alone."""
    monkeypatch.setattr(masks, "keep_nm", None)
    monkeypatch.setattr(masks, "block_norms", None)
    monkeypatch.setattr(ranking, "_threshold", None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_same_as_the_host(call: str, dtype: str, request: pytest.FixtureRequest) -> None:
    name, given = CALLS[call]
    asked = []
    for (seed, shape), apart in itertools.product(enumerate(SHAPES), (0, 1)):
        x = any_bits(shape, dtype, seed)
        norms = ({"norm": "l1"}, {"norm": "l2"}) if name in NORMS else ({},)
        asked += [(x, apart, o, outcome(name, x, given, nonfinite="keep", **o)) for o in norms]
        if not apart:
            asked.append((x, 0, {"nonfinite": "refuse"}, outcome(name, x, given)))
    request.getfixturevalue("only_kernels")
    for x, apart, options, wanted in asked:
        if not x.size:
            continue
        np.testing.assert_equal(outcome(name, to_device(x, apart), given, **({"nonfinite": "keep"} | options)), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_over_many_tiles(dtype: str) -> None:
    x = np.random.default_rng(1).integers(-2, 3, (3001, 700)).astype(VALUE_TYPES[dtype].numpy)
    for sparsity in (0.1, 0.5, 0.55, 0.9):
        np.testing.assert_array_equal(masks.magnitude(to_device(x), sparsity).get(), masks.magnitude(x, sparsity))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "int8"])
def test_subnormal_values_are_ranked_by_their_magnitude(dtype: str) -> None:
    x = tiny((96, 200), dtype)
    for blocksize in ((1, 1), (4, 4), (32, 8)):
        wanted = masks.magnitude_blocks(x, blocksize, 0.5)
        np.testing.assert_array_equal(masks.magnitude_blocks(to_device(x), blocksize, 0.5).get(), wanted)
    wanted = masks.magnitude_vector_nm(x, 2, 4, 8, norm="l1")
    np.testing.assert_array_equal(masks.magnitude_vector_nm(to_device(x), 2, 4, 8, norm="l1").get(), wanted)


@pytest.mark.gpu
@pytest.mark.device_memory
def test_more_values_than_an_int_counts() -> None:
    """Only two values are above the others, one of them in the last place."""
    cupy = pytest.importorskip("cupy")
    size = (1 << 31) + 4096
    x = cupy.zeros((size >> 10, 1 << 10), "int8")
    x[0, 5], x[-1, -1] = 3, -3
    mask = masks.magnitude(x, 1 - 3 / size)
    assert int(mask.sum()) == 3
    assert bool(mask[0, 0] & mask[0, 5] & mask[-1, -1])
    mask = masks.magnitude_nm(x, 1, 4)
    assert int(mask.sum()) == size // 4
    assert bool(mask[0, 5] & mask[-1, -1] & ~mask[-1, -4])
