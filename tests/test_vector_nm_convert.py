"""Vector n:m from and to dense on the device against the host code, the reference; and parts that need no device."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest
from cases import codes, nm_places

from spformat import Dense
from spformat.arrays.dtypes import bits
from spformat.backends.cuda.runtime import jit
from spformat.backends.cuda.vector_nm import vector_nm_convert
from spformat.backends.cuda.vector_nm.vector_nm_convert import Packing, Ranking, Sizes
from spformat.errors import StructureError, UsageError
from spformat.formats import VectorNM
from spformat.preprocess import masks
from spformat.products.roofline import shared_limit

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
SIZES = {"i64": 8, "int": 4, "u32": 4}


@pytest.mark.parametrize("struct", [Sizes, Packing, Ranking], ids=lambda s: s.__name__)
def test_structs_have_the_layout_of_the_kernel_parameters(struct: type[ctypes.Structure]) -> None:
    text = re.sub(r"//.*", "", (jit.HERE / "vector_nm/vector_nm_convert.cu").read_text())
    body = re.search(rf"struct {struct.__name__} \{{(.*?)\}};", text, re.DOTALL)[1]
    members = [(kind, name.strip()) for kind, names in re.findall(r"(i64|int|u32) ([^;]+);", body)
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


def any_bits(shape: tuple[int, int], dtype: str, seed: int) -> np.ndarray[Any, Any]:
    """Specials and zeros; half of the rows hold few different magnitudes, so that norms tie."""
    rng = np.random.default_rng(seed)
    x = codes(dtype, rng.random(shape) < 0.7, seed)
    x[::2] = rng.integers(-2, 3, x[::2].shape).astype(x.dtype)
    x[:, rng.random(shape[1]) < 0.2] = 0
    return x


def pruned_by_mask(x: Any, params: dict[str, int], norm: str = "l2") -> VectorNM:
    n, m, length = params["n"], params["m"], params["vector_length"]
    mask = masks.magnitude_vector_nm(x, n, m, length, norm=norm, nonfinite="keep")
    return VectorNM.from_dense(masks.apply(x, mask), **params)


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_pruned_equals_mask_and_conversion(norm: str) -> None:
    for params in (GRID[9], PACKED[0]):
        x = any_bits((70, 90), "float32", 2)
        assert masks.prune_vector_nm(x, **params, norm=norm, nonfinite="keep") == pruned_by_mask(x, params, norm)
        x = Dense.from_dense(np.nan_to_num(x, nan=1, posinf=2, neginf=3))
        assert masks.prune_vector_nm(x, **params, norm=norm) == pruned_by_mask(x.data, params, norm)


def test_pruning_refuses() -> None:
    x = np.ones((4, 8), np.float16)
    with pytest.raises(UsageError, match="n: expected at most m"):
        masks.prune_vector_nm(x, 5, 4, 2)
    with pytest.raises(UsageError, match="norm"):
        masks.prune_vector_nm(x, 2, 4, 2, norm="l3")
    with pytest.raises(UsageError, match="nonfinite"):
        masks.prune_vector_nm(x, 2, 4, 2, nonfinite="drop")
    x[2, 5] = np.inf
    with pytest.raises(StructureError, match="row 2, column 5"):
        masks.prune_vector_nm(x, 2, 4, 2)


def most_room(params: dict[str, int], itemsize: int) -> int:
    """Bytes of shared memory that suffice to prune: for 64 rows or a vector of more the values, norms and positions."""
    length, wide = params["vector_length"], max(64, params["m"])
    return max(1, 64 // length) * (length * (wide + 2) * itemsize + 10 * wide + 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int8"])
def test_pruned_on_the_device_as_by_mask(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cp = pytest.importorskip("cupy")
    cases = []
    for seed, params in enumerate(GRID + PACKED):
        m, length = params["m"], params["vector_length"]
        for shape in ((331, 523), (1, 1), (length + 1, m - 1)):
            x, norm = any_bits(shape, dtype, seed), ("l2", "l1")[seed % 2]
            cases.append((x, params, norm, pruned_by_mask(x, params, norm)))
    if dtype in vector_nm_convert.KINDS:  # the mask runs only if a row group is too large for the kernel
        limit = shared_limit(int(cp.cuda.Device().compute_capability))
        roomy = [c for c in cases if most_room(c[1], c[0].itemsize) <= limit]
        assert len(roomy) > len(cases) // 2
        with monkeypatch.context() as patch:
            patch.setattr(masks, "magnitude_vector_nm", None)
            for x, params, norm, wanted in roomy:
                made = masks.prune_vector_nm(cp.asarray(x), **params, norm=norm, nonfinite="keep")
                assert made.to("cpu") == wanted, f"{params} {norm} {x.shape}"
        cases = [c for c in cases if most_room(c[1], c[0].itemsize) > limit]
    for x, params, norm, wanted in cases:
        made = masks.prune_vector_nm(cp.asarray(x), **params, norm=norm, nonfinite="keep")
        assert made.to("cpu") == wanted, f"{params} {norm} {x.shape}"


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_nonfinite_refused_on_the_device_as_on_the_host(dtype: str, value: str) -> None:
    cp = pytest.importorskip("cupy")
    x = np.ones((70, 130), codes(dtype, np.zeros((1, 1), bool)).dtype)
    x[69, 129] = x[3, 77] = float(value)
    seen = []
    for source in (x, cp.asarray(x)):
        with pytest.raises(StructureError) as e:
            masks.prune_vector_nm(source, 8, 32, 32)
        seen.append((e.value.message, e.value.fields))
    assert seen[0] == seen[1]
    assert seen[0][1]["first"] == (3, 77)
