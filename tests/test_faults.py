"""The write path under faults: every system call fails or is the last one of a killed process (T11, F14-F19).
The read path under lies: mutated headers against the official reader (T7); fuzz/ has the long campaigns."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from fuzz import mutants
from hostile import make, rewrite

from spformat.errors import ContainerError, DurabilityUnknown, FormatError, LimitError, OutputError, WriteError
from spformat.formats import FORMATS
from spformat.formats.base import Format
from spformat.formats.csr import CSR
from spformat.formats.dense import Dense
from spformat.storage import stheader, tensorfile
from spformat.storage.container import load, save
from spformat.storage.filewriter import create, outline

CALLS = (
    "open", "close", "dup", "pwrite", "fsync", "fchmod", "link", "replace", "unlink", "stat", "fstatvfs", "scandir",
    "posix_fallocate",
)  # fmt: skip


def tensors(seed: int) -> dict[str, Any]:
    return {"w": CSR.from_dense(np.float32(np.arange(35).reshape(5, 7) % 3 * seed)), "b": np.arange(seed)}


class Countdown:
    """Makes the k-th of the calls above fail; ``left`` stays positive when there were fewer."""

    def __init__(self, patch: pytest.MonkeyPatch, k: int, code: int) -> None:
        self.left, self.failed = k, ""
        for name in CALLS:
            patch.setattr(os, name, self._wrap(name, getattr(os, name), code))

    def _wrap(self, name: str, real: Any, code: int) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.failed = name
                raise OSError(code, os.strerror(code))
            return real(*args, **options)

        return call


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_f14_f15_t11_any_call_may_fail(tmp_path: Path, code: int) -> None:
    path = tmp_path / "x"
    save(path, tensors(1))
    path.chmod(0o640)
    save(tmp_path / "new", tensors(2))
    old, new = path.read_bytes(), (tmp_path / "new").read_bytes()
    (tmp_path / "new").unlink()
    failed = []
    for k in range(1, 1000):
        path.write_bytes(old)
        with pytest.MonkeyPatch.context() as patch:
            countdown = Countdown(patch, k, code)
            try:
                save(path, tensors(2), overwrite=True)
            except (OutputError, WriteError) as e:
                published = isinstance(e, DurabilityUnknown)
            else:
                published = True  # nothing failed, or the failure had no effect (closing the folder)
        if not countdown.failed:
            break
        failed.append(countdown.failed)
        assert path.read_bytes() == (new if published else old), (k, countdown.failed)
        assert path.stat().st_mode & 0o777 == 0o640
        left = {p.name for p in tmp_path.iterdir()} - {"x"}
        assert not left or countdown.failed == "unlink", (k, countdown.failed, left)
    assert set(failed) >= set(CALLS) - {"link", "unlink"}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_f14_f15_t11_any_call_may_fail_for_a_new_file(tmp_path: Path, code: int) -> None:
    path = tmp_path / "x"
    save(path, tensors(2))
    new, failed = path.read_bytes(), []
    for k in range(1, 1000):
        path.unlink(missing_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            countdown = Countdown(patch, k, code)
            try:
                save(path, tensors(2))
            except (OutputError, WriteError) as e:
                published = isinstance(e, DurabilityUnknown)
            else:
                published = True
        if not countdown.failed:
            break
        failed.append(countdown.failed)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == ({"x": new} if published else {}), failed
        assert published or countdown.failed not in ("link", "unlink"), "renamed, and removed at the second try"
    assert set(failed) >= set(CALLS) - {"fchmod", "replace"}


KILL = """
import os, sys
sys.path.insert(0, sys.argv[2])
from test_faults import CALLS, tensors
from spformat.storage.container import save

def child(k):
    left = [k]
    def wrap(real):
        def call(*args, **options):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return real(*args, **options)
        return call
    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))
    save(sys.argv[1], tensors(2), overwrite=True)
    os._exit(0)

for k in range(1, 1000):
    pid = os.fork()
    if pid == 0:
        child(k)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(sys.argv[1], "rb") as f:
        data = f.read()
    folder = os.path.dirname(sys.argv[1])
    print(k, code, data.hex(), *sorted(set(os.listdir(folder)) - {"x"}), flush=True)
    if code == 0:
        break
    with open(sys.argv[1], "wb") as f:
        f.write(bytes.fromhex(sys.argv[3]))
