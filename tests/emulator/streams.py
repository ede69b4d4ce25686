"""Streams, and graphs of what was asked for on them.

Work is done when it is asked for, except on a stream that is captured: there it is kept, and done whenever the graph is
launched. Only what the project queues itself is kept (kernels, fills, copies, products of cuBLAS); what CuPy's own functions
do is done at once, also during a capture.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from strict_cupy import Device

from .build import EmulatorError

Work = Callable[[], Any]

_numbers = itertools.count(1 << 20, 16)
_captured: dict[int, list[Work]] = {}
_graphs: dict[int, list[Work]] = {}


class Current(threading.local):
    """The streams that this thread has entered: every thread begins on the default one."""

    def __init__(self) -> None:
        self.entered = [Stream.null]


class Stream(Device):
    """A stream, or an event."""

    null: Stream
    current: Current

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.ptr = next(_numbers)
        self.recorded = 0  # of an event: the stream it was recorded on

    def __enter__(self) -> Stream:
        self.current.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.current.entered.pop()

    def use(self) -> None:
        self.current.entered[:] = [self]

    def wait_event(self, event: Stream) -> None:
        """A stream that waits for what is captured is captured into the same graph, until that capture ends."""
        if event.recorded in _captured and self.ptr not in _captured:
            _captured[self.ptr] = _captured[event.recorded]

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = (stream or self.current.entered[-1]).ptr

    def begin_capture(self, mode: int = 0) -> None:
        if self.ptr in _captured or self is Stream.null:
            raise EmulatorError("a stream that cannot be captured: it is captured already, or the default one")
        _captured[self.ptr] = []

    def end_capture(self) -> Graph:
        work = _captured[self.ptr]
        for ptr in [ptr for ptr, kept in _captured.items() if kept is work]:
            del _captured[ptr]
        return Graph(work)


class Graph:
    """What a capture kept."""

    def __init__(self, work: list[Work]) -> None:
        self.graphExec = next(_numbers)
        _graphs[self.graphExec] = work

    def launch(self, stream: Any = None) -> None:
        launch_graph(self.graphExec, 0)

    def __del__(self) -> None:
        _graphs.pop(self.graphExec, None)


Stream.null = Stream()
Stream.null.ptr = 0
Stream.current = Current()


def capturing(stream: int) -> bool:
    return stream in _captured


def queue(stream: int, work: Work) -> None:
    """Does ``work``, or keeps it for the graph."""
    if stream in _captured:
        _captured[stream].append(work)
    else:
        work()


def launch_graph(graph: int, stream: int) -> None:
    """``cudaGraphLaunch``, on a stream that is itself not captured."""
    if capturing(stream):
        raise EmulatorError("a graph is launched on a stream that is captured")
    for work in _graphs[graph]:
        work()
