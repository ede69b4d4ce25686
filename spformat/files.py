"""Files: opening what is really a file, safe names, one durable way to publish, a folder lock.

Nothing here maps memory: reading a mapping of a file that somebody truncates, or writing one on a full
disk, ends the process with SIGBUS, where ``pread`` and ``pwrite`` give an error.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeAlias

from .errors import (
    DurabilityUnknown,
    InputError,
    LockedError,
    OutputError,
    PathError,
    SpformatError,
    WriteError,
    printable,
)

Path: TypeAlias = str | os.PathLike[str]

LOCK = ".spformat.lock"
_BUFFER = 2**20
_KEPT_IN_CACHE = 64 << 20
"""Outputs below this many bytes are left to the page cache: whoever wrote them is likely to read them next."""
_IN_FLIGHT = 64 << 20
"""Bytes of a larger output that may be on their way to the device."""
_TEMP = re.compile(r"\.spformat-[0-9a-f]{16}\.tmp")
_SAFE = re.compile(r"[A-Za-z0-9._-]{1,255}")


# --- reading ---------------------------------------------------------------------------------------


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """File descriptor and stat of a regular file; InputError for anything else. Never blocks on a FIFO."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise InputError(f"cannot open the file: {reason(e)}", path=os.fspath(path)) from e
    try:
        status = os.fstat(fd)
    except OSError as e:
        close_read(fd)
        raise InputError(f"cannot open the file: {reason(e)}", path=os.fspath(path)) from e
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise InputError(f"expected a regular file, got a {_kind(status.st_mode)}", path=os.fspath(path))
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


# --- names read from files -------------------------------------------------------------------------


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


# --- publishing ------------------------------------------------------------------------------------


def check_target(path: Path, *, overwrite: bool = False) -> None:
    """OutputError unless a file can be created at ``path`` now: asked before work is done for it."""
    where = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(where))
    try:
        status = os.stat(folder)
    except (OSError, ValueError) as e:
        raise OutputError(f"cannot open the target folder: {reason(e)}", path=where) from e
    if not stat.S_ISDIR(status.st_mode):
        raise OutputError(f"target folder: expected a folder, got a {_kind(status.st_mode)}", path=where)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise OutputError("cannot create a file in the target folder: Permission denied", path=where)
    try:
        found = os.lstat(where)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as e:
        raise OutputError(f"cannot create the file: {reason(e)}", path=where) from e
    if not stat.S_ISREG(found.st_mode):
        raise OutputError(f"target: expected a regular file, got a {_kind(found.st_mode)}", path=where)
    if not overwrite:
        raise OutputError("the file exists; pass overwrite=True (--force) to replace it", path=where)


def ignores_case(folder: Path) -> bool:
    """Whether a folder in which this process holds the lock takes names of other case for the same file."""
    return os.path.exists(os.path.join(os.fspath(folder), LOCK.upper()))


