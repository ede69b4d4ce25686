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

import numpy as np

from ..arrays.library import parse_devices, to_device
from ..arrays.threads import cores
from ..errors import ContainerError, InputError, OutputError, UsageError
from ..interop import MATRIX_SUFFIXES
from ..storage.files import Path, is_file, same_file, size_of
from ..storage.output import check_target
from ..storage.stheader import TORCH_SUFFIXES
from . import existing_target, folder, journals
from .conversion import Conversion
from .executors import OnDevices, Workers, convert_files
from .layouts import NEUTRAL, check_layout
from .manifest import JOURNAL, MANIFEST
from .parts import FileOutcome, FilePlan, Part, convert_in_turn
from .recipe import Recipe, writes_dense
from .remote import staged
from .shard import write_shard
from .shard_input import Progress
from .source import open_source
from .tensor_plans import TensorOutcome, plan_tensors
from .transfers import is_remote, without_scheme

_MOST_ON_A_DEVICE, _CORES_OF_A_SHARD, _CORES_OF_A_SHARD_ON_HOST = 4, 2, 4
"""Most shards that one device converts side by side, and cores of the host for each, where the host converts, too."""
_OTHER_FILES = (*TORCH_SUFFIXES, *MATRIX_SUFFIXES, ".npy", ".h5", ".gguf")
"""Endings of files that are not written here: a folder of such a name would be a surprise."""
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
        _check_options(recipe, device, workers is not None, layout)
        if in_place:
            raise UsageError("in_place (--in-place) is for a local file: name another output")
        with staged(src, dst, staging=staging, force=force, resume=resume, part=part) as here:
            report = convert_checkpoint(
                here.source, here.target, recipe, force=force, resume=resume, progress=progress, device=device,
                executor=workers, layout=layout,
            )  # fmt: skip
        left = tuple(sorted({*report.left_behind, *here.left_behind}))
        return replace(report, path=os.fspath(dst), left_behind=left)
    c, devices = _conversion(src, dst, recipe, device, part, workers is not None, in_place, layout)
    if _one_file(c):
        return _to_file(c, force, in_place, progress)
    share = 1 if workers else _shards_on_a_device(c, part, devices)
    if len(devices) == share == 1:
        return _to_folder(c, part, workers, force, resume, progress)
    with OnDevices(devices, share) as executor:
        return _to_folder(c, part, executor.workers(), force, resume, progress)


def check_conversion(
    src: Path,
    dst: Path,
    recipe: Recipe,
    *,
    force: bool = False,
    resume: bool = False,
    device: str = "cpu",
    part: Part | str | None = None,
    several: bool = False,
    in_place: bool = False,
    layout: str = NEUTRAL,
) -> None:
    """Raise what ``convert_checkpoint`` raises before it reads a tensor. Nothing is written.

    dst: a local path. several: whether an executor would be given. The other arguments are those of
    ``convert_checkpoint``.
    """
    part = Part.parse(part) if isinstance(part, str) else part
    c, _ = _conversion(src, dst, recipe, device, part, several, in_place, layout)
    if _one_file(c):
        _check_file(c, force, in_place)
        return
    folder.check(c)
    if os.path.isdir(c.folder):
        _start(c, part, None, force, resume)
    elif os.path.lexists(c.folder):
        raise OutputError("cannot create the folder: File exists", path=c.folder)


def _check_options(recipe: Recipe, device: str, several: bool, layout: str) -> tuple[str, ...]:
    """The devices; UsageError for options that contradict one another."""
    check_layout(layout, writes_dense(recipe))
    devices = parse_devices(device)
    if len(devices) > 1 and several:
        raise UsageError("device: several devices have a thread each: leave the executor out")
    return devices


