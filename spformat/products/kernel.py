"""The interface of a kernel: which problems it takes, how long it expects to take, and a plan for one matrix.

A third-party backend derives its kernels from ``Kernel`` (or has the same attributes) and needs nothing else of
spformat.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..errors import UsageError
from . import ideal, rates, roofline, tiles
from .plan import Plan
from .problem import Problem


class Kernel:
    """One way to compute an operation for some formats. Subclasses give ``name``, ``takes`` and ``_plan``."""

    name: str
    """``backend.kernel``, for instance ``cuda.spmm_bsr``."""
    takes: frozenset[tuple[str, str]] = frozenset()
    """(operation, format id) pairs."""
    epilogue: ClassVar[bool] = False
    """Whether its plans apply alpha, beta and bias themselves; if not, one more pass over C applies them."""
    tiles: ClassVar[Sequence[Any]] = ()
    """The tiles among which the kernel chooses. ``str(tile)`` is its name in tables and in ``explain``."""
    terms: ClassVar[tuple[str, ...]] = ()
    """Names of the parts of its expected time. Without any, ``roofline.plain_us`` is the expected time."""
    constants_of: str = ""
    """Name of another kernel whose constants it uses; empty if it has its own."""
    multiplies_zeros: ClassVar[bool] = False
    """Whether zeros of A are multiplied with their rows of B, as in a dense product: inf in B then gives NaN."""
    by_name_only: ClassVar[str] = ""
    """Why it runs only where a call names it, for instance because nothing was measured; empty for other kernels."""
    product_error: ClassVar[float] = 0.0
    """Relative error of one float32 product, where products are not exact (three TF32 products)."""

    def unsupported(self, p: Problem) -> list[str]:
        """Every reason why ``p`` is refused; empty = accepted. Reads ``p`` only and touches no GPU."""
        return []

    def only_by_name(self, p: Problem) -> str:
        """Why it computes ``p`` only where a call names it; empty where the dispatcher may choose it."""
        return self.by_name_only

    def workspace_bytes(self, p: Problem) -> int:
        """Bytes of copies that a plan needs beside A, B and C: a dense copy, a stored transpose. The caller may limit
        them. What any plan of the kernel needs (tables of indices, tiles) does not belong here, only into
        ``Plan.workspace``."""
        return 0

    def options(self, p: Problem) -> Iterable[Any]:
        """The tiles worth considering for a problem; one None for a kernel without tiles."""
        return (None,)

    def tile_named(self, p: Problem, text: str) -> Any:
        """The tile whose ``str`` is ``text``, also one that ``options`` leaves out for this problem.

        KeyError where the kernel has no such tile.
        """
        return {str(t): t for t in (*self.tiles, *self.options(p))}[text]

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """Names of the sets of constants for a problem and a tile, the most specific first."""
        return ()

    def quantities(self, p: Problem, tile: Any, device: roofline.Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms`` on a device."""
        return ()

    def best(self, p: Problem) -> Best:
        """The least time that the kernel expects to take, and the tile that it uses."""
        name = self.constants_of or self.name
        known = rates.constants(name, self.terms, p) if self.terms else None
        return _best(self, p, roofline.device_of(p), known, tiles.forced_tile(self.name))

    def expected_us(self, p: Problem) -> float:
        """Microseconds that the kernel expects to take, from event to event with cold caches: the number that chooses.

        The least over its tiles, and on a GPU never less than A, B and C take at the rate of memory: constants are
        fitted to products of some sizes, and used for others.
        """
        return self.best(p).us + self.rest_us(p)

    def rest_us(self, p: Problem, tile: Any = None) -> float:
        """Expected microseconds of other kernels that run after this one. tile: of this one, None for its best."""
        return 0.0

    def is_its_own(self, p: Problem) -> bool:
        """Whether a call for ``p`` runs this kernel itself, not another kernel that it falls back to."""
        return True

    def plan(self, a: Any, p: Problem) -> Plan:
        """A plan for matrix ``a``, whose contents were validated: its indices are addresses.

        Called only where ``unsupported`` names no reason. UsageError for a matrix without the validated mark.
        """
        if not a.is_validated:
            raise UsageError(f"{self.name}: expected a validated matrix, got {a!r:.120}; call a.validate() first")
        return self._plan(a, p)

    def _plan(self, a: Any, p: Problem) -> Plan:
        raise NotImplementedError(f"{type(self).__name__} does not implement _plan")

    @property
    def formats(self) -> frozenset[str]:
        """Ids of the formats it takes, for any operation."""
        return frozenset(name for _, name in self.takes)


