"""Validate what is on disk: every tensor read, checksummed, constructed and scanned; manifests against their files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .. import limits
from ..errors import FormatError, IntegrityError, SpformatError, StructureError, UsageError, printable
from ..formats.convert import convert
from ..storage.files import Path, member, sha256_of
from .manifest import MANIFEST, read_manifest
from .recipe import included
from .source import Source, open_source


@dataclass(frozen=True)
class Verdict:
    """One tensor or file: fine, or the error that says what is wrong."""

    name: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    error: SpformatError | None = None
    finding: bool = False
    """The file is sound, but the tensor is not what --expect asked for."""

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        tree: dict[str, Any] = {
            "name": self.name,
            "format": self.format,
            "shape": list(self.shape),
            "dtype": self.dtype,
        }
        return tree | ({"ok": True} if self.error is None else {"ok": False, "error": self.error.to_json()})


@dataclass(frozen=True)
class Checks:
    """What to look at."""

    expect: str = ""
    include: tuple[str, ...] = ()
    checksums: bool = False
    options: dict[str, bool] = field(default_factory=dict)


def validate_checkpoint(path: Path, checks: Checks | None = None) -> Iterator[Verdict]:
    """A verdict for every tensor, and with ``checksums`` for every file the manifest lists. One tensor in memory."""
    checks = checks or Checks()
    source = open_source(path)
    if checks.checksums:
        yield from _files(source)
    for name in included(source.records, checks.include):
        shard, record, _ = source.records[name]
        fmt = record.format.name if record.format else "plain"
        verdict = Verdict(name, fmt, record.shape, record.dtype)
        try:
            with source.open(shard) as f:
                x = f.read(name)
        except FormatError as e:
            yield Verdict(name, fmt, record.shape, record.dtype, e)
            continue
        if checks.expect and len(record.shape) == 2:
            try:
                convert(x, checks.expect)
            except StructureError as e:
                verdict = Verdict(name, fmt, record.shape, record.dtype, e, finding=True)
        yield verdict


def _files(source: Source) -> Iterator[Verdict]:
    path = os.path.join(source.folder, MANIFEST)
    if not os.path.isfile(path):
        raise UsageError(f"--checksums: {source.path} has no {MANIFEST} to check against")
    for name, entry in read_manifest(path)["files"].items():
        found = sha256_of(member(source.folder, name, ".safetensors", limits.current().link_roots))
        error = None
        if found != entry["sha256"]:
            error = IntegrityError(f"sha256: expected {printable(entry['sha256'])}, got {found}: the file was changed",
                                   path=os.path.join(source.folder, name))  # fmt: skip
        yield Verdict(name, "file", (), "", error)
