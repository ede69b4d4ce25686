"""Arrays of a ``.npz`` archive, read in bounded memory and without running anything.

zipfile unpacks a bzip2 or LZMA member in one step, whatever its size, and numpy evaluates the header of an array as
Python text. So only the two methods that numpy writes (stored and deflated) are read, in pieces, and headers are
matched with a pattern.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np

from .. import limits
from ..arrays.library import Array
from ..errors import FormatError, SpformatError, printable
from ..formats.declare import MAX_DIMENSION

_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, OSError, RuntimeError, ValueError)
"""The errors of zipfile for damaged, encrypted (RuntimeError) and unsupported (NotImplementedError) archives."""
_METHODS = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"}
_PIECE = 1 << 20
_LONGEST_HEADER = 10_000
_MOST_DIMENSIONS = 4
_HEADER = re.compile(
    rb"\{\s*'descr'\s*:\s*'(?P<descr>[^'\\]{1,16})'\s*,\s*'fortran_order'\s*:\s*(?P<fortran>True|False)\s*,"
    rb"\s*'shape'\s*:\s*\((?P<shape>[\d\sL,]{0,200})\)\s*,?\s*\}\s*"
)
_DTYPE = re.compile(rb"[<>|=]?(?:\?|[biufcSUV][1-9]\d{0,3})")
_EXTENT = re.compile(r"\s*(\d{1,15})L?\s*")


@dataclass(frozen=True)
class Member:
    """One array of an archive: what its header says, and where it is."""

    info: zipfile.ZipInfo
    header_bytes: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    fortran_order: bool

    @property
    def size(self) -> int:
        """Number of items."""
        return limits.product(*self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@contextmanager
def opened(content: bytes) -> Iterator[zipfile.ZipFile]:
    """The archive; FormatError for any error that zipfile raises in the ``with`` block."""
    # Counted before zipfile lists them, because the list needs much more memory than the archive.
    limits.check("tensors", content.count(b"PK\1\2"), "npz: members of the archive")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield archive
    except SpformatError:
        raise
    except _ERRORS as e:
        raise FormatError(f"npz: not a readable archive: {printable(e)}") from e


def members(archive: zipfile.ZipFile, names: tuple[str, ...]) -> dict[str, Member]:
    """Those of the named arrays that the archive contains. Only their headers are unpacked."""
    there = set(archive.namelist())
    return {n: _member(archive, archive.getinfo(f"{n}.npy")) for n in names if f"{n}.npy" in there}


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    what = f"npz: array '{printable(info.filename)}'"
    if info.compress_type not in _METHODS:
        methods = " or ".join(_METHODS.values())
        raise FormatError(
            f"{what}: expected a member that is {methods}, as numpy and scipy write them, got compression method "
            f"{info.compress_type}; save the matrix again with scipy.sparse.save_npz"
        )
    with archive.open(info) as f:
        magic = f.read(6)
        version = tuple(f.read(2))
        if magic != b"\x93NUMPY" or version not in ((1, 0), (2, 0), (3, 0)):
            raise FormatError(f"{what}: expected the start of a .npy file, version 1 to 3, got {magic!r} {version}")
        wide = 2 if version == (1, 0) else 4
        n = int.from_bytes(f.read(wide), "little")
        if n > _LONGEST_HEADER:
            raise FormatError(f"{what}: header: expected at most {_LONGEST_HEADER:,} bytes, got {n:,}")
        text = f.read(n)
    match = _HEADER.fullmatch(text) if len(text) == n else None
    if match is None:
        raise FormatError(
            f"{what}: header: expected {{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4)}}, with the type of "
            f"plain numbers, got {printable(text.decode('latin-1').strip(), 80)}"
        )
    dtype, shape = _dtype(match["descr"], what), _shape(match["shape"], what)
    member = Member(info, 8 + wide + n, dtype, shape, match["fortran"] == b"True")
    if member.header_bytes + member.nbytes != info.file_size:
        got = f"{info.file_size - member.header_bytes:,} bytes"
        raise FormatError(f"{what}: expected {member.nbytes:,} bytes of {member.dtype} {member.shape}, got {got}")
    return member


def _dtype(descr: bytes, what: str) -> np.dtype[np.generic]:
    if b"O" in descr:
        raise FormatError(f"{what}: expected numbers, got Python objects, which are never unpickled")
    try:
        if _DTYPE.fullmatch(descr):
            return np.dtype(descr.decode("ascii"))
    except TypeError:
        pass
    raise FormatError(f"{what}: header: expected a type of plain numbers, got '{printable(descr.decode('latin-1'))}'")


def _shape(text: bytes, what: str) -> tuple[int, ...]:
    parts = text.decode("ascii").rstrip().removesuffix(",").split(",") if text.strip() else []
    extents = [_EXTENT.fullmatch(part) for part in parts]
    shape = tuple(int(e[1]) for e in extents if e is not None)
    if len(shape) != len(parts) or len(shape) > _MOST_DIMENSIONS or max(shape, default=0) > MAX_DIMENSION:
        raise FormatError(
            f"{what}: header: expected up to {_MOST_DIMENSIONS} extents, got ({printable(text.decode())})"
        )
    return shape


def unpack(archive: zipfile.ZipFile, member: Member) -> Array:
    """The array. The caller has checked its size against the budget."""
    raw, at = np.empty(member.nbytes, np.uint8), 0
    with cast(zipfile.ZipExtFile, archive.open(member.info)) as f:
        _skip(f, member.header_bytes)
        while piece := f.read1(_PIECE):
            if at + len(piece) > raw.size:
                raise FormatError(
                    f"npz: array '{printable(member.info.filename)}': expected {raw.size:,} bytes, got more"
                )
            raw[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
    if at != raw.size:
        raise FormatError(f"npz: array '{printable(member.info.filename)}': expected {raw.size:,} bytes, got {at:,}")
    return raw.view(member.dtype).reshape(member.shape, order="F" if member.fortran_order else "C")


def _skip(f: zipfile.ZipExtFile, n: int) -> None:
    while n and (piece := f.read(n)):
        n -= len(piece)
