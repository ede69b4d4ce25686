"""Rows of 16-bit values that start anywhere on a GPU: python benchmarks/unaligned_lines.py

*stores*: microseconds of a kernel that only stores C, in tiles of 128 x 256, as the kernels of products do: a warp has
16 rows and stores them in pieces of 64, 128 or 256 columns, 16 bytes at a time between boundaries, and both ends value
by value (ends) or not at all (cut), or everything value by value (values). The same where rows are aligned. *copies*:
those of the kernel that copies B to aligned rows, beside cudaMemcpyAsync of as many bytes. Cold L2, medians; a launch
is in all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np

from spformat.backends.cuda.runtime.copy_lines import CopyLines
from spformat.products.problem import PITCH, Problem

SOURCE = r"""
template <int L, int MODE> __device__ void store(unsigned short* c, int M, int N) {
    const int tiles = (N + 255) / 256, lane = threadIdx.x % 32;
    const int row = blockIdx.x / tiles * 128 + threadIdx.x / 32 * 16, left = blockIdx.x % tiles * 256;
    const int there = min(16, M - row);
    for (int col = left; col < left + 256 && col < N; col += L) {
        unsigned short* const first = c + (long long)row * N + col;
        const int whole = min(L, N - col);
        auto before = [&](int l) { return int((16 - (unsigned long long)(first + l * N) % 16) % 16) / 2; };
        if (MODE == 2)
            for (int k = lane; k < there * L; k += 32)
                if (k % L < whole) first[k / L * N + k % L] = 7;
#pragma unroll 2
        for (int k = lane; MODE < 2 && k < there * (L / 8); k += 32) {
            const int l = k / (L / 8), at = before(l) + k % (L / 8) * 8;
            if (at + 8 <= whole) *(uint4*)(first + l * N + at) = make_uint4(lane, lane, lane, lane);
        }
        const int ends = whole % 8 ? 16 : 8;
        for (int k = lane; MODE == 0 && k < there * ends; k += 32) {
            const int l = k / ends, e = k % ends, head = before(l);
            const int at = e < head ? e : e + max(0, whole - head) / 8 * 8;
            if (at < whole) first[l * N + at] = 7;
        }
    }
}
#define KERNEL(name, L, MODE) \
    extern "C" __global__ void __launch_bounds__(256) name(unsigned short* c, int M, int N) { store<L, MODE>(c, M, N); }
KERNEL(ends_64, 64, 0) KERNEL(ends_128, 128, 0) KERNEL(ends_256, 256, 0)
KERNEL(cut_64, 64, 1) KERNEL(cut_128, 128, 1) KERNEL(cut_256, 256, 1) KERNEL(values_64, 64, 2)
"""
NAMES = ("ends_64", "ends_128", "ends_256", "cut_64", "cut_128", "cut_256", "values_64")
STORED = ((4096, 1593), (4096, 393), (1024, 2041), (8192, 1017), (14336, 505))
"""Rows and columns of C."""
COPIED = ((4096, 1017), (4096, 1593), (1024, 1593), (4096, 333), (11008, 513), (1024, 385))
"""Rows and columns of B."""


def microseconds(run: Callable[[], Any], flush: Any, repetitions: int = 15) -> float:
    """The median between two events, after a launch that fills L2."""
    times = []
    for number in range(repetitions + 3):
        flush[...] = number
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end) * 1e3)
    return statistics.median(times[3:])


def stores(M: int, N: int) -> dict[str, Callable[[], Any]]:
    """Each way to store C, and units of 16 bytes where rows are aligned."""
    module = cp.RawModule(code=SOURCE, options=("-std=c++17",))
    grid = -(-M // 128) * -(-N // 256)
    C, wider = cp.zeros(M * N, cp.uint16), -(-N // PITCH) * PITCH
    aligned = cp.zeros(M * wider, cp.uint16)

    def run(name: str, to: Any, columns: int) -> Callable[[], Any]:
        kernel = module.get_function(name)
        return lambda: kernel((grid,), (256,), (to, np.int32(M), np.int32(columns)))

    return {**{name: run(name, C, N) for name in NAMES}, "aligned": run("ends_256", aligned, wider)}


def copies(K: int, N: int) -> dict[str, Callable[[], Any]]:
    """The copy of B to aligned rows, and a plain copy of as many bytes."""
    p = Problem.product("dense", (), 1, K, N, K, "bfloat16", "bfloat16", "bfloat16", "row", "row", "cuda", 90)
    pitch = -(-N // PITCH) * PITCH
    B, to, same = cp.zeros((K, N), cp.uint16), cp.zeros((K, pitch), cp.uint16), cp.zeros((K, pitch), cp.uint16)
    stream = cp.cuda.get_current_stream().ptr
    lines = CopyLines(2, p).bind(stream, B.data.ptr, to.data.ptr, K, N, N, pitch, pitch)
    # B belongs to what runs: the launch has its address only.
    return {
        "copy of lines": lambda: (lines(), B),
        "cudaMemcpyAsync": lambda: to.data.copy_from_device_async(same.data, same.nbytes),
    }


def main() -> None:
    flush = cp.zeros(96 << 20, cp.uint8)
    for what, shapes, crowd in (("stores", STORED, stores), ("copies", COPIED, copies)):
        for rows, columns in shapes:
            times = (f"{name} {microseconds(run, flush):.2f}" for name, run in crowd(rows, columns).items())
            print(f"{what} {rows} x {columns}, {rows * columns * 2 / 1e6:.1f} MB:", ", ".join(times), flush=True)


if __name__ == "__main__":
    main()
