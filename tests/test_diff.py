"""`spformat diff`: which values of two checkpoints differ, whatever their types and layouts."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
from test_checkpoint import SOURCES, same_values

import spformat as sf
from spformat.checkpoint import convert_checkpoint
from spformat.checkpoint.diff import diff_checkpoints


def test_diff_finds_the_one_changed_value(tmp_path: Path) -> None:
    tensors = safetensors.numpy.load_file(SOURCES[0])
    changed = {k: v.copy() for k, v in tensors.items()}
    changed["hidden1.weight"][3, 5] = 9
    sf.save_dense(tmp_path / "b.safetensors", changed)
    differing = {n: d for n, d in diff_checkpoints(SOURCES[0], tmp_path / "b.safetensors") if d}
    assert list(differing) == ["hidden1.weight"]
    assert (differing["hidden1.weight"].count, differing["hidden1.weight"].index) == (1, (3, 5))


def test_tensors_that_are_bytes_to_numpy_are_compared(tmp_path: Path) -> None:
    def written(name: str, changed: int = 0, code: str = "F4") -> Path:
        raw = bytearray(range(64))
        raw[40] ^= changed
        header = {"q": {"dtype": code, "shape": [8, 16] if code == "F4" else [64], "data_offsets": [0, 64]}}
        text = json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw)
        return path

    a = written("a.safetensors")
    convert_checkpoint(a, tmp_path / "packed", "auto")
    same_values(a, tmp_path / "packed")
    ((_, d),) = diff_checkpoints(a, written("b.safetensors", changed=3))
    assert d is not None
    assert (d.what, d.count, d.index) == ("1 of 64 bytes differ, first byte 40: 40 against 43", 1, (40,))
    ((_, d),) = diff_checkpoints(a, written("c.safetensors", code="F8_E5M2FNUZ"))
    assert d is not None
    assert d.what == "F4[8, 16] against F8_E5M2FNUZ[64]"


def test_a_nan_that_is_no_value_of_a_matrix_equals_itself(tmp_path: Path) -> None:
    scales = np.array([255, 127], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    waves = np.array([1 + 2j, np.nan, complex(0, np.inf)], np.complex64)
    sf.save_dense(tmp_path / "a.safetensors", {"scales": scales, "waves": waves})
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "packed", "auto")
    same_values(tmp_path / "a.safetensors", tmp_path / "packed")
    other = {"scales": scales[::-1].copy(), "waves": np.where(waves == 1 + 2j, 1, waves).astype(np.complex64)}
    sf.save_dense(tmp_path / "b.safetensors", other)
    differ = {name: d for name, d in diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors") if d}
    assert {name: (d.count, d.index) for name, d in differ.items()} == {"scales": (2, (0,)), "waves": (1, (0,))}


def test_nan_of_different_bits_are_told_apart(tmp_path: Path) -> None:
    one = np.array([[0, 0x7FC0], [0x3F80, 0]], np.uint16)
    other = one.copy()
    other[0, 1] = 0xFFC1
    for name, raw in (("a", one), ("b", other)):
        w = raw.view(ml_dtypes.bfloat16)
        sf.save(tmp_path / f"{name}.safetensors", {"plain": w, "sparse": sf.convert(w, "csr")})
    for _, d in diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors"):
        assert d is not None
        assert d.what == "1 of 4 elements differ, first at [0, 1]: nan (0x7fc0) against nan (0xffc1)"
