"""The target folder of a conversion: what may be there, journals of runs and parts, the files around the shards.

Each part of a job array has a journal and a lock of its own; nobody writes another's. The manifest (of a dense
checkpoint: the index) is written last, by whoever holds the folder alone; it is the commit point.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from .. import __name__ as package
from .. import limits
from ..errors import ContainerError, InputError, OutputError, UsageError
from ..files import Path, is_file, names_in, read_small, reason, remove, same_file, sha256_of, size_of
from ..formats import parse_spec
from ..locks import folder_lock, ignores_case
from ..output import flush_folder, publish, sweep
from .earlier import clear, same_bytes
from .jobs import Job, Outcome
from .manifest import (
    JOURNAL,
    JOURNAL_GLOB,
    MANIFEST,
    VERSION,
    digest,
    manifest_sha256,
    read_journal,
    write_journal,
    write_json,
)
from .parts import PIECES, Converted, Part, Task, Unit, assemble, digest_of_input, narrowed, split
from .recipe import KEEP, Recipe
from .shard import writes_dense
from .source import INDEX, INDEX_SUFFIX, Source

_SIDE_FILE = 1 << 30


@dataclass(frozen=True)
class Conversion:
    """All that is known of a conversion into a folder before a tensor is read."""

    source: Source
    jobs: tuple[Job, ...]
    recipe: Recipe
    folder: str
    device: str = "cpu"

    @property
    def dense(self) -> bool:
        """Whether an ordinary checkpoint is written."""
        return writes_dense(self.recipe)

    @property
    def names(self) -> dict[str, str]:
        """Shard -> name of its output file."""
        return dict(zip(self.source.shards, shard_names(self.source, self.dense), strict=True))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all files that make the new checkpoint one: shards, and the manifest or index."""
        last = MANIFEST if not self.dense else INDEX if len(self.source.shards) > 1 else None
        return (*self.names.values(), *filter(None, [last]))

    @property
    def identity(self) -> str:
        """Equal for runs whose finished files can stand side by side."""
        names = tuple(self.names.values())
        return digest(
            {"recipe": asdict(self.recipe), "container": VERSION, "shards": self.source.shards, "names": names}
        )

    def parts(self, n: int) -> tuple[tuple[Unit, ...], ...]:
        """The units of each of ``n`` parts."""
        return split(self.jobs, self.names, n)

    def task(self, unit: Unit, overwrite: bool) -> Task:
        """What a worker needs for a unit."""
        return Task(
            narrowed(self.source, unit.shard), unit, self.recipe, self.folder, overwrite, self.device, limits.current()
        )


def shard_names(source: Source, dense: bool) -> tuple[str, ...]:
    """Output file names, one per input shard."""
    n = len(source.shards)
    if not dense:
        return tuple(f"spformat-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1))
    if n == 1:
        return ("model.safetensors",)
    return tuple(f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1))


def prepare(c: Conversion) -> None:
    """Make the folder; OutputError if it cannot be, or if an output would be an input."""
    make(c.folder)
    for name in (*c.names.values(), *c.source.side_files):
        if any(same_file(os.path.join(c.source.folder, s), os.path.join(c.folder, name)) for s in c.source.shards):
            raise OutputError("input and output are the same file", path=os.path.join(c.folder, name))


def make(folder: str) -> None:
    """Make a folder if it is not there, for good: its name is on disk, too. OutputError if it cannot be."""
    above = os.path.abspath(folder)
    missing = []
    while not os.path.lexists(above) and above != (above := os.path.dirname(above)):
        missing.append(above)
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise OutputError(f"cannot create the folder: {reason(e)}", path=folder) from e
    for parent in missing:
        if os.access(parent, os.R_OK):  # a folder one may only pass through cannot be asked
            flush_folder(parent)


