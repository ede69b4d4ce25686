"""The scans of contents that every format has, and the mark of a matrix that passed them."""

from __future__ import annotations

from typing import Any, Self

from ..arrays.library import current_device
from . import edges


class Checked:
    """``validate`` and what it consists of. ``Format`` derives from this class."""

    __slots__ = ()

    def check_memory(self) -> None:
        """Scan for contents that would make a kernel read or write out of bounds; raises InvariantError."""

    def check_canonical(self) -> None:
        """Scan for everything else that ``from_csr`` guarantees; raises InvariantError."""

    def quick_check(self) -> bool:
        """True if an edge has scanned all contents and they are valid. Otherwise the checks must run; they name what is
        wrong."""
        me: Any = self
        return bool(edges.take(me.edge_name(me.dtype), edges.CHECK, me, me.params(), me.values))

    def validate(self) -> Self:
        """Scan all contents, memory safety first; sets the validated mark and returns self.

        Called again after arrays were written in place, it also forgets what products derived from the old contents.

        Raises PointerError, IndexBoundsError, OrderError or PatternError for the first offender, with
        fields array, index, value, expected and count; the matrix is then not marked as validated.
        """
        me: Any = self
        again = me._marked
        try:
            self.scan_contents()
        except BaseException:
            object.__setattr__(self, "_marked", False)
            me.forget_derived()
            raise
        if again:
            me.forget_derived()
        object.__setattr__(self, "_marked", True)
        return self

    def scan_contents(self) -> None:
        """``validate()`` without the mark."""
        matrix: Any = self
        me = matrix.restored()
        with current_device(me.values):
            if not me.quick_check():
                me.check_memory()
                me.check_canonical()

    @property
    def is_validated(self) -> bool:
        """Whether this object is marked as validated."""
        me: Any = self
        return bool(me._marked)

    def in_order(self) -> Self:
        """This matrix with sorted indices, where the format accepts them in any order (CSR); else ``validate()``.

        Raises OrderError for an index that is stored twice, which sorting cannot repair.
        """
        return self.validate()

    def ensure_valid(self) -> Self:
        """``validate()``, unless this object is already marked as validated."""
        me: Any = self
        return self if me._marked else self.validate()
