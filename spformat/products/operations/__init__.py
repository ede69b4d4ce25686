"""The list of operations, one line each. Code that works for every operation reads this list."""

from __future__ import annotations

from ...errors import UsageError
from ..operation import Operation
from .spmm import SPMM
from .spmm_transposed import SPMM_TRANSPOSED

__all__ = ["OPERATIONS", "SPMM", "SPMM_TRANSPOSED", "operation", "register", "registered", "unregister"]

OPERATIONS: tuple[Operation, ...] = (
    SPMM,
    SPMM_TRANSPOSED,
)

_by_name: dict[str, Operation] = {o.name: o for o in OPERATIONS}


def register(added: Operation) -> Operation:
    """Add an operation; its name must be free."""
    if _by_name.setdefault(added.name, added) is not added:
        raise UsageError(f"an operation called {added.name!r} is already registered")
    return added


def unregister(name: str) -> None:
    """Remove an operation that was registered; UsageError for a built-in one."""
    if name in {o.name for o in OPERATIONS}:
        raise UsageError(f"{name!r} is built in")
    _by_name.pop(name, None)


def registered() -> tuple[Operation, ...]:
    """All operations, built-in ones first."""
    return tuple(_by_name.values())


def operation(name: str) -> Operation:
    """The operation of a name; UsageError for an unknown one."""
    if name not in _by_name:
        raise UsageError(f"unknown operation {name!r:.80} (known: {', '.join(_by_name)})", value=name)
    return _by_name[name]
