"""Every product kernel of Hopper runs in the emulator on small odd shapes, with clusters too, and planted defects are found.

``stand_in`` takes the place of CuPy, so that whatever needs it runs in a process of its own.
"""

from __future__ import annotations

import re

import emulator
import pytest
from emulator.process import python

from spformat.backends.cuda import KERNELS

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")

HOPPER = tuple(k.name for k in KERNELS if k.name.endswith(("sm90", "sm90a")))

ONCE = """
import sys
from emulator import products, stand_in

stand_in.install(90)
from spformat.backends.cuda import KERNELS

for kernel in KERNELS:
    if kernel.name not in sys.argv[1:]:
        continue
    own = kernel.name.removeprefix("cuda.").replace("tma_sm90a", "tma")  # of its function
    dtypes = ("float32",) if own == "spmm_vector_nm_sm90" else ("bfloat16",)
    for seed in range(60):  # other cases run a kernel for operands that the copy engine does not take
        case = products.drawn(kernel, seed, 90, dtypes, 70)
        if case is None:  # no draw is one that the kernel takes
            continue
        before = stand_in.LAUNCHES.copy()
        stand_in.OPTIONS.update(seed=seed, shuffle_threads=True)
        for text in products.differences(case, kernel, 90):
            print("DIFFERENT", kernel.name, text, case)
        if ran := sum(n for name, n in (stand_in.LAUNCHES - before).items() if own + "<" in name):
            print(kernel.name, ran)
            break
"""

CLUSTERS = """
import contextlib
from dataclasses import replace
import numpy as np
from emulator import stand_in

stand_in.install(90)
import cupy
import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.sr_bcrs import spmm_sr_bcrs_sm90a
from spformat.backends.cuda.vector_nm import spmm_vector_nm_tma_sm90a
from spformat.products.problem import Problem
from spformat.products.tiles import forced

rng, (M, K, N) = np.random.default_rng(0), (140, 300, 72)
x = rng.integers(-3, 4, (M, K)).astype(VALUE_TYPES["bfloat16"].numpy)
B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
nm = x * np.tile(np.arange(K) % 4 < 2, (M, 1)).astype(x.dtype)
sparse = x * (rng.random((M, K)) < 0.1).astype(x.dtype)
spmm_vector_nm_tma_sm90a.CLUSTER = (2, 2)
narrow = spmm_sr_bcrs_sm90a.TILES[2]
for kernel, tile, a, values in (
    (spmm_vector_nm_tma_sm90a.SpmmVectorNMTMA(), None, sf.convert(nm, "vector-nm", n=2, m=4, vector_length=8), nm),
    (spmm_sr_bcrs_sm90a.SpmmSRBCRSHopper(), replace(narrow, cluster=2), sf.convert(sparse, "sr-bcrs"), sparse),
):
    p = Problem.product(a.name, tuple(a.params().items()), M, K, N, a.stored, *["bfloat16"] * 3, device="cuda", sm=90)
    there = a.to("cuda")
    with forced(kernel.name, "256x128x128") if not tile else contextlib.nullcontext():
        plan = kernel.plan_with(there, p, tile) if tile else kernel.plan(there, p)
    for seed in range(2):
        stand_in.OPTIONS.update(seed=seed, shuffle_threads=True)
        got = plan(cupy.asarray(B), cupy.full((M, N), np.nan, x.dtype)).get()
        assert np.array_equal(got, (values.astype("f4") @ B.astype("f4")).astype(x.dtype)), kernel.name
for f in stand_in.Function.of_handle.values():
    print(f.emulated.instance.partition("<")[0], f.emulated.cluster)
"""


def test_every_kernel_runs_once() -> None:
    done = python("-c", ONCE, *HOPPER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(HOPPER), done.stdout


def test_kernels_whose_launchers_use_no_clusters_work_in_them() -> None:
    done = python("-c", CLUSTERS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "spmm_vector_nm_tma (4, 1, 1)" in done.stdout, done.stdout
    assert "spmm_sr_bcrs_sm90a (2, 1, 1)" in done.stdout, done.stdout


PLANTED = """
import sys
from emulator import stand_in
from emulator.planted import plant

planted = plant({old!r}, {new!r}, header="spformat/two_four_wgmma.cuh")

stand_in.install(90)
import cupy
import numpy as np
import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.preprocess import masks
from spformat.products.tiles import forced

rng = np.random.default_rng(0)
M, K, N = {shape}
dtype = VALUE_TYPES["bfloat16"].numpy
x = rng.integers(-3, 4, (M, K)).astype("f4")
x = masks.apply(x, masks.magnitude_nm(x, 2, 4)).astype(dtype)
a = sf.convert(x, "two-four").to("cuda")
B = rng.integers(-3, 4, (K, N)).astype(dtype)
wanted = (x.astype("f4") @ B.astype("f4")).astype(dtype)
for seed in range(6):
    stand_in.OPTIONS.update(seed=seed, shuffle_threads=True)
    out = cupy.full((M, N), np.nan, dtype)
    try:
        with forced("cuda.spmm_" + {kernel!r}, {tile!r}):
            sf.spmm(a, cupy.asarray(B), out, "cuda.spmm_" + {kernel!r})
        print("DIFFERENT" if not np.array_equal(out.get(), wanted) else "equal")
    except Exception as e:
        print(e)
assert any(planted)
"""
SM90A, SM90 = "two_four_sm90a", "two_four_sm90"
WIDE = "128x64x64 cluster 1 split 1 stages 16 span 8"


@pytest.mark.parametrize(
    ("kernel", "shape", "tile", "old", "new", "text"),
    [
        (SM90A, (70, 1200, 64), WIDE, "wgmma::wait<1>();", "", "DIFFERENT"),
        (SM90A, (70, 200, 64), WIDE, "barrier::wait(full + 8 * stage, phase);", "",
         "a block ends while cp.async.bulk.tensor to shared memory still uses its shared memory"),
        (SM90A, (70, 200, 64), WIDE, "64 * 128, 1024, wgmma::B128)", "64 * 128, 1024, wgmma::B64)", "DIFFERENT"),
        (SM90A, (70, 200, 64), WIDE, "barrier::expect(full + 8 * stage, SLAB);",
         "barrier::expect(full + 8 * stage, SLAB - 16);", "0 of 1 arrivals missing, -16 bytes missing"),
        (SM90, (128, 600, 128), "128x128x64 stages 4", "__syncthreads();  // no warp reads the slab before this one any more", "",
         "DIFFERENT"),
        (SM90A, (70, 200, 64), WIDE, "if (threadIdx.x % 128 == 0) tma::store_wait_read<0>();", "",
         "a block ends while cp.async.bulk.tensor to global memory still uses its shared memory"),
    ],
    ids=["product not waited for", "copy not waited for", "another swizzle", "expected bytes", "no barrier", "store not waited for"],
)  # fmt: skip
def test_a_planted_defect_is_found(
    kernel: str, shape: tuple[int, int, int], tile: str, old: str, new: str, text: str
) -> None:
    done = python("-c", PLANTED.format(kernel=kernel, shape=shape, tile=tile, old=old, new=new))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(re.escape(text), done.stdout), done.stdout
