"""The output of all verbs: data on stdout, everything else on stderr, and an exit code for each error."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from .tables import MANY, Rows, cell

_WIDE = 200
"""Width in characters if the stream is not a terminal, so that tables in logs can be read."""


_NARROWEST = 8
"""Characters of a line beside its indent that are never folded."""
_NO_LIMIT = 1 << 30
_EVERY = 5.0
"""Seconds between two lines about the progress of a run."""


def shown(text: str) -> str:
    """``text`` with all control characters of terminals escaped (cursor, colour, direction), except line
    breaks."""
    from spformat.errors import printable

    return "\n".join(printable(line, _NO_LIMIT) for line in text.split("\n"))


class _Plain(Console):
    """A console that prints names from files as text, never as commands to the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        if len(objects) == 1 and isinstance(objects[0], Rows):
            rows = objects[0]
            if rows.row_count > MANY:
                if not self.quiet:  # Rich, which heeds it, does not see such a table
                    rows.write_to(self.file)
                return
            if not rows.fits(self.width):
                for line in rows.stacked(self.width):
                    super().print(line)
                return
        super().print(*(shown(o) if isinstance(o, str) else o for o in objects), **options)


class _Pipe(_Plain):
    """A console whose reader may close the pipe (`| head`), which is no error."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(verdict())


class _Notes(_Plain):
    """A console whose reader may close the pipe; then the work goes on without output."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class _BestEffort:
    """A stream for messages. One that is closed or full loses its messages, and nothing else: the exit code counts."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError:
            self._give_up()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """What is still in the buffer must not raise again at the end of the process."""
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_streams() -> None:
    """Make stdout and stderr fit for any text and stderr for any end; called before the first output.

    A closed stderr is replaced by one to nowhere, so that no file that is opened later gets its number.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # an encoding that lacks a character of a name
    if not isinstance(sys.stderr, _BestEffort):
        sys.stderr = _BestEffort(sys.stderr)  # type: ignore[assignment]


def console() -> Console:
    """The console for data: stdout."""
    # No markup: "pip install 'spformat[cuda13]'" is text.
    return _Pipe(width=_width(sys.stdout), highlight=False, markup=False)


def summary() -> Console:
    """The console for what a verb says of its work when its exit code says the same: stdout, nothing with --quiet."""
    out = console()
    out.quiet = _Quiet.wanted
    return out


def warnings() -> Console:
    """The console for errors and warnings: stderr."""
    return _Notes(stderr=True, highlight=False, markup=False, width=_width(sys.stderr))


def notes() -> Console:
    """The console for progress and hints: stderr, nothing with --quiet."""
    out = warnings()
    out.quiet = _Quiet.wanted
    return out


class _Verdict:
    """The exit code of a verb that judges, once it is known: it counts, whoever reads the lines about it."""

    code = 0


def set_verdict(code: int) -> None:
    """From now on, a reader that goes away (`| head`) ends the command with this exit code."""
    _Verdict.code = code


def verdict() -> int:
    """The exit code where the reader of stdout went away: 0 unless ``set_verdict`` was called."""
    return _Verdict.code


class _Quiet:
    """Whether the command was given --quiet. The error that ends a command is reported after its options are gone."""

    wanted = False


def set_quiet(wanted: bool) -> None:
    """From now on, print nothing but what was asked for, warnings and errors."""
    _Quiet.wanted = wanted


def _width(stream: Any) -> int | None:
    """Characters of a line; None asks the terminal."""
    return None if stream.isatty() else _WIDE


def indented(line: str) -> None:
    """Print a line on stdout; on a terminal that is too narrow, what does not fit is below it, further to the right."""
    out = console()
    if not out.is_terminal:
        out.print(line, soft_wrap=True)
        return
    start = " " * (len(line) - len(line.lstrip()))
    below = start + "    "
    width = max(out.width, len(below) + _NARROWEST)  # textwrap never ends where the indent leaves no room
    for part in textwrap.wrap(
        shown(line), width, initial_indent=start, subsequent_indent=below, break_on_hyphens=False
    ):
        out.print(part, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    # ASCII, because names may contain control characters of terminals, and bytes that are text in no encoding.
    long = isinstance(value, dict) and any(isinstance(v, list) and len(v) > MANY for v in value.values())
    sys.stdout.write(json.dumps(value, indent=None if long else 1) + "\n")  # with an indent it takes ten times as long


def size(nbytes: int | None) -> str:
    """A number of bytes as text for people: "1.50 MiB"."""
    if nbytes is None:
        return "-"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


@contextmanager
def progress(total: int, label: str, silent: bool, *, lines: bool = False) -> Iterator[Any]:
    """A progress bar with bytes per second on a terminal; elsewhere nothing, or with ``lines`` a line now and then."""
    out = notes()
    if silent or out.quiet or not (out.is_terminal or lines):
        yield lambda name, nbytes: None
        return
    if not out.is_terminal:
        done, said = 0, -_EVERY

        def line(name: str, nbytes: int) -> None:
            nonlocal done, said
            done += nbytes
            if time.monotonic() - said >= _EVERY or done >= total:
                said = time.monotonic()
                out.print(f"{label} {cell(name)}  {size(done)} of {size(total)}", soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda name, nbytes: bar.update(task, advance=nbytes, description=f"{label} {cell(name[-48:])}")
