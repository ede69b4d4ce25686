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

ITEM_BYTES, ROW_BYTES = 80, 24
"""Bytes of memory for each item and each row of a matrix while it is read: positions as int64, a sorted copy, a
permutation. 38 to 97 for an item were measured, by file type (2026-11-22, tracemalloc, 10^6 items)."""

_HEADER = re.compile(rb"\s*(\d{1,15})\s*,\s*(\d{1,15})\s*,\s*(\d{1,15})\s*")
_LONGEST_HEADER = 200
_BLANK = re.compile(rb"\s*+")
_LINE = b"\n"
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
    """The pattern of ``a`` (stored zeros count as items); its values are not written.

    path: ``overwrite`` replaces a file that is there. UsageError for another format, OutputError, WriteError.
    """
    if not isinstance(a, CSR):
        raise UsageError(f"smtx: expected a CSR, got {type(a).__name__}; use convert(x, 'csr')")
    a = a.ensure_valid().to("cpu")
    M, K = a.shape
    lines = (f"{M}, {K}, {a.nnz}", " ".join(map(str, a.indptr.tolist())), " ".join(map(str, a.indices.tolist())))
    output.publish(path, ("\n".join(lines) + "\n").encode(), overwrite=overwrite)


def check_reading(items: int, beside: int, given: int) -> None:
    """LimitError if reading a matrix of so many items needs more memory than the budget allows.

    beside: bytes that are in memory beside the items: the text, or unpacked arrays. given: bytes of the file.
    """
    check_bytes(beside + ITEM_BYTES * items, f"reading a matrix of {items:,} items", given)


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
    # Not split at once: a file of line breaks alone would become a list much larger than the file.
    ends = [len(text)] * 3
    for i in range(3):
        end = text.find(b"\n", ends[i - 1] + 1 if i else 0)
        ends[i] = end if end >= 0 else len(text)
    header = _HEADER.fullmatch(text, 0, min(ends[0], _LONGEST_HEADER))
    if header is None or ends[0] == len(text) or ends[1] == len(text) or not _BLANK.fullmatch(text, ends[2]):
        raise FormatError(
            "smtx: expected three lines (rows, columns, nnz / row offsets / columns), got "
            + (f"{text.count(_LINE) + 1} lines" if header else f"a first line {text[: min(ends[0], 60)]!r}")
        )
    M, K, nnz = (int(x) for x in header.groups())
    check_reading(min(M + nnz, len(text)), 2 * len(text), len(text))
    if max(M, K) * vector_length > MAX_DIMENSION:
        raise FormatError(f"smtx: shape: expected dimensions up to 2^48-1, got ({M}, {K})")
    indptr = _numbers(text[ends[0] + 1 : ends[1]], "row offsets", M + 1)
    indices = _numbers(text[ends[1] + 1 : ends[2]], "columns", nnz)
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
