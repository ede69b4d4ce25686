"""A sum of matrices as a dense one on the device: one part is written whole, the nonzeros of the others over it.

The part that is written whole is the one whose format can only be written so; the others are in CSR or ELL buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....formats.sum import Sum
from ....products.ideal import SECTOR
from ....products.kernel import reasons
from ....products.problem import Operand, Problem
from ..csr.overlay_csr import OVERLAYS
from ..runtime.expansion import Writer
from ..runtime.launch import Bound
from .structured import part_problem

Expander = Callable[[Any, Problem], Writer]


def expander(expanders: Mapping[str, Expander], a: Sum, p: Problem) -> Writer:
    """The launches that write the sum ``a`` [M, K] as a dense matrix. expanders: those of single formats."""
    whole = written_whole([part.name for part in a.parts])
    problems = [part_problem(p, Operand.of(part, p.device)) for part in a.parts]
    over = [OVERLAYS[x.name](x, q) for i, (x, q) in enumerate(zip(a.parts, problems, strict=True)) if i != whole]
    writers = [expanders[a.parts[whole].name](a.parts[whole], problems[whole]), *over]

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        return [launch for write in writers for launch in write(x, ld, stream)]

    return launches


def written_whole(names: Sequence[str]) -> int:
    """The number of the part that is written first: the first that is not in CSR or ELL buckets, else part 0."""
    return next((i for i, name in enumerate(names) if name not in OVERLAYS), 0)


def refused_parts(p: Problem, formats: frozenset[str]) -> list[str]:
    """Why the parts of a sum cannot be written. formats: ids of those that can be written whole."""
    names = [part.format for part in p.operands[0].parts]
    whole = [f"part {i} ({name})" for i, name in enumerate(names) if name not in OVERLAYS]
    others = [f"part {i} ({name})" for i, name in enumerate(names) if name not in formats]
    return reasons(
        (not names, "the problem names no parts"),
        (bool(others), f"takes parts in {', '.join(sorted(formats))}, not {', '.join(others)}"),
        (len(whole) > 1, f"takes one part that is not in {' or '.join(OVERLAYS)}, got {', '.join(whole)}"),
    )


def further_parts(p: Problem) -> list[Operand]:
    """The parts of a sum that are written over another one."""
    parts = p.operands[0].parts
    whole = written_whole([part.format for part in parts])
    return [part for i, part in enumerate(parts) if i != whole]


def scattered_bytes(p: Problem) -> int:
    """Bytes of memory that the nonzeros of the further parts are written with: a sector for each."""
    return SECTOR * sum(part.stored for part in further_parts(p))