@contextmanager
def held(folder: Path, part: Part | None) -> Iterator[None]:
    """The folder for one run alone; or, for a part, beside other parts but not beside a second run of the same."""
    own = nullcontext() if part is None else folder_lock(folder, f".spformat-part-{part.number}-of-{part.of}.lock")
    with folder_lock(folder, shared=part is not None), own:
        yield


def refuse_existing(folder: str, names: Iterable[str]) -> None:
    """OutputError if the folder holds one of ``names``."""
    for name in names:
        if os.path.lexists(os.path.join(folder, name)):
            journal = JOURNAL_GLOB.fullmatch(name)
            hint = "--resume to finish it" if journal else "--force to replace it"
            raise OutputError(f"the target holds {name} already; use {hint}", path=folder)


def refuse_other_side_files(c: Conversion) -> None:
    """OutputError if a side file, or the index, would replace one of the target that is not the same already."""
    names = [n for n in c.source.side_files if not n.endswith(INDEX_SUFFIX)]
    for name in [*names, *([INDEX] if c.dense and len(c.names) > 1 else [])]:
        old = os.path.join(c.folder, name)
        if os.path.lexists(old) and not same_bytes(os.path.join(c.source.folder, name), old):
            raise OutputError(f"the target holds another {name} already; use --force to replace it", path=c.folder)


def refuse_collisions(c: Conversion) -> None:
    """OutputError if names of the output differ in case alone and the target, which is locked, ignores case."""
    seen: dict[str, str] = {}
    for name in (*c.names.values(), MANIFEST, *c.source.side_files):
        other = seen.setdefault(name.casefold(), name)
        if other != name and ignores_case(c.folder):
            raise OutputError(f"{other} and {name} are one file in a folder that ignores case", path=c.folder)


# ------------------------------------------------------------------ journals


def journal_name(part: Part | None) -> str:
    """The journal of a run, or of one part."""
    return JOURNAL if part is None else f"spformat.partial-{part.number}-of-{part.of}.json"


def journals(folder: Path) -> list[str]:
    """Names of all journals in a folder."""
    return [n for n in names_in(folder) if JOURNAL_GLOB.fullmatch(n)]


class Journal:
    """What a run or part has finished, on disk after every unit."""

    def __init__(self, c: Conversion, part: Part | None, done: Iterable[Converted]) -> None:
        self._c, self._part = c, part
        self._path = os.path.join(c.folder, journal_name(part))
        self._entries = {d.name: _entry(d) for d in done}
        self._replaces = manifest_sha256(c.folder)
        self._before = self._outputs()
        self._write()

    def add(self, done: Converted) -> None:
        """Note a finished unit."""
        self._entries[done.name] = _entry(done)
        self._write()

    def close(self, *, complete: bool) -> None:
        """A part with nothing left to do says so; a run that failed before it replaced anything leaves nothing."""
        if complete:
            self._write(complete=True)
        elif not self._entries and self._outputs() == self._before:
            remove(self._path)

    def _outputs(self) -> list[tuple[int, int] | None]:
        """What stands under the final names: (device, inode) each."""
        found: list[tuple[int, int] | None] = []
        for name in self._c.names.values():
            try:
                status = os.lstat(os.path.join(self._c.folder, name))
            except OSError:
                found.append(None)
            else:
                found.append((status.st_dev, status.st_ino))
        return found

    def _write(self, *, complete: bool = False) -> None:
        c, part = self._c, self._part
        tree: dict[str, Any] = {"plan": c.identity, "shards": self._entries, "replaces": self._replaces}
        if part is not None:
            tree |= {"part": [part.number, part.of], "complete": complete, "recipe": asdict(c.recipe)}
            tree |= {"source": os.path.abspath(c.source.path)}
        write_journal(self._path, tree)


@contextmanager
def journal(c: Conversion, part: Part | None, done: Iterable[Converted]) -> Iterator[Journal]:
    """The journal of a run or part for a ``with`` block, begun with what is done already."""
    made, complete = Journal(c, part, done), False
    try:
        yield made
        complete = True
    finally:
        made.close(complete=complete)


