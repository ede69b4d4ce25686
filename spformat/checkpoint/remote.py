"""Checkpoints in object stores, on the hub and in other places with a URL: staged on a local disk, never streamed.

A conversion reads its shards at random offsets and publishes files by renaming them; neither works over a network.
So the files of the source are downloaded first, the conversion runs between local folders, and its files are
uploaded at the end (``upload``). Models of the hub are downloaded by huggingface_hub (``hub``), everything else is
copied through fsspec. A ``file://`` URL is a local path, and is treated like one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import limits
from ..errors import InputError, OutputError, UsageError
from ..storage.files import Path, is_file, names_in, path_text
from ..storage.stheader import PARSED
from . import hub
from .hub import Downloaded, Moved
from .source import may_be_side_file, needed
from .transfers import errors, is_remote, name_of, open_url, side_by_side, without_scheme
from .upload import check_beside, check_upload, upload

__all__ = ["Staged", "download", "is_remote", "staged", "upload"]

_LARGEST_JSON = 64 << 20
"""Bytes of a JSON file up to which a download is parsed, to see that it is complete."""


@dataclass(frozen=True)
class Staged:
    """Local stand-ins of a source and a target, of which either may be remote."""

    source: str
    target: str
    left_behind: tuple[str, ...] = ()
    """Names in a remote source that were not downloaded, because a conversion would not copy them."""


@contextmanager
def staged(
    src: Path,
    dst: Path,
    *,
    staging: Path = "",
    force: bool = False,
    resume: bool = False,
    part: object = None,
    moved: Moved | None = None,
) -> Iterator[Staged]:
    """Local paths for a conversion, in a ``with`` block. A remote source is downloaded before the block begins; a
    remote target is uploaded after the block, unless it raises.

    staging: folder for the local copies. It stays, and files in it that have the right size (of the hub: the right
    contents) are not downloaded again, so an interrupted run continues. Default: a temporary folder, which is removed
    at the end. force: replace files of a remote target. resume: replace those of an interrupted upload. part: the part
    that the caller converts, if any; parts are refused with remote paths. moved: called for each file; with it,
    huggingface_hub shows progress bars on a terminal.

    Raises UsageError (a part; fsspec or the package of the protocol is not installed), InputError (nothing is at the
    URL, it cannot be read, a download has another size, the staging folder contains files of another model),
    OutputError (the target contains a checkpoint, the staging folder cannot be created) and WriteError (an upload
    failed, the disk is full).
    """
    source, target = without_scheme(src), without_scheme(dst)
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
        check_upload(source, target, force=force, resume=resume)
    room = path_text(staging) or tempfile.mkdtemp(prefix="spformat-")
    try:
        copy = Downloaded(source)
        if is_remote(source):
            copy = download(source, os.path.join(room, "source"), moved)
        if is_remote(target) and not force and not resume and os.path.isdir(copy.path):
            check_beside(copy.path, _copied_unchanged(copy.path), target)
        local_target = os.path.join(room, "target", *_file_name(target)) if is_remote(target) else target
        here = Staged(copy.path, local_target, copy.left_behind)
        os.makedirs(os.path.dirname(here.target) or ".", exist_ok=True)
        with limits.using(link_roots=(*limits.current().link_roots, *copy.link_roots)):
            yield here
        if is_remote(target):
            upload(here.target, target, moved, force=force, resume=resume)
    finally:
        if not staging:
            shutil.rmtree(room, ignore_errors=True)


@contextmanager
def downloaded(src: Path, moved: Moved | None = None) -> Iterator[str]:
    """A local path for reading, in a ``with`` block: ``src`` itself, or a copy of what its URL names.

    A model of the hub is downloaded to the cache of huggingface_hub, and stays there. Anything else goes to a temporary
    folder, which is removed at the end. Raises the errors of ``staged``.
    """
    source = without_scheme(src)
    place = hub.place_of(source)
    if place is None:
        with staged(source, "", moved=moved) as here:
            yield here.source
        return
    with errors(InputError, source, "download"):
        copy = hub.download(place, None, moved)
    with limits.using(link_roots=(*limits.current().link_roots, *copy.link_roots)):
        yield copy.path


def _copied_unchanged(folder: str) -> list[str]:
    """Files beside the shards that a conversion copies as they are."""
    paths = {n: os.path.join(folder, n) for n in names_in(folder) if not n.startswith(".")}
    skipped = (".json",)  # config.json may change, and an index does
    return [
        n
        for n, p in paths.items()
        if is_file(p) and may_be_side_file(n, os.path.getsize(p)) and not n.endswith(skipped)
    ]


def download(url: str, folder: str, moved: Moved | None = None) -> Downloaded:
    """Download a file, or the files of a folder, to ``folder``.

    Not downloaded are subfolders and, if there are ``.safetensors`` files, the weights of other frameworks and files
    that are too large for a side file.
    """
    with errors(OutputError, folder, "create the staging folder"):
        os.makedirs(folder, exist_ok=True)
    place = hub.place_of(url)
    if place is not None:
        with errors(InputError, url, "download"):
            return hub.download(place, folder, moved)
    fs, root = open_url(url)
    # Of a web server only a name tells whether something is a file: to list a page means to read it as a whole. And
    # fsspec takes a server that does not answer for one that has no such file.
    web = url.lower().startswith("http")
    single = web and url.endswith(".safetensors")
    with errors(InputError, url, "download"):
        if not web and not fs.exists(root):
            raise InputError("nothing is there", path=url)
        single = single or not fs.isdir(root)
        there = {name_of(str(i["name"])): i for i in ([fs.info(root)] if single else fs.ls(root, detail=True))}
    names = list(there) if single else needed({n: i["size"] for n, i in there.items() if i["type"] == "file"})
    if not single:
        hub.refuse_others(folder, names, url)

    def fetch(name: str, callback: Any) -> None:
        size = _fetch(fs, there[name], os.path.join(folder, name), url, callback)
        if moved:
            moved(name, size)

    side_by_side(fetch, names)
    if single:
        return Downloaded(os.path.join(folder, *names))
    return Downloaded(folder, tuple(sorted(n for n in there if n not in names and not n.startswith("."))))


def _fetch(fs: Any, info: dict[str, Any], path: str, url: str, callback: Any) -> int:
    """Download one file, unless it is there already; its size."""
    name, size = os.path.basename(path), info.get("size")
    if size is None:  # a listing without sizes
        with errors(InputError, url, f"download {name}"):
            size = fs.info(info["name"]).get("size")
    if os.path.isfile(path) and os.path.getsize(path) == size:
        return os.path.getsize(path)
    # Under another name until it is complete, so that an interrupted download is never taken for the file.
    part = os.path.join(os.path.dirname(path), f".{name}.incomplete")
    with errors(InputError, url, f"download {name}"):
        fs.get_file(info["name"], part, callback=callback)
    got = os.path.getsize(part)
    if size is not None and got != size:
        raise InputError(f"{name}: expected {size:,} bytes, got {got:,}; try again", path=url)
    if name.endswith(".json") and got <= _LARGEST_JSON:
        _require_json(part, name, url)
    os.replace(part, path)
    return got


def _require_json(path: str, name: str, url: str) -> None:
    """InputError unless a file is JSON: a download may be cut, and not every server tells the size of a file."""
    with open(path, "rb") as f:
        data = f.read()
    limits.check_bytes(PARSED * len(data), f"{name}, parsed")
    try:
        json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{name}: expected JSON, got something else, or only a part of it; try again", path=url) from e


def _file_name(url: str) -> Sequence[str]:
    """The file name in the URL of a ``.safetensors`` file, as a tuple; empty for the URL of a folder."""
    return (url.rpartition("/")[2],) if url.endswith(".safetensors") else ()
