"""A streaming, byte-reproducible writer of safetensors files. It knows bytes and names, but no formats.

Large arrays are written and checksummed on several threads.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from .. import limits
from ..arrays.dtypes import SAFETENSORS, SAFETENSORS_CODE
from ..arrays.library import current_device, is_cupy
from ..errors import ArrayError, ContainerError, InternalError, UsageError, WriteError, printable
from . import crc, stheader
from .device_copy import DeviceCopy
from .files import Path
from .output import Output
from .stheader import Entry

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Spec: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype code, shape of an array to write."""

_CHUNK_BYTES = 16 * 2**20
"""Bytes of an array that are copied at a time, if it must be brought into C order or native byte order."""


def dense_metadata(own: Mapping[str, str]) -> dict[str, str]:
    """``__metadata__`` of a dense file: ``own``, and the "format" without which loaders refuse a file."""
    return {"format": "pt", **own}


class Writer:
    """A safetensors file under construction: names, dtypes and shapes are given first, the data follow in any order.

    The same arrays and metadata give the same bytes, in whatever order and pieces they are put. As a context manager it
    publishes the file atomically and durably on success, and leaves nothing behind after an exception.

    Args:
        path: final name, as for ``output.Output``.
        arrays: (name, dtype code, shape) of each array, in any order. For a dtype that numpy lacks, whose data are
            copied as bytes, the number of bytes follows the shape.
        metadata: ``__metadata__`` of the header, or a function that returns it for {name: CRC32}. The function is
            called with zeros first, to learn its length, and with the checksums at the end; both texts must be equally
            long.
        verify: read everything back from the device and compare checksums before publishing.
    """

    def __init__(
        self,
        path: Path,
        arrays: Iterable[Spec | tuple[str, str, tuple[int, ...], int]],
        metadata: Mapping[str, str] | Callable[[Mapping[str, int]], Mapping[str, str]] | None = None,
        *,
        overwrite: bool = False,
        verify: bool = False,
    ) -> None:
        self._entries = {e.name: e for e in layout(arrays)}
        self._metadata = metadata if callable(metadata) else lambda _: metadata or {}
        self._crc: dict[str, int] = {}
        self._parts: dict[str, list[tuple[int, int, int]]] = {}  # (begin, bytes, CRC32) of what put_part wrote
        self._verify = verify
        self._summed = callable(metadata) or verify
        self._copies: dict[int, DeviceCopy] = {}
        sized = self._encoded(dict.fromkeys(self._entries, 0))
        data_bytes = max((e.end for e in self._entries.values()), default=0)
        try:
            stheader.length(sized[:8], len(sized) + data_bytes)
            stheader.parse(sized[8:], data_bytes)  # refuses to write a header that the reader would refuse
        except ContainerError as e:
            raise UsageError(f"cannot write: {e.message}", **e.fields) from e
        self._data_start = len(sized)
        self._out = Output(path, self._data_start + data_bytes, overwrite=overwrite)

    def put(self, name: str, data: Any) -> None:
        """Write one array: an ndarray of the declared dtype and shape, or its bytes as an iterable of pieces.

        An ndarray of any order, strides or byte order is written in C order, little-endian. A CuPy array is copied
        through pinned buffers while earlier pieces are written. Pieces are bytes-like objects or arrays of consecutive
        rows, in order; one piece is in memory at a time.
        """
        e = self._entries.get(name)
        if e is None:
            raise UsageError("put: expected a declared array, got an unknown name", array=name)
        if name in self._crc:
            raise UsageError("put: the array has been written already", array=name)
        on_device = is_cupy(data)
        if on_device or isinstance(data, np.ndarray):
            if e.dtype in SAFETENSORS and (code_of(data.dtype), data.shape) != (e.dtype, e.shape):
                got = f"{data.dtype} {data.shape}"
                raise UsageError(f"put: expected {e.dtype} {e.shape} as declared, got {got}", array=name)
            if on_device:
                self._crc[name] = self._drain(e.begin, data)
                return
            data = _row_chunks(data)
        at, computed = 0, 0
        for piece in data:
            if isinstance(piece, np.ndarray) and piece.dtype != np.uint8:  # uint8 pieces are bytes of any type
                _check_piece(e, piece)
            view = _bytes_of(piece)
            if at + view.nbytes > e.nbytes:
                raise UsageError(f"put: expected {e.nbytes} bytes, got more", array=name)
            part = self._write(e.begin + at, view)
            computed = crc.combine(computed, part, view.nbytes) if at else part
            at += view.nbytes
        if at != e.nbytes:
            raise UsageError(f"put: expected {e.nbytes} bytes, got {at}", array=name)
        self._crc[name] = computed

    def put_part(self, name: str, at: int, data: Any) -> None:
        """Write ``data`` (an array in C order, or bytes) at byte ``at`` of an array; from any thread, in any order.

        All parts of an array together must cover each of its bytes once; ``commit`` checks that.
        """
        e, view = self._entries.get(name), _bytes_of(data)
        if e is None or name in self._crc:
            raise UsageError("put_part: expected a declared array that has not been written", array=name)
        if at < 0 or at + view.nbytes > e.nbytes:
            raise UsageError(f"put_part: expected bytes 0..{e.nbytes}, got {at}..{at + view.nbytes}", array=name)
        parts = self._parts.setdefault(name, [])
        if view.nbytes:
            parts.append((at, view.nbytes, self._write(e.begin + at, view)))

    def _join_parts(self) -> None:
        """Compute the CRC32 of every array that was written in parts; UsageError unless they cover it exactly."""
        for name, parts in self._parts.items():
            try:
                computed, at = crc.joined(parts)
            except ValueError as e:
                raise UsageError(f"commit: parts of the array leave or repeat bytes at {e}", array=name) from None
            if at != self._entries[name].nbytes:
                raise UsageError(f"commit: expected {self._entries[name].nbytes} bytes in parts, got {at}", array=name)
            self._crc[name] = computed

    def _write(self, offset: int, view: memoryview) -> int:
        def work(lo: int, hi: int) -> int:
            computed = 0
            for at in range(lo, hi, crc.PIECE):
                piece = view[at : min(at + crc.PIECE, hi)]
                computed = zlib.crc32(piece, computed) if self._summed else 0
                self._out.write_at(self._data_start + offset + at, piece)
            return computed

        return crc.in_segments(view.nbytes, work)

    def _drain(self, offset: int, a: Any) -> int:
        device_copy = self._copies.setdefault(a.device.id, DeviceCopy(a.device.id))
        base = self._data_start + offset
        with current_device(a):
            whole = a if a.flags.c_contiguous else a.copy()
        return device_copy.drain(whole, lambda piece, at: self._out.write_at(base + at, piece))

    def commit(self) -> None:
        """Write the header with the checksums and publish the file; UsageError if an array was not put."""
        self._join_parts()
        missing = self._entries.keys() - self._crc.keys()
        if missing:
            raise UsageError(f"commit: {len(missing)} declared arrays were not put", array=min(missing))
        raw = self._encoded(self._crc)
        if len(raw) != self._data_start:
            raise InternalError("the header changed its length when the checksums were filled in")
        self._out.write_at(0, raw)
        if self._verify:
            self._read_back(raw)
        self._out.commit()

    def _read_back(self, raw: bytes) -> None:
        self._out.flush(forget=True)
        buffer = memoryview(bytearray(crc.PIECE))
        wanted = [(0, len(raw), zlib.crc32(raw))]
        wanted += [(self._data_start + e.begin, e.nbytes, self._crc[e.name]) for e in self._entries.values()]
        for start, n, expected in wanted:
            computed = 0
            for at in range(0, n, crc.PIECE):
                piece = buffer[: min(crc.PIECE, n - at)]
                self._out.read_at(start + at, piece)
                computed = zlib.crc32(piece, computed)
            if computed != expected:
                raise WriteError("the device returned other bytes than were written", path=self._out.path)

    def abandon(self) -> None:
        """Publish nothing and remove the temporary file. Harmless to repeat."""
        self._out.abandon()

    def _encoded(self, sums: Mapping[str, int]) -> bytes:
        raw = stheader.encode(self._entries.values(), self._metadata(sums))
        return len(raw).to_bytes(8, "little") + raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abandon()


