"""The emulator of CUDA kernels: what it computes, what it reports, and conversions of every format on it.

``stand_in`` takes the place of CuPy, so that whatever needs it runs in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
from emulator import EmulatorError, Kernel
from emulator.process import python
from emulator.ptx import translated

from spformat.backends.cuda.runtime import jit
from spformat.formats import registered

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")

PREFIX = """
#include "spformat/prefix_sum.cuh"
using namespace spformat;
template <int T, class I> __global__ void __launch_bounds__(T) sums(const I* __restrict__ x, I* y, I* total) {
    __shared__ I room[33];
    I all;
    y[blockIdx.x * T + threadIdx.x] = sum_before_thread<T>(x[blockIdx.x * T + threadIdx.x], room, all);
    if (threadIdx.x == 0) total[blockIdx.x] = all;
}
template <int T> __global__ void look_back(const u32* x, u32* y, i64 n, volatile u64* state, u32* ticket) {
    __shared__ u32 room[33];
    __shared__ u32 block, start;
    if (threadIdx.x == 0) block = atomicAdd(ticket, 1u);
    __syncthreads();
    const i64 i = (i64)block * T + threadIdx.x;
    u32 all;
    const u32 before = sum_before_thread<T>(i < n ? x[i] : 0u, room, all);
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) state[block] = (block ? 1ull : 2ull) << 32 | all;
        __threadfence();
        u32 sum = 0;
        for (int p = (int)block - 1 - (int)threadIdx.x;; p -= 32) {
            u64 s = 2ull << 32;
            if (p >= 0) do { s = state[p]; } while (!(s >> 32));
            const u32 full = __ballot_sync(~0u, s >> 32 == 2);
            const int stop = full ? __ffs(full) - 1 : 31;
            sum += sum_of_warp((int)threadIdx.x <= stop ? u32(s) : 0u);
            if (full) break;
        }
        if (threadIdx.x == 0) start = sum, state[block] = 2ull << 32 | (sum + all);
    }
    __syncthreads();
    if (i < n) y[i] = start + before;
}
"""

WARPS = """
__global__ void warps(unsigned* out) {
    const unsigned t = threadIdx.x, l = t % 32;
    if (t >= 70) return;  // a lane that has left blocks nobody
    const unsigned m = t < 64 ? 0xFFFFFFFFu : 0x3Fu;
    if (l < 8 && t < 64) {
        out[t] = __reduce_add_sync(0xFF, l) + __popc(__match_any_sync(0xFF, l / 3)) * 1000 + __shfl_xor_sync(0xFF, l, 1, 8) * 100000;
    } else if (t < 64) {
        out[t] = __reduce_max_sync(0xFFFFFF00, l);
    } else {
        out[t] = __ballot_sync(m, l & 1);
    }
    __syncwarp(m);
    __syncthreads();
    if (t < 32) out[t] += __shfl_down_sync(~0u, l, 4) * 10000000u;
    if (__syncthreads_count(l == 0) == 3) out[t] += __syncthreads_or(t == 69);
}
"""

FAULTS = """
__global__ void copy(const int* x, int* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) y[i] = x[i];
}
__global__ void set(unsigned char* y, int at) { y[at + (int)threadIdx.x] = 1; }
__global__ void wide(const uint4* x, uint4* y) { y[threadIdx.x] = x[threadIdx.x]; }
template <bool barrier> __global__ void neighbour(int* y) {
    __shared__ __align__(16) int room[64];
    room[threadIdx.x] = threadIdx.x;
    if (barrier) __syncthreads();
    y[threadIdx.x] = room[threadIdx.x ? threadIdx.x - 1 : 0];
}
template <int way> __global__ void aligned(size_t* y) {
    alignas(16) __shared__ unsigned char one[16];
    __shared__ alignas(32) unsigned char two[32];
    __shared__ __align__(64) unsigned char three[64];
    extern __shared__ __align__(16) unsigned char four[];
    y[0] = (size_t)(way ? one : four) % 16 + (size_t)two % 32 + (size_t)three % 64;
}
__global__ void stuck(int* y) {
    if (threadIdx.x == 5) __syncwarp(1u << 5 | 1u << 8);
    __syncthreads();
    y[0] = 1;
}
__global__ void endless(volatile int* y) { while (!y[0]) {} }
__global__ void flag(int* y) {
    __shared__ volatile int ready;
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    if (threadIdx.x < 32) { while (!ready) {} y[threadIdx.x] = 7; } else if (threadIdx.x == 40) ready = 1;
}
__global__ void dynamic(int* y, int n) {
    extern __shared__ int room[];
    room[threadIdx.x] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = room[n - 1 - threadIdx.x];
}
__global__ void index(int* y, int n) { __shared__ int room[32]; room[threadIdx.x + n] = 1; y[0] = room[0]; }
__global__ void shift(unsigned* y, int n) { y[0] = 1u << n; }
__global__ void misnamed(unsigned* y) { y[threadIdx.x] = __ballot_sync(1u, 1); }
__global__ void fresh(unsigned* y) { __shared__ unsigned room[4]; if (y[0]) room[0] = 1; __syncthreads(); y[threadIdx.x] = room[threadIdx.x]; }
__global__ void other(unsigned* y) { asm volatile("brkpt;"); }
struct Two { long long a; int b; };
__global__ void by_value(Two t, float f, double* y, short h) { y[0] = t.a + t.b + f + h; }
"""


WINDOW = """
__global__ void window(unsigned* y, int shift) {  // two static arrays and the dynamic one by their 32-bit addresses
    __shared__ unsigned one[8];
    __shared__ alignas(128) unsigned two[32];
    extern __shared__ alignas(512) unsigned three[];
    unsigned* const all[3] = {one, two, three};
    for (int i = 0; i < 3; ++i) {
        const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(all[i]));
        all[i][4] = 7 + i;
        asm volatile("st.shared.v2.u32 [%0+16], {%1, %2};" ::"r"(at + shift), "r"(i), "r"(all[i][4]) : "memory");
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y[i]) : "r"(at + 20) : "memory");
        y[3 + i] = at % 512;
        y[6 + i] = at >> 24;
    }
    y[9] = all[1][4] + __cvta_generic_to_shared(one + 8) - __cvta_generic_to_shared(one);
}
__global__ void elsewhere(unsigned* y) { y[0] = (unsigned)__cvta_generic_to_shared(y); }
__global__ void past(unsigned char* y, int at) { extern __shared__ alignas(512) unsigned char three[]; three[at] = 1; }
"""


def fault(name: str) -> Kernel:
    return Kernel("faults.cu", name, text=FAULTS)


def sums(name: str) -> Kernel:
    return Kernel("prefix.cu", name, [jit.INCLUDE], PREFIX)


@pytest.mark.parametrize(
    ("threads", "kind", "dtype"), [(32, "int", "i4"), (96, "spformat::i64", "i8"), (1024, "unsigned", "u4")]
)
def test_prefix_sums_of_blocks(threads: int, kind: str, dtype: str) -> None:
    k, x = sums(f"sums<{threads}, {kind}>"), np.random.default_rng(0).integers(0, 1000, (5, threads)).astype(dtype)
    for shuffled in (False, True):
        y, total = np.zeros_like(x), np.zeros(5, dtype)
        k(5, threads, x, y, total, shuffle_blocks=shuffled, shuffle_threads=shuffled, seed=threads)
        np.testing.assert_array_equal(y, np.cumsum(x, 1) - x)
        np.testing.assert_array_equal(total, x.sum(1))


def test_decoupled_look_back() -> None:
    k = sums("look_back<128>")
    for n in (1, 127, 128, 129, 9000):
        x = np.random.default_rng(n).integers(0, 9, n).astype("u4")
        y, blocks = np.zeros_like(x), -(-n // 128)
        k(
            blocks,
            128,
            x,
            y,
            n,
            np.zeros(blocks, "u8"),
            np.zeros(1, "u4"),
            shuffle_blocks=True,
            shuffle_threads=True,
            seed=n,
        )
        np.testing.assert_array_equal(y, np.cumsum(x, dtype="u4") - x)


def test_warps() -> None:
    out, lane = np.zeros(128, "u4"), np.arange(32)
    Kernel("warps.cu", "warps", text=WARPS)(1, 128, out)
    alike = (3, 3, 3, 3, 3, 3, 2, 2)
    wanted = np.array([28 + 1000 * alike[i] + 100000 * (i ^ 1) for i in range(8)] + [31] * 24)
    np.testing.assert_array_equal(out[:32], wanted + 10000000 * np.where(lane + 4 < 32, lane + 4, lane) + 1)
    np.testing.assert_array_equal(out[32:64], wanted + 1)
    np.testing.assert_array_equal(out[64:70], [0b101010 + 1] * 6)
    assert not out[70:].any()


def test_access_outside_of_arrays_is_reported() -> None:
    x, y = np.arange(100, dtype="i4"), np.zeros(100, "i4")
    copy, put = fault("copy"), fault("set")
    copy(1, 256, x, y, 99)
    np.testing.assert_array_equal(y, x)
    with pytest.raises(
        EmulatorError, match=r"(?s)outside of the arrays at faults\.cu:4 .* 0 bytes behind the end of argument 0 \(400"
    ):
        copy(1, 256, x, y, 100)
    with pytest.raises(EmulatorError, match=r"writes 0 bytes behind the end of argument 0 \(1000 bytes\)"):
        put(1, 4, np.zeros(1000, "u1"), 1000)
    with pytest.raises(EmulatorError, match=r"writes 1 bytes before argument 0 \(1000 bytes\)"):
        put(1, 4, np.zeros(1000, "u1"), -4)
    both = np.arange(200, dtype="i4")  # arrays that overlap still do
    copy(1, 256, both[:100], both[100:], 99)
    np.testing.assert_array_equal(both[100:], np.arange(100))


def test_a_missing_barrier_shows_where_threads_are_shuffled() -> None:
    wanted = np.array([0, *range(63)], "i4")
    for barrier in ("true", "false"):
        k = fault(f"neighbour<{barrier}>")
        for seed in range(3):
            y = np.zeros(64, "i4")
            k(1, 64, y, shuffle_threads=True, seed=seed)
            assert np.array_equal(y, wanted) == (barrier == "true")


def test_deadlocks_and_loops_without_end_are_reported() -> None:
    with pytest.raises(
        EmulatorError,
        match=r"(?s)deadlock in block \(0,0,0\): 0 of 64 .* waits at __syncwarp mask 00000120 faults\.cu:22",
    ):
        fault("stuck")(1, 64, np.zeros(1, "i4"))
    with pytest.raises(EmulatorError, match=r"time is up .* at faults\.cu:26 "):
        fault("endless")(1, 64, np.zeros(1, "i4"), timeout=0.2)
    y = np.zeros(32, "i4")
    fault("flag")(1, 64, y)  # a thread that waits in a loop for another of its block
    assert (y == 7).all()


@pytest.mark.parametrize(
    ("name", "argument", "number", "options", "text"),
    [
        ("dynamic", "i4", 64, {"smem": 128}, "behind the dynamic shared memory of the launch at faults.cu:35"),
        ("index", "i4", 1, {}, "index outside of an array of known size (faults.cu:39:"),
        ("shift", "u4", 32, {}, "shift by a negative number or by the width of the type or more (faults.cu:40:"),
        ("misnamed", "u4", None, {}, "a lane calls a warp operation with a mask that does not name it at faults.cu:41"),
        ("other", "u4", None, {}, "inline PTX that is not emulated: brkpt; at faults.cu:43"),
    ],
)
def test_faults_are_reported(name: str, argument: str, number: int | None, options: Any, text: str) -> None:
    with pytest.raises(EmulatorError) as e:
        fault(name)(1, 64, np.zeros(64, argument), *([] if number is None else [number]), **options)
    assert text in str(e.value)


def test_alignment_and_arguments() -> None:
    x, y = np.arange(64, dtype="u4"), np.zeros(64, "u4")
    wide = fault("wide")
    wide(1, 16, x, y)
    np.testing.assert_array_equal(x, y)
    with pytest.raises(EmulatorError, match="not aligned to its type"):
        wide(1, 16, x, y, misalign={0: 4})
    for way in (0, 1):
        rest = np.ones(1, "u8")
        fault(f"aligned<{way}>")(1, 1, rest, smem=16)
        assert rest[0] == 0
    fault("fresh")(1, 4, y[:4])
    assert (y[:4] == 0xCDCDCDCD).all()
    two, z = np.zeros(1, np.dtype([("a", "i8"), ("b", "i4")], align=True)), np.zeros(1)
    two["a"], two["b"] = 5, 6
    fault("by_value")(1, 1, two, np.float32(0.5), z, np.int16(-2))
    assert z[0] == 9.5
    with pytest.raises(EmulatorError, match="argument 3 has 4 bytes, the parameter 2"):
        fault("by_value")(1, 1, two, np.float32(0.5), z, np.int32(1))
    with pytest.raises(EmulatorError, match="a block may have 232448"):
        wide(1, 16, x, y, smem=240_000)
    with pytest.raises(EmulatorError, match="y and z at most 65535"):
        wide((1, 70_000), 16, x, y)


def test_shared_memory_by_32_bit_addresses() -> None:
    k, y = Kernel("window.cu", "window", text=WINDOW), np.zeros(10, "u4")
    k(1, 1, y, 0, smem=40)
    assert y[:3].tolist() == [7, 8, 9]
    assert y[3] % 4 == y[4] % 128 == y[5] == y[6] == y[7] == y[8] == 0
    assert y[9] == 1 + 32
    with pytest.raises(
        EmulatorError,
        match=r"(?s)outside of the shared memory of the block at window\.cu.*8 bytes at shared .*: byte 32 of",
    ):
        k(1, 1, y, 16, smem=40)
    with pytest.raises(EmulatorError, match=r"(?s)shared address that is not aligned.*for 8 bytes on a multiple of 8"):
        k(1, 1, y, 4, smem=40)
    with pytest.raises(EmulatorError, match=r"8 bytes at shared .* of the dynamic shared memory of 20 bytes"):
        k(1, 1, y, 0, smem=20)
    with pytest.raises(EmulatorError, match="something that is not in shared memory"):
        Kernel("window.cu", "elsewhere", text=WINDOW)(1, 1, y)
    with pytest.raises(EmulatorError, match="writes 3 bytes behind the end of the dynamic shared memory"):
        Kernel("window.cu", "past", text=WINDOW)(1, 1, None, 43, smem=40)


def test_a_kernel_more_takes_few_memory_maps() -> None:
    """Linux gives a process 65,530: the stacks of all kernels are the same."""

    def maps() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    fault("shift")(1, 1, np.zeros(1, "u4"), 1)
    before = maps()
    for name in ("fresh", "flag", "neighbour<true>"):
        fault(name)(1, 1 if name == "fresh" else 64, np.zeros(64, "u4"))
    assert maps() - before < 60


def test_ptx_is_translated_line_by_line() -> None:
    text = 'asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"\n    : "=r"(a.x), "=r"(a.y) // both\n    : "l"(ns::p + 1));\nint x;\n'
    done = translated(text)
    assert done.count("\n") == text.count("\n")
    assert "(a.x) = emu_w.v[0]; (a.y) = emu_w.v[1];" in done
    assert "(const EmuW*)((size_t)(((ns::p + 1))))" in done


SEEDS = {
    7: ("dense", "csr", "pruning"),
    1: ("ell-buckets", "bsr", "dbsr", "coo"),
    2: ("sr-bcrs", "bitmask", "csc"),
    9: ("two-four", "vector-nm"),
}
"""The case of each format: some six conversions of a matrix that is not empty."""
BUILT = ("--cases", "1", "--dtypes", "float16")
"""Every type of values is another instance to build: `make emulate` takes all of them, and more cases."""
GPU_TEST = "empty_matrices or stored_zeros"
"""Tests of test_csr_convert.py that take a second."""


def test_every_format_has_a_case() -> None:
    assert sorted(sum(SEEDS.values(), ())) == sorted([*(f.name for f in registered()), "pruning"])


@pytest.mark.parametrize("seed", SEEDS)
def test_conversions_on_the_emulated_device_give_the_bytes_of_the_general_code(seed: int) -> None:
    done = law("--seed", str(seed), *BUILT, "--formats", *SEEDS[seed])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(\S+): 1 cases, (\d+) launches, equal, [\d.]+ s$", done.stdout, re.MULTILINE)
    assert tuple(name for name, _ in lines) == SEEDS[seed]
    assert min(int(launches) for _, launches in lines) >= 5, done.stdout


def test_options_that_do_not_fit_are_refused() -> None:
    done = law("--formats", "csr", "cssr")
    assert done.returncode == 2
    assert "--formats: expected dense, csr, " in done.stderr
    assert done.stderr.endswith(", pruning, got cssr\n")


def test_without_a_compiler_the_emulator_says_so(tmp_path: Path) -> None:
    done = python("-m", "emulator", PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr == "emulator: g++, readelf, addr2line not found: install g++ and binutils\n"


def test_tests_for_a_gpu_run_on_the_emulated_device() -> None:
    """With the plugin; without it they are skipped here, or run on a GPU."""
    file = str(Path(__file__).parent / "test_csr_convert.py")
    done = python(
        "-m", "pytest", "-q", "-p", "emulator.plugin", "-p", "no:cacheprovider", "-m", "gpu", file, "-k", GPU_TEST
    )
    assert re.search(r"^[1-9]\d* passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]
    assert "emulator.stand_in" not in sys.modules


def law(*options: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "emulator", *options)
