"""Ideal times of the parts of a product; the expected time of a kernel is a weighted sum of them.  No arrays, no GPU.

A function whose name ends in ``_us`` gives the microseconds that a device needs for one part of a product at its full
rate. A kernel multiplies each such time with a constant (an inverse efficiency, at least 0, see ``rates``) and adds
them up. A device with other rates therefore gets other times from the same constants.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ..arrays.library import ceil_div
from .problem import COL, LINE, Operand, Problem, aligned, itemsize
from .roofline import CUDA_32, CUDA_64, TENSOR_16, Device

INDEX = 4
"""Bytes of an index; matrices that need wider ones take more time than is counted here."""
SECTOR = 32
"""Bytes of the smallest piece that a GPU loads from memory or its caches."""
L2 = 50 << 20
"""Bytes of B above which its rows do not all stay in the L2 cache of a large GPU."""


def arithmetic(dtype: str) -> str:
    """The arithmetic that a dense library uses for values of this type."""
    return {4: CUDA_32, 8: CUDA_64}.get(itemsize(dtype), TENSOR_16)


def plain_arithmetic(dtype: str) -> str:
    """The arithmetic of the CUDA cores for values of this type."""
    return CUDA_64 if itemsize(dtype) == 8 else CUDA_32


def memory_us(nbytes: float, device: Device) -> float:
    """Time to read or write so many bytes of memory."""
    return 1e6 * nbytes / device.memory


def cache_us(nbytes: float, device: Device) -> float:
    """Time to load so many bytes from L2 into the multiprocessors, all of them together."""
    return 1e6 * nbytes / device.cache


def product_us(operations: float, kind: str, device: Device) -> float:
    """Time of so many operations (a multiply-add is two) on all multiprocessors together."""
    return 1e6 * operations / device.peak[kind]


def tile_us(rows: int, cols: int, depth: float, kind: str, device: Device) -> float:
    """Time of one multiprocessor for the product of a tile of A [rows, depth] with a tile of B [depth, cols]."""
    return 2e6 * rows * cols * depth * device.processors / device.peak[kind]


def load_us(nbytes: float, device: Device) -> float:
    """Time of one multiprocessor to load so many bytes from L2 while the others load too."""
    return 1e6 * nbytes * device.processors / device.cache


def rounds(tiles: int, at_once: int) -> int:
    """Rounds in which ``tiles`` tiles are computed if ``at_once`` run at a time."""
    return -(-tiles // max(1, at_once))


# ------------------------------------------------------------------ bytes


@functools.lru_cache(maxsize=256)
def operands_bytes(p: Problem) -> int:
    """Bytes of B and C, each once."""
    return p.n * (p.inner * itemsize(p.b_dtype) + p.rows * itemsize(p.out_dtype))


def index_bytes(p: Problem) -> float:
    """Bytes of the indices of A, or of the bits that play their part, by its format."""
    q = p.p
    if p.format == "csr":
        return INDEX * (p.nnz + p.M + 1)
    if p.format == "ell-buckets":  # ``source`` stays unread
        return INDEX * (p.nnz + p.M)
    if p.format in ("bsr", "dbsr"):
        height, width = q["blocksize"]
        blocks: float = p.nnz / (height * width)
        return INDEX * (blocks + ceil_div(p.M, height))
    if p.format == "sr-bcrs":
        length: int = q["vector_length"]
        return INDEX * (p.nnz / length + p.M / length)
    if p.format == "bitmask":
        return p.M * p.K / 8 + INDEX * p.M
    if p.format == "two-four":
        return p.M * p.K / 8
    if p.format == "vector-nm":
        return float(p.nnz / q["vector_length"])
    return 0.0


@functools.lru_cache(maxsize=256)
def stored_bytes(p: Problem) -> float:
    """Bytes of A as its format stores it: values with their padding, and indices; those of all parts of a sum."""
    if p.operands[0].parts:
        return sum(stored_bytes(replace(p, operands=(part, *p.operands[1:]))) for part in p.operands[0].parts)
    if p.format == "dense":
        return p.M * p.K * itemsize(p.a_dtype)
    if p.format == "two-four":
        return p.M * p.K / 2 * itemsize(p.a_dtype) + index_bytes(p)
    return p.nnz * itemsize(p.a_dtype) + index_bytes(p)


def traffic_us(p: Problem, device: Device) -> float:
    """Time to move A, B and C once."""
    return memory_us(stored_bytes(p) + operands_bytes(p), device)


def written_us(p: Problem, device: Device) -> float:
    """Time to write C once more where it is column-major, as some kernels need it; else 0."""
    return memory_us(p.rows * p.n * itemsize(p.out_dtype), device) if p.out_layout == COL else 0.0


def unaligned_us(p: Problem, device: Device) -> float:
    """Time to write C where its lines start anywhere, which some kernels do in several pieces a line; else 0."""
    return 0.0 if out_alignment(p) == LINE else memory_us(p.rows * p.n * itemsize(p.out_dtype), device)


# ------------------------------------------------------------------ lines of B and C


def b_alignment(p: Problem) -> int:
    """The largest of 16, 8, 4, .. bytes that divides the distance between lines of B.

    A line is a row of a row-major operand, or a column of a column-major one. Unless the operand says otherwise it has
    no gaps: a row of B is N values long, and a column K values.
    """
    return _alignment(p.operands[1])


def out_alignment(p: Problem) -> int:
    """The same for C; a single column is contiguous in both layouts."""
    return LINE if p.n == 1 else _alignment(p.out)


def alignment(p: Problem) -> int:
    """The same for B and C together; a vector is contiguous in both layouts."""
    return LINE if p.n == 1 else min(b_alignment(p), out_alignment(p))


def library_alignment(p: Problem) -> int:
    """What cuBLAS chooses a kernel by: ``alignment``, or the largest of 16, 8, 4, .. bytes that divides the length of
    each line of B and C, whichever is less.

    So rows of 1001 values take as long if they start on 16 bytes as if they start anywhere.
    """
    if p.n == 1:
        return LINE
    return min(alignment(p), *(aligned(_along(x) * itemsize(x.dtype)) for x in (p.operands[1], p.out)))


def _alignment(x: Operand) -> int:
    return x.alignment or aligned(_along(x) * itemsize(x.dtype))


def _along(x: Operand) -> int:
    """Values of a line."""
    return x.shape[0] if x.layout == COL else x.shape[1]
