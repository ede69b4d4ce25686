"""An open file of tensors, ``TensorFile``: each tensor is read, checked and constructed when it is asked for.

Every byte is checked when it is read (CRC32 of each array, SHA-256 of the header). Then the object is constructed,
which checks lengths and dtypes, and its contents are validated, before the caller gets it. No format is mentioned here.
"""

from __future__ import annotations

import difflib
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from .. import limits
from ..arrays import threads
from ..arrays.dtypes import VALUE_TYPES
from ..arrays.library import Array, device_errors, import_cupy, parse_device, to_device
from ..errors import (
    DescriptorError,
    DeviceMemoryError,
    FormatError,
    IntegrityError,
    LimitError,
    UsageError,
    printable,
)
from ..formats.base import Format
from ..formats.dense import Dense
from . import descriptor, stfile, stwriter
from .descriptor import Record
from .device_copy import DeviceCopy
from .files import Identity, Path
from .filewriter import Tensor

SCAN_ON_DEVICE = 2**20
"""A tensor that is loaded to a device is validated there from this many bytes on; a smaller one faster on the host."""

_GUESSES, _LONGEST_GUESS = 500, 200
"""The most names, and the longest, that are compared with a name that the file does not have."""

_WORTH_THREADS = 64 << 20
"""From this many bytes on, the tensors of a file are read and validated side by side on the host."""
_AHEAD = 4
"""Tensors that are read side by side on the way to a device, including the one that is validated next."""


