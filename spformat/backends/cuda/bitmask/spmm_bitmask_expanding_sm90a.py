"""SpMM on Bitmask with wgmma: A becomes dense on its way to the registers.

Kernel: spmm_bitmask_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0035-bitmask-in-registers.md.
"""

from __future__ import annotations

from typing import Any

from ....products.kernel import spmm_of
from ....products.problem import Problem
from ..runtime.record_products import RecordProducts, Tile, refused, with_parts
from . import bitmask_records
from .bitmask_records import Records
from .bitmask_slices import bitmask_reasons

_EXTENTS = (
    (1, 16, 6), (1, 16, 4), (2, 16, 3), (1, 32, 6), (2, 32, 3), (1, 64, 4), (1, 64, 3), (2, 64, 2), (2, 64, 1),
    (1, 128, 3), (1, 128, 2), (2, 128, 1), (3, 128, 1), (2, 192, 1), (2, 256, 1),
)  # fmt: skip
TILES = with_parts(Tile(*extent) for extent in _EXTENTS)


class SpmmBitmaskExpanding(RecordProducts):
    """``out = A @ B`` for A in Bitmask with 16-bit values, on sm_90a only."""

    name = "cuda.spmm_bitmask_expanding_sm90a"
    source = "bitmask/spmm_bitmask_expanding_sm90a.cu"
    takes = spmm_of("bitmask")
    tiles = TILES
    compiled_room = 1280
    compiled = (
        ("64x16, 6 blocks parts 2", "row"), ("64x32, 6 blocks", "col"), ("64x64, 4 blocks parts 2", "col"),
        ("64x64, 3 blocks", "row"), ("64x128, 3 blocks", "row"), ("64x128, 2 blocks parts 2", "wide"),
        ("128x16, 3 blocks parts 8", "col"), ("128x32, 3 blocks", "row"), ("128x64, 2 blocks parts 4", "wide"),
        ("128x64, 2 blocks", "col"), ("128x64", "col"), ("128x128 parts 3", "col"), ("128x128", "wide"),
        ("192x128 parts 3", "col"), ("192x128", "row"), ("128x192", "col"), ("128x192 parts 2", "row"),
        ("128x256", "col"),
    )  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("bfloat16", "float16"), (p.a_dtype, "float32")) + refused(
            p, bitmask_records.pieces_at_most(p)
        )

    def records(self, a: Any, p: Problem) -> Records:
        return bitmask_records.records(a, p)

    def expected_room(self, p: Problem) -> int:
        return bitmask_records.expected_room(p)
