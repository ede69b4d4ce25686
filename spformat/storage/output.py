"""Publishing a file durably: it is complete under its final name, or not there at all.

Files are never mapped into memory. Writing to a mapping on a full disk ends the process with SIGBUS; ``pwrite`` raises
an error.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from ..errors import DurabilityUnknown, InputError, OutputError, SpformatError, WriteError
from .files import Path, close_read, kind_of, open_regular, path_text, reason
from .locks import permission

_KEPT_IN_CACHE = 64 << 20
"""Outputs below this many bytes stay in the page cache, because they are likely to be read soon."""
_IN_FLIGHT = 64 << 20
"""Bytes of a larger output that may be waiting to reach the disk."""
_TOGETHER = 16 << 20
"""Bytes of a larger output after whose writing the system is told about them. For pages that it cannot drop at once,
each call waits until every processor of the machine has put its own pages into the common lists."""
_PIECE = 16 << 20
"""Bytes of a file that are copied at a time."""
_TEMP = re.compile(r"\.spformat-[0-9a-f]{16}\.tmp")


def _no_folder(path: str, e: Exception) -> OutputError:
    hint = "; `spformat convert` alone takes URLs: write a file, then upload it" if "://" in path else ""
    return OutputError(f"cannot open the target folder: {reason(e)}{hint}", path=path)


def check_target(path: Path, *, overwrite: bool = False) -> None:
    """OutputError unless a file can be created at ``path`` now. Called before the work that produces the file."""
    where = path_text(path)
    folder = os.path.dirname(os.path.abspath(where))
    try:
        status = os.stat(folder)
    except (OSError, ValueError) as e:
        raise _no_folder(where, e) from e
    if not stat.S_ISDIR(status.st_mode):
        raise OutputError(f"target folder: expected a folder, got a {kind_of(status.st_mode)}", path=where)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise OutputError("cannot create a file in the target folder: Permission denied", path=where)
    try:
        status_of_target = os.lstat(where)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as e:
        raise OutputError(f"cannot create the file: {reason(e)}", path=where) from e
    if not stat.S_ISREG(status_of_target.st_mode):
        raise OutputError(f"target: expected a regular file, got a {kind_of(status_of_target.st_mode)}", path=where)
    if not overwrite:
        raise OutputError("the file exists; pass overwrite=True (--force) to replace it", path=where)


class Output:
    """A file under construction: complete and durable under its final name, or not there at all.

    The bytes are written to a temporary file in the target folder. The temporary file is locked while its writer lives,
    so the next writer recognises, and removes, what a killed writer has left behind. ``commit`` flushes the file, gives
    it the final name and flushes the folder; an old file stays until then. Of two writers of one new file, the second
    is refused. As a context manager, it commits on success and abandons the file after any exception.

    Args:
        path: final name. A symlink, folder, FIFO or device of that name is refused; so is a file unless ``overwrite``.
        size: size of the file in bytes; the space is reserved at once.

    Raises:
        OutputError: the file cannot be created there.
        WriteError: no space, or the system failed to write; nothing was published.
        LockedError: the run that this worker belongs to has ended (``locks.permission``).
        DurabilityUnknown: published, but the folder could not be flushed.
    """

    def __init__(self, path: Path, size: int, *, overwrite: bool = False) -> None:
        self.path = path_text(path)
        self.size = size
        self.overwrite = overwrite
        folder, self._name = os.path.split(os.path.abspath(self.path))
        self._fd = self._guard = -1
        self._temp = ""
        self._fresh: list[tuple[int, int]] = []
        self._recent: deque[tuple[int, int]] = deque()
        self._fresh_bytes = self._recent_bytes = 0
        self._recent_lock = threading.Lock()
        try:
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as e:
            raise _no_folder(self.path, e) from e
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
        """Tell the system to start writing new pages to disk, and to drop earlier pages from its cache.

        Otherwise the final fsync would wait for all pages, and a large output would fill the page cache with data that
        is not read soon. The advice DONTNEED starts the writing of dirty pages and drops clean ones. So it is given
        twice for each range: when ``_TOGETHER`` bytes are new, for neighbours as one range, and again when
        ``_IN_FLIGHT`` more bytes have been written.
        """
        if self.size < _KEPT_IN_CACHE or not hasattr(os, "posix_fadvise"):
            return
        with self._recent_lock:
            self._fresh.append((at, n))
            self._fresh_bytes += n
            if self._fresh_bytes < _TOGETHER:
                return
            new = _joined(self._fresh)
            self._recent.extend(new)
            self._recent_bytes += self._fresh_bytes
            self._fresh, self._fresh_bytes = [], 0
            old = []
            while self._recent_bytes > _IN_FLIGHT:
                old.append(self._recent.popleft())
                self._recent_bytes -= old[-1][1]
        for begin, length in (*old, *new):
            with suppress(OSError):  # only advice: the write itself has succeeded, and fsync reports errors
                os.posix_fadvise(self._fd, begin, length, os.POSIX_FADV_DONTNEED)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Read back what was written; WriteError if the file is shorter."""
        with self._writing("read back"):
            while into.nbytes:
                done = os.preadv(self._fd, [into], offset)
                if done == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written")
                into, offset = into[done:], offset + done

    def flush(self, *, forget: bool = False) -> None:
        """fsync; with ``forget`` also drop the cached pages, so that ``read_at`` reads from the disk."""
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
            with permission(), self._writing("rename"):
                self._take_name()
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

    def _take_name(self) -> None:
        """Give the file its final name.

        A rename would replace a file that has appeared since the check; creating a hard link fails instead.
        """
        folder = {"src_dir_fd": self._folder, "dst_dir_fd": self._folder}
        if not self.overwrite:
            try:
                os.link(self._temp, self._name, **folder, follow_symlinks=False)
            except FileExistsError:
                self._target()  # raises an error that says what has appeared
                raise
            except OSError:  # no hard links here (FAT, some network drives): the rename may replace a new file
                pass
            else:
                with suppress(OSError):  # the file is published; the next writer removes what stays
                    os.unlink(self._temp, dir_fd=self._folder)
                    self._temp = ""
                return
        os.replace(self._temp, self._name, **folder)
        self._temp = ""

    def _target(self) -> os.stat_result | None:
        """Status of the file that has the final name now; OutputError unless it may be replaced."""
        try:
            status = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            raise OutputError(f"cannot create the file: {reason(e)}", path=self.path) from e
        if not stat.S_ISREG(status.st_mode):
            raise OutputError(f"target: expected a regular file, got a {kind_of(status.st_mode)}", path=self.path)
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
        # The kernel gives a new file the mode 0666 & ~umask (reading the umask here would not be thread-safe). A
        # replacement stays private until it gets the mode of the old file.
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
            self._guard = os.dup(self._fd)  # keeps the lock while the file itself is closed and renamed
            try:
                fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno != errno.EWOULDBLOCK:  # a file system without locks: then other writers cannot sweep either
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
    """Write a small file (manifest, journal) atomically and durably."""
    with Output(path, len(data), overwrite=overwrite) as out:
        out.write_at(0, data)


