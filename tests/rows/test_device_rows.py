"""Rows G01 .. G11: devices, launches, compiled code. What needs a GPU is marked."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from catalogue import command, made, operand, python, refused, small_file, unharmed
from hostile import change, rewrite
from rows.test_array_rows import CASES

import spformat as sf
from spformat import backends
from spformat.arrays import library as arrays
from spformat.backends.cuda import KERNELS
from spformat.backends.cuda.csr.spmm_csr import SpmmCSR
from spformat.backends.cuda.runtime.operands import leading
from spformat.formats import FORMATS
from spformat.products import rates
from spformat.products.problem import Problem
from spformat.storage import tensorfile

SPARSE = [f for f in FORMATS if f is not sf.Dense]


# --- where there is no GPU, or not the right one


def test_G01_without_a_gpu_the_host_works_and_cuda_says_why(folder: Path) -> None:
    path = small_file(folder, "csr")
    code = (
        "import numpy as np, spformat as sf\na = sf.load(sys.argv[1])['w']\nB = np.ones((12, 2), np.float16)\n"
        "assert sf.spmm(a, B).shape == (10, 2)\n"
        "for use in (lambda: sf.load(sys.argv[1], device='cuda'), lambda: sf.spmm(a, B, backend='cuda'),\n"
        "            lambda: a.to('cuda')):\n"
        "    try: use()\n"
        "    except (sf.errors.DeviceError, sf.errors.NoKernelError) as e: assert e.exit_code == 69 and str(e), e\n"
        "    else: sys.exit(1)\n"
    )
    with unharmed(folder):
        done = python(code, path, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
        for args in (["bench", path, "--device", "cuda"], ["convert", path, folder / "out", "--device", "cuda"]):
            code = "from spformat_cli.main import main\nsys.argv = ['spformat', *sys.argv[1:]]\nmain()\n"
            done = python(code, *map(str, args), CUDA_VISIBLE_DEVICES="")
            assert done.returncode == 69, (args, done.stderr)
            assert "error: " in done.stderr
            assert "Traceback" not in done.stderr
    assert not (folder / "out").exists()


def problem(fmt: Any, sm: int | None, **changes: Any) -> Problem:
    given = {"max_width": 8} if fmt.name == "ell-buckets" else {"n": 2, "m": 4} if fmt.name == "vector-nm" else {}
    fields: dict[str, Any] = {
        "format": fmt.name, "params": tuple(fmt.resolve_params(given).items()), "M": 4096, "K": 4096,
        "n": 512, "nnz": 2**20, "a_dtype": "bfloat16", "b_dtype": "bfloat16", "out_dtype": "bfloat16",
        "device": "cuda", "sm": sm,
    }  # fmt: skip
    return Problem.product(**(fields | changes))


@pytest.mark.parametrize("fmt", SPARSE, ids=lambda f: f.name)
def test_G02_another_architecture_is_told(folder: Path, fmt: Any) -> None:
    old = sf.explain(problem(fmt, 75))
    as_csr = fmt.name in ("coo", "csc")
    # cuSPARSE takes CSR on older GPUs, too, and with it the formats that have the arrays of a CSR
    assert old.chosen in (None, "composed.same_arrays" if as_csr else "vendor.cusparse_csr")
    assert all("sm_75" in str(a) for a in old.answers if a.kernel.startswith("cuda."))
    ampere = sf.explain(problem(fmt, 80))
    assert ampere.chosen is not None
    for a in ampere.answers:
        if a.kernel.endswith("sm90a"):
            assert not a
            assert "sm_80" in str(a) or "sm_90" in str(a)
    path = small_file(folder, fmt.name)
    with unharmed(folder):
        answer = command("explain", path, "--gpu", "sm_75")
    assert (answer.code, f"runs on {old.chosen}" in answer.out or not old.chosen) == (0, True)
    assert as_csr or "got sm_75" in answer.out


def test_G09_arrays_of_another_device_are_refused() -> None:
    memory = SimpleNamespace(device_id=1, ptr=0)
    with pytest.raises(ValueError, match="B is on cuda:1, the matrix on cuda:0"):
        leading("B", (4, 4), (8, 2), memory, 2, False, 0)
    assert leading("B", (4, 4), (8, 2), SimpleNamespace(device_id=0, ptr=0), 2, False, 0) == 4


@pytest.mark.gpu
def test_G09_arrays_and_streams_of_another_device(cp: Any) -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device: the check itself is tested without any")
    a = made(sf.CSR).to("cuda:0")
    with cp.cuda.Device(1):
        B = cp.asarray(operand())
    with pytest.raises((ValueError, sf.errors.UsageError), match="cuda:1"):
        sf.spmm(a, B)


# --- memory, faults, launches


@pytest.mark.gpu
def test_G03_out_of_memory_leaves_the_context_usable(cp: Any, folder: Path) -> None:
    a = sf.CSR.from_coordinates((2**20, 64), np.array([5]), np.array([3]), np.ones(1, np.float16)).to("cuda")
    B = cp.ones((64, 2**18), cp.float16)
    with refused(folder, sf.errors.DeviceMemoryError, "549,755,813,888 bytes.*context is usable"):
        sf.spmm(a, B)  # C would have 512 GiB
    assert float(sf.spmm(a, B[:, :32].copy())[5].sum()) == 32
    pool = cp.get_default_memory_pool()
    path = folder / "x.safetensors"
    sf.save(path, {"w": sf.Dense.from_dense(np.ones((2048, 4096), np.float16))})
    x = np.ones((2048, 4096), np.float16)
    wide = sf.convert(np.ones((64, 64), np.float16), "bsr").to("cuda")
    del B
    gc.collect()  # the traceback of the refusal still refers to it
    pool.free_all_blocks()
    pool.set_limit(size=pool.used_bytes() + 2**20)
    try:
        for use in (lambda: sf.load(path, device="cuda"), lambda: sf.Dense.from_dense(x).to("cuda"),
                    lambda: arrays.to_device(x, "cuda")):  # fmt: skip
            with refused(folder, sf.errors.DeviceMemoryError, "bytes"):
                use()
        B = cp.ones((64, 4096), cp.float16)
        with refused(folder, sf.errors.DeviceMemoryError):
            fill_up(pool, wide, B)
    finally:
        pool.set_limit(size=0)
    assert bool((sf.load(path, device="cuda")["w"].data == 1).all())


def fill_up(pool: Any, a: Any, B: Any) -> None:
    """Products until nothing is left for the result of one."""
    pool.set_limit(size=pool.total_bytes())
    kept = []
    while True:
        kept.append(sf.spmm(a, B))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", SPARSE, ids=lambda f: f.name)
def test_G04_nothing_unvalidated_is_launched(cp: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, fmt: Any) -> None:
    good, B = made(fmt), cp.asarray(operand())
    on_device = good.to("cuda")
    path = small_file(folder, fmt.name)
    data = path.read_bytes()
    loaded: list[str] = []
    from spformat.backends.cuda.runtime import jit

    load = jit.load
    monkeypatch.setattr(jit, "load", lambda source, *a, **k: (loaded.append(source), load(source, *a, **k))[1])
    monkeypatch.setattr(tensorfile, "SCAN_ON_DEVICE", 0)
    tried = 0
    for case, (name, array, edit, error, message) in CASES.items():
        if name != fmt.name or issubclass(error, sf.errors.ArrayError):
            continue
        if fmt is sf.TwoFour and "nibble" in case:
            continue  # made for another order of the metadata: below
        bad = on_device.with_arrays(**{array: cp.asarray(edit(getattr(good, array)))})
        for use in (lambda bad=bad: sf.spmm(bad, B), lambda bad=bad: sf.plan(bad, n=16), lambda bad=bad: bad.to_csr()):
            with refused(folder, error, message):
                use()
        path.write_bytes(data)
        rewrite(path, change(array, edit))
        with refused(folder, error, message):
            sf.load(path, device="cuda")
        assert not bad.is_validated
        tried += 1
    assert tried > 2 or fmt is sf.TwoFour
    unmarked = on_device.with_arrays(**on_device.arrays())
    for kernel in KERNELS:
        p = problem(fmt, 90, M=10, K=12, n=16, nnz=good.stored, params=tuple(good.params().items()),
                    a_dtype="float16", b_dtype="float16", out_dtype="float16")  # fmt: skip
        if fmt.name in kernel.formats and not kernel.unsupported(p):
            with pytest.raises(sf.errors.UsageError, match="expected a validated matrix"):
                kernel.plan(unmarked, p)
    assert not [source for source in loaded if source.startswith("spmm")]
    monkeypatch.undo()
    assert np.array_equal(sf.plan(unmarked, B=B, unsafe=True)(B).get(), sf.spmm(good, operand(), backend="reference"))
    assert not unmarked.is_validated


def test_G04_kernels_of_the_host_refuse_an_unmarked_matrix(folder: Path) -> None:
    for fmt in SPARSE:
        unmarked = made(fmt).with_arrays(**made(fmt).arrays())
        p = problem(fmt, None, M=10, K=12, nnz=unmarked.stored, params=tuple(unmarked.params().items()), device="cpu",
                    a_dtype="float16", b_dtype="float16", out_dtype="float32")  # fmt: skip
        for kernel in backends.get("cpu").kernels():
            if fmt.name in kernel.formats:
                with pytest.raises(sf.errors.UsageError, match=r"expected a validated matrix.*call a.validate\(\)"):
                    kernel.plan(unmarked, p)
        sf.spmm(unmarked, operand(), backend="reference")
        assert unmarked.is_validated  # once, by the dispatcher


FAULT = """
import cupy, numpy as np
from spformat.backends.cuda.runtime import launch
from spformat_cli.main import main

