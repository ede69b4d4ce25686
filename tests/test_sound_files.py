"""More than 500 sound files, none of which is refused: a checker that refuses everything passes every other test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from cases import CASES, params_of

import spformat as sf
from spformat.arrays.dtypes import SAFETENSORS, VALUE_TYPES
from spformat.checkpoint.check import validate_checkpoint
from spformat.formats import FORMATS

SHAPES = ("nothing", "no_rows", "no_columns", "one", "one_row", "prime", "corner", "all_zero", "two_four", "vectors",
          "negative_zeros")  # fmt: skip


NUMPY_CODES = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "F32", "F64", "BF16")
"""What the official package writes from numpy arrays."""


def ours(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Every format x params x value type x shape that fits, one file each."""
    path = folder / "x.safetensors"
    for fmt in FORMATS:
        for params in params_of(fmt.name):
            for dtype in fmt.value_dtypes:
                for case in SHAPES:
                    try:
                        f = fmt.from_dense(CASES[case](dtype), **params)
                    except sf.errors.StructureError:
                        continue
                    sf.save(path, {"w": f, "b": f.to_dense()[:1].reshape(-1)}, overwrite=True)
                    yield path, f


def test_files_of_every_format_type_and_shape_are_accepted(tmp_path: Path) -> None:
    count = 0
    for path, f in ours(tmp_path):
        loaded: Any = sf.load(path)
        assert loaded["w"] == f
        assert loaded["w"].is_validated
        count += 1
    assert count >= 500, count


def foreign(folder: Path) -> Iterator[tuple[Path, dict[str, Any], bool]]:
    """Files of the official package: dtypes, ranks, metadata, names, headers padded or not."""
    path = folder / "x.safetensors"
    shapes = ((), (0,), (7,), (3, 5), (1, 1), (0, 4), (2, 3, 4), (1, 2, 1, 3), (2,) * 8)
    for code, dtype in SAFETENSORS.items():
        if code not in NUMPY_CODES:
            continue
        tensors = {f"{code}.{len(s)}.{i}": np.ones(s, dtype) for i, s in enumerate(shapes)}
        for metadata in (None, {}, {"format": "pt"}, {"ü": "重み", "a": "x" * 1000}):
            safetensors.numpy.save_file(tensors, path, metadata)
            yield path, tensors, True
    for name in ("a", "a.b.c", "a/b", "../x", " ", "重み", "e\u0301", "\u00e9", "x" * 1024, "spformat", "w.data"):
        safetensors.numpy.save_file({name: np.eye(3, dtype=np.float32)}, path)
        yield path, {name: np.eye(3, dtype=np.float32)}, True
    header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    for indent, padding in ((None, 0), (None, 7), (2, 0), (2, 100)):  # what older and other writers produce
        raw = json.dumps(header, indent=indent).encode() + b" " * padding
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + np.float32([1, 2]).tobytes())
        yield path, {"w": np.float32([1, 2])}, False


def test_files_of_the_official_package_are_accepted(tmp_path: Path) -> None:
    count = 0
    for path, tensors, official in foreign(tmp_path):
        with sf.safe_open(path) as f:
            assert set(f) == set(tensors)
            assert not official or f.oddities == ()
            for name, x in tensors.items():
                got = f.array(name)
                assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())
        assert all(v.error is None for v in validate_checkpoint(path))
        count += 1
    assert count >= 60


def test_files_of_torch_are_accepted(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    for name in ("bfloat16", "float16", "float32", "float64", "int8", "int64", "bool", "float8_e4m3fn", "float8_e5m2"):
        for shape in ((4, 6), (0, 3), (5,), ()):
            x = torch.ones(shape).to(getattr(torch, name))
            save_file({"model.layers.0.weight": x, "b": torch.zeros(2)}, path, {"format": "pt"})
            with sf.safe_open(path) as f:
                got = f.array("model.layers.0.weight")
                assert got.shape == shape
                assert got.tobytes() == x.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert (name in VALUE_TYPES and len(shape) == 2) == isinstance(f["model.layers.0.weight"], sf.Dense)
