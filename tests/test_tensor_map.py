"""Tensor maps without a driver: one is made per matrix in use, and a refusal is not remembered."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from spformat.backends.cuda import tensor_map
from spformat.errors import DeviceError


def test_a_map_is_made_once_for_a_place_and_its_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def encode(place: int, kind: int, rank: int, pointer: int, *_: Any) -> int:
        made.append(pointer)
        ctypes.memset(place, len(made), 128)
        return 1 if pointer % 16 else 0

    monkeypatch.setattr(tensor_map, "_encode", lambda: encode)
    tensor_map.tiled.cache_clear()

    def tiled(pointer: int, columns: int = 128) -> bytes:
        return bytes(tensor_map.tiled(pointer, "bfloat16", (columns, 64), (columns,), (64, 8), 128))

    try:
        assert tiled(4096) == tiled(4096) == b"\1" * 128
        assert tiled(8192) == b"\2" * 128
        assert tiled(4096, 256) == b"\3" * 128
        assert tiled(4096) == b"\1" * 128
        for _ in range(2):
            with pytest.raises(DeviceError, match="CUresult 1 for extents"):
                tiled(4097)
        assert made == [4096, 8192, 4096, 4097, 4097]
    finally:
        tensor_map.tiled.cache_clear()
