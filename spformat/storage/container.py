"""Tensors in a file: ``save``, ``load``, ``safe_open``.  Spec: docs/container.md.

A file is an ordinary safetensors file with a descriptor (``descriptor.py``) that says which entries make up
which tensor. Every byte read is checked (CRC32 of each array, SHA-256 of the header), then the object is
constructed (lengths and dtypes) and validated (contents), before anybody sees it. No format is mentioned here.
"""

from __future__ import annotations

import difflib
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
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
from .files import Path
from .filewriter import Tensor, create, outline, plain_array

SCAN_ON_DEVICE = 2**20
"""Bytes from which a tensor loaded to a device is validated there: below, launches cost more than the host's scan."""

_WORTH_THREADS = 64 << 20
"""Bytes of tensors from which on they are read and validated side by side on the host."""
_AHEAD = 4
"""Tensors that are on their way to a device while another is validated there."""


def save(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    verify: bool = False,
) -> None:
    """Write tensors to one file, atomically and durably; the same tensors always give the same bytes.

    Args:
        path: the file; an existing one is replaced only with ``overwrite``, and only at the end.
        tensors: name -> Format or array. An array stays a plain tensor, also a 2-D one; wrap it in
            ``Dense`` to give it back as one. Device arrays are copied to the host one tensor at a time.
        metadata: further strings for ``__metadata__``.
        verify: read everything back from the device before publishing.

    Raises:
        UsageError: something that is neither, or names that collide.
        FormatError: a Format whose contents are invalid.
        OutputError, WriteError: the file cannot be created or written; nothing was published.
    """
    if not isinstance(tensors, Mapping):
        raise UsageError(f"save: expected {{name: tensor}}, got {type(tensors).__name__}; use save(path, {{'w': x}})")
    with create(
        path, map(outline, tensors, tensors.values()), overwrite=overwrite, metadata=metadata, verify=verify
    ) as f:
        for name, x in tensors.items():
            f.put(name, x)


def load(path: Path, names: Iterable[str] | None = None, device: str = "cpu", **options: bool) -> dict[str, Tensor]:
    """The tensors of a file that ``save`` wrote, checked and validated: name -> Format or array.

    Host arrays are read-only. ``names`` selects; ``device`` is "cpu", "cuda" or "cuda:<id>"; ``options``
    are those of ``safe_open``. Raises as ``safe_open`` does, and DescriptorError for a file without descriptor.
    """
    with safe_open(path, **options) as f:
        if not f.described:
            raise DescriptorError(
                "this is a dense safetensors file, it has no spformat descriptor: use `spformat convert` to make "
                "one, or safe_open(path) to read its tensors as they are",
                path=f.path,
            )
        chosen = f.keys() if names is None else [names] if isinstance(names, str) else list(names)
        return dict(zip(chosen, f.read_all(chosen, device), strict=True))


def safe_open(path: Path, *, allow_unchecked: bool = False, ignore_unknown: bool = False) -> TensorFile:
    """Open a file of ``save``, or any safetensors file, without reading its data.

    A file without descriptor is dense input: a 2-D tensor of a value type comes as ``Dense``, anything else
    as an array.

    Args:
        path: a regular file.
        allow_unchecked: accept a file whose checksums were left out (wrong ones are never accepted).
        ignore_unknown: accept descriptor keys this release does not know. Either can also be set for a block of
            code, like the limits: ``with spformat.limits.using(allow_unchecked=True): ...``

    Raises:
        InputError, ContainerError, DescriptorError, VersionError, IntegrityError, LimitError.
    """
    return TensorFile(path, allow_unchecked=allow_unchecked, ignore_unknown=ignore_unknown)


def save_dense(path: Path, tensors: Mapping[str, Tensor], *, overwrite: bool = False, verify: bool = False) -> None:
    """Write an ordinary dense safetensors file, as other tools read it: no descriptor, ``"format": "pt"``.

    Args:
        path, overwrite, verify: as for ``save``.
        tensors: name -> ``Dense`` or array; each becomes the entry of its name.
    """
    if not isinstance(tensors, Mapping):
        raise UsageError(f"save_dense: expected {{name: tensor}}, got {type(tensors).__name__}")
    arrays = {name: x.data if isinstance(x, Dense) else x for name, x in tensors.items()}
    records = [outline(name, x) for name, x in arrays.items()]
    sparse = next((r for r in records if r.format is not None), None)
    if sparse is not None and sparse.format is not None:
        raise UsageError(f"expected Dense or an array, got {sparse.format.name}; call to_dense()", tensor=sparse.name)
    specs = [(r.name, *r.arrays[""]) for r in records]
    with stwriter.Writer(path, specs, {"format": "pt"}, overwrite=overwrite, verify=verify) as out:
        for name, x in arrays.items():
            out.put(name, plain_array(name, x))


