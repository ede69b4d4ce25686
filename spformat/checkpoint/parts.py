"""Dividing a conversion into output files that workers write independently, and assembling shards from their pieces.

A worker writes one file (FilePlan) without knowing the others. A whole shard is written under its final name. Some
consecutive tensors of a shard become a *piece*: a complete file of its own in ``spformat.pieces``. ``assemble`` copies
the arrays of all pieces into the shard. The result has the bytes that one worker would have written, because the layout
of a file depends only on names, dtypes and shapes.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from .. import limits
from ..arrays.dtypes import SAFETENSORS
from ..arrays.threads import cores
from ..errors import UsageError
from ..storage.container import safe_open
from ..storage.descriptor import Record
from ..storage.files import sha256_of, size_of
from ..storage.filewriter import create
from ..storage.locks import Token, acting_for
from ..storage.stwriter import Writer, dense_metadata
from .recipe import Recipe
from .shard import write_shard
from .shard_input import Progress
from .source import Source
from .tensor_plans import TensorOutcome, TensorPlan

PIECES = "spformat.pieces"
"""Folder inside the target where pieces lie until their shard is assembled."""

PIECE = re.compile(r".+\.tensors-\d{6,}-\d{6,}\.safetensors")
"""Names of pieces in that folder."""

MOST_PARTS = 100_000
"""The most parts of one conversion. A journal states their number, and a list of that length is built, so a damaged
journal must not be able to claim more."""

_COPY = 64 << 20
"""Bytes that are copied from a piece at a time."""

_HASHERS = 4
"""Most threads that hash files while others are converted."""


@dataclass(frozen=True)
class Part:
    """Part ``number`` of ``of``, counted from 1: the share of a conversion that one job of a job array does."""

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of <= MOST_PARTS:
            raise UsageError(f"part: expected i/n with 1 <= i <= n <= {MOST_PARTS:,}, got {self}")

    @classmethod
    def parse(cls, text: str) -> Part:
        """A part from text like "3/16"; UsageError for any other."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if match is None:
            raise UsageError(f"part: expected i/n, like 3/16, got {text!r:.40}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True)
class FileOutcome:
    """A finished output file, a shard or a piece of one, as journal and manifest describe it.

    The hashes are empty for a single file, which has no manifest.
    """

    name: str
    source: str
    source_sha256: str
    """Hash of the input shard; for a piece, of the bytes that its tensors have in the input shard."""
    sha256: str
    size: int
    outcomes: tuple[TensorOutcome, ...]


@dataclass(frozen=True)
class FilePlan:
    """An output file that is to be written: some or all tensors of one shard."""

    shard: str
    name: str
    """Path of the shard, or of the piece, relative to the target folder."""
    plans: tuple[TensorPlan, ...]

    @property
    def whole(self) -> bool:
        """Whether the file has all tensors of the shard."""
        return not self.name.startswith(PIECES)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the source."""
        return sum(plan.bytes_in for plan in self.plans)


def split(plans: Sequence[TensorPlan], names: dict[str, str], parts: int) -> tuple[tuple[FilePlan, ...], ...]:
    """The output files of each of ``parts`` parts. Every process gets the same answer, whatever is finished already.

    The shards (or the tensors, if there are fewer shards than parts) are laid end to end in the order of the source,
    and this line is divided into equal shares of bytes, one for each part. A shard (or tensor) belongs to the part in
    whose share its middle lies. So a part has consecutive tensors, two parts differ by less than one shard (or tensor),
    and a part may have nothing to do.

    plans: every tensor, in the order of the source. names: shard -> file name of its output.
    """
    by_shard: dict[str, list[TensorPlan]] = {shard: [] for shard in names}
    for plan in plans:
        by_shard[plan.shard].append(plan)
    if parts <= len(names):
        items = [tuple(group) for group in by_shard.values()]
        shards = list(by_shard)
    else:
        items = [(plan,) for group in by_shard.values() for plan in group] or [()]
        shards = [shard for shard, group in by_shard.items() for _ in group] or list(by_shard)
    places = _places([sum(plan.bytes_in for plan in item) for item in items], parts)
    out: list[list[FilePlan]] = [[] for _ in range(parts)]
    position = dict.fromkeys(names, 0)
    for place, shard, item in zip(places, shards, items, strict=True):
        own = out[place]
        if own and own[-1].shard == shard:
            item = (*own.pop().plans, *item)
        own.append(FilePlan(shard, "", item))
    for own in out:
        for k, file_plan in enumerate(own):
            first = position[file_plan.shard]
            position[file_plan.shard] = last = first + len(file_plan.plans)
            own[k] = replace(file_plan, name=_name(names[file_plan.shard], first, last, len(by_shard[file_plan.shard])))
    return tuple(map(tuple, out))


def _places(sizes: Sequence[int], parts: int) -> list[int]:
    """For each of several items laid end to end: in which of ``parts`` equal shares of the whole its middle lies."""
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
class FileTask:
    """A FilePlan with everything that a worker in another process or on another machine needs; small when pickled."""

    source: Source
    """The source with this one shard alone."""
    file_plan: FilePlan
    recipe: Recipe
    folder: str
    overwrite: bool
    device: str
    limits: limits.Limits
    token: Token | None = None
    """Of the run, if the task may go to a worker that outlives it."""
    share: int = 1
    """Files that are converted on the device at once."""

    @property
    def path(self) -> str:
        """The file to write."""
        return os.path.join(self.folder, self.file_plan.name)

    @property
    def largest(self) -> int:
        """Bytes of its largest tensor."""
        return max((plan.bytes_in for plan in self.file_plan.plans), default=0)


def narrowed(source: Source, shard: str) -> Source:
    """The source with one shard alone: what is needed to open that shard, without the records of the others."""
    packed, identities = source.packed_in(shard), source.identities
    return Source(source.path, source.folder, (shard,), {}, packed=packed, identities=identities)


def convert_file(task: FileTask, progress: Progress | None = None) -> FileOutcome:
    """Convert the tensors of one output file and write it; runs on any machine that sees source and target folder."""
    with ThreadPoolExecutor(2) as hashing:  # of the file, and meanwhile of a large input
        return Written(task, progress, hashing).outcome()


def convert_in_turn(
    tasks: Iterable[FileTask], record: Callable[[FileOutcome], None], progress: Progress | None = None
) -> None:
    """``convert_file`` for each task, one after the other; calls ``record`` with each outcome, in their order.

    A file is hashed while the next ones are converted: a core hashes 1 to 2 GB a second, less than a GPU or many
    cores convert. After an error or an interrupt the outcomes of the files that are written are still recorded.
    """
    hashers = max(1, min(_HASHERS, cores() - 1))
    written: deque[Written] = deque()
    with ThreadPoolExecutor(hashers, "spformat-hashes") as hashing:
        try:
            for task in tasks:
                written.append(Written(task, progress, hashing))
                if len(written) > hashers:
                    record(written.popleft().outcome())
        finally:
            while written:
                record(written.popleft().outcome())


class Written:
    """An output file that is written, and whose hash and that of its input are computed on an executor."""

    def __init__(self, task: FileTask, progress: Progress | None, hashing: Executor) -> None:
        """Converts the tensors and writes the file."""
        self.task, file_plan, source = task, task.file_plan, task.source
        with limits.using(task.limits), acting_for(task.token):
            self.digest_in = hashing.submit(digest_of_input, source, file_plan)
            self.outcomes = write_shard(
                source, file_plan.shard, file_plan.plans, task.recipe, task.path, task.overwrite, progress,
                device=task.device, share=task.share,
            )  # fmt: skip
        self.digest_out = hashing.submit(sha256_of, task.path)

    def outcome(self) -> FileOutcome:
        """What the journal says of the file. Waits for the hashes."""
        task, shard = self.task, self.task.file_plan.shard
        sha_out, sha_in = self.digest_out.result(), self.digest_in.result()
        task.source.check_unchanged(shard)  # the hash is that of the file that was converted
        return FileOutcome(task.file_plan.name, shard, sha_in, sha_out, size_of(task.path), self.outcomes)


def digest_of_input(source: Source, file_plan: FilePlan) -> str:
    """SHA-256 of the input shard; for a piece, only of the bytes of its tensors, so that n pieces read a shard once."""
    path = os.path.join(source.folder, file_plan.shard)
    if file_plan.whole:
        return sha256_of(path)
    with source.open(file_plan.shard) as f:
        ranges = sorted(r for plan in file_plan.plans for r in f.ranges(plan.name))
    return sha256_of(path, ranges)


def assemble(
    source: Source, shard: str, path: str, pieces: Iterable[FileOutcome], folder: str, dense: bool
) -> FileOutcome:
    """The file ``path`` from the pieces of ``shard`` in ``folder``, in the order of its tensors; bytes are copied."""
    pieces = list(pieces)
    with ThreadPoolExecutor(1) as hashing:
        digest_in = hashing.submit(sha256_of, os.path.join(source.folder, shard))
        paths = [os.path.join(folder, p.name) for p in pieces]
        with source.open(shard) as f:
            metadata = f.own_metadata
        (_copy_dense if dense else _copy_packed)(path, paths, metadata)
        outcomes = tuple(o for p in pieces for o in p.outcomes)
        name, sha_out, size, sha_in = os.path.basename(path), sha256_of(path), size_of(path), digest_in.result()
        source.check_unchanged(shard)
        return FileOutcome(name, shard, sha_in, sha_out, size, outcomes)


def _copy_packed(path: str, pieces: Sequence[str], metadata: dict[str, str]) -> None:
    records = [r for piece in pieces for r in _records(piece)]
    with create(path, records, overwrite=True, metadata=metadata) as out:
        for piece in pieces:
            with safe_open(piece) as f:
                for name in f:
                    for array in f.info(name).arrays:
                        out.put_array(name, array, f.raw(name, _COPY, array))


def _copy_dense(path: str, pieces: Sequence[str], metadata: dict[str, str]) -> None:
    specs: list[Any] = [(r.name, *r.arrays[""]) for piece in pieces for r in _records(piece)]
    with Writer(path, specs, dense_metadata(metadata), overwrite=True) as out:
        for piece in pieces:
            with safe_open(piece) as f:
                for name in f:
                    out.put(name, f.raw(name, _COPY))


def _records(piece: str) -> list[Record]:
    """The records of a piece. An array whose dtype numpy lacks is described with its size in bytes."""
    with safe_open(piece) as f:
        records = []
        for r in map(f.info, f):
            sized: Any = {
                a: spec if spec[0] in SAFETENSORS else (*spec, f.nbytes(r.name)) for a, spec in r.arrays.items()
            }
            records.append(replace(r, arrays=sized))
        return records
