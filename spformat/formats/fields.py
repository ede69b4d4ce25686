"""What can be read from a matrix by the declaration of its fields: arrays, params, tables, values, and what is wrong
with their layout. Nothing here scans the contents."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ..arrays.dtypes import VALUE_TYPES
from ..arrays.library import Array, device_of
from .array_checks import array_problems
from .declare import Declared, value_field_of


class Derived(dict[Any, Any]):
    """What follows from a matrix and is kept with it.

    Not a plain dictionary, because of torch.compile: for ``A @ x`` it rebuilds a frozen dataclass from its fields if it
    knows them all, which fails for a matrix. A class that it does not know makes it leave the product alone.
    """

    __slots__ = ()


class Fields(Declared):
    """The methods of an object that follow from the declaration of its fields. ``Format`` derives from this class."""

    __slots__ = ()
    value_dtypes: ClassVar[tuple[str, ...]] = tuple(VALUE_TYPES)

    def dims(self) -> dict[str, int]:
        """Label -> size or bound, as far as shape, params and tables decide it. For any other label the first array
        that has it decides."""
        return {}

    def layout_problems(self) -> list[tuple[str, str]]:
        """(array, text) for every wrong dtype, rank, length or device: O(1), without synchronisation."""
        problems: list[tuple[str, str]] = []
        sizes = dict(self.dims())
        for name, label in self.declared_tables():
            if len(getattr(self, name)) != sizes[label]:
                problems.append((name, f"{name}: expected {sizes[label]} entries, got {len(getattr(self, name))}"))
        return problems + array_problems(self.declared_arrays(), self.arrays(), sizes, self.value_dtypes)

    def arrays(self) -> dict[str, Array]:
        """Name -> array, in declaration order."""
        return {d.name: getattr(self, d.name) for d in self.declared_arrays()}

    def params(self) -> dict[str, Any]:
        """Exactly the arguments of ``from_csr``, defaults resolved."""
        return {d.name: getattr(self, d.name) for d in self.declared_params()}

    def tables(self) -> dict[str, tuple[int, ...]]:
        """Host ints that follow from the content and that a launch needs."""
        return {name: getattr(self, name) for name, _ in self.declared_tables()}

    @property
    def values(self) -> Array:
        """The VALUE array, whatever its name."""
        cls: Any = type(self)
        return getattr(self, value_field_of(cls))

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the values."""
        in_order = self._kernel_arrays.in_order  # type: ignore[attr-defined]
        dtype: np.dtype[Any] = self.values.dtype if in_order is None else in_order.layout[self.value_field()][0]
        return dtype

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:<id>"."""
        in_order = self._kernel_arrays.in_order  # type: ignore[attr-defined]
        return device_of(self.values) if in_order is None else str(in_order.device)

    @property
    def stored(self) -> int:
        """Value slots, padding included: O(1)."""
        in_order = self._kernel_arrays.in_order  # type: ignore[attr-defined]
        return int(self.values.size) if in_order is None else math.prod(in_order.layout[self.value_field()][1])
