"""The output of all verbs: data on stdout, everything else on stderr, and an exit code for each error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table

_WIDE = 200
"""Width in characters if the stream is not a terminal, so that tables in logs can be read."""


_NO_LIMIT = 1 << 30
_MANY = 1000
"""Rows beyond which a table, or a list in JSON, is written in a simpler way."""


def shown(text: str) -> str:
    """``text`` with all control characters of terminals escaped (cursor, colour, direction), except line
    breaks."""
    from spformat.errors import printable

    return "\n".join(printable(line, _NO_LIMIT) for line in text.split("\n"))


def cell(text: str) -> str:
    """``text`` on one line: as ``shown``, with line breaks escaped, too."""
    return text if text.isprintable() else shown(text.replace("\n", "\\n"))


class _Plain(Console):
    """A console that prints names from files as text, never as commands to the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        if len(objects) == 1 and isinstance(objects[0], _Rows) and objects[0].row_count > _MANY:
            objects[0].write_to(self.file)
            return
        super().print(*(shown(o) if isinstance(o, str) else o for o in objects), **options)


class _Pipe(_Plain):
    """A console whose reader may close the pipe (`| head`), which is no error."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


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
    return _Pipe(width=None if sys.stdout.isatty() else _WIDE, highlight=False, markup=False)


def notes() -> Console:
    """The console for progress, warnings and hints: stderr."""
    return _Notes(stderr=True, highlight=False, markup=False, width=None if sys.stderr.isatty() else _WIDE)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    # ASCII, because names may contain control characters of terminals, and bytes that are text in no encoding.
    long = isinstance(value, dict) and any(isinstance(v, list) and len(v) > _MANY for v in value.values())
    sys.stdout.write(json.dumps(value, indent=None if long else 1) + "\n")  # with an indent it takes ten times as long


class _Rows(Table):
    """A table whose cells are escaped, line breaks included."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._texts: list[list[Any]] = []

    def add_row(self, *cells: Any, **options: Any) -> None:
        self._texts.append([cell(c) if isinstance(c, str) else c for c in cells])
        if len(self._texts) <= _MANY + 1:
            super().add_row(*self._texts[-1], **options)

    def write_to(self, file: Any) -> None:
        """Write the table without colours and without folding; Rich needs a second for 3,000 rows."""
        rows = [[str(column.header) for column in self.columns], *(list(map(str, texts)) for texts in self._texts)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns))]
        right = [column.justify == "right" for column in self.columns]
        for row in rows:
            padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(row, widths, right, strict=True))
            file.write("  ".join(padded).rstrip() + "\n")


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A plain table; the columns in ``right`` are aligned to the right, for numbers."""
    t = _Rows(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        t.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return t


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
def progress(total: int, label: str, quiet: bool, *, lines: bool = False) -> Iterator[Any]:
    """A progress bar with bytes per second on a terminal; elsewhere nothing, or with ``lines`` a line for each
    tensor."""
    out = notes()
    if quiet or not (out.is_terminal or lines):
        yield lambda name, nbytes: None
        return
    if not out.is_terminal:
        done = 0

        def line(name: str, nbytes: int) -> None:
            nonlocal done
            done += nbytes
            out.print(f"{label} {cell(name)}  {size(done)} of {size(total)}", soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda name, nbytes: bar.update(task, advance=nbytes, description=f"{label} {cell(name[-48:])}")


def report(error: Exception, as_json: bool) -> int:
    """Print one typed error, and return its exit code."""
    from spformat.errors import SpformatError

    assert isinstance(error, SpformatError)
    if as_json:
        sys.stderr.write(json.dumps(error.to_json()) + "\n")
    else:
        notes().print(f"error: {error}", soft_wrap=True, style="red")
        if error.exit_code == 3:
            text = (
                "hint: --misfit keep leaves such tensors as they are, --misfit bitmask gives them that format; "
                "--exclude or --rule choose per tensor"
            )
            notes().print(text, style="dim")
        if error.exit_code == 70 and not os.environ.get("SPFORMAT_DEBUG"):
            notes().print("set SPFORMAT_DEBUG=1 for the traceback", style="dim")
    return int(error.exit_code)
