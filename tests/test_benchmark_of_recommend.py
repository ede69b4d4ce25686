"""benchmarks/recommend.py ends when it was asked to, and leaves what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recommend


def test_a_block_is_left_at_its_end_whatever_it_does() -> None:
    done = []
    start = time.monotonic()
    with recommend.until(start + 0.2):
        while True:
            try:
                time.sleep(30)
            except Exception:  # as measurements of products that fail
                done.append("caught")
    assert 0.2 <= time.monotonic() - start < 10
    assert not done
    with recommend.until(time.monotonic() + 30):
        done.append("whole")
    time.sleep(0.01)
    assert done == ["whole"]


def test_every_product_is_written_when_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": f"graph x {i}", "n": 1, "first": "csr", "us": {"csr": 2.0, "bsr": 1.0}, "held_back": False,
             "expected": {}, "kernels": {}} for i in range(2)]  # fmt: skip
    path, seen = tmp_path / "r.json", []

    def measured(*_: Any) -> Any:
        for row in rows:
            yield row
            seen.append((json.loads(path.read_text())["rows"], capsys.readouterr().out.count("graph x")))
        time.sleep(60)

    monkeypatch.setattr(recommend, "measure", measured)
    monkeypatch.setattr(recommend, "ENDING", 0.0)
    started = time.monotonic() - time.process_time()
    options = ["--device", "cpu", "--seconds", str(time.monotonic() - started + 0.5), "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["recommend.py", *options])
    begin = time.monotonic()
    recommend.main()
    assert time.monotonic() - begin < 20
    assert seen == [(rows[:1], 1), (rows, 1)]
    assert json.loads(path.read_text())["rows"] == rows
    assert "| all | 100.0 % mean, 100 % worst" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_line_says_where_no_time_was_expected() -> None:
    """Sums are measured whether `recommend` ranks them or not, and it may rank a format without a time."""
    row = {"name": "graph x", "n": 9, "first": "csr", "us": {"csr": 15.0, "bsr+csr": 14.3}, "expected": {"csr": 13.2}}
    expected = "5 %  graph x, 9 columns: csr 15.0 us (expected 13.2), fastest bsr+csr 14.3 us"
    assert recommend.line(row) == f"{expected} (not ranked)"
    row["expected"] = {"csr": 13.2, "bsr+csr": None}
    assert recommend.line(row) == f"{expected} (no time expected)"
    row["expected"] = {"csr": 13.2, "bsr+csr": 0.0}
    assert recommend.line(row) == f"{expected} (expected 0.0)"


def test_a_run_ends_in_its_seconds(tmp_path: Path) -> None:
    """Imports and matrices included; with so few seconds nothing may have been measured."""
    path, root = tmp_path / "r.json", Path(__file__).parent.parent
    command = [sys.executable, str(root / "benchmarks" / "recommend.py"), "--device", "cpu", "--seconds", "12"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), *sys.path]))}
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--json", str(path)], capture_output=True, text=True, check=True, env=env, timeout=90
    )
    assert time.monotonic() - start < 12 + 8  # a busy machine
    assert "held back" in done.stdout
    assert isinstance(json.loads(path.read_text())["rows"], list)
