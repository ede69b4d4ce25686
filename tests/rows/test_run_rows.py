"""Rows F14 .. F34: what goes wrong while a conversion runs, and what is there afterwards."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command, python, refused, shell, tree, unharmed, weights

import spformat as sf
from spformat.checkpoint import convert_checkpoint, open_source
from spformat.storage import locks

MANIFEST, JOURNAL = "spformat.json", "spformat.partial.json"
OUT = ("spformat-00001-of-00002.safetensors", "spformat-00002-of-00002.safetensors")


@pytest.fixture
def model(folder: Path) -> Path:
    """Two shards without an index."""
    where = folder / "model"
    where.mkdir()
    for i in range(2):
        sf.save_dense(where / f"{i}.safetensors", {f"layer.{i}.{k}": x for k, x in weights(i).items()})
    return where


class Stop(Exception):
    """Ends a conversion between two shards."""


def interrupted(model: Path, out: Path, target: str = "csr") -> None:
    """A conversion that stopped after its first shard."""

    def stop(outcome: Any) -> None:
        if outcome.name.startswith("layer.1"):
            raise Stop

    with pytest.raises(Stop):
        convert_checkpoint(model, out, target, progress=stop)
    assert {p.name for p in out.iterdir()} == {OUT[0], JOURNAL}


def failing(code: int, when: Callable[..., bool] = lambda *a: True, real: Any = None) -> Callable[..., Any]:
    """A system call that fails with ``code``."""

    def call(*args: Any, **options: Any) -> Any:
        if real is not None and not when(*args):
            return real(*args, **options)
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("step", ["pwrite", "posix_fallocate"])
def test_F14_a_full_disk(model: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int) -> None:
    out = model.parent / "out.safetensors"
    out.write_bytes(b"old")
    source = model / "0.safetensors"
    monkeypatch.setattr(os, step, failing(code))
    with unharmed(model.parent):
        answer = command("convert", source, out, "--to", "csr", "--force", "--json")
    told = json.loads(answer.err)
    assert (answer.code, told["code"], told["path"]) == (74, "WriteError", str(out))
    if code != errno.EFBIG:
        assert "bytes needed" in told["message"]
        assert "free" in told["message"]


def test_F14_the_disk_is_full_at_every_byte(model: Path) -> None:
    code = (
        "import resource, os\nfrom pathlib import Path\nimport spformat as sf\nfrom catalogue import tree, weights\n"
        "out = Path(sys.argv[1])\nsf.save(out / 'whole', weights())\nsize = (out / 'whole').stat().st_size\n"
        "before = tree(out)\n"
        "for k in range(0, size, 1 if size < 400 else 7):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (k, -1))\n"
        "    try: sf.save(out / 'x', weights()); sys.exit(f'fits into {k}')\n"
        "    except sf.errors.WriteError as e: assert e.exit_code == 74 and 'nothing was published' in str(e), e\n"
        "    assert tree(out) == before\n"
    )
    done = python(code, model.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("step", ["pwrite", "fsync", "replace"])
def test_F15_an_unreliable_device(model: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    out = model.parent / "out.safetensors"
    out.write_bytes(b"old")
    calls = []
    monkeypatch.setattr(os, step, lambda *a, **k: (calls.append(step), failing(errno.EIO)())[1])
    with unharmed(model.parent):
        answer = command("convert", model / "0.safetensors", out, "--to", "csr", "--force")
    assert (answer.code, "nothing was published" in answer.err) == (74, True), answer
    assert calls.count("fsync") <= 1  # a failed fsync is never repeated into success


def test_F16_the_folder_cannot_be_flushed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, lambda fd: os.path.isdir(f"/proc/self/fd/{fd}"), real))
    out = model.parent / "out.safetensors"
    with unharmed(model.parent, but=out.name):
        answer = command("convert", model / "0.safetensors", out, "--to", "csr", "--json")
    assert (answer.code, json.loads(answer.err)["code"]) == (74, "DurabilityUnknown")
    monkeypatch.undo()
    assert command("validate", out).code == 0  # complete, only not proved durable


def test_F17_interrupted_and_short_calls_are_continued(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_checkpoint(model, model.parent / "whole", "csr")
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:5]], at))
    with unharmed(model.parent, but="out"):
        assert command("convert", model, model.parent / "out", "--to", "csr").code == 0
    assert tree(model.parent / "out") == tree(model.parent / "whole")


def kill_and_resume(model: Path, out: Path, number: int, at: str) -> int:
    """Kill a conversion when it is at a tensor, resume it; the exit code of the first run."""
    code = (
        "import os, signal, time\nimport spformat.checkpoint.run as run\nfrom spformat_cli.main import main\n"
        "real = run.convert_checkpoint\n"
        "def stop(o):\n"
        f"    if o.name == {at!r}: os.kill(os.getpid(), {number}); time.sleep(20)\n"
        "def converted(*a, progress=None, **k): return real(*a, progress=stop, **k)\n"
        "import spformat.checkpoint as package\npackage.convert_checkpoint = converted\n"
        "sys.argv = ['spformat', 'convert', *sys.argv[1:], '--to', 'csr']\nmain()\n"
    )
    return python(code, model, out).returncode


def test_F18_killed_and_run_again(model: Path) -> None:
    out = model.parent / "out"
    convert_checkpoint(model, model.parent / "whole", "csr")
    with unharmed(model.parent, but="out"):
        assert kill_and_resume(model, out, signal.SIGKILL, "layer.1.b") == -signal.SIGKILL
        assert command("convert", model, out, "--to", "csr").code == 73
        assert command("convert", model, out, "--to", "csr", "--resume").code == 0
    assert tree(out) == tree(model.parent / "whole")  # and nothing left of the killed run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_F19_signals_end_with_their_code_and_keep_finished_shards(model: Path, number: int, code: int) -> None:
    out = model.parent / "out"
    with unharmed(model.parent, but="out"):
        assert kill_and_resume(model, out, number, "layer.1.b") == code
    assert {p.name for p in out.iterdir()} == {OUT[0], JOURNAL}  # no temporary file, no lock
    assert list(json.loads((out / JOURNAL).read_text())["shards"]) == [OUT[0]]
    told = json.loads(command("convert", model, out, "--to", "csr", "--resume", "--json").out)
    assert told["resumed"] == 1


def test_F20_a_reader_that_goes_away(model: Path) -> None:
    many = {f"layer.{i}": np.eye(4, dtype=np.float16) for i in range(300)}
    sf.save_dense(model.parent / "many.safetensors", many)
    done = shell('set -o pipefail; spformat inspect "$1" --long | head -n 1', model.parent / "many.safetensors")
    assert (done.returncode, done.stderr.count("Traceback"), len(done.stdout.splitlines())) == (0, 0, 1), done.stderr


class Disk:
    """Models what survives a power loss: a name is durable once its folder has been flushed after the change."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.durable, self.states = folder, {}, []  # type: ignore[var-annotated]
        fsync, replace, unlink = os.fsync, os.replace, os.unlink

        def flushed(fd: int) -> None:
            fsync(fd)
            if os.path.samestat(os.fstat(fd), os.stat(folder)):
                self.durable = {p.name: p.read_bytes() for p in folder.iterdir()}
            self.states.append(self.durable)

        def note(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                real(*args, **options)
                # Any of the changes since the last flush may have reached the disk, or none.
                self.states += [self.durable, {p.name: p.read_bytes() for p in folder.iterdir()}]

            return call

        patch.setattr(os, "fsync", flushed)
        patch.setattr(os, "replace", note(replace))
        patch.setattr(os, "unlink", note(unlink))


def test_F21_after_a_power_loss_the_manifest_claims_only_what_is_there(model: Path) -> None:
    out = model.parent / "out"
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(out, patch)
        convert_checkpoint(model, out, "csr")
    assert len(disk.states) > 10
    committed = [s for s in disk.states if MANIFEST in s]
    assert committed
    for state in committed:
        for name, entry in json.loads(state[MANIFEST])["files"].items():
            assert hashlib.sha256(state[name]).hexdigest() == entry["sha256"]
    for state in disk.states:
        if JOURNAL in state:
            for name, entry in json.loads(state[JOURNAL])["shards"].items():
                assert hashlib.sha256(state[name]).hexdigest() == entry["sha256"]


@pytest.mark.parametrize("what", ["options", "input", "edited", "truncated", "flipped", "gone"])
def test_F22_resume_redoes_what_has_changed(model: Path, what: str) -> None:
    out = model.parent / "out"
    interrupted(model, out)
    first = out / OUT[0]
    data = first.read_bytes()
    target, why = "csr", "has another sha256 than the journal says"
    if what == "options":
        target, why = "bitmask", "everything: the journal is of another recipe or source"
    elif what == "input":
        sf.save_dense(model / "0.safetensors", {f"layer.0.{k}": x for k, x in weights(7).items()}, overwrite=True)
        why = "was made of another 0.safetensors"
    elif what == "edited":
        sf.save(first, weights(), overwrite=True)
        why = "sha256|bytes, the journal says"
    elif what == "truncated":
        first.write_bytes(data[:-1])
        why = f"has {len(data) - 1:,} bytes, the journal says {len(data):,}".replace("(", "")
    elif what == "flipped":
        first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        first.unlink()
        why = "is gone"
    with unharmed(model.parent, but="out"):
        report = convert_checkpoint(model, out, target, resume=True)
    assert report.resumed == 0
    assert len(report.redone) == 1
    assert any(w in report.redone[0] for w in why.split("|")), report.redone
    convert_checkpoint(model, model.parent / "whole", target)
    assert tree(out) == tree(model.parent / "whole")


def test_F23_journals_and_manifests_that_are_none(model: Path) -> None:
    out = model.parent / "out"
    interrupted(model, out)
    good = (out / JOURNAL).read_bytes()
    for bad in (good[:-20], b"", b"{}", b"[]", good.replace(b'"plan"', b'"plam"'), b"[" * 100_000, b"\xff"):
        (out / JOURNAL).write_bytes(bad)
        with refused(model.parent, sf.errors.ContainerError, JOURNAL):
            convert_checkpoint(model, out, "csr", resume=True)
        answer = command("convert", model, out, "--to", "csr", "--resume")
        assert (answer.code, (out / OUT[0]).exists()) == (65, True)
    assert "--force" in command("convert", model, out, "--to", "csr", "--resume").err or bad == b"\xff"
    assert command("convert", model, out, "--to", "csr", "--force").code == 0  # the way out
    good = (out / MANIFEST).read_bytes()
    other = json.loads(good) | {"container": 2}
    for bad, error in ((good[:-20], sf.errors.ContainerError), (b"", sf.errors.ContainerError), (b"[]", sf.errors.ContainerError),
                       (json.dumps(other).encode(), sf.errors.VersionError)):  # fmt: skip
        (out / MANIFEST).write_bytes(bad)
        with refused(model.parent, error, MANIFEST):
            open_source(out)
        assert command("validate", out).code == 65
    (out / MANIFEST).write_bytes(good)
    alien = model.parent / "alien"
    shutil.copytree(out, alien)
    (alien / OUT[1]).unlink()  # a manifest from another folder
    with refused(model.parent, sf.errors.InputError, OUT[1]):
        open_source(alien)


def test_F24_two_runs_on_one_folder(model: Path) -> None:
    out = model.parent / "out"
    out.mkdir()
    with locks.folder_lock(out), refused(model.parent, sf.errors.LockedError, f"locked by process {os.getpid()}"):
        convert_checkpoint(model, out, "csr")
    with locks.folder_lock(out):
        assert command("convert", model, out, "--to", "csr").code == 75
    code = (
        "import time\nfrom spformat.storage import locks\n"
        "with locks.folder_lock(sys.argv[1]):\n    print('ready', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", "import sys\n" + code, str(out)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert f"process {child.pid}" in command("convert", model, out, "--to", "csr").err
    child.kill()
    child.wait()
    child.stdout.close()
    assert (out / locks.LOCK).exists()  # of a process that has ended: it locks nothing
    with locks.folder_lock(out, shared=True):  # as another part does
        assert command("convert", model, out, "--to", "csr").code == 75
        assert command("convert", model, out, "--to", "csr", "--part", "1/2").code == 0
    assert command("convert", model, out, "--to", "csr", "--part", "2/2").code == 0
    assert command("merge", out).code == 0
    convert_checkpoint(model, model.parent / "whole", "csr")
    assert tree(out) == tree(model.parent / "whole")


def test_F25_only_our_own_dead_temporaries_are_swept(model: Path) -> None:
    out = model.parent / "out"
    out.mkdir()
    dead = out / ".spformat-0123456789abcdef.tmp"
    dead.write_bytes(b"half")
    foreign = {"x.tmp": b"1", ".spformat-zz.tmp": b"2", ".spformat-0123456789abcdef.tmp.bak": b"3"}
    for name, data in foreign.items():
        (out / name).write_bytes(data)
    with open(out / ".spformat-fedcba9876543210.tmp", "wb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        with unharmed(model.parent, but="out"):
            assert command("convert", model, out, "--to", "csr").code == 0
        assert Path(living.name).exists()
    assert not dead.exists()
    assert {name: (out / name).read_bytes() for name in foreign} == foreign
