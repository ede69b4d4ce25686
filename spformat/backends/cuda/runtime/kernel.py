"""What all CUDA kernels share: a plan that checks its operands and fits its launches to their columns."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

from ....arrays.library import round_up
from ....products.ideal import b_alignment
from ....products.kernel import Kernel
from ....products.plan import MemoryOf, Plan
from ....products.problem import ROW, Problem
from .device_plan import device_plan
from .launch import Library, Operands, Prepare
from .scratch import captured

COLUMN_STEP = 8
"""Numbers of columns between two multiples of it share a tile; a multiple, whose rows are aligned, has its own."""
FITTED = 64
"""Values of N whose launches a plan keeps."""


class Prepared(NamedTuple):
    """The launches of a kernel for one matrix, with a tile for one number of columns."""

    prepare: Prepare | Library
    """From operands to the launches of the product; right for any number of columns."""
    tile: str = ""
    workspace: int = 0
    """Bytes that the kernel derived from the matrix and keeps."""


def column_class(n: int, p: Problem) -> int:
    """The number of columns for which a tile is chosen where there are n.

    n itself if it is at most ``COLUMN_STEP`` / 2 or a multiple of it: tiles for few columns differ most. Else one less
    than the next multiple, so that the lines of B and C are as badly aligned as those of n columns. If neither the
    length nor the alignment of any line depends on N (both operands are column-major, with alignments of their own),
    the next multiple.
    """
    if n <= COLUMN_STEP // 2 or n % COLUMN_STEP == 0:
        return n
    depends = any(x.alignment == 0 or x.layout == ROW for x in (p.operands[1], p.out))
    return round_up(n, COLUMN_STEP) - depends


class CudaKernel(Kernel):
    """A kernel for operands on an NVIDIA GPU. Subclasses give ``prepared``."""

    archs: tuple[str, ...] = ()
    """Architectures with a target of their own ("sm_90a"); other devices get the plain target of theirs."""

    def prepared(self, a: Any, p: Problem) -> Prepared:
        """The launches for matrix ``a``, with a tile for ``p.n`` columns.

        Arrays derived from the matrix are kept by ``a.kernel_arrays`` and shared by all numbers of columns.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement prepared")

    def prepared_with(self, a: Any, p: Problem, tile: Any) -> Prepared:
        """The same with a given tile, for kernels whose tiles depend on the matrix and are compared one by one."""
        raise NotImplementedError(f"{type(self).__name__} does not implement prepared_with")

    def plan_with(self, a: Any, p: Problem, tile: Any) -> Plan:
        """A plan that uses one tile for every number of columns."""
        only = self.prepared_with(a.alias(), p, tile)
        return device_plan(self.name, p, only.prepare, only.tile, only.workspace)

    def _plan(self, a: Any, p: Problem) -> Plan:
        alias = a.alias()

        @functools.lru_cache(maxsize=FITTED)
        def fitted(n: int) -> Prepared:
            return self.prepared(alias, p.changed(n=n))

        recorded: set[Prepared] = set()  # a graph uses the memory of its launches as long as the plan lives

        def prepare(o: Operands) -> Any:
            launches = fitted(column_class(o.n, p))
            if captured(o.stream):
                recorded.add(launches)
            return launches.prepare(o)

        first = fitted(column_class(max(1, p.n), p))
        return device_plan(self.name, p, prepare, first.tile, first.workspace, MemoryOf(alias))


class CopyEngineKernel(CudaKernel):
    """A kernel whose copy engine (TMA) loads B. For a B whose lines do not start on 16-byte boundaries a call runs the
    kernel ``otherwise``."""

    otherwise: ClassVar[Kernel]

    def is_its_own(self, p: Problem) -> bool:
        return b_alignment(p) == 16

    def expected_us(self, p: Problem) -> float:
        """That of ``otherwise`` for a B that the copy engine cannot load."""
        return super().expected_us(p) if self.is_its_own(p) else self.otherwise.expected_us(p)
