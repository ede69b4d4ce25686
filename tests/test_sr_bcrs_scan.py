"""SR-BCRS found sound by one launch exactly where the scans find nothing; and what needs no device."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest
from cases import CASES

from spformat.backends.cuda import jit
from spformat.backends.cuda.sr_bcrs_scan import Extents
from spformat.dtypes import VALUE_TYPES
from spformat.errors import InvariantError
from spformat.formats import SRBCRS
from spformat.formats.base import Format

DTYPES = ("bfloat16", "float32", "float64", "int8")


def test_extents_have_the_layout_of_the_kernel_parameter() -> None:
    text = (jit.HERE / "sr_bcrs_scan.cu").read_text()
    body = re.search(r"struct Extents \{(.*?)\};", text, re.DOTALL)[1]
    members = [(kind, name) for kind, names in re.findall(r"(i64|int) ([^;]+);", body) for name in names.split(", ")]
    sizes = {"i64": 8, "int": 4}
    assert [(n, ctypes.sizeof(kind)) for n, kind in Extents._fields_] == [(n, sizes[kind]) for kind, n in members]


def test_without_a_device_the_scans_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    a = SRBCRS.from_dense(np.eye(8, dtype=np.float32))
    assert not a.found_sound()
    monkeypatch.setattr(SRBCRS, "found_sound", lambda self: True)
    monkeypatch.setattr(SRBCRS, "check_memory", None)  # not asked
    fresh: Format = a.with_arrays(**a.arrays())
    assert fresh.validate().is_validated


def damaged(a: SRBCRS, rng: np.random.Generator) -> SRBCRS:
    """Up to two words of one array changed: swapped, moved by one, PAD, zeros of both signs, or anything."""
    arrays = {k: v.copy() for k, v in a.arrays().items()}
    name = str(rng.choice(list(arrays)))
    raw: Any = arrays[name].reshape(-1)
    if name == "data":
        raw = raw.view(VALUE_TYPES[a.dtype.name].bits)
    if raw.size:
        i, j = rng.integers(0, raw.size, 2)
        top = int(np.iinfo(raw.dtype).max)
        values = (raw[j], raw[i] ^ 1, -1 if name != "data" else 0, 0, top ^ (top >> 1), 1, rng.integers(0, 64))
        raw[i], raw[j] = np.array(values[rng.integers(len(values))]).astype(raw.dtype), raw[i]
    return a.with_arrays(**arrays)


def on_device(x: Any) -> Any:
    import cupy

    raw = np.dtype(f"u{x.dtype.itemsize}")
    return cupy.asarray(x.view(raw)).view(x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_sound_exactly_where_the_scans_find_nothing(dtype: str) -> None:
    pytest.importorskip("cupy")
    rng, verdicts = np.random.default_rng(1), set()
    for name, make in CASES.items():
        for params in ({}, {"vector_length": 3, "stride": 5}, {"vector_length": 16, "stride": 8}):
            a = SRBCRS.from_dense(make(dtype), **params)
            assert a.to("cuda").with_arrays(**a.to("cuda").arrays()).found_sound() or not a.tiles, name
            for _ in range(12):
                b = damaged(a, rng)
                try:
                    b.validate()
                    sound = True
                except InvariantError as e:
                    sound, error = False, e
                there = b.with_arrays(**{k: on_device(v) for k, v in b.arrays().items()})
                assert there.found_sound() == (sound and b.tiles > 0), (name, params, b.arrays())
                verdicts.add(sound)
                if not sound:
                    with pytest.raises(type(error)) as e:
                        there.validate()
                    assert e.value.message == error.message
    assert verdicts == {True, False}