def entries_of(c: Conversion, names: Iterable[str]) -> dict[str, Any]:
    """Entries of those of the named journals that are of this conversion."""
    found: dict[str, Any] = {}
    for name in names:
        tree = read_journal(os.path.join(c.folder, name))
        if tree["plan"] == c.identity:
            for unit, entry in tree["shards"].items():
                _check_entry(entry, os.path.join(c.folder, name))
                found[unit] = entry
    return found


_ENTRY = {"sha256": str, "size": int, "source": str, "source_sha256": str, "tensors": list}
_TENSOR = {
    "name": str, "target": str, "why": str, "shape": list, "dtype": str, "bytes_in": int, "bytes_out": int, "nnz": int,
    "negative_zeros": int, "dropped_zeros": int, "larger_than_dense": bool, "error": str,
}  # fmt: skip


def _check_entry(entry: Any, journal: str) -> None:
    """ContainerError unless an entry of a journal has the fields that ``_entry`` writes: whoever seals it may lie."""
    sound = type(entry) is dict and {k: type(v) for k, v in entry.items()} == _ENTRY
    for told in entry["tensors"] if sound else ():
        sound &= type(told) is dict and all(type(v) is _TENSOR.get(k) for k, v in told.items())
        sound = sound and {"name", "target", "shape", "dtype", "bytes_in"} <= told.keys()
        sound = sound and all(type(n) is int for n in told["shape"])
    if not sound:
        raise ContainerError("the journal is damaged: start again with --force", path=journal)


def parts_of(c: Conversion, names: Iterable[str]) -> int | None:
    """Into how many parts this conversion was cut by those who wrote the named journals; None: it was not."""
    for name in names:
        tree = read_journal(os.path.join(c.folder, name))
        if tree["plan"] == c.identity and "part" in tree:
            return _part(tree, name).of
    return None


def parts_in(folder: str) -> tuple[Recipe, str, int]:
    """Recipe, source and number of the parts in a folder, all of them complete; else InputError, ContainerError."""
    trees = {name: read_journal(os.path.join(folder, name)) for name in journals(folder) if name != JOURNAL}
    if not trees:
        found = f"it has a {MANIFEST}: nothing is left to merge" if MANIFEST in names_in(folder) else "it has none"
        raise InputError(f"expected the journals of parts (convert --part i/n), {found}", path=folder)
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
    """The part a journal is of; ContainerError unless it says what its name does."""
    try:
        part = Part(*tree["part"])
    except (KeyError, TypeError, UsageError) as e:
        raise ContainerError("the journal is damaged: run the part again with --force", path=name) from e
    if journal_name(part) != name:
        raise ContainerError(f"the journal is that of part {part}", path=name)
    return part


def finished(c: Conversion, unit: Unit, entry: Any, *, hashes: bool = True) -> Converted | None:
    """A unit of a former run if its file is there and, with ``hashes``, input and output are what the journal says."""
    if not entry or why_redone(c, unit, entry, hashes=hashes):
        return None
    outcomes = tuple(
        Outcome(**{"bytes_out": None, "why": "", **o, "shape": tuple(o["shape"])}) for o in entry["tensors"]
    )
    return Converted(unit.name, unit.shard, entry["source_sha256"], entry["sha256"], entry["size"], outcomes)


def why_redone(c: Conversion, unit: Unit, entry: Any, *, hashes: bool = True) -> str:
    """What has changed since a former run noted a unit in its journal; "" if nothing has."""
    path = os.path.join(c.folder, unit.name)
    if not is_file(path):
        return "is gone"
    if size_of(path) != entry["size"]:
        return f"has {size_of(path):,} bytes, the journal says {entry['size']:,}"
    if hashes and digest_of_input(c.source, unit) != entry["source_sha256"]:
        return f"was made of another {unit.shard}"
    if hashes and sha256_of(path) != entry["sha256"]:
        return "has another sha256 than the journal says"
    return ""


