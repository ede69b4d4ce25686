"""Shared by the rows of the catalogue of bad inputs: the right error, and nothing else changed on disk.

The tests are in ``tests/rows``, named by the ids of their rows (``ROWS``).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.storage import stwriter

ROWS = [f"{group}{i:02}" for group, last in (("C", 38), ("D", 25), ("A", 53), ("F", 34), ("G", 11))
        for i in range(1, last + 1)]  # fmt: skip
"""Container, descriptor, arrays, file system, device."""

EXIT = {
    "UsageError": 2, "InputError": 66, "FormatError": 65, "ContainerError": 65, "VersionError": 65,
    "DescriptorError": 65, "ArrayError": 65, "InvariantError": 65, "PointerError": 65, "IndexBoundsError": 65,
    "OrderError": 65, "PatternError": 65, "IntegrityError": 65, "LimitError": 78, "StructureError": 3,
    "NoKernelError": 69, "PathError": 77, "OutputError": 73, "WriteError": 74, "DurabilityUnknown": 74,
    "LockedError": 75, "DeviceError": 69, "DeviceUnavailable": 69, "DeviceMemoryError": 69, "DeviceFault": 70,
    "InternalError": 70,
}  # fmt: skip
"""The documented exit code of every class. It is a copy, so that a change of the code fails a test."""

EARLIER = "earlier.safetensors"
NOBODY = 65534


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Relative path -> (mode, bytes) of everything below a folder; a link holds its target, a large hole nothing."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        data = b""
        if stat.S_ISLNK(status.st_mode):
            data = os.fsencode(os.readlink(path))
        elif stat.S_ISREG(status.st_mode):
            data = path.read_bytes() if status.st_size < 2**30 else str(status.st_size).encode()
        if not stat.S_ISDIR(status.st_mode):
            found[str(path.relative_to(folder))] = (status.st_mode, data)
    return found


@contextlib.contextmanager
def unharmed(folder: Path, but: str = "") -> Iterator[None]:
    """Asserts that everything below ``folder`` keeps its bytes, except what is below ``but``."""

    def seen() -> dict[str, tuple[int, bytes]]:
        return {k: v for k, v in tree(folder).items() if not (but and k.split(os.sep)[0] == but)}

    before = seen()
    yield
    assert seen() == before


@contextlib.contextmanager
def refused(folder: Path, error: type[sf.errors.SpformatError], *parts: str, **fields: Any) -> Iterator[Any]:
    """The block raises exactly ``error`` with its exit code; its text matches every part; ``folder`` is unharmed."""
    with unharmed(folder), pytest.raises(error) as caught:
        yield caught
    e = caught.value
    assert type(e) is error, repr(e)
    assert e.exit_code == EXIT[error.__name__]
    for part in parts:
        assert re.search(part, str(e)), f"{part!r} not in: {e}"
    for key, value in fields.items():
        assert e.fields.get(key) == value, (key, e.fields)
    facts = json.loads(json.dumps(e.to_json()))
    assert (facts["code"], facts["exit_code"]) == (error.__name__, e.exit_code)


@dataclass(frozen=True)
class Answer:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def command(*args: Any) -> Answer:
    """``spformat ARGS`` in this process."""
    from spformat_cli.main import main

    out, err = io.StringIO(), io.StringIO()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    code: Any = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["spformat", *map(str, args)])
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    answer = Answer(int(code), out.getvalue(), err.getvalue())
    assert "Traceback" not in answer.err
    return answer


def shell(script: str, *args: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """A shell script in which ``spformat`` is the command; $1, $2, .. are ``args``."""
    setup = f'spformat() {{ "{sys.executable}" -c "from spformat_cli.main import main; main()" "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", setup + script, "bash", *map(os.fspath, args)], capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "200", **env}, timeout=120, errors="surrogateescape",
    )  # fmt: skip


def python(code: str, *args: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own, with the modules of the tests."""
    lines = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + code
    return subprocess.run(
        [sys.executable, "-c", lines, *map(os.fspath, args)], capture_output=True, text=True,
        env={**os.environ, **env}, timeout=120, errors="surrogateescape",
    )  # fmt: skip


