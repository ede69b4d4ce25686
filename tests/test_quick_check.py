"""A scan in one launch accepts exactly what ``check_memory`` and ``check_canonical`` accept; parts that need no device."""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import CASES, params_of

from spformat import errors
from spformat.backends.cuda.ell_buckets.ell_buckets_scan import Extents
from spformat.backends.cuda.runtime import jit, scan_launch
from spformat.backends.cuda.two_four.two_four_scan import Places
from spformat.formats import BSR, CSR, DBSR, SRBCRS, Bitmask, ELLBuckets, TwoFour, VectorNM
from spformat.formats.base import Format
from spformat.formats.meta_orders import META_ORDERS, meta_steps, order_view

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8")
SCANNED: tuple[type[Format], ...] = (CSR, Bitmask, BSR, DBSR, SRBCRS, TwoFour, VectorNM, ELLBuckets)
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "bsr": ({"blocksize": (64, 64)},),
    "sr-bcrs": ({"vector_length": 16, "stride": 8},),
    "ell-buckets": ({"column_parts": 2, "max_width": 2}, {"column_parts": 5, "max_width": 16}),
    "vector-nm": ({"n": 2, "m": 2, "vector_length": 64}, {"n": 7, "m": 7, "vector_length": 1}),
}
"""Parameters beside those of the other tests."""


def sound_by_name(f: Format) -> bool:
    """The verdict of the checks that name an offender."""
    try:
        f.check_memory()
        f.check_canonical()
    except errors.InvariantError:
        return False
    return True


def matrices(fmt: type[Format], dtype: str) -> Iterator[Format]:
    """Every case in the format with every set of parameters that takes it, and one with 64-bit indices."""
    if fmt in (CSR, BSR, DBSR, SRBCRS, ELLBuckets):
        yield far(fmt, dtype)
    for make in CASES.values():
        for params in (*params_of(fmt.name), *MORE.get(fmt.name, ())):
            try:
                yield fmt.from_dense(make(dtype), **params)
            except errors.StructureError:
                continue


def changed(a: Format, name: str, at: int, value: int) -> Format:
    """``a`` with one word of an array, taken as unsigned, replaced."""
    arrays = {k: v.copy() for k, v in a.arrays().items()}
    raw = arrays[name].reshape(-1).view(f"u{arrays[name].dtype.itemsize}")
    raw[at] = value % 2 ** (8 * raw.itemsize)
    return a.with_arrays(**arrays)


