"""Every product kernel of sm_80 runs in the emulator, and defects that are planted in one are found.

``stand_in`` takes the place of CuPy, so that whatever needs it runs in a process of its own.
"""

from __future__ import annotations

import re

import emulator
import pytest
from emulator.process import python
from test_emulator import BUILT, law

from spformat.backends.cuda import KERNELS

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")

SMALL = ("--products", "--cases", "1", "--largest", "70", "--dtypes", "float16", "float32")
"""Every type and layout is another instance to build: `make emulate EMULATE=--products` takes all of them, and more cases."""
GROUPS = 3
HOPPER = tuple(k.name for k in KERNELS if k.name.endswith(("sm90", "sm90a")))


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_kernel_of_sm_80_gives_the_products_of_numpy(group: int) -> None:
    names = [k.name for k in KERNELS][group::GROUPS]
    done = law(*SMALL, "--seed", "1", "--kernels", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(\S+): (\d) cases, (\d+) launches, (.*), [\d.]+ s$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in lines] == names, done.stdout
    for name, cases, launches, result in lines:
        if name in HOPPER:
            assert (cases, result) == ("0", "takes nothing on sm_80")
        else:
            assert (cases, result) == ("1", "equal")
            assert int(launches) >= 2, done.stdout


PLANTED = """
import runpy, sys
from emulator.planted import plant

plant({old!r}, {new!r}, {source!r}, {header!r})
sys.argv[1:] = {options!r}
runpy.run_module("emulator", run_name="__main__")
"""
TWO_FOUR = "two_four/spmm_two_four.cu"


WAIT = "cp_async_wait<S - 2>();"


@pytest.mark.parametrize(
    ("source", "old", "new", "texts"),
    [
        (TWO_FOUR, WAIT, "", ("RAISED", "mma.sp::ordered_metadata with the places 3, 3")),  # what was not there yet is 0xFF
        (TWO_FOUR, WAIT + "\n                __syncthreads();", WAIT, ("RAISED", "with the places 3, 3")),
        (TWO_FOUR, "Layout::a + wm * 64 + lane * 16", "Layout::a + wm * 64 + lane % 16 * 16", ("DIFFERENT", "expected")),
        (TWO_FOUR, "cp_async_16_if(wanted, to, from, left * 2)", "cp_async_16_if(wanted, to, from, 16)",
         ("RAISED", "access outside of the arrays at cp_async.cuh")),
        ("bitmask/spmm_bitmask_tc.cu", 'else asm volatile("bar.sync', 'else if (false) asm volatile("bar.sync', ("DIFFERENT",)),
    ],
    ids=["no wait", "no barrier", "wrong rows", "bytes behind B", "no named barrier"],
)  # fmt: skip
def test_a_planted_defect_of_a_kernel_is_found(source: str, old: str, new: str, texts: tuple[str, ...]) -> None:
    name = source.rpartition("/")[2].removesuffix(".cu")
    options = ["--kernels", name, "--cases", "1", "--seed", "2", "--dtypes", "float16"]
    done = python("-c", PLANTED.format(source=source, header="", old=old, new=new, options=options))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(rf"^cuda\.{name}: 1 cases, \d+ launches, [1-9] DIFFERENT, ", done.stdout, re.MULTILINE), (
        done.stdout
    )
    assert all(text in done.stdout for text in texts), done.stdout


def test_names_of_kernels_that_do_not_exist_are_refused() -> None:
    done = law("--kernels", "spmm_csr", "spmm_cssr")
    assert done.returncode == 2
    assert "--kernels: expected cuda.spmm_bsr_sm90a, " in done.stderr
    assert done.stderr.endswith(", got cuda.spmm_cssr\n")


CUBLAS = """
import sys
from emulator import cublas, stand_in

stand_in.install(80)
import cupy
import numpy as np
import spformat as sf
from spformat.backends.cuda.runtime import cublas_handle

cublas_handle.NO_NARROW_SUMS = int(sys.argv[1])
x, B = np.zeros((16, 64), np.float16), np.ones((64, 8), np.float16)
x[:, :32], x[:, 31], x[:, 32:] = 64, 65, -64  # half of the sum is 2049: not a float16
wanted = (x.astype("f4") @ B.astype("f4")).astype(np.float16)
a, b, out = sf.convert(x, "csr").to("cuda"), cupy.asarray(B), cupy.empty((16, 8), np.float16)
for _ in range(6):
    sf.spmm(a, b, out, "cuda.expand_then_dense")
    print("equal" if np.array_equal(out.get(), wanted) else "DIFFERENT")
for handle in cublas.Handle.of_address.values():
    print(*handle.calls)
"""


def test_products_by_cublas_again_call_it_once_and_need_the_mode_of_its_handle() -> None:
    done = python("-c", CUBLAS, "16")
    gemms = " ".join(["cublasGemmEx"] * 6)
    assert done.stdout.splitlines() == ["equal"] * 6 + [f"cublasSetMathMode cublasSetStream {gemms}"], done.stderr
    done = python("-c", CUBLAS, "0")
    assert done.stdout.splitlines()[:6] == ["DIFFERENT"] * 6, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "texts"),
    [
        ("static_cast<Ptr>(at + items)", "static_cast<Ptr>(at + items + 1)",
         ("DIFFERENT csr: dense -> csr", "of Case(seed=7")),
        ("number >= 0 && number < M", "true", ("RAISED csr: Case(seed=7", "access outside of the arrays at ")),
    ],
    ids=["wrong place", "rows outside"],
)  # fmt: skip
def test_a_planted_defect_of_a_conversion_is_found(old: str, new: str, texts: tuple[str, ...]) -> None:
    options = ["--formats", "csr", "--seed", "7", *BUILT]
    source, header = "csr/csr_from_dense.cu", "spformat/csr_pieces.cuh"
    program = PLANTED.format(source=source, header=header, old=old, new=new, options=options)
    done = python("-c", program)
    assert done.returncode == 1, done.stderr
    assert all(text in done.stdout for text in texts), done.stdout
    assert re.search(r"^csr: 1 cases, \d+ launches, [1-9] DIFFERENT, ", done.stdout, re.MULTILINE)