wild = cupy.RawKernel('extern "C" __global__ void wild(int* p) { p[threadIdx.x] = 1; }', "wild")
real = launch.Bound.__call__
def broken(self, *args):  # a kernel of ours that writes where nothing is
    real(self, *args)
    wild((1,), (32,), (np.uint64(4096),))
launch.Bound.__call__ = broken
sys.argv = ["spformat", *sys.argv[1:]]
main()
"""


@pytest.mark.gpu
def test_G05_a_sticky_fault_ends_the_process(cp: Any, folder: Path) -> None:
    path = small_file(folder, "csr")
    with unharmed(folder):
        done = python(FAULT, "bench", path, "-n", "16", "--device", "cuda", "--backend", "cuda", "--repeats", "2")
    assert done.returncode == 70, (done.returncode, done.stderr[-2000:])
    assert "CUDA context lost" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_G06_an_asynchronous_error_is_reported_by_the_step_after_it(cp: Any, folder: Path) -> None:
    path = small_file(folder, "csr")
    code = (
        "import cupy, numpy as np, spformat as sf\nfrom spformat.storage import tensorfile\n"
        "tensorfile.SCAN_ON_DEVICE = 0\n"
        "wild = cupy.RawKernel('extern \"C\" __global__ void wild(int* p) { p[0] = 1; }', 'wild')\n"
        "wild((1,), (1,), (np.uint64(64),))\n"
        "try: sf.load(sys.argv[1], device='cuda')\n"
        "except sf.errors.DeviceFault as e: print(e, flush=True); import os; os._exit(e.exit_code)\n"
    )
    with unharmed(folder):
        done = python(code, path)
    assert (done.returncode, "CUDA context lost" in done.stdout) == (70, True), (done.stdout, done.stderr[-1500:])


# --- caches


COMPILE = (
    "import cupy, numpy as np, spformat as sf\nx = np.eye(64, dtype=np.float16)\n"
    "a = sf.convert(x, 'csr').to('cuda')\nC = sf.spmm(a, cupy.asarray(x))\nassert (C.get() == x).all()\n"
)


@pytest.mark.gpu
def test_G10_a_corrupted_cache_is_compiled_anew(cp: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        return python(COMPILE, CUPY_CACHE_DIR=str(folder))

    done = run(cache)
    assert done.returncode == 0, done.stderr[-2000:]
    kept = {p.name: p.read_bytes() for p in cache.iterdir()}
    assert kept
    folders = [Path("/proc")]  # in which nobody can make a file
    for i, damage in enumerate(
        (lambda d: d[:-9], lambda d: b"", lambda d: d[: len(d) // 2] + b"\0" * 64 + d[len(d) // 2 + 64 :],
         lambda d: os.urandom(len(d)))
    ):  # fmt: skip
        folders.append(tmp_path / f"damaged {i}")
        folders[-1].mkdir()
        for name, data in kept.items():
            (folders[-1] / name).write_bytes(damage(data))
    with ThreadPoolExecutor() as pool:
        for done in pool.map(run, folders):
            assert done.returncode == 0, done.stderr[-2000:]
    file = tmp_path / "file"
    file.write_text("not a folder")
    done = python("from spformat.arrays.library import import_cupy\nimport_cupy()\n", CUPY_CACHE_DIR=str(file / "x"))
    assert done.returncode == 0 or "DeviceUnavailable: CuPy cannot start" in done.stderr, done.stderr[-2000:]


def test_G10_a_corrupted_cache_of_host_code_is_compiled_anew(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    code = (
        "import numpy as np, spformat as sf\nx = np.eye(4096, 2048, dtype=np.float16)\n"
        "a = sf.convert(x, 'bitmask')\nassert (a.to_dense() == x).all()\n"
    )
    cache = tmp_path / "cache"
    assert python(code, NUMBA_CACHE_DIR=str(cache)).returncode == 0
    kept = {p: p.read_bytes() for p in cache.rglob("*") if p.is_file()}
    assert kept
    for damage in (lambda d: d[:40], lambda d: b"", lambda d: os.urandom(len(d))):
        for p, data in kept.items():
            p.write_bytes(damage(data))
        done = python(code, NUMBA_CACHE_DIR=str(cache))
        assert done.returncode == 0, done.stderr[-1500:]
    unwritable = tmp_path / "file"
    unwritable.write_text("not a folder")
    done = python(code, NUMBA_CACHE_DIR=str(unwritable / "x"))
    assert done.returncode == 0, done.stderr[-1500:]


TERMS = list(SpmmCSR.terms)
ENTRY: dict[str, Any] = {"terms": TERMS, "all": [1.0] * len(TERMS), "tiles": {}, "sm": 90}
RATES: dict[str, Any] = {
    "empty": b"", "garbage": os.urandom(100), "list": b"[]", "null": b"null", "deep": b"[" * 200_000,
    "no-kernels": {"device": "x"}, "kernels-list": {"kernels": [1]}, "entry-text": {"kernels": {"cuda.spmm_csr": "x"}},
    "text": ENTRY | {"all": ["fast"] * len(TERMS)}, "short": ENTRY | {"all": [1.0]}, "true": ENTRY | {"all": [True] * len(TERMS)},
    "negative": ENTRY | {"all": [-1.0] * len(TERMS)}, "zero": ENTRY | {"all": [0] * len(TERMS)},
    "huge": ENTRY | {"all": [10**4000] * len(TERMS)}, "nan": ENTRY | {"all": [float("nan")] * len(TERMS)},
    "infinite": ENTRY | {"all": [float("inf")] * len(TERMS)}, "terms-number": ENTRY | {"terms": 7},
    "tiles-list": ENTRY | {"tiles": [1]}, "tile-short": ENTRY | {"tiles": {"x": [1.0]}}, "sm-text": ENTRY | {"sm": "90"},
    "many": {"kernels": {str(i): ENTRY for i in range(5000)}},
}  # fmt: skip
"""Invalid contents of a user's file of rates: all of it is ignored."""


