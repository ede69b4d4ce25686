"""Convert a checkpoint, one output file after the other or side by side on an executor.

The journal is updated after every output file, and the manifest is written last. Memory: one tensor as it was read, the
same tensor converted, and row chunks; of each file, where several are converted at once. The bytes of the output depend
only on the input and the recipe. So a resumed run, a run on many machines and a run in parts write the same bytes as
one uninterrupted run.
"""

from __future__ import annotations

import os
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..arrays.threads import cores
from ..errors import ContainerError, InputError, UsageError
from ..storage.files import Path, size_of
from . import existing_target, folder, journals
from .conversion import Conversion
from .executors import OnDevices, Workers, convert_files
from .layouts import NEUTRAL, check_layout
from .parts import FileOutcome, FilePlan, Part, convert_in_turn
from .recipe import Recipe, writes_dense
from .remote import staged
from .shard import write_shard
from .shard_input import Progress
from .source import open_source
from .start import check_file, check_options, is_one_file, planned_conversion, start_in
from .tensor_plans import TensorOutcome, plan_tensors
from .transfers import is_remote, without_scheme

_MOST_ON_A_DEVICE, _CORES_OF_A_SHARD, _CORES_OF_A_SHARD_ON_HOST = 4, 2, 4
"""Most shards that one device converts side by side, and cores of the host for each, where the host converts, too."""
_WORTH_A_THREAD = 64 << 20
"""Bytes of tensors from which a shard is worth it."""


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did."""

    path: str
    shards: tuple[FileOutcome, ...]
    """Output files. Those of a part may be pieces of a shard."""
    resumed: int = 0
    """How many of these files an earlier run had finished."""
    redone: tuple[str, ...] = ()
    """Files that an earlier run had finished but that were converted again: each with what has changed since."""
    left_behind: tuple[str, ...] = ()
    """Names of files beside the shards that were not copied (``Source.left_behind``)."""
    dense_beside: tuple[str, ...] = ()
    """Names of shards and index of a dense checkpoint that was in the target folder and stays beside the packed one."""

    @property
    def outcomes(self) -> tuple[TensorOutcome, ...]:
        """One per tensor."""
        return tuple(o for s in self.shards for o in s.outcomes)


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
    layout: str = NEUTRAL,
) -> ConversionReport:
    """Convert a file or folder ``src``; ``dst`` is a folder, or a file when it ends in ``.safetensors``.

    Either may be a URL (``hf://org/model@revision``, ``s3://..``, whatever fsspec knows). Then files are downloaded
    first and uploaded at the end.

    Args:
        recipe: a Recipe, or a target ("auto", "two-four", "bsr:blocksize=32x32", "dense", ..).
        force: replace files in ``dst``. Each is replaced when the new one is complete, never before.
        resume: finish an interrupted run. Files whose input, output and recipe have the hashes in the journal are
            skipped; all are skipped if the run had finished. A finished dense checkpoint is refused, because it stores
            no hashes. In a folder of unfinished parts, everything that is missing is converted, and all are merged.
        progress: called with the TensorOutcome of every tensor; on an executor, or where shards are converted side by
            side (``device``), when its file has been written, in another thread.
        device: where matrices are converted: "cpu", "cuda" or "cuda:<id>", or "cuda:0,cuda:1" for shards (or tensors,
            if there are few shards) side by side on several; the bytes are the same. Eight-bit floats
            and the choice of "auto" stay on the host. Shards of 64 MB and more share a device with two cores for each,
            or the host with four, up to four of them.
        part: "i/n": convert only part i of n, into the folder of the other parts; ``merge_parts`` then makes one
            checkpoint of all.
        executor: any ``concurrent.futures.Executor`` (threads, processes, dask's ``Client.get_executor()``), or Workers
            with limits. Shards are converted side by side, or tensors if there are few shards.
        staging: folder for the local copies of remote files; it stays and is used again. Default: a temporary folder.
        in_place: a single file may be its own ``dst``. It is replaced when the new file is complete and on disk.
        layout: "neutral", or "transformers" for a folder that ``from_pretrained`` loads after ``import spformat.hf``.
            With parts, give it to ``merge_parts``.

    "dense" writes an ordinary checkpoint that any loader reads. Everything else writes
    ``spformat-0000i-of-0000n.safetensors`` and ``spformat.json``.

    Raises:
        StructureError: a tensor does not fit its target. No file has got its final name.
        OutputError, WriteError, InputError, FormatError, LockedError.
    """
    recipe = Recipe(to=recipe) if isinstance(recipe, str) else recipe
    part = Part.parse(part) if isinstance(part, str) else part
    workers = Workers(executor) if isinstance(executor, Executor) else executor
    if not isinstance(recipe, Recipe):
        raise UsageError(f"recipe: expected a Recipe, or a target like 'csr', got {recipe!r:.80}")
    if not isinstance(part, Part | None):
        raise UsageError(f"part: expected a text i/n, like '3/16', got {part!r:.80}")
    if not isinstance(workers, Workers | None):
        message = f"executor: expected one of concurrent.futures, or what open_workers gives, got {workers!r:.80}"
        raise UsageError(message)
    src, dst = without_scheme(src), without_scheme(dst)
    if is_remote(src) or is_remote(dst):
        check_options(recipe, device, workers is not None, layout)
        if in_place:
            raise UsageError("in_place (--in-place) is for a local file: name another output")
        with staged(src, dst, staging=staging, force=force, resume=resume, part=part) as here:
            report = convert_checkpoint(
                here.source, here.target, recipe, force=force, resume=resume, progress=progress, device=device,
                executor=workers, layout=layout,
            )  # fmt: skip
        left = tuple(sorted({*report.left_behind, *here.left_behind}))
        return replace(report, path=os.fspath(dst), left_behind=left)
    c, devices = planned_conversion(src, dst, recipe, device, part, workers is not None, in_place, layout)
    if is_one_file(c):
        return _to_file(c, force, in_place, progress)
    share = 1 if workers else _shards_on_a_device(c, part, devices)
    if len(devices) == share == 1:
        return _to_folder(c, part, workers, force, resume, progress)
    with OnDevices(devices, share) as executor:
        return _to_folder(c, part, executor.workers(), force, resume, progress)


def _shards_on_a_device(c: Conversion, part: Part | None, devices: tuple[str, ...]) -> int:
    """How many shards each device converts side by side. While the file of one is reserved, its first tensors are read,
    its last ones written or its hash computed, the others keep the device and the cores busy; and a file system lets
    one thread write to a file at a time."""
    shards = c.parts(part.of)[part.number - 1] if part else c.parts(1)[0]
    of_one = _CORES_OF_A_SHARD_ON_HOST if devices == ("cpu",) else _CORES_OF_A_SHARD
    large = sum(file_plan.nbytes >= _WORTH_A_THREAD for file_plan in shards)
    return max(1, min(_MOST_ON_A_DEVICE, large // len(devices), cores() // (of_one * len(devices))))


def _to_file(c: Conversion, force: bool, in_place: bool, progress: Progress | None) -> ConversionReport:
    source, dst = c.source, c.folder
    force = check_file(c, force, in_place)
    outcomes = write_shard(source, source.shards[0], c.plans, c.recipe, dst, force, progress, device=c.device)
    # Without a manifest no hashes are needed; the arrays have their checksums.
    return ConversionReport(
        dst, (FileOutcome(os.path.basename(dst), source.shards[0], "", "", size_of(dst), outcomes),)
    )


def _to_folder(
    c: Conversion, part: Part | None, workers: Workers | None, force: bool, resume: bool, progress: Progress | None
) -> ConversionReport:
    new = part is None and not os.path.lexists(c.folder)
    try:
        return _to_locked_folder(c, part, workers, force, resume, progress)
    except BaseException:
        if new:
            with suppress(OSError, ValueError):  # it holds finished files, or no folder can have its name
                os.rmdir(c.folder)
        raise


def _to_locked_folder(
    c: Conversion, part: Part | None, workers: Workers | None, force: bool, resume: bool, progress: Progress | None
) -> ConversionReport:
    folder.prepare(c)
    with folder.locked(c.folder, part):
        file_plans, known, files = start_in(c, part, workers, force, resume)
        if files is not None:
            beside = existing_target.dense_beside(c)
            return ConversionReport(c.folder, files, len(files), left_behind=c.source.left_behind, dense_beside=beside)
        folder.refuse_collisions(c)
        redone = ["everything: the journal is of another recipe or source"] if known is None else []
        done, resumed = _convert(c, part, file_plans, workers, known or {}, force or resume, progress, redone)
        if part:
            return ConversionReport(c.folder, tuple(done), resumed, tuple(redone))
        files, left = folder.finish(c, done), c.source.left_behind
        return ConversionReport(c.folder, files, resumed, tuple(redone), left, existing_target.dense_beside(c))


def _convert(
    c: Conversion,
    part: Part | None,
    file_plans: list[FilePlan],
    workers: Workers | None,
    known: dict[str, Any],
    overwrite: bool,
    progress: Progress | None,
    redone: list[str],
) -> tuple[list[FileOutcome], int]:
    """Convert every output file that an earlier run has not finished.

    Returns the outcomes of all files in their order, and how many of them an earlier run had finished. Files that it
    had finished but that have changed since are appended to ``redone``, each with the reason.
    """
    earlier = [journals.finished(c, file_plan, known.get(file_plan.name)) for file_plan in file_plans]
    for file_plan, outcome in zip(file_plans, earlier, strict=True):
        if outcome is None and file_plan.name in known:
            redone.append(f"{file_plan.name} {journals.why_redone(c, file_plan, known[file_plan.name])}")
    done = {d.name: d for d in earlier if d is not None}
    if not all(file_plan.whole for file_plan in file_plans):
        folder.make_pieces(c.folder)
    todo = [file_plan for file_plan in file_plans if file_plan.name not in done]
    # The journal is written first, so that every file under a final name has a journal that says what it belongs to.
    with journals.journal(c, part, list(done.values())) as journal:

        def record(outcome: FileOutcome) -> None:
            done[outcome.name] = outcome
            journal.add(outcome)

        if workers is None:
            convert_in_turn([c.task(file_plan, overwrite) for file_plan in todo], record, progress)
        else:
            with folder.token_of(c.folder, part) as token:
                convert_files([c.task(p, overwrite, token) for p in todo], workers, record, progress)
    return [done[file_plan.name] for file_plan in file_plans], len(earlier) - earlier.count(None)


def bytes_to_convert(src: Path, recipe: Recipe, part: Part | str | None = None) -> int:
    """Input bytes of the tensors that ``convert_checkpoint`` would convert, for a progress bar."""
    part = Part.parse(part) if isinstance(part, str) else part
    source = open_source(src)
    c = Conversion(source, plan_tensors(source, recipe), recipe, "")
    chosen = (
        c.parts(part.of)[part.number - 1]
        if part
        else [file_plan for file_plans in c.parts(1) for file_plan in file_plans]
    )
    return sum(file_plan.nbytes for file_plan in chosen)


def merge_parts(
    dst: Path, src: Path | None = None, *, checksums: bool = False, layout: str = NEUTRAL
) -> ConversionReport:
    """Make one checkpoint of the finished parts in the folder ``dst``; its bytes are those of a conversion in one run.

    Shards whose tensors were converted by several parts are assembled.

    src: path of the source, if it has moved since the parts were converted. checksums: also read every file again and
    compare its hash and that of its input; otherwise only sizes are compared. layout: as of ``convert_checkpoint``.

    Raises InputError (a part is missing, unfinished or gone), ContainerError (parts of different conversions, a source
    that has changed) and LockedError (a part is still running).
    """
    target = without_scheme(dst)
    if not os.path.isdir(target):
        raise InputError("expected the folder that the parts were written to", path=target)
    with folder.locked(target, None):
        recipe, origin, n = journals.parts_in(target)
        check_layout(layout, writes_dense(recipe))
        source = open_source(src or origin)
        c = Conversion(source, plan_tensors(source, recipe), recipe, target, layout=layout)
        known = journals.entries_of(c, [journals.journal_name(Part(i, n)) for i in range(1, n + 1)]) or {}
        if not known and c.plans:
            raise ContainerError("the parts were made of another source, or this one has changed", path=source.path)
        folder.prepare(c)
        done = []
        for number, file_plans in enumerate(c.parts(n), 1):
            for file_plan in file_plans:
                outcome = journals.finished(c, file_plan, known.get(file_plan.name), hashes=checksums)
                if outcome is None:
                    text = f"{file_plan.name} is missing or has changed: run part {number}/{n} again with --resume"
                    raise InputError(text, path=target)
                done.append(outcome)
        files, left = folder.finish(c, done), source.left_behind
        return ConversionReport(target, files, len(done), (), left, existing_target.dense_beside(c))
