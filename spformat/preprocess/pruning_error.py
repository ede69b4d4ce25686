"""What pruning costs: the difference between the product with a matrix and the product with its pruned form.

NM-SpMM (IPDPS 2025, Eq. 2) judges a pruned weight by the difference of the exact product C and the approximate one C'.
Here the weight stands on the left: C = w @ x. Without x, as for a checkpoint, whose inputs are not known, x is the
identity: the difference is then w minus the pruned w, which is the values that were set to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.dtypes import bits, nonzero_mask, value_type
from ..arrays.library import Array, current_device, device_of, namespace
from ..errors import UsageError
from ..formats.base import checked_values
from ..formats.dense import Dense

CHUNK = 1 << 20
"""Elements that are float64 at a time."""


@dataclass(frozen=True)
class PruningError:
    """How much pruning changed. Sums and norms are of finite values, in float64."""

    zeroed: int
    """Nonzero values that became zero."""
    elements: int
    """Elements of C: M * N, or M * K without x."""
    lost_sum: float
    """The sum of |C - C'| over all elements."""
    lost_norm: float
    """The Frobenius norm of C - C'."""
    norm: float
    """The Frobenius norm of C; 0 where its square overflows float64, and then lost_norm is 0, too."""

    @property
    def mean(self) -> float:
        """The mean of |C - C'| over all elements; 0 for an empty matrix."""
        return self.lost_sum / self.elements if self.elements else 0.0

    @property
    def norm_share(self) -> float:
        """||C - C'|| / ||C||, the relative error in the Frobenius norm; 0 for a matrix of zeros."""
        return self.lost_norm / self.norm if self.norm else 0.0


def error(w: Array | Dense, kept: Array | Dense, x: Array | None = None) -> PruningError:
    """The pruning error of ``kept``, a pruned form of w [M, K] (as ``apply`` returns it), both numpy or both CuPy.

    x: inputs [K, N] with which both are multiplied in float64; without it the matrices themselves are compared.
    UsageError for shapes that do not fit. Source: NM-SpMM (IPDPS 2025), Eq. 2.
    """
    before, after = (checked_values(a.data if isinstance(a, Dense) else a, "error") for a in (w, kept))
    xp, (M, K) = namespace(before), before.shape
    if after.shape != before.shape:
        raise UsageError(f"error: expected two forms of one matrix, got shapes {before.shape} and {after.shape}")
    shape = None if x is None else getattr(x, "shape", type(x).__name__)
    if x is not None and (not hasattr(x, "dtype") or len(x.shape) != 2 or x.shape[0] != K):
        raise UsageError(f"error: x: expected an array of inputs of shape ({K}, N), got {shape}")
    places = [device_of(a) for a in (before, after, *([] if x is None else [x]))]
    if len({*places}) > 1:
        raise UsageError(f"error: expected all arrays on one device, got {', '.join(places)}; move some of them")
    zeroed, total, lost, whole = 0, 0.0, 0.0, 0.0
    rows = max(1, CHUNK // max(1, K, 0 if x is None else x.shape[1]))
    with current_device(before), np.errstate(all="ignore"):  # squares of float64 values near its limit
        inputs: Any = None if x is None else _wide(x)
        for start in range(0, M, rows):
            part = before[start : start + rows]
            gone = nonzero_mask(part) & ~nonzero_mask(after[start : start + rows])
            exact = _wide(part)
            zeroed += int(gone.sum())  # synchronize!
            exact[~xp.isfinite(exact)] = 0
            missing = xp.where(gone, exact, 0)
            if inputs is not None:
                exact, missing = exact @ inputs, missing @ inputs
            total += float(xp.abs(missing).sum())  # synchronize!
            lost = math.hypot(lost, float(xp.linalg.norm(missing)))
            whole = math.hypot(whole, float(xp.linalg.norm(exact)))
    if not math.isfinite(whole):
        lost = whole = 0.0
    if not math.isfinite(total):
        total = 0.0
    return PruningError(zeroed, M * (K if x is None else x.shape[1]), total, lost, whole)


def _wide(x: Array) -> Array:
    """x in float64, exactly; also for value types with which the library cannot compute."""
    row = value_type(x.dtype)
    if row.bits.itemsize == 1:
        every = np.arange(256, dtype=np.uint8).view(row.numpy).astype(np.float64)
        return namespace(x).asarray(every)[bits(x)]
    if row.name == "bfloat16":
        x = (bits(x).astype(np.uint32) << 16).view(np.float32)  # a bfloat16 is the upper half of a float32
    return x.astype(np.float64)
