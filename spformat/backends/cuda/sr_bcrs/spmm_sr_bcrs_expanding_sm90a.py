"""SpMM on SR-BCRS with wgmma: A becomes dense on its way to the registers.

Kernel: spmm_sr_bcrs_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0063-slots-and-blocks-in-registers.md.
"""

from __future__ import annotations

from typing import Any

from ....products.kernel import spmm_of
from ....products.problem import Problem
from ..runtime import refusals
from ..runtime.expanding import DEPTH
from ..runtime.record_products import InMemory, RecordProducts, Tile, refused, room_of, with_parts
from . import mma_fragments
from .mma_fragments import MMA_TYPES, PANEL

_EXTENTS = (
    (1, 16, 6), (1, 16, 4), (2, 16, 3), (1, 32, 6), (2, 32, 3), (1, 64, 4), (1, 64, 3), (2, 64, 2), (2, 64, 1),
    (1, 128, 3), (1, 128, 2), (2, 128, 1), (3, 128, 1), (2, 192, 1), (2, 256, 1),
)  # fmt: skip
_LIST = 4 * mma_fragments.DEPTH + 16
"""Bytes in which a warp lists its slots, as in the kernel."""
TILES = with_parts(
    Tile(
        *extent,
        record_rows=PANEL,
        record_steps=mma_fragments.DEPTH // DEPTH,
        notes=True,
        image=_LIST,
        most_ahead=192,
    )
    for extent in _EXTENTS
)


class SpmmSRBCRSExpanding(RecordProducts):
    """``out = A @ B`` for 16-bit ``SRBCRS`` A of any vector_length and stride, on sm_90a only."""

    name = "cuda.spmm_sr_bcrs_expanding_sm90a"
    source = "sr_bcrs/spmm_sr_bcrs_expanding_sm90a.cu"
    takes = spmm_of("sr-bcrs")
    tiles = TILES
    compiled_room = 2944
    compiled = (
        ("64x16, 6 blocks parts 8", "col"), ("64x16, 4 blocks", "wide"), ("128x16, 3 blocks", "col"),
        ("64x32, 6 blocks", "col"), ("128x32, 3 blocks", "row"), ("64x64, 4 blocks", "wide"),
        ("64x64, 3 blocks", "row"),
        ("128x64, 2 blocks parts 4", "wide"), ("128x64", "col"), ("64x128, 3 blocks", "row"),
        ("64x128, 2 blocks parts 2", "col"), ("128x128 parts 3", "col"), ("128x128", "wide"),
        ("192x128 parts 3", "col"), ("192x128", "row"), ("128x192", "col"), ("128x256 parts 2", "row"),
    )  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        return refusals.every(p, 80, MMA_TYPES) + mma_fragments.too_many(p) + refused(p, 0)

    def records(self, a: Any, p: Problem) -> InMemory:
        slots = mma_fragments.fragments_of(a, p)
        return InMemory(slots.pieces, slots.first, slots.longest)

    def expected_room(self, p: Problem) -> int:
        return room_of(mma_fragments.expected_record(p))