class Output:
    """A file under construction: complete and durable under its final name, or not there at all.

    The bytes go to a temporary file in the target folder, which is locked while its writer lives, so that
    the next writer can tell what a killed one left behind and remove it. ``commit`` flushes the file,
    renames it over the final name and flushes the folder; the old file stays until the rename.
    As a context manager: commits on success, abandons on any exception.

    Args:
        path: final name. A symlink, folder, FIFO or device there is refused; so is a file unless ``overwrite``.
        size: bytes the file will have; space for them is reserved at once.

    Raises:
        OutputError: the file cannot be created there.
        WriteError: no space, or the system failed to write; nothing was published.
        DurabilityUnknown: published, but the folder could not be flushed.
    """

    def __init__(self, path: Path, size: int, *, overwrite: bool = False) -> None:
        self.path = os.fspath(path)
        self.size = size
        self.overwrite = overwrite
        folder, self._name = os.path.split(os.path.abspath(self.path))
        self._fd = self._guard = -1
        self._temp = ""
        self._recent: deque[tuple[int, int]] = deque()
        self._recent_bytes = 0
        self._recent_lock = threading.Lock()
        try:
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as e:
            raise OutputError(f"cannot open the target folder: {reason(e)}", path=self.path) from e
        try:
            self._old = self._target()
            with self._writing("create the file"):
                _sweep(self._folder, _machine())
                self._check_space()
                self._create()
            with self._writing("reserve space"):
                _allocate(self._fd, size)
        except BaseException:
            self.abandon()
            raise

    def write_at(self, offset: int, data: Any) -> None:
        """Write a bytes-like object at ``offset``, in as many system calls as it takes. Threads may share this."""
        view = memoryview(data).cast("B")
        if offset < 0 or offset + view.nbytes > self.size:
            raise WriteError(
                f"write: expected bytes 0..{self.size}, got {offset}..{offset + view.nbytes}", path=self.path
            )
        with self._writing("write"):
            at, n = offset, view.nbytes
            while view.nbytes:
                done = os.pwrite(self._fd, view, offset)
                view, offset = view[done:], offset + done
        self._send_off(at, n)

    def _send_off(self, at: int, n: int) -> None:
        """Start the way of fresh pages to the device, and give back those that have arrived.

        Else the final fsync waits for all of them, and a large output fills the page cache with what nobody reads
        soon. The advice starts the writing of dirty pages and drops clean ones: it is given at once, and once again
        when enough has been written since.
        """
        if self.size < _KEPT_IN_CACHE or not hasattr(os, "posix_fadvise"):
            return
        with self._recent_lock:
            self._recent.append((at, n))
            self._recent_bytes += n
            old = []
            while self._recent_bytes > _IN_FLIGHT:
                old.append(self._recent.popleft())
                self._recent_bytes -= old[-1][1]
        for begin, length in (*old, (at, n)):
            with suppress(OSError):  # advice: the write itself has succeeded, and fsync has the last word
                os.posix_fadvise(self._fd, begin, length, os.POSIX_FADV_DONTNEED)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Read back what was written; WriteError if it is not there."""
        with self._writing("read back"):
            while into.nbytes:
                done = os.preadv(self._fd, [into], offset)
                if done == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written")
                into, offset = into[done:], offset + done

    def flush(self, *, forget: bool = False) -> None:
        """fsync; with ``forget`` also drop the cached pages, so that ``read_at`` reads the device."""
        with self._writing("fsync"):
            os.fsync(self._fd)  # a failure is final: a second fsync would report success for lost pages
            if forget and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """Publish durably. On failure the temporary file is removed and the old file is untouched."""
        try:
            self.flush()
            if self._old is not None:
                with self._writing("set the mode"):
                    os.fchmod(self._fd, stat.S_IMODE(self._old.st_mode))
            fd, self._fd = self._fd, -1
            with self._writing("close"):
                os.close(fd)
            self._target()
            with self._writing("rename"):
                os.replace(self._temp, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._temp = ""
            try:
                os.fsync(self._folder)
            except OSError as e:
                raise DurabilityUnknown(
                    f"the file is complete, but its folder could not be flushed to disk: {reason(e)}", path=self.path
                ) from e
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Remove the temporary file, if it was not published, and release everything. Harmless to repeat."""
        if self._temp:
            with suppress(OSError):
                os.unlink(self._temp, dir_fd=self._folder)
            self._temp = ""
        for fd in (self._fd, self._guard, self._folder):
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)
        self._fd = self._guard = self._folder = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.commit()
        else:
            self.abandon()

    def _target(self) -> os.stat_result | None:
        """Status of what stands under the final name now; OutputError unless it may be replaced."""
        try:
            status = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise OutputError(f"cannot create the file: {reason(e)}", path=self.path) from e
        if not stat.S_ISREG(status.st_mode):
            raise OutputError(f"target: expected a regular file, got a {_kind(status.st_mode)}", path=self.path)
        if not self.overwrite:
            raise OutputError("the file exists; pass overwrite=True (--force) to replace it", path=self.path)
        return status

    def _check_space(self) -> None:
        free = os.fstatvfs(self._folder)
        available = free.f_bavail * free.f_frsize
        if free.f_blocks and available < self.size:
            raise WriteError(
                f"disk: expected {self.size:,} free bytes, got {available:,}; nothing was written", path=self.path
            )

    def _create(self) -> None:
        # A new file takes 0666 & ~umask, applied by the kernel (reading the umask is not thread-safe). A
        # replacement stays private until it has the old file's mode.
        mode = 0o666 if self._old is None else 0o600
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            temp = f".spformat-{_machine()}{secrets.token_hex(4)}.tmp"
            try:
                self._fd = os.open(temp, flags, mode, dir_fd=self._folder)
            except OSError as e:
                kind = WriteError if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else OutputError
                raise kind(f"cannot create a file in the target folder: {reason(e)}", path=self.path) from e
            self._temp = temp
            self._guard = os.dup(self._fd)  # holds the lock while the file itself is closed and renamed
            try:
                fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno != errno.EWOULDBLOCK:  # a file system without locks: then nobody can sweep either
                    return
            else:
                with suppress(FileNotFoundError):  # swept by another run between open and flock
                    if os.path.samestat(os.fstat(self._fd), os.stat(temp, dir_fd=self._folder)):
                        return
            os.close(self._fd)
            os.close(self._guard)
            self._fd = self._guard = -1

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if isinstance(e, SpformatError):
                raise
            detail = ""
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                free = os.fstatvfs(self._folder)
                detail = f" ({self.size:,} bytes needed, {free.f_bavail * free.f_frsize:,} free)"
            raise WriteError(f"cannot {what}: {reason(e)}{detail}; nothing was published", path=self.path) from e


