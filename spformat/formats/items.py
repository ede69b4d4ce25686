"""What CSR, CSC and COO share: each value is an item of its own, and stored zeros are items too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

from ..arrays.dtypes import nonzero_mask
from ..arrays.library import Array, current_device
from .hooks import Hooks


class Items(Hooks):
    """Counts of a format that stores an item for each value of ``data``."""

    __slots__ = ()

    keeps_stored_zeros: ClassVar[bool] = True
    data: Array

    @property
    def nnz(self) -> int:
        """Stored items, stored zeros included: O(1)."""
        return int(self.data.size)

    @property
    def stored_zeros(self) -> int:
        """Items whose value is zero: a scan."""
        with current_device(self.data):
            return self.nnz - int(nonzero_mask(self.data).sum())  # synchronize!

    def _mapped(self, function: Callable[[Array], Array]) -> Self:
        """The matrix whose values are ``function`` of these. The indices stay, so nothing is converted or sorted."""
        me: Any = self
        me.ensure_valid()
        with current_device(me.data):
            return type(me).trusted(**(me.fields() | {"data": function(me.data)}))  # type: ignore[no-any-return]
