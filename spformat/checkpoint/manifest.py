"""The two JSON files of a packed folder: the manifest, which is written last, and the journal of a run in progress."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from typing import Any

from ..errors import ContainerError, LimitError, VersionError, printable
from ..storage.files import Path, is_file, read_small
from ..storage.output import publish
from ..storage.stheader import check_plain, strict_json

MANIFEST = "spformat.json"
JOURNAL = "spformat.partial.json"
JOURNAL_GLOB = re.compile(r"spformat\.partial(-\d+-of-\d+)?\.json")
VERSION = 1
_OF_A_FILE = ("sha256", "source", "source_sha256")
_MAX = 256 << 20


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest and check its schema; ContainerError or VersionError."""
    tree = _read(path)
    if tree.get("container") != VERSION:
        raise VersionError(f"expected manifest version {VERSION}, got {tree.get('container')!r}", path=str(path))
    for key in ("files", "tensors"):
        objects = tree.get(key)
        if not isinstance(objects, dict) or not all(isinstance(entry, dict) for entry in objects.values()):
            raise ContainerError(f"manifest: expected an object of objects under '{key}'", path=str(path))
    for name, entry in tree["files"].items():
        if not (type(entry.get("size")) is int and all(type(entry.get(k)) is str for k in _OF_A_FILE)):
            expected = f"size and {', '.join(_OF_A_FILE)} of {printable(name)}"
            raise ContainerError(f"manifest: expected {expected}", path=str(path))
    index = tree.get("index", {})
    if not isinstance(index, dict) or not isinstance(index.get("metadata", {}), dict):
        raise ContainerError("manifest: expected an object under 'index', and under its 'metadata'", path=str(path))
    check_index_keys(index, path)
    return tree


def check_index_keys(index: dict[str, Any], path: Path) -> None:
    """ContainerError unless the keys of an index beside its weight_map can be written, and read again, in a manifest or
    another index: no lone surrogates, and bounded nesting."""
    try:
        for key, value in index.items():
            check_plain([key, value], f"index, under '{printable(key, 40)}'")
    except ContainerError as e:
        raise e.at(path=os.fspath(path)) from e.__cause__


def read_journal(path: Path) -> dict[str, Any]:
    """Read a journal that ``write_journal`` wrote; ContainerError if it is damaged."""
    tree = _read(path)
    sound = tree.pop("sha256", None) == digest(tree) and {"plan", "shards", "replaces"} <= tree.keys()
    if not sound or not isinstance(tree["shards"], dict):
        raise ContainerError("the journal is damaged: start again with --force", path=str(path))
    return tree


def write_journal(path: Path, tree: dict[str, Any]) -> None:
    """Publish a journal: ``plan``, ``shards`` (what is finished), ``replaces`` (see ``is_finished``), and a digest."""
    publish(path, journal_bytes(tree), overwrite=True)


def journal_bytes(tree: dict[str, Any]) -> bytes:
    """The contents of a journal."""
    return json_bytes(tree | {"sha256": digest(tree)})


def manifest_sha256(folder: Path) -> str | None:
    """SHA-256 of the manifest in a folder; None if there is none."""
    path = os.path.join(folder, MANIFEST)
    # Read as a manifest is, because a file of any size may have this name.
    return hashlib.sha256(read_small(path, _MAX)).hexdigest() if is_file(path) else None


def is_finished(folder: Path, journals: Iterable[str]) -> bool:
    """Whether the conversion into a folder is finished: its manifest is newer than all its journals.

    A journal states the hash of the manifest that was there when its run began. While that manifest is still there, the
    run has not finished, and shards beside it may belong to the new checkpoint.
    """
    begun = [read_journal(os.path.join(folder, name))["replaces"] for name in journals]
    if not begun:
        return True
    current = manifest_sha256(folder)
    return current is not None and current not in begun


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Publish ``tree`` atomically."""
    publish(path, json_bytes(tree), overwrite=True)


def json_bytes(tree: dict[str, Any]) -> bytes:
    """The contents of a JSON file: sorted keys, no timestamps, so equal runs give equal bytes."""
    text = json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "surrogatepass")


def digest(tree: Any) -> str:
    """SHA-256 of the canonical JSON of ``tree``."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    raw = read_small(path, _MAX)
    try:
        return strict_json(raw.decode("utf-8", "surrogatepass"), "the file")
    except UnicodeDecodeError as e:
        raise ContainerError(f"the file: expected UTF-8, got another byte at {e.start}", path=str(path)) from e
    except (ContainerError, LimitError) as e:
        raise e.at(path=str(path)) from e.__cause__
