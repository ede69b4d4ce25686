"""Small files, and files full of holes, that claim to be large: every reader stays within its memory budget, or refuses.

Each bomb is given to the command in a process of its own, with ``--max-memory 256MB``. The most memory that the process
has had must stay below the budget and ``BESIDE``; an exit code of a bug is wrong, too.
``python -m fuzz bombs``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spformat.formats.csr import CSR
from spformat.storage.container import save, save_dense

BUDGET = 256_000_000
BESIDE = 200_000_000
"""Bytes that the interpreter and its libraries may take beside the budget."""
CODES = {0, 65, 66, 78}
"""Read, or refused with a reason. Another code is a fault of ours, or says that the machine had no more memory."""

_RUN = """
import sys
from spformat_cli.main import main
code = 0
try:
    main()
except SystemExit as e:
    code = e.code or 0
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.stderr.write(f"\\n{code} {int(peak.split()[1]) * 1024}")
"""

Bomb = tuple[Callable[[Path], Path], tuple[str, ...]]


def run(path: Path, verb: tuple[str, ...], seconds: float = 120) -> tuple[int, int, str]:
    """(exit code, most bytes of memory, what it said) of ``spformat VERB PATH``."""
    arguments = [verb[0], str(path), *verb[1:], "--max-memory", str(BUDGET)]
    done = subprocess.run([sys.executable, "-c", _RUN, *arguments], capture_output=True, text=True, timeout=seconds)
    said, _, last = done.stderr.rpartition("\n")
    code, peak = (int(word) for word in last.split()) if last.count(" ") == 1 else (done.returncode, 0)
    return code, peak, said


# --------------------------------------------------------------------------------------------------------- archives


def _npy(descr: str, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _archive(path: Path, method: int, **members: tuple[str, tuple[int, ...], bytes | int]) -> Path:
    """A .npz whose members are (type, shape, contents); a number stands for so many zero bytes."""
    with zipfile.ZipFile(path, "w", method) as z:
        for name, (descr, shape, content) in members.items():
            with z.open(f"{name}.npy", "w", force_zip64=True) as f:
                f.write(_npy(descr, shape))
                if isinstance(content, bytes):
                    f.write(content)
                    continue
                for at in range(0, content, 1 << 24):
                    f.write(bytes(min(1 << 24, content - at)))
    return path


def _numbers(*values: int) -> tuple[str, tuple[int, ...], bytes]:
    return "<i8", (len(values),), np.array(values, "<i8").tobytes()


def _csr(n: int) -> Callable[[Path], Path]:
    return lambda folder: _archive(
        folder / "a.npz", zipfile.ZIP_DEFLATED, shape=_numbers(1, n), indptr=_numbers(0, n),
        indices=("<i4", (n,), 4 * n), data=("<f8", (n,), 8 * n),
    )  # fmt: skip


def _sound(layout: str, n: int) -> Callable[[Path], Path]:
    """A matrix that needs all of the budget, and is read."""

    def write(folder: Path) -> Path:
        per, rows = 20, n // 20
        indices = np.tile(np.arange(per, dtype=np.int64), rows)
        shape = (rows, per) if layout == "csr" else (per, rows)
        np.savez_compressed(
            folder / "a.npz", format=np.array(layout.encode()), shape=np.array(shape), indices=indices,
            indptr=np.arange(0, n + 1, per), data=np.ones(n, np.int8),
        )  # fmt: skip
        return folder / "a.npz"

    return write


def _int8(n: int, method: int) -> Callable[[Path], Path]:
    """The bomb of the report: a huge member of int8 zeros, beside small ones."""
    return lambda folder: _archive(
        folder / "a.npz", method, shape=_numbers(1, n), indptr=_numbers(0, n), indices=("<i4", (1,), 4),
        data=("|i1", (n,), n),
    )  # fmt: skip


def _coo(n: int) -> Callable[[Path], Path]:
    return lambda folder: _archive(
        folder / "a.npz", zipfile.ZIP_DEFLATED, format=("|S3", (), b"coo"), shape=_numbers(2**40, 2**40),
        row=("|u1", (n,), n), col=("|u1", (n,), n), data=("|b1", (n,), n),
    )  # fmt: skip


def _rows(folder: Path) -> Path:
    n = 30_000_000
    return _archive(
        folder / "a.npz", zipfile.ZIP_DEFLATED, shape=_numbers(n, 1), indptr=("|u1", (n + 1,), n + 1),
        indices=("|u1", (0,), 0), data=("|u1", (0,), 0),
    )  # fmt: skip


def _blocks(folder: Path) -> Path:
    n = 3000
    return _archive(
        folder / "a.npz", zipfile.ZIP_DEFLATED, format=("|S3", (), b"bsr"), shape=_numbers(100, 100 * n),
        indptr=_numbers(0, n), indices=("<i4", (n,), np.arange(n, dtype="<i4").tobytes()),
        data=("|b1", (n, 100, 100), 10_000 * n),
    )  # fmt: skip


def _members(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.npz", "w") as z:
        for i in range(120_000):
            z.writestr(f"{i}.npy", b"")
    return folder / "a.npz"


# ------------------------------------------------------------------------------------------------------------- text


def _hole(name: str, size: int = 2 << 40, start: bytes = b"") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with open(folder / name, "wb") as f:
            f.write(start)
            f.truncate(size)
        return folder / name

    return write


def _text(name: str, start: bytes, line: bytes, count: int, end: bytes = b"\n") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        many = line * 100_000
        with open(folder / name, "wb") as f:
            f.write(start)
            for _ in range(count // 100_000):
                f.write(many)
            f.write(end)
        return folder / name

    return write


def _beside(
    name: str, write: Callable[[Path], Path], others: Callable[[Path], object] = lambda f: None
) -> Callable[[Path], Path]:
    """A folder with one shard and the file that ``write`` writes."""

    def both(folder: Path) -> Path:
        save_dense(folder / "model-00001-of-00001.safetensors", {"w": np.ones((2, 2), np.float32)})
        others(folder)
        write(folder)
        return folder

    return both


def _nested(name: str, size: int) -> Callable[[Path], Path]:
    return _text(name, b'{"x":[[]', b",[]", size // 3, b"]}")


# ------------------------------------------------------------------------------------------------------- containers


def _header(folder: Path) -> Path:
    """A header just below its limit, with as many tensors as are allowed."""
    entries = {
        f"layer.{i:06}.{'x' * 60}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(99_000)
    }
    raw = json.dumps(entries, separators=(",", ":")).encode()
    (folder / "a.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(99_000))
    return folder / "a.safetensors"


def _holes(folder: Path) -> Path:
    """A matrix of ours whose arrays are holes."""
    entries = {"w": {"dtype": "F64", "shape": [1 << 20, 240], "data_offsets": [0, 8 * 240 << 20]}}
    raw = json.dumps(entries, separators=(",", ":")).encode()
    with open(folder / "a.safetensors", "wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + (8 * 240 << 20))
    return folder / "a.safetensors"


def _sparse(shape: tuple[int, int]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        M, _ = shape
        indptr = np.zeros(M + 1, np.int32)
        indptr[1:] = 1
        a = CSR(shape=shape, indptr=indptr, indices=np.zeros(1, np.int32), data=np.ones(1, np.float32))
        save(folder / "a.safetensors", {"w": a})
        return folder / "a.safetensors"

    return write


def _compressed(rows: int, cols: int) -> Callable[[Path], Path]:
    """A packed tensor without values: a bit for each element is all that the file holds."""

    def write(folder: Path) -> Path:
        arrays = {
            "w.compressed": np.zeros(0, np.float32), "w.bitmask": np.zeros((rows, cols // 8), np.uint8),
            "w.row_offsets": np.zeros(rows, np.int64), "w.shape": np.array([rows, cols]),
        }  # fmt: skip
        save_dense(folder / "model.safetensors", arrays)
        return folder

    return write


CONVERT = ("convert", "/dev/null/out.safetensors", "--to", "csr")
INSPECT, VALIDATE, BENCH = ("inspect",), ("validate",), ("bench", "-n", "16", "--repeats", "1")
STORED, DEFLATED, BZIP2, LZMA = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA
MTX = b"%%MatrixMarket matrix coordinate pattern "

BOMBS: dict[str, Bomb] = {
    "npz, bzip2": (_int8(700_000_000, BZIP2), INSPECT),
    "npz, lzma": (_int8(700_000_000, LZMA), INSPECT),
    "npz, deflated": (_int8(1_900_000_000, DEFLATED), INSPECT),
    "npz, just inside the budget": (_int8(250_000_000, DEFLATED), INSPECT),
    "npz, csr": (_csr(20_000_000), INSPECT),
    "npz, csr, the most that fits": (_sound("csr", 2_600_000), INSPECT),
    "npz, csc, the most that fits": (_sound("csc", 2_600_000), INSPECT),
    "npz, coo of bytes": (_coo(3_000_000), INSPECT),
    "npz, coo of many bytes": (_coo(80_000_000), INSPECT),
    "npz, rows": (_rows, INSPECT),
    "npz, blocks": (_blocks, INSPECT),
    "npz, members": (_members, INSPECT),
    "mtx, a hole": (_hole("a.mtx"), INSPECT),
    "mtx, a hole of 3 GB": (_hole("a.mtx", 3 << 30, MTX + b"general\n1 1 1\n"), INSPECT),
    "mtx, short lines": (_text("a.mtx", MTX + b"general\n9 9 50000000\n", b"1 1\n", 50_000_000), INSPECT),
    "mtx, symmetric": (_text("a.mtx", MTX + b"symmetric\n9 9 1500000\n", b"1 1\n", 1_500_000), INSPECT),
    "mtx, rows": (_text("a.mtx", MTX + b"general\n281474976710655 9 1\n", b"1 1\n", 100_000), INSPECT),
    "mtx, comments": (_text("a.mtx", MTX + b"general\n", b"%\n", 60_000_000), INSPECT),
    "smtx, a hole": (_hole("a.smtx"), INSPECT),
    "smtx, line breaks": (_text("a.smtx", b"1, 1, 1\n", b"\n", 200_000_000), INSPECT),
    "smtx, columns": (_text("a.smtx", b"1, 9, 60000000\n0 60000000\n", b"1 ", 60_000_000), INSPECT),
    "smtx, rows": (_text("a.smtx", b"60000000, 9, 0\n", b"0 ", 60_000_000, b"0\n\n"), INSPECT),
    "manifest, a hole": (_beside("m", _hole("spformat.json")), INSPECT),
    "manifest, nested": (_beside("m", _nested("spformat.json", 100_000_000)), VALIDATE),
    "journal, a hole": (_beside("j", _hole("spformat.partial.json")), INSPECT),
    "journal, nested": (_beside("j", _nested("spformat.partial.json", 100_000_000)), VALIDATE),
    "index, nested": (_beside("i", _nested("model.safetensors.index.json", 60_000_000)), INSPECT),
    "config, nested": (
        _beside("c", _nested("config.json", 16_000_000), _compressed(8, 8)), INSPECT
    ),
    "header": (_header, VALIDATE),
    "holes": (_holes, VALIDATE),
    "claims a huge shape": (_sparse((1 << 20, 1 << 30)), INSPECT),
    "packed, a bit for each element": (_compressed(1 << 14, 1 << 14), VALIDATE),
    "packed, within the budget": (_compressed(1 << 13, 1 << 12), VALIDATE),
    "bench of a wide matrix": (_sparse((4, 2**31 - 1)), BENCH),
}  # fmt: skip


def campaign(names: list[str], folder: Path) -> dict[str, tuple[int, int]]:
    """(exit code, most bytes of memory) of each bomb; AssertionError for one that needs too much."""
    seen = {}
    for i, name in enumerate(names):
        write, verb = BOMBS[name]
        place = folder / str(i)
        place.mkdir()
        path = write(place)
        code, peak, said = run(path, verb)
        seen[name] = code, peak
        assert code in CODES, f"{name}: exit code {code}: {said}"
        assert 0 < peak <= BUDGET + BESIDE, f"{name}: {peak / 1e6:.0f} MB, exit code {code}: {said[-300:]}"
        for file in place.iterdir():
            file.unlink()
    return seen


def main(arguments: list[str]) -> int:
    """The command; a bomb that goes off ends with a traceback."""
    parser = argparse.ArgumentParser("fuzz bombs", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BOMBS))
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        seen = campaign(given.names, Path(folder))
    worst = max(seen, key=lambda name: seen[name][1])
    for name, (code, peak) in seen.items():
        print(f"{name}: exit code {code}, {peak / 1e6:.0f} MB")
    print(f"bombs: {len(seen)}, the most memory {seen[worst][1] / 1e6:.0f} MB ({worst})")
    return 0
