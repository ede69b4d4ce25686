"""Journals: which files a run or part has finished, and how the next run uses that.

A journal is written to disk after every output file. Each part of a job array has a journal and a lock of its own, and
writes no other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ..errors import ContainerError, InputError, OutputError, UsageError, printable
from ..storage.files import Path, is_file, names_in, remove, sha256_of, size_of
from .conversion import Conversion
from .manifest import JOURNAL, JOURNAL_GLOB, MANIFEST, manifest_sha256, read_journal, write_journal
from .parts import FileOutcome, FilePlan, Part, digest_of_input
from .recipe import Recipe, check_target
from .tensor_plans import TensorOutcome


def journal_name(part: Part | None) -> str:
    """The journal of a run, or of one part."""
    return JOURNAL if part is None else f"spformat.partial-{part.number}-of-{part.of}.json"


def listed(folder: Path) -> list[str]:
    """Names of all journals in a folder."""
    return [n for n in names_in(folder) if JOURNAL_GLOB.fullmatch(n)]


def finished_files(folder: Path, part: Part | str | None = None) -> tuple[str, ...] | None:
    """Names of the files that the journal of an unfinished run, or part, lists; None where there is no journal."""
    name = journal_name(Part.parse(part) if isinstance(part, str) else part)
    if not is_file(os.path.join(folder, name)):
        return None
    return tuple(read_journal(os.path.join(folder, name))["shards"])


class Journal:
    """The files that a run or part has finished. It is on disk after every change."""

    def __init__(self, c: Conversion, part: Part | None, done: Iterable[FileOutcome]) -> None:
        self._c, self._part = c, part
        self._path = os.path.join(c.folder, journal_name(part))
        self._entries = {d.name: _entry(d) for d in done}
        self._replaces = manifest_sha256(c.folder)
        self._before = self._outputs()
        self._write()

    def add(self, done: FileOutcome) -> None:
        """Add a finished file."""
        self._entries[done.name] = _entry(done)
        self._write()

    def close(self, *, complete: bool) -> None:
        """End the journal. That of a complete part says so. A run that failed before it replaced any file removes its
        journal."""
        if complete:
            self._write(complete=True)
        elif not self._entries and self._outputs() == self._before:
            remove(self._path)

    def _outputs(self) -> list[tuple[int, int] | None]:
        """Which file stands under each final name: (device, inode), or None."""
        identities: list[tuple[int, int] | None] = []
        for name in self._c.names.values():
            try:
                status = os.lstat(os.path.join(self._c.folder, name))
            except OSError:
                identities.append(None)
            else:
                identities.append((status.st_dev, status.st_ino))
        return identities

    def _write(self, *, complete: bool = False) -> None:
        c, part = self._c, self._part
        tree: dict[str, Any] = {"plan": c.identity, "shards": self._entries, "replaces": self._replaces}
        if part is not None:
            tree |= {"part": [part.number, part.of], "complete": complete, "recipe": asdict(c.recipe)}
            tree |= {"source": os.path.abspath(c.source.path)}
        write_journal(self._path, tree)


@contextmanager
def journal(c: Conversion, part: Part | None, done: Iterable[FileOutcome]) -> Iterator[Journal]:
    """The journal of a run or part for a ``with`` block. It starts with the files that are done already."""
    journal_of_run, complete = Journal(c, part, done), False
    try:
        yield journal_of_run
        complete = True
    finally:
        journal_of_run.close(complete=complete)


def entries_of(c: Conversion, names: Iterable[str]) -> dict[str, Any] | None:
    """The entries of all named journals that belong to this conversion; None if no journal does."""
    entries: dict[str, Any] | None = None
    for name in names:
        tree = read_journal(os.path.join(c.folder, name))
        if tree["plan"] == c.identity:
            entries = entries or {}
            for file_plan, entry in tree["shards"].items():
                _check_entry(entry, os.path.join(c.folder, name))
                entries[file_plan] = entry
    return entries


_ENTRY = {"sha256": str, "size": int, "source": str, "source_sha256": str, "tensors": list}
_TENSOR = {
    "name": str, "target": str, "why": str, "shape": list, "dtype": str, "bytes_in": int, "bytes_out": int, "nnz": int,
    "negative_zeros": int, "dropped_zeros": int, "larger_than_dense": bool, "error": str, "pruned": int,
    "lost_sum": float, "lost_norm": float, "norm": float,
}  # fmt: skip


def _check_entry(entry: Any, journal: str) -> None:
    """ContainerError unless an entry of a journal has the fields that ``_entry`` writes. The digest of a journal proves
    nothing: anybody can compute it."""
    sound = type(entry) is dict and {k: type(v) for k, v in entry.items()} == _ENTRY
    for tensor in entry["tensors"] if sound else ():
        sound &= type(tensor) is dict and all(type(v) is _TENSOR.get(k) for k, v in tensor.items())
        sound = sound and {"name", "target", "shape", "dtype", "bytes_in"} <= tensor.keys()
        sound = sound and all(type(n) is int for n in tensor["shape"]) and _is_target(tensor["target"])
    if not sound:
        raise ContainerError("the journal is damaged: start again with --force", path=journal)


def _is_target(text: str) -> bool:
    try:
        return check_target(text) == text
    except UsageError:
        return False


def refuse_other_parts(c: Conversion, part: Part, names: Iterable[str]) -> None:
    """OutputError if a part in the folder has another recipe or source, or divides the conversion otherwise."""
    for name in names:
        tree = read_journal(os.path.join(c.folder, name))
        if "part" not in tree:
            continue
        if tree["plan"] == c.identity:
            if _part(tree, name).of == part.of:
                continue
            message = f"part {_part(tree, name)} in this folder is one of {_part(tree, name).of}, and {part} is not"
            raise OutputError(f"{message}: start all parts again with --force", path=c.folder)
        theirs, ours = dict(tree.get("recipe") or {}), json.loads(json.dumps(asdict(c.recipe)))
        other = [f"{k}: {ours[k]!r} here, {theirs.get(k)!r} there" for k in ours if ours[k] != theirs.get(k)]
        what = f"other options ({'; '.join(other)})" if other else f"another source, {tree.get('source')}"
        message = f"part {_part(tree, name)} in this folder has {printable(what)}"
        raise OutputError(f"{message}: repeat its options, or start all parts again with --force", path=c.folder)


def parts_of(c: Conversion, names: Iterable[str]) -> int | None:
    """Into how many parts this conversion was divided, as the named journals say; None: they are of no parts."""
    for name in names:
        tree = read_journal(os.path.join(c.folder, name))
        if tree["plan"] == c.identity and "part" in tree:
            return _part(tree, name).of
    return None


def parts_in(folder: str) -> tuple[Recipe, str, int]:
    """Recipe, source and number of the parts in a folder.

    Raises InputError unless all parts are complete, ContainerError if they are parts of different conversions.
    """
    trees = {name: read_journal(os.path.join(folder, name)) for name in listed(folder) if name != JOURNAL}
    if not trees:
        got = f"it has a {MANIFEST}: nothing is left to merge" if MANIFEST in names_in(folder) else "it has none"
        raise InputError(f"expected the journals of parts (convert --part i/n), {got}", path=folder)
    first = next(iter(trees.values()))
    parts = {_part(tree, name).number: tree for name, tree in trees.items()}
    n = _part(first, next(iter(trees))).of
    alien = [name for name, t in trees.items() if t["plan"] != first["plan"] or _part(t, name).of != n]
    if alien:
        raise ContainerError(f"{alien[0]} and {next(iter(trees))} are parts of different conversions", path=folder)
    missing = [i for i in range(1, n + 1) if i not in parts or not parts[i].get("complete")]
    if missing:
        some = ", ".join(map(str, missing[:8])) + (", .." if len(missing) > 8 else "")
        text = f"{len(missing)} of {n} parts have not finished ({some}): run each with --part i/{n} --resume"
        raise InputError(text, path=folder)
    return Recipe.from_json(first.get("recipe"), folder), str(first.get("source", "")), n


def _part(tree: dict[str, Any], name: str) -> Part:
    """The part that wrote a journal; ContainerError unless its contents and its name agree."""
    try:
        part = Part(*tree["part"])
    except (KeyError, TypeError, UsageError) as e:
        raise ContainerError("the journal is damaged: run the part again with --force", path=name) from e
    if journal_name(part) != name:
        raise ContainerError(f"the journal is that of part {part}", path=name)
    return part


def finished(c: Conversion, file_plan: FilePlan, entry: Any, *, hashes: bool = True) -> FileOutcome | None:
    """The outcome of a file that an earlier run has finished; None if it must be converted again.

    The size of the file must be the one in the journal and, with ``hashes``, the hashes of input and output, too.
    """
    if not entry or why_redone(c, file_plan, entry, hashes=hashes):
        return None
    outcomes = tuple(
        TensorOutcome(**{"bytes_out": None, "why": "", **o, "shape": tuple(o["shape"])}) for o in entry["tensors"]
    )
    return FileOutcome(
        file_plan.name, file_plan.shard, entry["source_sha256"], entry["sha256"], entry["size"], outcomes
    )


def why_redone(c: Conversion, file_plan: FilePlan, entry: Any, *, hashes: bool = True) -> str:
    """What has changed since an earlier run added a file to its journal; "" if nothing has."""
    path = os.path.join(c.folder, file_plan.name)
    if not is_file(path):
        return "is gone"
    if size_of(path) != entry["size"]:
        return f"has {size_of(path):,} bytes, the journal says {entry['size']:,}"
    if hashes and digest_of_input(c.source, file_plan) != entry["source_sha256"]:
        return f"was made of another {file_plan.shard}"
    if hashes and sha256_of(path) != entry["sha256"]:
        return "has another sha256 than the journal says"
    packed = [c.source.packed[plan.name] for plan in file_plan.plans if plan.name in c.source.packed]
    elsewhere = {shard for group in packed for shard, _ in group.entries.values()} - {file_plan.shard}
    if hashes and elsewhere:  # the journal has the hash of one
        return f"holds a tensor that is packed in {min(elsewhere)}, too"
    return ""


def _entry(d: FileOutcome) -> dict[str, Any]:
    return {
        "sha256": d.sha256, "size": d.size, "source": d.source, "source_sha256": d.source_sha256,
        "tensors": [o.to_json() for o in d.outcomes],
    }  # fmt: skip
