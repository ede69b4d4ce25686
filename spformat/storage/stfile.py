"""A strict reader of safetensors files; ``stwriter`` writes them. It knows bytes and names, but no formats.

Files are read with ``pread`` into memory of this process and never mapped. So bytes that were checked cannot change
afterwards, and a file that is truncated while it is read raises an error instead of a signal. Large arrays are read and
checksummed on several threads.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from .. import limits
from ..arrays.dtypes import SAFETENSORS
from ..arrays.library import Array
from ..errors import ArrayError, ContainerError, InputError, IntegrityError, LimitError, UsageError
from . import crc, stheader
from .device_copy import DeviceCopy
from .files import Identity, Path, close_read, identity_of, open_regular, path_text, reason
from .stheader import Entry, Header

if sys.byteorder != "little":
    raise ImportError("spformat needs a little-endian machine: files and kernels share one byte order")

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_ALIGNMENT = 64


class Reader:
    """An open safetensors file: header parsed and checked, data read on demand. A context manager.

    Raises:
        InputError: missing, unreadable, not a regular file.
        ContainerError: not a safetensors file, or one that breaks the format.
        LimitError: larger than the limits in force.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self.path = path_text(path)
        self._fd, self._status = open_regular(self.path)
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

    @property
    def file_bytes(self) -> int:
        """Size of the file when it was opened."""
        return self._status.st_size

    @property
    def identity(self) -> Identity:
        """Which file this is."""
        return identity_of(self._status)

    def _parse(self) -> Header:
        size = self._status.st_size
        limits.check("file_bytes", size, "size of the file")
        start = self._pread(0, min(size, 64))
        try:
            n = stheader.length(start[:8], size)
            return stheader.parse(self._pread(8, n), size - 8 - n)
        except ContainerError as e:
            if len(start) > 1 and stheader.is_torch_file(self.path, start):
                raise ContainerError(stheader.torch_lines(self.path)) from e
            raise ContainerError(e.message + (stheader.sniff(start) or _incomplete(self.path)), **e.fields) from e

    def entry(self, name: str) -> Entry:
        """The entry of a tensor; ContainerError if the file has none of that name."""
        entry = self.header.entries.get(name)
        if entry is None:
            raise ContainerError("expected the tensor in the file, got none of that name", path=self.path, tensor=name)
        return entry

    def read(self, name: str, crc32: int | None = None, rows: slice | None = None) -> NDArray:
        """One tensor, or consecutive rows of it, as a new array that starts on a 64-byte boundary.

        Args:
            name: the tensor.
            crc32: expected CRC32 of its bytes; IntegrityError if they have another. Must be None with ``rows``.
            rows: range of the first axis (``slice(begin, end)``).

        Raises:
            ArrayError: a dtype that numpy lacks (use ``read_bytes``), or a BOOL that is neither 0 nor 1.
            IntegrityError: wrong checksum, or the file changed or was truncated while it was open.
        """
        e = self.entry(name)
        dtype = self._dtype(e)
        shape, begin, end = e.shape, e.begin, e.end
        if rows is not None:
            if not shape:
                raise UsageError("rows: expected a tensor with rows, got a scalar", tensor=name)
            if not isinstance(rows, slice) or rows.step not in (None, 1):
                raise UsageError(f"rows: expected slice(begin, end), got {rows!r:.80}", tensor=name)
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

    def read_to(self, device_copy: DeviceCopy, name: str, crc32: int | None = None) -> Array:
        """One tensor as a new array on the device of ``device_copy``. Raises the errors of ``read`` and of the
        device."""
        e = self.entry(name)
        base = self.header.data_start + e.begin
        self._check_bytes(name, e.nbytes)

        def fetch(into: memoryview, at: int) -> None:
            self._pread_into(into, base + at, name)

        out, computed = device_copy.fill(e.shape, self._dtype(e), fetch, summed=crc32 is not None)
        self.check_sum(name, crc32, computed)
        self._check_unchanged()
        if out.dtype == np.bool_ and int(out.view(np.uint8).max(initial=0)) > 1:  # synchronize!
            raise ArrayError("BOOL: expected bytes 0 or 1, got others", path=self.path, tensor=name)
        return out

    def read_into(self, name: str, at: int, into: memoryview) -> None:
        """Read bytes ``at .. at + len(into) - 1`` of a tensor into the caller's memory; from any thread.

        A caller that uses the same memory again avoids the cost of new pages. Raises IntegrityError if the file changed
        or was truncated while it was open.
        """
        e = self.entry(name)
        if at < 0 or e.begin + at + into.nbytes > e.end:
            got = f"{at}..{at + into.nbytes}"
            raise UsageError(f"read_into: expected bytes 0..{e.nbytes}, got {got}", path=self.path, tensor=name)
        self._pread_into(into, self.header.data_start + e.begin + at, name)
        self._check_unchanged()

    def read_bytes(self, name: str, crc32: int | None = None) -> NDArray:
        """The bytes of a tensor of any dtype, uint8[nbytes], for copying them unchanged."""
        e = self.entry(name)
        return self._owned(name, e.begin, e.end, crc32)

    def pieces(self, name: str, size: int = 16 * 2**20) -> Iterator[NDArray]:
        """The bytes of a tensor in pieces of at most ``size`` and the memory budget, for copying in bounded memory."""
        e = self.entry(name)
        size = min(size, limits.current().memory or size)
        for at in range(e.begin, e.end, size):
            yield self._owned(name, at, min(at + size, e.end), None)

    def _check_bytes(self, name: str, n: int) -> None:
        """LimitError, which names file and tensor, if ``n`` bytes of it exceed the memory budget."""
        try:
            limits.check_bytes(n, "its values", self._status.st_size)
        except LimitError as e:
            raise e.at(path=self.path, tensor=name) from None

    def _owned(self, name: str, begin: int, end: int, crc32: int | None) -> NDArray:
        n = end - begin
        if not limits.always_allowed(n):  # else no message is built: a file may hold 100,000 small tensors
            self._check_bytes(name, n)
        memory = np.empty(n + _ALIGNMENT, np.uint8)
        raw = memory[-memory.ctypes.data % _ALIGNMENT :][:n]
        view, base = raw.data, self.header.data_start + begin

        def work(lo: int, hi: int) -> int:
            computed = 0
            for at in range(lo, hi, crc.PIECE):
                piece = view[at : min(at + crc.PIECE, hi)]
                self._pread_into(piece, base + at, name)
                if crc32 is not None:
                    computed = zlib.crc32(piece, computed)
            return computed

        self.check_sum(name, crc32, crc.in_segments(n, work))
        self._check_unchanged()
        return raw

    def _dtype(self, e: Entry) -> np.dtype[Any]:
        dtype: np.dtype[Any] | None = SAFETENSORS.get(e.dtype)
        if dtype is None:
            known = ", ".join(SAFETENSORS)
            raise ArrayError(f"dtype {e.dtype!r:.40} not supported; supported: {known}", path=self.path, tensor=e.name)
        return dtype

    def check_sum(self, name: str, crc32: int | None, computed: int) -> None:
        """IntegrityError if the stored checksum ``crc32`` differs from the one computed; None: no checksum is
        stored."""
        if crc32 is not None and computed != crc32:
            raise IntegrityError(
                f"crc32 {crc32:08x} is stored, {computed:08x} computed: the file is damaged",
                path=self.path, tensor=name, expected=f"{crc32:08x}", value=f"{computed:08x}",
            )  # fmt: skip

    def _pread(self, offset: int, n: int) -> bytes:
        buffer = bytearray(n)
        self._pread_into(memoryview(buffer), offset, None)
        return bytes(buffer)

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

    def __del__(self) -> None:  # ``safe_open(path)["w"]`` closes nothing
        self.close()

    def close(self) -> None:
        """Release the file. Harmless to repeat."""
        if self._fd >= 0:
            close_read(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _incomplete(path: str) -> str:
    return "; the name says that a download is incomplete" if path.endswith(".incomplete") else ""
