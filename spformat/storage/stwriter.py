"""A streaming, byte-reproducible writer of safetensors files. Knows bytes and names, no formats.

Large arrays are written and summed on several threads.
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
from ..arrays.library import is_cupy
from ..errors import ArrayError, ContainerError, InternalError, UsageError, WriteError, printable
from . import crc, stheader
from .device_copy import DeviceCopy
from .files import Path
from .output import Output
from .stheader import Entry

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Spec: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype code, shape of an array to write."""

_PANEL = 16 * 2**20


class Writer:
    """A safetensors file under construction: every name, dtype and shape is known first, the data follows in any order.

    The same arrays and metadata give the same bytes, in whatever order and pieces they are put. As a
    context manager it publishes atomically and durably on success and leaves no trace on an exception.

    Args:
        path: final name, as for ``output.Output``.
        arrays: (name, dtype code, shape) of each array, in any order. For a dtype without a numpy type
            (passed through as bytes) the shape may be followed by the number of bytes.
        metadata: ``__metadata__`` of the header, or a function of {name: CRC32} that makes it. The function is
            called with zeros for sizing and with the sums at the end; its text must be equally long.
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
        self._lanes: dict[int, DeviceCopy] = {}
        sized = self._encoded(dict.fromkeys(self._entries, 0))
        data_bytes = max((e.end for e in self._entries.values()), default=0)
        try:
            stheader.length(sized[:8], len(sized) + data_bytes)
            stheader.parse(sized[8:], data_bytes)  # what cannot be read back is not written
        except ContainerError as e:
            raise UsageError(f"cannot write: {e.message}", **e.fields) from e
        self._data_start = len(sized)
        self._out = Output(path, self._data_start + data_bytes, overwrite=overwrite)

    def put(self, name: str, data: Any) -> None:
        """Write one array: an ndarray of the declared dtype and shape, or its bytes as an iterable of pieces.

        An ndarray of any order, strides or byte order is written in C order, little-endian; a CuPy array is copied
        through pinned buffers while earlier pieces are written. Pieces are bytes-like objects or arrays (panels of
        rows), in order; only one is held at a time.
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
            data = _panels(data)
        at, found = 0, 0
        for piece in data:
            if isinstance(piece, np.ndarray) and piece.dtype != np.uint8:  # those are bytes
                _check_panel(e, piece)
            view = _bytes_of(piece)
            if at + view.nbytes > e.nbytes:
                raise UsageError(f"put: expected {e.nbytes} bytes, got more", array=name)
            part = self._write(e.begin + at, view)
            found = crc.combine(found, part, view.nbytes) if at else part
            at += view.nbytes
        if at != e.nbytes:
            raise UsageError(f"put: expected {e.nbytes} bytes, got {at}", array=name)
        self._crc[name] = found

    def put_part(self, name: str, at: int, data: Any) -> None:
        """Write ``data`` (an array in C order, or bytes) at byte ``at`` of an array; from any thread, in any order.

        All parts of an array together must cover it, none twice: ``commit`` looks.
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
        """CRC32 of every array that came in parts; UsageError unless they cover it."""
        for name, parts in self._parts.items():
            try:
                found, at = crc.joined(parts)
            except ValueError as e:
                raise UsageError(f"commit: parts of the array leave or repeat bytes at {e}", array=name) from None
            if at != self._entries[name].nbytes:
                raise UsageError(f"commit: expected {self._entries[name].nbytes} bytes in parts, got {at}", array=name)
            self._crc[name] = found

    def _write(self, offset: int, view: memoryview) -> int:
        def work(lo: int, hi: int) -> int:
            found = 0
            for at in range(lo, hi, crc.PIECE):
                piece = view[at : min(at + crc.PIECE, hi)]
                found = zlib.crc32(piece, found) if self._summed else 0
                self._out.write_at(self._data_start + offset + at, piece)
            return found

        return crc.in_segments(view.nbytes, work)

    def _drain(self, offset: int, a: Any) -> int:
        lanes = self._lanes.setdefault(a.device.id, DeviceCopy(a.device.id))
        base = self._data_start + offset
        whole = a if a.flags.c_contiguous else a.copy()
        return lanes.drain(whole, lambda piece, at: self._out.write_at(base + at, piece))

    def commit(self) -> None:
        """Fill in the checksums and publish; UsageError if an array was not put."""
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
        room = memoryview(bytearray(crc.PIECE))
        wanted = [(0, len(raw), zlib.crc32(raw))]
        wanted += [(self._data_start + e.begin, e.nbytes, self._crc[e.name]) for e in self._entries.values()]
        for start, n, expected in wanted:
            found = 0
            for at in range(0, n, crc.PIECE):
                piece = room[: min(crc.PIECE, n - at)]
                self._out.read_at(start + at, piece)
                found = zlib.crc32(piece, found)
            if found != expected:
                raise WriteError("the device returned other bytes than were written", path=self._out.path)

    def abandon(self) -> None:
        """Publish nothing, leave nothing behind. Harmless to repeat."""
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
    """Entries of a file with these arrays: by falling item size, then name; sizes follow from dtype and shape."""
    sized = []
    for name, dtype, shape, *given in arrays:
        if not given and dtype not in SAFETENSORS:
            raise UsageError(f"layout: expected the number of bytes for dtype {dtype!r}, got none", array=name)
        sized.append((name, dtype, shape, given[0] if given else limits.product(*shape, SAFETENSORS[dtype].itemsize)))
    entries = stheader.layout(sized)
    names = Counter(e.name for e in entries)
    if len(names) != len(entries):
        raise UsageError(
            f"layout: expected distinct names, got '{printable(names.most_common(1)[0][0])}' twice; where it is an "
            "array of one tensor and the name of another, rename one, or do not convert the first (--exclude)"
        )
    return entries


def code_of(dtype: Any) -> str:
    """safetensors code of a numpy dtype of either byte order; ArrayError lists what can be stored."""
    found: str | None = SAFETENSORS_CODE.get(np.dtype(dtype).newbyteorder("="))
    if found is None:
        raise ArrayError(f"dtype {dtype} cannot be stored; use one of {', '.join(str(d) for d in SAFETENSORS_CODE)}")
    return found


def plain(a: NDArray) -> NDArray:
    """``a`` in C order and native bytes: itself if it is, else a copy."""
    if not a.dtype.isnative:
        a = a.astype(a.dtype.newbyteorder("="))
    return np.asarray(a, order="C")


def _panels(a: NDArray) -> Iterator[NDArray]:
    """``a`` itself where its bytes can be written as they are, else panels of rows: the copies stay small."""
    if a.ndim == 0 or (a.flags.c_contiguous and a.dtype.isnative):
        yield a
        return
    step = max(1, _PANEL // max(1, a.nbytes // max(1, a.shape[0])))
    for i in range(0, a.shape[0], step):
        yield a[i : i + step]


def _check_panel(e: Entry, panel: np.ndarray[Any, Any]) -> None:
    """UsageError for a piece whose values would be taken for those of another type, or rows of another length."""
    mistyped = e.dtype in SAFETENSORS and code_of(panel.dtype) != e.dtype
    if mistyped or (panel.ndim > 1 and panel.shape[1:] != e.shape[1:]):
        got = f"{panel.dtype} {panel.shape}"
        raise UsageError(f"put: expected pieces of {e.dtype} {e.shape}, got {got}", array=e.name)


def _bytes_of(piece: Any) -> memoryview:
    if not isinstance(piece, np.ndarray):
        return memoryview(piece).cast("B")
    a = plain(piece)
    if not a.flags.c_contiguous:  # a wrong stride would be written as silent garbage
        raise InternalError("expected C order before writing")
    return a.reshape(-1).view(np.uint8).data
