"""ELL buckets with 16-bit values in the records of a CSR (csr_records.cu), from which they are multiplied.

In which bucket a row is, records do not say; but the arrays of valid buckets are those that a conversion gives, so that
one gives them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.library import Array
from ....formats.csr import CSR
from ....formats.ell_buckets import ELLBuckets
from ....products.problem import Problem
from ..csr import csr_records
from ..csr.csr_records import Records


@dataclass(frozen=True, eq=False)
class Order:
    """The records of an ``ELLBuckets``, and the parameters of its buckets."""

    records: Records
    params: dict[str, Any]

    def arrays(self) -> tuple[Array, ...]:
        return self.records.arrays()

    def restore(self) -> dict[str, Array]:
        """Name -> new array of the ``ELLBuckets``, bit by bit."""
        csr = CSR.trusted(shape=self.records.shape, **self.records.restore())
        return ELLBuckets.from_csr(csr, **self.params).arrays()


def records(a: Any, p: Problem) -> Records:
    """The records of ``a``, the same for every plan of the matrix."""
    if csr_records.have_records(p):
        order: Order = a.kernel_order("ell-buckets records", lambda: Order(csr_records.pack(a.to_csr(), p), a.params()))
        return order.records
    beside: Records = a.kernel_arrays("csr records", lambda: csr_records.pack(a.to_csr(), p))
    return beside
