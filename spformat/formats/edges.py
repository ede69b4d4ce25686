"""Edges: direct ways from one format to another, in a table that whoever has one fills.

An edge does in one go what the general code does step by step: a compiled loop that turns a dense array into CSR, a
CUDA kernel that packs 2:4. The general code of a format, numpy or CuPy, stays the law: an edge gives the same bits and
the same refusals, or it answers None, and the general code runs.

    ("dense", "csr", "cpu")               array [M, K] -> CSR
    ("bitmask", "dense", "cpu")           Bitmask -> array [M, K]
    ("csr", "check", "cuda")              CSR -> whether all its contents were seen to be valid
    ("dense", "two-four:pruned", "cuda")  array [M, K] -> (TwoFour of the largest values, values that are not finite)

Formats ask ``take`` and name nobody. Layers above and plug-ins say with ``provide`` where the edges of a kind of device
come from; that code is imported when the first array of this kind is about to be converted or checked, not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..arrays.library import Array, current_device, is_cupy

DENSE, CHECK = "dense", "check"
"""What is no name of a format in ``source`` and ``target``: an array [M, K], and the scan ``Format.quick_check``."""


def always(x: Array, elements: int) -> bool:
    """An edge that is worth taking whatever the size."""
    return True


@dataclass(frozen=True)
class Edge:
    """One direct way: ``function(source, params)`` gives the target, or None where it does not take this one.

    source: a format id, whose objects (validated, unless the target is "check") the function takes, or "dense": an
    array [M, K] of a value type in C order. target: a format id, "dense" for a new array [M, K], or "check".
    params: of the target, in their stored types; those that follow from the matrix (AUTO) may be missing.
    """

    source: str
    target: str
    device: str
    """ "cpu" or "cuda": where the arrays are. On a device, it is the current one while the function runs."""
    function: Callable[[Any, dict[str, Any]], Any]
    accepts: Callable[[Array, int], bool] = always
    """Whether an array (the values of the source) and a number of dense elements are worth this way: it costs O(1)."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Its place in the table."""
        return self.source, self.target, self.device


Provider: TypeAlias = Callable[[], Iterable[Edge]]

_table: dict[tuple[str, str, str], tuple[Edge, ...]] = {}
_waiting: dict[str, list[Provider]] = {"cpu": [], "cuda": []}
_lock = threading.RLock()


def register(*edges: Edge) -> None:
    """Put edges into the table; of one key, the edge that came last is asked first."""
    with _lock:
        for edge in edges:
            _table[edge.key] = (edge, *_table.get(edge.key, ()))


def unregister(*edges: Edge) -> None:
    """Take edges out of the table; those that are not in it are ignored."""
    with _lock:
        for edge in edges:
            _table[edge.key] = tuple(e for e in _table.get(edge.key, ()) if e is not edge)


def provide(device: str, provider: Provider) -> None:
    """Have ``provider()`` asked for the edges of "cpu" or "cuda" when the first of them may be wanted.

    They stand behind edges that were registered before, so that a user's own are asked first.
    """
    with _lock:
        _waiting[device].append(provider)


def edges_of(device: str) -> tuple[Edge, ...]:
    """All edges of "cpu" or "cuda"; imports the code of those who provide some."""
    _load(device)
    return tuple(e for edges in _table.values() for e in edges if e.device == device)


def find(source: str, target: str, x: Array, elements: int | None = None) -> tuple[Edge, ...]:
    """The edges that are worth taking for arrays that are where ``x`` is, best first.

    x: the dense array, or the values of the source; elements: the dense elements that are meant, else those of x.
    """
    device = "cuda" if is_cupy(x) else "cpu"
    if _waiting[device]:
        _load(device)
    size = x.size if elements is None else elements
    return tuple(e for e in _table.get((source, target, device), ()) if e.accepts(x, size))


def take(source: str, target: str, given: Any, params: dict[str, Any], x: Array, elements: int | None = None) -> Any:
    """What the best edge for ``x`` (as for ``find``) makes of ``given``; None where there is none, and for a refusal
    to take this one: then the caller's general code runs."""
    for edge in find(source, target, x, elements):
        with current_device(x):
            result = edge.function(given, params)
        if result is not None:
            return result
    return None


def _load(device: str) -> None:
    with _lock:
        while _waiting[device]:
            provider = _waiting[device][0]
            for edge in provider():
                _table[edge.key] = (*_table.get(edge.key, ()), edge)
            _waiting[device].pop(0)
