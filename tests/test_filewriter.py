"""Files written piece by piece from an outline, and what cannot be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import make, matrix

from spformat.errors import ArrayError, IndexBoundsError, OutputError, UsageError
from spformat.formats.csr import CSR
from spformat.formats.dense import Dense
from spformat.storage.container import load, safe_open, save
from spformat.storage.filewriter import create, outline


def test_streaming_in_panels(tmp_path: Path) -> None:
    w = matrix((100, 12), "float32")
    with create(tmp_path / "x", [outline("w", Dense.from_dense(w)), outline("p", w)]) as f:
        f.put_array("p", "", (w[i : i + 9] for i in range(0, 100, 9)))
        f.put_array("w", "data", (w[i : i + 40] for i in range(0, 100, 40)))
    back = load(tmp_path / "x")
    assert np.array_equal(back["p"], w)
    assert back["w"] == Dense.from_dense(w)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": [1, 2]}, "list; use convert"), ({"w": np.zeros(2, "O")}, "tensor 'w': dtype object cannot be stored"),
        ({3: np.zeros(2)}, "name"), ({"w": make(CSR), "w.data": np.zeros(2)}, "distinct names"),
        ({"a\0": np.zeros(2)}, "NUL"), ({"\ud800": np.zeros(2)}, "surrogate"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved(tmp_path: Path, tensors: Any, message: str) -> None:
    with pytest.raises((UsageError, ArrayError), match=message):
        save(tmp_path / "x", tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_bare_tensor_needs_a_name(tmp_path: Path) -> None:
    for bare in (make(CSR), np.zeros(3), [make(CSR)]):
        with pytest.raises(UsageError, match=r"expected \{name: tensor\}"):
            save(tmp_path / "x", bare)  # type: ignore[arg-type]


def test_invalid_contents_are_not_published(tmp_path: Path) -> None:
    good = make(CSR)
    bad = good.with_arrays(indices=good.indices + np.int32(100))
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(IndexBoundsError):
        save(tmp_path / "x", {"a": good, "w": bad}, overwrite=True)
    with pytest.raises(OutputError, match="--force"):
        save(tmp_path / "x", {"a": good})
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


def test_put_checks_the_outline(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="outline"), create(tmp_path / "x", [outline("w", make(CSR))]) as f:
        f.put("w", make(CSR, (8, 7)))
    with pytest.raises(UsageError, match="no tensor 'v'"), create(tmp_path / "x", [outline("w", make(CSR))]) as f:
        f.put("v", make(CSR))
    with pytest.raises(UsageError, match="were not put"), create(tmp_path / "x", [outline("w", make(CSR))]):
        pass
    with pytest.raises(UsageError, match="got 'values'"), create(tmp_path / "x", [outline("w", make(CSR))]) as f:
        f.put_array("w", "values", [])
    with pytest.raises(UsageError, match="'spformat'"):
        create(tmp_path / "x", [], metadata={"spformat": "x"})
    with pytest.raises(UsageError, match="twice"):
        create(tmp_path / "x", [outline("w", np.zeros(2))] * 2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_can_be_finished_by_hand(tmp_path: Path) -> None:
    f = create(tmp_path / "x", [outline("w", make(CSR))])
    f.put("w", make(CSR))
    f.commit()
    assert load(tmp_path / "x")["w"] == make(CSR)
    f = create(tmp_path / "y", [outline("w", make(CSR))])
    f.abandon()
    f.abandon()
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_outline_read_from_a_file_serves_to_write_one(tmp_path: Path) -> None:
    save(tmp_path / "x", {"w": make(CSR), "bias": np.arange(7, dtype=np.float32)})
    with safe_open(tmp_path / "x") as f, create(tmp_path / "copy", [f.info(name) for name in f]) as out:
        for name in f:
            out.put(name, f[name])
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "x").read_bytes()