def publish(path: Path, data: bytes, *, overwrite: bool = False) -> None:
    """Write a small file (manifest, journal) in the same atomic, durable way."""
    with Output(path, len(data), overwrite=overwrite) as out:
        out.write_at(0, data)


def _machine() -> str:
    """Eight hex digits of this machine's name, the first of every temporary file it makes."""
    return hashlib.sha256(os.uname().nodename.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def sweep(folder: Path) -> None:
    """Remove temporary files of dead writers, also those of other machines: for a run that has the folder alone."""
    with suppress(OSError):  # the run is complete: what stays is for the next one
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sweep(fd)
        finally:
            os.close(fd)


def _sweep(folder: int, machine: str = "") -> None:
    """Remove temporary files of our naming, of one machine (locks may not reach from one to another), not locked."""
    with os.scandir(folder) as entries:
        stale = [e.name for e in entries if _TEMP.fullmatch(e.name) and e.name.startswith(f".spformat-{machine}")]
    for name in stale:
        with suppress(OSError):
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    os.unlink(name, dir_fd=folder)
            finally:
                os.close(fd)


def _allocate(fd: int, size: int) -> None:
    if not size or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # these: the file system cannot reserve
            raise


# --- locking ---------------------------------------------------------------------------------------


@contextmanager
def folder_lock(folder: Path, name: str = LOCK, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock file in ``folder`` for a ``with`` block; LockedError at once if another run holds it.

    The kernel releases the lock of a process that dies, so a stale lock file stops nobody. Runs that may
    work side by side (parts of one conversion) take ``shared`` locks, which exclude only the unshared.
    """
    path = os.path.join(os.fspath(folder), name)
    fd = _take(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        with suppress(OSError):  # the last holder removes the file; others may still share it
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        close_read(fd)


def _take(path: str, mode: int) -> int:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as e:
            raise OutputError(f"cannot create the lock file: {reason(e)}", path=path) from e
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
            # The holder before us may have removed the file after we opened it: then it locks nothing.
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                if mode == fcntl.LOCK_EX:
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BlockingIOError as e:
            holder = os.pread(fd, 32, 0).strip().decode("ascii", "replace")
            os.close(fd)
            raise LockedError(
                f"locked by {f'process {holder}' if holder else 'another run'}; wait for it or stop it", path=path
            ) from e
        except FileNotFoundError:
            pass
        except OSError as e:
            os.close(fd)
            raise WriteError(f"cannot lock the folder: {reason(e)}", path=path) from e
        os.close(fd)


def reason(e: BaseException) -> str:
    """Text of a system error without the path, which our errors carry themselves."""
    return (e.strerror if isinstance(e, OSError) else None) or str(e)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "folder", stat.S_IFLNK: "symlink", stat.S_IFIFO: "FIFO",
        stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "special file")
