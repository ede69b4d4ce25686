"""SpMM on Bitmask with wgmma: A becomes dense on its way to the registers.

Kernel: spmm_bitmask_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0035-bitmask-in-registers.md.
"""

from __future__ import annotations

from typing import Any

from ....products.kernel import spmm_of
from ....products.problem import Problem
from ..runtime.record_products import RecordProducts, refused, tiles_of
from . import bitmask_records
from .bitmask_records import Records
from .bitmask_slices import bitmask_reasons

TILES = tiles_of()


class SpmmBitmaskExpanding(RecordProducts):
    """``out = A @ B`` for A in Bitmask with 16-bit values, on sm_90a only."""

    name = "cuda.spmm_bitmask_expanding_sm90a"
    source = "bitmask/spmm_bitmask_expanding_sm90a.cu"
    takes = spmm_of("bitmask")
    tiles = TILES
    compiled_room = 1280

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("bfloat16", "float16"), (p.a_dtype, "float32")) + refused(
            p, bitmask_records.pieces_at_most(p)
        )

    def records(self, a: Any, p: Problem) -> Records:
        return bitmask_records.records(a, p)

    def expected_room(self, p: Problem) -> int:
        return bitmask_records.expected_room(p)
