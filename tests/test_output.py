"""Durable publishing: all of a file under its name, or nothing. Ids are rows of the catalogue of bad inputs."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from spformat.errors import DurabilityUnknown, OutputError, WriteError
from spformat.storage import locks, output


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_publish_writes_all_and_leaves_nothing_else(tmp_path: Path) -> None:
    output.publish(tmp_path / "x", b"hello")
    output.publish(tmp_path / "empty", b"")
    assert snapshot(tmp_path) == {"x": b"hello", "empty": b""}


def test_f09_an_existing_file_needs_overwrite_and_stays_until_the_rename(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(OutputError, match="--force"):
        output.publish(path, b"new")
    with output.Output(path, 3, overwrite=True) as out:
        out.write_at(0, b"new")
        assert path.read_bytes() == b"old"
    assert snapshot(tmp_path) == {"x": b"new"}


def test_f09_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    out = output.Output(path, 3)
    out.write_at(0, b"new")
    path.write_bytes(b"theirs")
    with pytest.raises(OutputError, match="exists"):
        out.commit()
    assert snapshot(tmp_path) == {"x": b"theirs"}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: path.write_bytes(b"theirs"), "the file exists; pass overwrite=True"),
        (lambda path: path.symlink_to("nothing"), "expected a regular file, got a symlink"),
        (lambda path: path.mkdir(), "expected a regular file, got a folder"),
    ],
    ids=["file", "symlink", "folder"],
)
def test_f09_what_appears_after_the_last_look_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, text: str
) -> None:
    real, path = os.link, tmp_path / "x"

    def link(*args: Any, **options: Any) -> None:
        make(path)
        real(*args, **options)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OutputError, match=text) as e:
        output.publish(path, b"new")
    assert e.value.exit_code == 73
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert not path.is_file() or path.read_bytes() == b"theirs"


def test_f09_of_several_writers_of_one_new_file_one_wins(tmp_path: Path) -> None:
    for i in range(50):
        path, start = tmp_path / str(i), threading.Barrier(4)
        won: list[int] = []
        lost: list[OutputError] = []

        def write(
            k: int, path: Path = path, start: threading.Barrier = start, won: Any = won, lost: Any = lost
        ) -> None:
            out = output.Output(path, 1)
            out.write_at(0, b"%d" % k)
            start.wait()
            try:
                out.commit()
                won.append(k)
            except OutputError as e:
                lost.append(e)

        threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 3)
        assert path.read_bytes() == b"%d" % won[0]
    assert len(list(tmp_path.iterdir())) == 50


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_without_hard_links_a_new_file_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", fail)
    output.publish(tmp_path / "x", b"new")
    with pytest.raises(OutputError, match="exists"):
        output.publish(tmp_path / "x", b"newer")
    assert snapshot(tmp_path) == {"x": b"new"}


def test_f10_f11_links_folders_fifos_and_devices_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"t")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for path in (*(tmp_path / n for n in ("link", "dangling", "folder", "fifo")), Path("/dev/null")):
        with pytest.raises(OutputError, match="expected a regular file") as e:
            output.publish(path, b"x", overwrite=True)
        assert e.value.exit_code == 73
    assert snapshot(tmp_path) == {"target": b"t", "link": b"t"}


def test_a_name_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot create"):
        output.publish(tmp_path / ("x" * 300), b"x")
    with pytest.raises(OutputError, match="target folder"):
        output.publish(tmp_path / "a\0b" / "x", b"x")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_f29_without_locks_files_are_published_and_nothing_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    stale = tmp_path / f".spformat-{output._machine()}89abcdef.tmp"
    stale.write_bytes(b"somebody's, perhaps")
    monkeypatch.setattr(fcntl, "flock", fail)
    output.publish(tmp_path / "x", b"x")
    assert snapshot(tmp_path) == {"x": b"x", stale.name: b"somebody's, perhaps"}
    with pytest.raises(WriteError, match="cannot lock"), locks.folder_lock(tmp_path):
        pass


def test_f25_a_temporary_file_swept_before_it_was_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = fcntl.flock, []

    def sweep_first(fd: int, mode: int) -> None:
        if not seen:
            (temp,) = tmp_path.glob(".spformat-*.tmp")
            temp.unlink()
        seen.append(fd)
        real(fd, mode)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    output.publish(tmp_path / "x", b"x")
    assert len(seen) == 2
    assert snapshot(tmp_path) == {"x": b"x"}


def test_space_is_not_reserved_where_the_file_system_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    output.publish(tmp_path / "x", b"x")
    assert snapshot(tmp_path) == {"x": b"x"}


def test_reading_back_what_is_not_there(tmp_path: Path) -> None:
    with output.Output(tmp_path / "x", 4) as out:
        out.write_at(0, b"abcd")
        room = bytearray(4)
        out.read_at(0, memoryview(room))
        assert room == b"abcd"
        with pytest.raises(WriteError, match="shorter"):
            out.read_at(2, memoryview(room))


def test_f12_missing_parent(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="target folder"):
        output.publish(tmp_path / "no" / "x", b"x")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OutputError, match="target folder: expected a folder, got a file"):
        output.check_target(tmp_path / "file" / "x")


@pytest.mark.parametrize("step", ["pwrite", "fsync", "replace", "posix_fallocate"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_f14_f15_a_failing_call_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(WriteError) as e:
            output.publish(path, b"new", overwrite=True)
    assert e.value.exit_code == 74
    assert snapshot(tmp_path) == {"x": b"old"}


def test_f14_file_size_limit(tmp_path: Path) -> None:
    code = (
        "import resource, sys\nfrom spformat.storage import output\nfrom spformat.errors import WriteError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: output.publish(sys.argv[1], bytes(5000))\nexcept WriteError: sys.exit(74)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=False)
    assert done.returncode == 74
    assert snapshot(tmp_path) == {}


def test_f14_no_space_is_seen_before_writing(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="free bytes"):
        output.Output(tmp_path / "x", 2**62)
    assert snapshot(tmp_path) == {}


def test_f16_unflushed_folder_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, []

    def second_fails(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.EIO, "I/O error")
        real(fd)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(DurabilityUnknown):
        output.publish(tmp_path / "x", b"new")
    assert snapshot(tmp_path) == {"x": b"new"}


def test_f17_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
    output.publish(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_t13_order_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("pwrite", "fsync", "link", "replace", "unlink"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _real=real, _name=name, **k: (calls.append(_name), _real(*a, **k))[1])
    output.publish(tmp_path / "x", b"1")
    output.publish(tmp_path / "x", b"2", overwrite=True)
    assert calls == ["pwrite", "fsync", "link", "unlink", "fsync", "pwrite", "fsync", "replace", "fsync"]


def test_f18_f25_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom spformat.storage import output\n"
        "out = output.Output(sys.argv[1], 10)\nout.write_at(0, b'half')\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    output.publish(tmp_path / "y", b"y")
    (living,) = tmp_path.glob(".spformat-*.tmp")  # a running writer keeps its file
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert living.exists()
    (tmp_path / "foreign.tmp").write_bytes(b"f")
    (tmp_path / ".spformat-zz.tmp").write_bytes(b"g")
    output.publish(tmp_path / "z", b"z")
    assert snapshot(tmp_path) == {"y": b"y", "z": b"z", "foreign.tmp": b"f", ".spformat-zz.tmp": b"g"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_f26_modes(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        output.publish(tmp_path / "x", b"1")
        assert (tmp_path / "x").stat().st_mode & 0o777 == mode
        (tmp_path / "x").chmod(0o640)
        output.publish(tmp_path / "x", b"2", overwrite=True)
        assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["a b", "näme", "new\nline", "x" * 255, os.fsdecode(b"\xff\xfe")])
def test_f27_odd_but_legal_names(tmp_path: Path, name: str) -> None:
    output.publish(tmp_path / name, b"x")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_write_outside_the_declared_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"expected bytes 0\.\.4"), output.Output(tmp_path / "x", 4) as out:
        out.write_at(2, b"abc")
    assert snapshot(tmp_path) == {}


def test_advice_is_given_for_neighbours_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When enough is new, and once more when other ranges have followed; in whatever order the pieces come."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(output, "_KEPT_IN_CACHE", 0)
    monkeypatch.setattr(output, "_TOGETHER", 40)
    monkeypatch.setattr(output, "_IN_FLIGHT", 60)
    monkeypatch.setattr(output.os, "posix_fadvise", lambda fd, begin, n, advice: given.append((begin, n)))
    with output.Output(tmp_path / "x", 200) as out:
        for at in (20, 0, 100, 10):
            assert not given
            out.write_at(at, b"0123456789")
        assert given == [(0, 30), (100, 10)]
        given.clear()
        for at in (40, 30, 60, 50):
            out.write_at(at, b"0123456789")
        assert given == [(0, 30), (30, 40)]
        out.write_at(150, b"0123456789")
        assert len(given) == 2
