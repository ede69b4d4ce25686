"""`-` as an input: what a pipe brings goes into a temporary file, because checkpoints are read at any offset."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spformat.errors import SpformatError

MOST = 16 * 10**9
"""The most bytes that are taken from a pipe."""
_PIECE = 1 << 20
_SUFFIXES = ((b"%%MatrixMarket", ".mtx"), (b"PK\x03\x04", ".npz"))


_typed: dict[str, str] = {}
"""Path of a local copy -> the input that it stands for."""


def typed(path: str) -> str:
    """An input as the user typed it: "-" for the temporary file of a pipe, the URL for a local copy of it."""
    return _typed.get(path, path)


def stands_for(path: str, given: str) -> None:
    """From now on ``typed(path)`` is ``given``."""
    _typed[path] = given


def named(text: str) -> str:
    """``text`` with the names of the inputs in place of the paths of local copies, which are gone after the command."""
    for copy, given in _typed.items():
        text = text.replace(copy, "standard input" if given == "-" else given.rstrip("/"))
    return text


def name_input(error: SpformatError) -> None:
    """Let the error name the input, not a local copy of it."""
    error.message = named(error.message)
    if "path" in error.fields:
        error.fields["path"] = named(str(error.fields["path"]))


@contextmanager
def from_pipe(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of a command, with the path of a temporary file in place of an input that is `-`.

    Its ending follows from its first bytes: .mtx, .npz, else .safetensors.
    """
    piped = [key for key in ("src", "a", "b") if given.get(key) == "-"]
    if not piped:
        yield given
        return
    from spformat.errors import UsageError

    if len(piped) > 1:
        raise UsageError("expected - once: standard input can be read only once")
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("- reads from a pipe, and standard input is a terminal: `cat a.mtx | spformat inspect -`")
    with tempfile.TemporaryDirectory(prefix="spformat-") as folder:
        path = _stored(folder)
        stands_for(path, "-")
        yield given | {piped[0]: path}


def _stored(folder: str) -> str:
    """The file in ``folder`` that has what standard input brings."""
    from spformat import limits
    from spformat.errors import LimitError, WriteError

    most, size = min(MOST, limits.current().file_bytes), 0
    source = sys.stdin.buffer
    start = source.read(_PIECE)
    suffix = next((suffix for magic, suffix in _SUFFIXES if start.startswith(magic)), ".safetensors")
    path = os.path.join(folder, "stdin" + suffix)
    try:
        with open(path, "wb") as out:
            while start:
                size += len(start)
                if size > most:
                    raise LimitError(
                        f"standard input: expected at most {most:,} bytes, got more; write it to a file first"
                    )
                out.write(start)
                start = source.read(_PIECE)
    except OSError as e:
        if isinstance(e, LimitError):
            raise
        raise WriteError(
            f"cannot store what the pipe brings: {e.strerror or e} (TMPDIR names another place)", path=path
        ) from e
    return path
