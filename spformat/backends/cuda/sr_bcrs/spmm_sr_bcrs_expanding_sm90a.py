"""SpMM on SR-BCRS with wgmma: A becomes dense on its way to the registers.

Kernel: spmm_sr_bcrs_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0063-slots-and-blocks-in-registers.md.
"""

from __future__ import annotations

from typing import Any

from ....products.kernel import spmm_of
from ....products.problem import Problem
from ..runtime import refusals
from ..runtime.expanding import DEPTH
from ..runtime.record_products import InMemory, RecordProducts, refused, room_of, tiles_of
from . import mma_fragments
from .mma_fragments import MMA_TYPES, PANEL

_LIST = 4 * mma_fragments.DEPTH + 16
"""Bytes in which a warp lists its slots, as in the kernel."""
TILES = tiles_of(record_rows=PANEL, record_steps=mma_fragments.DEPTH // DEPTH, notes=True, image=_LIST)


class SpmmSRBCRSExpanding(RecordProducts):
    """``out = A @ B`` for 16-bit ``SRBCRS`` A of any vector_length and stride, on sm_90a only."""

    name = "cuda.spmm_sr_bcrs_expanding_sm90a"
    source = "sr_bcrs/spmm_sr_bcrs_expanding_sm90a.cu"
    takes = spmm_of("sr-bcrs")
    tiles = TILES
    compiled_room = 2944

    def unsupported(self, p: Problem) -> list[str]:
        return refusals.every(p, 80, MMA_TYPES) + mma_fragments.too_many(p) + refused(p, 0)

    def records(self, a: Any, p: Problem) -> InMemory:
        slots = mma_fragments.fragments_of(a, p)
        return InMemory(slots.pieces, slots.first, slots.longest)

    def expected_room(self, p: Problem) -> int:
        return room_of(mma_fragments.expected_record(p))
