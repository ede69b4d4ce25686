"""Files behind URLs, through fsspec: a file system is opened, its errors become ours, and copies can be stopped."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from ..errors import InputError, OutputError, SpformatError, UnreachableError, UsageError, WriteError, printable
from ..storage.files import Path, path_text

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_LOCAL = re.compile(r"(?:file|local)://", re.IGNORECASE)
STREAMS = 4
"""Files that are copied at a time."""
THREADS = "spformat-copy"
"""How the names of the threads begin that copy files."""
_ANSWER, _SILENCE = 30, 60
"""Seconds in which an HTTP server must answer, and in which the next bytes must arrive. A whole file may take as long
as it needs."""

T = TypeVar("T")


def is_remote(path: Path) -> bool:
    """Whether ``path`` is a URL (``s3://..``, ``hf://..``) of another place than this machine's folders."""
    return _URL.match(path_text(path)) is not None and not _LOCAL.match(path_text(path))


def without_scheme(path: Path) -> str:
    """The local path that a ``file://`` URL names; any other path unchanged. So local rules hold for such URLs, too."""
    return _LOCAL.sub("", path_text(path), count=1)


def open_url(url: str) -> tuple[Any, str]:
    """(file system, path in it) of a URL; UsageError if fsspec does not know it, or a package is missing."""
    try:
        import fsspec
    except ImportError as e:
        raise UsageError("remote paths need fsspec: pip install 'spformat[remote]'", path=url) from e
    try:
        fs, root = fsspec.core.url_to_fs(url, **_options(url))
    except ImportError as e:  # fsspec knows the protocol, but its package is not installed; the message names it
        raise UsageError(f"{url.partition('://')[0]}: {e}", path=url) from e
    except ValueError as e:
        raise UsageError(f"not a URL that fsspec knows: {e}", path=url) from e
    except Exception as e:  # of the package behind the protocol, which may connect at once
        kind = UnreachableError if _is_of_the_network(e) else InputError
        raise kind(f"cannot open the URL: {_reason(e)}", path=url) from e
    return fs, str(root)


def _options(url: str) -> dict[str, Any]:
    if not url.lower().startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout  # of fsspec's HTTP file system; the caller reports an ImportError

    return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=_ANSWER, sock_read=_SILENCE)}}


def name_of(path: str) -> str:
    """The last component of a path in a file system of fsspec."""
    return path.rstrip("/").rpartition("/")[2]


def listing(fs: Any, root: str) -> dict[str, dict[str, Any]]:
    """Name -> what the file system tells of it, in the folder ``root``, or of the file itself; empty if there is
    nothing."""
    if not fs.exists(root):
        return {}
    entries = fs.ls(root, detail=True) if fs.isdir(root) else [fs.info(root)]
    return {name_of(str(info["name"])): info for info in entries}


@contextmanager
def errors(kind: type[InputError] | type[OutputError] | type[WriteError], url: str, what: str) -> Iterator[None]:
    """Turn what another package raises into an error of this package that names the URL. A full disk is a WriteError.

    Any Exception is caught: the errors of httpx, botocore and huggingface_hub share no base class.
    """
    try:
        yield
    except (SpformatError, MemoryError):
        raise
    except Exception as e:
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            kind = WriteError
        elif kind is InputError and _is_of_the_network(e):
            kind = UnreachableError
        raise kind(f"cannot {what}: {_reason(e)}", path=url) from e


_OF_THE_NETWORK = {"TransportError", "ClientConnectionError", "ConnectionError", "ConnectTimeoutError", "gaierror"}
"""Classes of httpx, aiohttp, requests, botocore and Python whose errors say that no server answered."""


def _is_of_the_network(e: BaseException | None) -> bool:
    """Whether no server answered, or one that cannot serve now, as the error or one that it came from says.

    In the offline mode of huggingface_hub none is asked, and what is not in its cache is missing.
    """
    network = False
    while e is not None:
        names = {c.__name__ for c in type(e).__mro__}
        if "OfflineModeIsEnabled" in names:
            return False
        status = getattr(getattr(e, "response", None), "status_code", 0)
        network |= isinstance(e, (ConnectionError, TimeoutError)) or bool(names & _OF_THE_NETWORK)
        network |= status in (429, 502, 503, 504)
        e = e.__cause__ or e.__context__
    return network


def _reason(e: BaseException) -> str:
    cause = e
    while cause.__cause__ is not None and "Timeout" not in type(cause).__name__:
        cause = cause.__cause__  # fsspec tells a timeout as a missing file
    if "Timeout" in type(cause).__name__:
        return f"{type(cause).__name__}: no answer in {_ANSWER} seconds, or no more bytes in {_SILENCE}"
    text = printable(" ".join(str(e).split()), 500)
    return f"{type(e).__name__}: {text}" if text else type(e).__name__


class _Stopped(Exception):
    """A copy was stopped, because another one failed or the user interrupted the run."""


def side_by_side(copy: Callable[[T, Any], None], items: Iterable[T]) -> None:
    """``copy(item, callback)`` of every item, several at a time; the first error of one is raised.

    copy: passes the callback on to fsspec, which calls it for every piece of a file. After an error or an interrupt it
    raises, so that the other copies end. An interrupt is not kept waiting for them.
    """
    import fsspec

    stopped = False

    class Watched(fsspec.callbacks.Callback):  # type: ignore[misc]
        def call(self, *args: Any, **more: Any) -> None:
            if stopped:
                raise _Stopped

    pool = ThreadPoolExecutor(STREAMS, THREADS)
    try:
        copies = [pool.submit(copy, item, Watched()) for item in items]
        wait(copies, return_when=FIRST_EXCEPTION)
        failed = [c for c in copies if c.done() and c.exception() is not None]
        stopped = bool(failed)
        pool.shutdown(cancel_futures=stopped)
        for c in failed or copies:
            c.result()
    except BaseException:
        stopped = True
        pool.shutdown(wait=False, cancel_futures=True)
        raise
