"""Standard input and output of the command: a reader that goes away, a full disk behind them, what messages call them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

import pytest
from test_cli import DIGITS, SHARDED

COMMAND = f'{shlex.quote(sys.executable)} -c "from spformat_cli.main import main; main()"'


def shell(line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which S is the command. It fails where any part of a pipe does."""
    line = f'S() {{ {COMMAND} "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=120, **options
    )


@pytest.mark.parametrize(
    "words", ["--help", "", "inspect", "convert --help", "formats", "formats --json", f"validate {SHARDED}"]
)
@pytest.mark.parametrize("reader", ["true", "head -n 1"])
def test_nobody_reads_the_rest(words: str, reader: str) -> None:
    r = shell(f"S {words} | {reader}")
    codes = (0, 2) if reader == "head -n 1" and words in ("", "inspect") else (0,)  # 2 where all of it was written
    assert (r.returncode in codes, r.stderr) == (True, "")


@pytest.mark.parametrize(
    ("words", "code"), [(f"diff {DIGITS} {SHARDED}", 1), ("nonsense", 2), ("diff nope nope", 66), ("convert", 0)]
)
def test_the_exit_code_stays_where_nobody_reads(words: str, code: int) -> None:
    assert shell(f"S {words} | true").returncode == code
