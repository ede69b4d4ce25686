"""``.smtx``: the text format of Sputnik and of Google's DLMC corpus. A pattern without values.

    3, 4, 4          rows, columns, nnz
    0 2 2 4          row offsets: rows + 1 numbers
    0 3 0 2          column of each item, zero-based

vectorSparse and Magicube use the same three lines for *vector rows*: one row of the file stands for
``vector_length`` consecutive rows of the matrix that share their columns.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from ..arrays.dtypes import nonzero_mask, value_type
from ..arrays.library import Array, index_dtype
from ..arrays.segments import rank_in_row, rows_of
from ..errors import FormatError, SpformatError, UsageError
from ..formats.csr import CSR
from ..formats.declare import MAX_DIMENSION
from ..limits import check_bytes
from ..storage import files, output

LARGEST = 4 << 30
"""Bytes of the largest text file that is read."""

_HEADER = re.compile(rb"\s*(\d{1,15})\s*,\s*(\d{1,15})\s*,\s*(\d{1,15})\s*")
_NUMBERS = re.compile(rb"[0-9 \t\r]*")


def read_smtx(
    path: files.Path, *, values: str = "ones", seed: int = 0, dtype: Any = "float32", vector_length: int = 1
) -> CSR:
    """The pattern of a file, with values from ``filled``; columns are sorted.

    Raises InputError (no regular file), FormatError (not these three lines), PointerError, IndexBoundsError or
    OrderError (a column twice in a row), UsageError (parameters).
    """
    if vector_length < 1:
        raise UsageError(f"smtx: vector_length: expected an int >= 1, got {vector_length}", value=vector_length)
    text = files.read_small(path, LARGEST)
    try:
        pattern = ordered(_parse(text, vector_length))
    except SpformatError as e:
        raise e.at(path=os.fspath(path)) from None
    return pattern.with_arrays(data=filled(pattern.nnz, values=values, seed=seed, dtype=dtype)).validate()


def write_smtx(path: files.Path, a: CSR, *, overwrite: bool = False) -> None:
    """The pattern of ``a`` (stored zeros count as items); its values are not written. OutputError, WriteError."""
    a = a.ensure_valid().to("cpu")
    M, K = a.shape
    lines = (f"{M}, {K}, {a.nnz}", " ".join(map(str, a.indptr.tolist())), " ".join(map(str, a.indices.tolist())))
    output.publish(path, ("\n".join(lines) + "\n").encode(), overwrite=overwrite)


def filled(n: int, *, values: str = "ones", seed: int = 0, dtype: Any = "float32") -> Array:
    """Values for a pattern of n items: "ones", or "normal" values drawn with ``seed``. None is zero.

    For int8, normal values are multiplied by 32 and clipped to -127 .. 127. UsageError for another name.
    """
    row = value_type(dtype)
    if values == "ones":
        return np.ones(n, row.numpy)
    if values != "normal":
        raise UsageError(f"values: expected 'ones' or 'normal', got {values!r}", value=values)
    drawn = np.random.default_rng(seed).standard_normal(n)
    if row.name == "int8":
        drawn = np.clip(np.rint(32 * drawn), -127, 127)
    out = drawn.astype(row.numpy)
    out[~nonzero_mask(out)] = 1  # 8-bit types round small draws to zero
    return out


def ordered(a: CSR) -> CSR:
    """``a`` with its columns sorted in every row, stored zeros kept; validated.

    PointerError, IndexBoundsError; OrderError when a row stores a column twice.
    """
    a.check_memory()
    return CSR.from_coordinates(a.shape, a.rows(), a.indices.astype(np.int64), a.data).validate()


def _parse(text: bytes, vector_length: int) -> CSR:
    lines = text.split(b"\n")
    header = _HEADER.fullmatch(lines[0])
    if header is None or len(lines) < 3 or any(line.strip() for line in lines[3:]):
        raise FormatError(
            "smtx: expected three lines (rows, columns, nnz / row offsets / columns), got "
            + (f"{len(lines)} lines" if header else f"a first line {lines[0][:60]!r}")
        )
    M, K, nnz = (int(x) for x in header.groups())
    if max(M, K) * vector_length > MAX_DIMENSION:
        raise FormatError(f"smtx: shape: expected dimensions up to 2^48-1, got ({M}, {K})")
    indptr = _numbers(lines[1], "row offsets", M + 1)
    indices = _numbers(lines[2], "columns", nnz)
    # Clipped before the cast to int32, where a number that is too large could wrap to a legal one.
    a = CSR(
        shape=(M, K),
        indptr=np.minimum(indptr, nnz + 1).astype(index_dtype(nnz)),
        indices=np.minimum(indices, K).astype(index_dtype(K - 1)),
        data=np.ones(nnz, np.int8),
    )
    return _repeat_rows(a, vector_length) if vector_length > 1 else a


def _numbers(line: bytes, what: str, count: int) -> Array:
    """int64[count] of a line of blank-separated numbers."""
    if not _NUMBERS.fullmatch(line):
        raise FormatError(f"smtx: {what}: expected digits and blanks only")
    numbers = np.fromstring(line, dtype=np.int64, sep=" ") if line.strip() else np.zeros(0, np.int64)
    if numbers.size != count:
        raise FormatError(f"smtx: {what}: expected {count} numbers, got {numbers.size}")
    return numbers


def _repeat_rows(a: CSR, times: int) -> CSR:
    """Every row ``times`` times in succession."""
    a.check_memory()
    check_bytes(a.nnz * times * 8, "smtx: columns of all vector rows")
    counts = np.repeat(np.diff(a.indptr), times)
    indptr = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    rows = rows_of(indptr, int(indptr[-1]))
    indices = a.indices[a.indptr[rows // times] + rank_in_row(indptr, rows)]
    return CSR(
        shape=(a.shape[0] * times, a.shape[1]),
        indptr=indptr.astype(index_dtype(indices.size)),
        indices=indices,
        data=np.ones(indices.size, a.dtype),
    )
