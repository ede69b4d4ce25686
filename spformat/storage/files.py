"""Opening, reading and hashing regular files, and safe file names.

Files are never mapped into memory. If a mapped file is truncated, reading it ends the process with SIGBUS; ``pread``
raises an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

from .. import limits
from ..errors import InputError, LimitError, PathError, UsageError, WriteError, printable

Path: TypeAlias = str | os.PathLike[str]

_BUFFER = 2**20
_CACHED = re.compile(r"(?s:.*)/(models|datasets|spaces)--[^/]+")
_SAFE = re.compile(r"[A-Za-z0-9._-]{1,255}")


def path_text(path: Path) -> str:
    """A path as text, bytes as the system names files by them; UsageError for what is no path. Where users name files,
    this comes first."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise UsageError(f"expected a path, as text or a pathlib.Path, got {path!r:.80}", value=path) from None


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """File descriptor and stat of a regular file; InputError for anything else. Never blocks on a FIFO."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        if isinstance(path, str) and "://" in path:
            what = "a URL: this takes local files only; the command and convert_checkpoint download"
            raise InputError(what, path=path) from e
        raise InputError(f"cannot open the file: {reason(e)}", path=os.fspath(path)) from e
    try:
        status = os.fstat(fd)
    except OSError as e:
        close_read(fd)
        raise InputError(f"cannot open the file: {reason(e)}", path=os.fspath(path)) from e
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        hint = "; the command reads a pipe as -: `spformat inspect - < PIPE`" if stat.S_ISFIFO(status.st_mode) else ""
        raise InputError(f"expected a regular file, got a {kind_of(status.st_mode)}{hint}", path=os.fspath(path))
    return fd, status


def close_read(fd: int) -> None:
    """Close a file that was only read, and ignore errors, which do not matter then."""
    with suppress(OSError):
        os.close(fd)


def read_small(path: Path, at_most: int) -> bytes:
    """All bytes of a regular file of at most ``at_most`` bytes (manifests, configs, matrices).

    Exactly the bytes that the file had when it was opened are read. Raises InputError if it is larger, or changes its
    size meanwhile, and LimitError if it exceeds the limits in force.
    """
    fd, status = open_regular(path)
    try:
        size, where = status.st_size, os.fspath(path)
        if size > at_most:
            raise InputError(f"expected at most {at_most:,} bytes, got {size:,}", path=where)
        try:
            limits.check("file_bytes", size, "size of the file")
            limits.check_bytes(size, "the file", size)
        except LimitError as e:
            raise e.at(path=where) from None
        data = os.pread(fd, size + 1, 0)  # one more, to see whether there is more
        while len(data) < size and (part := os.pread(fd, size + 1 - len(data), len(data))):
            data += part
        if len(data) != size:
            got = "more" if len(data) > size else f"{len(data):,}"
            raise InputError(f"expected {size:,} bytes, the size of the file when it was opened, got {got}", path=where)
        return data
    except (InputError, LimitError):
        raise
    except OSError as e:
        raise InputError(f"cannot read the file: {reason(e)}", path=os.fspath(path)) from e
    finally:
        close_read(fd)


def sha256_of(path: Path, ranges: Sequence[tuple[int, int]] | None = None) -> str:
    """SHA-256 of a regular file as 64 lower-case hex digits, computed with one buffer of memory.

    ranges: hash only these bytes, each range as (first byte, byte after the last).
    """
    fd, _ = open_regular(path)
    try:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER))
        for begin, end in [(0, sys.maxsize)] if ranges is None else ranges:
            while begin < end and (n := os.preadv(fd, [buffer[: end - begin]], begin)):
                digest.update(buffer[:n])
                begin += n
        return digest.hexdigest()
    except OSError as e:
        raise InputError(f"cannot read the file: {reason(e)}", path=os.fspath(path)) from e
    finally:
        close_read(fd)


Identity: TypeAlias = tuple[int, int, int]
"""What tells a file from another one of its name: inode, size and time of the last change in nanoseconds. Not the
device, whose number differs between the machines of a cluster."""


def identity_of(status: os.stat_result) -> Identity:
    """The identity of a file with that status."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def size_of(path: Path) -> int:
    """Size of a file in bytes; InputError if the system does not tell it."""
    try:
        return os.stat(path).st_size
    except OSError as e:
        raise InputError(f"cannot read the file: {reason(e)}", path=os.fspath(path)) from e


