"""What a matrix is beside its contents, as text; and its contents as tensors.

An operator of torch takes tensors, numbers and text. So a matrix goes to it as the text of a ``Description`` and a list
of tensors: the arrays that its format declares, then its tables as int64, then those of its parts. The description
does not depend on the contents, so that a compiled graph is right for other weights of the same kind, too.

A tensor has the dtype of its array, if torch's collectives and compilers know it. The words of ``uint16`` and ``int16``
arrays are passed as bytes, and the last dimension is twice as long.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..arrays.dtypes import SAFETENSORS
from ..arrays.library import Array
from ..arrays.torch_tensors import array_to_torch, torch_to_array
from ..errors import ArrayError, UsageError
from ..formats import by_name
from ..formats.base import VALUE, Format
from ..storage.descriptor import Record

_AS_BYTES = ("uint16", "int16", "uint32", "uint64")
"""dtypes of arrays that torch's collectives or compilers lack."""


@dataclass(frozen=True)
class Component:
    """One tensor of a matrix: an array or a table that its format declares."""

    path: str
    """"data", or "0.data" for an array of part "0"."""
    dtype: str
    """The dtype of the array if the format declares one; "" for values and indices, whose tensor decides."""
    rank: int
    is_values: bool = False
    is_table: bool = False

    @property
    def attribute(self) -> str:
        """The name of the buffer of a module: "weight_data", "weight_0_data"."""
        return "weight_" + self.path.replace(".", "_")

    def tensor(self, a: Array) -> torch.Tensor:
        """The tensor for an array; it shares memory, unless the array is read-only."""
        return array_to_torch(a.view(np.uint8) if self.dtype in _AS_BYTES else a)

    def array(self, t: torch.Tensor) -> Array:
        """The array that shares the memory of a tensor. ArrayError for a tensor that cannot be the array."""
        if t.dim() != self.rank or not t.is_contiguous():
            got = f"shape {tuple(t.shape)}" + ("" if t.is_contiguous() else f" with strides {t.stride()}")
            raise ArrayError(f"{self.path}: expected {self.rank} dimensions in C order, got {got}", array=self.path)
        a = torch_to_array(t.detach())
        if self.dtype in _AS_BYTES and a.dtype == np.uint8:
            width = np.dtype(self.dtype).itemsize
            if a.shape[-1] % width:
                text = f"{self.path}: expected bytes of {self.dtype}, a multiple of {width}, got {a.shape[-1]}"
                raise ArrayError(text, array=self.path)
            a = a.view(self.dtype)
        return a


