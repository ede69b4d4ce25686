"""2:4 weights in the order of the tensor cores' registers, written once per matrix.  Kernel: two_four_records.cu."""

from __future__ import annotations

from typing import Any

from ....arrays.library import ceil_div
from ....products.problem import Problem
from ..runtime import jit
from ..runtime.launch import Launch, finish_arrays

WORDS = 288  # uint32 in a record: 256 of values and 32 of metadata, for 16 rows and 64 columns
SPARE = 8  # records at the end that kernels may load ahead but do not use
THREADS = 256


class TwoFourRecords:
    """uint32[Mp/16 * Kp/64 + SPARE, 288] of a ``TwoFour`` matrix on the device; 9/16 of the dense bytes."""

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests."""
        return ("two_four_records",)

    def of(self, a: Any, p: Problem) -> Any:
        """The records of ``a``, the same array for every plan of the matrix."""
        import cupy

        def build() -> Any:
            slabs = a.data.shape[1] // 32
            count = a.data.shape[0] // 16 * slabs
            meta = a.with_meta_order("fragment").meta
            with cupy.cuda.Device(p.device_id):
                out = cupy.empty((count + SPARE, WORDS), "uint32")
                function = jit.load(
                    "two_four/two_four_records.cu", "two_four_records", jit.architecture(p.sm or 80, ()), p.device_id
                )
                launch = Launch(function, "PPPqi", (a.data, meta, out, count, slabs), THREADS)
                if count:
                    stream = cupy.cuda.get_current_stream(p.device_id)
                    launch((ceil_div(count * WORDS // 4, THREADS), 1, 1), stream.ptr)
                    finish_arrays()  # synchronize!
            return out

        return a.kernel_arrays("two-four records", build)
