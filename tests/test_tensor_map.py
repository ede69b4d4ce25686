"""Tensor maps without a driver: what is asked of it, and what it refuses."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from spformat.backends.cuda import tensor_map
from spformat.errors import DeviceError


def test_the_map_is_what_the_driver_writes_and_a_refusal_names_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode(place: int, kind: int, rank: int, pointer: int, *_: Any) -> int:
        assert place % 64 == 0
        ctypes.memset(place, kind, 128)
        return 1 if pointer % 16 else 0

    monkeypatch.setattr(tensor_map, "_encode", lambda: encode)

    def tiled(pointer: int) -> bytes:
        return bytes(tensor_map.tiled(pointer, "bfloat16", (128, 64), (128,), (64, 8), 128))

    assert tiled(4096) == b"\x09" * 128
    with pytest.raises(DeviceError, match=r"CUresult 1 for extents \(128, 64\), .* pointer 0x1001"):
        tiled(4097)
