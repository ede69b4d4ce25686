"""The start of a conversion: options, devices and the target as it is. All of it refuses before a tensor is read."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..arrays.library import parse_devices, to_device
from ..errors import OutputError, UsageError
from ..interop import MATRIX_SUFFIXES
from ..storage.files import Path, is_file, same_file
from ..storage.output import check_target
from ..storage.stheader import TORCH_SUFFIXES
from . import existing_target, folder, journals
from .conversion import Conversion
from .executors import Workers
from .layouts import NEUTRAL, check_layout
from .manifest import JOURNAL, MANIFEST
from .parts import FileOutcome, FilePlan, Part
from .recipe import Recipe, writes_dense
from .source import open_source
from .tensor_plans import plan_tensors

_OTHER_FILES = (*TORCH_SUFFIXES, *MATRIX_SUFFIXES, ".npy", ".h5", ".gguf")
"""Endings of files that are not written here: a folder of such a name would be a surprise."""


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
    c, _ = planned_conversion(src, dst, recipe, device, part, several, in_place, layout)
    if is_one_file(c):
        check_file(c, force, in_place)
        return
    folder.check(c)
    if os.path.lexists(c.folder) and not os.path.isdir(c.folder):
        raise OutputError("cannot create the folder: File exists", path=c.folder)
    there = os.path.abspath(c.folder)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    check_target(os.path.join(there, MANIFEST), overwrite=True)  # OutputError if nothing can be created there
    if os.path.isdir(c.folder):
        start_in(c, part, None, force, resume)


def check_options(recipe: Recipe, device: str, several: bool, layout: str) -> tuple[str, ...]:
    """The devices; UsageError for options that contradict one another."""
    check_layout(layout, writes_dense(recipe))
    devices = parse_devices(device)
    if len(devices) > 1 and several:
        raise UsageError("device: several devices have a thread each: leave the executor out")
    return devices


def planned_conversion(
    src: Path, dst: Path, recipe: Recipe, device: str, part: Part | None, several: bool, in_place: bool, layout: str
) -> tuple[Conversion, tuple[str, ...]]:
    """The conversion and its devices, which are there."""
    devices = check_options(recipe, device, several, layout)
    source = open_source(src)
    if source.matrix is not None:
        raise UsageError(
            "a file with one matrix: read it with spformat.open, and save the converted one", path=source.path
        )
    c = Conversion(source, plan_tensors(source, recipe), recipe, os.fspath(dst), devices[0], layout)
    for each in devices:
        to_device(np.zeros(1, np.uint8), each)  # DeviceUnavailable now, before anything is written
    if is_one_file(c):
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


def is_one_file(c: Conversion) -> bool:
    """Whether the output is one file, not a folder."""
    return c.folder.endswith(".safetensors") and not os.path.isdir(c.folder)


def check_file(c: Conversion, force: bool, in_place: bool) -> bool:
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


def start_in(
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
