"""What kernels derive from the arrays of a matrix: kept beside them, or instead of them (*kernel order*).

A matrix on a device would take twice its bytes if a kernel's own order of its values were kept beside its arrays. What
has everything that the arrays have replaces them: the matrix and its aliases drop their references, and an array that
is asked for afterwards is a new one, computed from the order. docs/decisions/0042-bytes-at-rest.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np

from ..arrays.library import Array, current_device, device_of, span
from .declare import declarations
from .fields import Derived

Built = TypeVar("Built")
_lock = threading.Lock()
"""For the moments in which a matrix gets an alias, or arrays are dropped. Reading an array needs no lock."""


class KernelOrder(Protocol):
    """Everything that the declared arrays of a matrix have, in the order of a kernel. It must not refer to the
    matrix."""

    def arrays(self) -> tuple[Array, ...]:
        """The arrays on the device that it consists of."""

    def restore(self) -> dict[str, Array]:
        """New declared arrays, equal to the old ones bit by bit; queued on the current stream of the device, which is
        current."""


Order = TypeVar("Order", bound=KernelOrder)


@dataclass(frozen=True, eq=False)
class InOrder:
    """What a matrix remembers of arrays that it has dropped, and how it gets them back."""

    order: KernelOrder
    layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
    device: str

    def restore(self) -> dict[str, Array]:
        """New arrays by name."""
        with current_device(self.order.arrays()[0]):
            return self.order.restore()


class KernelArrays(Derived):
    """What kernels derived from a matrix, by key; the same object for the matrix and its aliases."""

    __slots__ = ("in_order", "keeps_arrays", "sharers")

    def __init__(self) -> None:
        self.in_order: InOrder | None = None
        self.keeps_arrays = False
        self.sharers: list[weakref.ref[Any]] = []
        """The matrix and its aliases, from the first alias on: all that drop their arrays."""


@functools.cache
def _array_names(cls: Any) -> frozenset[str]:
    return frozenset(d.name for d in declarations(cls)[0])


class KernelOrdered:
    """The methods of a matrix that keeps what kernels derive from it. ``Format`` derives from this class."""

    __slots__ = ()

    if not TYPE_CHECKING:  # else every misspelt attribute would have a type

        def __getattr__(self, name: str) -> Any:
            """A declared array that was dropped, computed anew: only what no slot holds is looked up here."""
            if name in _array_names(type(self)):
                in_order = self._kernel_arrays.in_order
                if in_order is not None:
                    return in_order.restore()[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    def in_kernel_order(self) -> bool:
        """Whether the matrix is kept in the order of a kernel: each array that is read is then a new one."""
        me: Any = self
        return me._kernel_arrays.in_order is not None

    def kernel_arrays(self, key: Any, build: Callable[[], Built]) -> Built:
        """What a kernel derives from the arrays. It is built once for each key and shared by all plans of the
        matrix."""
        kept: KernelArrays = self._kernel_arrays  # type: ignore[attr-defined]
        if key not in kept:
            kept[key] = build()
        built: Built = kept[key]
        return built

    def kernel_order(self, key: Any, build: Callable[[], Order]) -> Order:
        """``kernel_arrays`` for what has everything that the arrays have: the matrix and its aliases drop their arrays.

        build: the order. When it returns, nothing that is queued on any stream of the device reads the arrays any more
            (``launch.finish_device``): their memory may be used again at once. It must not refer to the matrix.

        Only the first order of a matrix replaces its arrays; another one is kept beside it. All kernels that the
        dispatcher normally chooses should therefore take the same order.
        """
        kept: KernelArrays = self._kernel_arrays  # type: ignore[attr-defined]
        if key in kept:
            return kept[key]  # type: ignore[no-any-return]
        order = build()
        with _lock:
            order = kept.setdefault(key, order)
            if kept.keeps_arrays:
                return order
            if kept.in_order is None:
                kept.in_order = _described(self, order)  # from here on every array can be read, dropped or not
            for known in (*kept.sharers, weakref.ref(self)):
                _drop(known())
        return order

    def forget_derived(self) -> None:
        """Drop all plans, and what kernels derived from the arrays: these may have been written in place. Arrays in
        kernel order have not: each that is read is a new one."""
        me: Any = self
        me._plans.clear()
        if not self.in_kernel_order:
            me._kernel_arrays.clear()

    def keep_arrays(self) -> None:
        """From now on orders of kernels are kept beside the arrays of the matrix and its parts: for arrays whose memory
        others keep, so that nothing would be freed, or that somebody recognises by their addresses."""
        me: Any = self
        me._kernel_arrays.keeps_arrays = True
        for part in me.parts_by_name().values():
            part.keep_arrays()

    def alias(self) -> Self:
        """Another object with the same arrays and ``kernel_arrays``, marked as validated, without plans.

        A plan refers to an alias of the matrix. If it referred to the matrix, which refers to the plan, the two would
        keep each other from being freed. The contents must be valid.
        """
        me: Any = self
        kept: KernelArrays = me._kernel_arrays
        cls: Any = type(me)
        other, put, names = object.__new__(cls), object.__setattr__, _array_names(cls)
        with _lock:  # arrays are not dropped meanwhile, or the alias would keep them
            for field in _fields(cls):
                if field not in names or kept.in_order is None:
                    put(other, field, getattr(me, field))
            put(other, "_marked", True)
            put(other, "_plans", Derived())
            put(other, "_kernel_arrays", kept)
            kept.sharers[:] = [x for x in kept.sharers if x() is not None and x() is not me]
            kept.sharers += weakref.ref(me), weakref.ref(other)
        return other  # type: ignore[no-any-return]

    def restored(self) -> Self:
        """The matrix itself, or where it is in kernel order another one with new arrays, which share nothing with it:
        for code that reads several arrays, or one several times."""
        me: Any = self
        in_order: InOrder | None = me._kernel_arrays.in_order
        if in_order is None:
            return self
        params = {d.name: getattr(me, d.name) for d in me.declared_params()}  # params() may leave out what follows
        fields = {"shape": me.shape, **params, **me.tables(), **in_order.restore()}
        other = type(me).unchecked(**fields)
        object.__setattr__(other, "_marked", me._marked)
        return other  # type: ignore[no-any-return]

    def array_layout(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Name -> (dtype, shape) of each array, in the order of declaration; nothing is restored."""
        me: Any = self
        in_order: InOrder | None = me._kernel_arrays.in_order
        if in_order is not None:
            return in_order.layout
        return {name: (a.dtype, a.shape) for name, a in me.arrays().items()}

    def resident(self) -> Array:
        """An array of the matrix that is in memory, to see on which device it is."""
        me: Any = self
        in_order: InOrder | None = me._kernel_arrays.in_order
        if in_order is not None:
            return in_order.order.arrays()[0]
        return me.values if me.value_field() else next(iter(me.parts_by_name().values())).resident()

    def order_now(self) -> Any:
        """The same object as before if the matrix is at the same place as before; for a composed one always another."""
        me: Any = self
        return me._kernel_arrays.in_order if me.value_field() and not me.declared_parts() else object()

    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first address, address after the last) of the memory in which the matrix is kept, parts included."""
        me: Any = self
        in_order: InOrder | None = me._kernel_arrays.in_order
        own = me.arrays().values() if in_order is None else in_order.order.arrays()
        below = [s for part in me.parts_by_name().values() for s in part.spans()]
        return (*(span(x) for x in own if x.size), *below)


@functools.cache
def _fields(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls) if not f.name.startswith("_"))


def _described(matrix: Any, order: KernelOrder) -> InOrder:
    layout = {name: (a.dtype, a.shape) for name, a in matrix.arrays().items()}
    return InOrder(order, layout, device_of(order.arrays()[0]))


def _drop(matrix: Any) -> None:
    """Empty the slots of the arrays of a matrix."""
    cls: Any = type(matrix)
    for name in _array_names(cls) if matrix is not None else ():
        with contextlib.suppress(AttributeError):  # of a slot that is empty already
            object.__delattr__(matrix, name)
