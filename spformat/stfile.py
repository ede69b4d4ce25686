"""Safetensors files: a strict reader and a streaming, byte-reproducible writer. Knows bytes and names, no formats.

Reading goes through ``pread`` into memory of our own, never a mapping: what was checked cannot change
afterwards, and a file that is cut while it is read gives an error, not a signal. Large arrays are read
and summed on several threads.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from . import crc, limits, stheader
from .arrays import Array, is_cupy
from .dtypes import SAFETENSORS, SAFETENSORS_CODE
from .errors import (
    ArrayError,
    ContainerError,
    InputError,
    IntegrityError,
    InternalError,
    LimitError,
    UsageError,
    WriteError,
    printable,
)
from .files import Path, close_read, open_regular, reason
from .output import Output
from .pinned import Lanes
from .stheader import Entry, Header

if sys.byteorder != "little":
    raise ImportError("spformat needs a little-endian machine: files and kernels share one byte order")

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Spec: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype code, shape of an array to write."""

_ALIGNMENT = 64
_PANEL = 16 * 2**20


class Reader:
    """An open safetensors file: header parsed and checked, data read on demand. A context manager.

    Raises:
        InputError: missing, unreadable, not a regular file.
        ContainerError: not a safetensors file, or one that breaks the format.
        LimitError: larger than the limits in force.
    """

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        self._fd, self._status = open_regular(path)
        try:
            self.header = self._parse()
        except BaseException as e:
            self.close()
            if isinstance(e, (ContainerError, LimitError)):
                e.at(path=self.path)
            raise

    @property
    def entries(self) -> dict[str, Entry]:
        """Name -> entry, in the order of the data."""
        return self.header.entries

    def _parse(self) -> Header:
        size = self._status.st_size
        limits.check("file_bytes", size, "size of the file")
        start = self._pread(0, min(size, 64))
        try:
            n = stheader.length(start[:8], size)
            return stheader.parse(self._pread(8, n), size - 8 - n)
        except ContainerError as e:
            raise ContainerError(e.message + (stheader.sniff(start) or _incomplete(self.path)), **e.fields) from e

    def entry(self, name: str) -> Entry:
        """The entry of a tensor; ContainerError if the file has none of that name."""
        found = self.header.entries.get(name)
        if found is None:
            raise ContainerError("expected the tensor in the file, got none of that name", path=self.path, tensor=name)
        return found

    def read(self, name: str, crc32: int | None = None, rows: slice | None = None) -> NDArray:
        """One tensor, or consecutive rows of it, as a fresh array on a 64-byte boundary.

        Args:
            name: the tensor.
            crc32: expected CRC32 of its bytes; IntegrityError if they have another. Not with ``rows``.
            rows: range of the first axis (``slice(begin, end)``).

        Raises:
            ArrayError: a dtype numpy cannot hold (use ``read_bytes``), or a BOOL that is neither 0 nor 1.
            IntegrityError: checksum mismatch, or the file changed or was cut while it was open.
        """
        e = self.entry(name)
        dtype = self._dtype(e)
        shape, begin, end = e.shape, e.begin, e.end
        if rows is not None:
            if not shape:
                raise UsageError("rows: expected a tensor with rows, got a scalar", tensor=name)
            first, last, _ = slice(rows.start, rows.stop).indices(shape[0])
            shape = (max(0, last - first), *shape[1:])
            begin += first * (e.nbytes // max(1, e.shape[0]))
            end = begin + limits.product(*shape) * dtype.itemsize
        raw = self._owned(name, begin, end, crc32)
        if dtype == np.bool_ and raw.size and raw.max() > 1:
            at = int((raw > 1).argmax())
            message = f"BOOL: expected bytes 0 or 1, got {raw[at]} at element {at}"
            raise ArrayError(message, path=self.path, tensor=name, index=at, value=int(raw[at]))
        return raw.view(dtype).reshape(shape)

    def read_to(self, lanes: Lanes, name: str, crc32: int | None = None) -> Array:
        """One tensor as a fresh array on the device of ``lanes``; errors as ``read``, and those of the device."""
        e = self.entry(name)
        base = self.header.data_start + e.begin
        limits.check_bytes(e.nbytes, f"tensor '{printable(name)}' of {printable(self.path)}", self._status.st_size)

        def fetch(into: memoryview, at: int) -> None:
            self._pread_into(into, base + at, name)

        out, found = lanes.fill(e.shape, self._dtype(e), fetch, summed=crc32 is not None)
        self.check_sum(name, crc32, found)
        self._check_unchanged()
        if out.dtype == np.bool_ and int(out.view(np.uint8).max(initial=0)) > 1:  # synchronize!
            raise ArrayError("BOOL: expected bytes 0 or 1, got others", path=self.path, tensor=name)
        return out

    def read_into(self, name: str, at: int, into: memoryview) -> None:
        """Bytes ``at .. at + len(into) - 1`` of a tensor into memory of the caller's: panels without a fresh page each.

        Raises IntegrityError when the file changed or was cut while it was open. Threads may share this.
        """
        e = self.entry(name)
        if at < 0 or e.begin + at + into.nbytes > e.end:
            got = f"{at}..{at + into.nbytes}"
            raise UsageError(f"read_into: expected bytes 0..{e.nbytes}, got {got}", path=self.path, tensor=name)
        self._pread_into(into, self.header.data_start + e.begin + at, name)
        self._check_unchanged()

    def read_bytes(self, name: str, crc32: int | None = None) -> NDArray:
        """The bytes of a tensor of any dtype: uint8[nbytes], to be passed on unchanged."""
        e = self.entry(name)
        return self._owned(name, e.begin, e.end, crc32)

    def pieces(self, name: str, size: int = 16 * 2**20) -> Iterator[NDArray]:
        """The bytes of a tensor in pieces of at most ``size``, for copying in bounded memory."""
        e = self.entry(name)
        for at in range(e.begin, e.end, size):
            yield self._owned(name, at, min(at + size, e.end), None)

    def _owned(self, name: str, begin: int, end: int, crc32: int | None) -> NDArray:
        n = end - begin
        limits.check_bytes(n, f"tensor '{printable(name)}' of {printable(self.path)}", self._status.st_size)
        room = np.empty(n + _ALIGNMENT, np.uint8)
        raw = room[-room.ctypes.data % _ALIGNMENT :][:n]
        view, base = raw.data, self.header.data_start + begin

        def work(lo: int, hi: int) -> int:
            found = 0
            for at in range(lo, hi, crc.PIECE):
                piece = view[at : min(at + crc.PIECE, hi)]
                self._pread_into(piece, base + at, name)
                if crc32 is not None:
                    found = zlib.crc32(piece, found)
            return found

        self.check_sum(name, crc32, crc.in_segments(n, work))
        self._check_unchanged()
        return raw

    def _dtype(self, e: Entry) -> np.dtype[Any]:
        dtype: np.dtype[Any] | None = SAFETENSORS.get(e.dtype)
        if dtype is None:
            known = ", ".join(SAFETENSORS)
            raise ArrayError(f"dtype {e.dtype!r:.40} not supported; supported: {known}", path=self.path, tensor=e.name)
        return dtype

    def check_sum(self, name: str, crc32: int | None, found: int) -> None:
        """IntegrityError if ``found`` is not the checksum ``crc32`` that is stored (None: none is)."""
        if crc32 is not None and found != crc32:
            raise IntegrityError(
                f"crc32 {crc32:08x} is stored, {found:08x} computed: the file is damaged",
                path=self.path, tensor=name, expected=f"{crc32:08x}", value=f"{found:08x}",
            )  # fmt: skip

    def _pread(self, offset: int, n: int) -> bytes:
        room = bytearray(n)
        self._pread_into(memoryview(room), offset, None)
        return bytes(room)

    def _pread_into(self, into: memoryview, offset: int, name: str | None) -> None:
        if self._fd < 0:
            raise UsageError("the file is closed; read inside the `with` block", path=self.path)
        while into.nbytes:
            try:
                done = os.preadv(self._fd, [into], offset)
            except OSError as e:
                raise InputError(f"cannot read the file: {reason(e)}", path=self.path) from e
            if done == 0:
                raise IntegrityError("short read: the file was truncated while open", path=self.path, tensor=name)
            into, offset = into[done:], offset + done

    def _check_unchanged(self) -> None:
        try:
            now, then = os.fstat(self._fd), self._status
        except OSError as e:
            raise InputError(f"cannot read the file: {reason(e)}", path=self.path) from e
        if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            raise IntegrityError("the file was changed while it was being read", path=self.path)

    def close(self) -> None:
        """Release the file. Harmless to repeat."""
        if self._fd >= 0:
            close_read(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


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
        self._lanes: dict[int, Lanes] = {}
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
        lanes = self._lanes.setdefault(a.device.id, Lanes(a.device.id))
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
    if len({e.name for e in entries}) != len(entries):
        raise UsageError("layout: expected distinct names, got one twice")
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


def _bytes_of(piece: Any) -> memoryview:
    if not isinstance(piece, np.ndarray):
        return memoryview(piece).cast("B")
    a = plain(piece)
    if not a.flags.c_contiguous:  # a wrong stride would be written as silent garbage
        raise InternalError("expected C order before writing")
    return a.reshape(-1).view(np.uint8).data


def _incomplete(path: str) -> str:
    return "; the name says that a download is incomplete" if path.endswith(".incomplete") else ""
