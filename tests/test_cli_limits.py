"""Every flag that an error of the file layer names exists, and loosens exactly that limit."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hostile import make, rewrite
from spformat_cli.main import main

from spformat import limits
from spformat.formats.csr import CSR
from spformat.storage.container import save


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command as the shell runs it, in this process: its exit code."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def call(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["spformat", *args])
        with pytest.raises(SystemExit) as e:
            main()
        return int(e.value.code or 0)

    return call


@pytest.fixture
def path(tmp_path: Path) -> str:
    save(tmp_path / "x.safetensors", {"a_long_name": make(CSR), "b": np.zeros(9), "empty": np.zeros((0, 40))})
    return str(tmp_path / "x.safetensors")


NUMBERS = [f.name for f in dataclasses.fields(limits.Limits) if f.type in ("int", "int | None")]


@pytest.mark.parametrize("field", NUMBERS)
def test_each_limit_refuses_by_its_flag_and_obeys_it(
    path: str, run: Callable[..., int], capsys: pytest.CaptureFixture[str], field: str
) -> None:
    flag = "--max-" + field.replace("_", "-")
    assert run("validate", path, flag, "2") == 78
    assert flag in capsys.readouterr().err
    assert run("validate", path, flag, "1000000") == 0


def test_checksums_left_out_and_unknown_keys(path: str, run: Callable[..., int]) -> None:
    def edit(tree: dict[str, object], arrays: dict[str, object]) -> None:
        del tree["sha256"]
        tree["later"] = 1

    rewrite(Path(path), edit, seal=False)
    both = ("--allow-unchecked", "--ignore-unknown")
    assert [run("validate", path, *flags) for flags in ((), both[:1], both[1:], both)] == [65, 65, 65, 0]


def test_f02_links_of_a_cache_are_followed_where_allowed(path: str, run: Callable[..., int], tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots"
    blobs.mkdir(parents=True)
    snapshot.mkdir()
    Path(path).rename(blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../blobs/abc")
    assert run("inspect", str(snapshot)) == 77
    assert run("inspect", str(snapshot), "--follow-symlinks", str(snapshot)) == 77
    assert run("inspect", str(snapshot), "--follow-symlinks", str(tmp_path / "models--x")) == 0