class TensorFile:
    """An open file (``safe_open``): a read-only mapping of names whose values are read when asked for.

    ``f[name]`` and ``f.read(name, device)`` give the tensor, ``f.info(name)`` its description without reading
    data, ``f.array(name)`` a plain or dense tensor as an array, whole or in panels of rows.
    """

    def __init__(self, path: Path, *, allow_unchecked: bool = False, ignore_unknown: bool = False) -> None:
        self._in = stfile.Reader(path)
        self._lanes: dict[int, DeviceCopy] = {}
        self.path = self._in.path
        self.described = descriptor.KEY in self.metadata
        """Whether the file has a descriptor; if not, it is dense input."""
        header = self._in.header
        try:
            if self.described:
                here = limits.current()
                found = descriptor.read(
                    header,
                    allow_unchecked=allow_unchecked or here.allow_unchecked,
                    ignore_unknown=ignore_unknown or here.ignore_unknown,
                )
                self._records = dict(sorted(found.items()))
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
    def oddities(self) -> tuple[str, ...]:
        """Departures from the safetensors specification that were let pass in a file without descriptor."""
        return self._in.header.oddities

    def info(self, name: str) -> Record:
        """Format, shape, dtype, params, tables and the dtype and shape of each array, from the header alone."""
        found = self._records.get(name)
        if found is None:
            near = difflib.get_close_matches(str(name), self._records, 1)
            hint = f"; did you mean '{printable(near[0])}'?" if near else f"; it has {len(self)} tensors"
            raise UsageError(f"no tensor '{printable(name)}' in the file{hint}", path=self.path)
        return found

    def read(self, name: str, device: str = "cpu") -> Tensor:
        """One tensor, checked, constructed and validated; host arrays are read-only.

        Raises IntegrityError, ArrayError, InvariantError (by kind of content), LimitError, or UsageError for a
        name the file does not have.
        """
        r = self.info(name)
        parse_device(device)
        return self._checked(r, self._arrays(r, device), device)

    def read_all(self, names: Iterable[str], device: str = "cpu") -> Iterator[Tensor]:
        """``read`` of each name, on the host one a core at a time.

        On the way to a device, the next tensors cross while one is validated there.
        """
        if parse_device(device) is None:
            yield from self._read_on_host([self.info(name) for name in names])
            return
        todo, ahead = [self.info(name) for name in names], deque[Future[dict[str, Any]]]()
        with device_errors(device, "any", 0):
            stream = (
                import_cupy().cuda.get_current_stream()
            )  # of this thread, as are the limits: readers are given both

        def fetch(r: Record) -> dict[str, Any]:
            with stream:
                return self._arrays(r, device)

        with ThreadPoolExecutor(_AHEAD) as pool:
            for i, r in enumerate(todo):
                for following in todo[i + len(ahead) : i + _AHEAD]:
                    ahead.append(pool.submit(copy_context().run, fetch, following))
                yield self._checked(r, ahead.popleft().result(), device)

    def _read_on_host(self, todo: list[Record]) -> Iterator[Tensor]:
        def alone(name: str) -> Tensor:
            with threads.alone():
                return self.read(name)

        size = sum(self._in.entry(r.entry(a)).nbytes for r in todo for a in r.arrays)
        if size < _WORTH_THREADS or len(todo) < 2 * threads.cores():
            yield from (self.read(r.name) for r in todo)
            return
        under_way: deque[Future[Tensor]] = deque()
        with ThreadPoolExecutor(threads.cores(), "spformat") as pool:
            try:
                for r in todo:
                    under_way.append(pool.submit(copy_context().run, alone, r.name))  # under the limits of this thread
                    if len(under_way) > threads.cores():
                        yield under_way.popleft().result()
                while under_way:
                    yield under_way.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _arrays(self, r: Record, device: str) -> dict[str, Any]:
        """The arrays of a tensor where its contents are to be scanned: large ones on the device."""
        there = parse_device(device)
        if there is not None and sum(self._in.entry(r.entry(a)).nbytes for a in r.arrays) >= SCAN_ON_DEVICE:
            lanes = self._lanes.setdefault(there, DeviceCopy(there))
            return {array: self._read(r, array, lanes=lanes) for array in r.arrays}
        arrays = {array: self._read(r, array) for array in r.arrays}
        for a in arrays.values():
            a.flags.writeable = False
        return arrays

    def _checked(self, r: Record, arrays: dict[str, Any], device: str) -> Tensor:
        if r.format is not None:
            try:
                return _validated(_made(r, arrays), device)
            except FormatError as e:
                e.at(path=self.path, tensor=r.name)
                raise
        a = arrays[""]
        if self.described or a.ndim != 2 or r.dtype not in VALUE_TYPES:
            return to_device(a, device)
        return Dense(shape=a.shape, data=a).validate().to(device)

    def array(self, name: str, rows: slice | None = None, device: str = "cpu", array: str = "") -> Array:
        """A plain or dense tensor as a fresh array, or on the host rows ``slice(begin, end)`` of it (unchecked).

        array: one array of a tensor that has several, checked and on the host.
        """
        r = self.info(name)
        if array:
            return self._read(r, array)
        if len(r.arrays) != 1:
            raise UsageError(f"expected a plain or dense tensor, got {r.format and r.format.name}", tensor=name)
        there = parse_device(device)
        if there is None or rows is not None:
            return self._read(r, next(iter(r.arrays)), rows)
        return self._read(r, next(iter(r.arrays)), lanes=self._lanes.setdefault(there, DeviceCopy(there)))

    def _read(self, r: Record, array: str, rows: slice | None = None, lanes: DeviceCopy | None = None) -> Any:
        try:
            if lanes is not None:
                return self._in.read_to(lanes, r.entry(array), r.crc32.get(array))
            return self._in.read(r.entry(array), None if rows else r.crc32.get(array), rows)
        except (FormatError, LimitError) as e:
            e.fields |= {"tensor": r.name} | ({"array": array} if array else {})
            e.message = f"{array}: {e.message}" if array else e.message
            raise

    def panel(self, name: str, begin: int, room: np.ndarray[Any, Any], array: str = "") -> None:
        """Fill ``room`` [rows, ..] with rows ``begin ..`` of an array (``""``: the only one); from any thread.

        Not checksummed: for whoever reads all of it in panels there is ``check_sum``.
        """
        r = self.info(name)
        array = array or next(iter(r.arrays))
        code, shape = r.arrays[array]
        if room.shape[1:] != shape[1:] or stwriter.code_of(room.dtype) != code or not room.flags.c_contiguous:
            raise UsageError(f"panel: expected rows of {code} {shape}, got {room.dtype} {room.shape}", tensor=name)
        at = begin * limits.product(*shape[1:], room.dtype.itemsize)
        self._in.read_into(r.entry(array), at, room.reshape(-1).view(np.uint8).data)

    def check_sum(self, name: str, array: str, found: int) -> None:
        """IntegrityError if the file has a CRC32 of an array and ``found`` is another."""
        r = self.info(name)
        try:
            self._in.check_sum(r.entry(array), r.crc32.get(array), found)
        except IntegrityError as e:
            e.fields |= {"tensor": name, "array": array}
            raise

    def raw(self, name: str, piece: int = 16 * 2**20, array: str = "") -> Iterator[np.ndarray[Any, Any]]:
        """The bytes of an array (``""``: a plain tensor) in pieces of at most ``piece``, to be passed on unchanged.

        Raises IntegrityError after the last piece if the file has a checksum and it is another.
        """
        r = self.info(name)
        expected, found = r.crc32.get(array), 0
        for part in self._in.pieces(r.entry(array), piece):
            if expected is not None:
                found = zlib.crc32(part.data, found)
            yield part
        if expected is not None and found != expected:
            raise IntegrityError(
                f"crc32 {expected:08x} is stored, {found:08x} computed: the file is damaged",
                path=self.path,
                tensor=name,
            )

    def nbytes(self, name: str) -> int:
        """Bytes of all arrays of a tensor in the file."""
        r = self.info(name)
        return sum(self._in.entry(r.entry(array)).nbytes for array in r.arrays)

    def ranges(self, name: str) -> list[tuple[int, int]]:
        """Where the arrays of a tensor lie: (first byte, byte after the last) in the file."""
        r, start = self.info(name), self._in.header.data_start
        entries = [self._in.entry(r.entry(array)) for array in r.arrays]
        return [(start + e.begin, start + e.end) for e in entries]

    def keys(self) -> list[str]:
        """Names: sorted in a file of ``save``, in the order of their data otherwise."""
        return list(self._records)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor, each read when it is its turn."""
        return ((name, self.read(name)) for name in self._records)

    def values(self) -> Iterator[Tensor]:
        """The tensors, each read when it is its turn."""
        return (self.read(name) for name in self._records)

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor, or ``default`` where the file has none of that name."""
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


def _made(r: Record, arrays: dict[str, Any]) -> Format:
    """The object a record and its arrays (by path) describe: lengths and dtypes checked, contents not yet."""
    assert r.format is not None
    parts = {}
    for name, p in r.parts.items():
        try:
            parts[name] = _made(p, {path: arrays[f"{name}.{path}"] for path in p.arrays})
        except FormatError as e:
            e.message = f"part {name}: {e.message}"
            raise
    fields: dict[str, Any] = {"shape": r.shape, **r.params, **r.tables, **{a: arrays[a] for a in r.own_arrays}}
    try:
        return r.format(**fields, **r.format.fields_of_parts(parts))
    except UsageError as e:  # a relation that only construction sees
        raise DescriptorError(e.message, **e.fields) from e


def _validated(f: Format, device: str) -> Format:
    """``f`` on ``device``, contents scanned where its arrays are: the scans check ranges before they use anything as
    an address, on the very copy that kernels will read."""
    try:
        return f.in_order().to(device) if limits.current().sort else f.validate().to(device)
    except (MemoryError, DeviceMemoryError):  # the arrays fit the device, the temporaries of their scan do not
        f.to("cpu").validate()
        return type(f).trusted(**f.fields())
