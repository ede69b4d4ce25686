"""Vector n:m from and to dense, four rows at a time, on the device against the host code; and parts that need no device."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import emulator
import numpy as np
import pytest
from cases import codes, nm_places
from emulator.process import printed
from test_expand_on_a_gpu import expanded

from spformat.arrays.dtypes import bits
from spformat.arrays.library import ceil_div
from spformat.backends.cuda.runtime import jit
from spformat.backends.cuda.vector_nm import vector_nm_convert, vector_nm_quads
from spformat.backends.cuda.vector_nm.vector_nm_quads import QUAD, ROWS, Sizes
from spformat.errors import StructureError
from spformat.formats import VectorNM

PATTERNS = [
    {"n": n, "m": m, "vector_length": length}
    for n, m, length in (
        (8, 32, 32), (1, 1, 4), (1, 2, 8), (2, 4, 128), (3, 4, 100), (3, 8, 4), (4, 16, 16), (16, 16, 12), (31, 32, 64),
    )
]  # fmt: skip
PACKED = [
    {"n": 3, "m": 8, "vector_length": 32, "tile_rows": 128, "tile_cols": 64},
    {"n": 8, "m": 32, "vector_length": 32, "tile_rows": 64, "tile_cols": 256},
]
SHAPES = ((331, 520), (1, 8), (128, 64), (257, 72), (30, 1032))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy, while the kernels for everything else cannot be launched."""
    cp = pytest.importorskip("cupy")
    monkeypatch.setattr(vector_nm_convert, "_wide", None)  # every launch of those asks it
    return cp


def test_the_struct_has_the_layout_of_the_kernel_parameter() -> None:
    text = re.sub(r"//.*", "", (jit.HERE / "vector_nm/vector_nm_quads.cu").read_text())
    declared = re.search(r"struct Sizes \{(.*?)\};", text, re.DOTALL)
    assert declared
    members = [(name.strip(), {"i64": 8, "int": 4}[kind]) for kind, names in re.findall(r"(i64|int) ([^;]+);", declared[1])
               for name in names.split(",")]  # fmt: skip
    assert [(field[0], ctypes.sizeof(field[1])) for field in Sizes._fields_] == members


