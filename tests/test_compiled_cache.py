"""Machine code that is stored between processes: none compiles a loop again, and none takes the code of another loop."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spformat.formats.fast import compiled

pytest.importorskip("numba")

FIRST_PRODUCT = """
import sys
import numpy as np
import spformat as sf
from spformat.formats.fast.numba_cache import FunctionCache


def multiply(n, fmt):
    w = np.zeros((64, 64), np.float32)
    w[::2, ::3] = 1
    a, x = sf.convert(w, fmt), np.ones((64, n), np.float32)
    assert np.array_equal(a @ x, w @ x)


def counted():
    # (loads, compilations) of numba from here on: each compilation saves what it has compiled.
    counts = [0, 0]
    load, save = FunctionCache._load_overload, FunctionCache.save_overload

    def loading(self, *given):
        found = load(self, *given)
        counts[0] += found is not None
        return found

    def saving(self, *given):
        counts[1] += 1
        return save(self, *given)

    FunctionCache._load_overload, FunctionCache.save_overload = loading, saving
    return counts


def in_a_worker(n, fmt):
    counts = counted()
    multiply(n, fmt)
    return counts


if __name__ == "__main__":
    n, fmt = int(sys.argv[1]), sys.argv[2]
    if sys.argv[3] == "spawned":
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            print(*pool.submit(in_a_worker, n, fmt).result())
    else:
        print(*in_a_worker(n, fmt))
"""
FEW = ["bsr:blocksize=8x16", "sr-bcrs", "vector-nm:n=8,m=16,vector_length=16", "two-four", "bitmask"]
"""Formats with loops of their own for few columns, on a machine with AVX-512."""


@pytest.mark.backend("cpu")
@pytest.mark.parametrize(("fmt", "n"), [("csr", 64), ("bsr", 64), *((fmt, 4) for fmt in ("csr", *FEW))])
def test_a_second_process_compiles_no_product_again(fmt: str, n: int, tmp_path: Path) -> None:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "first_product.py").write_text(FIRST_PRODUCT)

    def run(how: str = "direct", n: int = n) -> tuple[int, int]:
        command = [sys.executable, str(tmp_path / "first_product.py"), str(n), fmt, how]
        r = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        assert r.returncode == 0, r.stderr
        hits, misses = map(int, r.stdout.split())
        return hits, misses

    assert run()[1] > 0
    files = sorted(tmp_path.rglob("*.nbc"))
    for how in ("direct", "spawned") if fmt.startswith(("csr", "bsr")) else ("direct",):
        hits, misses = run(how)
        assert (hits > 0, misses) == (True, 0), how
    assert sorted(tmp_path.rglob("*.nbc")) == files, "a process adds code that the next one does not read"


LEAN_PRODUCT = """
import gc, sys
import numpy as np
import spformat as sf

w = np.zeros((64, 64), np.float32)
w[::2, ::3] = 1
a, x, passes = sf.convert(w, sys.argv[1]), np.ones((64, 4), np.float32), [0, 0, 0]
product = a.T if sys.argv[2] == "transposed" else a
assert "numba" not in sys.modules
gc.callbacks.append(lambda phase, about: passes.__setitem__(about["generation"], passes[about["generation"]] + 1))
product @ x
assert "numba" in sys.modules and gc.isenabled()
from spformat.formats.fast.simd import WIDE

if sys.argv[2] == "few" and (4 in WIDE or sys.argv[1] not in ("two-four", "bitmask")):
    assert "numba.np.arrayobj" not in sys.modules, "the loop allocates arrays"
