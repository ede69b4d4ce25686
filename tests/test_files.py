"""Regular-file opening, safe names, durable publishing, locks, limits. Ids are rows of the catalogue of bad inputs."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from spformat import crc, files, limits, locks, output
from spformat.errors import (
    DurabilityUnknown,
    InputError,
    LimitError,
    LockedError,
    OutputError,
    PathError,
    UsageError,
    WriteError,
)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- reading


def test_c33_only_regular_files_open_and_nothing_blocks(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    begin = time.monotonic()
    for path, kind in ((fifo, "FIFO"), (tmp_path, "folder"), ("/dev/zero", "device")):
        with pytest.raises(InputError, match=f"expected a regular file, got a {kind}"):
            files.open_regular(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(InputError):
            files.open_regular(tmp_path / "socket")
    assert time.monotonic() - begin < 5


def test_c36_missing_dangling_looping_and_unreadable(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("missing", "dangling", "loop", "a\0b"):
        with pytest.raises(InputError) as e:
            files.open_regular(tmp_path / name)
        assert e.value.exit_code == 66
        assert e.value.path == str(tmp_path / name)


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_sha256_is_that_of_the_bytes(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "x").write_bytes(data)
    assert files.sha256_of(tmp_path / "x") == hashlib.sha256(data).hexdigest()


def test_small_files_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert files.read_small(tmp_path / "x", 5) == b"12345"
    with pytest.raises(InputError, match="at most 4"):
        files.read_small(tmp_path / "x", 4)


# --- names

HOSTILE = [
    "../x.safetensors", "/etc/passwd", "~/x.safetensors", "a/../../b.safetensors", "..\\x.safetensors",
    "C:\\x.safetensors", "x\0.safetensors", "", ".", "..", "https://host/x.safetensors", "x.safetensors/",
    "x\n.safetensors", "x.bin", ".safetensors", "é.safetensors", "x" * 300 + ".safetensors", "a b.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_f01_only_plain_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(PathError) as e:
        files.member(tmp_path, name, ".safetensors")
    assert e.value.exit_code == 77


def test_f01_ordinary_names_pass(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "a_B.9.safetensors"):
        assert files.member(tmp_path, name, ".safetensors") == str(tmp_path / name)


def test_f02_a_link_out_of_the_folder_needs_its_root_named(tmp_path: Path) -> None:
    blobs, snapshot_folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot_folder.mkdir()
    (blobs / "abc").write_bytes(b"x")
    (snapshot_folder / "x.safetensors").symlink_to("../blobs/abc")
    with pytest.raises(PathError, match="--follow-symlinks"):
        files.member(snapshot_folder, "x.safetensors")
    with pytest.raises(PathError):
        files.member(snapshot_folder, "x.safetensors", roots=[snapshot_folder])
    assert files.member(snapshot_folder, "x.safetensors", roots=[tmp_path]).endswith("x.safetensors")


def test_f07_same_file_through_links(tmp_path: Path) -> None:
    a = tmp_path / "a"
    a.write_bytes(b"x")
    (tmp_path / "soft").symlink_to("a")
    os.link(a, tmp_path / "hard")
    (tmp_path / "other").write_bytes(b"x")
    assert files.same_file(a, tmp_path / "soft")
    assert files.same_file(a, tmp_path / "hard")
    assert files.same_file(a, f"{tmp_path}/./a")
    assert not files.same_file(a, tmp_path / "other")
    assert not files.same_file(tmp_path / "missing", tmp_path / "missing")


# --- publishing


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


def test_an_unreadable_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"x")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    with pytest.raises(InputError, match="cannot read"):
        files.sha256_of(tmp_path / "x")


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="lock file"), locks.folder_lock(tmp_path / "missing"):
        pass
    (tmp_path / locks.LOCK).symlink_to("elsewhere")
    with pytest.raises(OutputError, match="lock file"), locks.folder_lock(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_f12_missing_parent(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="target folder"):
        output.publish(tmp_path / "no" / "x", b"x")


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
        "import resource, sys\nfrom spformat import output\nfrom spformat.errors import WriteError\n"
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
        "import sys, time\nfrom spformat import output\n"
        "out = output.Output(sys.argv[1], 10)\nout.write_at(0, b'half')\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    output.publish(tmp_path / "y", b"y")
    (living,) = tmp_path.glob(".spformat-*.tmp")  # a living writer keeps its file
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


# --- locks


def test_f24_a_held_lock_refuses_at_once_and_names_the_holder(tmp_path: Path) -> None:
    with locks.folder_lock(tmp_path):
        with pytest.raises(LockedError, match=f"process {os.getpid()}") as e, locks.folder_lock(tmp_path):
            pass
        assert e.value.exit_code == 75
    assert snapshot(tmp_path) == {}
    with locks.folder_lock(tmp_path):
        assert list(tmp_path.iterdir())


def test_f24_the_lock_of_a_dead_process_stops_nobody(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom spformat import locks\n"
        "with locks.folder_lock(sys.argv[1]):\n    print('ready', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    with pytest.raises(LockedError, match=str(child.pid)), locks.folder_lock(tmp_path):
        pass
    child.kill()
    child.wait()
    child.stdout.close()
    assert (tmp_path / locks.LOCK).exists()
    with locks.folder_lock(tmp_path):
        pass
    assert snapshot(tmp_path) == {}


def test_f24_parts_share_and_exclude_the_whole(tmp_path: Path) -> None:
    with locks.folder_lock(tmp_path, shared=True), locks.folder_lock(tmp_path, "part-1"):
        with locks.folder_lock(tmp_path, shared=True), locks.folder_lock(tmp_path, "part-2"):
            pass
        with pytest.raises(LockedError), locks.folder_lock(tmp_path):
            pass
        with pytest.raises(LockedError), locks.folder_lock(tmp_path, "part-1"):
            pass
    with locks.folder_lock(tmp_path):
        pass
    assert snapshot(tmp_path) == {}


def test_t26_one_winner_at_a_time(tmp_path: Path) -> None:
    inside, most, refused = [0], [0], [0]

    def run() -> None:
        for _ in range(100):
            try:
                with locks.folder_lock(tmp_path):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    time.sleep(0.0005)
                    inside[0] -= 1
            except LockedError:
                refused[0] += 1

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most[0] == 1
    assert refused[0] < 400


# --- limits and sums


def test_the_budget_ends_at_the_address_space_and_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_machine_memory", lambda: 2**40)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (2**30, 2**30))
    assert limits.host_memory() == 2**30
    with pytest.raises(LimitError, match="1,073,741,824 allowed"):
        limits.check_bytes(2**31, "x")
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (limits.resource.RLIM_INFINITY,) * 2)
    assert limits.host_memory() == 2**40


def test_limits_end_with_their_block_and_stay_in_their_thread() -> None:
    seen = []
    with limits.using(tensors=5) as mine:
        thread = threading.Thread(target=lambda: seen.append(limits.current().tensors))
        thread.start()
        thread.join()
        assert limits.current() is mine
        with limits.using(name_bytes=7):
            assert (limits.current().tensors, limits.current().name_bytes) == (5, 7)
    assert seen == [limits.Limits().tensors] == [limits.current().tensors]
    with pytest.raises(UsageError, match="nonsense"), limits.using(nonsense=1):
        pass


@pytest.mark.parametrize("cut", [0, 1, 2, 17, 4096, 99_999])
def test_crc_of_a_whole_from_its_parts(cut: int) -> None:
    data = os.urandom(100_000)
    whole = crc.combine(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), len(data) - cut)
    assert whole == zlib.crc32(data)


def test_crc_in_segments_equals_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc, "SEGMENT", 1000)
    data = os.urandom(12_345)
    seen = []

    def work(lo: int, hi: int) -> int:
        seen.append((lo, hi))
        return zlib.crc32(data[lo:hi])

    assert crc.in_segments(len(data), work) == zlib.crc32(data)
    assert len(seen) == 13
