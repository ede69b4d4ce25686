"""SpMM on CSR and ELL buckets with wgmma: A becomes dense on its way to the registers.

Kernel: spmm_csr_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0061-csr-in-records.md.
"""

from __future__ import annotations

from typing import Any

from ....products.kernel import spmm_of
from ....products.problem import Problem
from ..ell_buckets import ell_buckets_records
from ..runtime import refusals
from ..runtime.record_products import RecordProducts, Tile, refused, with_parts
from . import csr_records
from .csr_records import IMAGE, ROWS, Records

_EXTENTS = (
    (1, 16, 6), (1, 16, 4), (2, 16, 3), (1, 32, 6), (2, 32, 3), (1, 64, 4), (1, 64, 3), (2, 64, 2), (2, 64, 1),
    (1, 128, 3), (1, 128, 2), (2, 128, 1), (3, 128, 1), (2, 192, 1), (2, 256, 1),
)  # fmt: skip
TILES = with_parts(Tile(*extent, record_rows=ROWS, image=IMAGE, most_ahead=192) for extent in _EXTENTS)


class SpmmCSRExpanding(RecordProducts):
    """``out = A @ B`` for 16-bit A in CSR or ELL buckets, a few per cent or more of it stored, on sm_90a only."""

    name = "cuda.spmm_csr_expanding_sm90a"
    source = "csr/spmm_csr_expanding_sm90a.cu"
    takes = spmm_of("csr", "ell-buckets")
    tiles = TILES
    compiled_room = 2048
    compiled = (
        ("64x16, 6 blocks parts 8", "col"), ("64x16, 4 blocks", "wide"), ("128x16, 3 blocks", "col"),
        ("64x32, 6 blocks", "col"), ("128x32, 3 blocks", "row"), ("64x64, 4 blocks", "wide"),
        ("64x64, 3 blocks", "row"),
        ("128x64, 2 blocks parts 4", "wide"), ("128x64", "col"), ("64x128, 3 blocks", "row"),
        ("64x128, 2 blocks parts 2", "col"), ("128x128 parts 3", "col"), ("128x128", "wide"),
        ("192x128 parts 3", "col"), ("192x128", "row"), ("128x192", "col"), ("128x256 parts 2", "row"),
    )  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        return refusals.every(p, 80, ("bfloat16", "float16")) + refused(p, csr_records.pieces_at_most(p))

    def only_by_name(self, p: Problem) -> str:
        return csr_records.beside_arrays(p)

    def records(self, a: Any, p: Problem) -> Records:
        return ell_buckets_records.records(a, p) if p.format == "ell-buckets" else csr_records.records(a, p)

    def expected_room(self, p: Problem) -> int:
        return csr_records.expected_room(p)
