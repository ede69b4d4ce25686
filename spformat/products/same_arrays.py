"""COO and CSC hold the indices and values of a CSR, of A itself or of its transpose, and are multiplied as that CSR.

No index and no value is copied. A COO has no row pointer: it is counted once and kept with the matrix.
"""

from __future__ import annotations

from dataclasses import replace

from ..formats.base import Format
from ..formats.coo import COO
from ..formats.csc import CSC
from ..formats.csr import CSR
from .problem import Problem

FORMATS = (COO.name, CSC.name)
TRANSPOSED = {"spmm": "spmm_transposed", "spmm_transposed": "spmm"}


def problem_of_csr(p: Problem) -> Problem:
    """The same product with the CSR; a product with a CSC is one with the transpose of the CSR, and the reverse. ``p``
    itself for a matrix of another format."""
    a = p.operands[0]
    if a.format not in FORMATS:
        return p
    turned = a.format == CSC.name
    csr = replace(a, format=CSR.name, shape=a.shape[::-1] if turned else a.shape)
    return replace(p, operation=TRANSPOSED[p.operation] if turned else p.operation, operands=(csr, *p.operands[1:]))


def csr_of(a: Format) -> Format:
    """The CSR with the indices and values of a valid COO or CSC; ``a`` itself of another format."""
    if isinstance(a, CSC):
        return a.kernel_arrays("csr", a.transposed_csr)
    return a.kernel_arrays("csr", a.to_csr) if isinstance(a, COO) else a


def own_bytes(a: Format) -> int:
    """Bytes that the CSR has beside the arrays of ``a``: the row pointer of a COO."""
    csr = csr_of(a)
    return int(csr.indptr.nbytes) if isinstance(a, COO) and isinstance(csr, CSR) else 0
