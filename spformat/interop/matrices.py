"""Matrices from ``.smtx``, ``.mtx`` (Matrix Market) and ``.npz`` files, as ordered CSR.

Matrix Market files are checked by hand before SciPy reads them, because ``scipy.io.mmread`` of SciPy 1.17 accepts
malformed numbers and may crash on malformed files; the checks can go when a release without these errors is the floor.
"""

from __future__ import annotations

import io
import re
from pathlib import PurePath
from typing import Any

import numpy as np

from ..arrays.dtypes import VALUE_TYPES
from ..arrays.library import Array, index_dtype
from ..arrays.rounding import rounded
from ..arrays.segments import rows_of
from ..errors import FormatError, IndexBoundsError, OrderError, SpformatError, UsageError, printable
from ..formats.csr import CSR
from ..formats.declare import MAX_DIMENSION
from ..formats.foreign import from_blocks
from ..limits import check_bytes
from ..storage import files
from . import npz
from .smtx import LARGEST, ROW_BYTES, check_reading, filled, ordered, read_smtx


def read_matrix(path: files.Path, *, values: str | None = None, seed: int = 0, dtype: Any = None) -> CSR:
    """The matrix of a file, chosen by suffix; stored zeros are kept, columns sorted, repeated entries refused.

    path: ``.smtx``; ``.mtx`` (coordinate or array, real, integer or pattern; symmetry is mirrored); ``.npz`` of
        scipy.sparse.save_npz (csr, csc, coo; bsr without the zeros in its blocks), or with arrays ``shape``,
        ``indptr``, ``indices`` and perhaps ``data``.
    values: None keeps the values of the file, and gives ones where it has none; "ones" or "normal" (drawn from
        ``seed``) replaces them.
    dtype: None keeps the type of the file (float32 for patterns, float64 for other integers than int8). Else values
        are rounded to it; a finite value that would become infinite or NaN, or an inexact int8, is refused.

    Raises UsageError (suffix, parameters, values that do not fit), InputError (no regular file), LimitError,
    FormatError or its PointerError, IndexBoundsError, OrderError (contents).
    """
    path = files.path_text(path)
    suffix = PurePath(path).suffix.lower()
    if suffix == ".smtx":
        return read_smtx(path, values=values or "ones", seed=seed, dtype=dtype or "float32")
    readers = {".mtx": _read_mtx, ".npz": _read_npz}
    if suffix not in readers:
        raise UsageError(f"matrix file: expected a name in .smtx, .mtx or .npz, got {path!r}", value=suffix)
    content = files.read_small(path, LARGEST)
    try:
        a = readers[suffix](content)
        if values is not None:
            data = filled(a.nnz, values=values, seed=seed, dtype=dtype or "float32")
        else:
            data = a.data if dtype is None else rounded(a.data, dtype)
        return a.with_arrays(data=data).validate()
    except SpformatError as e:
        if isinstance(e, OrderError) and "sum_duplicates" not in e.message:  # in order it is by now
            e.message += "; repeated entries are never summed silently: a.sum_duplicates() of scipy does, then save a"
        raise e.at(path=path) from None


# ---------------------------------------------------------------------------------------------------- Matrix Market


_BANNER = re.compile(rb"%%MatrixMarket\s+matrix\s+(\w+)\s+(\w+)\s+([\w-]+)\s*", re.IGNORECASE)


def _read_mtx(content: bytes) -> CSR:
    from scipy.io import mmread

    # Read here, because the checks need layout, field and symmetry before SciPy reads any of the file.
    banner = _BANNER.fullmatch(content[: content.find(b"\n") + 1])
    if banner is None:
        raise FormatError("mtx: expected a first line '%%MatrixMarket matrix ..', got " + repr(content[:60]))
    layout, field, symmetry = (g.decode().lower() for g in banner.groups())
    if field == "complex":
        raise FormatError("mtx: expected real, integer or pattern values, got complex")
    start, sizes = _check_declared_size(content, layout, 1 if symmetry == "general" else 2)
    if symmetry != "general" and sizes[0] != sizes[1]:  # SciPy 1.17 would write mirrored values out of bounds
        message = f"mtx: expected a square matrix, as {symmetry} demands, got {sizes[0]} x {sizes[1]}"
        raise FormatError(message)
    _check_lines(content, start, layout, field)
    if layout == "array" and 0 in sizes:  # SciPy 1.17 would divide by zero
        return CSR.from_dense(np.zeros(sizes))
    try:
        # SciPy 1.17 may crash the process if the last line has no newline, and it refuses a plus before a number.
        m: Any = mmread(io.BytesIO(_PLUS.sub(b"", content.rstrip()) + b"\n"), spmatrix=False)
    except (ValueError, OverflowError, TypeError) as e:
        raise FormatError(f"mtx: {e}") from e
    if isinstance(m, np.ndarray):
        return CSR.from_dense(_as_values(m, "mtx"))
    data = m.data.astype(np.float32) if field == "pattern" else m.data  # ones, or -1 for what a skew symmetry mirrors
    return _from_coordinates(m.shape, m.row, m.col, data, "mtx")


