"""Whatever a file, a variable or a closed stream holds: an exit code of the catalogue, and never that of a bug."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command, shell

import spformat as sf
from spformat.checkpoint import convert_checkpoint


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    sf.save_dense(tmp_path / "d.safetensors", {"w": np.eye(8, dtype=np.float32)})
    return tmp_path / "d.safetensors"


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": "x"}, {"quantization_config": 7}, {"compression_config": [1]}, [1], 5,
        {"quantization_config": {"config_groups": [1]}}, {"quantization_config": {"config_groups": {"g": None}}},
        {"quantization_config": {"config_groups": {"g": {"weights": 7}}}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", [["inspect"], ["convert", "--to", "dense"]])
def test_a_config_of_any_kind_does_not_block_a_model(tmp_path: Path, config: Any, verb: list[str]) -> None:
    (tmp_path / "m").mkdir()
    group = {"compressed": np.ones(2, np.int8), "bitmask": np.array([[3]], np.uint8), "shape": np.array([1, 8])}
    group["row_offsets"] = np.zeros(1, np.int64)
    sf.save_dense(tmp_path / "m" / "model.safetensors", {f"w.{k}": x for k, x in group.items()})
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    answer = command(verb[0], tmp_path / "m", *([tmp_path / "out"] if len(verb) > 1 else ()), *verb[1:])
    assert answer.code == 0, answer


def test_a_manifest_with_odd_metadata(dense: Path) -> None:
    folder = dense.parent / "m"
    convert_checkpoint(dense, folder, "csr")
    tree = json.loads((folder / "spformat.json").read_text())
    for index in ({"metadata": 5}, {"metadata": [1]}, 7):
        (folder / "spformat.json").write_text(json.dumps(tree | {"index": index}))
        answer = command("convert", folder, dense.parent / "out", "--to", "dense")
        assert (answer.code, "under 'index'" in answer.err) == (65, True), answer


def test_a_journal_with_an_odd_target(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spformat.checkpoint import folder, manifest

    def stop(*_: Any) -> None:
        raise sf.errors.WriteError("stopped")

    out = dense.parent / "out"
    monkeypatch.setattr(folder, "_copy_side_files", stop)
    assert command("convert", dense, out, "--to", "csr").code == 74
    monkeypatch.undo()
    journal = out / "spformat.partial.json"
    for target in ("nope", "bsr:blocksize=0x0", "auto:", ""):
        tree = manifest.read_journal(journal)
        next(iter(tree["shards"].values()))["tensors"][0]["target"] = target
        manifest.write_journal(journal, tree)
        answer = command("convert", dense, out, "--to", "csr", "--resume")
        assert (answer.code, "journal is damaged" in answer.err) == (65, True), (target, answer)


@pytest.mark.parametrize("size", ["inf", "nan", "1e400", "-inf", "1e400GB"])
def test_sizes_that_are_no_numbers(dense: Path, size: str) -> None:
    assert command("inspect", dense, "--max-memory", size).code == 2


def test_the_level_of_the_log(dense: Path) -> None:
    answer = shell('SPFORMAT_LOGLEVEL=x spformat inspect "$1"', dense)
    assert answer.returncode == 2
    assert "SPFORMAT_LOGLEVEL: expected one of" in answer.stderr
    assert shell('SPFORMAT_LOGLEVEL=debug spformat inspect "$1"', dense).returncode == 0


@pytest.mark.parametrize("verb", ["inspect", "validate", "plan"])
def test_an_encoding_without_the_characters_of_a_name(dense: Path, verb: str) -> None:
    named = dense.rename(dense.parent / "é漢.safetensors")
    answer = shell('PYTHONIOENCODING=ascii spformat "$2" "$1"', named, verb)
    assert answer.returncode == 0, answer


@pytest.mark.parametrize("end", ["2>&-", "2>/dev/full"])
def test_messages_that_nobody_can_read_change_no_exit_code(dense: Path, end: str) -> None:
    """Before, 66 became 1, and a conversion did nothing."""
    script = (
        f'spformat inspect "$1.gone" {end}; echo $?; spformat inspect "$1" --no-such-option {end}; echo $?; '
        f'spformat convert "$1" "$2" --to csr >/dev/null {end}; echo $?; spformat convert "$1" "$2" --to csr {end}; '
        f'echo $?; spformat plan "$1" --to two-four --json --dry {end} >/dev/null; echo $?'
    )
    answer = shell(script, dense, dense.parent / "out")
    assert answer.stdout.split() == ["66", "2", "0", "73", "2"], answer
    assert command("validate", dense.parent / "out").code == 0


def test_no_stream_at_all(dense: Path) -> None:
    answer = shell('exec 3>"$2"; spformat validate "$1" >&- 2>&- <&-; echo $? >&3', dense, dense.parent / "code")
    assert answer.returncode == 0
    assert (dense.parent / "code").read_text() == "74\n"


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_that_cuts_off_an_import_is_no_bug(name: str, code: int) -> None:
    """Python 3.11 raises RuntimeError from whatever ends ``__set_name__``."""
    cut = (
        "import os, signal, sys, time\nfrom spformat_cli import main\n"
        "def app(**options):\n"
        f"    try:\n        os.kill(os.getpid(), signal.{name}); time.sleep(9)\n"
        "    except BaseException as e:\n        raise RuntimeError('Error calling __set_name__') from e\n"
        "main.app = app\nmain.main()\n"
    )
    r = subprocess.run([sys.executable, "-c", cut], capture_output=True, text=True, timeout=60)
    assert (r.returncode, r.stderr) == (code, "")
