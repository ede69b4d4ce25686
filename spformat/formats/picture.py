"""A matrix as a small picture: where its nonzeros are. Notebooks show it with a table (``_repr_html_``)."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from typing import Any

import numpy as np

from ..arrays.library import Array, current_device, namespace, to_device
from ..arrays.segments import cells_of, counts_of
from ..errors import SpformatError
from ..limits import product
from .base import Format
from .csr import CSR

CELLS = 96
"""Most cells of a map along each side."""
MOST_STORED = 1 << 26
"""Stored values up to which a notebook shows a map; beyond, it would take seconds that nobody asked for."""
_SHOWN = 192
"""Pixels of the longer side on the screen."""
_PALE, _DARK = np.array([214, 230, 244]), np.array([8, 40, 98])
"""Colours of a cell with a single value and of a full one; an empty cell is white."""


def density_map(a: CSR, most: int = CELLS) -> np.ndarray[Any, Any]:
    """float64[h, w] on the host: share of nonzeros in each cell of an even grid; h = min(M, most), w = min(K, most).

    a: a valid CSR on any device; only the counts of the cells are copied from it. O(nnz).
    """
    (M, K), xp = a.shape, namespace(a.data)
    h, w = min(M, most), min(K, most)
    if not h or not w:
        return np.zeros((h, w))
    with current_device(a.data):
        a = a.without_zeros()
        cell = _scaled(a.rows(), h, M) * w + _scaled(a.indices.astype(np.int64), w, K)
        counts: Any = to_device(counts_of(cell, h * w) if a.nnz else xp.zeros(h * w, np.int64), "cpu")
    extents = [np.diff([-(-i * size // n) for i in range(n + 1)]).astype(np.float64) for n, size in ((h, M), (w, K))]
    shares: np.ndarray[Any, Any] = counts.reshape(h, w) / np.outer(*extents)
    return shares


def block_fill(a: CSR, size: int = 32, classes: int = 10) -> list[int]:
    """How many nonempty size x size blocks of a host CSR have up to 10 %, 20 %, .. 100 % of their places filled."""
    a = a.without_zeros()
    counts, _ = cells_of(a.rows(), a.indices, a.shape, (size, size))
    filled = np.minimum((counts * classes - 1) // (size * size), classes - 1)
    return counts_of(filled, classes).tolist()  # type: ignore[no-any-return]


def _scaled(index: Array, cells: int, size: int) -> Array:
    return index * cells // size


def png(shares: np.ndarray[Any, Any]) -> bytes:
    """A PNG file with one pixel for each cell of a map: white without nonzeros, the fullest cell darkest."""
    tone = np.sqrt(shares / max(float(shares.max(initial=0)), 1e-300))[..., None]
    pixels = np.where(shares[..., None] > 0, _PALE + (_DARK - _PALE) * tone, 255).astype(np.uint8)
    h, w = shares.shape
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)  # filter 0: every byte as it is
    header = struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def image(shares: np.ndarray[Any, Any], shape: tuple[int, int], longest: int = _SHOWN) -> str:
    """An HTML image of a map, with its data inside; "" for a map without cells. shape: of the matrix, (M, K)."""
    if not shares.size:
        return ""
    M, K = shape
    height, width = (max(longest * n // max(M, K), 8) for n in (M, K))
    style = f"width:{width}px;height:{height}px;image-rendering:pixelated;border:1px solid #888;background:#fff"
    data = base64.b64encode(png(shares)).decode()
    return f'<img alt="where the nonzeros are" style="{style}" src="data:image/png;base64,{data}">'


def html_of(a: Format) -> str:
    """What a notebook shows for a matrix: a picture, and a table with format, shape, nonzeros, bytes, arrays, parts.

    On a device the counts are made there, and a few kilobytes copied. A stack, invalid contents, and a matrix of more
    than ``MOST_STORED`` stored values have the table alone.
    """
    dense = product(*a.shape, a.dtype.itemsize)
    rows = [("shape", " x ".join(map(str, a.shape))), ("values", a.dtype.name)]
    picture = ""
    try:
        if len(a.shape) != 2:
            rows.append(("nonzeros", f"{a.count_nonzeros():,}"))
        elif a.stored <= MOST_STORED:
            csr = a.to_csr()
            picture = image(density_map(csr), csr.shape)
            nnz = csr.nnz - csr.stored_zeros
            rows.append(("nonzeros", f"{nnz:,} ({100 * nnz / max(1, product(*a.shape)):.2f} %)"))
    except SpformatError as e:
        rows.append(("contents", str(e)))
    rows += [(key, "x".join(map(str, v)) if isinstance(v, tuple) else str(v)) for key, v in a.params().items()]
    rows.append(("bytes", f"{a.nbytes:,}" + (f" ({a.nbytes / dense:.2f} of dense)" if dense else "")))
    rows.append(("device", a.device))
    layout = a.array_layout().items()
    rows += [(name, f"{dtype} [{', '.join(map(str, shape))}]") for name, (dtype, shape) in layout]
    rows += [(f"part {name}", f"{p.name}, {p.nbytes:,} bytes") for name, p in a.parts_by_name().items()]
    left = 'style="text-align:left"'
    cells = "".join(f"<tr><th {left}>{html.escape(k)}</th><td {left}>{html.escape(text)}</td></tr>" for k, text in rows)
    table = f"<div><b>{html.escape(type(a).__name__)}</b><table>{cells}</table></div>"
    return f'<div style="display:flex;gap:16px;align-items:flex-start">{picture}{table}</div>'


Format._repr_html_ = html_of
