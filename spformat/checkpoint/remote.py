"""Checkpoints in object stores, on the hub and in other places with a URL: staged on a local disk, never streamed.

A conversion reads its shards at random offsets and publishes files by renaming them; neither works over a network.
So the files of the source are downloaded first, the conversion runs between local folders, and its files are
uploaded at the end. The manifest (or index) is uploaded last, so a reader sees a complete checkpoint or none.
Models of the hub are downloaded by huggingface_hub (``hub``), everything else is copied through fsspec.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import limits
from ..errors import InputError, OutputError, SpformatError, UsageError, WriteError, printable
from ..storage.files import Path
from . import hub
from .existing_target import superseded
from .hub import Downloaded, Moved
from .manifest import JOURNAL_GLOB, MANIFEST
from .source import INDEX, needed

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_STREAMS = 4
"""Files that are copied at a time."""
_LAST = (INDEX, MANIFEST)
"""Files that are uploaded last, because a folder with one of them is taken for a complete checkpoint."""


def is_remote(path: Path) -> bool:
    """Whether ``path`` is a URL (``s3://..``, ``hf://..``, ``file://..``) and not a local path."""
    return _URL.match(os.fspath(path)) is not None


@dataclass(frozen=True)
class Staged:
    """Local stand-ins of a source and a target, of which either may be remote."""

    source: str
    target: str
    left_behind: tuple[str, ...] = ()
    """Names in a remote source that were not downloaded, because a conversion would not copy them."""


@contextmanager
def staged(
    src: Path, dst: Path, *, staging: Path = "", force: bool = False, part: object = None, moved: Moved | None = None
) -> Iterator[Staged]:
    """Local paths for a conversion, in a ``with`` block. A remote source is downloaded before the block begins; a
    remote target is uploaded after the block, unless it raises.

    staging: folder for the local copies. It stays, and files in it that have the right size (of the hub: the right
    contents) are not downloaded again, so an interrupted run continues. Default: a temporary folder, which is removed
    at the end. force: replace files of a remote target. part: the part that the caller converts, if any; parts are
    refused with remote paths. moved: called for each file; with it, huggingface_hub shows progress bars on a terminal.

    Raises UsageError (a part; fsspec or the package of the protocol is not installed), InputError (nothing is at the
    URL, it cannot be read, a download has another size, the staging folder contains files of another model),
    OutputError (the target contains a checkpoint, the staging folder cannot be created) and WriteError (an upload
    failed, the disk is full).
    """
    source, target = os.fspath(src), os.fspath(dst)
    if not is_remote(source) and not is_remote(target):
        yield Staged(source, target)
        return
    if part:
        raise UsageError(
            "parts are converted between folders that all machines see, since each would download the whole source: "
            "copy it there first",
            path=source if is_remote(source) else target,
        )
    if is_remote(target):
        _refuse_existing(target, force)
    room = os.fspath(staging) or tempfile.mkdtemp(prefix="spformat-")
    try:
        copy = Downloaded(source)
        if is_remote(source):
            copy = download(source, os.path.join(room, "source"), moved)
        local_target = os.path.join(room, "target", *_file_name(target)) if is_remote(target) else target
        here = Staged(copy.path, local_target, copy.left_behind)
        os.makedirs(os.path.dirname(here.target) or ".", exist_ok=True)
        with limits.using(link_roots=(*limits.current().link_roots, *copy.link_roots)):
            yield here
        if is_remote(target):
            upload(here.target, target, moved, force=force)
    finally:
        if not staging:
            shutil.rmtree(room, ignore_errors=True)


def download(url: str, folder: str, moved: Moved | None = None) -> Downloaded:
    """Download a file, or the files of a folder, to ``folder``.

    Not downloaded are subfolders and, if there are ``.safetensors`` files, the weights of other frameworks and files
    that are too large for a side file.
    """
    with _errors(OutputError, folder, "create the staging folder"):
        os.makedirs(folder, exist_ok=True)
    place = hub.place_of(url)
    if place is not None:
        with _errors(InputError, url, "download"):
            return hub.download(place, folder, moved)
    fs, root = _open(url)
    with _errors(InputError, url, "download"):
        if not fs.exists(root):
            raise InputError("nothing is there", path=url)
        single = not fs.isdir(root)
        there = {_name(i): i for i in ([fs.info(root)] if single else fs.ls(root, detail=True))}
    names = list(there) if single else needed({name: i["size"] for name, i in there.items() if i["type"] == "file"})
    if not single:
        hub.refuse_others(folder, names, url)

    def fetch(name: str) -> None:
        _fetch(fs, there[name], os.path.join(folder, name), url)
        if moved:
            moved(name, there[name]["size"] or 0)

    with ThreadPoolExecutor(_STREAMS) as pool:
        list(pool.map(fetch, names))
    if single:
        return Downloaded(os.path.join(folder, *names))
    return Downloaded(folder, tuple(sorted(n for n in there if n not in names and not n.startswith("."))))


def _name(info: dict[str, Any]) -> str:
    return str(info["name"]).rstrip("/").rpartition("/")[2]


def _fetch(fs: Any, info: dict[str, Any], path: str, url: str) -> None:
    size = info.get("size")
    if os.path.isfile(path) and os.path.getsize(path) == size:
        return
    # Under another name until it is complete, so that an interrupted download is never taken for the file.
    part = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.incomplete")
    with _errors(InputError, url, f"download {os.path.basename(path)}"):
        fs.get_file(info["name"], part)
    got = os.path.getsize(part)
    if size is not None and got != size:
        raise InputError(f"{os.path.basename(path)}: expected {size:,} bytes, got {got:,}; try again", path=url)
    os.replace(part, path)


def upload(path: str, url: str, moved: Moved | None = None, *, force: bool = False) -> None:
    """Upload a file, or the files of a folder, to ``url``. Sizes are compared; the manifest and the index come last.

    force: remove files of an earlier checkpoint that the new one replaces, at the end.
    """
    fs, root = _open(url)
    if os.path.isdir(path):
        names = sorted(n for n in os.listdir(path) if not n.startswith("."))
        pairs = [(os.path.join(path, n), f"{root.rstrip('/')}/{n}") for n in names]
        with _errors(WriteError, url, "create the folder"):
            fs.makedirs(root, exist_ok=True)
    else:
        pairs = [(path, root)]

    def send(pair: tuple[str, str]) -> None:
        local, remote = pair
        size = os.path.getsize(local)
        with _errors(WriteError, url, f"upload {os.path.basename(local)}"):
            fs.put_file(local, remote)
            fs.invalidate_cache()
            got = fs.info(remote)["size"]
        if got != size:
            raise WriteError(f"{os.path.basename(local)}: expected {size:,} bytes there, got {got:,}", path=url)
        if moved:
            moved(os.path.basename(local), size)

    with ThreadPoolExecutor(_STREAMS) as pool:
        list(pool.map(send, [p for p in pairs if os.path.basename(p[0]) not in _LAST]))
    for pair in pairs:
        if os.path.basename(pair[0]) in _LAST:
            send(pair)
    if force and os.path.isdir(path):
        with _errors(WriteError, url, "remove the files of the earlier checkpoint"):
            there = [n.rstrip("/").rpartition("/")[2] for n in fs.ls(root, detail=False)]
            for name in superseded(there, names, MANIFEST not in names):
                fs.rm_file(f"{root.rstrip('/')}/{name}")


def _file_name(url: str) -> Sequence[str]:
    """The file name in the URL of a ``.safetensors`` file, as a tuple; empty for the URL of a folder."""
    return (url.rpartition("/")[2],) if url.endswith(".safetensors") else ()


def _refuse_existing(url: str, force: bool) -> None:
    fs, root = _open(url)
    with _errors(OutputError, url, "look into the target"):
        there = fs.ls(root, detail=False) if fs.isdir(root) else [root] if fs.exists(root) else []
    names = [n.rstrip("/").rpartition("/")[2] for n in there]
    existing = [n for n in names if n in _LAST or n.endswith(".safetensors") or JOURNAL_GLOB.fullmatch(n)]
    if existing and not force:
        raise OutputError(f"the target holds {existing[0]} already; use --force to replace it", path=url)


def _open(url: str) -> tuple[Any, str]:
    """(file system, path in it) of a URL."""
    try:
        import fsspec
    except ImportError as e:
        raise UsageError("remote paths need fsspec: pip install 'spformat[remote]'", path=url) from e
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as e:  # fsspec knows the protocol, but its package is not installed; the message names it
        raise UsageError(f"{url.partition('://')[0]}: {e}", path=url) from e
    except ValueError as e:
        raise UsageError(f"not a URL that fsspec knows: {e}", path=url) from e
    return fs, str(root)


@contextmanager
def _errors(kind: type[InputError] | type[OutputError] | type[WriteError], url: str, what: str) -> Iterator[None]:
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
        reason = printable(" ".join(str(e).split()), 500)
        raise kind(f"cannot {what}: {type(e).__name__}: {reason}", path=url) from e
