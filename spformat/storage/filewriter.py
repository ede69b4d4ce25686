"""A container under construction: the descriptions of all tensors are given first, then the tensors one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from .. import limits
from ..arrays.library import Array, is_cupy, unmasked
from ..arrays.torch_tensors import is_torch, torch_to_array
from ..errors import ArrayError, UsageError, printable
from ..formats.base import Format
from . import descriptor, stheader, stwriter
from .descriptor import Record
from .files import Path
from .stheader import METADATA

Tensor: TypeAlias = Format | Array
"""The value under one name of a file: a Format, or a plain array of any rank (biases, norms, tables). A torch tensor is
stored as a plain array, and read back as a numpy array."""


def outline(name: str, x: Tensor) -> Record:
    """The record of a tensor, which a file needs before its first byte is written."""
    if type(name) is not str:
        raise UsageError(f"tensor name: expected text, got {name!r:.80}")
    if name == METADATA:
        raise UsageError(f"tensor name: '{METADATA}' is taken by the header of the file; rename the tensor")
    if not isinstance(x, Format):
        x = plain_array(name, x)
        try:
            code = stwriter.code_of(x.dtype)
        except ArrayError as e:
            raise e.at(tensor=name) from None
        return Record(name, None, x.shape, x.dtype.newbyteorder("=").name, {"": (code, x.shape)})
    arrays = {path: (stwriter.code_of(a.dtype), a.shape) for path, a in x.all_arrays().items()}
    parts = {part: outline(f"{name}.{part}", p) for part, p in x.parts_by_name().items()}
    return Record(name, type(x), x.shape, x.dtype.name, arrays, x.params(), x.tables(), parts=parts)


def create(
    path: Path,
    records: Iterable[Record],
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    verify: bool = False,
) -> FileWriter:
    """A file whose tensors are described first and written one by one, for conversions in bounded memory.

    with create(path, [outline(..), ..]) as f:
        f.put("w", w)
    """
    return FileWriter(path, records, overwrite=overwrite, metadata=metadata, verify=verify)


class FileWriter:
    """A file under construction (``create``). Tensors may be put in any order; the bytes do not depend on it.

    The parts of a composed matrix may be put one by one: "w.0" is part "0" of the tensor "w".
    """

    def __init__(
        self,
        path: Path,
        records: Iterable[Record],
        *,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
        verify: bool = False,
    ) -> None:
        chosen = list(records)
        self._records = {r.name: r for r in chosen}
        if len(self._records) != len(chosen):
            raise UsageError("tensor names: expected distinct names, got one twice")
        self._records = descriptor.parts_by_name(chosen) | self._records
        others = stheader.own_metadata(metadata)
        if descriptor.KEY in others:
            raise UsageError(f"metadata: the key '{descriptor.KEY}' is the descriptor's")
        specs = [(r.entry(array), *spec) for r in chosen for array, spec in r.arrays.items()]
        entries = stwriter.layout(specs)  # UsageError if an array of one tensor has the name of another tensor

        def described(sums: Mapping[str, int]) -> dict[str, str]:
            return descriptor.sealed(descriptor.pack(chosen, sums), entries, others)

        self._out = stwriter.Writer(path, specs, described, overwrite=overwrite, verify=verify)

    def put(self, name: str, x: Tensor) -> None:
        """Write a tensor that matches its outline. A Format that is not marked as validated is validated first."""
        record = self._record(name)
        if outline(name, x) != record:
            raise UsageError(f"put: expected what the outline says, {record}, got {outline(name, x)}", tensor=name)
        arrays = x.ensure_valid().all_arrays() if isinstance(x, Format) else {"": plain_array(name, x)}
        for array, a in arrays.items():
            self._out.put(record.entry(array), a)

    def put_array(self, name: str, array: str, pieces: Iterable[Any]) -> None:
        """Write one array of a tensor (``""`` for a plain one) from pieces in order: bytes, or arrays of rows.

        The contents must be such that ``validate`` accepts them.
        """
        record = self._record(name)
        if array not in record.arrays:
            raise UsageError(f"put_array: expected one of {list(record.arrays)}, got {array!r}", tensor=name)
        self._out.put(record.entry(array), pieces)

    def put_part(self, name: str, array: str, row: int, part: Any) -> None:
        """Write the entries from ``row`` on (first axis) of one array of a tensor; from any thread, in any order.

        All parts together must cover each entry once, with contents that ``validate`` accepts.
        """
        record = self._record(name)
        code, shape = record.arrays[array]
        if (stwriter.code_of(part.dtype), part.shape[1:]) != (code, shape[1:]):
            got = f"{part.dtype} {part.shape}"
            raise UsageError(f"put_part: expected entries of {code} {shape}, got {got}", tensor=name, array=array)
        self._out.put_part(record.entry(array), row * limits.product(*shape[1:], part.dtype.itemsize), part)

    def commit(self) -> None:
        """Publish the file; UsageError if a tensor is missing."""
        self._out.commit()

    def abandon(self) -> None:
        """Publish nothing and remove the temporary file."""
        self._out.abandon()

    def _record(self, name: str) -> Record:
        record = self._records.get(name)
        if record is None:
            raise UsageError(f"put: no tensor '{printable(name)}' in the outlines of this file")
        return record

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._out.__exit__(kind, error, tb)


def plain_array(name: str, x: Any) -> Array:
    """``x`` as a numpy or CuPy array, which shares the memory of a torch tensor; UsageError for anything else."""
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(unmasked(x))
    if is_cupy(x):
        return x
    if is_torch(x) and str(x.layout) == "torch.strided":
        try:
            return torch_to_array(x)
        except UsageError as e:
            raise e.at(tensor=name) from None
    kind = f"{type(x).__module__}.{type(x).__name__}"
    what = f"expected a Format, or an array of numpy, CuPy or torch, got {kind}"
    raise UsageError(f"{what}; use convert(x, 'csr') for a matrix, a numpy array for anything else", tensor=name)
