"""The memory budget: declared sizes are checked here, in Python ints, before anything is allocated."""

from __future__ import annotations

from .errors import LimitError

_budget = [4 << 30]
"""Bytes one dense result may take; ``set_budget`` (the CLI's --max-memory) changes it."""


def set_budget(nbytes: int) -> None:
    """Allow single allocations of up to ``nbytes``."""
    _budget[0] = int(nbytes)


def check_bytes(nbytes: int, what: str) -> None:
    """LimitError when ``what`` would take more than the budget; call it before the allocation."""
    if nbytes > _budget[0]:
        raise LimitError(
            f"{what} would take {nbytes} bytes, over the budget of {_budget[0]}; raise it with --max-memory "
            "or spformat.limits.set_budget",
            value=nbytes, limit=_budget[0],
        )  # fmt: skip