"""


def test_f18_killed_at_any_call(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save(path, tensors(1))
    save(tmp_path / "new", tensors(2))
    old, new = path.read_bytes(), (tmp_path / "new").read_bytes()
    (tmp_path / "new").unlink()
    done = subprocess.run(
        [sys.executable, "-c", KILL, str(path), str(Path(__file__).parent), old.hex()],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    points = [line.split() for line in done.stdout.splitlines()]
    assert len(points) > 20
    seen = [bytes.fromhex(point[2]) for point in points]
    assert set(seen) == {old, new}
    assert seen == sorted(seen, key=lambda data: data == new)  # old up to the rename, new from then on
    assert any(len(point) > 3 for point in points)  # a kill does leave a temporary file,
    assert [p.name for p in tmp_path.iterdir()] == ["x"]  # and the last, complete run has removed them all
    assert all(len(point) <= 4 for point in points)  # each run had removed that of the one before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_f19_an_interrupt_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(8)
        raise error

    record = outline("w", Dense.from_dense(np.zeros((2, 4), np.float32)))
    with pytest.raises(error), create(tmp_path / "x", [record]) as f:
        f.put_array("w", "data", pieces())
    assert list(tmp_path.iterdir()) == []


# --- T7: the strict parser against the official one


def edited(rng: random.Random, count: int) -> Iterator[bytes]:
    """Whole small files: good ones, and ones with edited bytes, numbers, keys and structure."""
    pieces = [
        b"0", b"1", b"8", b"-1", b"2.0", b"true", b"null", b'"a"', b"[]", b"{}", b",", b":", b'"', b"\\u0000", b" ",
        b"\xff", b"18446744073709551616", b'"F32"', b'"F4"', b'"__metadata__":{"a":"b"},', b"\xc3\xa9", b"\\ud800",
    ]  # fmt: skip
    for _ in range(count):
        n = rng.randrange(4)
        tree: dict[str, Any] = {"__metadata__": {"k": "v"}} if rng.random() < 0.3 else {}
        at = 0
        for i in range(n):
            dtype, size = rng.choice([("F32", 4), ("U8", 1), ("BF16", 2), ("I64", 8), ("BOOL", 1)])
            shape = [rng.randrange(3) for _ in range(rng.randrange(3))]
            nbytes = int(np.prod(shape, dtype=np.int64)) * size
            tree[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        raw = json.dumps(tree, separators=(",", ":")).encode()
        for _ in range(rng.randrange(3)):
            i = rng.randrange(len(raw) + 1)
            raw = raw[:i] + rng.choice(pieces) + raw[min(len(raw), i + rng.randrange(4)) :]
        length = len(raw) if rng.random() < 0.97 else rng.choice([0, 1, 2**63, len(raw) + 1, len(raw) - 1])
        yield max(length, 0).to_bytes(8, "little") + raw + bytes(at + rng.choice([0] * 20 + [1, 7]))


def strict(data: bytes) -> str:
    """Why our parser refuses a file; "" if it does not."""
    try:
        n = stheader.length(data[:8], len(data))
        stheader.parse(data[8 : 8 + n], len(data) - 8 - n)
    except (ContainerError, LimitError) as e:
        return e.message
    return ""


def official(data: bytes) -> bool:
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


STRICTER = ("duplicate key", "without NUL", "--max-empty-extent")


def test_t7_nothing_is_accepted_that_safetensors_refuses() -> None:
    verdicts = {(ours, theirs): 0 for ours in (True, False) for theirs in (True, False)}
    for data in edited(random.Random(7), 20_000):
        why, theirs = strict(data), official(data)
        verdicts[not why, theirs] += 1
        if not why and not theirs:  # by design: dtypes we do not know are carried as bytes
            tree = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            tree.pop("__metadata__", None)
            assert {entry["dtype"] for entry in tree.values()} - {"F32", "U8", "BF16", "I64", "BOOL"}, data
        if why and theirs:
            assert any(known in why for known in STRICTER), (why, data)
    assert verdicts[True, True] > 3000
    assert verdicts[False, False] > 3000
    assert verdicts[False, True] < 100


# --- T6: right checksums, wrong content: the campaign itself is fuzz/mutants.py


def verdict(path: Path, device: str) -> str:
    try:
        f: Any = load(path, device=device)["w"]
    except (FormatError, LimitError) as e:
        return f"{type(e).__name__} in {e.array}"
    return f"{f.is_validated} on {f.device}".replace("cuda:0", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_t6_the_device_gives_the_same_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: type[Format]
) -> None:
    monkeypatch.setattr(tensorfile, "SCAN_ON_DEVICE", 0)
    path = tmp_path / "x"
    save(path, {"w": make(fmt, (6, 9))})
    good = path.read_bytes()
    seen = set()
    for seed in range(100):
        path.write_bytes(good)
        rewrite(path, partial(mutants.mutate, random.Random(seed)))
        on_host = verdict(path, "cpu")
        assert verdict(path, "cuda") == on_host, seed
        seen.add(on_host)
    assert len(seen) > (1 if fmt.name == "dense" else 2)  # Dense has one array to damage
    assert "True on cpu" in seen


# --- T15: small files that declare a lot

BOMBS = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[2])
from functools import partial
from pathlib import Path
from hostile import make, rewrite
from spformat.storage.container import load, save
from spformat.errors import SpformatError
from spformat.formats import FORMATS

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = slowest = 0
for fmt in FORMATS:
    for shape in ((6, 9), (0, 7), (7, 0), (0, 0)):
        save(path, {"w": make(fmt, shape)}, overwrite=True)
        good = path.read_bytes()
        for big in (2**27, 2**28, 2**29, 2**31 - 1, 2**31, 2**40, 2**48 - 1):
            for rows, columns in ((big, None), (None, big), (big, big)):
                path.write_bytes(good)
                def edit(tree, arrays):
                    w = tree["tensors"]["w"]
                    w["shape"] = [rows or w["shape"][0], columns or w["shape"][1]]
                rewrite(path, edit)
                begin = time.process_time()
                try:
                    load(path)
                except SpformatError:
                    pass
                slowest = max(slowest, time.process_time() - begin)
                count += 1
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"count": count, "slowest": slowest, "grown": (after - before) // 1024}))
"""


def test_t15_bombs_cost_nothing(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", BOMBS, str(tmp_path / "x"), here], check=True, capture_output=True, text=True
    )
    result = json.loads(done.stdout)
    assert result["count"] >= 200
    assert result["slowest"] < 1
    assert result["grown"] < 256  # MiB
