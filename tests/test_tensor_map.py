"""Tensor maps without a driver: one is encoded per form, addresses are replaced, and a refusal is not remembered."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest

from spformat.backends.cuda.runtime import tensor_map
from spformat.errors import DeviceError


def test_a_map_is_encoded_once_for_all_but_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    replaced: list[int] = []

    def encode(place: int, kind: int, rank: int, pointer: int, *_: Any) -> int:
        encoded.append(pointer)
        assert place % 64 == 0
        ctypes.memset(place, len(encoded), 128)
        return 1 if pointer % 16 else 0

    def replace(place: int, pointer: int) -> int:
        replaced.append(pointer)
        if pointer % 16:
            return 2
        ctypes.c_uint64.from_address(place).value = pointer
        return 0

    monkeypatch.setattr(tensor_map, "_driver", lambda: (encode, replace))
    monkeypatch.setattr(tensor_map, "_forms", {})

    def tiled(pointer: int, columns: int = 128, promotion: int = 128) -> tuple[int, bytes]:
        found = tensor_map.tiled(pointer, "bfloat16", (columns, 64), (columns,), (64, 8), 128, promotion)
        assert len(found) == ctypes.sizeof(tensor_map.TensorMap) == 128
        return int.from_bytes(found[:8], "little"), found[8:]

    with pytest.raises(DeviceError, match=r"cuTensorMapEncodeTiled: .* CUresult 1 for extents .*pointer 0x1001"):
        tiled(4097)
    assert tiled(4096) == tiled(4096) == (4096, b"\2" * 120)
    assert tiled(8192) == (8192, b"\2" * 120)
    assert tiled(4096, 256) == (4096, b"\3" * 120)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"cuTensorMapReplaceAddress: .* CUresult 2 for extents"):
            tiled(4097)
    assert tiled(4096) == (4096, b"\2" * 120)
    assert encoded == [4097, 4096, 4096]
    monkeypatch.setattr(tensor_map, "FORMS", 2)
    tiled(4096, 512)
    assert len(tensor_map._forms) == 1
    tiled(4096)
    assert encoded == [4097, 4096, 4096, 4096, 4096]
    assert tiled(4096, promotion=256)[1] != tiled(4096)[1]


def test_a_thread_without_a_context_gets_one_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose first call of CUDA replaces an address has no current context: 201 from the driver."""
    has_context: list[bool] = [False]
    tried: list[str] = []

    def call(name: str) -> Any:
        def at(place: int, *arguments: Any) -> int:
            tried.append(name)
            pointer = arguments[0] if name == "replace" else arguments[2]
            ctypes.c_uint64.from_address(place).value = pointer
            return 0 if has_context[0] else 201

        return at

    def made_current() -> bool:
        was, has_context[0] = has_context[0], True
        return not was

    monkeypatch.setattr(tensor_map, "_driver", lambda: (call("encode"), call("replace")))
    monkeypatch.setattr(tensor_map, "_forms", {})
    monkeypatch.setattr(tensor_map.context, "made_current", made_current)
    form = ("bfloat16", (128, 64), (128,), (64, 8), 128)
    mapped = tensor_map.tiled(4096, *form)
    assert tried == ["encode", "encode", "replace"]
    has_context[0] = False
    assert tensor_map.tiled(8192, *form).address == 8192
    copy, has_context[0] = mapped.copy(), False
    copy.move(16384)
    assert ctypes.c_uint64.from_address(copy.place).value == 16384
    assert tried[3:] == ["replace"] * 4
    monkeypatch.setattr(tensor_map.context, "made_current", lambda: False)
    has_context[0] = False
    with pytest.raises(DeviceError, match=r"cuTensorMapReplaceAddress: .* CUresult 201"):
        copy.move(4096)


def test_threads_do_not_get_the_address_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(place: int, pointer: int) -> int:
        ctypes.c_uint64.from_address(place).value = pointer
        time.sleep(0.002)
        return 0

    monkeypatch.setattr(tensor_map, "_driver", lambda: (lambda *_: 0, replace))
    form = tensor_map.Form(4096, "bfloat16", (128, 64), (128,), (64, 8), 128, 128)
    found: list[bool] = []

    def work(pointer: int) -> None:
        found.append(int.from_bytes(form.at(pointer)[:8], "little") == pointer)

    threads = [threading.Thread(target=work, args=(4096 * i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_what_the_unit_can_address() -> None:
    assert tensor_map.aligned(4096, 8, 2)
    assert not tensor_map.aligned(4096 + 8, 8, 2)
    assert not tensor_map.aligned(4096, 20, 2)
    assert tensor_map.aligned(4096, 20, 4)
    assert tensor_map.writable(4096, 16, 24, 2)
    assert not tensor_map.writable(4096, 17, 24, 2)  # its last 16 bytes hold seven values that are not of this line
    assert not tensor_map.writable(4096, 16, 20, 2)
