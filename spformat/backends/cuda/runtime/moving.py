"""Run the launches of a product for other memory: only the addresses among their arguments are replaced.

To prepare launches (checks of alignment, a grid, tensor maps) takes several times as long as to queue them. But of all
that, only the addresses of B, C and the bias differ from call to call where memory is allocated anew. ``moving``
prepares the launches once, with addresses that remember which operand they belong to (``Address``), and so learns which
arguments they become. A later call writes its own addresses there.

What else may depend on an address is its alignment, so the caller keeps one product for each ``alignment`` of the
operands. Where launches use an address for anything else, ``moving`` refuses, and they are prepared anew for each call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from .addresses import Address, Addresses
from .launch import Call, Library, Moved, Operands, Prepare
from .scratch import captured


def moving(prepare: Prepare | Library, o: Operands, lock: Any) -> tuple[Sequence[Call], Moving | None]:
    """The calls of a product for ``o``, and the product for all operands that differ from them in nothing but their
    addresses, of the same ``alignment``. It is None where the calls depend on more than that.

    lock: as ``LaunchSequence`` takes it. The calls must not be those of a captured stream.
    """
    uses: list[str] = []
    if not (o.b and o.c):  # an operand without memory
        return prepare(o), None
    b, c, bias = (Address.of(at, i, 0, uses) if at else at for i, at in enumerate((o.b, o.c, o.bias)))
    calls = prepare(o._replace(b=b, c=c, bias=bias))
    moved = [call.moved() if hasattr(call, "moved") else None for call in calls]
    known = [m for m in moved if m is not None]
    if uses or len(known) < len(moved):
        return calls, None
    return calls, Moving(known, prepare, o, lock)


class Moving:
    """A product on one stream for operands of one form at any addresses of one ``alignment``.

    Several launches are kept together by ``lock``, as ``LaunchSequence`` does it.
    """

    __slots__ = ("_calls", "_lock", "_operands", "_prepare")

    def __init__(self, calls: Sequence[Moved], prepare: Prepare | Library, operands: Operands, lock: Any) -> None:
        self._calls, self._prepare, self._operands = calls, prepare, operands
        self._lock = threading.Lock() if len(calls) == 1 else lock

    def __call__(self, addresses: Addresses) -> None:
        """Queue the product for operands at these addresses."""
        with self._lock:
            if len(self._calls) > 1 and captured(self._operands.stream):
                b, c, bias = addresses
                for call in self._prepare(self._operands._replace(b=b, c=c, bias=bias)):
                    call()
                return
            for moved in self._calls:
                moved(addresses)
