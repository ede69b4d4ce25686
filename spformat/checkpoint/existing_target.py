"""What an earlier conversion left in the target folder: all there is to do, or files that the new one replaces."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any

from ..errors import ContainerError, OutputError, UsageError
from ..formats import by_name, spec_text
from ..storage.files import is_file, names_in, remove, same_file, sha256_of, size_of
from ..storage.output import flush_folder
from .conversion import Conversion
from .jobs import Job, Outcome
from .manifest import MANIFEST, digest, read_manifest
from .parts import Converted
from .recipe import KEEP
from .source import INDEX, INDEX_SUFFIX, OURS

_DENSE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


def superseded(there: Iterable[str], new: Collection[str], dense: bool) -> list[str]:
    """Those of the names ``there`` that a reader would take for part of the checkpoint of the files ``new``.

    Shards of an earlier conversion; beside a dense checkpoint, which has no manifest, also index, shards and manifest
    of another one: any of them decides what the folder opens as. Nothing else in a folder is ours to judge.
    """
    kinds = (OURS, _DENSE, re.compile(re.escape(INDEX)), re.compile(re.escape(MANIFEST))) if dense else (OURS,)
    return [n for n in there if n not in new and any(kind.fullmatch(n) for kind in kinds)]


def left_over(c: Conversion) -> list[str]:
    """``superseded`` files of the target folder, the manifest last; none of the source's."""
    if same_file(c.folder, c.source.folder):
        return []
    names = superseded(names_in(c.folder), c.outputs, c.dense)
    inputs = [os.path.join(c.source.folder, name) for name in (*c.source.shards, *c.source.side_files)]
    paths = {n: os.path.join(c.folder, n) for n in sorted(names, key=lambda n: (n == MANIFEST, n))}
    return [n for n, path in paths.items() if is_file(path) and not any(same_file(path, i) for i in inputs)]


def clear(c: Conversion) -> None:
    """Remove what is ``left_over``, for good: a new checkpoint is complete, and its journal still stands."""
    names = left_over(c)
    for name in names:
        remove(os.path.join(c.folder, name))
    if names:
        flush_folder(c.folder)


def already_done(c: Conversion, shards: Collection[str]) -> tuple[Converted, ...]:
    """The output files of ``shards`` in a folder that holds this very conversion, finished: nothing is left to do.

    Recipe, sizes, the hash of every input and output file, and the files beside them are compared with the manifest.
    OutputError says what is not as it was; then only --force converts again.
    """
    manifest = read_manifest(os.path.join(c.folder, MANIFEST))
    files, names = manifest["files"], c.names
    if digest(manifest.get("recipe")) != digest(asdict(c.recipe)):
        raise _other(c, "with other options")
    if {n: f["source"] for n, f in files.items()} != {n: s for s, n in names.items()}:
        raise _other(c, "of other shards")
    for shard in shards:
        path, entry = os.path.join(c.folder, names[shard]), files[names[shard]]
        if not is_file(path) or size_of(path) != entry["size"] or sha256_of(path) != entry["sha256"]:
            raise _other(c, f"whose {names[shard]} is not what its manifest says")
        if sha256_of(os.path.join(c.source.folder, shard)) != entry["source_sha256"]:
            raise _other(c, f"of another {shard}")
    for name in c.source.side_files:
        if not name.endswith(INDEX_SUFFIX) and not holds_side_file(c, name):
            raise _other(c, f"without this {name}")
    try:
        outcomes = {j.name: _outcome(j, manifest["tensors"][j.name]) for j in c.jobs if j.shard in shards}
    except (KeyError, TypeError, ValueError, UsageError) as e:
        raise ContainerError(f"manifest: expected a description of every tensor: {e}", path=c.folder) from e
    return tuple(
        Converted(
            names[s], s, files[names[s]]["source_sha256"], files[names[s]]["sha256"], files[names[s]]["size"],
            tuple(outcomes[j.name] for j in c.jobs if j.shard == s),
        )
        for s in names if s in shards
    )  # fmt: skip


def holds_side_file(c: Conversion, name: str) -> bool:
    """Whether the target has a side file already, as this conversion would write it."""
    a, b = os.path.join(c.source.folder, name), os.path.join(c.folder, name)
    if not is_file(a) or not is_file(b):
        return False
    if same_file(a, b):
        return True
    # Most are copied, and compared without taking them into memory.
    wanted = sha256_of(a) if not c.source.packed else hashlib.sha256(c.source.side_file(name)).hexdigest()
    return wanted == sha256_of(b)


def _other(c: Conversion, what: str) -> OutputError:
    return OutputError(f"the target holds a finished conversion {what}; use --force to replace it", path=c.folder)


def _outcome(job: Job, told: dict[str, Any]) -> Outcome:
    counts = {"bytes_out": told["bytes_out"], "nnz": told.get("nnz")}
    if type(counts["bytes_out"]) is not int or type(counts["nnz"]) not in (int, type(None)):
        raise TypeError(f"'{job.name}' has other counts than integers")
    target = KEEP
    if told["format"] != "plain":
        fmt = by_name(told["format"])
        target = spec_text(fmt, fmt.resolve_params(told["params"]))
    return Outcome(
        name=job.name, target=target, why=job.why, shape=job.shape, dtype=job.record.dtype, bytes_in=job.bytes_in,
        **counts,
    )  # fmt: skip