def _entry(d: Converted) -> dict[str, Any]:
    return {
        "sha256": d.sha256, "size": d.size, "source": d.source, "source_sha256": d.source_sha256,
        "tensors": [o.to_json() for o in d.outcomes],
    }  # fmt: skip


# ------------------------------------------------------------------ the end of a conversion


def finish(c: Conversion, done: Sequence[Converted]) -> tuple[Converted, ...]:
    """Assemble shards that are in pieces, copy side files, write the manifest or index, remove what was in between.

    done: every unit, in the order of the source. What the new checkpoint replaces under
    other names goes before the journal, so that nobody takes the folder for the old one. Returns the output files, one
    per shard.
    """
    by_shard: dict[str, list[Converted]] = {s: [] for s in c.source.shards}
    for d in done:
        by_shard[d.source].append(d)
    files = []
    for shard, name in c.names.items():
        parts = by_shard[shard]
        if len(parts) == 1 and parts[0].name == name:
            files.append(parts[0])
        else:
            # What a merge that was cut off left under the name is replaced; anything else was refused at the start.
            files.append(assemble(c.source, shard, os.path.join(c.folder, name), parts, c.folder, c.dense))
    _copy_side_files(c)
    if c.dense:
        _write_index(c, files)
    else:
        write_json(os.path.join(c.folder, MANIFEST), _manifest(c, files))
    clear(c)
    for name in journals(c.folder):
        remove(os.path.join(c.folder, name))
    shutil.rmtree(os.path.join(c.folder, PIECES), ignore_errors=True)
    sweep(c.folder)
    return tuple(files)


def _copy_side_files(c: Conversion) -> None:
    for name in c.source.side_files:
        if name.endswith(INDEX_SUFFIX):
            continue
        data = read_small(os.path.join(c.source.folder, name), _SIDE_FILE)
        if not same_file(os.path.join(c.source.folder, name), os.path.join(c.folder, name)):
            publish(os.path.join(c.folder, name), data, overwrite=True)


def _write_index(c: Conversion, files: Sequence[Converted]) -> None:
    if len(files) == 1:
        return
    total = sum(o.bytes_out or 0 for f in files for o in f.outcomes)
    tree = {**c.source.index, "weight_map": {o.name: f.name for f in files for o in f.outcomes}}
    tree["metadata"] = {**c.source.index.get("metadata", {}), "total_size": total}
    write_json(os.path.join(c.folder, INDEX), tree)


def _manifest(c: Conversion, files: Sequence[Converted]) -> dict[str, Any]:
    tensors = {}
    for f in files:
        for o in f.outcomes:
            fmt, params = ("plain", {}) if o.target == KEEP else _format_json(o.target)
            size = o.shape[0] * o.shape[1] if len(o.shape) == 2 else 0
            entry: dict[str, Any] = {
                "file": f.name, "format": fmt, "params": params, "shape": list(o.shape), "dtype": o.dtype,
                "bytes_in": o.bytes_in, "bytes_out": o.bytes_out,
            }  # fmt: skip
            if o.nnz is not None:
                entry |= {"nnz": o.nnz, "density": round(o.nnz / size, 6) if size else 0.0}
            tensors[o.name] = entry
    described = {
        f.name: {"sha256": f.sha256, "size": f.size, "source": f.source, "source_sha256": f.source_sha256}
        for f in files
    }
    tree = {"container": VERSION, "created_by": package, "recipe": asdict(c.recipe), "files": described}
    tree |= {"tensors": tensors}
    return tree | ({"index": c.source.index} if c.source.index else {})


def _format_json(target: str) -> tuple[str, dict[str, Any]]:
    fmt, given = parse_spec(target)
    return fmt.name, {k: list(v) if isinstance(v, tuple) else v for k, v in fmt.resolve_params(given).items()}
