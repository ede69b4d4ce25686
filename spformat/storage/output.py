"""One durable way to publish a file: complete under its final name, or not there at all.

Nothing here maps memory: writing a mapping on a full disk ends the process with SIGBUS; ``pwrite`` gives an error.
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

from ..errors import DurabilityUnknown, OutputError, SpformatError, WriteError
from .files import Path, kind_of, reason

_KEPT_IN_CACHE = 64 << 20
"""Outputs below this many bytes are left to the page cache: whoever wrote them is likely to read them next."""
_IN_FLIGHT = 64 << 20
"""Bytes of a larger output that may be on their way to the device."""
_TEMP = re.compile(r"\.spformat-[0-9a-f]{16}\.tmp")


def _no_folder(path: str, e: Exception) -> OutputError:
    hint = "; `spformat convert` alone takes URLs: write a file, then upload it" if "://" in path else ""
    return OutputError(f"cannot open the target folder: {reason(e)}{hint}", path=path)


def check_target(path: Path, *, overwrite: bool = False) -> None:
    """OutputError unless a file can be created at ``path`` now: asked before work is done for it."""
    where = os.fspath(path)
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
        found = os.lstat(where)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as e:
        raise OutputError(f"cannot create the file: {reason(e)}", path=where) from e
    if not stat.S_ISREG(found.st_mode):
        raise OutputError(f"target: expected a regular file, got a {kind_of(found.st_mode)}", path=where)
    if not overwrite:
        raise OutputError("the file exists; pass overwrite=True (--force) to replace it", path=where)


class Output:
    """A file under construction: complete and durable under its final name, or not there at all.

    The bytes go to a temporary file in the target folder, which is locked while its writer lives, so that
    the next writer can tell what a killed one left behind and remove it. ``commit`` flushes the file,
    gives it the final name and flushes the folder; an old file stays until then. Of two writers of one new file
    the second is refused.
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
        """The final name. A rename replaces what has come since it was looked for; a link is refused."""
        folder = {"src_dir_fd": self._folder, "dst_dir_fd": self._folder}
        if not self.overwrite:
            try:
                os.link(self._temp, self._name, **folder, follow_symlinks=False)
            except FileExistsError:
                self._target()  # says what it is
                raise
            except OSError:  # no hard links here (FAT, some network drives): what comes in these microseconds is lost
                pass
            else:
                with suppress(OSError):  # published: what stays is for the next writer to sweep
                    os.unlink(self._temp, dir_fd=self._folder)
                    self._temp = ""
                return
        os.replace(self._temp, self._name, **folder)
        self._temp = ""

    def _target(self) -> os.stat_result | None:
        """Status of what stands under the final name now; OutputError unless it may be replaced."""
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


def flush_folder(folder: Path) -> None:
    """Bring removals in a folder to disk; DurabilityUnknown if the system does not say that they are."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise DurabilityUnknown(f"the folder could not be flushed to disk: {reason(e)}", path=os.fspath(folder)) from e


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
