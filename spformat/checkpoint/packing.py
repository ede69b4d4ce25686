"""Tensors in memory into a packed folder: shards, an index for loaders, and the manifest, which is written last."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ..errors import OutputError
from ..formats import spec_text
from ..formats.base import Format
from ..limits import product
from ..storage.container import save
from ..storage.files import Identity, Path, identity_of, names_in, path_text, remove, sha256_of, size_of
from ..storage.filewriter import Tensor, outline
from ..storage.locks import folder_lock
from .existing_target import superseded
from .folder import manifest_of
from .layouts import packed_index
from .manifest import JOURNAL, MANIFEST, manifest_sha256, write_journal, write_json
from .parts import FileOutcome
from .recipe import KEEP, Recipe
from .tensor_plans import TensorOutcome


def write_packed(
    folder: Path, tensors: Mapping[str, Tensor], max_bytes: int, overwrite: bool, index: str = ""
) -> tuple[str, ...]:
    """Write tensors into an existing folder; returns the names of the shards.

    max_bytes: of the tensors in a shard, unless one alone has more. overwrite: replace an earlier checkpoint; without
    it OutputError names what is there. index: the name of an index that is written beside the manifest.
    """
    where = path_text(folder)
    shards = list(_shards(tensors, max_bytes))
    names = [f"spformat-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    with folder_lock(where):
        there = names_in(where)
        mine = [*names, MANIFEST, *([index] if index else [])]
        if not overwrite:
            require_no_checkpoint(where)
        # Readers refuse the folder while it has shards of two checkpoints, also if this process is killed meanwhile.
        journal = os.path.join(where, JOURNAL) if any(n in there for n in mine) else ""
        if journal:
            write_journal(journal, {"plan": "save", "shards": {}, "replaces": manifest_sha256(where)})
        first = os.path.join(where, names[0])
        old_first, files = _which(first), list[FileOutcome]()
        for i, (name, members) in enumerate(zip(names, shards, strict=True), 1):
            path = os.path.join(where, name)
            try:
                save(path, members, overwrite=True)
            except BaseException:
                if journal and not files and _which(first) == old_first:  # the earlier checkpoint is as it was
                    remove(journal)
                raise
            source = f"model-{i:05}-of-{len(shards):05}.safetensors"
            outcomes = tuple(_outcome(n, x) for n, x in members.items())
            files.append(FileOutcome(name, source, "", sha256_of(path), size_of(path), outcomes))
        if index:
            listed = ((o.name, f.name, o.bytes_out or 0) for f in files for o in f.outcomes)
            write_json(os.path.join(where, index), packed_index(listed))
        write_json(os.path.join(where, MANIFEST), manifest_of(Recipe(to=KEEP), files, {}))
        for name in superseded(there, mine, True):
            remove(os.path.join(where, name))
        if journal:
            remove(journal)
    return tuple(names)


def require_no_checkpoint(folder: Path) -> None:
    """OutputError that names a shard, an index or a manifest of a checkpoint in a folder, if there is one."""
    where = os.fspath(folder)
    old = min(superseded(names_in(where), (), True), default=None)
    if old is not None:
        raise OutputError(f"the target holds {old} already; use overwrite=True", path=where)


def _which(path: str) -> Identity | None:
    """Which file has this name now; None if there is none."""
    return identity_of(os.lstat(path)) if os.path.lexists(path) else None


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    total = 0
    for name, x in tensors.items():
        if shard and total + x.nbytes > max_bytes:
            yield shard
            shard, total = {}, 0
        shard[name] = x
        total += x.nbytes
    yield shard


def _outcome(name: str, x: Tensor) -> TensorOutcome:
    record = outline(name, x)
    target, dense = KEEP, x.nbytes
    if isinstance(x, Format):
        target, dense = spec_text(type(x), x.params()), product(*record.shape, x.dtype.itemsize)
    return TensorOutcome(
        name=name, target=target, why="", shape=record.shape, dtype=record.dtype, bytes_in=dense, bytes_out=x.nbytes
    )
