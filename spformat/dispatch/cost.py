"""The cost of a product on a GPU: operations, bytes, what bounds it and the expected time.  No GPU needed.

    >>> spformat.dispatch.cost.estimate(a, n=4096, device="H200")
    Cost(device='H200', kernel='cuda.spmm_vector_nm_sm90a', operations=.., bytes=.., bound='L2', expected_us=..)

The bounds are those of the roofline, with NM-SpMM's analysis of a tile for what L2 must deliver
(``spformat.products.roofline``, IPDPS 2025, Eq. 3) for kernels that say how they cut a product (``blocking``).
``expected_us`` is the number that the dispatcher chooses by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from .. import backends
from ..arrays.dtypes import value_type
from ..arrays.library import ceil_div
from ..errors import UsageError
from ..formats import by_name
from ..formats.base import Format
from ..formats.foreign import as_format
from ..formats.transposed import Transposed
from ..products import roofline
from ..products.ideal import operands_bytes
from ..products.problem import ROW, Problem, columns
from ..products.roofline import CUDA_32, CUDA_64, DEVICES, TENSOR_16, Blocking, Device
from .api import explain, problem_of
from .select import checked

__all__ = ["DEVICES", "Cost", "Device", "estimate"]

_ARITHMETIC = {"float64": CUDA_64, "float32": CUDA_32}
"""Value type -> arithmetic, for kernels without ``blocking``. Narrower types use the tensor cores."""


@dataclass(frozen=True)
class Cost:
    """One product C = A @ B. Times are in microseconds. No kernel takes less than any of the bounds."""

    device: str
    kernel: str | None
    """The kernel that spmm() would run there; None if no kernel takes the product."""
    operations: float
    """2 * stored values of A, padding included, * N."""
    bytes: float
    """A as stored, B and C, each once."""
    compute_us: float
    """All operations at the peak of the kernel's arithmetic."""
    cache_us: float | None
    """The bytes that all tiles load, at the rate of L2; None where the kernel's tiles are not known."""
    memory_us: float
    """All bytes at the rate of a large copy."""
    launch_us: float
    """A launch, from event to event."""
    tile_intensity: float | None
    """Operations per byte that a tile loads: NM-SpMM's Eq. 3."""
    expected_us: float | None
    """From event to event, cold caches; None where no kernel takes the product."""

    @property
    def intensity(self) -> float:
        """Operations per byte of memory."""
        return self.operations / self.bytes if self.bytes else 0.0

    @property
    def floor_us(self) -> float:
        """The largest of the bounds."""
        return max(self._bounds().values())

    @property
    def bound(self) -> str:
        """The largest of the bounds: "compute", "L2", "memory" or "launch"."""
        bounds = self._bounds()
        return max(bounds, key=bounds.__getitem__)

    def _bounds(self) -> dict[str, float]:
        cache_us = self.cache_us or 0.0
        return {"compute": self.compute_us, "L2": cache_us, "memory": self.memory_us, "launch": self.launch_us}

    def __str__(self) -> str:
        expected = f", {self.expected_us:.0f} us expected" if self.expected_us is not None else ""
        return f"on {self.device} at least {self.floor_us:.1f} us, bound by {self.bound}{expected}"


LAUNCH_US = 3.0
"""An empty kernel, from event to event."""


def estimate(
    A: Any, n: int, *, device: str | Device = "H200", backend: str | None = None, b_layout: str = ROW,
    nbytes: int | None = None,
) -> Cost:  # fmt: skip
    """The cost of ``spmm(A, B)`` with B [K, n] of A's type, in the kernel that the dispatcher would choose there.

    A: a matrix, on any device, its transpose (``A.T``), or a ``Problem`` (then ``nbytes``, the bytes of A, if its
        params do not decide them).
    device: a name in ``DEVICES``, or a ``Device`` with your figures (``dataclasses.replace(DEVICES["H200"], ..)``).
    b_layout: with a matrix; a ``Problem`` brings its own. backend: a backend or a kernel, as for ``spmm``.

    Raises UsageError for an unknown device, and for an n that is no number of columns.
    """
    target = device if isinstance(device, Device) else DEVICES.get(str(device).upper())
    if target is None:
        raise UsageError(f"device: expected one of {', '.join(DEVICES)}, or a Device, got {device!r}", value=device)
    n = columns(n)
    transposed = isinstance(A, Transposed)
    matrix = A if isinstance(A, Problem) else A.matrix if transposed else as_format(A)
    operation = "spmm_transposed" if transposed else "spmm"
    p = checked(A) if isinstance(A, Problem) else problem_of(cast(Format, matrix), n, operation, b_layout=b_layout)
    p = p.changed(n=n, device="cuda", sm=target.sm, device_id=0)
    with roofline.on(target):
        answer = explain(p, backend=backend)
        cut = _blocking(answer.chosen, p)
        expected = answer.expected_us
    stored = matrix.nbytes if isinstance(matrix, Format) else _bytes(p) if nbytes is None else nbytes
    moved = stored + operands_bytes(p)
    operations = 2.0 * p.nnz * n
    kind = cut.arithmetic if cut else _ARITHMETIC.get(p.a_dtype, TENSOR_16)
    intensity = cache_us = None
    if cut:
        intensity = cut.intensity()
        tiles = ceil_div(p.rows, cut.rows) * ceil_div(n, cut.cols)
        cache_us = 2e6 * tiles * cut.rows * cut.cols * cut.kept * cut.k_tiles / intensity / target.cache
    return Cost(
        device=target.name, kernel=answer.chosen, operations=operations, bytes=float(moved),
        compute_us=1e6 * operations / target.peak[kind], cache_us=cache_us, memory_us=1e6 * moved / target.memory,
        launch_us=LAUNCH_US, tile_intensity=intensity, expected_us=expected,
    )  # fmt: skip


def _blocking(kernel: str | None, p: Problem) -> Blocking | None:
    """How the chosen kernel cuts the problem, if it says so."""
    if kernel is None:
        return None
    chosen = backends.kernel_named(kernel)
    cut: Blocking | None = chosen.blocking(p) if hasattr(chosen, "blocking") else None
    return cut


def _bytes(p: Problem) -> int:
    """Bytes of A from its problem: exact where the params decide them, else a 4-byte index beside every value."""
    dtype = value_type(p.a_dtype).numpy
    specs = by_name(p.format).array_specs((p.M, p.K), dtype, p.nnz, p.p)
    if specs is None:
        return p.nnz * (dtype.itemsize + 4)
    return sum(kind.itemsize * math.prod(shape) for kind, shape in specs.values())
