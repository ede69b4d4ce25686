"""The base class of all formats: a frozen value of ``shape``, params, tables and declared arrays.

The O(1) check at construction, the file layout, copies between devices, ``nbytes``, ``repr``, the table in the docs and
the tests all follow from the declaration of the arrays. A format implements ``_from_csr``, ``_to_csr``, ``dims``,
``check_memory`` and ``check_canonical``; everything else is inherited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ..arrays.dtypes import dtype_name, nonzero_mask
from ..arrays.library import Array, current_device, namespace, on_boundary, parse_device, to_device
from ..errors import ArrayError, StructureError, UsageError
from ..limits import always_allowed, check_bytes, product
from . import edges
from .array_methods import ArrayMethods
from .checking import Checked
from .declare import (
    AUTO,
    INDEX,
    POS,
    VALUE,
    RowChunks,
    array,
    param,
    parse_shape,
    parse_table,
    table,
)
from .dense_input import checked_values
from .fields import Derived, Fields
from .hooks import Hooks
from .kernel_order import KernelArrays, KernelOrdered
from .refill import Refill

if TYPE_CHECKING:
    from .csr import CSR
    from .transposed import Transposed

__all__ = ["AUTO", "INDEX", "POS", "VALUE", "Format", "RowChunks", "array", "checked_values", "param", "table"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class Format(Checked, KernelOrdered, Hooks, Fields, ArrayMethods, Refill):
    """Base of every format. ``shape`` is always the logical (M, K); padding is derived, never stored.

    Construction checks params, dtypes, ranks and lengths in O(1) and raises ``ArrayError``;
    ``validate()`` scans contents. Arrays are C-contiguous and all on one device; one that does not start on a 16-byte
    boundary there is copied (``aligned``).
    """

    name: ClassVar[str]
    rank: ClassVar[int] = 2
    keeps_stored_zeros: ClassVar[bool] = False
    keeps_negative_zeros: ClassVar[bool] = False
    aligned: ClassVar[bool] = True
    paper: ClassVar[str] = ""
    __array_ufunc__: ClassVar[None] = None  # else numpy would wrap the matrix in an array for ``x @ a`` and ``x == a``
    # These are set by modules that import this one: the hub (csr.py), ``T``, scipy, torch, ``spmm``, ``smallest``, the
    # picture that notebooks show.
    hub: ClassVar[type[CSR]]
    to_scipy: ClassVar[Callable[[Any], Any]]
    to_torch: ClassVar[Callable[[Any], Any]]
    __matmul__: ClassVar[Callable[[Any, Any], Any]]
    __rmatmul__: ClassVar[Callable[[Any, Any], Any]]
    smallest: ClassVar[Callable[[Any], str]]
    _repr_html_: ClassVar[Callable[[Any], str]]
    if TYPE_CHECKING:

        @property
        def T(self) -> Transposed:  # noqa: N802 - numpy's name
            """The transpose [K, M], a view."""

    shape: tuple[int, int]
    _marked: bool = dataclasses.field(default=False, init=False, repr=False)
    # Plans of products with this matrix, and arrays that kernels derive from its arrays; both are freed with it.
    _plans: Derived = dataclasses.field(default_factory=Derived, init=False, repr=False)
    _kernel_arrays: KernelArrays = dataclasses.field(default_factory=KernelArrays, init=False, repr=False)

    # ---------------------------------------------------------------- construction

    @classmethod
    def accepts(cls, dtype: Any) -> None:
        """StructureError if this format cannot represent values of ``dtype``."""
        if not isinstance(dtype, np.dtype):
            dtype = np.dtype(dtype)
        name = dtype_name(dtype)
        if name not in cls.value_dtypes:
            takes = ", ".join(cls.value_dtypes)
            message = f"{cls.name}: values of dtype {name} are not representable; it takes {takes}"
            raise StructureError(message, unit="dtype", found=name)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "shape", parse_shape(self.name, self.shape, self.rank))
        if self.declared_params():
            for key, value in self.resolve_params(self.params()).items():
                put(self, key, value)
        for key, _ in self.declared_tables():
            put(self, key, parse_table(self.name, key, getattr(self, key)))
        problems = self.layout_problems()
        if problems:
            raise ArrayError(f"{self.name}: " + "; ".join(text for _, text in problems), array=problems[0][0] or None)
        if self.aligned:
            for name, a in self.arrays().items():
                placed = on_boundary(a)
                if placed is not a:
                    put(self, name, placed)

    @classmethod
    def trusted(cls, **fields: Any) -> Self:
        """Construct an object and mark it as validated without a scan: for converters. The contents must be valid."""
        f = cls(**fields)
        object.__setattr__(f, "_marked", True)
        return f

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """``trusted`` without the checks of types and lengths: for an edge whose kernels have written all arrays.

        The caller gives every field (``shape`` and params in their stored types, arrays that start on a boundary), and
        the law that compares conversions with the general code compares every field. The checks of ``trusted`` take
        the host longer than a kernel takes a small matrix.
        """
        f, put = object.__new__(cls), object.__setattr__
        for name, value in fields.items():
            put(f, name, value)
        put(f, "_marked", True)
        put(f, "_plans", Derived())
        put(f, "_kernel_arrays", KernelArrays())
        return f

    # ---------------------------------------------------------------- reading

    def parts_by_name(self) -> dict[str, Format]:
        """Name -> part, as a file names them; empty unless the format is composed."""
        return {}

    @classmethod
    def fields_of_parts(cls, parts: dict[str, Format]) -> dict[str, Any]:
        """The constructor's arguments for ``parts_by_name``; UsageError for missing or other names."""
        if parts:
            raise UsageError(f"{cls.name}: expected no parts, got {', '.join(parts)}")
        return {}

    def all_arrays(self) -> dict[str, Array]:
        """Path -> array: "data" for an array of this object, "0.data" for an array of part "0"."""
        below = {f"{name}.{path}": a for name, p in self.parts_by_name().items() for path, a in p.all_arrays().items()}
        return self.arrays() | below

    def fields(self) -> dict[str, Any]:
        """The arguments with which the constructor gives an equal object."""
        own = {"shape": self.shape, **self.params(), **self.tables(), **self.arrays()}
        return own | self.fields_of_parts(self.parts_by_name())

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(M, K); UsageError for a format that is no matrix and cannot be multiplied."""
        return self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        own = sum(product(dtype.itemsize, *shape) for dtype, shape in self.array_layout().values())
        return own + sum(part.nbytes for part in self.parts_by_name().values())

    @property
    def nnz(self) -> int:
        """The number of values that are not zero: a scan, unless the format stores only nonzeros."""
        return self.count_nonzeros()

    def count_nonzeros(self) -> int:
        """The number of values that are not zero: a scan."""
        with current_device(self.values):
            return int(nonzero_mask(self.values).sum())  # synchronize!

    @property
    def stored_zeros(self) -> int:
        """The number of zeros that are stored explicitly (not as padding): a scan. 0 for formats that drop them."""
        return 0

    @property
    def density(self) -> float:
        """nnz / (M*K); 0 for an empty matrix."""
        size = self.shape[0] * self.shape[1]
        return self.nnz / size if size else 0.0

    def __repr__(self) -> str:
        parts = [f"shape={self.shape}", *(f"{k}={v!r}" for k, v in self.params().items())]
        for k, (dtype, shape) in self.array_layout().items():
            parts.append(f"{k}={dtype}[{', '.join(map(str, shape))}]")
        return f"{type(self).__name__}({', '.join(parts)}, device={self.device}, nbytes={self.nbytes})"

    def __eq__(self, other: object) -> bool:
        """Same class, shape, params, tables, dtypes and the same bytes in every array."""
        if self is other:
            return True
        if not isinstance(other, Format) or type(self) is not type(other):
            return NotImplemented
        if (self.shape, self.params(), self.tables()) != (other.shape, other.params(), other.tables()):
            return False
        pairs = zip(self.arrays().values(), other.arrays().values(), strict=True)
        return all(_same_bytes(to_device(a, "cpu"), to_device(b, "cpu")) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Raises TypeError: a matrix is never converted to a dense array implicitly."""
        raise TypeError(f"{self.name}: this is a matrix of spformat, no array; use to_dense()")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fields())

    # ---------------------------------------------------------------- moving

    def with_arrays(self, **arrays: Array) -> Self:
        """The same object with some arrays replaced, not marked as validated. UsageError for other names."""
        fields = {f.name for f in dataclasses.fields(self)}
        if not arrays.keys() <= fields:
            expected = ", ".join(d.name for d in self.declared_arrays()) or "no arrays"
            got = ", ".join(name for name in arrays if name not in fields)
            raise UsageError(f"{self.name}: with_arrays: expected some of {expected}, got {got}")
        return type(self)(**(self.fields() | arrays))

    def to(self, device: str) -> Self:
        """A copy on "cpu", "cuda" or "cuda:<id>", or the object itself if it is there. The validated mark stays."""
        if self.in_kernel_order and parse_device(self.device) == parse_device(device):
            return self
        arrays = self.arrays()
        moved = {k: to_device(a, device) for k, a in arrays.items()}
        if all(moved[k] is a for k, a in arrays.items()):
            return self
        out = self.with_arrays(**moved)
        object.__setattr__(out, "_marked", self._marked)
        return out

    # ---------------------------------------------------------------- converting

    @classmethod
    def from_csr(cls, a: CSR, **params: Any) -> Self:
        """This format from an ordered CSR (columns strictly increasing in every row).

        The result has every value of ``a``. Raises StructureError if the matrix does not fit, UsageError for params out
        of range, OrderError if ``a`` is not ordered (use ``a.canonical()``), LimitError over the memory budget.
        """
        if not isinstance(a, cls.hub):
            raise UsageError(
                f"{cls.name}: from_csr: expected a CSR, got {type(a).__name__}; use convert(x, {cls.name!r})"
            )
        cls.accepts(a.dtype)
        cls.require_converter(**params)
        a.ensure_valid()
        resolved = cls.resolve_params(params, a)
        specs = cls.array_specs(a.shape, a.dtype, a.nnz, resolved)
        if specs is not None:
            needed = sum(product(dtype.itemsize, *shape) for dtype, shape in specs.values())
            if not always_allowed(needed):
                check_bytes(needed, f"{cls.name}: arrays of a matrix of shape {a.shape}", a.nbytes)
        return cls.from_hub(a, resolved)

    @classmethod
    def require_converter(cls, **params: Any) -> None:
        """UsageError, which says what to do instead, if a format has no converter from other formats with these
        params."""

    @classmethod
    def from_hub(cls, a: CSR, params: dict[str, Any]) -> Self:
        """``from_csr`` without its checks: by an edge, or by ``_from_csr``. ``a`` must be ordered, and all params
        given."""
        direct: Self | None = edges.take(cls.hub.name, cls.edge_name(a.dtype), a, params, a.values)
        if direct is not None:
            return direct
        with current_device(a.values):
            return cls._from_csr(a, **params)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        raise NotImplementedError(f"{cls.name} does not implement _from_csr")

    def to_csr(self) -> CSR:
        """The matrix as an ordered CSR on the same device; every stored nonzero has the same bits."""
        self.ensure_valid()  # the conversion uses indices as addresses
        return self.to_hub()

    def to_hub(self) -> CSR:
        """``to_csr`` without its checks: by an edge, or by ``_to_csr``."""
        me = self.restored()
        values = me.values
        direct: CSR | None = edges.take(me.edge_name(values.dtype), me.hub.name, me, {}, values)
        if direct is not None:
            return direct
        with current_device(values):
            return me._to_csr()

    def _to_csr(self) -> CSR:
        raise NotImplementedError(f"{self.name} does not implement _to_csr")

    @classmethod
    def from_dense(cls, x: Array, **params: Any) -> Self:
        """This format from a 2-D array [M, K]; bit for bit the same as by way of CSR."""
        cls.require_converter(**params)
        given = cls.resolve_params(params)
        x = checked_values(x, cls.name)
        cls.accepts(x.dtype)
        return cls.from_values(x, given)

    @classmethod
    def from_values(cls, x: Array, params: dict[str, Any]) -> Self:
        """``from_dense`` without its checks: by an edge, or by ``_from_dense``. x: as ``checked_values`` returns it, of
        a dtype that the format accepts. params: resolved."""
        direct: Self | None = edges.take(edges.DENSE, cls.edge_name(x.dtype), x, params, x)
        if direct is not None:
            return direct
        with current_device(x):
            return cls._from_dense(x, **params)

    @classmethod
    def _from_dense(cls, x: Array, **params: Any) -> Self:
        return cls.from_csr(cls.hub.from_dense(x), **params)

    def to_dense(self) -> Array:
        """A new array [M, K] of the value dtype on the same device. LimitError if it exceeds the memory budget."""
        self.ensure_valid()  # the conversion uses indices as addresses
        self.check_dense_bytes()
        me = self.restored()
        values, (M, K) = me.values, me.shape
        direct = edges.take(me.edge_name(values.dtype), edges.DENSE, me, {}, values, M * K)
        if direct is not None:
            return direct
        with current_device(values):
            return me._to_dense()

    def _to_dense(self) -> Array:
        return self.to_csr().to_dense()

    def empty_dense(self) -> Array:
        """An array [M, K] of +0, after ``check_dense_bytes``."""
        self.check_dense_bytes()
        return namespace(self.values).zeros(self.shape, self.dtype)

    def check_dense_bytes(self) -> None:
        """LimitError if a dense array of this shape exceeds the memory budget; every ``to_dense`` must call this."""
        M, K = self.shape
        needed = M * K * self.dtype.itemsize
        if not always_allowed(needed):
            check_bytes(needed, f"{self.name}: dense array of shape {self.shape}", self.nbytes)


def _same_bytes(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = np.dtype(f"uint{8 * a.dtype.itemsize}")
    return bool((a.view(raw) == b.view(raw)).all())


def _rebuild(cls: type[Format], fields: dict[str, Any]) -> Format:
    if not (isinstance(cls, type) and issubclass(cls, Format)):  # a file that torch.load reads may name anything
        raise UsageError(f"expected a format to unpickle, got {cls!r:.80}")
    return cls(**fields)
