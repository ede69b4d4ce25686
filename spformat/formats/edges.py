"""Edges: direct conversions from one format to another, and the table in which they are registered.

An edge does in one step what the general code of a format does in several: a compiled loop that converts a dense array
to CSR, a CUDA kernel that packs 2:4. The general code, in numpy and CuPy, is the reference. An edge gives the same bits
and raises the same errors; or it returns None, and the general code runs.

    ("dense", "csr", "cpu")               array [M, K] -> CSR
    ("bitmask", "dense", "cpu")           Bitmask -> array [M, K]
    ("two-four", "bitmask", "cuda")       TwoFour -> Bitmask
    ("csr", "check", "cuda")              CSR -> whether all its contents were seen to be valid
    ("dense", "two-four:pruned", "cuda")  array [M, K] -> (TwoFour of the largest values, values that are not finite)

Formats call ``take`` and name no provider. Layers above and plug-ins register with ``provide`` a function that returns
their edges for a kind of device. It is called when the first array on such a device is to be converted or checked, so
nothing is imported earlier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..arrays.library import Array, current_device, is_cupy

DENSE, CHECK, TRANSPOSED = "dense", "check", "transposed"
"""Values of ``source`` and ``target`` that are no format ids: an array [M, K]; the scan of ``Format.quick_check``; the
transpose as a stored matrix."""


def always(x: Array, elements: int) -> bool:
    """The ``accepts`` of an edge that is worth using for every size."""
    return True


@dataclass(frozen=True)
class Edge:
    """One direct conversion: ``function(source, params)`` returns the target, or None if it does not support the case.

    source: a format id, then the function is given an object of the format (validated, unless the target is "check");
    or "dense", then it is given an array [M, K] of a value type in C order. target: a format id, "dense" for a new
    array [M, K], "check" or "transposed". params: those of the target, in their stored types; AUTO params may be
    missing.
    """

    source: str
    target: str
    device: str
    """ "cpu" or "cuda": where the arrays are. A CUDA device is CuPy's current device while the function runs."""
    function: Callable[[Any, dict[str, Any]], Any]
    accepts: Callable[[Array, int], bool] = always
    """``accepts(values, elements)``: whether the edge is worth using for the values of the source and this number of
    dense elements. It must cost O(1)."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Key of the edge in the table."""
        return self.source, self.target, self.device


Provider: TypeAlias = Callable[[], Iterable[Edge]]

_table: dict[tuple[str, str, str], tuple[Edge, ...]] = {}
_waiting: dict[str, list[Provider]] = {"cpu": [], "cuda": []}
_lock = threading.RLock()


def register(*edges: Edge) -> None:
    """Put edges into the table. Of the edges with one key, the one that was registered last is tried first."""
    with _lock:
        for edge in edges:
            _table[edge.key] = (edge, *_table.get(edge.key, ()))


def unregister(*edges: Edge) -> None:
    """Remove edges from the table; those that are not in it are ignored."""
    with _lock:
        for edge in edges:
            _table[edge.key] = tuple(e for e in _table.get(edge.key, ()) if e is not edge)


def provide(device: str, provider: Provider) -> None:
    """Let ``provider()`` return the edges of "cpu" or "cuda". It is called when the first of them may be needed.

    Edges that were registered before come first, so that a user's own edges are tried before these.
    """
    with _lock:
        _waiting[device].append(provider)


def edges_of(device: str) -> tuple[Edge, ...]:
    """All edges of "cpu" or "cuda"; calls the providers that have not been called yet."""
    _load(device)
    return tuple(e for edges in _table.values() for e in edges if e.device == device)


def find(source: str, target: str, x: Array, elements: int | None = None) -> tuple[Edge, ...]:
    """The edges that are worth using for arrays on the device of ``x``, best first.

    x: the dense array, or the values of the source. elements: number of dense elements; default: those of ``x``.
    """
    size = x.size if elements is None else elements
    return tuple(e for e in _registered(source, target, x) if e.accepts(x, size))


def take(source: str, target: str, given: Any, params: dict[str, Any], x: Array, elements: int | None = None) -> Any:
    """The result of the best edge for ``given``; x and elements as for ``find``.

    None if there is no edge, or if every edge returns None; then the caller must run its general code.
    """
    for edge in _registered(source, target, x):  # most conversions of small matrices end here: keep it short
        if edge.accepts is always or edge.accepts(x, x.size if elements is None else elements):
            with current_device(x):
                result = edge.function(given, params)
            if result is not None:
                return result
    return None


def _registered(source: str, target: str, x: Array) -> tuple[Edge, ...]:
    """The edges from source to target on the device of ``x``, those that are not worth using among them."""
    device = "cuda" if is_cupy(x) else "cpu"
    if _waiting[device]:
        _load(device)
    return _table.get((source, target, device), ())


def _load(device: str) -> None:
    with _lock:
        while _waiting[device]:
            provider = _waiting[device][0]
            for edge in provider():
                _table[edge.key] = (*_table.get(edge.key, ()), edge)
            _waiting[device].pop(0)