def refused_file(
    path: Path, error: type[sf.errors.SpformatError], *parts: str, read: Callable[[Path], Any] = sf.load, flags: Any = (),
    verb: str = "validate", **fields: Any,
) -> None:  # fmt: skip
    """``read(path)``, ``spformat VERB`` and ``convert`` refuse a file with the same message, and change nothing on disk."""
    with refused(path.parent, error, *parts, path=str(path), **fields) as caught:
        read(path)
    for args in ([verb, path], ["convert", path, path.parent / "converted", "--to", "csr"]):
        with unharmed(path.parent):
            answer = command(*args, *flags, "--json")
        assert answer.code == EXIT[error.__name__], (args[0], answer)
        told = reported(answer)
        assert (told["code"], told["message"]) == (error.__name__, str(caught.value)), args[0]


def reported(answer: Answer) -> dict[str, Any]:
    """The first error of a command with --json: an object on stderr, or a verdict of ``validate``."""
    if answer.err.strip():
        found: dict[str, Any] = json.loads(answer.err.strip().splitlines()[-1])
    else:
        found = next(t["error"] for t in json.loads(answer.out)["tensors"] if not t["ok"])
    return found


@contextlib.contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """Inside, the current folder is ``folder`` and permissions count, also for a root user."""
    before = Path.cwd()
    os.chdir(folder)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        os.chdir(before)


# --- files


def blob(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of a header (JSON tree or bytes) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    """The entry of a tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def write(path: Path, arrays: dict[str, Any], metadata: Any = None, **options: Any) -> None:
    """A safetensors file without descriptor, by our writer."""
    specs = [(name, stwriter.code_of(a.dtype), a.shape) for name, a in arrays.items()]
    with stwriter.Writer(path, specs, metadata, **options) as out:
        for name, a in arrays.items():
            out.put(name, a)


def weights(seed: int = 0, shape: tuple[int, int] = (6, 8)) -> dict[str, Any]:
    """A small dense checkpoint: a matrix that fits 2:4, and a bias."""
    x = np.zeros(shape, np.float16)
    x[:, ::3] = np.random.default_rng(seed).integers(1, 8, x[:, ::3].shape)
    return {"w": x, "b": np.arange(3, dtype=np.float32) + seed}


PARAMS: dict[str, dict[str, Any]] = {
    "ell-buckets": {"max_width": 4}, "bsr": {"blocksize": (4, 3)}, "dbsr": {"blocksize": (2, 3)},
    "sr-bcrs": {"vector_length": 4, "stride": 4},
    "vector-nm": {"n": 2, "m": 4, "vector_length": 1, "tile_rows": 4, "tile_cols": 8},
}  # fmt: skip
"""Parameters under which ``small()`` shows every kind of array content: padding, split rows, fillers, packing."""


def small(dtype: str = "float16") -> np.ndarray[Any, Any]:
    """[10, 12]: rows of 5, 0, 1, 2, 3, .. items, at most two in every four columns."""
    x = np.zeros((10, 12), sf.arrays.dtypes.VALUE_TYPES[dtype].numpy)
    for row, columns in enumerate(
        [(0, 1, 4, 5, 8), (), (11,), (2, 3), (0, 5, 9), (1, 2), (), (), (0, 3, 4, 7, 8, 11), (10,)]
    ):
        for i, column in enumerate(columns):
            x[row, column] = i + row + 1
    return x


def small_file(folder: Path, fmt: str, **params: Any) -> Path:
    """``small()`` in a format, as tensor "w" of a file."""
    path = folder / "x.safetensors"
    sf.save(path, {"w": sf.by_name(fmt).from_dense(small(), **(params or PARAMS.get(fmt, {})))}, overwrite=True)
    return path


def made(fmt: Any, dtype: str = "float16") -> Any:
    """The small matrix of the rows in ``fmt``."""
    return fmt.from_dense(small(dtype), **PARAMS.get(fmt.name, {}))


def operand(n: int = 16) -> Any:
    """A B of ``n`` columns for it."""
    return np.random.default_rng(n).integers(-3, 4, (12, n)).astype(np.float16)
