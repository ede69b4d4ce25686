"""Stored matrices written out densely, panel by panel: the way back of ``panels``, in the same bounded memory.

A panel's part of every array is read, summed, constructed as a matrix of its own, validated and decoded, before the
sums of the whole arrays are known. They are compared before the file is published, so nothing unchecked gets a name.
What a panel finds wrong is told by reading the whole tensor, whose message has the right places.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays.dtypes import SAFETENSORS, value_type
from ..arrays.library import ceil_div, index_dtype
from ..errors import SpformatError
from ..formats.base import Format, Panels
from ..storage import crc
from ..storage.container import TensorFile
from ..storage.stwriter import Writer
from .jobs import Job
from .row_chunks import Team, bound, counted_by, panel_rows


@dataclass
class Expansion:
    """A stored matrix on its way to a dense array."""

    job: Job
    target: type[Format]
    layout: Panels
    step: int
    """Rows of a panel; the last may have fewer."""
    pointers: dict[str, np.ndarray[Any, Any]]
    _sums: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Panels."""
        return ceil_div(self.job.shape[0], self.step)

    def ranges(self, i: int) -> dict[str, tuple[int, int]]:
        """First entry, and the one after the last, of panel ``i`` in every array but the pointers."""
        (M, K), r = self.job.shape, self.job.record
        begin, end = i * self.step, min(M, (i + 1) * self.step)
        out = {}
        for pointer, offsets in self.pointers.items():
            first, last = begin // self.layout.rows, ceil_div(end, self.layout.rows)
            for name in counted_by(self.target, pointer):
                out[name] = int(offsets[first]), int(offsets[last])
        dtype = value_type(r.dtype).numpy
        for name in r.arrays.keys() - out.keys() - self.pointers.keys():
            whole, part = (self.target.array_specs((n, K), dtype, 0, r.params) or {} for n in (self.step, end - begin))
            first = i * whole[name][1][0]
            out[name] = first, first + part[name][1][0]
        return out

    def tasks(self, f: TensorFile, out: Writer, team: Team) -> Iterator[Callable[[], None]]:
        """Read, check, decode and write each panel."""
        return (bound(self._write, f, out, team, i) for i in range(self.count))

    def _write(self, f: TensorFile, out: Writer, team: Team, i: int) -> None:
        r, (M, K) = self.job.record, self.job.shape
        begin, end = i * self.step, min(M, (i + 1) * self.step)
        ranges = self.ranges(i)
        shapes = [(hi - lo, *r.arrays[name][1][1:]) for name, (lo, hi) in ranges.items()]
        rooms = team.rooms([(s, SAFETENSORS[r.arrays[name][0]]) for name, s in zip(ranges, shapes, strict=True)])
        arrays: dict[str, Any] = {}
        for (name, (lo, _)), room in zip(ranges.items(), rooms, strict=True):
            f.panel(r.name, lo, room, name)
            arrays[name] = room
            if r.crc32.get(name) is not None and room.nbytes:
                at = lo * (room.nbytes // room.shape[0])
                self._sums.setdefault(name, []).append(
                    (at, room.nbytes, zlib.crc32(room.reshape(-1).view(np.uint8).data))
                )
        for pointer, offsets in self.pointers.items():
            part = offsets[begin // self.layout.rows : ceil_div(end, self.layout.rows) + 1]
            arrays[pointer] = (part - part[0]).astype(index_dtype(int(part[-1] - part[0])))
        dense = self.target(shape=(end - begin, K), **r.params, **arrays).validate().to_dense()
        out.put_part(r.name, begin * K * dense.itemsize, dense)

    def check(self, f: TensorFile) -> None:
        """Compare the checksums of the arrays that were read; IntegrityError if one is another."""
        for name, parts in self._sums.items():
            f.check_sum(self.job.name, name, crc.joined(parts)[0])


def expansion(f: TensorFile, job: Job) -> Expansion | None:
    """``job`` as panels, or None where its format, or damage, asks for the whole tensor."""
    r = job.record
    if r.format is None or r.tables or 0 in job.shape:
        return None
    layout = r.format.panels(r.params)
    rows = None if layout is None else panel_rows(job, r.format, r.params, layout)
    if layout is None or rows is None:
        return None
    pointers = {name: f.array(job.name, array=name) for name in layout.pointers}
    for name, offsets in pointers.items():
        for counted in counted_by(r.format, name):
            length = r.arrays[counted][1][0]
            if offsets[0] != 0 or offsets[-1] != length or bool((offsets[1:] < offsets[:-1]).any()):
                return None  # the whole tensor says what is wrong
    known = r.format.array_specs((job.shape[0], job.shape[1]), value_type(r.dtype).numpy, 0, r.params)
    in_items = {name for p in pointers for name in counted_by(r.format, p)}
    if r.arrays.keys() - in_items - pointers.keys() - (known or {}).keys():
        return None
    return Expansion(job, r.format, layout, rows, pointers)


def told_by_the_whole(f: TensorFile, job: Job, e: SpformatError) -> SpformatError:
    """The error of the whole tensor for what a panel found wrong; that of the panel if there is none."""
    try:
        f.read(job.name)
    except SpformatError as whole:
        return whole
    e.at(path=f.path, tensor=job.name)
    return e
