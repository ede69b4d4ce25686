"""Convert a checkpoint: unit by unit, here or on an executor; journal after every unit, manifest last.

Memory: one tensor as it was read, the same tensor converted, and panels. Output bytes depend only on the
input and the recipe, so a resumed run, one on many machines, or one cut into parts writes what an uninterrupted
one does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.library import to_device
from ..errors import ContainerError, InputError, LimitError, OutputError, UsageError
from ..formats.dense import Dense
from ..storage.files import Path, is_file, same_file, size_of
from ..storage.output import check_target
from . import existing_target as earlier
from . import folder, journals
from .conversion import Conversion
from .executors import Workers, convert_units
from .jobs import Outcome, dense_of, foresee, plan_jobs, prune
from .manifest import JOURNAL, MANIFEST
from .parts import PIECES, Converted, Part, Task, Unit, convert_unit
from .recipe import AUTO, KEEP, Recipe
from .remote import is_remote, staged
from .shard import Progress, read, write_shard
from .source import open_source


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    path: str
    shards: tuple[Converted, ...]
    """Output files; those of a part may be pieces of a shard."""
    resumed: int = 0
    """Files that a former run had finished."""
    redone: tuple[str, ...] = ()
    """Files that it had finished, too, but that are not trusted any more: each with what has changed."""
    left_behind: tuple[str, ...] = ()
    """Names beside the shards that were not copied (``Source.left_behind``)."""

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
                x = read(f, job)
                try:
                    if job.target == AUTO or recipe.prune or isinstance(x, Dense):
                        x = prune(dense_of(x), job.target, recipe)
                except LimitError as e:
                    raise e.at(path=f.path, tensor=job.name) from None
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
    part: Part | str | None = None,
    executor: Executor | Workers | None = None,
    staging: Path = "",
    in_place: bool = False,
) -> Report:
    """Convert a file or folder ``src``; ``dst`` is a folder, or a file when it ends in ``.safetensors``.

    Either may be a URL (``s3://..``, ``hf://..``, whatever fsspec knows): files are downloaded first and uploaded at
    the end. staging: folder for the local copies, kept and used again; default: a temporary one.

    recipe: a Recipe, or a target ("auto", "two-four", "bsr:blocksize=32x32", "dense", ..).
    force: replace what ``dst`` holds (at each rename, never before). resume: finish an interrupted run; files
    whose input, output and recipe hashes match are skipped, all of them if the run had finished (a dense checkpoint
    keeps no hashes: refused). In a folder of parts that stopped, what is missing of any is converted and all merged.
    progress: called with the Outcome of every tensor; on an executor, when the file it is in has been written.
    device: where matrices are converted, "cpu", "cuda" or "cuda:<id>"; the bytes are the same. Eight-bit floats,
    masks and the choice of "auto" stay on the host.
    part: "i/n": only part i of n, beside the other parts in the same folder; ``merge_parts`` makes one checkpoint of
    all. executor: any ``concurrent.futures.Executor`` (threads, processes, dask's ``Client.get_executor()``), or
    Workers with limits; shards are converted side by side, or tensors if there are few shards.

    in_place: a single file may be its own ``dst``: it is replaced when the new one is complete and on disk.

    "dense" writes an ordinary checkpoint that any loader reads; everything else writes
    ``spformat-0000i-of-0000n.safetensors`` and ``spformat.json``. Raises StructureError (a tensor does not fit
    its target; nothing under a final name), OutputError, WriteError, InputError, FormatError, LockedError.
    """
    recipe = Recipe(to=recipe) if isinstance(recipe, str) else recipe
    part = Part.parse(part) if isinstance(part, str) else part
    workers = Workers(executor) if isinstance(executor, Executor) else executor
    if is_remote(src) or is_remote(dst):
        with staged(src, dst, staging=staging, force=force, part=part) as here:
            report = convert_checkpoint(
                here.source, here.target, recipe, force=force, resume=resume, progress=progress, device=device,
                executor=workers,
            )  # fmt: skip
        left = tuple(sorted({*report.left_behind, *here.left_behind}))
        return replace(report, path=os.fspath(dst), left_behind=left)
    source = open_source(src)
    jobs = plan_jobs(source, recipe)
    target = os.fspath(dst)
    to_device(np.zeros(1, np.uint8), device)  # DeviceUnavailable now, before anything is written
    if target.endswith(".safetensors") and not os.path.isdir(target):
        if part is not None or workers is not None:
            raise UsageError("parts and executors write into a folder, not one file", path=target)
        return _to_file(Conversion(source, jobs, recipe, target, device), force, in_place, progress)
    return _to_folder(Conversion(source, jobs, recipe, target, device), part, workers, force, resume, progress)


def _to_file(c: Conversion, force: bool, in_place: bool, progress: Progress | None) -> Report:
    source, dst = c.source, c.folder
    if len(source.shards) != 1:
        raise OutputError(f"{len(source.shards)} shards go into a folder, not one file", path=dst)
    if same_file(os.path.join(source.folder, source.shards[0]), dst):
        if not in_place:
            raise OutputError("input and output are the same file; --in-place replaces it at the end", path=dst)
        force = True
    check_target(dst, overwrite=force)
    outcomes = write_shard(source, source.shards[0], c.jobs, c.recipe, dst, force, progress, c.device)
    # No manifest, so nobody asks for hashes; the arrays carry their checksums.
    return Report(dst, (Converted(os.path.basename(dst), source.shards[0], "", "", size_of(dst), outcomes),))


def _to_folder(
    c: Conversion, part: Part | None, workers: Workers | None, force: bool, resume: bool, progress: Progress | None
) -> Report:
    folder.prepare(c)
    with folder.held(c.folder, part):
        there = journals.listed(c.folder)
        own = journals.journal_name(part)
        going_on = resume and (own in there if part else bool(there))
        known = journals.entries_of(c, [own] if part else there) if going_on else {}
        units = _units(c, part, workers, there if going_on else [])
        if resume and not there and not force and not c.dense and is_file(os.path.join(c.folder, MANIFEST)):
            files = earlier.already_done(c, {u.shard for u in units})
            return Report(c.folder, files, len(files), left_behind=c.source.left_behind)
        if not going_on and not force:
            names = c.names
            outputs = [names[u.shard] for u in units]
            others = earlier.left_over(c)
            folder.refuse_existing(c.folder, (own, JOURNAL, *(() if part else there), *outputs, MANIFEST, *others))
            folder.refuse_other_side_files(c)
        folder.refuse_collisions(c)
        redone = ["everything: the journal is of another recipe or source"] if known is None else []
        done, resumed = _convert(c, part, units, workers, known or {}, force or resume, progress, redone)
        files = tuple(done) if part else folder.finish(c, done)
        return Report(c.folder, files, resumed, tuple(redone), () if part else c.source.left_behind)


def _units(c: Conversion, part: Part | None, workers: Workers | None, there: list[str]) -> list[Unit]:
    """What this run converts: its part; what parts before it were to convert; or everything, cut for the workers."""
    if part is not None:
        return list(c.parts(part.of)[part.number - 1])
    started = journals.parts_of(c, there)
    count = workers.filled().count if workers else 1
    if started is None and len(c.source.shards) < count:
        started = 2 * count  # so that the last ones to finish are not alone for long
    return [u for units in c.parts(started or 1) for u in units]


def _convert(
    c: Conversion,
    part: Part | None,
    units: list[Unit],
    workers: Workers | None,
    known: dict[str, Any],
    overwrite: bool,
    progress: Progress | None,
    redone: list[str],
) -> tuple[list[Converted], int]:
    """Every unit converted, in their order, and how many a former run had finished; ``redone``: what of that is not."""
    before = [journals.finished(c, u, known.get(u.name)) for u in units]
    for u, found in zip(units, before, strict=True):
        if found is None and u.name in known:
            redone.append(f"{u.name} {journals.why_redone(c, u, known[u.name])}")
    done = {d.name: d for d in before if d is not None}
    if not all(u.whole for u in units):
        folder.make(os.path.join(c.folder, PIECES))
    tasks = [c.task(u, overwrite) for u in units if u.name not in done]
    # The journal comes first: who finds a file under its final name finds out what it belongs to.
    with journals.journal(c, part, list(done.values())) as journal:
        for d in _converted(tasks, workers, progress):
            done[d.name] = d
            journal.add(d)
    return [done[u.name] for u in units], len(before) - before.count(None)


def _converted(tasks: list[Task], workers: Workers | None, progress: Progress | None) -> Iterator[Converted]:
    if workers is None:
        yield from (convert_unit(t, progress) for t in tasks)
        return
    for d in convert_units(tasks, workers):
        for outcome in d.outcomes if progress else ():
            progress(outcome)  # type: ignore[misc]
        yield d


def bytes_to_convert(src: Path, recipe: Recipe, part: Part | str | None = None) -> int:
    """Bytes of the tensors that ``convert_checkpoint`` converts, for a progress bar."""
    part = Part.parse(part) if isinstance(part, str) else part
    source = open_source(src)
    c = Conversion(source, plan_jobs(source, recipe), recipe, "")
    chosen = c.parts(part.of)[part.number - 1] if part else [u for units in c.parts(1) for u in units]
    return sum(u.nbytes for u in chosen)


def merge_parts(dst: Path, src: Path | None = None, *, checksums: bool = False) -> Report:
    """Make one checkpoint of the finished parts in the folder ``dst``: the bytes of a conversion in one run.

    src: the source, where it is not where the parts found it. checksums: also read every file again and compare
    its hash and that of its input; otherwise sizes are compared. Shards that several parts share are put together.

    Raises InputError (a part is missing, unfinished or gone), ContainerError (parts of different conversions, a source
    that changed), LockedError (a part is still running).
    """
    target = os.fspath(dst)
    if not os.path.isdir(target):
        raise InputError("expected the folder that the parts were written to", path=target)
    with folder.held(target, None):
        recipe, origin, n = journals.parts_in(target)
        source = open_source(src or origin)
        c = Conversion(source, plan_jobs(source, recipe), recipe, target)
        known = journals.entries_of(c, [journals.journal_name(Part(i, n)) for i in range(1, n + 1)]) or {}
        if not known and c.jobs:
            raise ContainerError("the parts were made of another source, or this one has changed", path=source.path)
        folder.prepare(c)
        done = []
        for number, units in enumerate(c.parts(n), 1):
            for u in units:
                found = journals.finished(c, u, known.get(u.name), hashes=checksums)
                if found is None:
                    text = f"{u.name} is missing or has changed: run part {number}/{n} again with --resume"
                    raise InputError(text, path=target)
                done.append(found)
        return Report(target, folder.finish(c, done), len(done), left_behind=source.left_behind)
