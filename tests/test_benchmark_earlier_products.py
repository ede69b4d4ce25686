"""benchmarks/earlier_products.py: its table, from times that are written here, and what it draws."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import earlier_products  # noqa: E402 - one of the scripts in benchmarks/


def row(kernel: str, n: int, torch: bool, earlier: float, now: float) -> earlier_products.Row:
    return earlier_products.Row(kernel, "csr", n, torch, ("", ""), earlier, now, 12.0)


def test_the_table() -> None:
    rows = [row("a", 1, True, 6.0, 6.0), row("a", 20, False, 8.0, 4.0), row("b", 300, True, 12.0, 16.0)]
    lines = earlier_products.summary(rows)
    assert lines[2:] == [
        "| all | 3 | 1.145 (0.75 to 2.00) | 1.44 | 1.65 |",
        "| a | 2 | 1.414 (1.00 to 2.00) | 1.73 | 2.45 |",
        "| b | 1 | 0.750 (0.75 to 0.75) | 1.00 | 0.75 |",
        "| torch's layout | 2 | 0.866 (0.75 to 1.00) | 1.41 | 1.22 |",
        "| other layouts | 1 | 2.000 (2.00 to 2.00) | 1.50 | 3.00 |",
        "| N 1 to 16 | 1 | 1.000 (1.00 to 1.00) | 2.00 | 2.00 |",
        "| N 17 to 64 | 1 | 2.000 (2.00 to 2.00) | 1.50 | 3.00 |",
        "| N 257 to 4096 | 1 | 0.750 (0.75 to 0.75) | 1.00 | 0.75 |",
    ]


def test_the_table_beside_the_next_multiple() -> None:
    rows = [row("a", 3, False, 6.0, 6.0)._replace(next=3.0), row("a", 5, False, 8.0, 4.0)._replace(next=4.0)]
    lines = earlier_products.summary([*rows, row("b", 1, True, 12.0, 16.0)])
    assert lines[0].endswith("| of dense, now | of the next multiple, earlier | of the next multiple, now |")
    assert lines[1] == "|---" * 7 + "|"
    assert lines[2] == "| all | 3 | 1.145 (0.75 to 2.00) | 1.44 | 1.65 | 2.000, 2 above 1.25 | 1.414, 1 above 1.25 |"
    assert lines[4] == "| b | 1 | 0.750 (0.75 to 0.75) | 1.00 | 0.75 | | |"


def test_odd_numbers_of_columns() -> None:
    spec = SimpleNamespace(widths=[(2, "col", "row"), (7, "row", "col")])
    assert earlier_products.widths(spec, odd=True) == [(3, "row", "row"), (7, "row", "row")]
    assert earlier_products.widths(spec, odd=False) == spec.widths


def test_products_that_a_version_refuses_are_left_out() -> None:
    def each(number: int) -> int:
        if number == 1:
            raise earlier_products.SpformatError("not in this version")
        return number

    assert list(earlier_products.until(10.0, iter([(0,), (1,), (2,)]), each)) == [0, 2]
    assert list(earlier_products.until(-1.0, iter([(0,)]), each)) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--kernels", "cuda.spmm_csr,cuda.nobody"), "no kernel is called cuda.nobody"),
     (("--formats", "csr,nothing"), "no format is called nothing"),
     (("--formats", "csr", "--kernels", "cuda.spmm_csr"), "not allowed with argument"),
     (("--kernels", "cuda.spmm_csr", "--columns", "8"), "expected numbers of columns like 1-512, got 8")],
)  # fmt: skip
def test_what_is_refused(
    arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["earlier_products.py", "--earlier", "HEAD", *arguments])
    with pytest.raises(SystemExit):
        earlier_products.main()
    assert text in capsys.readouterr().err
