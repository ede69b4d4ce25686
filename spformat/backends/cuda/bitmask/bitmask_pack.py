"""A dense matrix as a Bitmask on the device: counted and packed in one launch, copied in another.  Kernels:
bitmask_pack.cu."""

from __future__ import annotations

import functools

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime import jit
from ..runtime.expansion import INDEX
from ..runtime.launch import Launch
from ..runtime.offsets import Offsets
from ..runtime.scan_launch import WORDS

SOURCE = "bitmask/bitmask_pack.cu"
THREADS, TILE = 256, 16384
"""Threads of a block and bytes that it takes; the same in flat_tiles.cuh."""
UNIT = 16
ANY_SUM = 2**62
"""The bound of sums whose offsets are int64 whatever they are: fewer kernels to compile."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    values = [_values(size, ptr) for size, ptr in ((1, 4), (2, 4), (2, 8), (4, 4), (8, 8))]
    return (*(_bits(size) for size in WORDS), *values)


def bitmask_from_dense(x: Array) -> tuple[Array, Array, Array]:
    """(indptr [M+1], bitmask uint8[M, ceil(K/8)], data [nnz]) of x [M, K], CuPy, not empty. Waits for their number."""
    import cupy

    (M, K), stream = x.shape, current_stream()
    bitmask = cupy.empty((M, ceil_div(K, 8)), "u1")
    counts = cupy.empty(tiles(x), "u4")
    args = (x.data.ptr, M, K, value_type(x.dtype).zero_mask, bitmask.data.ptr, counts.data.ptr)
    launch_on(x, SOURCE, _bits(x.itemsize), "PqqqPP")((counts.size, 1, 1), stream, *args)
    indptr, data = nonzeros(x, M, K, counts)
    return indptr, bitmask, data


def nonzeros(x: Array, rows: int, length: int, counts: Array) -> tuple[Array, Array]:
    """(indptr [rows+1], data [nnz]): the nonzeros of the first ``rows`` rows of x, CuPy, whose rows have ``length``
    elements. counts: uint32[tiles], those of each tile. Waits for the device once."""
    import cupy

    bound, stream = rows * length, current_stream()
    indptr = cupy.empty(rows + 1, index_dtype(bound))
    offsets = Offsets(counts, ANY_SUM)
    launch = launch_on(x, SOURCE, _values(x.itemsize, indptr.itemsize), "PqqqPPP")
    nnz = offsets.total()  # synchronize!
    if indptr.dtype != index_dtype(nnz):
        launch = launch_on(x, SOURCE, _values(x.itemsize, 4), "PqqqPPP")
        indptr = cupy.empty(rows + 1, index_dtype(nnz))
    data = cupy.empty(nnz, x.dtype)
    mask, starts = value_type(x.dtype).zero_mask, offsets.starts.data.ptr
    args = (x.data.ptr, rows, length, mask, starts, data.data.ptr, indptr.data.ptr)
    launch((counts.size, 1, 1), stream, *args)
    return indptr, data


def tiles(x: Array, elements: int | None = None) -> int:
    """Tiles of the elements of x, or of the first ``elements``; the first tile starts at the boundary before x."""
    size = x.size if elements is None else elements
    return ceil_div(int(x.data.ptr) % UNIT + size * x.itemsize, TILE)


def launch_on(x: Array, source: str, instance: str, signature: tuple[object, ...] | str) -> Launch:
    """The launch of a kernel on the device of x, in blocks of ``THREADS``."""
    return _launch(source, instance, signature, x.device.id)


def current_stream() -> int:
    """The current stream, a cudaStream_t as int."""
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)


@functools.cache
def _launch(source: str, instance: str, signature: tuple[object, ...] | str, device_id: int) -> Launch:
    import cupy

    arch = jit.architecture(int(cupy.cuda.Device(device_id).compute_capability), ())
    return Launch(jit.load(source, instance, arch, device_id), signature, (), THREADS)


def _bits(size: int) -> str:
    return f"bitmask_bits<{WORDS[size]}>"


def _values(size: int, index: int) -> str:
    return f"bitmask_values<{WORDS[size]}, {INDEX[index]}>"
