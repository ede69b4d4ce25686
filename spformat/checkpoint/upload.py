"""Upload of a converted file or folder to a URL. A reader sees a complete checkpoint, or an error says that it is not.

Every file is uploaded under a temporary name. Then a journal says that the target is unfinished, the old manifest is
removed, the files get their final names, the manifest last, and at the end the journal is removed. Two uploads to one
URL at a time are not kept apart: object stores have no locks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

from ..errors import OutputError, WriteError
from .existing_target import superseded
from .hub import Moved
from .layouts import PACKED_INDEX
from .manifest import JOURNAL, JOURNAL_GLOB, MANIFEST, journal_bytes
from .source import INDEX
from .transfers import errors, listing, open_url, side_by_side

_LAST = (PACKED_INDEX, INDEX, MANIFEST)
"""Files that get their names last, because a folder with one of them is taken for a complete checkpoint."""
_TEMPORARY = ".spformat-upload-"
_PIECE = 1 << 20


def check_upload(source: str, url: str, *, force: bool, resume: bool) -> None:
    """OutputError if ``url`` is the source, or contains a checkpoint that may not be replaced. Before any work."""
    fs, root = open_url(url)
    if "://" in source:
        other, place = open_url(source)
        if fs == other and root.rstrip("/") == place.rstrip("/"):
            raise OutputError("input and output are the same place; name another target", path=url)
    with errors(OutputError, url, "look into the target"):
        there = listing(fs, root)
    visible = [n for n in there if not n.startswith(_TEMPORARY)]  # the others are of an interrupted upload
    existing = [n for n in visible if n in _LAST or n.endswith(".safetensors") or JOURNAL_GLOB.fullmatch(n)]
    if existing and not force and not (resume and JOURNAL in there):
        raise OutputError(f"the target holds {existing[0]} already; use --force to replace it", path=url)


def check_beside(folder: str, names: Iterable[str], url: str) -> None:
    """OutputError if one of the files ``names`` of a folder would replace a different one at ``url``."""
    fs, root = open_url(url)
    with errors(OutputError, url, "look into the target"):
        there = listing(fs, root)
        for name in names:
            if name in there and not _same(fs, there[name], os.path.join(folder, name)):
                raise OutputError(f"the target holds another {name} already; use --force to replace it", path=url)


def upload(path: str, url: str, moved: Moved | None = None, *, force: bool = False, resume: bool = False) -> None:
    """Upload a file, or the files of a folder, to ``url``. Sizes are compared; the manifest and the index come last.

    force: replace the files there; those of an earlier checkpoint that the new one replaces are removed at the end.
    resume: replace those of an interrupted upload.
    """
    fs, root = open_url(url)
    if not os.path.isdir(path):
        folder, _, name = root.rpartition("/")
        _send(fs, url, os.path.dirname(path), {name: os.path.basename(path)}, folder, moved)
        with errors(WriteError, url, "give the file its name"):
            _rename(fs, folder, name, name in listing(fs, folder))
        return
    names = sorted(n for n in os.listdir(path) if not n.startswith("."))
    root = root.rstrip("/")
    with errors(WriteError, url, "create the folder"):
        fs.makedirs(root, exist_ok=True)
        there = listing(fs, root)
    folders = [n for n in names if there.get(n, {}).get("type", "file") != "file"]
    if folders:
        raise OutputError(
            f"expected a file named {folders[0]}, or nothing, got a {there[folders[0]]['type']}", path=url
        )
    if not force and not (resume and JOURNAL in there):
        check_beside(path, names, url)
    _send(fs, url, path, {name: name for name in names}, root, moved)
    with errors(WriteError, url, "replace the files"):
        fs.pipe_file(f"{root}/{JOURNAL}", journal_bytes(_unfinished(fs, root, there)))
        for name in _LAST:
            if name in there:
                fs.rm_file(f"{root}/{name}")
        for name in sorted(names, key=lambda n: n in _LAST and 1 + _LAST.index(n)):
            _rename(fs, root, name, name in there and name not in _LAST)
        left = [n for n in there if n.startswith(_TEMPORARY) and n.removeprefix(_TEMPORARY) not in names]
        if force or resume:
            left += superseded([n for n in there if n not in _LAST], names, MANIFEST not in names)
        for name in left:
            fs.rm_file(f"{root}/{name}")
        for name in filter(JOURNAL_GLOB.fullmatch, [*there, JOURNAL]):
            if name not in names and fs.exists(f"{root}/{name}"):
                fs.rm_file(f"{root}/{name}")


def _send(fs: Any, url: str, here: str, names: dict[str, str], root: str, moved: Moved | None) -> None:
    """Upload files under temporary names. names: final name -> name in the folder ``here``."""

    def send(name: str, callback: Any) -> None:
        local, remote = os.path.join(here, names[name]), f"{root}/{_TEMPORARY}{name}"
        size = os.path.getsize(local)
        with errors(WriteError, url, f"upload {name}"):
            fs.put_file(local, remote, callback=callback)
            fs.invalidate_cache()
            got = fs.info(remote)["size"]
        if got != size:
            raise WriteError(f"{name}: expected {size:,} bytes there, got {got:,}", path=url)
        if moved:
            moved(name, size)

    # The manifest last also here, so that the lines that tell the progress end with it.
    side_by_side(send, [n for n in names if n not in _LAST])
    side_by_side(send, [n for n in names if n in _LAST])


def _rename(fs: Any, root: str, name: str, replaces: bool) -> None:
    temporary, final = f"{root}/{_TEMPORARY}{name}", f"{root}/{name}"
    try:
        fs.mv(temporary, final)
    except (FileExistsError, OSError):  # a file system that replaces no file, like sftp
        if not replaces:
            raise
        fs.rm_file(final)
        fs.mv(temporary, final)
    fs.invalidate_cache()


def _unfinished(fs: Any, root: str, there: dict[str, Any]) -> dict[str, Any]:
    """A journal that makes the target an unfinished conversion until its new manifest is there."""
    old = fs.cat_file(f"{root}/{MANIFEST}") if MANIFEST in there else None
    return {"plan": "upload", "shards": {}, "replaces": None if old is None else hashlib.sha256(old).hexdigest()}


def _same(fs: Any, info: dict[str, Any], local: str) -> bool:
    """Whether a remote file has the contents of a local one."""
    if info.get("type", "file") != "file" or info.get("size") not in (None, os.path.getsize(local)):
        return False
    with fs.open(info["name"], "rb") as a, open(local, "rb") as b:
        while True:
            one, other = a.read(_PIECE), b.read(_PIECE)
            if one != other:
                return False
            if not one:
                return True
