"""Cutting a conversion into units of work: whole shards, or consecutive tensors of one; and putting those together.

A unit is what one worker converts into one file without knowing of the others. A whole shard is written under its
final name. Tensors of a shard become a piece: a complete file of its own in ``spformat.pieces``; ``assemble`` copies
the arrays of all pieces into the shard, which has the bytes that one worker would have written, because the
layout of a file depends only on names, dtypes and shapes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from .. import limits
from ..arrays.dtypes import SAFETENSORS
from ..errors import UsageError
from ..storage.container import safe_open
from ..storage.descriptor import Record
from ..storage.files import sha256_of, size_of
from ..storage.filewriter import create
from ..storage.stwriter import Writer
from .jobs import Job, Outcome
from .recipe import Recipe
from .shard import Progress, write_shard
from .source import Source

PIECES = "spformat.pieces"
"""Folder inside the target that holds pieces until their shard is assembled."""

MOST_PARTS = 100_000
"""Of one conversion: a journal says how many there are, and a list is made of them."""

_COPY = 64 << 20


@dataclass(frozen=True)
class Part:
    """Part ``number`` (from 1) of ``of``: what one job of a job array converts."""

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of <= MOST_PARTS:
            raise UsageError(f"part: expected i/n with 1 <= i <= n <= {MOST_PARTS:,}, got {self}")

    @classmethod
    def parse(cls, text: str) -> Part:
        """ "3/16"."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if found is None:
            raise UsageError(f"part: expected i/n, like 3/16, got {text!r:.40}")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True)