def _conversion(
    src: Path, dst: Path, recipe: Recipe, device: str, part: Part | None, several: bool, in_place: bool, layout: str
) -> tuple[Conversion, tuple[str, ...]]:
    """The conversion and its devices, which are there."""
    devices = _check_options(recipe, device, several, layout)
    source = open_source(src)
    if source.matrix is not None:
        raise UsageError(
            "a file with one matrix: read it with spformat.open, and save the converted one", path=source.path
        )
    c = Conversion(source, plan_tensors(source, recipe), recipe, os.fspath(dst), devices[0], layout)
    for each in devices:
        to_device(np.zeros(1, np.uint8), each)  # DeviceUnavailable now, before anything is written
    if _one_file(c):
        if part is not None or several or layout != NEUTRAL or len(devices) > 1:
            raise UsageError(
                "parts, executors, layouts and several devices write into a folder, not one file", path=c.folder
            )
    elif c.folder.lower().endswith(_OTHER_FILES) and not os.path.isdir(c.folder):
        ending = os.path.splitext(c.folder)[1]
        raise UsageError(f"expected a folder, or one file ending in .safetensors, got {ending}", path=c.folder)
    elif in_place:
        message = "in_place (--in-place) replaces one file; a folder goes into another one, without it"
        raise UsageError(message, path=c.folder)
    return c, devices


def _one_file(c: Conversion) -> bool:
    """Whether the output is one file, not a folder."""
    return c.folder.endswith(".safetensors") and not os.path.isdir(c.folder)


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
    force = _check_file(c, force, in_place)
    outcomes = write_shard(source, source.shards[0], c.plans, c.recipe, dst, force, progress, device=c.device)
    # Without a manifest no hashes are needed; the arrays have their checksums.
    return ConversionReport(
        dst, (FileOutcome(os.path.basename(dst), source.shards[0], "", "", size_of(dst), outcomes),)
    )


def _check_file(c: Conversion, force: bool, in_place: bool) -> bool:
    """Whether an existing file is replaced; OutputError if the output file cannot be written."""
    source, dst = c.source, c.folder
    if len(source.shards) != 1:
        raise OutputError(f"{len(source.shards)} shards go into a folder, not one file", path=dst)
    if same_file(os.path.join(source.folder, source.shards[0]), dst):
        if not in_place:
            raise OutputError("input and output are the same file; --in-place replaces it at the end", path=dst)
        force = True
    else:
        folder.refuse_nested(source, dst)
    check_target(dst, overwrite=force)
    return force


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
        file_plans, known, files = _start(c, part, workers, force, resume)
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


def _start(
    c: Conversion, part: Part | None, workers: Workers | None, force: bool, resume: bool
) -> tuple[list[FilePlan], dict[str, Any] | None, tuple[FileOutcome, ...] | None]:
    """(files to write, journal entries of finished ones, the files of a conversion that had finished), of the target
    folder as it is; OutputError if something there would have to be replaced."""
    there = journals.listed(c.folder)
    own = journals.journal_name(part)
    if part is not None and not force:
        journals.refuse_other_parts(c, part, [name for name in there if name != own])
    going_on = resume and (own in there if part else bool(there))
    known = journals.entries_of(c, [own] if part else there) if going_on else {}
    file_plans = _file_plans(c, part, workers, there if going_on else [])
    if resume and not there and not force and not c.dense and is_file(os.path.join(c.folder, MANIFEST)):
        return file_plans, known, existing_target.already_done(c, {file_plan.shard for file_plan in file_plans})
    if not going_on and not force:
        names = c.names
        outputs = [names[file_plan.shard] for file_plan in file_plans]
        others = existing_target.left_over(c)
        folder.refuse_existing(c.folder, (own, JOURNAL, *(() if part else there), *outputs, MANIFEST, *others))
        folder.refuse_other_side_files(c)
    return file_plans, known, None


def _file_plans(c: Conversion, part: Part | None, workers: Workers | None, there: list[str]) -> list[FilePlan]:
    """The output files of this run.

    Those of its part; or all, divided as the parts in the folder were; or all, divided so that each worker has some.
    there: the names of the journals in the folder.
    """
    if part is not None:
        return list(c.parts(part.of)[part.number - 1])
    parts = journals.parts_of(c, there)
    count = workers.with_defaults().count if workers else 1
    if parts is None and len(c.source.shards) < count:
        parts = 2 * count  # twice as many as workers, so that few workers wait for the last one
    return [file_plan for file_plans in c.parts(parts or 1) for file_plan in file_plans]


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
