"""A lock on a folder. The kernel releases it when its process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import LockedError, OutputError, WriteError
from .files import Path, close_read, reason

LOCK = ".spformat.lock"


def ignores_case(folder: Path) -> bool:
    """Whether the file system of a folder ignores the case of names. This process must have locked the folder."""
    return os.path.exists(os.path.join(os.fspath(folder), LOCK.upper()))


@contextmanager
def folder_lock(folder: Path, name: str = LOCK, *, shared: bool = False) -> Iterator[None]:
    """Lock ``folder`` with a lock file for a ``with`` block; LockedError at once if another run has locked it.

    The kernel releases the lock of a process that dies, so a lock file that is left over does not block anyone. Runs
    that may work side by side (parts of one conversion) use ``shared`` locks, which exclude only exclusive ones.
    """
    path = os.path.join(os.fspath(folder), name)
    fd = _take(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        with suppress(OSError):  # the last process removes the file; before that, others still share the lock
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
            # Another process may have removed the file after it was opened here. Then this lock excludes nobody.
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
