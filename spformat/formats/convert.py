"""convert(x, target): any matrix into any format, exactly or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar, overload

import numpy as np

from ..arrays.dtypes import value_type
from ..arrays.library import Array, array_of, is_cupy, unmasked
from ..arrays.rounding import rounded
from ..arrays.torch_tensors import is_torch
from ..errors import UsageError
from . import (
    BSR,
    COO,
    CSC,
    CSR,
    DBSR,
    SRBCRS,
    Bitmask,
    ELLBuckets,
    Stack,
    TwoFour,
    VectorNM,
    edges,
    parse_spec,
    usual_target,
)
from .base import Format, checked_values
from .declare import REQUIRED
from .dense import Dense
from .foreign import as_format, from_scipy, from_torch

F = TypeVar("F", bound=Format)


@overload
def convert(x: Any, target: type[F], *, dtype: Any = None, **params: Any) -> F: ...
@overload
def convert(x: Any, target: Literal["csr"], *, dtype: Any = None, **params: Any) -> CSR: ...
@overload
def convert(x: Any, target: Literal["csc"], *, dtype: Any = None, **params: Any) -> CSC: ...
@overload
def convert(x: Any, target: Literal["coo"], *, dtype: Any = None, **params: Any) -> COO: ...
@overload
def convert(x: Any, target: Literal["bsr"], *, dtype: Any = None, **params: Any) -> BSR: ...
@overload
def convert(x: Any, target: Literal["dbsr"], *, dtype: Any = None, **params: Any) -> DBSR: ...
@overload
def convert(x: Any, target: Literal["two-four", "2:4"], *, dtype: Any = None, **params: Any) -> TwoFour: ...
@overload
def convert(x: Any, target: Literal["bitmask"], *, dtype: Any = None, **params: Any) -> Bitmask: ...
@overload
def convert(x: Any, target: Literal["vector-nm"], *, dtype: Any = None, **params: Any) -> VectorNM: ...
@overload
def convert(x: Any, target: Literal["sr-bcrs"], *, dtype: Any = None, **params: Any) -> SRBCRS: ...
@overload
def convert(x: Any, target: Literal["ell-buckets"], *, dtype: Any = None, **params: Any) -> ELLBuckets: ...
@overload
def convert(x: Any, target: Literal["dense"], *, dtype: Any = None, **params: Any) -> Dense: ...
@overload
def convert(x: Any, target: str, *, dtype: Any = None, **params: Any) -> Format: ...
def convert(x: Any, target: str | type[Format], *, dtype: Any = None, **params: Any) -> Format:
    """``x`` in the format ``target``, on the device where ``x`` is.

    x: any spformat object, numpy or CuPy array [M, K], scipy.sparse, torch tensor.
    target: a format id, with params if you like ("bsr", "bsr:blocksize=64x64", "vector-nm:n=2,m=4"), or a class;
        "2:4" is two-four, and "auto" the smallest exact format of a host matrix.
    dtype: round the values to this type first; without it, other types than the value types are refused. A finite value
        beyond the type, or one that int8 does not hold exactly, is refused, and so are arrays of anything but booleans,
        integers and floats.
    params: the parameters of the format; they override those in the text. Those that are not given are the usual ones,
        also for an ``x`` of this format; n and m of vector n:m are those that ``x`` has.

    The result has every value of ``x`` with its bits; only -0.0 may become +0.0. Returns ``x`` itself if it has that
    format already, and the parameters that are given. Raises StructureError, which says why, if the format cannot
    represent ``x``; UsageError for an unknown format or a parameter out of range.
    """
    plain = dtype is None and target != "auto" and (isinstance(x, np.ndarray) or is_cupy(x))
    if plain:  # an array as it is: without a Dense around it, whose checks ``from_dense`` repeats
        x = checked_values(x, Dense.name)
    a: Format | None = None if plain else as_format(x) if dtype is None else _rounded(x, dtype)
    text = target if type(target) is str and target != "auto" and not params else ""
    own = a is not None and text.partition(":")[0] == a.name  # it may be the result as it is
    usual = usual_target(text) if text and not own else None
    if usual is not None and a is None:
        usual[0].accepts(x.dtype)
        return usual[0].from_values(x, usual[1])
    if usual is not None and type(a) is not usual[0]:
        fmt, given = usual
    else:
        if isinstance(target, type) and issubclass(target, Format) and target is not Format:
            fmt, given = target, params
        else:
            fmt, in_text = parse_spec(a.smallest() if a is not None and target == "auto" else str(target))
            given = in_text | params
        if type(a) is fmt:  # what must be given otherwise, a matrix of this format has
            has = a.params()
            given = {d.name: has[d.name] for d in fmt.declared_params() if d.default is REQUIRED} | given
        fmt.resolve_params(given)  # before they are passed on: one may be named as an argument is, like "x"
    if a is None:
        fmt.accepts(x.dtype)
        return fmt.from_dense(x, **given)
    if type(a) is fmt:
        a.ensure_valid()
        resolved = fmt.resolve_params(fmt.changed_params(a.params(), given))
        if resolved == a.params():
            return a
    fmt.accepts(a.dtype)
    if isinstance(a, Dense):
        return fmt.from_dense(a.data, **given)
    if fmt is Dense:
        fmt.resolve_params(given)
        return Dense.from_dense(a.to_dense())
    direct = _by_edge(a, fmt, given)
    return fmt.from_csr(a.to_csr(), **given) if direct is None else direct


def _by_edge(a: Format, fmt: type[Format], given: dict[str, Any]) -> Format | None:
    """``a`` in the format ``fmt`` by an edge between these two; None if there is none, and the way leads through CSR.

    Edges from CSR and to CSR are left to ``from_csr`` and ``to_csr``.
    """
    if fmt is CSR or type(a) is CSR:
        return None
    source, target = a.edge_name(a.dtype), fmt.edge_name(a.dtype)
    if not edges.find(source, target, a.resident()):
        return None
    a = a.ensure_valid().restored()  # the conversion uses indices as addresses
    fmt.require_converter(**given)
    direct: Format | None = edges.take(source, target, a, fmt.resolve_params(given), a.values)
    return direct


def stack(
    matrices: Stack | Array | Iterable[Any], target: str | type[Format] = "", *, dtype: Any = None, **params: Any
) -> Stack:
    """The stack of matrices, each converted as by ``convert(matrix, target, dtype=dtype, **params)``.

    matrices: an array [E, M, K] with E >= 1, a stack, or several matrices of any kind that ``convert`` takes.
    target: "" leaves spformat matrices as they are, takes arrays as ``Dense``, and matrices of scipy and torch in the
        layout they have. "auto" may give each matrix another format.

    Raises what ``convert`` raises, and ArrayError unless all matrices have one shape, dtype and device.
    """
    if isinstance(matrices, Format) and not isinstance(matrices, Stack):
        raise UsageError(f"stack: expected several matrices, got one ({matrices.name}); use stack([a, b])")
    shape = tuple(getattr(matrices, "shape", (0, 0, 0)))
    if len(shape) != 3:
        raise UsageError(f"stack: expected an array [E, M, K], got shape {shape}")
    if not isinstance(matrices, Iterable):
        raise UsageError(f"stack: expected an array [E, M, K] or several matrices, got {type(matrices).__name__}")
    if target:
        return Stack.from_parts(convert(x, target, dtype=dtype, **params) for x in matrices)
    parts = (as_format(x) if dtype is None else _rounded(x, dtype) for x in matrices)
    return Stack.from_parts(convert(p, type(p), **params) for p in parts)


def _rounded(x: Any, dtype: Any) -> Format:
    """``x`` as a Format with values of ``dtype``."""
    kind = value_type(dtype).numpy
    if hasattr(x, "to_csr"):  # a matrix of ours, or its transpose
        return as_format(x).astype(kind)
    if is_torch(x):
        return from_torch(x, dtype=kind)
    if hasattr(x, "tocsr") and hasattr(x, "format"):
        return from_scipy(x, dtype=kind)
    if isinstance(x, (list, tuple)) or (hasattr(x, "__array__") and not hasattr(x, "__cuda_array_interface__")):
        x = array_of(unmasked(x))
    if isinstance(x, np.ndarray) or is_cupy(x):
        x = rounded(x, kind)
    return as_format(x).astype(kind)