def is_file(path: Path) -> bool:
    """Whether a regular file exists; InputError if the system does not tell (``os.path.isfile`` would return False)."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise InputError(f"cannot read the file: {reason(e)}", path=os.fspath(path)) from e


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; InputError if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as e:
        raise InputError(f"cannot list the folder: {reason(e)}", path=os.fspath(folder)) from e


def remove(path: Path) -> None:
    """Remove a file if it exists; WriteError if it cannot be removed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as e:
        raise WriteError(f"cannot remove the file: {reason(e)}", path=os.fspath(path)) from e


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths lead to one file, through links or not; False if either is missing."""
    try:
        one, other = os.stat(a), os.stat(b)
    except (OSError, ValueError):
        return False
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def safe_name(name: str, suffix: str = "", listed_in: Path | None = None, fix: str = "rename the file") -> str:
    """``name``, if it is a plain file name of [A-Za-z0-9._-] that ends with ``suffix``; else PathError.

    listed_in, fix: the file that the name was read from, and what to do, for the message.
    """
    if not _SAFE.fullmatch(name) or name in (".", "..") or not name.endswith(suffix) or name == suffix:
        expected = "a file name of letters, digits, '.', '_', '-'" + (f" ending in '{suffix}'" if suffix else "")
        path = None if listed_in is None else os.fspath(listed_in)
        raise PathError(f"file name: expected {expected}, got {name!r:.200}; {fix}", value=name, path=path)
    return name


def member(folder: Path, name: str, suffix: str = "", roots: Sequence[Path] = ()) -> str:
    """The path of the file ``name`` in ``folder``; PathError if it leads outside. The name may come from any file.

    A symlink is refused unless its target is where ``not_outside`` allows it.
    """
    return not_outside(os.path.join(os.fspath(folder), safe_name(name, suffix, folder)), roots)


def not_outside(path: str, roots: Sequence[Path] = ()) -> str:
    """``path``, unless it is a symlink whose target lies outside: then PathError.

    Not outside are the folder of the link, in a Hugging Face cache the blobs of its repository, and ``roots``, the
    folders that the user allows links to.
    """
    if os.path.islink(path):
        target, here = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
        allowed = [here, *_blobs_beside(here), *map(os.path.realpath, roots)]
        if not any(os.path.commonpath([target, root]) == root for root in allowed):
            raise PathError(
                f"symlink leads to {printable(target)}; allow it with --follow-symlinks FOLDER, one that holds the "
                "target (in Python: spformat.limits.using(link_roots=[FOLDER]))",
                path=path,
                value=target,
            )
    return path


def _blobs_beside(folder: str) -> list[str]:
    """Where the links in ``folder``, a real path, lead if it is a snapshot of a Hugging Face cache, or lies in one:
    models--ORG--NAME/snapshots/COMMIT has links to ../../blobs. A link in place of blobs is not followed."""
    repository, of_snapshots, _ = folder.rpartition(f"{os.sep}snapshots{os.sep}")
    return [os.path.join(repository, "blobs")] if of_snapshots and _CACHED.fullmatch(repository) else []


def reason(e: BaseException) -> str:
    """The text of a system error without the path, which errors of this package have as a field."""
    return (e.strerror if isinstance(e, OSError) else None) or str(e)


def kind_of(mode: int) -> str:
    """The kind of a file in words, from the mode in its status."""
    kinds = {
        stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "symlink", stat.S_IFIFO: "FIFO",
        stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "special file")
