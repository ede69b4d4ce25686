"""What `spformat bench` says beside its table, and which formats it takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_cli import DIGITS, spformat

import spformat as sf


def test_bench_as_json_keeps_its_notes_in_the_document(tmp_path: Path) -> None:
    """stderr has errors alone, so that it can be parsed."""
    x = np.eye(16, 32, dtype=np.float32)
    x[0, :4] = 1
    sf.save_dense(tmp_path / "w.safetensors", {"a": x, "b": x[:, :16]})
    flags = ("-n", "1", "--device", "cpu", "--repeats", "1", "--limit", "1", "--json")
    r = spformat("bench", tmp_path / "w.safetensors", *flags)
    assert (r.returncode, r.stderr) == (0, "")
    notes = [note for note in json.loads(r.stdout)["notes"] if not note.startswith("load ")]
    assert notes[0] == "the 1 largest of 2 matrices, one of each shape first; --limit takes more"
    assert notes[1].startswith("a: measured as ")
    assert notes[2].startswith("a N=1: ")
    for to, code, error in (("nonsense", 2, "UsageError"), ("two-four", 3, "StructureError")):
        r = spformat("bench", tmp_path / "w.safetensors", *flags, "--to", to)
        assert (r.returncode, r.stdout) == (code, ""), r.stderr
        assert json.loads(r.stderr)["code"] == error


@pytest.mark.parametrize(
    ("dtype", "result"), [("float64", 8), ("float32", 4), ("float16", 2), ("int8", 4), ("float8_e4m3fn", 4)]
)
def test_the_bytes_per_second_count_c_as_it_is_written(dtype: str, result: int, tmp_path: Path) -> None:
    """A C of float64 was counted as float32, and one of int32 or float32 as 8-bit values."""
    a = sf.convert(np.eye(64, 32, dtype=np.float32), "csr", dtype=dtype)
    sf.save(tmp_path / "w.safetensors", {"w": a})
    r = spformat("bench", tmp_path / "w.safetensors", "-n", 24, "--device", "cpu", "--repeats", 1, "--json")
    assert r.returncode == 0, r.stderr
    moved = a.nbytes + 32 * 24 * a.dtype.itemsize + 64 * 24 * result
    for row in json.loads(r.stdout)["results"]:
        assert row["note"] or row["gbytes_per_s"] * row["cold_us"] * 1e3 == pytest.approx(moved), row["name"]


@pytest.mark.parametrize("to", ["fastest", "fastest:n=16", "keep"])
def test_bench_says_which_formats_it_measures(to: str) -> None:
    r = spformat("bench", DIGITS, "--to", to)
    assert (r.returncode, r.stdout) == (2, "")
    assert r.stderr.startswith(f"error: --to: expected auto, dense or a format, as bsr:blocksize=16x16, got '{to}'; ")
    assert "`spformat tune SRC` measures which format is fastest" in r.stderr


def test_the_word_fastest_where_a_format_is_expected() -> None:
    with pytest.raises(
        sf.errors.UsageError, match=r"unknown format 'fastest'; .* `spformat convert --to fastest` takes"
    ):
        sf.convert(np.eye(4, dtype=np.float32), "fastest")