class Converted:
    """One output file, a shard or a piece of one: what journal and manifest say of it.

    The hashes are empty for a single file without a manifest.
    """

    name: str
    source: str
    source_sha256: str
    """Of the shard; for a piece, of the bytes of its tensors in the shard."""
    sha256: str
    size: int
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class Unit:
    """Tensors of one shard and the file they become."""

    shard: str
    name: str
    """Relative to the target folder: that of the shard, or of a piece."""
    jobs: tuple[Job, ...]

    @property
    def whole(self) -> bool:
        """Whether these are all tensors of the shard."""
        return not self.name.startswith(PIECES)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the source."""
        return sum(j.bytes_in for j in self.jobs)


def split(jobs: Sequence[Job], names: dict[str, str], parts: int) -> tuple[tuple[Unit, ...], ...]:
    """The units of each of ``parts`` parts; the same for everybody who asks, whatever they have done so far.

    Shards, or tensors if there are fewer shards than parts, lie end to end in the order of the source; one belongs
    to the part in whose equal share of the bytes its middle lies. So parts hold consecutive tensors, differ by less
    than one shard (tensor), and one that has nothing to do is possible.

    jobs: every tensor, in the order of the source. names: shard -> file name of its output.
    """
    by_shard: dict[str, list[Job]] = {shard: [] for shard in names}
    for j in jobs:
        by_shard[j.shard].append(j)
    if parts <= len(names):
        items = [tuple(group) for group in by_shard.values()]
        shards = list(by_shard)
    else:
        items = [(j,) for group in by_shard.values() for j in group] or [()]
        shards = [shard for shard, group in by_shard.items() for _ in group] or list(by_shard)
    places = _places([sum(j.bytes_in for j in item) for item in items], parts)
    out: list[list[Unit]] = [[] for _ in range(parts)]
    position = dict.fromkeys(names, 0)
    for place, shard, item in zip(places, shards, items, strict=True):
        mine = out[place]
        if mine and mine[-1].shard == shard:
            item = (*mine.pop().jobs, *item)
        mine.append(Unit(shard, "", item))
    for mine in out:
        for k, unit in enumerate(mine):
            first = position[unit.shard]
            position[unit.shard] = last = first + len(unit.jobs)
            mine[k] = replace(unit, name=_name(names[unit.shard], first, last, len(by_shard[unit.shard])))
    return tuple(map(tuple, out))


def _places(sizes: Sequence[int], parts: int) -> list[int]:
    """For items laid end to end, the equal share of the whole in which the middle of each lies."""
    total, at, out = sum(sizes), 0, []
    for size in sizes:
        out.append(min(parts - 1, parts * (2 * at + size) // (2 * total)) if total else 0)
        at += size
    return out


def _name(output: str, first: int, last: int, of: int) -> str:
    if last - first == of:
        return output
    return os.path.join(PIECES, f"{output.removesuffix('.safetensors')}.tensors-{first:06}-{last:06}.safetensors")


@dataclass(frozen=True)
class Task:
    """A unit with all that a worker in another process or on another machine needs; pickles small."""

    source: Source
    """Narrowed to the shard."""
    unit: Unit
    recipe: Recipe
    folder: str
    overwrite: bool
    device: str
    limits: limits.Limits

    @property
    def path(self) -> str:
        """The file to write."""
        return os.path.join(self.folder, self.unit.name)

    @property
    def largest(self) -> int:
        """Bytes of its largest tensor."""
        return max((j.bytes_in for j in self.unit.jobs), default=0)


def narrowed(source: Source, shard: str) -> Source:
    """What is needed to open one shard, without the records of the others."""
    return Source(source.path, source.folder, (shard,), {}, packed=source.packed_in(shard))


def convert_unit(task: Task, progress: Progress | None = None) -> Converted:
    """Convert the tensors of a unit into its file; runs wherever source and target folder can be seen."""
    unit, source = task.unit, task.source
    with limits.using(task.limits), ThreadPoolExecutor(1) as hashing:
        digest_in = hashing.submit(digest_of_input, source, unit)
        outcomes = write_shard(
            source, unit.shard, unit.jobs, task.recipe, task.path, task.overwrite, progress, task.device
        )
        sha_out = sha256_of(task.path)
        return Converted(
            unit.name, unit.shard, digest_in.result(), sha_out, size_of(task.path), outcomes
        )  # fmt: skip


def digest_of_input(source: Source, unit: Unit) -> str:
    """SHA-256 of the shard, or for a piece of the bytes of its tensors there: nobody reads a shard n times."""
    path = os.path.join(source.folder, unit.shard)
    if unit.whole:
        return sha256_of(path)
    with source.open(unit.shard) as f:
        ranges = sorted(r for j in unit.jobs for r in f.ranges(j.name))
    return sha256_of(path, ranges)


def assemble(source: Source, shard: str, path: str, pieces: Iterable[Converted], folder: str, dense: bool) -> Converted:
    """The file ``path`` from the pieces of ``shard`` in ``folder``, in the order of its tensors; bytes are copied."""
    pieces = list(pieces)
    with ThreadPoolExecutor(1) as hashing:
        digest_in = hashing.submit(sha256_of, os.path.join(source.folder, shard))
        paths = [os.path.join(folder, p.name) for p in pieces]
        (_copy_dense if dense else _copy_packed)(path, paths)
        outcomes = tuple(o for p in pieces for o in p.outcomes)
        name, sha_out, size = os.path.basename(path), sha256_of(path), size_of(path)
        return Converted(name, shard, digest_in.result(), sha_out, size, outcomes)


def _copy_packed(path: str, pieces: Sequence[str]) -> None:
    with create(path, [r for piece in pieces for r in _records(piece)], overwrite=True) as out:
        for piece in pieces:
            with safe_open(piece) as f:
                for name in f:
                    for array in f.info(name).arrays:
                        out.put_array(name, array, f.raw(name, _COPY, array))


def _copy_dense(path: str, pieces: Sequence[str]) -> None:
    specs: list[Any] = [(r.name, *r.arrays[""]) for piece in pieces for r in _records(piece)]
    with Writer(path, specs, {"format": "pt"}, overwrite=True) as out:
        for piece in pieces:
            with safe_open(piece) as f:
                for name in f:
                    out.put(name, f.raw(name, _COPY))


def _records(piece: str) -> list[Record]:
    """What a piece holds, with the bytes of arrays whose dtype numpy lacks."""
    with safe_open(piece) as f:
        found = []
        for r in map(f.info, f):
            sized: Any = {
                a: spec if spec[0] in SAFETENSORS else (*spec, f.nbytes(r.name)) for a, spec in r.arrays.items()
            }
            found.append(replace(r, arrays=sized))
        return found
