"""The two JSON files of a packed folder: the manifest, its commit point, and the journal of a run under way."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from ..errors import ContainerError, VersionError
from ..files import Path, publish, read_small

MANIFEST = "spformat.json"
JOURNAL = "spformat.partial.json"
JOURNAL_GLOB = re.compile(r"spformat\.partial(-\d+-of-\d+)?\.json")
VERSION = 1
_MAX = 256 << 20


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest with its schema checked; ContainerError or VersionError."""
    tree = _read(path)
    if tree.get("container") != VERSION:
        raise VersionError(f"expected manifest version {VERSION}, got {tree.get('container')!r}", path=str(path))
    for key in ("files", "tensors"):
        if not isinstance(tree.get(key), dict):
            raise ContainerError(f"manifest: expected an object under '{key}'", path=str(path))
    return tree


def read_journal(path: Path) -> dict[str, Any]:
    """A journal; ContainerError with the way out when it is damaged."""
    tree = _read(path)
    if not isinstance(tree.get("plan"), str) or not isinstance(tree.get("shards"), dict):
        raise ContainerError("the journal is damaged: start again with --force", path=str(path))
    return tree


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Publish ``tree`` atomically: sorted keys, no timestamps, so equal runs give equal bytes."""
    text = json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    publish(path, text.encode("utf-8", "surrogatepass"), overwrite=True)


def digest(tree: Any) -> str:
    """SHA-256 of the canonical JSON of ``tree``."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(read_small(path, _MAX))
    except (ValueError, RecursionError) as e:
        raise ContainerError(f"not valid JSON: {e}", path=str(path)) from e
    if not isinstance(tree, dict):
        raise ContainerError(f"expected a JSON object, got {type(tree).__name__}", path=str(path))
    return tree