_COMMENTS = re.compile(rb"(?:[ \t\r\v\f]*+(?:%[^\n]*+)?\n)*+")
_LONGEST_SIZES = 200
_PLUS = re.compile(rb"\+(?<=\s\+)")
_DECIMAL = rb"[+-]?(?:(?:\d++\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?|(?i:nan|inf(?:inity)?))", "a decimal number"
_VALUES = {
    "integer": (rb"[+-]?\d++", "an integer"),
    "pattern": (b"", "no value"),
}


def _check_lines(content: bytes, start: int, layout: str, field: str) -> None:
    """FormatError unless every line is one whole entry. SciPy 1.17 reads 1.5D+02 as 1.5, and the integer 1.5 as 1."""
    value, what = _VALUES.get(field, _DECIMAL)
    items = [value] if layout == "array" else [rb"\d++", rb"\d++", *filter(None, [value])]
    entry = rb"(?:[ \t]*+" + rb"[ \t]++".join(items) + rb"[ \t]*+|[ \t]*+)\r?(?:\n|\Z)"
    match = re.compile(rb"(?>" + entry + rb")*+").match(content, start)
    end = match.end() if match else start
    if end < len(content):
        line = content[end : end + 80].partition(b"\n")[0]
        expected = what if layout == "array" else f"a row, a column and {what}"
        number = content.count(b"\n", 0, end) + 1
        raise FormatError(f"mtx: line {number}: expected {expected}, got {line.decode('latin-1')!r}")


def _check_declared_size(content: bytes, layout: str, items: int) -> tuple[int, list[int]]:
    """(offset of the first byte after the size line, the numbers in that line).

    items: nonzeros of the matrix for each entry of the file. FormatError if the numbers are larger than the file can
    contain, because SciPy allocates memory by them; LimitError if reading the matrix needs too much memory.
    """
    comments = _COMMENTS.match(content)
    start = comments.end() if comments else 0
    end = content.find(b"\n", start)
    line = content[start : end if end >= 0 else None][:_LONGEST_SIZES]
    start = end + 1 if end >= 0 else len(content)
    try:
        sizes = [int(x) for x in line.split()]
    except ValueError:
        sizes = []
    if len(sizes) != (2 if layout == "array" else 3) or min(sizes) < 0:
        raise FormatError(f"mtx: expected a line of sizes, got {line[:60]!r}")
    entries, least = (sizes[0] * sizes[1], 2) if layout == "array" else (sizes[2], 4)
    # A symmetric array file lists about half of its entries.
    if entries * least > 2 * len(content) + 8:
        raise FormatError(f"mtx: expected room for {entries} entries, got a file of {len(content)} bytes")
    _check_shape(sizes[0], sizes[1], "mtx")
    check_reading(items * entries, 3 * len(content), len(content))  # the text, and two copies for SciPy
    # SciPy does not get such a file (see ``_read_mtx``), so nothing else would notice its values.
    if entries == 0 and layout == "array" and (rest := content[start : start + 80].split()):
        message = f"mtx: expected no values for {sizes[0]} x {sizes[1]}, got {rest[0].decode('latin-1')!r}"
        raise FormatError(message)
    return start, sizes


# --------------------------------------------------------------------------------------------------------------- npz


_LAYOUTS = {
    "csr": ("shape", "indptr", "indices"),
    "csc": ("shape", "indptr", "indices"),
    "coo": ("shape", "row", "col"),
    "bsr": ("shape", "indptr", "indices"),
}
"""Layout -> the arrays that it needs beside the values."""


def _read_npz(content: bytes) -> CSR:
    with npz.opened(content) as archive:
        layout = _layout_of(archive)
        wanted = npz.members(archive, (*_LAYOUTS[layout], "data"))
        missing = [n for n in _LAYOUTS[layout] if n not in wanted]
        if missing:
            names = archive.namelist()
            there = ", ".join(printable(n.removesuffix(".npy"), 40) for n in names[:_NAMED])
            there += ", .." if len(names) > _NAMED else ""
            raise FormatError(
                f"npz: {layout}: array {missing[0]!r} is missing; expected what scipy.sparse.save_npz writes, "
                f"got an archive with {there or 'no arrays'}"
            )
        items = max(wanted[n].size for n in wanted)
        check_reading(items, sum(m.nbytes for m in wanted.values()), len(content))
        arrays = {n: npz.unpack(archive, m) for n, m in wanted.items()}
    shape, first, second = (_integers(arrays[n], n) for n in _LAYOUTS[layout])
    if shape.size != 2:
        raise FormatError(f"npz: shape: expected two numbers, got {shape.size}")
    M, K = (int(v) for v in shape)
    data = arrays.get("data", np.ones(second.size, np.float32))
    if layout == "bsr":
        return _from_blocks((M, K), first, second, data)
    if data.shape != second.shape:
        raise FormatError(f"npz: data: expected {second.size} values, got shape {data.shape}")
    if layout == "coo":
        return _from_coordinates((M, K), first, second, data, "npz")
    _check_shape(M, K, "npz")
    major, minor = (M, K) if layout == "csr" else (K, M)
    a = CSR(
        shape=(major, minor),
        indptr=_narrow(first, second.size),
        indices=_narrow(second, minor - 1),
        data=_as_values(data, "npz"),
    )
    if layout == "csr":
        return ordered(a)
    a.check_memory()
    return _from_coordinates((M, K), second, rows_of(a.indptr, a.nnz), a.data, "npz")