def test_products_with_the_reciprocals_are_quotients() -> None:
    for length in range(QUAD, ROWS + 1, QUAD):
        packed, _ = vector_nm_quads._sizes((200, 64), (64, ceil_div(200, length)), 200, 1, 1, length)
        sizes = Sizes.from_buffer_copy(packed)
        quads = range(sizes.groups * sizes.per)
        assert len(quads) <= ROWS // QUAD
        assert [q * sizes.reciprocal >> 16 for q in quads] == [q // sizes.per for q in quads]
    for n in range(1, 33):
        sizes = Sizes.from_buffer_copy(vector_nm_quads._sizes((4, 64), (2 * n, 1), 4, n, 32, 4)[0])
        assert [lane * sizes.windows >> 16 for lane in range(32)] == [lane // n for lane in range(32)]


@pytest.mark.parametrize(
    ("address", "ld", "K", "m", "length", "dtype", "taken"),
    [
        (16, 64, 64, 32, 32, "u2", True),
        (16, 72, 64, 1, 128, "u2", True),
        (8, 64, 64, 32, 32, "u2", False),
        (16, 68, 64, 32, 32, "u2", False),
        (16, 64, 60, 32, 32, "u2", False),
        (16, 64, 64, 64, 32, "u2", False),
        (16, 64, 64, 12, 32, "u2", False),
        (16, 64, 64, 32, 30, "u2", False),
        (16, 64, 64, 32, 132, "u2", False),
        (16, 64, 64, 32, 32, "u4", False),
    ],
)
def test_what_is_taken(address: int, ld: int, K: int, m: int, length: int, dtype: str, taken: bool) -> None:
    class Memory:
        ptr = 1024

    class Data:
        dtype, shape, data = np.dtype("u2"), (8, 64), Memory()

    Data.dtype = np.dtype(dtype)
    assert vector_nm_quads.takes(address, ld, K, Data(), m, length) == taken
    Memory.ptr = 1028
    assert not vector_nm_quads.takes(address, ld, K, Data(), m, length)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bits_of_the_host_code(dtype: str, alone: Any) -> None:
    for seed, params in enumerate(PATTERNS + PACKED):
        n, m, length = params["n"], params["m"], params["vector_length"]
        for shape in SHAPES:
            kept = nm_places(shape, n, m, length, seed)
            kept[:, np.arange(shape[1]) % 5 == 2] = False  # so that some windows hold fewer than n vectors
            x = codes(dtype, kept, seed)
            host, device = VectorNM.from_dense(x, **params), VectorNM.from_dense(alone.asarray(x), **params)
            assert device == host, f"{params} {shape}"
            dense = bits(device.to_dense()).get()
            assert (dense == bits(host.to_dense())).all(), f"{params} {shape}"


@pytest.mark.gpu
@pytest.mark.parametrize("further", [0, 8, 64])
def test_nothing_is_written_outside(further: int, alone: Any) -> None:
    """Into an array whose rows are longer than those of the matrix, between guards."""
    for seed, params in enumerate(PATTERNS):
        for shape in SHAPES:
            kept = nm_places(shape, params["n"], params["m"], params["vector_length"], seed)
            a = VectorNM.from_dense(codes("float16", kept, seed), **params)
            got = expanded(alone, a.to("cuda"), shape[1] + further, 0)
            assert (got == bits(a.to_dense())).all(), f"{params} {shape}"


@pytest.mark.gpu
def test_refusals_of_the_host_code(alone: Any) -> None:
    refused = 0
    for seed, params in enumerate(PATTERNS):
        n, m, length = params["n"], params["m"], params["vector_length"]
        x = codes("bfloat16", nm_places((300, 328), n, m, length, seed), seed)
        x[150, :m] = 1
        x[299, 320:] = 2
        try:
            host: Any = VectorNM.from_dense(x, **params)
        except StructureError as e:
            refused += 1
            with pytest.raises(StructureError) as seen:
                VectorNM.from_dense(alone.asarray(x), **params)
            assert seen.value.fields == e.fields
        else:
            assert VectorNM.from_dense(alone.asarray(x), **params) == host
    assert refused > len(PATTERNS) // 2


PLANTED = """
from emulator import stand_in
from emulator.planted import plant
planted = plant({old!r}, {new!r}, "vector_nm/vector_nm_quads.cu")
stand_in.install()
import cupy
import test_vector_nm_quads as quads
for test, args in ((quads.test_bits_of_the_host_code, ("bfloat16", cupy)), (quads.test_refusals_of_the_host_code, (cupy,))):
    try:
        test(*args)
        print("equal")
    except (Exception, SystemExit) as e:
        print("DIFFERENT", e)
assert any(planted)
"""
BARRIER = "    __syncthreads();\n"


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(((v & LOW) + LOW) | live)", "ALL"),
        ("(value & live) != 0", "value != 0"),
        ("vacant < spare ? vacant : spare", "vacant"),
        ("taken = window.at < s.n, k = window.at;", ""),
        ("* 512 + kept", "* 512 + kept + 1"),
        ("(u8)(swizzled(place[u * QUADS + g])", "(u8)((int)(place[u * QUADS + g])"),
        ("left < 4 ? left : 4", "4"),
        (BARRIER + "\n    for (int i = b.warp", "\n    for (int i = b.warp"),
        (BARRIER + "\n    const int vectors", "\n    const int vectors"),
        (BARRIER + "\n    const int rows", "\n    const int rows"),
        ("values[vectors * PITCH + b.lane] = Quad{};", ";"),
        ("? k : vectors", "? k : 0"),
    ],
    ids=[
        "negative zeros stay", "negative zeros count", "free places", "addresses of refused windows", "number of vectors",
        "swizzled positions", "rows outside", "strip not there", "places not there", "values not there", "no zeros",
        "another vector",
    ],
)  # fmt: skip
def test_a_planted_defect_is_found(old: str, new: str) -> None:
    assert "DIFFERENT" in printed(PLANTED.format(old=old, new=new))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
def test_without_a_defect_all_is_equal() -> None:
    assert printed(PLANTED.format(old="", new="")).split() == ["equal"] * 2
