"""Every row of the catalogue has a test that carries its id; rows that need a GPU are marked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from catalogue import ROWS
from rows.test_array_rows import CASES
from rows.test_container_rows import BAD
from rows.test_descriptor_rows import DESCRIPTOR

HERE = Path(__file__).parent
ID = re.compile(r"(?<![A-Z0-9a-z])[CDAFG]\d\d(?![0-9A-Za-z])")
DEVICE = {"G03", "G05", "G06", "G07"}
"""Rows that cannot be tested without a GPU."""


def collected() -> dict[str, str]:
    """Test name -> its source, and the ids of the cases of the three tables."""
    found = {}
    for path in sorted(HERE.glob("test_*_rows.py")):
        text = path.read_text()
        for part in re.split(r"^(?=@pytest|def )", text, flags=re.MULTILINE):
            name = re.match(r"def (test_\w+)", part)
            if name:
                found[name[1]] = part
    return found | {case: "" for table in (BAD, DESCRIPTOR, CASES) for case in table}


def test_there_are_161_rows() -> None:
    assert len(ROWS) == len(set(ROWS)) == 161


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_test(row: str) -> None:
    named = [name for name in collected() if row in ID.findall(name.replace("_", " "))]
    assert named, f"no test carries {row}"


def test_ids_are_of_the_list() -> None:
    for name in collected():
        for row in ID.findall(name.replace("_", " ")):
            assert row in ROWS, name


def test_gpu_rows_are_marked() -> None:
    text = "".join((HERE / f"test_{name}_rows.py").read_text() for name in ("device", "operand"))
    for row in sorted(DEVICE):
        places = [m.start() for m in re.finditer(rf"^def test_{row}_", text, re.MULTILINE)]
        assert places
        for at in places:
            decorators = text[:at].rpartition("\n\n")[2]
            assert "@pytest.mark.gpu" in decorators, row


def test_the_device_is_asked_for_every_row_that_reaches_a_gpu_index() -> None:
    """The launch test of G04 runs over this table: it must hold a case of each of these rows."""
    rows = {case[:3] for case in CASES}
    assert rows >= {f"A{i:02}" for i in (*range(4, 14), 18, *range(20, 22), *range(23, 36), 38)}


def test_every_file_of_rows_stays_short() -> None:
    for path in HERE.glob("*.py"):
        assert len(path.read_text().splitlines()) < 400, path


def test_rows_that_were_found_later_name_their_tests() -> None:
    text = (HERE.parent.parent / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| U(\d\d) \|.*\| ([^|]+) \|$", text, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 26
    for _, names in rows:
        for name in names.replace("`", "").split():
            assert (HERE.parent / name).is_file(), name
