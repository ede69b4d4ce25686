"""``benchmarks/convert_host.py``: how many launches, allocations and waits a conversion on a GPU takes. It needs no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulator
import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "convert_host.py"
MOST = {
    "dense -> csr": (2, 3), "csr -> dense": (1, 1), "csr transposed": (4, 6),
    "dense -> bitmask": (2, 4), "bitmask -> dense": (1, 1), "csr -> bitmask": (1, 1), "bitmask -> csr": (1, 1),
    "dense -> dbsr": (2, 2), "dbsr -> dense": (1, 1), "csr -> dbsr": (5, 5), "dbsr -> csr": (4, 5),
    "dense -> two-four": (1, 2), "two-four -> dense": (1, 1), "csr -> two-four": (1, 2), "two-four -> csr": (3, 4),
    "dense -> sr-bcrs": (3, 3), "csr -> sr-bcrs": (3, 3),
    "mask, magnitude": (3, 2), "mask, 2:4": (1, 1), "prune to two-four": (1, 2), "prune to csr": (3, 4),
    "prune to bitmask": (3, 4),
}  # fmt: skip
"""Launches and allocations on the device, at most, of a 256 x 256 matrix of bfloat16."""
WITHOUT_A_WAIT = (
    "csr -> dense",
    "csr transposed",
    "bitmask -> dense",
    "bitmask -> csr",
    "dbsr -> dense",
    "two-four -> dense",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Name of a conversion -> its row."""
    if reason := emulator.missing():
        pytest.skip(f"no emulator: {reason}")
    to = tmp_path_factory.mktemp("host") / "rows.json"
    only = "csr", "bitmask", "dbsr", "sr-bcrs", "two-four", "masks"
    command = [sys.executable, str(BENCHMARK), "--json", str(to), "--seconds", "0", "--only", *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "dense -> csr" in done.stdout
    return {row["name"]: row for row in json.loads(to.read_text())["rows"]}


@pytest.mark.parametrize("name", MOST)
def test_a_conversion_asks_no_more_of_the_host_than_before(rows: dict[str, Any], name: str) -> None:
    counts = rows[name]["counts"]
    assert (counts["launches"], counts["memory"]) == MOST[name]
    assert counts.get("waits", 0) == (name not in WITHOUT_A_WAIT)
    assert counts.keys() <= {"launches", "memory", "waits", "memsets"}
    assert rows[name]["python"] > 0
    assert rows[name]["assumed"] > rows[name]["python"]