class TensorFile:
    """An open file (``safe_open``): a read-only mapping from names to tensors, which are read at each access.

    ``f[name]`` and ``f.read(name, device)`` return the tensor, ``f.info(name)`` its description without reading data,
    ``f.array(name)`` a plain or dense tensor as an array, all of it or some of its rows.
    """

    def __init__(self, path: Path, *, allow_unchecked: bool = False, ignore_unknown: bool = False) -> None:
        self._in = stfile.Reader(path)
        self._copies: dict[int, DeviceCopy] = {}
        self.path = self._in.path
        self.described = descriptor.KEY in self.metadata
        """Whether the file has a descriptor. Without one it is dense input."""
        header = self._in.header
        try:
            if self.described:
                here = limits.current()
                records = descriptor.read(
                    header,
                    allow_unchecked=allow_unchecked or here.allow_unchecked,
                    ignore_unknown=ignore_unknown or here.ignore_unknown,
                )
                self._records = dict(sorted(records.items()))
            else:
                self._records = descriptor.undescribed(header)
        except (FormatError, LimitError) as e:
            self.close()
            e.at(path=self.path)
            raise

    @property
    def metadata(self) -> dict[str, str]:
        """``__metadata__`` of the file, the descriptor included."""
        return self._in.header.metadata

    @property
    def identity(self) -> Identity:
        """Which file this is; a file that replaces it under its name has another identity."""
        return self._in.identity

    @property
    def own_metadata(self) -> dict[str, str]:
        """``metadata`` without the descriptor: what whoever saved the tensors has written beside them."""
        return {key: text for key, text in self.metadata.items() if key != descriptor.KEY}

    @cached_property
    def _parts(self) -> dict[str, Record]:
        return descriptor.parts_by_name(self._records.values())

    @property
    def oddities(self) -> tuple[str, ...]:
        """Violations of the safetensors specification that were tolerated, in a file without descriptor."""
        return self._in.header.oddities

    def info(self, name: str) -> Record:
        """Format, shape, dtype, params, tables and the dtype and shape of each array, from the header alone.

        name: of a tensor, or of a part of one: "w.0" is part "0" of the tensor "w". All methods take both.
        """
        record = self._records.get(name) or self._parts.get(name)
        if record is None:
            raise no_tensor(name, self._records, self.path)
        return record

    def read(self, name: str, device: str = "cpu") -> Tensor:
        """One tensor, checked, constructed and validated; host arrays are read-only.

        Raises IntegrityError, ArrayError, InvariantError (by kind of content), LimitError, or UsageError for a
        name the file does not have.
        """
        r = self.info(name)
        parse_device(device)
        return self._checked(r, self._arrays(r, device), device)

    def read_all(self, names: Iterable[str], device: str = "cpu") -> Iterator[Tensor]:
        """``read`` of each name, in order. On the host, one tensor for each core is read at a time.

        On the way to a device, the next tensors are copied while one is validated there.
        """
        if parse_device(device) is None:
            yield from self._read_on_host([self.info(name) for name in names])
            return
        records = [self.info(name) for name in names]
        with device_errors(device, "any", 0):
            stream = import_cupy().cuda.get_current_stream()  # the stream of this thread; the readers use it, too

        def fetch(r: Record) -> dict[str, Any]:
            with stream:
                return self._arrays(r, device)

        with ThreadPoolExecutor(_AHEAD) as pool:
            read = threads.in_order(pool, (partial(fetch, r) for r in records), _AHEAD - 1)
            for r, arrays in zip(records, read, strict=True):
                yield self._checked(r, arrays, device)

    def _read_on_host(self, records: list[Record]) -> Iterator[Tensor]:
        def alone(name: str) -> Tensor:
            with threads.alone():
                return self.read(name)

        size = sum(self._in.entry(r.entry(a)).nbytes for r in records for a in r.arrays)
        if size < _WORTH_THREADS or len(records) < 2 * threads.cores():
            yield from (self.read(r.name) for r in records)
            return
        with ThreadPoolExecutor(threads.cores(), "spformat") as pool:
            yield from threads.in_order(pool, (partial(alone, r.name) for r in records), threads.cores())

    def _arrays(self, r: Record, device: str) -> dict[str, Any]:
        """The arrays of a tensor, where their contents will be scanned: those of a large one on the device."""
        there, size = parse_device(device), sum(self._in.entry(r.entry(a)).nbytes for a in r.arrays)
        try:
            limits.check_bytes(size, "all arrays of the tensor", self._in.file_bytes)
        except LimitError as e:
            raise e.at(path=self.path, tensor=r.name) from None
        if there is not None and size >= SCAN_ON_DEVICE:
            device_copy = self._copies.setdefault(there, DeviceCopy(there))
            return {array: self._read(r, array, device_copy=device_copy) for array in r.arrays}
        arrays = {array: self._read(r, array) for array in r.arrays}
        for a in arrays.values():
            a.flags.writeable = False
        return arrays

    def _checked(self, r: Record, arrays: dict[str, Any], device: str) -> Tensor:
        if r.format is not None:
            try:
                return _validated(_construct(r, arrays), device)
            except FormatError as e:
                e.at(path=self.path, tensor=r.name)
                raise
        a = arrays[""]
        return to_device(a, device) if self.described else undescribed(a, device)

    def array(self, name: str, rows: slice | None = None, device: str = "cpu", array: str = "") -> Array:
        """A plain or dense tensor as a new array.

        rows: only these rows, ``slice(begin, end)``, on the host; their checksum is not compared. array: the name of
        one array of a tensor that has several; it is checked, and read to the host.
        """
        r = self.info(name)
        if array:
            return self._read(r, array)
        if len(r.arrays) != 1:
            raise UsageError(f"expected a plain or dense tensor, got {r.format and r.format.name}", tensor=name)
        there = parse_device(device)
        if there is None or rows is not None:
            return self._read(r, next(iter(r.arrays)), rows)
        return self._read(r, next(iter(r.arrays)), device_copy=self._copies.setdefault(there, DeviceCopy(there)))

    def _read(self, r: Record, array: str, rows: slice | None = None, device_copy: DeviceCopy | None = None) -> Any:
        try:
            if device_copy is not None:
                return self._in.read_to(device_copy, r.entry(array), r.crc32.get(array))
            return self._in.read(r.entry(array), None if rows else r.crc32.get(array), rows)
        except (FormatError, LimitError) as e:
            e.fields |= {"tensor": r.name} | ({"array": array} if array else {})
            e.message = f"{array}: {e.message}" if array else e.message
            raise

    def read_rows(self, name: str, begin: int, out: np.ndarray[Any, Any], array: str = "") -> None:
        """Fill ``out`` [rows, ..] with the rows from ``begin`` on of an array (``""``: the only one); from any thread.

        An ``out`` of fewer dimensions than the array is filled from the array with its first dimensions merged.
        No checksum is compared. A caller that reads all rows can compute it and call ``check_sum``.
        """
        r = self.info(name)
        array = array or next(iter(r.arrays))
        code, shape = r.arrays[array]
        inner = shape[max(1, len(shape) - out.ndim + 1) :]
        if out.shape[1:] != inner or stwriter.code_of(out.dtype) != code or not out.flags.c_contiguous:
            raise UsageError(f"read_rows: expected rows of {code} {shape}, got {out.dtype} {out.shape}", tensor=name)
        at = begin * limits.product(*inner, out.dtype.itemsize)
        self._in.read_into(r.entry(array), at, out.reshape(-1).view(np.uint8).data)

    def check_sum(self, name: str, array: str, computed: int) -> None:
        """IntegrityError if the file has a CRC32 of an array and ``computed`` differs from it."""
        r = self.info(name)
        try:
            self._in.check_sum(r.entry(array), r.crc32.get(array), computed)
        except IntegrityError as e:
            e.fields |= {"tensor": name, "array": array}
            raise

    def raw(self, name: str, piece: int = 16 * 2**20, array: str = "") -> Iterator[np.ndarray[Any, Any]]:
        """The bytes of an array (``""``: a plain tensor) in pieces of at most ``piece``, for copying them unchanged.

        Raises IntegrityError after the last piece if the file has a checksum and the bytes have another.
        """
        r = self.info(name)
        expected, computed = r.crc32.get(array), 0
        for part in self._in.pieces(r.entry(array), piece):
            if expected is not None:
                computed = zlib.crc32(part.data, computed)
            yield part
        if expected is not None and computed != expected:
            raise IntegrityError(
                f"crc32 {expected:08x} is stored, {computed:08x} computed: the file is damaged",
                path=self.path,
                tensor=name,
            )

    def nbytes(self, name: str) -> int:
        """Bytes of all arrays of a tensor in the file."""
        r = self.info(name)
        return sum(self._in.entry(r.entry(array)).nbytes for array in r.arrays)

    def ranges(self, name: str) -> list[tuple[int, int]]:
        """(first byte, byte after the last) in the file, of each array of a tensor."""
        r, start = self.info(name), self._in.header.data_start
        entries = [self._in.entry(r.entry(array)) for array in r.arrays]
        return [(start + e.begin, start + e.end) for e in entries]

    def keys(self) -> list[str]:
        """The names, sorted in a file that ``save`` wrote, otherwise in the order of the data."""
        return list(self._records)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), each read when the iterator reaches it."""
        return ((name, self.read(name)) for name in self._records)

    def values(self) -> Iterator[Tensor]:
        """The tensors, each read when the iterator reaches it."""
        return (self.read(name) for name in self._records)

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor, or ``default`` if the file has none of that name."""
        return self.read(name) if name in self._records else default

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __repr__(self) -> str:
        kind = "described" if self.described else "dense"
        return f"TensorFile({printable(self.path)!r}, {len(self)} tensors, {kind})"

    def close(self) -> None:
        """Release the file. Harmless to repeat."""
        self._in.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def undescribed(a: Array, device: str = "cpu") -> Tensor:
    """A tensor of a file without descriptor on ``device``: a 2-D one of a value type is a matrix."""
    if a.ndim != 2 or a.dtype.name not in VALUE_TYPES:
        return to_device(a, device)
    return Dense(shape=a.shape, data=a).validate().to(device)


