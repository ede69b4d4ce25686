"""Products on a GPU whose B or C is first copied into a layout that a kernel is faster with.

Rows of N values start on 16-byte boundaries only if N is a multiple of 8 (for 16-bit values). Where they do not, every
kernel loads B value by value, cuBLAS's as well, and takes up to twenty times as long. A copy costs one more pass over
the operand. Storing C with such rows costs most kernels less than a copy. A kernel may also be so much faster with the
other layout that two transposed copies pay.
"""

from __future__ import annotations

import contextvars
import functools
import math
from typing import Any, NamedTuple

from ..arrays.library import round_up
from ..formats import registered
from ..products import rates, tiles
from ..products.ideal import b_alignment, memory_us, out_alignment
from ..products.kernel import Best, Kernel, spmm_of, tile_us
from ..products.plan import Plan, nothing
from ..products.problem import COL, LINE, PITCH, ROW, Problem, itemsize, pitch_of
from ..products.roofline import Device, device_of
from .plans import depth, plan_with
from .select import Explanation, ask, choose, installed_only

FITTED = 64
"""Values of N whose inner plans a plan keeps."""


FEW, SLOWER = 64, 2.0
"""Up to so many columns a copy counts as so many: kernels for few columns do not begin before it ends, or have clusters
of blocks that find no room beside it. So do copies in the other layout."""


class Layouts(NamedTuple):
    """What the product sees: the layout of B and of C, and whether each is a copy with aligned lines."""

    b: str
    out: str
    copies_b: bool
    copies_out: bool

    def __str__(self) -> str:
        copied = [f"{name} {layout}-major" for name, layout, copied in (("B", self.b, self.copies_b),
                  ("C", self.out, self.copies_out)) if copied]  # fmt: skip
        return f"copies of {' and '.join(copied)}"


BOTH_TO_ROWS = Layouts(ROW, ROW, True, True)
"""The product between the copies then has a multiple of ``PITCH`` columns."""


