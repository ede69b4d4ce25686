"""Addresses that remember which operand of a call they belong to, so that they can be replaced among its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

PERIOD = 256
"""Launches may depend on an address modulo this, and on nothing else of it."""

Addresses = tuple[int, int, int]
"""Those of B, C and the bias (0 for none) of a call."""
B, C, BIAS = range(3)


def alignment(b: int, c: int, bias: int, stream: int) -> Any:
    """A key: operands of one form and one ``alignment`` are multiplied by the same launches at other addresses."""
    if (b | c | bias) % PERIOD == 0:  # memory as allocators give it
        return stream
    return b % PERIOD, c % PERIOD, bias % PERIOD, stream


class Address(int):
    """The address of an operand, or of a place in it: an int that remembers which operand, and the distance.

    ``uses``: names of operations whose results may depend on more than the address modulo ``PERIOD``.
    """

    operand: int
    shift: int
    uses: list[str]

    @classmethod
    def of(cls, value: int, operand: int, shift: int, uses: list[str]) -> Address:
        """The address ``value``, which is ``shift`` bytes behind the start of the operand."""
        address = cls(value)
        address.operand, address.shift, address.uses = operand, shift, uses
        return address

    __array_ufunc__ = None
    """numpy's numbers leave arithmetic to this class."""

    def __add__(self, distance: int) -> int:
        if type(distance) is not int:
            return int(_noted("__add__")(self, distance))
        return Address.of(int.__add__(self, distance), self.operand, self.shift + distance, self.uses)

    __radd__ = __add__

    def __mod__(self, modulus: int) -> int:
        if type(modulus) is not int or modulus <= 0 or PERIOD % modulus:
            return int(_noted("__mod__")(self, modulus))
        return int.__mod__(self, modulus)

    def __and__(self, mask: int) -> int:
        if type(mask) is not int or not 0 <= mask < PERIOD:
            return int(_noted("__and__")(self, mask))
        return int.__and__(self, mask)

    __rand__ = __and__


def _noted(name: str) -> Any:
    def operation(self: Address, *rest: Any) -> Any:
        self.uses.append(name)
        return getattr(int.__int__(self), name)(*[x.item() if isinstance(x, np.generic) else x for x in rest])

    return operation


for _name in (
    "sub rsub mul rmul floordiv rfloordiv truediv rtruediv divmod rdivmod rmod pow rpow lshift rlshift rshift rrshift "
    "or ror xor rxor neg pos abs invert int float index lt le gt ge eq ne hash round trunc"
).split():
    setattr(Address, f"__{_name}__", _noted(f"__{_name}__"))
