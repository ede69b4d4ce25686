"""Files: opening what is really a file, reading it, hashing it, and safe names.

Nothing here maps memory: reading a mapping of a file that somebody truncates ends the process with SIGBUS, where
``pread`` gives an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

from ..errors import InputError, PathError, WriteError, printable

Path: TypeAlias = str | os.PathLike[str]

_BUFFER = 2**20
_SAFE = re.compile(r"[A-Za-z0-9._-]{1,255}")


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """File descriptor and stat of a regular file; InputError for anything else. Never blocks on a FIFO."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        if isinstance(path, str) and "://" in path:
            what = "a URL: `spformat convert` alone takes those, of checkpoints: download it first"
            raise InputError(what, path=path) from e
        raise InputError(f"cannot open the file: {reason(e)}", path=os.fspath(path)) from e
    try:
        status = os.fstat(fd)
    except OSError as e:
        close_read(fd)
        raise InputError(f"cannot open the file: {reason(e)}", path=os.fspath(path)) from e
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise InputError(f"expected a regular file, got a {kind_of(status.st_mode)}", path=os.fspath(path))
    return fd, status


def close_read(fd: int) -> None:
    """Close a file that was only read: what the system says to that changes nothing."""
    with suppress(OSError):
        os.close(fd)


def read_small(path: Path, at_most: int) -> bytes:
    """All bytes of a regular file of at most ``at_most`` bytes (manifests, journals); InputError if it is larger."""
    fd, status = open_regular(path)
    try:
        if status.st_size > at_most:
            raise InputError(f"expected at most {at_most:,} bytes, got {status.st_size:,}", path=os.fspath(path))
        found = bytearray()
        while part := os.pread(fd, _BUFFER, len(found)):
            found += part
        return bytes(found)
    except InputError:
        raise
    except OSError as e:
        raise InputError(f"cannot read the file: {reason(e)}", path=os.fspath(path)) from e
    finally:
        close_read(fd)


def sha256_of(path: Path, ranges: Sequence[tuple[int, int]] | None = None) -> str:
    """SHA-256 of a regular file, or of its bytes in ``ranges`` (first, after the last), as 64 lower-case hex digits.

    Memory: one buffer.
    """
    fd, _ = open_regular(path)
    try:
        if ranges is None:
            with os.fdopen(fd, "rb", buffering=0, closefd=False) as f:
                return hashlib.file_digest(f, "sha256").hexdigest()
        found, room = hashlib.sha256(), memoryview(bytearray(_BUFFER))
        for begin, end in ranges:
            while begin < end and (n := os.preadv(fd, [room[: end - begin]], begin)):
                found.update(room[:n])
                begin += n
        return found.hexdigest()
    except OSError as e:
        raise InputError(f"cannot read the file: {reason(e)}", path=os.fspath(path)) from e
    finally:
        close_read(fd)


def size_of(path: Path) -> int:
    """Bytes of a file; InputError if it cannot be asked."""
    try:
        return os.stat(path).st_size
    except OSError as e:
        raise InputError(f"cannot read the file: {reason(e)}", path=os.fspath(path)) from e


def is_file(path: Path) -> bool:
    """Whether there is a regular file; InputError if the system does not say (``os.path.isfile`` would say no)."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise InputError(f"cannot read the file: {reason(e)}", path=os.fspath(path)) from e


def names_in(folder: Path) -> list[str]:
    """Names in a folder, sorted; InputError if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as e:
        raise InputError(f"cannot list the folder: {reason(e)}", path=os.fspath(folder)) from e


def remove(path: Path) -> None:
    """Remove a file that may be there; WriteError if it stays."""
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


def safe_name(name: str, suffix: str = "") -> str:
    """``name``, if it is a plain file name of [A-Za-z0-9._-] that ends with ``suffix``; else PathError."""
    if not _SAFE.fullmatch(name) or name in (".", "..") or not name.endswith(suffix) or name == suffix:
        expected = "a file name of letters, digits, '.', '_', '-'" + (f" ending in '{suffix}'" if suffix else "")
        raise PathError(f"file name: expected {expected}, got {name!r:.200}", value=name)
    return name


def member(folder: Path, name: str, suffix: str = "", roots: Sequence[Path] = ()) -> str:
    """Path of the file ``name`` (a name read from some file) in ``folder``; PathError if it leads outside.

    A symlink is refused unless its target lies in one of ``roots``, the folders the user allows links into.
    """
    return not_outside(os.path.join(os.fspath(folder), safe_name(name, suffix)), roots)


def not_outside(path: str, roots: Sequence[Path] = ()) -> str:
    """``path``, unless it is a symlink whose target lies in none of ``roots``: then PathError."""
    if os.path.islink(path):
        target = os.path.realpath(path)
        allowed = [os.path.realpath(root) for root in roots]
        if not any(os.path.commonpath([target, root]) == root for root in allowed):
            raise PathError(
                f"symlink leads to {printable(target)}; allow it with --follow-symlinks FOLDER, one that holds the "
                "target (a Hugging Face cache keeps its files in the blobs folder beside snapshots)",
                path=path,
                value=target,
            )
    return path


def reason(e: BaseException) -> str:
    """Text of a system error without the path, which our errors carry themselves."""
    return (e.strerror if isinstance(e, OSError) else None) or str(e)


def kind_of(mode: int) -> str:
    """What a path leads to, in words, by the mode of its status."""
    kinds = {
        stat.S_IFDIR: "folder", stat.S_IFLNK: "symlink", stat.S_IFIFO: "FIFO",
        stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "special file")