def no_tensor(name: str, there: Mapping[str, Any], path: str) -> UsageError:
    """The error for a name that is none of ``there``, with the name that the user may have meant."""
    # Not all names, because comparing texts is slow.
    alike = (n for n in there if len(n) <= _LONGEST_GUESS and abs(len(n) - len(str(name))) <= 3)
    guesses = itertools.islice(alike, _GUESSES)
    near = difflib.get_close_matches(str(name)[:_LONGEST_GUESS], list(guesses), 1)
    shown = ", ".join([*(printable(n) for n in itertools.islice(there, 3)), *([".."] if len(there) > 3 else [])])
    count = "1 tensor" if len(there) == 1 else f"{len(there)} tensors"
    hint = f"; did you mean '{printable(near[0])}'?" if near else f"; it has {count}" + (f" ({shown})" if there else "")
    return UsageError(f"no tensor '{printable(name)}' in the file{hint}", path=path)


def _construct(r: Record, arrays: dict[str, Any]) -> Format:
    """The object that a record and its arrays, by path, describe. Lengths and dtypes are checked, contents are not."""
    assert r.format is not None
    parts = {}
    for name, p in r.parts.items():
        try:
            parts[name] = _construct(p, {path: arrays[f"{name}.{path}"] for path in p.arrays})
        except FormatError as e:
            e.message = f"part {name}: {e.message}"
            raise
    fields: dict[str, Any] = {"shape": r.shape, **r.params, **r.tables, **{a: arrays[a] for a in r.own_arrays}}
    try:
        return r.format(**fields, **r.format.fields_of_parts(parts))
    except UsageError as e:  # a relation between fields that only the constructor checks
        raise DescriptorError(e.message, **e.fields) from e


def _validated(f: Format, device: str) -> Format:
    """``f`` on ``device``, validated where its arrays are. So the copy that kernels will read is the one that is
    scanned. The scans check ranges before they use any number as an address."""
    try:
        return f.in_order().to(device) if limits.current().sort else f.validate().to(device)
    except (MemoryError, DeviceMemoryError):  # the device has memory for the arrays, but not for the scan's temporaries
        f.to("cpu").validate()
        return type(f).trusted(**f.fields())