assert sum(passes) < 100, passes  # 2 for the start and the end of each, about 200 before
"""


@pytest.mark.backend("cpu")
@pytest.mark.parametrize(
    ("fmt", "how"),
    [
        *((fmt, "few") for fmt in ("csr", "ell-buckets", *FEW)),
        ("two-four", "transposed"),
        ("bitmask", "transposed"),
    ],
)
def test_a_first_product_imports_no_more_than_it_needs(fmt: str, how: str, tmp_path: Path) -> None:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", LEAN_PRODUCT, fmt, how]
    subprocess.run(command, env=env, capture_output=True, timeout=200)  # compiles and stores
    r = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert r.returncode == 0, r.stderr


@pytest.mark.parametrize("state", ["collects", "does not collect", "has frozen objects", "fails"])
def test_the_garbage_collector_is_as_before_when_numba_is_imported(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def import_module(name: str) -> None:
        seen.append((name, gc.isenabled()))
        if state == "fails":
            raise ImportError(name)

    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.setattr(compiled.importlib, "import_module", import_module)
    if state == "does not collect":
        gc.disable()
    elif state == "has frozen objects":
        gc.freeze()
    try:
        frozen, young = gc.get_freeze_count(), [object()]
        with pytest.raises(ImportError) if state == "fails" else contextlib.nullcontext():
            compiled.load_numba()
        assert seen == [("numba", False)]
        assert gc.isenabled() is (state != "does not collect")
        old = any(x is young for x in gc.get_objects(generation=2))
        assert old is (state != "has frozen objects"), "the first collection goes through all of numba"
        assert (gc.get_freeze_count() > 0) is (frozen > 0) is (state == "has frozen objects")
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.backend("cpu")
def test_variants_of_a_loop_do_not_take_each_others_code(tmp_path: Path) -> None:
    """Blocks of 8 and of 16 columns have loops with as many lanes, from one source, in one file of the cache."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "first_product.py").write_text(FIRST_PRODUCT)
    for _ in range(2):
        for width in (8, 16):
            command = [sys.executable, str(tmp_path / "first_product.py"), "4", f"bsr:blocksize=8x{width}", "direct"]
            r = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
            assert r.returncode == 0, r.stderr


def test_a_closure_is_not_stored_without_what_decides_it() -> None:
    from spformat.formats.fast import numba_cache

    lanes = 4
    with pytest.raises(TypeError, match=r"encloses .*lanes.*: use compiled_for"):
        numba_cache.compiled(lambda x: x + lanes)
    assert numba_cache.compiled_for(lanes)(lambda x: x + lanes)(1) == 5


def test_processes_that_compile_at_the_same_time_do_not_mix_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has read the index before the other has written it, so both take the same name for their code."""
    from spformat.formats.fast import numba_cache

    def times(factor: int) -> float:
        """What a process computes that has compiled nothing yet."""

        def product(x: float) -> float:
            return x * factor

        return numba_cache.compiled_for(factor)(product)(2.0)

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as m:
        m.setattr(numba_cache.CacheFile, "_load_index", lambda self: {})
        assert times(3) == 6
        stored = next(tmp_path.rglob("*.nbi"))
        of_three = stored.read_bytes()
        assert times(5) == 10
        assert len(list(tmp_path.rglob("*.nbc"))) == 1, "the names do not collide, and this test shows nothing"
    stored.write_bytes(of_three)
    assert (times(3), times(5)) == (6, 10)
    assert (times(3), times(5)) == (6, 10)


def test_an_interrupt_waits_for_the_compiler() -> None:
    """In the middle of it the exception could leave a lock of LLVM locked, and another thread would wait forever."""
    from spformat.formats.fast.numba_cache import _uninterrupted

    steps = []

    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        steps.append("inner")

    def outer() -> str:
        _uninterrupted(inner)()  # a loop that another one calls is compiled while that is compiled
        steps.append("outer")
        return "code"

    with pytest.raises(KeyboardInterrupt):
        _uninterrupted(outer)()
    assert steps == ["inner", "outer"]
    assert _uninterrupted(lambda: "code")() == "code"
    handler = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:  # no handler runs there, and none may be set
        assert pool.submit(_uninterrupted(lambda: signal.getsignal(signal.SIGINT))).result() is handler