@pytest.mark.parametrize("case", RATES)
def test_G11_a_hostile_file_of_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    p = problem(sf.CSR, 90)
    wanted = sf.explain(p)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = rates.user_path()
    path.parent.mkdir()
    content = RATES[case]
    if isinstance(content, dict) and "all" in content:
        content = {"kernels": {"cuda.spmm_csr": content}}
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    before = path.read_bytes()
    assert sf.explain(p) == wanted
    assert sf.explain(p) == wanted
    assert path.read_bytes() == before
    assert [str(path) in r.getMessage() for r in caplog.records].count(True) == 1


def test_G11_names_in_a_file_of_rates_are_only_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(sf.CSR, 90)
    wanted = sf.explain(p).answers
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = rates.user_path()
    entry = ENTRY | {"tiles": {"../../x": ENTRY["all"], "1048576x1048576": ENTRY["all"]}}
    for name in ("cuda.no_such_kernel", "os.system"):
        rates.write(path, {"device": "x"}, {name: entry})
        assert sf.explain(p).answers == wanted
    rates.write(path, {"device": "x"}, {"cuda.spmm_csr": entry | {"terms": ["other"], "all": [1.0], "tiles": {}}})
    assert sf.explain(p).answers == wanted
    path.unlink()
    os.mkfifo(path)
    assert sf.explain(p).answers == wanted  # and does not wait for a writer
