"""Checkpoints that compressed-tensors packed, presented as dense ones: each group of entries is one dense tensor."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from ..arrays.dtypes import SAFETENSORS_CODE, VALUE_TYPES
from ..arrays.library import Array, ceil_div, to_device
from ..errors import ContainerError, FormatError, LimitError
from ..interop.compressed_tensors import Group, decode, dense_shape, find_groups, fp8_in_int8
from ..limits import product
from ..storage.container import safe_open
from ..storage.descriptor import Record
from ..storage.files import is_file, read_small
from ..storage.filewriter import Tensor
from ..storage.tensorfile import TensorFile, undescribed
from .layouts import CONFIG, parsed_config

_MAX_CONFIG = 16 << 20

Records: TypeAlias = dict[str, tuple[str, Record, int]]
"""Tensor name -> (shard, description, bytes)."""


@dataclass(frozen=True)
class Packed:
    """One packed tensor: its dense shape and dtype, and where its arrays lie."""

    layout: str
    shape: tuple[int, ...]
    dtype: str
    entries: dict[str, tuple[str, str]]
    """Array -> (shard, entry)."""

    @property
    def shard(self) -> str:
        """The shard in which the dense tensor is presented."""
        return self.entries["compressed"][0]


def unpacked(records: Records, folder: str, path: str) -> tuple[Records, dict[str, Packed]]:
    """``records`` with one dense tensor in place of the entries of each group; and the groups by that tensor's name.

    A dense tensor takes the place of the first array of its group. A group of which an entry is missing stays as it is,
    and the others are unpacked all the same. Raises FormatError for a group whose shape and bitmask disagree,
    ContainerError for a tensor that occurs twice.
    """
    try:
        groups = find_groups(name for name in records if not _of_part_of_a_group(name, records))
    except FormatError:  # marlin-24, which stays as it is
        return records, {}
    groups = tuple(g for g in groups if records[g.entries["compressed"]][1].dtype in VALUE_TYPES)
    if not groups:
        return records, {}
    config = _config(folder)
    shapes = _shapes(records, folder, path, groups)
    by_first_entry = {g.entries["compressed"]: g for g in groups}
    parts = {entry for g in groups for entry in g.entries.values()}
    out: Records = {}
    packed: dict[str, Packed] = {}
    for name, (shard, record, size) in records.items():
        group = by_first_entry.get(name)
        if group is None:
            if name not in parts:
                out[name] = shard, record, size
            continue
        if group.name in records or group.name in packed:
            raise ContainerError("the tensor is there twice, dense or packed", path=path, tensor=group.name)
        dtype = "float8_e4m3fn" if record.dtype == "int8" and fp8_in_int8(config) else record.dtype
        try:
            shape = dense_shape(shapes[group.entries["shape"]])
            _check_bits(shape, records[group.entries["bitmask"]][1])
        except FormatError as e:
            raise e.at(path=path, tensor=group.name) from None
        values = VALUE_TYPES[dtype].numpy
        dense = Record(group.name, None, shape, dtype, {"": (SAFETENSORS_CODE[values], shape)})
        out[group.name] = shard, dense, product(*shape, values.itemsize)
        where = {array: (records[entry][0], entry) for array, entry in group.entries.items()}
        packed[group.name] = Packed(group.layout, shape, dtype, where)
    return out, packed


def _of_part_of_a_group(name: str, names: Container[str]) -> bool:
    """Whether a name is that of the values of a group of which another entry is missing: of a name that only looks like
    one of compressed-tensors, or of a group whose other entries are in another file."""
    prefix, _, array = name.rpartition(".")
    return array == "compressed" and not all(f"{prefix}.{other}" in names for other in ("bitmask", "shape"))


def _shapes(records: Records, folder: str, path: str, groups: tuple[Group, ...]) -> dict[str, Array]:
    """The ``shape`` entry of every group; each shard is opened once. FormatError for one of more than two numbers."""
    by_shard: dict[str, list[str]] = {}
    for g in groups:
        shard, record, _ = records[g.entries["shape"]]
        if product(*record.shape) > 2:
            got = f"{record.dtype} of shape {record.shape}"
            raise FormatError(f"shape: expected one or two ints, got {got}", path=path, tensor=g.name)
        by_shard.setdefault(shard, []).append(g.entries["shape"])
    out: dict[str, Array] = {}
    for shard, entries in by_shard.items():
        with safe_open(os.path.join(folder, shard)) as f:
            out |= {entry: f.array(entry) for entry in entries}
    return out


def _check_bits(shape: tuple[int, ...], bitmask: Record) -> None:
    """FormatError unless the bitmask has exactly one bit for each value, in rows of whole bytes. So a small file cannot
    claim a huge tensor."""
    rows, cols = (1, *shape)[-2:]
    expected, got_bytes = product(rows, ceil_div(cols, 8)), product(*bitmask.shape)
    if bitmask.dtype != "uint8" or got_bytes != expected:
        got = f"{bitmask.dtype} of shape {bitmask.shape}"
        raise FormatError(f"bitmask: expected {expected:,} bytes for a tensor of shape {shape}, got {got}")


def _config(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, CONFIG)
    return (parsed_config(read_small(path, _MAX_CONFIG)) or {}) if is_file(path) else {}


def config_when_dense(data: bytes) -> bytes:
    """The config.json of a packed checkpoint without the statement that its weights are packed; any other unchanged."""
    tree, changed = parsed_config(data) or {}, False
    for key in ("quantization_config", "compression_config"):
        settings = tree.get(key)
        if isinstance(settings, dict) and settings.pop("sparsity_config", None) is not None:
            changed = True
            if not settings.get("config_groups"):  # nothing else was compressed
                del tree[key]
    return (json.dumps(tree, indent=2) + "\n").encode() if changed else data


class UnpackedFile:
    """An open shard whose groups are read as dense tensors; everything else is passed on to the file.

    The tensor that was decoded last stays in memory. A group may have arrays in other shards, which are opened for it.
    A group that cannot be decoded raises its error at the first read.
    """

    def __init__(self, f: TensorFile, groups: Mapping[str, Packed], opened: Callable[[str], TensorFile]) -> None:
        self._f, self._groups, self._opened = f, groups, opened
        self._lock, self._last = threading.Lock(), ("", np.zeros(0, np.uint8))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._f, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._f.close()

    def _dense(self, name: str) -> Array:
        with self._lock:
            if self._last[0] != name:
                self._last = ("", np.zeros(0, np.uint8))  # freed first: there may be no memory for two
                self._last = name, self._decoded(name)
            return self._last[1]

    def _decoded(self, name: str) -> Array:
        group, arrays = self._groups[name], {}
        for array, (shard, entry) in group.entries.items():
            if entry in self._f:
                arrays[array] = self._f.array(entry)
            else:
                with self._opened(shard) as f:
                    arrays[array] = f.array(entry)
        stored = arrays["compressed"].dtype.name
        try:
            matrix = decode(group.layout, arrays, value_dtype=None if stored == group.dtype else group.dtype)
        except (FormatError, LimitError) as e:
            raise e.at(path=self._f.path, tensor=name) from None
        dense: Array = matrix.to_dense().reshape(group.shape)
        dense.flags.writeable = False  # it is kept, and given out again
        return dense

    def array(self, name: str, rows: slice | None = None, device: str = "cpu", array: str = "") -> Array:
        """As the method of ``TensorFile``."""
        if name not in self._groups:
            return self._f.array(name, rows, device, array)
        x = self._dense(name)
        return to_device(x if rows is None else x[rows], device)

    def read(self, name: str, device: str = "cpu") -> Tensor:
        """As the method of ``TensorFile``."""
        return undescribed(self._dense(name), device) if name in self._groups else self._f.read(name, device)

    def read_all(self, names: Iterable[str], device: str = "cpu") -> Iterator[Tensor]:
        """As the method of ``TensorFile``, one after another."""
        return (self.read(name, device) for name in names)

    def read_rows(self, name: str, begin: int, out: np.ndarray[Any, Any], array: str = "") -> None:
        """As ``TensorFile.read_rows``."""
        if name in self._groups:
            rows = self._dense(name).reshape(-1, *out.shape[1:])
            out[...] = rows[begin : begin + len(out)]
        else:
            self._f.read_rows(name, begin, out, array)

    def raw(self, name: str, piece: int = 16 * 2**20, array: str = "") -> Iterator[np.ndarray[Any, Any]]:
        """As the method of ``TensorFile``."""
        if name not in self._groups:
            yield from self._f.raw(name, piece, array)
            return
        data = self._dense(name).reshape(-1).view(np.uint8)
        for at in range(0, data.size, piece):
            yield data[at : at + piece]

    def ranges(self, name: str) -> list[tuple[int, int]]:
        """As ``TensorFile.ranges``; of a packed tensor, only the arrays in this shard."""
        if name not in self._groups:
            return self._f.ranges(name)
        here = [entry for _, entry in self._groups[name].entries.values() if entry in self._f]
        return [r for entry in here for r in self._f.ranges(entry)]
