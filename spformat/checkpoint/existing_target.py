"""What an earlier conversion has left in the target folder: a finished result, or files that the new one replaces."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any

from ..errors import ContainerError, OutputError, UsageError, printable
from ..formats import by_name, spec_text
from ..storage.files import is_file, names_in, remove, same_file, sha256_of, size_of
from ..storage.output import flush_folder
from .conversion import Conversion
from .layouts import CONFIG, PACKED_INDEX
from .manifest import MANIFEST, digest, read_manifest
from .parts import FileOutcome
from .recipe import KEEP
from .source import INDEX, INDEX_SUFFIX, OURS
from .tensor_plans import TensorOutcome, TensorPlan

_DENSE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


def superseded(there: Iterable[str], new: Collection[str], dense: bool) -> list[str]:
    """Those of the names ``there`` that a reader would take for a part of the checkpoint that consists of ``new``.

    These are shards of an earlier conversion. A dense checkpoint has no manifest; beside one, the index, shards and
    manifest of another checkpoint count, too, because each of them changes how the folder is opened. All other files in
    the folder are left alone.
    """
    names = (PACKED_INDEX, INDEX, MANIFEST) if dense else (PACKED_INDEX,)
    kinds = [OURS, *([_DENSE] if dense else []), *(re.compile(re.escape(name)) for name in names)]
    return [n for n in there if n not in new and any(kind.fullmatch(n) for kind in kinds)]


def left_over(c: Conversion) -> list[str]:
    """``superseded`` files of the target folder, the manifest last; never an input file."""
    names = superseded(names_in(c.folder), c.outputs, c.dense)
    inputs = [os.path.join(c.source.folder, name) for name in (*c.source.shards, *c.source.side_files)]
    paths = {n: os.path.join(c.folder, n) for n in sorted(names, key=lambda n: (n == MANIFEST, n))}
    return [n for n, path in paths.items() if is_file(path) and not any(same_file(path, i) for i in inputs)]


def dense_beside(c: Conversion) -> tuple[str, ...]:
    """Shards and index of a dense checkpoint beside the new packed one, which loaders that know only these names read.

    They stay: a dense checkpoint has no manifest, so nothing says whether this package wrote it, or whether it is the
    only copy of somebody's weights.
    """
    if c.dense:
        return ()
    return tuple(n for n in names_in(c.folder) if n == INDEX or _DENSE.fullmatch(n))


def clear(c: Conversion) -> None:
    """Remove what is ``left_over`` and flush the folder. The new checkpoint must be complete, with its journal still
    there."""
    names = left_over(c)
    for name in names:
        remove(os.path.join(c.folder, name))
    if names:
        flush_folder(c.folder)


def already_done(c: Conversion, shards: Collection[str]) -> tuple[FileOutcome, ...]:
    """The output files of ``shards`` in a folder that contains exactly this conversion, finished.

    Recipe, sizes, the hash of every input and output file, and the side files are compared with the manifest. Raises
    OutputError, which names the first difference; then only --force converts again.
    """
    manifest = read_manifest(os.path.join(c.folder, MANIFEST))
    files, names = manifest["files"], c.names
    if digest(manifest.get("recipe")) != digest(asdict(c.recipe)):
        raise _other(c, f"with other options{_options_of(manifest.get('recipe'), asdict(c.recipe))}")
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
        outcomes = {
            plan.name: _outcome(plan, manifest["tensors"][plan.name]) for plan in c.plans if plan.shard in shards
        }
    except (KeyError, TypeError, ValueError, UsageError) as e:
        raise ContainerError(f"manifest: expected a description of every tensor: {e}", path=c.folder) from e
    return tuple(
        FileOutcome(
            names[s], s, files[names[s]]["source_sha256"], files[names[s]]["sha256"], files[names[s]]["size"],
            tuple(outcomes[plan.name] for plan in c.plans if plan.shard == s),
        )
        for s in names if s in shards
    )  # fmt: skip


def holds_side_file(c: Conversion, name: str) -> bool:
    """Whether the target already has a side file with the contents that this conversion would write."""
    a, b = os.path.join(c.source.folder, name), os.path.join(c.folder, name)
    if not is_file(a) or not is_file(b):
        return False
    if same_file(a, b) and name != CONFIG:  # linked
        return True
    # Side files but config.json are copied unchanged; those are compared by hash, without reading them into memory.
    if name == CONFIG:
        wanted = c.source.config(c.layout)
        return size_of(b) == len(wanted) and hashlib.sha256(wanted).hexdigest() == sha256_of(b)
    return size_of(a) == size_of(b) and sha256_of(a) == sha256_of(b)


def _other(c: Conversion, what: str) -> OutputError:
    return OutputError(f"the target holds a finished conversion {what}; use --force to replace it", path=c.folder)


def _options_of(before: Any, now: dict[str, Any]) -> str:
    """The options that differ, in words: " (to: two-four there, auto here)"; "" for a recipe that cannot be read."""
    if not isinstance(before, dict):
        return ""
    differing = [key for key in now if before.get(key) != json.loads(json.dumps(now[key]))]
    texts = [f"{key}: {printable(before.get(key), 60)} there, {printable(now[key], 60)} here" for key in differing]
    return f" ({'; '.join(texts)})" if texts else ""


def _outcome(plan: TensorPlan, entry: dict[str, Any]) -> TensorOutcome:
    counts = {"bytes_out": entry["bytes_out"], "nnz": entry.get("nnz")}
    if type(counts["bytes_out"]) is not int or type(counts["nnz"]) not in (int, type(None)):
        raise TypeError(f"'{plan.name}' has other counts than integers")
    if not isinstance(entry["params"], dict):
        raise TypeError(f"'{plan.name}' has other params than an object")
    target = KEEP
    # A packed tensor that was kept has its format there, and no count of nonzeros.
    kept = plan.target == KEEP or (plan.record.format is not None and counts["nnz"] is None)
    if entry["format"] != "plain" and not kept:
        fmt = by_name(entry["format"])
        target = spec_text(fmt, fmt.resolve_params(entry["params"]))
    return TensorOutcome(
        name=plan.name, target=target, why=plan.why, shape=plan.shape, dtype=plan.record.dtype, bytes_in=plan.bytes_in,
        **counts,
    )  # fmt: skip
