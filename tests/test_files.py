"""Regular-file opening, safe names, locks, limits. Ids are rows of the catalogue of bad inputs."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from spformat import limits
from spformat.errors import InputError, LimitError, LockedError, OutputError, PathError, UsageError
from spformat.storage import crc, files, locks

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


def test_an_unreadable_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"x")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(files.os, "preadv", fail)
    with pytest.raises(InputError, match="cannot read"):
        files.sha256_of(tmp_path / "x")


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


def test_f02_links_of_a_hugging_face_cache_lead_to_its_blobs_alone(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--x"
    for name in ("blobs", "snapshots/c0ffee/unet", "../models--org--y/blobs"):
        (repository / name).mkdir(parents=True)
    (repository / "blobs" / "1").write_bytes(b"x")
    (repository / "../models--org--y/blobs/1").write_bytes(b"y")
    snapshot, name = repository / "snapshots" / "c0ffee", "x.safetensors"
    (snapshot / name).symlink_to("../../blobs/1")
    (snapshot / "unet" / name).symlink_to("../../../blobs/1")
    (snapshot / "inside.safetensors").symlink_to("unet/../inside")
    (snapshot / "other.safetensors").symlink_to("../../../models--org--y/blobs/1")
    (snapshot / "chain.safetensors").symlink_to("../../blobs/2")
    (repository / "blobs" / "2").symlink_to("/etc/passwd")
    (tmp_path / "link").symlink_to(snapshot)  # a folder may be named through a link
    for folder, linked in ((snapshot, name), (snapshot / "unet", name), (tmp_path / "link", name)):
        assert files.member(folder, linked) == str(folder / linked)
    assert files.member(snapshot, "inside.safetensors")
    for outside in ("other.safetensors", "chain.safetensors"):
        with pytest.raises(PathError, match="symlink leads to"):
            files.member(snapshot, outside)
    (repository / "blobs").rename(tmp_path / "elsewhere")
    (repository / "blobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathError, match="symlink leads to"):
        files.member(snapshot, name)
    (repository / "blobs").unlink()
    (tmp_path / "elsewhere").rename(repository / "blobs")
    repository.rename(tmp_path / "hub" / "x")  # another folder than those of a cache
    with pytest.raises(PathError, match="symlink leads to"):
        files.member(tmp_path / "hub" / "x" / "snapshots" / "c0ffee", name)


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


# --- locks


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="lock file"), locks.folder_lock(tmp_path / "missing"):
        pass
    (tmp_path / locks.LOCK).symlink_to("elsewhere")
    with pytest.raises(OutputError, match="lock file"), locks.folder_lock(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_f24_a_held_lock_refuses_at_once_and_names_the_holder(tmp_path: Path) -> None:
    with locks.folder_lock(tmp_path):
        with pytest.raises(LockedError, match=f"process {os.getpid()}") as e, locks.folder_lock(tmp_path):
            pass
        assert e.value.exit_code == 75
    assert not any(tmp_path.iterdir())
    with locks.folder_lock(tmp_path):
        assert list(tmp_path.iterdir())


def test_f24_the_lock_of_a_dead_process_stops_nobody(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom spformat.storage import locks\n"
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
    assert not any(tmp_path.iterdir())


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
    assert not any(tmp_path.iterdir())


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
    with pytest.raises(UsageError, match="memory: expected a number >= 0 or None, got True"), limits.using(memory=True):
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


def test_a_small_file_is_read_as_large_as_it_was_when_it_was_opened() -> None:
    """A file of /proc says that it has no bytes, and may have any number."""
    with pytest.raises(InputError, match=r"expected 0 bytes, the size of the file when it was opened, got more"):
        files.read_small("/proc/self/status", 1 << 20)


def test_a_small_file_keeps_to_the_limits(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    for name in ("memory", "file_bytes"):
        with limits.using(**{name: 100}):
            assert files.read_small(tmp_path / "a", 1000) == bytes(100)
        with limits.using(**{name: 99}), pytest.raises(LimitError, match=name.replace("_", "-")) as e:
            files.read_small(tmp_path / "a", 1000)
        assert e.value.path == str(tmp_path / "a")
