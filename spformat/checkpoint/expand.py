"""Sparse matrices decoded to dense in row chunks: the reverse of ``row_chunks``, in the same bounded memory.

The part of every array that belongs to a row chunk is read, checksummed, constructed as a matrix of its own, validated
and decoded. The checksums of the whole arrays are known only at the end; they are compared before the file is
published, so no file with unchecked contents gets its final name. When a row chunk is invalid, the whole tensor is
read, because only its error message has the right positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import limits
from ..arrays.dtypes import SAFETENSORS, value_type
from ..arrays.library import ceil_div, index_dtype
from ..errors import SpformatError
from ..formats.base import Format, RowChunks
from ..formats.declare import arrays_counted_by
from ..storage import crc
from ..storage.stwriter import Writer
from ..storage.tensorfile import TensorFile
from .row_chunks import Team, rows_per_chunk
from .tensor_plans import TensorPlan


@dataclass
class ChunkDecoder:
    """Decodes one sparse matrix of a file, row chunk by row chunk, and writes the dense rows."""

    plan: TensorPlan
    target: type[Format]
    layout: RowChunks
    step: int
    """Rows of a row chunk; the last may have fewer."""
    pointers: dict[str, np.ndarray[Any, Any]]
    _sums: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """RowChunks."""
        return ceil_div(self.plan.shape[0], self.step)

    def ranges(self, i: int) -> dict[str, tuple[int, int]]:
        """First entry, and the one after the last, of row chunk ``i`` in every array except the pointers."""
        (M, K), r = self.plan.shape, self.plan.record
        begin, end = i * self.step, min(M, (i + 1) * self.step)
        out = {}
        for pointer, offsets in self.pointers.items():
            first, last = begin // self.layout.rows, ceil_div(end, self.layout.rows)
            for name in arrays_counted_by(self.target, pointer):
                out[name] = int(offsets[first]), int(offsets[last])
        dtype = value_type(r.dtype).numpy
        for name in r.arrays.keys() - out.keys() - self.pointers.keys():
            whole, part = (self.target.array_specs((n, K), dtype, 0, r.params) or {} for n in (self.step, end - begin))
            first = i * whole[name][1][0]
            out[name] = first, first + part[name][1][0]
        return out

    def tasks(self, f: TensorFile, out: Writer, team: Team) -> Iterator[Callable[[], None]]:
        """A task for each row chunk, which reads, checks, decodes and writes it."""
        return (partial(self._write, f, out, team, i) for i in range(self.count))

    def _write(self, f: TensorFile, out: Writer, team: Team, i: int) -> None:
        r, (M, K) = self.plan.record, self.plan.shape
        begin, end = i * self.step, min(M, (i + 1) * self.step)
        ranges = self.ranges(i)
        shapes = [(hi - lo, *r.arrays[name][1][1:]) for name, (lo, hi) in ranges.items()]
        buffers = team.buffers([(s, SAFETENSORS[r.arrays[name][0]]) for name, s in zip(ranges, shapes, strict=True)])
        arrays: dict[str, Any] = {}
        for (name, (lo, _)), buffer in zip(ranges.items(), buffers, strict=True):
            f.read_rows(r.name, lo, buffer, name)
            arrays[name] = buffer
            if r.crc32.get(name) is not None and buffer.nbytes:
                at = lo * (buffer.nbytes // buffer.shape[0])
                self._sums.setdefault(name, []).append(
                    (at, buffer.nbytes, zlib.crc32(buffer.reshape(-1).view(np.uint8).data))
                )
        for pointer, offsets in self.pointers.items():
            part = offsets[begin // self.layout.rows : ceil_div(end, self.layout.rows) + 1]
            arrays[pointer] = (part - part[0]).astype(index_dtype(int(part[-1] - part[0])))
        chunk = self.target(shape=(end - begin, K), **r.params, **arrays)
        dense = (chunk.in_order() if limits.current().sort else chunk.validate()).to_dense()
        out.put_part(r.name, begin * K * dense.itemsize, dense)

    def check(self, f: TensorFile) -> None:
        """Compare the checksums of the arrays that were read with those in the file; IntegrityError if one differs."""
        for name, parts in self._sums.items():
            f.check_sum(self.plan.name, name, crc.joined(parts)[0])


def chunk_decoder(f: TensorFile, plan: TensorPlan) -> ChunkDecoder | None:
    """A decoder of the tensor; None if its format needs the whole tensor, or its arrays are not as declared."""
    r = plan.record
    if r.format is None or r.tables or 0 in plan.shape:
        return None
    layout = r.format.row_chunks(r.params)
    rows = None if layout is None else rows_per_chunk(plan, r.format, r.params, layout)
    if layout is None or rows is None:
        return None
    pointers = {name: f.array(plan.name, array=name) for name in layout.pointers}
    for name, offsets in pointers.items():
        for counted in arrays_counted_by(r.format, name):
            length = r.arrays[counted][1][0]
            # Reading the whole tensor raises the error that says what is wrong.
            if offsets.dtype != index_dtype(length) or offsets.shape != (ceil_div(plan.shape[0], layout.rows) + 1,):
                return None
            if offsets[0] != 0 or offsets[-1] != length or bool((offsets[1:] < offsets[:-1]).any()):
                return None
    known = r.format.array_specs((plan.shape[0], plan.shape[1]), value_type(r.dtype).numpy, 0, r.params)
    in_items = {name for p in pointers for name in arrays_counted_by(r.format, p)}
    if r.arrays.keys() - in_items - pointers.keys() - (known or {}).keys():
        return None
    if any(r.arrays[name][1] != shape for name, (_, shape) in (known or {}).items() if name not in in_items):
        return None
    return ChunkDecoder(plan, r.format, layout, rows, pointers)


def error_of_whole_tensor(f: TensorFile, plan: TensorPlan, e: SpformatError) -> SpformatError:
    """The error that reading the whole tensor raises, for the error ``e`` of one row chunk; ``e`` if it raises none."""
    try:
        f.read(plan.name)
    except SpformatError as whole:
        return whole
    e.at(path=f.path, tensor=plan.name)
    return e
