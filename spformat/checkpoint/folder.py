"""The target folder of a conversion: what it may contain at the start, and the files beside the shards.

The manifest (the index of a dense checkpoint) is written last, by a process that has locked the folder for itself
alone. Once it is there, the conversion counts as finished.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from typing import Any

from .. import __name__ as package
from ..errors import OutputError, printable
from ..formats import parse_spec
from ..formats.stack import Stack
from ..limits import product
from ..storage.descriptor import Record
from ..storage.files import Path, names_in, reason, remove, same_file
from ..storage.locks import LOCK, Token, folder_lock, ignores_case, worker_token
from ..storage.output import flush_folder, publish, publish_copy, sweep
from . import journals
from .conversion import Conversion
from .existing_target import clear, holds_side_file
from .layouts import CONFIG, PACKED_INDEX, TRANSFORMERS, dense_index, packed_index
from .manifest import JOURNAL_GLOB, MANIFEST, VERSION, write_json
from .packed import Records
from .parts import PIECE, PIECES, FileOutcome, Part, assemble
from .recipe import KEEP, Recipe
from .source import INDEX, INDEX_SUFFIX, Source


def prepare(c: Conversion) -> None:
    """Create the folder; OutputError if that fails, and the errors of ``check``."""
    check(c)
    make(c.folder)


def check(c: Conversion) -> None:
    """OutputError if the folder and the source lie in one another, and the errors of ``check_config``."""
    refuse_nested(c.source, c.folder)
    for name in (*c.names.values(), *c.source.side_files):
        if any(same_file(os.path.join(c.source.folder, s), os.path.join(c.folder, name)) for s in c.source.shards):
            raise OutputError("input and output are the same file", path=os.path.join(c.folder, name))
    c.check_config()


def refuse_nested(source: Source, target: str) -> None:
    """OutputError if source and target are one folder, or if one lies inside the other.

    The files of two checkpoints would lie side by side, and a reader would take them for one.
    """
    if "\0" in target:  # no such folder can exist, as creating it will say
        return
    src, dst = os.path.realpath(source.path), os.path.realpath(target)
    if src == dst:
        what = "input and output are the same folder"
    elif os.path.isdir(src) and os.path.commonpath([src, dst]) == src:
        what = f"the output lies inside the input, {printable(source.path)}"
    elif os.path.commonpath([src, dst]) == dst:
        what = f"the input, {printable(source.path)}, lies inside the output"
    else:
        return
    raise OutputError(f"{what}; name another folder for the output", path=target)


def make(folder: str) -> None:
    """Create a folder if it does not exist, and flush its name to disk. OutputError if it cannot be created."""
    above = os.path.abspath(folder)
    missing = []
    while not os.path.lexists(above) and above != (above := os.path.dirname(above)):
        missing.append(above)
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise OutputError(f"cannot create the folder: {reason(e)}", path=folder) from e
    for parent in missing:
        if os.access(parent, os.R_OK):  # a folder without read permission cannot be opened to flush it
            flush_folder(parent)


def make_pieces(folder: str) -> None:
    """Create the folder of the pieces; OutputError if something else has its name, like a link that leads outside."""
    path = os.path.join(folder, PIECES)
    if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
        raise OutputError("expected a folder of pieces, or nothing: remove it", path=path)
    make(path)


def _remove_pieces(folder: str) -> None:
    """Remove the pieces and their folder. Files of other names, and then the folder, stay."""
    path = os.path.join(folder, PIECES)
    if os.path.islink(path) or not os.path.isdir(path):
        return
    sweep(path)
    for name in names_in(path):
        if PIECE.fullmatch(name):
            remove(os.path.join(path, name))
    with suppress(OSError):  # not empty
        os.rmdir(path)


@contextmanager
def locked(folder: Path, part: Part | None) -> Iterator[None]:
    """Lock the folder for one run alone. A part shares it with other parts, but not with a second run of itself."""
    own = nullcontext() if part is None else folder_lock(folder, _lock_name(part))
    with folder_lock(folder, shared=part is not None), own:
        yield


def token_of(folder: Path, part: Part | None) -> AbstractContextManager[Token]:
    """The token of the workers of a run that has locked the folder."""
    return worker_token(folder, _lock_name(part))


def _lock_name(part: Part | None) -> str:
    return LOCK if part is None else f".spformat-part-{part.number}-of-{part.of}.lock"


def refuse_existing(folder: str, names: Iterable[str]) -> None:
    """OutputError if one of ``names`` exists in the folder."""
    for name in names:
        if os.path.lexists(os.path.join(folder, name)):
            journal = JOURNAL_GLOB.fullmatch(name)
            hint = "--resume to finish it" if journal else "--force to replace it"
            raise OutputError(f"the target holds {name} already; use {hint}", path=folder)


def refuse_other_side_files(c: Conversion) -> None:
    """OutputError if a side file, or the index, would replace a different one in the target."""
    names = [n for n in c.source.side_files if not n.endswith(INDEX_SUFFIX)]
    for name in [*names, *([INDEX] if c.dense and len(c.names) > 1 else [])]:
        if os.path.lexists(os.path.join(c.folder, name)) and not holds_side_file(c, name):
            raise OutputError(f"the target holds another {name} already; use --force to replace it", path=c.folder)


def refuse_collisions(c: Conversion) -> None:
    """OutputError if two output names differ only in case and the file system of the target ignores case.

    The target must be locked.
    """
    seen: dict[str, str] = {}
    for name in (*c.names.values(), MANIFEST, *c.source.side_files):
        other = seen.setdefault(name.casefold(), name)
        if other != name and ignores_case(c.folder):
            raise OutputError(f"{other} and {name} are one file in a folder that ignores case", path=c.folder)


# ------------------------------------------------------------------ the end of a conversion


def finish(c: Conversion, done: Sequence[FileOutcome]) -> tuple[FileOutcome, ...]:
    """Assemble shards from their pieces, copy side files, write the manifest or index, and remove temporary files.

    done: the outcome of every file, in the order of the source. Files of an earlier checkpoint under other names are
    removed before the journal, so that the folder is never opened as the old checkpoint. Returns the output files, one
    for each shard.
    """
    by_shard: dict[str, list[FileOutcome]] = {s: [] for s in c.source.shards}
    for outcome in done:
        by_shard[outcome.source].append(outcome)
    files = []
    for shard, name in c.names.items():
        parts = by_shard[shard]
        if len(parts) == 1 and parts[0].name == name:
            files.append(parts[0])
        else:
            # A file of this name is replaced: an interrupted merge has left it. Any other was refused at the start.
            files.append(assemble(c.source, shard, os.path.join(c.folder, name), parts, c.folder, c.dense))
    _copy_side_files(c)
    if c.dense:
        _write_index(c, files)
    else:
        if c.layout == TRANSFORMERS:
            listed = ((o.name, f.name, o.bytes_out or 0) for f in files for o in f.outcomes)
            write_json(os.path.join(c.folder, PACKED_INDEX), packed_index(listed))
        write_json(os.path.join(c.folder, MANIFEST), manifest_of(c.recipe, files, c.source.index, c.source.records))
    clear(c)
    for name in journals.listed(c.folder):
        remove(os.path.join(c.folder, name))
    _remove_pieces(c.folder)
    sweep(c.folder)
    return tuple(files)


def _copy_side_files(c: Conversion) -> None:
    for name in c.source.side_files:
        if name.endswith(INDEX_SUFFIX):
            continue
        path, copy = os.path.join(c.source.folder, name), os.path.join(c.folder, name)
        if same_file(path, copy):
            continue
        if name == CONFIG:
            publish(copy, c.source.config(c.layout), overwrite=True)
        else:
            publish_copy(path, copy)


def _write_index(c: Conversion, files: Sequence[FileOutcome]) -> None:
    if len(files) == 1:
        return
    listed = ((o.name, f.name, o.bytes_out or 0) for f in files for o in f.outcomes)
    write_json(os.path.join(c.folder, INDEX), dense_index(c.source.index, listed))


def manifest_of(
    recipe: Recipe, files: Sequence[FileOutcome], index: dict[str, Any], source: Records | None = None
) -> dict[str, Any]:
    """The manifest of a packed folder. index: the keys of the index of the source, without its weight_map. source: the
    tensors of the source, whose formats those have that were kept."""
    tensors = {}
    for f in files:
        for o in f.outcomes:
            fmt, params = _format_of_kept(o.name, source or {}) if o.target == KEEP else _format_json(o.target)
            size = product(*o.shape)
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
    tree = {"container": VERSION, "created_by": package, "recipe": asdict(recipe), "files": described}
    tree |= {"tensors": tensors}
    return tree | ({"index": index} if index else {})


def _format_of_kept(name: str, source: Records) -> tuple[str, dict[str, Any]]:
    """As ``_format_json``, of a tensor that stayed as it was: of a stack, the format of its matrices, if they have
    one."""
    return format_of(source[name][1]) if name in source else ("plain", {})


def format_of(record: Record) -> tuple[str, dict[str, Any]]:
    """(name, params) of the format of a tensor, as a manifest has them."""
    if record.format is None:
        return "plain", {}
    parts = list(record.parts.values())
    if record.format is Stack and all((p.format, p.params) == (parts[0].format, parts[0].params) for p in parts):
        record = parts[0]
    assert record.format is not None
    return record.format.name, {k: list(v) if isinstance(v, tuple) else v for k, v in record.params.items()}


def _format_json(target: str) -> tuple[str, dict[str, Any]]:
    fmt, given = parse_spec(target)
    return fmt.name, {k: list(v) if isinstance(v, tuple) else v for k, v in fmt.resolve_params(given).items()}