@dataclass(frozen=True)
class Description:
    """Format, shape, params and parts of a matrix. The dtype is that of its tensors."""

    format: str
    shape: tuple[int, int]
    params: tuple[tuple[str, Any], ...]
    parts: tuple[tuple[str, Description], ...] = ()
    order: int = 0
    """How many tensors hold the matrix in the order of kernels of this process; 0: the tensors are its arrays."""

    @classmethod
    def of(cls, x: Format | Record) -> Description:
        """The description of a matrix, or of a sparse tensor of a file. UsageError for a stack of matrices."""
        parts: Mapping[str, Format | Record]
        if isinstance(x, Format):
            name, (M, K), params, parts = x.name, x.matrix_shape, x.params(), x.parts_by_name()
        elif x.format is not None:
            if x.format.rank != 2:
                raise UsageError(f"expected a matrix, got a {x.format.name} of shape {x.shape}", tensor=x.name)
            name, (M, K), params, parts = x.format.name, x.shape, x.params, x.parts
        else:
            raise UsageError("expected a tensor in a sparse format, got a plain array", tensor=x.name)
        below = tuple((part, cls.of(p)) for part, p in parts.items())
        return cls(name, (M, K), tuple(params.items()), below)

    @property
    def text(self) -> str:
        """The JSON that ``parse`` reads back."""
        return _text(self)

    @property
    def components(self) -> tuple[Component, ...]:
        """The tensors of a matrix of this kind, in the order in which operators take them."""
        return _components(self)

    @property
    def values(self) -> int:
        """The place of the (first) values among the components."""
        return next(i for i, c in enumerate(self.components) if c.is_values)

    def values_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the tensors, in the order of ``components``, that hold values: one for each part that has values."""
        return [t for c, t in zip(self.components, tensors, strict=True) if c.is_values]

    def tensors(self, matrix: Format) -> list[torch.Tensor]:
        """The contents of a matrix of this description, in the order of ``components``, on its device."""
        where = "cpu" if matrix.device == "cpu" else matrix.device
        contents = _contents(matrix)
        return [
            torch.tensor(contents[c.path], dtype=torch.int64, device=where)
            if c.is_table
            else c.tensor(contents[c.path])
            for c in self.components
        ]

    def matrix(self, tensors: Sequence[torch.Tensor]) -> Format:
        """The matrix whose contents are these tensors, not validated; its arrays share their memory.

        Raises ArrayError for tensors that do not fit together, UsageError for another number of them, or for an order
        of kernels, which only the process knows that has it.
        """
        if self.order:
            raise UsageError(
                f"{self.format}: a frozen weight can be multiplied only in its process and where it is, unchanged: "
                "load the layer again, move it, and then call spformat.torch.freeze"
            )
        if len(tensors) != len(self.components):
            wanted = ", ".join(c.path for c in self.components)
            raise UsageError(f"{self.format}: expected {len(self.components)} tensors ({wanted}), got {len(tensors)}")
        contents: dict[str, Any] = {
            c.path: tuple(t.tolist()) if c.is_table else c.array(t)  # synchronize!
            for c, t in zip(self.components, tensors, strict=True)
        }
        return _constructed(self, contents, "")


def empty_tensors(record: Record, device: Any) -> dict[str, torch.Tensor]:
    """Attribute -> uninitialised tensor for every component of a sparse tensor in a file; tables have their values."""
    tensors = {}
    arrays, tables = record.arrays, dict(_tables(record))
    for c in Description.of(record).components:
        if c.is_table:
            tensors[c.attribute] = torch.tensor(tables[c.path], dtype=torch.int64)
            continue
        code, shape = arrays[c.path]
        name = SAFETENSORS[code].name
        if c.dtype in _AS_BYTES:
            name, shape = "uint8", (*shape[:-1], shape[-1] * np.dtype(c.dtype).itemsize)
        tensors[c.attribute] = torch.empty(shape, dtype=getattr(torch, name), device=device)
    return tensors


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Description:
    """The description that was written as ``Description.text``; UsageError for any other text."""
    try:
        return _from_tree(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise UsageError(f"expected the description of a matrix, got {text!r:.200}") from e


@functools.lru_cache(maxsize=4096)
def _text(d: Description) -> str:
    return json.dumps(_tree(d), separators=(",", ":"))


def _tree(d: Description) -> dict[str, Any]:
    tree: dict[str, Any] = {"format": d.format, "shape": d.shape, "params": dict(d.params)}
    if d.order:
        tree["order"] = d.order
    return tree | {"parts": {name: _tree(p) for name, p in d.parts}} if d.parts else tree


def _from_tree(tree: dict[str, Any]) -> Description:
    cls = by_name(tree["format"])
    params = cls.resolve_params(tree["params"])
    if params.keys() - {d.name for d in cls.declared_params()}:  # the rules by which a sum was made are none of it
        raise KeyError("params")
    M, K = tree["shape"]
    parts = tuple((name, _from_tree(p)) for name, p in tree.get("parts", {}).items())
    return Description(cls.name, (int(M), int(K)), tuple(params.items()), parts, int(tree.get("order", 0)))


@functools.lru_cache(maxsize=4096)
def _components(d: Description) -> tuple[Component, ...]:
    if d.order:
        return tuple(Component(f"order_{i}", "", 1, is_values=i == 0) for i in range(d.order))
    return tuple(_walk(d, ""))


def _walk(d: Description, prefix: str) -> Iterator[Component]:
    cls = by_name(d.format)
    for a in cls.declared_arrays():
        dtype = a.kind if a.kind not in ("VALUE", "INDEX", "POS") else ""
        yield Component(prefix + a.name, dtype, len(a.dims), is_values=a.kind == VALUE)
    for name, _ in cls.declared_tables():
        yield Component(prefix + name, "int64", 1, is_table=True)
    for name, part in d.parts:
        yield from _walk(part, f"{prefix}{name}.")


def _contents(matrix: Format, prefix: str = "") -> dict[str, Any]:
    own = {prefix + name: x for name, x in (matrix.arrays() | matrix.tables()).items()}
    for name, part in matrix.parts_by_name().items():
        own |= _contents(part, f"{prefix}{name}.")
    return own


def _tables(record: Record, prefix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from ((prefix + name, values) for name, values in record.tables.items())
    for name, part in record.parts.items():
        yield from _tables(part, f"{prefix}{name}.")


def _constructed(d: Description, contents: Mapping[str, Any], prefix: str) -> Format:
    cls = by_name(d.format)
    names = [a.name for a in cls.declared_arrays()] + [name for name, _ in cls.declared_tables()]
    own = {name: contents[prefix + name] for name in names}
    parts = {name: _constructed(part, contents, f"{prefix}{name}.") for name, part in d.parts}
    return cls(shape=d.shape, **dict(d.params), **own, **cls.fields_of_parts(parts))
