"""Who may write into a folder: a lock for each run, and a token for the workers of a run.

The kernel releases the lock of a process that ends. But workers in other processes may live longer than the run that
started them, and would publish files into a folder that another run has locked since. So a run with workers writes a
token into the folder, and a worker publishes a file only while the token is still there.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from ..errors import LockedError, OutputError, WriteError
from .files import Path, close_read, names_in, reason

LOCK = ".spformat.lock"
_LOCK_SUFFIX, _TOKEN_SUFFIX = ".lock", ".run"
_TOKENS = re.compile(r"\.spformat(-part-\d+-of-\d+)?\.run")


def ignores_case(folder: Path) -> bool:
    """Whether the file system of a folder ignores the case of names. This process must have locked the folder."""
    return os.path.exists(os.path.join(os.fspath(folder), LOCK.upper()))


@contextmanager
def folder_lock(folder: Path, name: str = LOCK, *, shared: bool = False) -> Iterator[None]:
    """Lock ``folder`` with a lock file for a ``with`` block; LockedError at once if another run has locked it.

    The kernel releases the lock of a process that dies, so a lock file that is left over does not block anyone. Runs
    that may work side by side (parts of one conversion) use ``shared`` locks, which exclude only exclusive ones.

    Workers of earlier runs that this lock excludes cannot publish any more.
    """
    where = os.fspath(folder)
    path = os.path.join(where, name)
    fd = _take(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        for token in _tokens_of_others(where, name, shared):
            _revoke(os.path.join(where, token))
        yield
    finally:
        with suppress(OSError):  # the last process removes the file; before that, others still share the lock
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        close_read(fd)


def _tokens_of_others(folder: str, name: str, shared: bool) -> list[str]:
    """The tokens of runs that cannot be running beside the lock ``name``: of every run if the whole folder is locked,
    of undivided runs for a part, and of earlier runs of the same part."""
    if name == LOCK and not shared:
        return [n for n in names_in(folder) if _TOKENS.fullmatch(n)]
    return [token_name(LOCK if shared else name)]


def token_name(lock: str) -> str:
    """The name of the token file of the run that has locked the lock file ``lock``."""
    return lock.removesuffix(_LOCK_SUFFIX) + _TOKEN_SUFFIX


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """In the ``with`` block no other thread or process is in such a block for ``folder``; each waits for its turn.

    For a file that is read, changed and written within moments. Nothing is locked where there is no such folder, or
    where its file system has no locks.
    """
    try:
        fd = os.open(os.fspath(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        close_read(fd)


# ------------------------------------------------------------------------------------------------ tokens of workers


@dataclass(frozen=True)
class Token:
    """The permission of one run's workers to publish files; small when pickled."""

    path: str
    text: str


_token: ContextVar[Token | None] = ContextVar("spformat_token", default=None)


@contextmanager
def worker_token(folder: Path, lock: str = LOCK) -> Iterator[Token]:
    """A token for the workers of the run that has locked ``folder``. It is removed at the end of the ``with`` block;
    workers that still run after that publish nothing."""
    path = os.path.join(os.fspath(folder), token_name(lock))
    token = Token(path, secrets.token_hex(16))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, 0)
            os.pwrite(fd, token.text.encode(), 0)
        finally:
            os.close(fd)
    except (OSError, ValueError) as e:
        raise WriteError(f"cannot write the token of this run: {reason(e)}", path=path) from e
    try:
        yield token
    finally:
        _revoke(path)


@contextmanager
def acting_for(token: Token | None) -> Iterator[None]:
    """In the ``with`` block, this thread publishes files only while ``token`` is valid; None: without a condition."""
    before = _token.set(token)
    try:
        yield
    finally:
        _token.reset(before)


@contextmanager
def permission() -> Iterator[None]:
    """Surrounds the system call that publishes a file. LockedError if the run that this worker belongs to has ended.

    The token is locked meanwhile, so that the next run waits for this call, or this call sees that run.
    """
    token = _token.get()
    if token is None:
        yield
        return
    ended = "the run that started this worker has ended; nothing was published"
    try:
        fd = os.open(token.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise LockedError(ended, path=os.path.dirname(token.path)) from e
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.pread(fd, 64, 0) != token.text.encode():
            raise LockedError(ended, path=os.path.dirname(token.path))
        yield
    finally:
        close_read(fd)


def _revoke(path: str) -> None:
    """Make the token at ``path`` invalid, also for a worker that has opened it. Waits for one that is publishing."""
    with suppress(FileNotFoundError):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.ftruncate(fd, 0)
                os.unlink(path)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise
        except OSError as e:
            raise WriteError(f"cannot end the token of an earlier run: {reason(e)}", path=path) from e


# ------------------------------------------------------------------------------------------------------- lock files


_MOMENT, _MOMENTS = 0.01, 50
"""Seconds between two attempts to share a lock, and how many attempts there are. The last process that shares a lock
takes it alone for a moment, to remove the file; a process that comes in that moment must not be refused."""


def _take(path: str, mode: int) -> int:
    attempts = _MOMENTS if mode == fcntl.LOCK_SH else 1
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
            attempts -= 1
            if attempts:
                os.close(fd)
                time.sleep(_MOMENT)
                continue
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