_NAMED = 8
"""The most members of an archive that an error message lists."""


def _layout_of(archive: Any) -> str:
    """The layout that the archive names; csr if it names none."""
    named = npz.members(archive, ("format",)).get("format")
    if named is None:
        return "csr"
    if named.size != 1 or named.dtype.kind not in "SU" or named.nbytes > 64:
        raise FormatError(f"npz: format: expected one word, got {named.dtype} of shape {named.shape}")
    value = npz.unpack(archive, named).item()
    layout = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
    if layout not in _LAYOUTS:
        raise FormatError(f"npz: expected format csr, csc, coo or bsr, got {layout!r}; save a.tocsr() instead")
    return layout


def _integers(a: Array, name: str) -> Array:
    if a.dtype.kind not in "iu" or a.ndim != 1:
        raise FormatError(f"npz: {name}: expected integers in one dimension, got {a.dtype} of shape {a.shape}")
    return a


# ------------------------------------------------------------------------------------------------------------ border


def _check_shape(M: int, K: int, where: str) -> None:
    if not (0 <= M <= MAX_DIMENSION and 0 <= K <= MAX_DIMENSION):
        raise FormatError(f"{where}: shape: expected dimensions in 0 .. 2^48-1, got ({M}, {K})")
    check_bytes(ROW_BYTES * (M + 1), f"{where}: row pointer of {M} rows")


def _narrow(a: Array, bound: int) -> Array:
    """``a`` in the index type for ``bound``. A number that does not fit becomes -1, which validation refuses."""
    dtype = index_dtype(bound)
    return np.where((a < 0) | (a > np.iinfo(dtype).max), -1, a).astype(dtype)


def _from_coordinates(shape: tuple[int, int], rows: Array, cols: Array, data: Array, where: str) -> CSR:
    """An ordered CSR from coordinates in any order; IndexBoundsError or OrderError for wrong or repeated ones."""
    M, K = (int(v) for v in shape)
    _check_shape(M, K, where)
    if not rows.shape == cols.shape == data.shape or rows.ndim != 1:
        raise FormatError(
            f"{where}: expected as many rows as columns and values, got {rows.size}, {cols.size}, {data.size}"
        )
    for name, index, size in (("row", rows, M), ("column", cols, K)):
        if index.size and (int(index.min()) < 0 or int(index.max()) >= size):
            raise IndexBoundsError(
                f"{where}: expected {name} indices in 0 .. {size - 1}, got {index.min()} .. {index.max()}", array=name
            )
    values = _as_values(data, where)
    return CSR.from_coordinates((M, K), rows.astype(np.int64), cols.astype(np.int64), values).validate()


def _from_blocks(shape: tuple[int, int], indptr: Array, indices: Array, data: Array) -> CSR:
    """An ordered CSR of the nonzeros in the blocks of a scipy bsr, which must tile the matrix."""
    _check_shape(*shape, "npz")
    if data.ndim != 3 or len(data) != indices.size:
        raise FormatError(f"npz: data: expected {indices.size} blocks, got shape {data.shape}")
    R, C = data.shape[1:]
    if not (R and C) or shape[0] % R or shape[1] % C:
        raise FormatError(f"npz: data: expected blocks that tile {shape}, got {R} x {C}")
    return from_blocks(shape, indptr, indices, _as_values(data, "npz")).to_csr()


def _as_values(data: Array, where: str) -> Array:
    """``data`` in a value type without loss: bool as float32, integers as float64."""
    if data.dtype.kind == "b":
        return data.astype(np.float32)
    if data.dtype.kind in "iu" and data.dtype != np.int8:
        exact = data.astype(np.float64)
        if data.size and max(-int(data.min()), int(data.max())) > 2**53:
            raise FormatError(f"{where}: expected integers up to 2^53, which float64 holds, got larger ones")
        return exact
    if data.dtype.name not in VALUE_TYPES:
        raise FormatError(
            f"{where}: values of dtype {data.dtype} are not representable; use one of {', '.join(VALUE_TYPES)}"
        )
    return data if data.dtype.isnative else data.astype(data.dtype.newbyteorder("="))