class Best(NamedTuple):
    """What a kernel expects for a problem."""

    us: float
    tile: Any


PRODUCTS = "products"
"""The term of ``Kernel.terms`` that is the least time of the multiplications, at the peak of the device."""


def tile_us(kernel: Kernel, p: Problem, tile: Any, device: roofline.Device, known: rates.Constants | None) -> float:
    """Microseconds that a kernel expects to take with a tile; without constants, the sum of the ideal times.

    On a GPU never less than its products take at the peak: constants that were fitted to many tiles may promise less
    for a few, which leave most multiprocessors without work.
    """
    quantities = kernel.quantities(p, tile, device)
    if known is None:
        return sum(quantities)
    us = math.fsum(map(operator.mul, known.of(kernel.variant(p, tile)), quantities))
    if p.device == "cuda" and PRODUCTS in kernel.terms:
        us = max(us, quantities[kernel.terms.index(PRODUCTS)])
    return us


@functools.lru_cache(maxsize=8192)
def _best(
    kernel: Kernel, p: Problem, device: roofline.Device, known: rates.Constants | None, forced: str | None
) -> Best:
    """``Kernel.best`` as a pure function, cached for problems that come again."""
    if not kernel.terms:
        return Best(roofline.plain_us(p), None)
    some = p
    if not (p.M and p.K and p.n):  # an empty product takes what one with a single element takes
        some = p.changed(M=max(1, p.M), K=max(1, p.K), n=max(1, p.n))
    options = list(kernel.options(some))
    if forced is not None:
        options = [t for t in options if str(t) == forced] or options
    if not options:
        return Best(roofline.plain_us(p), None)
    times = [tile_us(kernel, some, t, device, known) for t in options]
    us = min(times)
    tile = options[times.index(us)]
    if known is None:
        return Best(roofline.plain_us(p), tile)
    return Best(
        max(us, ideal.traffic_us(some, device), LEAST_US) if p.device == "cuda" else max(us, LEAST_CALL_US), tile
    )


LEAST_US = 0.5
"""The least time that is ever expected of a kernel on a GPU; every launch takes longer."""
LEAST_CALL_US = 5.0
"""The least time that is ever expected of a product on a host: the checks of a call, and a compiled function. A plan
for one element takes 8 us or more on the host whose constants come with the package; it may be less on faster cores.
Constants say nothing for some kernels: their fit had no product that small."""


@functools.lru_cache(maxsize=256)
def spmm_of(*formats: str, operation: str = "spmm") -> frozenset[tuple[str, str]]:
    """The ``takes`` of a kernel of one operation."""
    return frozenset((operation, name) for name in formats)


def reasons(*pairs: tuple[Any, str]) -> list[str]:
    """The texts whose condition holds."""
    return [text for refused, text in pairs if refused]


@dataclass(frozen=True)
class Accepted:
    """A kernel takes the problem."""

    kernel: str
    expected_us: float = float("nan")
    """Microseconds it expects to take."""

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        expected = "" if self.expected_us != self.expected_us else f", expects {self.expected_us:,.1f} us"
        return f"{self.kernel}: accepted{expected}"


@dataclass(frozen=True)
class Rejected:
    """A kernel does not take the problem, with every reason."""

    kernel: str
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.kernel}: " + "; ".join(self.reasons)
