"""Launch kernels: everything between the operands of a call and the driver.

A call of a plan may take 8 us of host time, and a CuPy RawKernel call alone takes 5. A kernel's module therefore works
only once for the same operands: it returns *calls*, which are launches with every argument in place. A plan that gets
the same operands again (in a serving loop or a training step) runs the same calls again.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ....arrays.library import device_error, is_recorded
from ....errors import DeviceError, SpformatError
from . import context
from .addresses import Address, Addresses
from .early import early_driver
from .scratch import captured
from .tensor_map import UNMAPPED, MapCopy, Mapped, TensorMap

_CODES = {"P": "Q", "i": "i", "q": "q", "f": "f", "d": "d"}
MAX_GRID_Y = 65535
"""The driver's bound on the second extent of a grid; a kernel walks what lies beyond it."""
MAX_COLUMNS = 2**31 - 2**16
"""Most columns of B. Kernels count columns in 32 bits, including those of a tile that ends past N."""

Call = Callable[[], None]
"""Queues one piece of work on the stream that it was prepared for; may be called any number of times."""
AnyCall = TypeVar("AnyCall", bound=Call)
Moved = Callable[[Addresses], None]
"""Queues the same work for operands at other addresses; only one thread may call it at a time."""


class Launch:
    """A compiled function with its leading arguments packed.

    ``signature``: one letter per kernel parameter: P pointer, i int32, q int64, f float, d double, or a ctypes
    class for a by-value struct (a 128-byte tensor map). Other structs hold no address of an operand. ``fixed``: the
    leading values. Arrays in ``fixed`` are kept alive by the launch. Threads may share a launch. ``waits``: the
    kernel waits itself for the launch before it (launch_order.cuh), so that it may begin before that one is over.
    """

    __slots__ = ("_function", "_keep", "_kinds", "_lock", "_pack", "_places", "_room", "_shared", "_shared_at",
                 "_tail_at", "driver", "early", "smem", "threads")  # fmt: skip

    def __init__(
        self, function: Any, signature: Sequence[Any], fixed: Sequence[Any], threads: int, smem: int = 0,
        waits: bool = False,
    ) -> None:  # fmt: skip
        from cupy_backends.cuda.api import driver

        kernel = getattr(function, "kernel", function)
        self._function, self.driver = kernel.ptr, driver
        codes = [_CODES[s] if isinstance(s, str) else f"{ctypes.sizeof(s)}s" for s in signature]
        # The addresses of the arguments, which the driver reads, and behind them the arguments, aligned as in C.
        behind, cut = 8 * len(codes), len(fixed)
        self._kinds = tuple(signature[cut:])
        ends = [behind + struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        self._places = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self._tail_at = ends[cut - 1] if cut else behind
        gaps = [at - end for at, end in zip(self._places[cut:], [self._tail_at, *ends[cut:]], strict=False)]
        tail = "".join(f"{gap}x{code}" for gap, code in zip(gaps, codes[cut:], strict=True))
        self._pack = struct.Struct(f"={tail}").pack_into
        self._room = ctypes.c_char * (-(-max([1, *ends]) // 8) * 8)  # also read as 64-bit words
        self._shared, self._lock = self._room(), threading.Lock()
        for at, code, value in zip(self._places, codes, [_plain(v) for v in fixed], strict=False):
            struct.pack_into("=" + code, self._shared, at, value)
        self._point(self._shared)
        self._shared_at = ctypes.addressof(self._shared)
        self._keep = (function, kernel, tuple(fixed))
        self.threads, self.smem, self.early = threads, smem, early_driver() if waits else None

    def _point(self, room: Any) -> None:
        """Write the addresses of the arguments in ``room``."""
        base = ctypes.addressof(room)
        struct.pack_into(f"={len(self._places)}Q", room, 0, *[base + place for place in self._places])

    def bind(self, grid: tuple[int, int, int], stream: int, *tail: Any) -> Bound:
        """The launch on ``stream`` (a cudaStream_t as int) with its run-time arguments, in order; structs as bytes."""
        return Bound(self, (self._function, *grid, self.threads, 1, 1, self.smem, stream), tail)

    def __call__(self, grid: tuple[int, int, int], stream: int, *tail: Any) -> None:
        """Launch once; structs may be ctypes objects."""
        self.bind(grid, stream, *[bytes(x) if isinstance(x, ctypes.Structure) else x for x in tail])()

    def now(self, blocks: int, stream: int, tail: Sequence[Any]) -> None:
        """Launch ``blocks`` blocks once: ``bind`` without the object, for launches that do not come again."""
        if not blocks:
            return
        try:
            with self._lock:  # the driver copies the arguments before it returns
                self._pack(self._shared, self._tail_at, *tail)
                self.driver.launchKernel(
                    self._function, blocks, 1, 1, self.threads, 1, 1, self.smem, stream, self._shared_at, 0
                )
        except self.driver.CUDADriverError as e:
            if getattr(e, "status", 0) == context.NO_CONTEXT and context.made_current():
                return self.now(blocks, stream, tail)
            raise _driver_error(e) from e

    def tail(self) -> list[tuple[int, int, Any]]:
        """For each run-time argument: where its address lies in the memory of all arguments and where the argument
        does, in words of 8 bytes (rounded down), and its entry in the signature."""
        first = len(self._places) - len(self._kinds)
        return [(first + i, self._places[first + i] // 8, kind) for i, kind in enumerate(self._kinds)]

    def packed(self, tail: tuple[Any, ...]) -> Any:
        """Memory with all arguments in place."""
        with self._lock:
            room = self._room.from_buffer_copy(self._shared)
        self._pack(room, self._tail_at, *tail)
        self._point(room)
        return room

    def once(self, driver: Any, where: tuple[int, ...], tail: tuple[Any, ...]) -> None:
        """Launch by ``driver`` from memory that all calls share."""
        with self._lock:  # the driver copies the arguments before it returns
            self._pack(self._shared, self._tail_at, *tail)
            driver.launchKernel(*where, self._shared_at, 0)


class Bound:
    """A launch with every argument, on one stream. Any thread may run it, any number of times.

    The first run packs the arguments into memory that all calls of the launch share. Only the second run allocates
    memory of its own for them, because that costs as much as the launch, and most operands never come again.
    """

    __slots__ = ("_arguments", "_driver", "_has_run", "_launch", "_ready", "_tail", "_where")

    def __init__(self, launch: Launch, where: tuple[int, ...], tail: tuple[Any, ...]) -> None:
        self._launch, self._where, self._tail, self._driver = launch, where, tail, launch.driver
        self._arguments: Any = None
        self._ready: tuple[int, ...] = ()
        self._has_run = False

    def early(self) -> Bound:
        """The same launch, which may begin before the one before it is over; this one if the kernel does not wait."""
        if self._launch.early is None:
            return self
        bound = Bound(self._launch, self._where, self._tail)
        bound._driver = self._launch.early
        return bound

    def moved(self) -> Moved | None:
        """The same launch for operands at other addresses; None if its arguments do not say where they are."""
        if not all(self._where[1:4]):
            return _nothing
        pointers, maps = [], []
        room = self._launch.packed(self._tail)
        words = memoryview(room).cast("B").cast("Q")
        for (entry, word, kind), value in zip(self._launch.tail(), self._tail, strict=True):
            if isinstance(value, Address):
                if kind != "P":
                    return None
                pointers.append((word, value.operand, value.shift))
            elif isinstance(value, Mapped):
                if isinstance(value.address, Address):
                    own = value.copy()
                    words[entry] = own.place
                    maps.append((own, value.address.operand, value.address.shift))
            elif kind is TensorMap and value is not UNMAPPED:
                return None
        keep = self._launch, self._tail
        return MovedLaunch(keep, self._driver, (*self._where, ctypes.addressof(room), 0), words, pointers, maps)

    def __call__(self) -> None:
        try:
            if self._ready:
                self._driver.launchKernel(*self._ready)
            elif not all(self._where[1:4]):
                return  # a grid with an empty extent has nothing to do, and the driver would refuse it
            elif self._has_run:
                self._arguments = room = self._launch.packed(self._tail)
                self._ready = (*self._where, ctypes.addressof(room), 0)
                self._driver.launchKernel(*self._ready)
            else:
                self._launch.once(self._driver, self._where, self._tail)
                self._has_run = True
        except self._driver.CUDADriverError as e:
            if getattr(e, "status", 0) == context.NO_CONTEXT and context.made_current():
                return self()
            raise _driver_error(e) from e


class MovedLaunch:
    """A launch whose pointers are replaced before each run. One thread may use it at a time."""

    __slots__ = ("_arguments", "_driver", "_keep", "_maps", "_pointers", "_words")

    def __init__(
        self, keep: tuple[Launch, tuple[Any, ...]], driver: Any, arguments: tuple[int, ...], words: memoryview,
        pointers: Sequence[tuple[int, int, int]], maps: Sequence[tuple[MapCopy, int, int]],
    ) -> None:  # fmt: skip
        """keep: the launch and its run-time arguments, which keep memory between launches. words: the memory of all
        arguments. pointers: (word, operand, distance from its start); maps: (tensor map, operand, distance)."""
        self._keep, self._driver, self._arguments, self._words = keep, driver, arguments, words
        self._pointers, self._maps = tuple(pointers), tuple(maps)

    def __call__(self, addresses: Addresses) -> None:
        words = self._words
        for word, operand, shift in self._pointers:
            words[word] = addresses[operand] + shift
        for own, operand, shift in self._maps:
            own.move(addresses[operand] + shift)
        try:
            self._driver.launchKernel(*self._arguments)
        except self._driver.CUDADriverError as e:
            if getattr(e, "status", 0) == context.NO_CONTEXT and context.made_current():
                return self(addresses)
            raise _driver_error(e) from e


def _nothing(_: Addresses) -> None:
    """An empty grid, at any addresses."""


def _driver_error(e: Exception) -> SpformatError:
    """The driver's error as an error of this package."""
    typed = device_error(e) or DeviceError(str(e))
    typed.message = f"kernel launch: {typed.message}"
    return typed


def one_after_another(calls: Sequence[AnyCall]) -> list[AnyCall]:
    """The same calls; all but the first may begin before the one before is over, if their kernels wait themselves."""
    return [call.early() if i and isinstance(call, Bound) else call for i, call in enumerate(calls)]  # type: ignore[misc]


class LaunchSequence:
    """Several calls that follow one another on a stream, as one call.

    The calls share a workspace. ``lock`` therefore keeps another thread from queueing its calls between them. They are
    not captured into a CUDA graph: the first launch of a graph after others costs more than all its launches, and a
    model always launches others in between (docs/decisions/0032-addresses-in-place.md).

    While the caller captures the stream, the calls are queued into the caller's graph. That graph may run beside later
    work on the stream, so the calls are prepared anew (``prepare_again``) with memory for that graph.
    """

    __slots__ = ("_calls", "_has_run", "_lock", "_prepare_again", "_stream")

    def __init__(
        self, calls: Sequence[Call], stream: int, lock: Any, prepare_again: Callable[[], Sequence[Call]]
    ) -> None:
        self._calls, self._stream, self._lock, self._has_run = calls, stream, lock, False
        self._prepare_again = prepare_again

    def __call__(self) -> None:
        with self._lock:
            calls = self._prepare_again() if self._has_run and captured(self._stream) else self._calls
            for call in calls:
                call()
            self._has_run = True


def _plain(value: Any) -> Any:
    """A device array as its address, a by-value struct as its bytes, a number as it is."""
    memory: Any = getattr(value, "data", None)
    if hasattr(memory, "ptr"):
        return memory.ptr
    return value if isinstance(value, (int, float)) else bytes(value)


class Operands(NamedTuple):
    """The operands of one call as a kernel's module gets them: raw pointers and extents, all checked."""

    b: int
    c: int
    n: int
    ldb: int
    """Elements between rows of B (layout "row") or columns (layout "col")."""
    ldc: int
    stream: int
    bias: int = 0
    """[M] in the dtype of C, or 0; with ``alpha`` and ``beta`` for problems with an epilogue."""
    alpha: float = 1.0
    beta: float = 0.0


Prepare = Callable[[Operands], Sequence[Bound]]
"""Operands -> the launches (``Launch.bind``) that compute the product, in order. Plans keep these launches and run them
again for the same operands, so they may depend on nothing else that changes between calls."""


Library = Callable[[Operands], Sequence[Call]]
"""Like ``Prepare``, for products of which a library queues some of the work."""


def over_tiles(launch: Launch, row_tiles: int, cols: int, out_col: bool) -> Prepare:
    """A kernel whose grid is row tiles x tiles of ``cols`` columns of C, and whose tail is B, C, N, ldb and the
    elements between rows and between columns of C."""

    def prepare(o: Operands) -> tuple[Bound]:
        grid = (row_tiles, min(MAX_GRID_Y, -(-o.n // cols)), 1)
        c_row, c_col = (1, o.ldc) if out_col else (o.ldc, 1)
        return (launch.bind(grid, o.stream, o.b, o.c, o.n, o.ldb, c_row, c_col),)

    return prepare


def finish_arrays() -> None:
    """Wait for the arrays that a plan derived from A: the calls of the plan may come on any stream."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()  # synchronize!


def restored(a: Any) -> Any:
    """``a.restored()`` for a plan, whose calls may come on any stream: arrays that replaced ones are there."""
    stored = a.restored()
    if stored is not a and not is_recorded(stored.resident()):
        finish_arrays()  # synchronize!
    return stored


def finish_device() -> None:
    """``finish_arrays`` where arrays of A are dropped afterwards (``Format.kernel_order``): a conversion that is queued
    on another stream may still read them, and their memory may be used again at once."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()  # synchronize!
