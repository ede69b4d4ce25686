"""Convert a checkpoint: shard by shard, tensor by tensor, journal after every shard, manifest last.

Memory: one tensor as it was read, the same tensor converted, and panels. Output bytes depend only on the
input and the recipe, so a resumed run, or one cut into parts, writes what an uninterrupted one does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import __name__ as package
from ..arrays import to_device
from ..errors import OutputError
from ..files import Path, folder_lock, publish, read_small, same_file, sha256_of
from ..formats import parse_spec
from .jobs import Job, Outcome, dense_of, foresee, plan_jobs, prune
from .manifest import JOURNAL, MANIFEST, VERSION, digest, read_journal, write_json
from .recipe import KEEP, Recipe
from .shard import Progress, read, write_shard, writes_dense
from .source import INDEX_SUFFIX, Source, open_source

_SIDE_FILE = 1 << 30


@dataclass(frozen=True)
class Shard:
    """One output file: what the manifest says of it. The hashes are empty for a single file without a manifest."""

    name: str
    source: str
    source_sha256: str
    sha256: str
    size: int
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    path: str
    shards: tuple[Shard, ...]
    resumed: int = 0
    """Shards that a former run had finished."""

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One per tensor."""
        return tuple(o for s in self.shards for o in s.outcomes)


def foresee_checkpoint(src: Path, recipe: Recipe, progress: Progress | None = None) -> tuple[Outcome, ...]:
    """The table ``convert_checkpoint`` would produce: every tensor is read once, nothing is written."""
    source = open_source(src)
    out = []
    for job in plan_jobs(source, recipe):
        x = None
        if job.target != KEEP:
            with source.open(job.shard) as f:
                x = prune(dense_of(read(f, job)), job.target, recipe)
        out.append(foresee(job, x, recipe))
        if progress:
            progress(out[-1])
    return tuple(out)


def convert_checkpoint(
    src: Path,
    dst: Path,
    recipe: Recipe | str = "auto",
    *,
    force: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    device: str = "cpu",
) -> Report:
    """Convert a file or folder ``src``; ``dst`` is a folder, or a file when it ends in ``.safetensors``.

    recipe: a Recipe, or a target ("auto", "two-four", "bsr:blocksize=32x32", "dense", ..).
    force: replace what ``dst`` holds (at each rename, never before). resume: finish an interrupted run; shards
    whose input, output and recipe hashes match are skipped.
    progress: called with the Outcome of every tensor.
    device: where matrices are converted, "cpu", "cuda" or "cuda:<id>"; the bytes are the same. Eight-bit floats,
    masks and the choice of "auto" stay on the host.

    "dense" writes an ordinary checkpoint that any loader reads; everything else writes
    ``spformat-0000i-of-0000n.safetensors`` and ``spformat.json``. Raises StructureError (a tensor does not fit
    its target; nothing under a final name), OutputError, WriteError, InputError, FormatError, LockedError.
    """
    recipe = Recipe(to=recipe) if isinstance(recipe, str) else recipe
    source = open_source(src)
    jobs = plan_jobs(source, recipe)
    target = os.fspath(dst)
    to_device(np.zeros(1, np.uint8), device)  # DeviceUnavailable now, before anything is written
    if target.endswith(".safetensors") and not os.path.isdir(target):
        return _to_file(source, jobs, recipe, target, force, progress, device)
    return _to_folder(source, jobs, recipe, target, force, resume, progress, device)


def _to_file(
    source: Source, jobs: tuple[Job, ...], recipe: Recipe, dst: str, force: bool, progress: Progress | None, device: str
) -> Report:
    if any(same_file(os.path.join(source.folder, s), dst) for s in source.shards):
        raise OutputError("input and output are the same file", path=dst)
    if len(source.shards) != 1:
        raise OutputError(f"{len(source.shards)} shards go into a folder, not one file", path=dst)
    outcomes = write_shard(source, source.shards[0], jobs, recipe, dst, force, progress, device)
    # No manifest, so nobody asks for hashes; the arrays carry their checksums.
    return Report(dst, (Shard(os.path.basename(dst), source.shards[0], "", "", os.path.getsize(dst), outcomes),))


def _to_folder(
    source: Source,
    jobs: tuple[Job, ...],
    recipe: Recipe,
    dst: str,
    force: bool,
    resume: bool,
    progress: Progress | None,
    device: str,
) -> Report:
    dense = writes_dense(recipe)
    names = shard_names(source, dense)
    journal_path, manifest_path = os.path.join(dst, JOURNAL), os.path.join(dst, MANIFEST)
    try:
        os.makedirs(dst, exist_ok=True)
    except OSError as e:
        raise OutputError(f"cannot create the folder: {e.strerror}", path=dst) from e
    identity = digest({"recipe": asdict(recipe), "container": VERSION, "shards": source.shards, "names": names})
    with folder_lock(dst):
        done: dict[str, Any] = {}
        if os.path.exists(journal_path) and resume:
            journal = read_journal(journal_path)
            done = journal["shards"] if journal["plan"] == identity else {}
        elif not force:
            _refuse_existing(dst, (JOURNAL, *names, MANIFEST))
        for name in (*names, *source.side_files):
            if any(same_file(os.path.join(source.folder, s), os.path.join(dst, name)) for s in source.shards):
                raise OutputError("input and output are the same file", path=os.path.join(dst, name))
        shards, resumed = [], 0
        for shard, name in zip(source.shards, names, strict=True):
            before = _finished(done.get(name), source, shard, os.path.join(dst, name))
            if before is not None:
                shards.append(before)
                resumed += 1
                continue
            shards.append(
                _convert_shard(source, shard, jobs, recipe, os.path.join(dst, name), force or resume, progress, device)
            )
            entries = {s.name: _shard_json(s) for s in shards}
            write_json(journal_path, {"plan": identity, "shards": entries})
        _copy_side_files(source, dst, dense)
        if dense:
            _write_index(source, shards, dst)
        else:
            write_json(manifest_path, _manifest(source, recipe, shards))
        if os.path.exists(journal_path):
            os.unlink(journal_path)
    return Report(dst, tuple(shards), resumed)