def layout(arrays: Iterable[Spec | tuple[str, str, tuple[int, ...], int]]) -> tuple[Entry, ...]:
    """The entries of a file with these arrays: by decreasing item size, then by name. Sizes follow from dtype and
    shape."""
    sized = []
    for name, dtype, shape, *given in arrays:
        if not given and dtype not in SAFETENSORS:
            raise UsageError(f"layout: expected the number of bytes for dtype {dtype!r}, got none", array=name)
        sized.append((name, dtype, shape, given[0] if given else limits.product(*shape, SAFETENSORS[dtype].itemsize)))
    entries = stheader.layout(sized)
    require_distinct(e.name for e in entries)
    return entries


def require_distinct(entries: Iterable[str]) -> None:
    """UsageError if two arrays of a file would have one name."""
    twice = [name for name, count in Counter(entries).items() if count > 1]
    if twice:
        raise UsageError(
            f"layout: expected distinct names, got '{printable(min(twice))}' twice; where it is an "
            "array of one tensor and the name of another, rename one, or do not convert the first (--exclude)"
        )


def code_of(dtype: Any) -> str:
    """The safetensors code of a numpy dtype of either byte order; ArrayError, with all dtypes, if it has none."""
    code: str | None = SAFETENSORS_CODE.get(np.dtype(dtype).newbyteorder("="))
    if code is None:
        raise ArrayError(f"dtype {dtype} cannot be stored; use one of {', '.join(str(d) for d in SAFETENSORS_CODE)}")
    return code


def plain(a: NDArray) -> NDArray:
    """``a`` in C order and native byte order; a copy only if it is in another."""
    if not a.dtype.isnative:
        a = a.astype(a.dtype.newbyteorder("="))
    return np.asarray(a, order="C")


def _row_chunks(a: NDArray) -> Iterator[NDArray]:
    """``a``, if its bytes can be written as they are; else row chunks of it, so that their copies stay small."""
    if a.ndim == 0 or (a.flags.c_contiguous and a.dtype.isnative):
        yield a
        return
    step = max(1, _CHUNK_BYTES // max(1, a.nbytes // max(1, a.shape[0])))
    for i in range(0, a.shape[0], step):
        yield a[i : i + step]


def _check_piece(e: Entry, piece: np.ndarray[Any, Any]) -> None:
    """UsageError for a piece whose dtype or row length differs from that of the array."""
    mistyped = e.dtype in SAFETENSORS and code_of(piece.dtype) != e.dtype
    if mistyped or (piece.ndim > 1 and piece.shape[1:] != e.shape[1:]):
        got = f"{piece.dtype} {piece.shape}"
        raise UsageError(f"put: expected pieces of {e.dtype} {e.shape}, got {got}", array=e.name)


def _bytes_of(piece: Any) -> memoryview:
    if not isinstance(piece, np.ndarray):
        return memoryview(piece).cast("B")
    a = plain(piece)
    if not a.flags.c_contiguous:  # the bytes of a strided array would be wrong, and no error would follow
        raise InternalError("expected C order before writing")
    return a.reshape(-1).view(np.uint8).data
