"""The methods that people know from numpy and scipy.sparse, for every format. Nothing here is done in place."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self, TypeVar

import numpy as np

from ..arrays.dtypes import value_type
from ..arrays.library import Array, current_device, namespace
from ..arrays.rounding import rounded
from ..errors import UsageError
from ..limits import always_allowed, check_bytes

C = TypeVar("C", bound=type)


class ArrayMethods:
    """``copy``, ``astype``, ``toarray``, ``sum``, ``a * 2``, ``a[0:64]``, .. in terms of what a format implements."""

    __slots__ = ()
    ndim: ClassVar[int] = 2

    @property
    def size(self) -> int:
        """``nnz``, the number of nonzeros. That of scipy.sparse also counts the padding of blocks."""
        me: Any = self
        return int(me.nnz)

    def copy(self) -> Self:
        """The same matrix with arrays of its own."""
        me: Any = self
        with current_device(me.values):
            parts = {k: _copied(v) for k, v in me.fields().items()}
        new = type(me).trusted if me.is_validated else type(me)
        return new(**parts)  # type: ignore[no-any-return]

    def toarray(self) -> Array:
        """``to_dense``, by scipy's name."""
        me: Any = self
        return me.to_dense()

    def todense(self) -> Array:
        """``to_dense``, by scipy's other name; an array, not a numpy.matrix."""
        me: Any = self
        return me.to_dense()

    def tocsr(self) -> Any:
        """``to_csr``, by scipy's name."""
        me: Any = self
        return me.to_csr()

    def dot(self, other: Any) -> Any:
        """``self @ other``."""
        me: Any = self
        return me @ other

    def astype(self, dtype: Any) -> Self:
        """The same matrix with its values rounded to another value type; values that become zero are dropped by formats
        that store none.

        StructureError if the format does not take the type; UsageError for a value that is beyond it, or that int8 does
        not hold exactly.
        """
        me: Any = self
        kind = value_type(dtype).numpy
        return self if me.dtype == kind else self._mapped(lambda values: rounded(values, kind))

    def sum(self, axis: int | None = None) -> Any:
        """The sum of all values, or with ``axis`` 0 or 1 that of each column or row; in float64, or int64 of int8.

        LimitError if the sums of all columns or rows exceed the memory budget.
        """
        if axis not in (None, 0, 1, -1, -2):
            raise UsageError(f"sum: expected axis None, 0 or 1, got {axis!r}")
        me: Any = self
        a = me.to_csr()
        with current_device(a.data):
            wide = np.int64 if a.dtype == np.int8 else np.float64
            values = a.data.astype(wide)
            if axis is None:
                return values.sum().item()  # synchronize!
            of_columns = axis in (0, -2)
            length = a.shape[1 if of_columns else 0]
            if not always_allowed(8 * length):
                check_bytes(8 * length, f"sum: {length:,} sums", a.nbytes)
            index = a.indices if of_columns else a.rows()
            return namespace(values).bincount(index, weights=values, minlength=length).astype(wide)

    def __mul__(self, factor: Any) -> Self:
        if not isinstance(factor, numbers.Real) or isinstance(factor, bool):
            what = type(factor).__name__
            raise TypeError(f"* takes a number, got {what}; @ is the product, to_scipy().multiply(x) goes by elements")
        # int8 stays int8 times an integer only, and becomes float64 otherwise, as in numpy.
        whole = isinstance(factor, numbers.Integral)
        me: Any = self
        if isinstance(factor, np.integer) and me.dtype == np.int8 != factor.dtype:  # in int8, products would wrap
            wide = f"{np.result_type(me.dtype, factor.dtype)}, which is no value type"
            fix = "int(factor) stays in int8, astype('float64') * factor does not wrap"
            raise UsageError(f"int8 * {factor.dtype} is {wide}: {fix}")
        return self._mapped(lambda values: values * _number(factor, values.dtype if whole else _real(values.dtype)))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Self:
        if not isinstance(divisor, numbers.Real) or isinstance(divisor, bool):
            raise TypeError(f"/ takes a number, got {type(divisor).__name__}")
        return self._mapped(lambda values: values / _number(divisor, _real(values.dtype)))

    def _no_sum(self, other: Any) -> Any:
        me: Any = self
        raise TypeError(
            f"{me.name}: sums of matrices are not defined: a.to_dense() + x, or a.to_scipy() + b with scipy's matrices"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = _no_sum

    def __neg__(self) -> Self:
        return self._mapped(lambda values: -values)

    def __getitem__(self, rows: Any) -> Self:
        """Consecutive rows of a CSR or BSR: ``a[64:128]``. UsageError for anything else."""
        me: Any = self
        take: Callable[[int, int], Self] | None = getattr(me, "row_range", None)
        consecutive = isinstance(rows, slice) and rows.step in (None, 1)
        try:
            bounds = slice(rows.start, rows.stop).indices(me.shape[0]) if consecutive else None
        except TypeError:  # of texts, or floats
            bounds = None
        if take is None or bounds is None:
            message = f"{me.name}: expected consecutive rows of a CSR or BSR, like a[0:64]; to_scipy() takes any index"
            raise UsageError(message)
        first, last, _ = bounds
        me.ensure_valid()
        with current_device(me.values):
            return take(first, max(first, last))

    def _mapped(self, function: Callable[[Array], Array]) -> Self:
        """The matrix whose values are ``function`` of these; it must map zero to zero."""
        me: Any = self
        if me.name == "dense":
            with current_device(me.data):
                return type(me).from_dense(function(me.data))  # type: ignore[no-any-return]
        a = me.to_csr()
        with current_device(a.data):
            mapped = a.with_arrays(data=function(a.data))
        return type(me).from_csr(mapped.ensure_valid(), **me.params())  # type: ignore[no-any-return]


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which values of ``dtype`` are multiplied with a fraction: their own, or float64 for int8."""
    return np.dtype(np.float64) if dtype == np.int8 else dtype


def _number(x: Any, dtype: np.dtype[Any]) -> Any:
    """The number ``x`` in a value type. UsageError for a finite one that is beyond it."""
    try:
        with np.errstate(all="ignore"):
            number = dtype.type(float(x))
        beyond = math.isfinite(x) and not math.isfinite(number)
    except OverflowError:
        beyond = True
    if beyond:
        fix = "use astype('float32') or astype('float64') first"
        raise UsageError(f"expected a number in the range of {dtype}, got {x!r:.80}; {fix}")
    return number


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return value.copy() if hasattr(value, "copy") else value


def frozen(cls: C) -> C:
    """A class decorator: whoever sets an attribute reads why that is not possible.

    Python 3.11 has an error about ``super()`` instead, for frozen dataclasses with slots.
    """

    def refuse(self: Any, name: str, *value: Any) -> NoReturn:
        what = f"{type(self).__name__} is frozen: {name!r} cannot be changed"
        raise dataclasses.FrozenInstanceError(f"{what}; with_arrays(..), astype(..) and * give a new matrix")

    for method in ("__setattr__", "__delattr__"):
        setattr(cls, method, refuse)
    return cls
