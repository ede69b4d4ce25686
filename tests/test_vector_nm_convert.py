"""Vector n:m from and to dense on the device against the host code, which is the law; and what needs no device."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest
from cases import codes, nm_places

from spformat.backends.cuda import jit, vector_nm_convert
from spformat.backends.cuda.vector_nm_convert import Packing, Sizes
from spformat.dtypes import bits
from spformat.errors import StructureError
from spformat.formats import VectorNM

GRID = [
    {"n": n, "m": m, "vector_length": length}
    for n, m in ((1, 2), (2, 4), (1, 4), (3, 8), (4, 16), (8, 32), (12, 32), (32, 64), (5, 7), (200, 256))
    for length in (1, 3, 8, 32, 64, 100, 512)
]
PACKED = [
    {"n": 3, "m": 8, "vector_length": 32, "tile_rows": 128, "tile_cols": 64},
    {"n": 8, "m": 32, "vector_length": 32, "tile_rows": 64, "tile_cols": 256},
    {"n": 5, "m": 7, "vector_length": 5, "tile_rows": 20, "tile_cols": 21},
]
SIZES = {"i64": 8, "int": 4}


@pytest.mark.parametrize("struct", [Sizes, Packing], ids=lambda s: s.__name__)
def test_structs_have_the_layout_of_the_kernel_parameters(struct: type[ctypes.Structure]) -> None:
    text = re.sub(r"//.*", "", (jit.HERE / "vector_nm_convert.cu").read_text())
    body = re.search(rf"struct {struct.__name__} \{{(.*?)\}};", text, re.DOTALL)[1]
    members = [(kind, name.strip()) for kind, names in re.findall(r"(i64|int) ([^;]+);", body)
               for name in names.split(",")]  # fmt: skip
    declared = [(name, ctypes.sizeof(kind)) for name, kind in struct._fields_]
    assert declared == [(name, SIZES[kind]) for kind, name in members]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 7, 32, 33, 64, 65, 256])
def test_a_column_of_the_strip_meets_every_bank(m: int, itemsize: int) -> None:
    indices, data = np.zeros((m, 1), np.uint8), np.zeros((m, 64), f"u{itemsize}")
    sizes = vector_nm_convert._sizes((64, m), indices, data, m, m, 64)
    pitch, smem = vector_nm_convert._strip(sizes, itemsize)
    words = pitch * itemsize // 4
    banks = {r * words % 32 for r in range(32)}
    assert len(banks) == (32 if itemsize < 8 else 16)  # a value of eight bytes takes two
    assert pitch >= sizes.windows * m
    assert smem == sizes.rows * pitch * itemsize <= 99 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int8"])
def test_bits_of_the_host_code(dtype: str) -> None:
    cp = pytest.importorskip("cupy")
    for seed, params in enumerate(GRID + PACKED):
        n, m, length = params["n"], params["m"], params["vector_length"]
        for shape in ((331, 523), (1, 1), (3 * length, 2 * m), (length + 1, m - 1)):
            held = nm_places(shape, n, m, length, seed)
            x = codes(dtype, held, seed)
            host, device = VectorNM.from_dense(x, **params), VectorNM.from_dense(cp.asarray(x), **params)
            assert device == host, f"{params} {shape}"
            assert (bits(device.to_dense()).get() == bits(host.to_dense())).all(), f"{params} {shape}"


@pytest.mark.gpu
def test_refusals_of_the_host_code() -> None:
    cp = pytest.importorskip("cupy")
    for params in GRID:
        n, m, length = params["n"], params["m"], params["vector_length"]
        x = codes("float32", nm_places((200, 300), n, m, length, 7), 7)
        x[150, : min(300, m)] = 1
        x[20, 280:] = 2
        try:
            host: Any = VectorNM.from_dense(x, **params)
        except StructureError as e:
            with pytest.raises(StructureError) as found:
                VectorNM.from_dense(cp.asarray(x), **params)
            assert found.value.fields == e.fields
        else:
            assert VectorNM.from_dense(cp.asarray(x), **params) == host
