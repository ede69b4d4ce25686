"""Check operands and launch: everything between a plan's ``__call__`` and the driver.

A whole call has 8 us of host time; a CuPy RawKernel call alone takes 5. So a kernel's module does its work once for
operands: it returns *calls*, launches with every argument, and a plan that meets the same operands again (a serving
loop, a training step) makes the same calls again.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ....arrays.library import device_error
from ....errors import DeviceError, SpformatError
from .scratch import captured

_CODES = {"P": "Q", "i": "i", "q": "q", "f": "f", "d": "d"}
MAX_GRID_Y = 65535
"""The driver's bound on the second extent of a grid; a kernel walks what lies beyond it."""
MAX_COLUMNS = 2**31 - 2**16
"""Kernels count columns in 32 bits, those of a tile that ends past N among them."""
GRAPH_AFTER = 2
"""Times that several launches of one product are made one by one."""

Call = Callable[[], None]
"""Queues one piece of work on the stream that it was made for; may be made again."""


class Launch:
    """A compiled function with its leading arguments packed.

    ``signature``: one letter per kernel parameter: P pointer, i int32, q int64, f float, d double, or a ctypes
    class for a by-value struct (a 128-byte tensor map). ``fixed``: the leading values. Arrays in
    ``fixed`` are kept alive by the launch. Threads may share a launch.
    """

    __slots__ = ("_function", "_keep", "_lock", "_pack", "_places", "_room", "_shared", "_shared_at", "_tail_at",
                 "driver", "smem", "threads")  # fmt: skip

    def __init__(
        self, function: Any, signature: Sequence[Any], fixed: Sequence[Any], threads: int, smem: int = 0
    ) -> None:
        from cupy_backends.cuda.api import driver

        kernel = getattr(function, "kernel", function)
        self._function, self.driver = kernel.ptr, driver
        codes = [_CODES[s] if isinstance(s, str) else f"{ctypes.sizeof(s)}s" for s in signature]
        # The addresses of the arguments, which the driver reads, and behind them the arguments, aligned as in C.
        behind, cut = 8 * len(codes), len(fixed)
        ends = [behind + struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        self._places = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self._tail_at = ends[cut - 1] if cut else behind
        gaps = [at - end for at, end in zip(self._places[cut:], [self._tail_at, *ends[cut:]], strict=False)]
        tail = "".join(f"{gap}x{code}" for gap, code in zip(gaps, codes[cut:], strict=True))
        self._pack = struct.Struct(f"={tail}").pack_into
        self._room = ctypes.c_char * max([1, *ends])
        self._shared, self._lock = self._room(), threading.Lock()
        for at, code, value in zip(self._places, codes, [_plain(v) for v in fixed], strict=False):
            struct.pack_into("=" + code, self._shared, at, value)
        self._point(self._shared)
        self._shared_at = ctypes.addressof(self._shared)
        self._keep = (function, kernel, tuple(fixed))
        self.threads, self.smem = threads, smem

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

    def packed(self, tail: tuple[Any, ...]) -> Any:
        """Memory with all arguments in place."""
        with self._lock:
            room = self._room.from_buffer_copy(self._shared)
        self._pack(room, self._tail_at, *tail)
        self._point(room)
        return room

    def once(self, where: tuple[int, ...], tail: tuple[Any, ...]) -> None:
        """Launch from memory that all calls share."""
        with self._lock:  # the driver copies the arguments before it returns
            self._pack(self._shared, self._tail_at, *tail)
            self.driver.launchKernel(*where, self._shared_at, 0)


class Bound:
    """A launch with every argument, on one stream; may be made again and again, by any thread.

    Memory of its own for the arguments it gets when it is made a second time: that costs as much as the launch, and
    operands may never come again.
    """

    __slots__ = ("_arguments", "_driver", "_launch", "_made", "_ready", "_tail", "_where")

    def __init__(self, launch: Launch, where: tuple[int, ...], tail: tuple[Any, ...]) -> None:
        self._launch, self._where, self._tail, self._driver = launch, where, tail, launch.driver
        self._arguments: Any = None
        self._ready: tuple[int, ...] = ()
        self._made = False

    def on(self, stream: int) -> Bound:
        """The same launch on another stream."""
        return Bound(self._launch, (*self._where[:-1], stream), self._tail)

    def __call__(self) -> None:
        try:
            if self._ready:
                self._driver.launchKernel(*self._ready)
            elif not all(self._where[1:4]):
                return  # a grid with an empty extent has nothing to do, and the driver would refuse it
            elif self._made:
                self._arguments = room = self._launch.packed(self._tail)
                self._ready = (*self._where, ctypes.addressof(room), 0)
                self._driver.launchKernel(*self._ready)
            else:
                self._launch.once(self._where, self._tail)
                self._made = True
        except self._driver.CUDADriverError as e:
            raise _driver_error(e) from e


def _runtime_error() -> Any:
    from cupy.cuda import runtime

    return runtime.CUDARuntimeError


def _driver_error(e: Exception) -> SpformatError:
    """What the driver said, as an error of ours."""
    typed = device_error(e) or DeviceError(str(e))
    typed.message = f"kernel launch: {typed.message}"
    return typed


class LaunchSequence:
    """Calls that follow one another on a stream, made as one.

    They share a workspace: another thread's must not come between.

    From the third time on launches go to the driver as one CUDA graph, for half the host time of one of them.
    While the stream is captured they go one by one: the graph that takes them up then is the caller's, and may run
    beside what follows on the stream, so they are prepared once more (``again``), with memory for a graph. One by one
    goes always what is no launch of ours.
    """

    __slots__ = ("_again", "_calls", "_graph", "_made", "_stream", "_whole")

    def __init__(self, calls: Sequence[Call], stream: int, whole: Any, again: Callable[[], Sequence[Call]]) -> None:
        self._calls, self._stream, self._whole, self._made = calls, stream, whole, 0
        self._graph: Any = None
        self._again = again

    def __call__(self) -> None:
        with self._whole:
            if captured(self._stream):
                for call in self._again() if self._made else self._calls:
                    call()
                return
            if self._made < GRAPH_AFTER or not self._ours():
                for call in self._calls:
                    call()
                self._made += 1
                return
            try:
                if self._graph is None:
                    self._graph = self._made_graph()
                self._graph.launch()
            except _runtime_error() as e:
                raise _driver_error(e) from e

    def _ours(self) -> bool:
        return self._graph is not None or all(hasattr(call, "on") for call in self._calls)

    def _made_graph(self) -> Any:
        import cupy

        aside = cupy.cuda.Stream(non_blocking=True)
        with aside:
            aside.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
            for call in self._calls:
                call.on(aside.ptr)()  # type: ignore[attr-defined]
            return aside.end_capture()


def _plain(value: Any) -> Any:
    """A device array as its address, a by-value struct as its bytes, a number as it is."""
    memory: Any = getattr(value, "data", None)
    if hasattr(memory, "ptr"):
        return memory.ptr
    return value if isinstance(value, (int, float)) else bytes(value)


class Operands(NamedTuple):
    """What a kernel's module gets: raw pointers and extents, all checked."""

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
"""What a kernel's module does for operands: the launches that make the product, in order (``Launch.bind``). They are
kept and made again, so they hold nothing of one moment but the operands."""


Library = Callable[[Operands], Sequence[Call]]
"""The same where a library queues some of the work."""


def over_tiles(launch: Launch, row_tiles: int, cols: int, out_col: bool) -> Prepare:
    """A kernel whose grid is row tiles x tiles of ``cols`` columns of C, and whose tail is B, C, N, ldb and the
    elements between rows and between columns of C."""

    def prepare(o: Operands) -> tuple[Bound]:
        grid = (row_tiles, min(MAX_GRID_Y, -(-o.n // cols)), 1)
        c_row, c_col = (1, o.ldc) if out_col else (o.ldc, 1)
        return (launch.bind(grid, o.stream, o.b, o.c, o.n, o.ldb, c_row, c_col),)

    return prepare


def finish_arrays() -> None:
    """Wait for the arrays that a plan has made of A for itself: its calls may come on any stream."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()  # synchronize!
