"""Interrupts (Ctrl-C, a signal whose handler raises) that wait until running work has come to its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "VTALRM", "PROF", "USR1", "USR2", "XCPU", "CHLD", "CONT", "IO", "WINCH")
_SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}"))
"""The signals whose handlers are put off by default: those that users and timers send. All 64 would take 20 us."""


def _own(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler itself, if this one was left by a block whose end was interrupted."""
    while (original := getattr(handler, "puts_off", None)) and handler.is_over():  # type: ignore[attr-defined]
        handler = original
    return handler


@contextmanager
def deferred_interrupts(stop: Callable[[], None] = lambda: None, signals: Iterable[int] = _SIGNALS) -> Iterator[None]:
    """Inside the block, what a signal handler raises is kept: ``stop()`` is called, and the first exception is raised
    at the end of the block. Handlers that raise nothing act as before. signals: whose handlers.

    Python runs signal handlers in the main thread, between any two of its instructions. An exception from there may
    therefore leave a ``with`` or ``except`` block of the main thread halfway, and no order of ``try`` blocks closes
    every gap. In other threads no handler runs, and nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[BaseException] = []
    over = False

    def deferring(handler: Callable[..., Any]) -> Callable[..., None]:
        def handle(number: int, frame: Any) -> None:
            if over:  # the handlers are being put back
                handler(number, frame)
                return
            try:
                handler(number, frame)
            except BaseException as e:
                raised.append(e)
                stop()

        handle.puts_off, handle.is_over = handler, lambda: over  # type: ignore[attr-defined]
        return handle

    # Handlers that were not set from Python (None, SIG_DFL, SIG_IGN) raise nothing here.
    before = {number: _own(handler) for number in signals if callable(handler := signal.getsignal(number))}
    try:
        for number, handler in before.items():
            signal.signal(number, deferring(handler))
        yield
    finally:
        over = True
        for number, handler in before.items():
            signal.signal(number, handler)
    if raised:
        raise raised[0]
