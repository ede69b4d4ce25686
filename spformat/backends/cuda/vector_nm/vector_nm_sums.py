"""The sum over the parts of K of a vector n:m product, a launch behind the product.  Kernel: vector_nm_sums.cu."""

from __future__ import annotations

from ....arrays.library import ceil_div
from ....products.problem import Problem
from ..runtime import jit
from ..runtime.launch import Bound, Launch

SOURCE, THREADS = "vector_nm/vector_nm_sums.cu", 256


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return instance("float", "__half"), instance("float", "float"), instance("double", "double")


def instance(sums: str, out: str) -> str:
    """C++ name of the kernel; sums, out: C types of the parts and of C."""
    return f"spformat::vector_nm::vector_nm_sums<{sums}, {out}>"


class Sums:
    """C from float32 (float64) parts that lie one behind the other, each in the layout of C without gaps."""

    def __init__(self, p: Problem, sums: str, out: str, processors: int) -> None:
        function = jit.load(SOURCE, instance(sums, out), jit.architecture(p.sm or 80, ()), p.device_id)
        self._launch, self._most = Launch(function, "PPiiiq", (), THREADS, waits=True), 8 * processors

    def bind(self, stream: int, parts: int, c: int, splits: int, lines: int, along: int, ld: int) -> Bound:
        """The launch for two addresses. lines: of C, with ``along`` elements, ``ld`` apart."""
        blocks = min(ceil_div(lines * along, THREADS), self._most)
        return self._launch.bind((blocks, 1, 1), stream, parts, c, splits, lines, along, ld)
