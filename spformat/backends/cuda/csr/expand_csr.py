"""CSR as a dense matrix on the device, in one pass.  Kernel: expand_csr.cu."""

from __future__ import annotations

import functools
from typing import Any

from ....arrays.library import Array
from ....products.problem import Problem
from ..runtime import jit, row_images
from ..runtime.expansion import Target, Writer, index_type
from ..runtime.launch import Launch
from ..runtime.transpose import WORDS

SOURCE = "csr/expand_csr.cu"


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(size, ptr, idx) for size, ptr, idx in (
        (1, "int", "int"), (2, "int", "int"), (4, "long long", "int"), (8, "long long", "long long"),
    ))  # fmt: skip


def expander(a: Any, p: Problem) -> Writer:
    """The launches that write the CSR ``a`` [M, K] as a dense matrix."""
    return _writer(a.indptr, a.indices, a.data, Target.of(p))


def csr_to_dense(indptr: Array, indices: Array, data: Array, out: Array) -> None:
    """Write out [M, K], all of it, from the arrays of a valid CSR, all CuPy. Does not wait for the device."""
    import cupy

    (M, K), itemsize = out.shape, out.itemsize
    if not out.size:
        return
    launch = _launch(_instance(itemsize, index_type(indptr), index_type(indices)), *Target.holding(data))
    c = row_images.cut(M, K, itemsize)
    stream, arrays = int(cupy.cuda.get_current_stream().ptr), (indptr.data.ptr, indices.data.ptr, data.data.ptr)
    launch((c.blocks, 1, 1), stream, *arrays, M, out.data.ptr, K, c.segments, c.width, c.rows)


def _writer(indptr: Array, indices: Array, data: Array, target: Target) -> Writer:
    itemsize = data.dtype.itemsize
    function = jit.load(SOURCE, _instance(itemsize, index_type(indptr), index_type(indices)), *target)
    return row_images.writer(function, (indptr, indices, data), indptr.size - 1, itemsize)


@functools.cache
def _launch(instance: str, arch: str, device_id: int) -> Launch:
    """The kernel without arrays of its own, so that a conversion need not prepare it again."""
    return Launch(jit.load(SOURCE, instance, arch, device_id), "PPP" + row_images.EXTENTS, (), row_images.WARPS * 32)


def _instance(itemsize: int, ptr: str, idx: str) -> str:
    return f"expand_csr<{WORDS[itemsize]}, {ptr}, {idx}>"
