"""Streams of the command: a reader that goes away, a full disk behind stdout, the name of a pipe, a tiny terminal."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from terminals import screen
from test_cli import DIGITS, SHARDED

import spformat as sf

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


@pytest.mark.parametrize("flags", ["", "--json"])
def test_a_full_standard_output_is_named_and_files_are_complete(tmp_path: Path, flags: str) -> None:
    out = tmp_path / "out"
    r = shell(f"S convert {SHARDED} {out} --to csr {flags} > /dev/full")
    assert r.returncode == 74
    said = "standard output: cannot write: No space left on device; files that were written before are complete"
    last = r.stderr.splitlines()[-1]
    assert last == (json.dumps({"code": "WriteError", "exit_code": 74, "message": said}) if flags else f"error: {said}")
    assert shell(f"S validate {out} --checksums").returncode == 0
    assert shell(f"S diff {SHARDED} {out} --provenance").returncode == 0


def test_a_closed_standard_output_is_named() -> None:
    r = shell(f"S inspect {SHARDED} >&-")
    said = "error: standard output: it is closed, so nothing was started; > /dev/null drops the output\n"
    assert (r.returncode, r.stderr) == (74, said)


def test_a_current_folder_that_was_removed(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    r = shell(f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && S inspect w.safetensors")
    assert r.returncode == 66
    assert r.stderr.splitlines()[-1] == "error: the current folder was removed: change into another one"


def test_errors_about_a_pipe_name_standard_input(tmp_path: Path) -> None:
    """Its temporary file is gone by then."""
    r = shell("S inspect - --json < /dev/null")
    error = json.loads(r.stderr)
    assert (r.returncode, error["path"]) == (65, "standard input")
    assert error["message"] == "standard input: truncated: 8-byte length expected, the file has 0 bytes"
    r = shell(f"S convert - {tmp_path}/out --to two-four < {DIGITS}")
    assert (r.returncode, "\nerror: standard input: tensor 'hidden2" in r.stderr) == (3, True), r.stderr
    damaged = tmp_path / "damaged.safetensors"
    sf.save(damaged, {"w": sf.convert(np.eye(8, dtype=np.float32), "csr")})
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    for words in ("validate -", "inspect -", "recommend -", f"diff - {damaged}", f"diff {damaged} -"):
        r = shell(f"cat {damaged} | S {words} --json")
        said = r.stdout + r.stderr
        assert r.returncode == 65, said
        if not words.startswith("diff"):  # which meets the file that is no pipe as well
            assert "standard input: tensor 'w'" in said
        assert "stdin.safetensors" not in said
    for end, start in ((".npz", "PK\\x03\\x04"), (".mtx", "%%%%MatrixMarket")):
        r = shell(f"printf '{start}' | S inspect -")
        assert (r.returncode, r.stderr.startswith("error: standard input: "), end in r.stderr) == (65, True, False)


def test_parts_of_a_pipe_are_refused(tmp_path: Path) -> None:
    """Each part would read a pipe of its own, and merge none."""
    r = shell(f"S convert - {tmp_path}/out --part 1/2 --json < {DIGITS}")
    assert (r.returncode, "write what the pipe brings to one first" in r.stderr) == (2, True), r.stderr
    assert not any(tmp_path.iterdir())


def test_differences_of_a_pipe_name_it(tmp_path: Path) -> None:
    sf.save_dense(tmp_path / "w.safetensors", {"v": np.eye(8, dtype=np.float32)})
    r = shell(f"S diff - {DIGITS} --json < {tmp_path}/w.safetensors")
    tree = json.loads(r.stdout)
    assert (r.returncode, tree["a"], tree["b"]) == (1, "-", str(DIGITS))
    whats = {d["tensor"]: d["what"] for d in tree["differences"]}
    assert whats["v"] == "only in standard input"


@pytest.mark.parametrize("columns", [1, 2, 3, 9])
@pytest.mark.parametrize("verb", ["explain", "recommend"])
def test_a_terminal_with_no_room_for_text(tmp_path: Path, verb: str, columns: int) -> None:
    """Lines become longer than it; the command does not fold them forever."""
    sf.save_dense(tmp_path / "w.safetensors", {"w": np.eye(16, 32, dtype=np.float32)})
    limited = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (20, 20)); "
    command = [sys.executable, "-c", limited + "from spformat_cli.main import main; main()"]
    code, lines = screen([*command, verb, str(tmp_path / "w.safetensors")], columns)
    assert code == 0
    assert len(lines) < 1000
