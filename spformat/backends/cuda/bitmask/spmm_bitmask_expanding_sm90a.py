"""SpMM on Bitmask with wgmma: A becomes dense on its way to the registers.

Kernel: spmm_bitmask_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0035-bitmask-in-registers.md.
"""

from __future__ import annotations

from typing import Any

from ....products.kernel import spmm_of
from ....products.problem import COL, Problem
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

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("bfloat16", "float16"), (p.a_dtype, "float32")) + refused(
            p, bitmask_records.pieces_at_most(p)
        )

    def records(self, a: Any, p: Problem) -> Records:
        return bitmask_records.records(a, p)

    def expected_room(self, p: Problem) -> int:
        return bitmask_records.expected_room(p)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("bitmask", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        col = p.changed(b_layout=COL, out_layout=COL)
        wide = p.changed(a_dtype="float16", out_dtype="float32", b_layout=COL)
        return tuple(
            self.instance(Tile(*tile), 1280, q)
            for tile, q in (
                ((2, 16, 3, 8), col), ((2, 32, 3, 1), p), ((2, 64, 2, 4), wide), ((2, 64, 2, 1), col),
                ((2, 64, 1, 1), col), ((2, 128, 1, 3), col), ((2, 128, 1, 1), wide), ((3, 128, 1, 3), col),
                ((3, 128, 1, 1), p), ((2, 192, 1, 1), col), ((2, 192, 1, 2), p), ((2, 256, 1, 1), col),
                ((1, 16, 6, 2), p), ((1, 32, 6, 1), col), ((1, 64, 4, 2), col), ((1, 64, 3, 1), p), ((1, 128, 3, 1), p),
                ((1, 128, 2, 2), wide),
            )
        )  # fmt: skip