def shard_names(source: Source, dense: bool) -> tuple[str, ...]:
    """Output file names, one per input shard."""
    n = len(source.shards)
    if not dense:
        return tuple(f"spformat-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1))
    if n == 1:
        return ("model.safetensors",)
    return tuple(f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1))


def _refuse_existing(dst: str, names: Iterable[str]) -> None:
    for name in names:
        if os.path.lexists(os.path.join(dst, name)):
            hint = "--resume to finish it" if name == JOURNAL else "--force to replace it"
            raise OutputError(f"the target holds {name} already; use {hint}", path=dst)


def _finished(entry: Any, source: Source, shard: str, path: str) -> Shard | None:
    """A shard of a former run, if input and output still have the hashes the journal says."""
    if not entry or not os.path.isfile(path):
        return None
    if sha256_of(os.path.join(source.folder, shard)) != entry["source_sha256"] or sha256_of(path) != entry["sha256"]:
        return None
    outcomes = tuple(
        Outcome(**{"bytes_out": None, "why": "", **o, "shape": tuple(o["shape"])}) for o in entry["tensors"]
    )
    return Shard(os.path.basename(path), shard, entry["source_sha256"], entry["sha256"], entry["size"], outcomes)


def _convert_shard(
    source: Source,
    shard: str,
    jobs: tuple[Job, ...],
    recipe: Recipe,
    path: str,
    force: bool,
    progress: Progress | None,
    device: str,
) -> Shard:
    with ThreadPoolExecutor(1) as hashing:
        digest_in: Future[str] = hashing.submit(sha256_of, os.path.join(source.folder, shard))
        outcomes = write_shard(source, shard, jobs, recipe, path, force, progress, device)
        sha_out = sha256_of(path)
        return Shard(os.path.basename(path), shard, digest_in.result(), sha_out, os.path.getsize(path), outcomes)


# ------------------------------------------------------------------ the files around the shards


def _copy_side_files(source: Source, dst: str, dense: bool) -> None:
    for name in source.side_files:
        if name.endswith(INDEX_SUFFIX):
            continue
        data = read_small(os.path.join(source.folder, name), _SIDE_FILE)
        if not same_file(os.path.join(source.folder, name), os.path.join(dst, name)):
            publish(os.path.join(dst, name), data, overwrite=True)


def _write_index(source: Source, shards: list[Shard], dst: str) -> None:
    if len(shards) == 1:
        return
    total = sum(o.bytes_out or 0 for s in shards for o in s.outcomes)
    tree = {**source.index, "weight_map": {o.name: s.name for s in shards for o in s.outcomes}}
    tree["metadata"] = {**source.index.get("metadata", {}), "total_size": total}
    write_json(os.path.join(dst, "model" + INDEX_SUFFIX), tree)


def _shard_json(s: Shard) -> dict[str, Any]:
    return {
        "sha256": s.sha256, "size": s.size, "source": s.source, "source_sha256": s.source_sha256,
        "tensors": [o.to_json() for o in s.outcomes],
    }  # fmt: skip


def _manifest(source: Source, recipe: Recipe, shards: list[Shard]) -> dict[str, Any]:
    tensors = {}
    for s in shards:
        for o in s.outcomes:
            fmt, params = ("plain", {}) if o.target == KEEP else _format_json(o.target)
            size = o.shape[0] * o.shape[1] if len(o.shape) == 2 else 0
            entry: dict[str, Any] = {
                "file": s.name, "format": fmt, "params": params, "shape": list(o.shape), "dtype": o.dtype,
                "bytes_in": o.bytes_in, "bytes_out": o.bytes_out,
            }  # fmt: skip
            if o.nnz is not None:
                entry |= {"nnz": o.nnz, "density": round(o.nnz / size, 6) if size else 0.0}
            tensors[o.name] = entry
    files = {
        s.name: {"sha256": s.sha256, "size": s.size, "source": s.source, "source_sha256": s.source_sha256}
        for s in shards
    }
    tree = {"container": VERSION, "created_by": package, "recipe": asdict(recipe), "files": files, "tensors": tensors}
    return tree | ({"index": source.index} if source.index else {})


def _format_json(target: str) -> tuple[str, dict[str, Any]]:
    fmt, given = parse_spec(target)
    return fmt.name, {k: list(v) if isinstance(v, tuple) else v for k, v in fmt.resolve_params(given).items()}
