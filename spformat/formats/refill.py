"""New values for a matrix whose structure stays: ``a.refill(values)``, for every format.

Where each item of the CSR is stored is found out once: the format itself converts a matrix whose values are the numbers
of their slots. So nothing here knows a layout, and every format that moves the bits of its values has the method,
composed ones too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays.dtypes import bits, nonzero_mask
from ..arrays.library import Array, current_device, device_of, index_dtype, is_cupy, namespace, unmasked
from ..arrays.scans import first_true
from ..errors import StructureError, UsageError

EVERY = slice(None)


class Refill:
    """The method ``refill``. ``Format`` derives from this class."""

    __slots__ = ()

    def refill(self, values: Array) -> Self:
        """The same structure with other values: ``values[i]`` replaces the value of item i of ``self.to_csr()``; for a
        stack, the items of its matrices one after another.

        values: VALUE[nnz] of the dtype and on the device of the matrix. For a format that keeps stored zeros (csr, csc,
            coo, ell-buckets) they may be zero, and replace stored zeros, too. For all others none may be zero,
            because what holds a zero only (a block, a vector, a bit, a position in a group) is not stored.

        O(stored values) and no conversion: the first call finds out where each item is stored, and keeps that with the
        matrix and with its refills (an index for each item; nothing where values are stored in the order of the CSR).
        The result is valid, as the matrix is.

        Raises UsageError for another length, dtype or device, StructureError for a zero that the format cannot hold.
        """
        me: Any = self
        _check_kind(me, values)
        me.ensure_valid()
        with current_device(me.values):
            places: Places = me.kernel_arrays("refill", lambda: Places.of(me))
            _check_contents(me, values, places.count)
            arrays = []
            for old, (items, slots) in zip(value_arrays(me), places.of_arrays, strict=True):
                new = old.copy()
                bits(new).reshape(-1)[slots] = bits(values)[items]
                arrays.append(new)
            out = with_values(me, iter(arrays))
        out.kernel_arrays("refill", lambda: places)
        return out  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Places:
    """Where the items of the CSR of a matrix are stored."""

    count: int
    """Items of the CSR."""
    of_arrays: tuple[tuple[Array | slice, Array | slice], ...]
    """For each value array: the items that it holds, and their slots in it."""

    @classmethod
    def of(cls, f: Any) -> Places:
        """The places of a valid matrix. Slots are numbered through all value arrays, and the CSR of a matrix whose
        values are these numbers says the slot of each item; several such matrices where a value has too few bits."""
        arrays = list(value_arrays(f))
        xp, total = namespace(arrays[0]), sum(a.size for a in arrays)
        # The sign stays clear and a code is never zero, so that each code is a nonzero of any value type.
        radix = (1 << (8 * f.dtype.itemsize - 1)) - 1
        slots, weight = None, 1
        while slots is None or weight < total:
            digits = _csr_of_codes(f, arrays, weight, radix)
            slots = digits * weight if slots is None else slots + digits * weight
            weight *= radix
        places: list[tuple[Array | slice, Array | slice]] = []
        at = 0
        for a in arrays:
            items: Array | slice = EVERY
            mine = slots
            if len(arrays) > 1:
                items = xp.flatnonzero((slots >= at) & (slots < at + a.size))  # synchronize!
                mine = slots[items] - at
                items = items.astype(index_dtype(slots.size))
            in_order = mine.size == a.size and bool((mine == xp.arange(a.size)).all())  # synchronize!
            places.append((items, EVERY if in_order else mine.astype(index_dtype(a.size))))
            at += a.size
        return cls(int(slots.size), tuple(places))


def value_arrays(f: Any) -> Iterator[Array]:
    """The VALUE array of a matrix, if it has one of its own, and then those of its parts."""
    if f.value_field():
        yield getattr(f, f.value_field())
    for p in f.parts_by_name().values():
        yield from value_arrays(p)


def with_values(f: Any, arrays: Iterator[Array]) -> Any:
    """A matrix of the same structure with other value arrays, in the order of ``value_arrays``; they must be valid."""
    fields = f.fields()
    if f.value_field():
        fields[f.value_field()] = next(arrays)
    parts = {name: with_values(p, arrays) for name, p in f.parts_by_name().items()}
    return type(f).trusted(**(fields | f.fields_of_parts(parts)))


def _csr_of_codes(f: Any, arrays: list[Array], weight: int, radix: int) -> Array:
    """int64[nnz]: for each item of the CSR, the digit ``slot // weight % radix`` of the slot that holds it."""
    xp, coded, at = namespace(arrays[0]), [], 0
    for a in arrays:
        code = (xp.arange(at, at + a.size, dtype=np.int64) // weight % radix + 1).astype(bits(a).dtype).reshape(a.shape)
        if not f.keeps_stored_zeros:
            code[~nonzero_mask(a)] = 0
        coded.append(code.view(a.dtype))
        at += a.size
    whole = with_values(f, iter(coded))
    matrices = [whole] if f.rank == 2 else list(whole.parts_by_name().values())
    data = [bits(m.to_csr().data).astype(np.int64) for m in matrices]
    codes = data[0] if len(data) == 1 else xp.concatenate(data)
    return (
        codes if f.keeps_stored_zeros else codes[codes != 0]
    ) - 1  # a stored zero of a part is no item  # synchronize!


def _check_kind(f: Any, values: Any) -> None:
    """UsageError unless ``values`` is an array of the dtype and on the device of ``f``."""
    if not isinstance(values, np.ndarray) and not is_cupy(values):
        raise UsageError(f"{f.name}: refill: expected a numpy or CuPy array, got {type(values).__name__}")
    if device_of(unmasked(values)) != f.device:
        where = f"values on {f.device}, where the matrix is, got some on {device_of(values)}"
        raise UsageError(f"{f.name}: refill: expected {where}; move one of them")
    if values.dtype != f.dtype:
        text = f"expected values of dtype {f.dtype}, got {values.dtype}; use values.astype({f.dtype.name!r})"
        raise UsageError(f"{f.name}: refill: {text}")


def _check_contents(f: Any, values: Array, count: int) -> None:
    """UsageError for another number of values, StructureError for zeros that ``f`` does not hold."""
    if values.shape != (count,):
        text = f"expected one value for each item of to_csr(), shape ({count},), got {values.shape}"
        raise UsageError(f"{f.name}: refill: {text}")
    zeros = None if f.keeps_stored_zeros else first_true(~nonzero_mask(values))
    if zeros:
        at, many = zeros
        raise StructureError(
            f"{f.name}: refill: expected values other than zero, got {many} zeros, the first for item {at}; csr keeps "
            f"them, and convert(.., {f.name!r}) of that csr drops them",
            unit="value", count=many, first=at, found=0,
        )  # fmt: skip
