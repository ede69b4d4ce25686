"""Validate a checkpoint on disk: read, checksum, construct and scan every tensor; compare the manifest with its
files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .. import limits
from ..arrays.dtypes import VALUE_TYPES
from ..errors import ContainerError, FormatError, IntegrityError, SpformatError, StructureError, UsageError, printable
from ..formats.convert import convert
from ..formats.stack import Stack
from ..storage.descriptor import Record
from ..storage.files import Path, member, sha256_of
from .folder import format_of
from .manifest import MANIFEST, read_manifest
from .official import opened_officially
from .recipe import included
from .source import Source, open_source
from .stacks import holds_matrices


@dataclass(frozen=True)
class CheckResult:
    """The result for one tensor or file: valid, or the error that says what is wrong."""

    name: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    error: SpformatError | None = None
    finding: bool = False
    """The file is valid, but the tensor does not fit the format that --expect names, or could not be compared."""
    compared: bool = False
    """Whether the tensor was compared with the format that --expect names."""
    opened_by: str = ""
    """For a file that another package was asked to open: the package and its version."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON types."""
        tree: dict[str, Any] = {
            "name": self.name,
            "format": self.format,
            "shape": list(self.shape),
            "dtype": self.dtype,
        } | ({"opened_by": self.opened_by} if self.opened_by else {})
        return tree | ({"ok": True} if self.error is None else {"ok": False, "error": self.error.to_json()})


@dataclass(frozen=True)
class Checks:
    """What ``validate_checkpoint`` checks beside the contents of each tensor."""

    expect: str = ""
    include: tuple[str, ...] = ()
    checksums: bool = False
    official: bool = False
    """Open every file with the safetensors package, too."""
    options: dict[str, bool] = field(default_factory=dict)


def validate_checkpoint(path: Path, checks: Checks | None = None) -> Iterator[CheckResult]:
    """A result for every tensor, with ``checksums`` for every file in the manifest, with ``official`` for every file.

    One tensor is in memory at a time.
    """
    checks = checks or Checks()
    source = open_source(path)
    if checks.checksums:
        yield from _files(source)
    if checks.official:
        for name, package, error in opened_officially(source):
            yield CheckResult(name, "file", (), "", error, opened_by=package)
    listed = read_manifest(os.path.join(source.folder, MANIFEST))["tensors"] if source.original_names else {}
    for name, f in source.opened(included(source.records, checks.include)):
        record = source.records[name][1]
        fmt = record.format.name if record.format else "plain"
        result = CheckResult(name, fmt, record.shape, record.dtype)
        try:
            x = f.read(name)
        except FormatError as e:
            yield CheckResult(name, fmt, record.shape, record.dtype, e)
            continue
        if listed and (what := _unlike(listed[name], record)):
            yield replace(result, error=ContainerError(what, path=os.path.join(source.folder, MANIFEST), tensor=name))
            continue
        if checks.expect and (reason := _why_not_compared(record)):
            message = f"not checked against {checks.expect}: {reason}; --include chooses the tensors to check"
            yield replace(result, error=StructureError(message, path=source.path, tensor=name), finding=True)
            continue
        if checks.expect and holds_matrices(record):
            result = replace(result, compared=True)
            try:
                _compare(x, checks.expect)
            except StructureError as e:
                result = replace(result, error=e, finding=True)
        yield result


def _unlike(entry: dict[str, Any], record: Record) -> str:
    """What a manifest says otherwise of a tensor than its shard; "" where they agree. Releases up to 0.2 called packed
    tensors that a conversion kept "plain"."""
    holds = {"format": format_of(record)[0], "shape": list(record.shape), "dtype": record.dtype}
    parts = record.parts.values() if record.format is Stack else ()
    of_matrices = {part.format.name for part in parts if part.format}
    for key, value in holds.items():
        if entry.get(key) != value and (key != "format" or entry.get(key) not in ("plain", *of_matrices)):
            said = printable(entry.get(key), 60)
            return f"manifest: expected {key} {value}, which the shard holds, got {said}; convert the input again"
    return ""


def _compare(x: Any, expect: str) -> None:
    """StructureError unless a matrix, or each matrix of a stack or of an array [E, M, K], fits a format."""
    if x.ndim != 3:
        convert(x, expect)
        return
    for number, matrix in enumerate(x):
        try:
            convert(matrix, expect)
        except StructureError as e:
            e.message = f"matrix {number}: {e.message}"
            raise


def _why_not_compared(record: Record) -> str:
    """Why a tensor that may have the pattern of a format cannot be compared with it; "" for a matrix, which can, and
    for a bias or a number, which has no pattern. A tensor [E, M, K] is compared matrix by matrix."""
    if len(record.shape) in (2, 3) and record.dtype not in VALUE_TYPES:
        return f"dtype {record.dtype} is not a value type"
    if len(record.shape) > 2 and not holds_matrices(record):
        stack = " and, by its shape, no stack of weights" if len(record.shape) == 3 else ""
        return f"a tensor of {len(record.shape)} dimensions, not a matrix{stack}"
    return ""


def _files(source: Source) -> Iterator[CheckResult]:
    path = os.path.join(source.folder, MANIFEST)
    if not os.path.isfile(path):
        raise UsageError(f"--checksums: {source.path} has no {MANIFEST} to check against")
    for name, entry in read_manifest(path)["files"].items():
        actual = sha256_of(member(source.folder, name, ".safetensors", limits.current().link_roots))
        error = None
        if actual != entry["sha256"]:
            error = IntegrityError(f"sha256: expected {printable(entry['sha256'])}, got {actual}: the file was changed",
                                   path=os.path.join(source.folder, name))  # fmt: skip
        yield CheckResult(name, "file", (), "", error)