class CopiedOperands(Kernel):
    """The fastest other kernel for the same product with B, C or both in another layout, or with aligned lines."""

    name = "composed.copied_operands"
    terms = ("copies", "copied", "transposed")

    @property
    def takes(self) -> frozenset[tuple[str, str]]:  # type: ignore[override]
        """Every format, multiplied as it is or transposed."""
        names = [f.name for f in registered()]
        return spmm_of(*names) | spmm_of(*names, operation="spmm_transposed")

    def unsupported(self, p: Problem) -> list[str]:
        """Operands on the host, and layouts that no other one is tried for."""
        if p.device != "cuda":
            return ["operands must be on a GPU"]
        if p.b_layout not in (ROW, COL) or p.out_layout not in (ROW, COL):
            return ["B and C must be row- or column-major"]
        return [] if self._best(p) else ["no copy of B or C would help, or no kernel takes it"]

    def options(self, p: Problem) -> list[Layouts]:
        """The layouts worth trying: aligned lines where they are not, and both operands row- or column-major.

        Kernels that gather rows of B are faster with row-major operands. None is much slower with aligned ones.
        """
        if p.n <= 1 or not (p.rows and p.inner):
            return []
        own_b, own_c = b_alignment(p) == LINE, out_alignment(p) == LINE
        pairs = [(p.b_layout, p.out_layout), (ROW, ROW)]
        if not (own_b and own_c):
            pairs.append((COL, COL))
        tried = [Layouts(b, c, b != p.b_layout or not own_b, c != p.out_layout or not own_c) for b, c in pairs]
        if not (own_b or own_c):  # B alone: kernels store lines of C that start anywhere at little more cost
            tried += [Layouts(b, p.out_layout, True, False) for b in dict.fromkeys((p.b_layout, COL))]
        # Only copies have room for a multiple of eight columns, even if the operands' lines are aligned.
        if p.n % PITCH:
            tried.append(BOTH_TO_ROWS)
        return [x for x in dict.fromkeys(tried) if x.copies_b or x.copies_out]

    def problem(self, p: Problem, x: Layouts) -> Problem:
        """The product that another kernel computes, in the workspace that the copies leave.

        Between row-major copies of both operands it has a multiple of eight columns: with aligned rows but another
        number of columns cuBLAS is up to five times slower.
        """
        return p.changed(
            n=round_up(p.n, PITCH) if x == BOTH_TO_ROWS else p.n,
            workspace=max(0, p.workspace - self.workspace_bytes(p)),
            b_layout=x.b, out_layout=x.out, b_alignment=LINE if x.copies_b else p.operands[1].alignment,
            out_alignment=LINE if x.copies_out else p.out.alignment,
        )  # fmt: skip

    def workspace_bytes(self, p: Problem) -> int:
        """The copies, with lines rounded up to eight values, and their buffer to a power of two."""
        return 1 << (_copy_bytes(p) - 1).bit_length()

    def quantities(self, p: Problem, tile: Layouts, device: Device) -> tuple[float, ...]:
        """copies: their number, of which some count as ``SLOWER``. copied: what is read and written in the same layout;
        transposed: in the other one."""
        copies, moved = 0.0, {False: 0.0, True: 0.0}
        for copied, turned, rows, dtype in (
            (tile.copies_b, tile.b != p.b_layout, p.inner, p.b_dtype),
            (tile.copies_out, tile.out != p.out_layout, p.rows, p.out_dtype),
        ):
            if copied:
                copies += SLOWER if turned or p.n <= FEW else 1.0
                moved[turned] += 2 * rows * p.n * itemsize(dtype)
        return copies, memory_us(moved[False], device), memory_us(moved[True], device)

    def best(self, p: Problem) -> Best:
        """The layouts whose copies and product together take the least expected time, and the time of the copies."""
        best = self._best(p)
        return Best(math.inf, None) if best is None else Best(best.us - best.rest_us, best.layouts)

    def rest_us(self, p: Problem, tile: Any = None) -> float:
        """The product between the copies."""
        best = self._best(p)
        if tile is None or (best is not None and tile == best.layouts):
            return math.inf if best is None else best.rest_us
        return _expected(ask(self.problem(p, tile), without=self.name))

    def _best(self, p: Problem) -> Copied | None:
        known = rates.constants(self.name, self.terms, p)
        return _best(self, p, device_of(p), known, tiles.forced_tile(self.name), installed_only())

    def _plan(self, a: Any, p: Problem) -> Plan:
        from ..backends.cuda.runtime.copy_lines import with_copies
        from ..backends.cuda.runtime.device_plan import device_plan
        from ..backends.cuda.runtime.epilogue import launches_of
        from ..backends.cuda.runtime.kernel import column_class
        from ..backends.cuda.runtime.scratch import captured

        # Inner plans are built when a call first needs them, but at the depth of this plan.
        where, purpose = contextvars.copy_context(), f"copied operands at depth {depth()}"

        def build(n: int) -> Plan:
            fitted = p.changed(n=n)
            layouts = self.best(fitted).tile
            if layouts is None:  # no copy helps for so many columns, though one did for those the plan was built for
                return plan_with(choose(fitted, without=self.name), a, fitted)
            q = self.problem(fitted, layouts)
            inner = plan_with(choose(q, without=self.name), a, q)
            text = f"{layouts}: {inner.kernel} {inner.tile}".strip()
            return with_copies(
                self.name, inner, fitted, text, purpose, self.workspace_bytes(fitted),
                copies_b=layouts.copies_b, copies_c=layouts.copies_out,
            )  # fmt: skip

        @functools.lru_cache(maxsize=FITTED)
        def fitted(n: int) -> Plan:
            plan: Plan = where.copy().run(build, n)
            return plan

        recorded: set[Plan] = set()  # a graph uses the memory of its launches as long as the plan lives

        def prepare(o: Any) -> Any:
            plan = fitted(column_class(max(2, o.n), p))
            if captured(o.stream):
                recorded.add(plan)
            return launches_of(plan)(o)

        first = fitted(column_class(max(2, p.n), p))
        return device_plan(self.name, p, prepare, first.tile, first.workspace, first.reads or nothing)


def _copy_bytes(p: Problem) -> int:
    """The most bytes of copies of B and C, in any layouts; each buffer is rounded up to 256 bytes."""

    def most(rows: int, size: int) -> int:
        return size * max(rows * pitch_of(p.n, size), round_up(p.n, PITCH) * pitch_of(rows, size)) + 256

    return most(p.inner, itemsize(p.b_dtype)) + most(p.rows, itemsize(p.out_dtype))


class Copied(NamedTuple):
    """The fastest way to compute a product with copies."""

    us: float
    """Expected microseconds of the copies and the product."""
    rest_us: float
    """Those of the product alone."""
    layouts: Layouts


@functools.lru_cache(maxsize=8192)
def _best(
    kernel: CopiedOperands, p: Problem, device: Device, known: rates.Constants | None, forced: str | None,
    installed: bool,
) -> Copied | None:  # fmt: skip
    options = kernel.options(p)
    taken = []
    for x in [x for x in options if str(x) == forced] or options:
        rest = _expected(ask(kernel.problem(p, x), installed=installed, without=kernel.name))
        taken.append(Copied(tile_us(kernel, p, x, device, known) + rest, rest, x))
    return min((x for x in taken if x.us < math.inf), default=None)


def _expected(trace: Explanation) -> float:
    return math.inf if trace.expected_us is None else trace.expected_us


KERNEL = CopiedOperands()