def broken(a: Format) -> Iterator[Format]:
    """One word of one array changed: the first, middle and last, in every way that may break a rule."""
    for name, array in a.arrays().items():
        raw = array.reshape(-1).view(f"u{array.dtype.itemsize}")
        top = 1 << (8 * raw.itemsize - 1)
        for at in sorted({0, raw.size // 2, raw.size - 1}) if raw.size else ():
            old, beside = int(raw[at]), int(raw[at - 1])
            steps = (1, 2, 5, 16, 1 << 4, 1 << 8, 1 << 12) if array.dtype == np.uint16 else (1, 2, 7)
            values = {0, 1, -1, top, top - 1, beside, *(old + s for s in steps), *(old - s for s in steps), old ^ top}
            values |= {a.shape[0], a.shape[1], a.shape[1] - 1}
            for value in sorted(values - {old}):
                yield changed(a, name, at, value)


def mutated(a: Format, rng: np.random.Generator) -> Format:
    """A few bytes of one array changed at random, or two words exchanged."""
    arrays = {k: v.copy() for k, v in a.arrays().items()}
    name = str(rng.choice([k for k, v in arrays.items() if v.size] or [next(iter(arrays))]))
    raw = arrays[name].reshape(-1).view(f"u{arrays[name].dtype.itemsize}")
    if raw.size and rng.random() < 0.3:
        i, j = rng.integers(raw.size, size=2)
        raw[i], raw[j] = raw[j], raw[i]
    elif raw.size:
        octets = raw.view(np.uint8)
        octets[rng.integers(octets.size, size=rng.integers(1, 4))] ^= np.uint8(1 << rng.integers(8))
    return a.with_arrays(**arrays)


def rearranged(a: ELLBuckets, rng: np.random.Generator) -> Iterator[Format]:
    """Rules between ELL rows broken, those inside one kept: ELL rows or parts of them exchanged, counts changed."""
    widths = np.repeat(a.bucket_widths, a.rows_per_bucket)
    starts, live = np.cumsum(widths) - widths, a.source >= 0
    for _ in range(12 if widths.size > 1 else 0):
        i, j = rng.choice(widths.size, 2, replace=False)
        width = min(widths[i], widths[j])
        one, other = slice(starts[i], starts[i] + width), slice(starts[j], starts[j] + width)
        arrays = {k: v.copy() for k, v in a.arrays().items()}
        for name in (("row_ids",), ("source",), ("indices", "data"), tuple(arrays))[rng.integers(4)]:
            x = arrays[name]
            if name == "row_ids":
                x[[i, j]] = x[[j, i]]
            else:
                x[one], x[other] = x[other].copy(), x[one].copy()
        yield a.with_arrays(**arrays)
    for step in (1, -1):
        source = a.source.copy()
        source[live] = (source[live] + step) % live.sum()
        yield a.with_arrays(source=source)
    for b in np.flatnonzero(a.rows_per_bucket):
        for split in {0, a.split_per_bucket[b] - 1, a.split_per_bucket[b] + 1, a.rows_per_bucket[b]}:
            if 0 <= split <= a.rows_per_bucket[b]:
                counts = (*a.split_per_bucket[:b], int(split), *a.split_per_bucket[b + 1 :])
                yield a.with_arrays(split_per_bucket=counts)


def damaged(a: Format, rng: np.random.Generator) -> Iterator[Format]:
    """What a scan is tried with beside ``a``."""
    yield from broken(a)
    if isinstance(a, ELLBuckets):
        yield from rearranged(a, rng)
    for _ in range(20):
        yield mutated(a, rng)


def ell(widest: int, rows: tuple[int, ...], split: tuple[int, ...], row_ids: list[int], source: list[int]) -> Format:
    """An ELL bucket matrix of 3 x 8 with one part, whose items are 1, in the columns of their positions in the CSR."""
    places = np.array(source, np.int32)
    return ELLBuckets(shape=(3, 8), column_parts=1, max_width=widest, rows_per_bucket=rows, split_per_bucket=split,
                      row_ids=np.array(row_ids, np.int32), indices=places, data=(places >= 0).astype(np.float16),
                      source=places)  # fmt: skip


def handmade() -> dict[str, Format]:
    """Objects that break one rule in a way that random changes of words hardly ever produce."""
    one, ints = np.ones((1, 2, 2), np.float16), np.int32
    outside = TwoFour.from_dense(np.zeros((1, 68), np.float16))
    outside.data[0, 34] = 1
    return {
        "a listed block row without a block": DBSR(
            shape=(4, 4), blocksize=(2, 2), row_ids=np.array([0, 1], ints), indptr=np.array([0, 0, 1], ints),
            indices=np.array([1], ints), data=one),
        "a pointer that falls where nothing is stored": CSR(
            shape=(3, 4), indptr=np.array([0, 1, 0, 0], ints), indices=np.zeros(0, ints), data=np.zeros(0, np.float16)),
        "the first column behind the last": outside.with_arrays(data=outside.data),
        "a group of padding": SRBCRS(
            shape=(1, 8), vector_length=1, stride=2, indptr=np.array([0, 2], ints),
            indices=np.array([[0, 1], [-1, -1]], ints), data=np.array([[[1, 1]], [[0, 0]]], np.float16)),
        "padding between columns": SRBCRS(
            shape=(1, 8), vector_length=1, stride=3, indptr=np.array([0, 1], ints),
            indices=np.array([[0, -1, 3]], ints), data=np.array([[[1, 0, 1]]], np.float16)),
        "a position of the CSR left out": ell(4, (1, 0, 1), (0, 0, 0), [1, 0], [4, 0, 1, 2, -1]),
        "two ELL rows at one position": ell(2, (2, 1), (0, 0), [1, 2, 0], [2, 2, 0, 1]),
        "an ELL row in too wide a bucket": ell(4, (0, 0, 1), (0, 0, 0), [0], [0, 1, -1, -1]),
        "an ELL row without an item": ell(2, (0, 2), (0, 0), [0, 1], [0, 1, -1, -1]),
        "a chunk that is not full": ell(4, (0, 0, 2), (0, 0, 2), [0, 0], [0, 1, 2, -1, 3, -1, -1, -1]),
        "chunks of less than the widest": ell(4, (0, 2, 0), (0, 2, 0), [0, 0], [0, 1, 2, 3]),
        "the last chunk in a narrow bucket": ell(2, (1, 1), (1, 1), [0, 0], [2, 0, 1]),
        "chunks out of order": ell(2, (0, 2), (0, 2), [0, 0], [2, 3, 0, 1]),
        "rows out of order": ell(2, (0, 2), (0, 0), [1, 0], [0, 1, 2, 3]),
    }  # fmt: skip


def far(fmt: type[Format], dtype: str) -> Format:
    """Five items in a matrix so large that columns, and rows if there is no longer dimension, take 64 bits."""
    K, x = 1 << 44, np.array([1, 2, 3, 4, 5], dtype)
    a = CSR(shape=(3, K), indptr=np.array([0, 2, 2, 5], np.int32),
            indices=np.array([0, K - 1, 7, 1 << 35, (1 << 35) + 9]), data=x)  # fmt: skip
    made = fmt.from_csr(a, **({"blocksize": (2, 4)} if fmt in (BSR, DBSR) else {}))
    if fmt in (DBSR, ELLBuckets):
        row_ids = made.arrays()["row_ids"].astype(np.int64)
        row_ids[row_ids == row_ids[-1]] = (1 << 39) - 1
        return made.with_arrays(shape=(1 << 40, K), row_ids=row_ids)
    return made


def on_device(f: Format) -> Format:
    """A copy whose arrays each are an allocation of their own, without the validated mark."""
    import cupy

    def there(x: Any) -> Any:
        return cupy.asarray(x.view(f"u{x.dtype.itemsize}")).view(x.dtype)

    return f.with_arrays(**{k: there(v) for k, v in f.arrays().items()})


# ------------------------------------------------------------------ without a GPU


@pytest.mark.parametrize("fmt", SCANNED, ids=lambda f: f.name)
def test_without_a_device_the_checks_decide(fmt: type[Format], monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"n": 2, "m": 2} if fmt is VectorNM else {}
    a = fmt.from_dense(np.diag(np.arange(8, dtype=np.float16)), **params)
    assert not a.quick_check()
    monkeypatch.setattr(fmt, "quick_check", lambda self: True)
    monkeypatch.setattr(fmt, "check_memory", None)  # not asked
    fresh: Format = a.with_arrays(**a.arrays())
    assert fresh.validate().is_validated


def test_every_damage_is_tried_on_something_sound_and_on_something_broken() -> None:
    for fmt in SCANNED:
        rng, verdicts = np.random.default_rng(0), set()
        for a in matrices(fmt, "float16"):
            assert sound_by_name(a)
            verdicts |= {sound_by_name(b) for b in (mutated(a, rng), mutated(a, rng))}
        assert verdicts == {True, False}, fmt.name


@pytest.mark.parametrize("what", handmade())
def test_the_checks_refuse_what_is_made_by_hand(what: str) -> None:
    assert not sound_by_name(handmade()[what])


@pytest.mark.parametrize("order", META_ORDERS)
def test_steps_lead_to_every_word(order: str) -> None:
    shape = Mp, Kp = 96, 192
    r32, r16, r8, r1, shift, outer, inner = meta_steps(shape, order)
    words = order_view(np.arange(Mp * Kp // 16), shape, order).reshape(Mp, Kp // 16)
    for (r, q), at in np.ndenumerate(words):
        rows = r // 32 * r32 + r % 32 // 16 * r16 + r % 16 // 8 * r8 + r % 8 * r1
        assert rows + (q >> shift) * outer + q % 2**shift * inner == at, (r, q)


@pytest.mark.parametrize(
    ("source", "twin"), [("two_four/two_four_scan", Places), ("ell_buckets/ell_buckets_scan", Extents)]
)
def test_structures_have_the_layout_of_the_kernel_parameter(source: str, twin: type[ctypes.Structure]) -> None:
    text = (jit.HERE / f"{source}.cu").read_text()
    body = re.search(rf"struct {twin.__name__} \{{(.*?)\}};", text, re.DOTALL)[1]
    members = [(kind, name) for kind, names in re.findall(r"(i64|int) ([^;]+);", body) for name in names.split(", ")]
    sizes = {"i64": 8, "int": 4}
    assert [(n, ctypes.sizeof(kind)) for n, kind in twin._fields_] == [(n, sizes[kind]) for kind, n in members]


def test_blocks_have_the_threads_that_the_kernels_count_with() -> None:
    text = (jit.INCLUDE / "spformat" / "scan.cuh").read_text()
    assert int(re.search(r"constexpr int THREADS = (\d+);", text)[1]) == scan_launch.THREADS


@pytest.mark.parametrize(
    ("nbytes", "lanes"), [(0, 1), (1, 1), (16, 1), (17, 2), (64, 4), (72, 8), (511, 32), (1 << 40, 32)]
)
def test_lanes_that_look_at_a_piece(nbytes: int, lanes: int) -> None:
    assert scan_launch.span(nbytes) == lanes


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", SCANNED, ids=lambda f: f.name)
def test_sound_exactly_where_the_checks_find_nothing(fmt: type[Format], dtype: str) -> None:
    pytest.importorskip("cupy")
    if dtype not in fmt.value_dtypes:
        pytest.skip(f"{fmt.name} does not hold {dtype}")
    if fmt is TwoFour and dtype not in ("float16", "bfloat16"):
        pytest.skip("the scan of two-four reads 16-bit values; for others the checks run on the device")
    rng, verdicts, named = np.random.default_rng(zlib.crc32(dtype.encode())), set(), 0
    for a in matrices(fmt, dtype):
        there = on_device(a)
        assert there.quick_check(), a
        if dtype == "float16":  # after a scan refuses, the checks run, on a device as well
            there.check_memory()
            there.check_canonical()
        few = list(damaged(a, rng))
        for i in rng.permutation(len(few))[: 40 if a.stored < 2000 else 12]:
            b = few[i]
            sound = sound_by_name(b)
            there = on_device(b)
            assert there.quick_check() == sound, (b, b.arrays())
            verdicts.add(sound)
            if not sound and named < 20:  # the same message from both
                named += 1
                with pytest.raises(errors.InvariantError) as here:
                    b.validate()
                with pytest.raises(type(here.value)) as e:
                    there.validate()
                assert e.value.message == here.value.message
    assert verdicts == {True, False}


@pytest.mark.gpu
@pytest.mark.parametrize("what", handmade())
def test_what_is_made_by_hand_is_not_quick_check(what: str) -> None:
    pytest.importorskip("cupy")
    assert not on_device(handmade()[what]).quick_check()


@pytest.mark.gpu
def test_a_large_matrix_is_quick_check_and_one_word_breaks_it() -> None:
    """More than one round of every loop; the first, a middle and the last word of each array."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(2)
    x = rng.integers(1, 100, (2051, 4100)).astype(np.float16)
    x[:, 0::4] = x[:, 3::4] = 0
    cases: tuple[tuple[Any, dict[str, Any]], ...] = (
        (CSR, {}), (Bitmask, {}), (BSR, {"blocksize": (64, 64)}), (DBSR, {"blocksize": (8, 8)}), (SRBCRS, {}),
        (TwoFour, {}), (TwoFour, {"meta_order": "cutlass-sm80"}), (VectorNM, {"n": 2, "m": 4, "vector_length": 16}),
        (ELLBuckets, {"column_parts": 3}),
    )  # fmt: skip
    for fmt, params in cases:
        a = fmt.from_dense(x, **params).to("cuda")
        assert a.with_arrays(**a.arrays()).quick_check(), fmt.name
        for name, array in a.arrays().items():
            places = {0, array.size // 2, array.size - 1} if array.size else set()
            for at in places if name != "data" or not fmt.keeps_stored_zeros else ():
                worse = array.copy()
                raw = worse.reshape(-1).view(f"u{array.dtype.itemsize}")
                raw[at] = raw.dtype.type(1 << (8 * raw.itemsize - 1))  # -0.0, or far out of range
                assert not a.with_arrays(**{name: worse}).quick_check(), (fmt.name, name, at)
    assert cupy.cuda.runtime.getDevice() == 0
