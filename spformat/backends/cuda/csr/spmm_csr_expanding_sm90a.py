"""SpMM on CSR and ELL buckets with wgmma: A becomes dense on its way to the registers.

Kernel: spmm_csr_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0061-csr-in-records.md.
"""

from __future__ import annotations

from typing import Any

from ....products.kernel import spmm_of
from ....products.problem import Problem
from ..ell_buckets import ell_buckets_records
from ..runtime import refusals
from ..runtime.record_products import RecordProducts, refused, tiles_of
from . import csr_records
from .csr_records import IMAGE, ROWS, Records

TILES = tiles_of(record_rows=ROWS, image=IMAGE)


class SpmmCSRExpanding(RecordProducts):
    """``out = A @ B`` for 16-bit A in CSR or ELL buckets, a few per cent or more of it stored, on sm_90a only."""

    name = "cuda.spmm_csr_expanding_sm90a"
    source = "csr/spmm_csr_expanding_sm90a.cu"
    takes = spmm_of("csr", "ell-buckets")
    tiles = TILES
    compiled_room = 2048

    def unsupported(self, p: Problem) -> list[str]:
        return refusals.every(p, 80, ("bfloat16", "float16")) + refused(p, csr_records.pieces_at_most(p))

    def only_by_name(self, p: Problem) -> str:
        return csr_records.beside_arrays(p)

    def records(self, a: Any, p: Problem) -> Records:
        return ell_buckets_records.records(a, p) if p.format == "ell-buckets" else csr_records.records(a, p)

    def expected_room(self, p: Problem) -> int:
        return csr_records.expected_room(p)
