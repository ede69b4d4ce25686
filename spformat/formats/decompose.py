"""decompose(x, rule, rule, ..): a matrix as a sum of parts, each in the format that suits its values."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from .convert import convert
from .sum import Sum


def decompose(x: Any, *rules: str, dtype: Any = None) -> Sum:
    """``x`` as a sum: each rule takes what it covers well, the last takes the rest; on the device where ``x`` is.

    x: whatever ``convert`` takes.
    rules: one text for each part, two or more, such as "bsr:blocksize=32x32,density>=0.5": a format, its params, and
        conditions ``measure>=bound`` or ``measure<=bound`` on the values that the part takes. Each rule chooses from
        what the rules before it have left; what is in one text with "+" between is several rules.
    dtype: round the values to this type first.

    Every nonzero of ``x`` is in exactly one part, with its bits; zeros that are stored and -0.0 are in none. Part i is
    always that of rule i: one that no value went to is there, without a nonzero. The same matrix gives the same bytes,
    and so does ``convert(x, "bsr:32x32,density>=0.5+csr")``. O(nnz) time and memory beside ``x``.

    Conditions are on row_length and column_degree (the values in the row or column) for all formats, and on density for
    bsr, dbsr (the share of the places of a block that hold a value) and sr-bcrs (of a vector); there density>=0.5 holds
    unless another is given, and for ell-buckets row_length<=max_width. two-four and vector-nm take the largest
    magnitudes that their pattern allows.

    Raises UsageError for a malformed rule, an unknown condition, a rule that would take everything; StructureError
    where the last format cannot hold the rest, or a format the value type.

    Composable formats: SparseTIR (ASPLOS 2023).
    """
    for rule in rules:
        if not isinstance(rule, str):
            expected = "expected a text for each part, such as 'bsr:32x32,density>=0.5'"
            raise UsageError(f"decompose: {expected}, got {rule!r:.80}")
    return convert(x, Sum, dtype=dtype, rules=tuple(part.strip() for rule in rules for part in rule.split("+")))
