"""What CSR, CSC and COO share: each value is an item of its own, and stored zeros are items too."""

from __future__ import annotations

from typing import ClassVar

from ..arrays.dtypes import nonzero_mask
from ..arrays.library import Array
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
        return self.nnz - int(nonzero_mask(self.data).sum())  # synchronize!
