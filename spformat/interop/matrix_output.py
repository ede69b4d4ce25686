"""Matrices to ``.npz``, ``.mtx`` (Matrix Market) and ``.smtx`` files, as other tools read them; ``matrices`` reads."""

from __future__ import annotations

import io
from pathlib import PurePath
from typing import Any

import numpy as np

from ..errors import UsageError
from ..formats import parse_spec
from ..formats.base import Format
from ..formats.bsr import BSR
from ..formats.convert import convert
from ..formats.csr import CSR
from ..formats.foreign import SCIPY_VALUES
from ..storage import files, output
from .smtx import write_smtx

TARGETS = {".npz": ("csr", "csc", "coo", "bsr"), ".mtx": ("csr", "dense"), ".smtx": ("csr",)}
"""Ending of a matrix file -> the formats that it can hold; the first one is chosen by "auto"."""


def target_of(path: files.Path, target: str) -> str:
    """The format in which a matrix goes into the file; UsageError if a file of that kind does not hold ``target``."""
    suffix = PurePath(path).suffix.lower()
    if suffix not in TARGETS:
        raise UsageError(f"matrix file: expected a name in .npz, .mtx or .smtx, got {str(path)!r}", value=suffix)
    takes = TARGETS[suffix]
    if target in ("auto", "keep"):
        return takes[0]
    if parse_spec(target)[0].name not in takes:
        *others, last = takes
        known = f"{', '.join(others)} or {last}" if others else last
        message = f"a {suffix} file holds {known}, not {target}; name a file ending in .safetensors for it"
        raise UsageError(message, path=str(path))
    return target


def check_matrix(path: files.Path, a: Format, *, pattern_only: bool = False) -> None:
    """UsageError for a matrix, in the format of ``target_of``, that ``write_matrix`` does not write into this file."""
    suffix = PurePath(path).suffix.lower()
    if suffix == ".smtx" and not pattern_only and not bool((a.values == 1).all()):
        message = "a .smtx file holds no values: --values ones (pattern_only=True) writes the pattern alone"
        raise UsageError(message, path=str(path))
    if suffix == ".npz" and isinstance(a, BSR) and any(s % b for s, b in zip(a.shape, a.blocksize, strict=True)):
        message = f"a .npz file holds blocks that tile the matrix; {a.blocksize} does not tile {a.shape}"
        raise UsageError(message, path=str(path))


def write_matrix(
    path: files.Path, x: Any, target: str = "auto", *, pattern_only: bool = False, overwrite: bool = False
) -> str:
    """Write one matrix, atomically, and return the dtype of the values in the file.

    path: ends in ``.npz`` (``scipy.sparse.load_npz`` reads it), ``.mtx`` or ``.smtx``.
    x: any matrix that ``convert`` takes. Values of a type that the file cannot hold (16- and 8-bit floats) are
        widened to float32, which holds each of them exactly; Matrix Market has numbers of any precision.
    pattern_only: for ``.smtx``, which holds no values: needed unless every value is 1.

    Raises UsageError (the file cannot hold the matrix), StructureError, OutputError, WriteError.
    """
    path = files.path_text(path)
    suffix = PurePath(path).suffix.lower()
    a = convert(x, target_of(path, target)).to("cpu")
    check_matrix(path, a, pattern_only=pattern_only)
    if suffix == ".smtx":
        assert isinstance(a, CSR)
        write_smtx(path, a, overwrite=overwrite)
        return "pattern"
    if a.dtype.name not in SCIPY_VALUES:
        a = a.with_arrays(data=a.values.astype(np.float32))
    content = io.BytesIO()
    if suffix == ".npz":
        from scipy.sparse import save_npz

        save_npz(content, a.to_scipy())
    else:
        from scipy.io import mmwrite

        # In float64, because a reader takes decimal numbers for float64: the text of a float32 would be another number.
        wide = a if a.dtype == np.int8 else a.with_arrays(data=a.values.astype(np.float64))
        mmwrite(content, wide.to_scipy() if isinstance(wide, CSR) else wide.values, symmetry="general")
    output.publish(path, content.getvalue(), overwrite=overwrite)
    return a.dtype.name