def publish_copy(source: Path, path: Path) -> None:
    """Copy a regular file atomically and durably, in pieces, over what ``path`` is. InputError if it changes its size
    meanwhile."""
    fd, status = open_regular(source)
    try:
        with Output(path, status.st_size, overwrite=True) as out:
            at = 0
            while at < status.st_size:
                try:
                    piece = os.pread(fd, min(_PIECE, status.st_size - at), at)
                except OSError as e:
                    raise InputError(f"cannot read the file: {reason(e)}", path=os.fspath(source)) from e
                if not piece:
                    got = f"expected {status.st_size:,} bytes, as when it was opened, got {at:,}"
                    raise InputError(got, path=os.fspath(source))
                out.write_at(at, piece)
                at += len(piece)
    finally:
        close_read(fd)


def flush_folder(folder: Path) -> None:
    """Flush a folder, so that removals in it are on disk; DurabilityUnknown if the system reports an error."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise DurabilityUnknown(f"the folder could not be flushed to disk: {reason(e)}", path=os.fspath(folder)) from e


def _machine() -> str:
    """Eight hex digits of a hash of this machine's name, with which the names of its temporary files begin."""
    return hashlib.sha256(os.uname().nodename.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def sweep(folder: Path) -> None:
    """Remove temporary files of dead writers, also of other machines; for a run that has locked the folder."""
    with suppress(OSError):  # the run is complete; the next one removes what stays
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sweep(fd)
        finally:
            os.close(fd)


def _sweep(folder: int, machine: str = "") -> None:
    """Remove temporary files of this package that are not locked; only those of ``machine``, if it is given.

    Locks may not work from one machine to another, so files of other machines may be in use.
    """
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


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(begin, bytes) of ranges that do not overlap, in order, neighbours as one."""
    out: list[tuple[int, int]] = []
    for begin, n in sorted(ranges):
        if out and out[-1][0] + out[-1][1] == begin:
            begin, n = out[-1][0], out.pop()[1] + n
        out.append((begin, n))
    return out


def _allocate(fd: int, size: int) -> None:
    if not size or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # the file system cannot reserve space
            raise
