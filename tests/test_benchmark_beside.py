"""benchmarks/beside.py: the table of a kernel beside the others, from points that are written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import beside

KERNEL = "cuda.spmm_csr_records"


def product(n: int, nnz: int, times: dict[str, float], b_layout: str = "col") -> dict[str, Any]:
    tiles = {KERNEL: "1 columns, 1 x 8 warps, 32 lanes", "cuda.spmm_csr_expanding_sm90a": "64x16, 4 blocks"}
    measured = [[name, tiles.get(name, "None"), us] for name, us in times.items()]
    return {"format": "csr", "params": {}, "M": 1000, "K": 100, "n": n, "nnz": nnz, "a_dtype": "bfloat16",
            "b_dtype": "bfloat16", "out_dtype": "bfloat16", "b_layout": b_layout, "out_layout": "col",
            "times": measured}  # fmt: skip


@pytest.fixture
def points(tmp_path: Path) -> Path:
    other = "cuda.spmm_csr_expanding_sm90a"
    products = [
        product(1, 5000, {"dense": 12.0, KERNEL: 4.0, other: 6.0}),
        product(1, 20000, {"dense": 12.0, KERNEL: 12.0, other: 6.0}, "row"),
        product(2, 5000, {"dense": 8.0, KERNEL: 2.0, other: 4.0, "composed.copied_operands": 1.0}, "row"),
        product(2, 5000, {"dense": 8.0, KERNEL: 2.0}),  # no other kernel
    ]
    head = {"points_of": "spformat bench --calibrate", "version": 1, "device": "NVIDIA H200", "sm": 90, "seed": 1,
            "date": "2026-01-01", "commit": "abc", "command": "spformat bench --calibrate"}  # fmt: skip
    path = tmp_path / "points.json"
    path.write_text(json.dumps({**head, "products": products}))
    return path


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["beside.py", *arguments])
    beside.main()
    return capsys.readouterr().out


def test_the_table(points: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = run(capsys, monkeypatch, KERNEL, str(points), "--shares", "0.04,0.08", "--columns", "1,2")
    assert "on NVIDIA H200, 2026-01-01, commit abc" in out
    lines = [line for line in out.splitlines() if line.startswith(("| csr", "| all"))]
    assert lines == [
        "| csr | 4 to 8 | 1 | 1 | 2.00 | 3.00 | 3.00 | 1.50 |",
        "| csr | 4 to 8 | 2 and more | 1 | 2.00 | 4.00 | 4.00 | 2.00 |",
        "| csr | 8 and more | 1 | 1 | 2.00 | 2.00 | 2.00 | 0.50 |",
        "| all |  |  | 3 | 2.00 | 2.88 | 2.00 | 1.14 |",
    ]


def test_what_is_chosen(points: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By expected times the other kernel is taken for the first product, and this one for the second, both wrongly."""

    def expected(x: beside.Point) -> float:
        return 5.0 if x.kernel.name == KERNEL else 4.0 if (x.problem.n, x.problem.nnz) == (1, 5000) else 6.0

    priced = [x._replace(expected=expected(x)) for x in beside.load([points]).points]
    monkeypatch.setattr(beside, "priced", lambda points: priced)
    out = run(capsys, monkeypatch, KERNEL, str(points), "--shares", "0,0.1", "--columns", "1,2", "--chosen")
    lines = [line for line in out.splitlines() if line.startswith(("| csr", "| all"))]
    assert lines == [
        "| csr | 0 to 10 | 1 | 1 | 2.00 | 2.00 | 2.00 | 1.50 |",
        "| csr | 0 to 10 | 2 and more | 1 | 2.00 | 4.00 | 4.00 | 2.00 |",
        "| csr | 10 and more | 1 | 1 | 2.00 | 1.00 | 1.00 | 0.50 |",
        "| all |  |  | 3 | 2.00 | 2.00 | 1.00 | 1.14 |",
    ]


def test_torchs_layout_alone(points: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are in it whatever their layout is called; B in rows with two columns is not."""
    target = points.with_name("table.json")
    run(capsys, monkeypatch, KERNEL, str(points), "--torch", "--json", str(target))
    rows = json.loads(target.read_text())
    assert [(r["stored %"], r["N"], r["products"]) for r in rows] == [("0 and more", "1-16", 2), ("", "", 2)]


def test_nothing_to_show(points: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        run(capsys, monkeypatch, "cuda.spmm_bsr", str(points))
    assert "cuda.spmm_bsr: no product of these files" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(capsys, monkeypatch, KERNEL, str(points), "--columns", "4,2")
    assert "must ascend: 4,2" in capsys.readouterr().err
