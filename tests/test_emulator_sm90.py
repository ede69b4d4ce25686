"""The emulator's instructions of Hopper but for products: copies of boxes, mbarriers, clusters; and what it reports."""

from __future__ import annotations

import ctypes
from typing import Any

import emulator
import numpy as np
import pytest
from emulator import EmulatorError, Kernel
from emulator import tensor_maps as maps

from spformat.backends.cuda.runtime import jit

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")

COPIES = """
#include "spformat/tma_store.cuh"
using namespace spformat;
__device__ u32 start_barrier(u64* bar, u32 arrivals) {
    if (threadIdx.x == 0) barrier::init(shared_address(bar), arrivals), barrier::fence_init();
    __syncthreads();
    return shared_address(bar);
}
// The bytes of a box as it lies in shared memory. Way 1: read without a wait; 2: nobody waits at all; 3: another barrier.
template <int Way, int Rank> __global__ void load(const __grid_constant__ TensorMap map, unsigned char* out, int x, int y, int z, int bytes, int announced) {
    extern __shared__ __align__(1024) unsigned char room[];
    __shared__ __align__(8) u64 bars[2];
    const u32 bar = start_barrier(bars, 1);
    if (threadIdx.x == 0) {
        barrier::expect(bar, announced);
        const u32 of = Way == 3 ? shared_address(bars + 1) : bar;
        if constexpr (Rank == 2) tma::load_2d(shared_address(room), map, of, x, y);
        else tma::load_3d(shared_address(room), map, of, x, y, z);
    }
    if (Way == 2) return;
    if (Way == 1) for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = room[i];
    barrier::wait(bar, 0);
    if (Way != 1) for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = room[i];
}
// A box of 64 x 8 words of 16 bits from a pattern. Way 1: no fence after stmatrix; 2: the end without a wait.
template <int Way> __global__ void store(const __grid_constant__ TensorMap map, int x, int y) {
    extern __shared__ __align__(1024) unsigned char room[];
    const u32 l = threadIdx.x, to = shared_address(room);
    for (int half = 0; half < 2; ++half) {  // words of a tile: row l/4, columns 2(l%4) and one more
        u32 r[4];
        for (int i = 0; i < 4; ++i) r[i] = (l / 4 * 64 + half * 32 + i * 8 + l % 4 * 2) * 0x10001 + 0x10000;
        stmatrix_x4(to + swizzled<128>(l % 8, half * 4 + l / 8), r);
    }
    if (Way != 1) tma::fence_shared();
    __syncwarp();
    if (l == 0) {
        tma::store_2d(map, to, x, y);
        tma::store_commit();
        if (Way != 2) tma::store_wait_read<0>();
    }
}
__global__ void store_wide(const __grid_constant__ TensorMap map) {
    extern __shared__ __align__(1024) unsigned char room[];
    if (threadIdx.x == 0) tma::store_2d(map, shared_address(room) + 64, 0, 0), tma::store_commit(), tma::store_wait_read<0>();
}
// Each block of the cluster sends its half of a box to both; then they exchange a number each.
template <int Way> __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64)
    share(const __grid_constant__ TensorMap map, unsigned char* out, float* sums) {
    extern __shared__ __align__(1024) unsigned char room[];
    __shared__ __align__(8) u64 bars[2];
    __shared__ __align__(16) float got[4];
    const u32 rank = cluster::rank(), bar = shared_address(bars), own = shared_address(got);
    if (threadIdx.x == 0) {
        barrier::init(bar, 1), barrier::init(bar + 8, 2);
        if (Way != 3) barrier::fence_init();
        barrier::expect(bar, 1024 + 16);
    }
    if (Way == 1) __syncthreads();
    else cluster::sync();
    if (threadIdx.x == 0) {
        tma::load_2d_multicast(shared_address(room) + rank * 512, map, bar, 0, rank * 4, 3);
        const float x[4] = {1.0f + rank, 2, 3, 4};
        cluster::store_async_4(cluster::map(own, 1 - rank), x, cluster::map(bar, 1 - rank));
    }
    barrier::wait_cluster(bar, 0);
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) out[rank * 1024 + i] = room[i];
    if (threadIdx.x == 0) sums[rank] = got[0] * 10 + got[3];
    if (threadIdx.x < 2) barrier::arrive_remote(bar + 8, threadIdx.x);
    barrier::wait_cluster(bar + 8, 0);
    if (Way == 2 && threadIdx.x == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(cluster::map(own, 1 - rank)), "r"(1));
    if (Way != 4) cluster::sync();
    else if (rank == 0) barrier::arrive_remote(bar, 1);
}
"""

BARRIERS = """
#include "spformat/cp_async.cuh"
#include "spformat/tma.cuh"
using namespace spformat;
__global__ void uninitialised(int) { __shared__ __align__(8) u64 bar; barrier::arrive(shared_address(&bar)); }
__global__ void too_many(int n) {
    __shared__ __align__(8) u64 bar;
    if (threadIdx.x == 0) barrier::init(shared_address(&bar), n), barrier::expect(shared_address(&bar), 16);
    __syncthreads();
    barrier::arrive(shared_address(&bar));
}
__global__ void overwritten(int) {
    __shared__ __align__(8) u64 bar;
    barrier::init(shared_address(&bar), 1);
    bar = 0;
    barrier::arrive(shared_address(&bar));
}
__global__ void again(int) { __shared__ __align__(8) u64 bar; for (int i = 0; i < 2; ++i) barrier::init(shared_address(&bar), 1); }
__global__ void waits(int n) {
    __shared__ __align__(8) u64 bar;
    if (threadIdx.x == 0) barrier::init(shared_address(&bar), n), barrier::expect(shared_address(&bar), 48);
    __syncthreads();
    barrier::wait(shared_address(&bar), 0);
}
__global__ void phases(int n) {  // parity p of a phase completes when its arrivals are there
    __shared__ __align__(8) u64 bar;
    __shared__ volatile int count;
    const u32 b = shared_address(&bar);
    if (threadIdx.x == 0) barrier::init(b, 32), count = 0;
    __syncthreads();
    barrier::wait(b, 1);
    for (int i = 0; i < n; ++i) {
        if (threadIdx.x >= 32) atomicAdd((int*)&count, 1), __threadfence_block(), barrier::arrive(b);
        barrier::wait(b, i & 1);
        if (count < 32 * (i + 1)) __trap();
        __syncthreads();  // nobody is two phases ahead: the parity would be the same
    }
}
template <bool Noinc> __global__ void copies(const float4* x, float4* y) {
    extern __shared__ __align__(128) float4 room[];
    __shared__ __align__(8) u64 bar;
    const u32 b = shared_address(&bar);
    if (threadIdx.x == 0) barrier::init(b, blockDim.x);
    __syncthreads();
    cp_async_16(shared_address(room + threadIdx.x), x + threadIdx.x);
    if (Noinc) barrier::arrive_after_copies(b);
    else barrier::arrive(b);
    barrier::wait(b, 0);
    y[threadIdx.x] = room[blockDim.x - 1 - threadIdx.x];
    cp_async_wait<0>();
}
template <int Count> __global__ void registers(int) { if (threadIdx.x < 128) give_registers<24>(); else take_registers<Count>(); }
template <int Count> __global__ void half_a_group(int) { if (threadIdx.x < 64) give_registers<Count>(); }
"""


def kernel(text: str, name: str) -> Kernel:
    return Kernel("hopper.cu", name, [jit.INCLUDE], text)


class Memory:
    """Zeros on a multiple of 256 that a tensor map may describe."""

    def __init__(self, nbytes: int) -> None:
        self._room = np.zeros(nbytes + 256, np.uint8)
        first = -self._room.ctypes.data % 256
        self.bytes = self._room[first : first + nbytes]

    def map(self, of: int, extents: Any, strides: Any, box: Any, swizzle: int, shift: int = 0, **changes: Any) -> bytes:
        """What ``cuTensorMapEncodeTiled`` writes; "" if it refuses. Strides in bytes."""
        rank, room = len(extents), ctypes.create_string_buffer(192)
        place = (ctypes.addressof(room) + 63) & ~63
        given: dict[str, Any] = {
            "place": place, "kind": of, "rank": rank, "address": self.bytes.ctypes.data + shift, "extents": extents,
            "strides": strides, "box": box, "steps": [1] * rank, "interleave": 0, "swizzle": maps.SPANS.index(swizzle),
            "promotion": 2, "fill": 0,
        }  # fmt: skip
        status = maps.encode(**(given | changes))
        assert status in (0, maps.INVALID_VALUE)
        return b"" if status else ctypes.string_at(place, 128)


def swizzled(data: np.ndarray[Any, Any], span: int) -> np.ndarray[Any, Any]:
    """Lines of ``span`` bytes from a multiple of 1024 on: pieces of 16 bytes change places with the number of the 128 bytes."""
    flat = data.reshape(-1, 16)
    out, at = np.empty_like(flat), np.arange(len(flat))
    out[at ^ (at // 8 % 8 % max(1, span // 16))] = flat
    return out.reshape(-1)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_boxes_arrive_in_their_order_with_zeros_outside(span: int) -> None:
    rows, cols, width = 21, 40, (span or 32) // 2
    memory = Memory(rows * 96)
    x = np.arange(1, rows * cols + 1, dtype="u2").reshape(rows, cols)
    memory.bytes.view("u2").reshape(rows, 48)[:, :cols] = x
    memory.bytes.view("u2").reshape(rows, 48)[:, cols:] = 0xEEEE  # behind the extent: never read
    box = memory.map(1, (cols, rows), (96,), (width, 16), span)
    k, size = kernel(COPIES, "load<0, 2>"), width * 32
    for seed, (at_x, at_y) in enumerate(((0, 0), (8, 3), (-8, -5), (cols - 8, rows - 2), (cols, 0), (16, -16))):
        out, padded = np.zeros(size, "u1"), np.zeros((rows + 64, cols + 192), "u2")
        padded[32 : 32 + rows, 96 : 96 + cols] = x
        k(1, 64, box, out, at_x, at_y, 0, size, size, smem=size, seed=seed, shuffle_threads=True)
        wanted = np.ascontiguousarray(padded[32 + at_y :, 96 + at_x :][:16, :width]).view("u1")
        np.testing.assert_array_equal(out, swizzled(wanted, span))


def test_boxes_of_three_dimensions() -> None:
    memory = Memory(4 * 5 * 64)
    x = memory.bytes.view("f4").reshape(4, 5, 16)
    x[...] = np.arange(x.size).reshape(x.shape)
    out = np.zeros(2 * 3 * 32, "u1")
    box = memory.map(7, (16, 5, 4), (64, 320), (8, 3, 2), 0)
    kernel(COPIES, "load<0, 3>")(1, 32, box, out, 4, 3, 1, out.size, out.size, smem=out.size)
    wanted = np.zeros((2, 3, 8), "f4")
    wanted[:, :2] = x[1:3, 3:5, 4:12]
    np.testing.assert_array_equal(out.view("f4").reshape(wanted.shape), wanted)


def test_a_copy_lands_at_any_time_until_it_is_waited_for() -> None:
    memory, seen = Memory(1024), set()
    memory.bytes[:] = 1
    box, k = memory.map(0, (128, 8), (128,), (128, 8), 0), kernel(COPIES, "load<1, 2>")
    for seed in range(12):
        out = np.zeros(1024, "u1")
        k(1, 32, box, out, 0, 0, 0, 1024, 1024, smem=1024, seed=seed, shuffle_threads=True)
        seen |= set(out.tolist())
    assert seen == {1, 0xCD}


@pytest.mark.parametrize(
    ("way", "announced", "text"),
    [(2, 1024, "a block ends while cp.async.bulk.tensor to shared memory still uses its shared memory at "),
     (3, 1024, "an mbarrier that is not initialised at "),
     (0, 1040, "phase 0, 0 of 1 arrivals missing, 16 bytes missing"),
     (0, 1008, "phase 0, 0 of 1 arrivals missing, -16 bytes missing")],
)  # fmt: skip
def test_copies_that_nobody_waits_for_rightly(way: int, announced: int, text: str) -> None:
    memory, k = Memory(1024), kernel(COPIES, f"load<{way}, 2>")
    box, errors = memory.map(0, (128, 8), (128,), (128, 8), 128), []
    for seed in range(4):  # a copy may be there before the block ends
        try:
            k(1, 32, box, np.zeros(1024, "u1"), 0, 0, 0, 1024, announced, smem=1024, seed=seed)
        except EmulatorError as e:
            errors.append(str(e))
    assert errors
    assert all(text in e and "hopper.cu:" in e for e in errors), errors


def test_a_box_behind_shared_memory_or_memory_or_without_a_map() -> None:
    memory, k, out = Memory(1024), kernel(COPIES, "load<0, 2>"), np.zeros(1024, "u1")
    box = memory.map(0, (128, 8), (128,), (128, 8), 128)
    with pytest.raises(EmulatorError, match=r"1024 bytes at shared address .* dynamic shared memory of 1008 bytes"):
        k(1, 32, box, out, 0, 0, 0, 1008, 1024, smem=1008)
    with pytest.raises(EmulatorError, match=r"a tensor map that cuTensorMapEncodeTiled did not write at .*hopper.cu"):
        k(1, 32, bytes(128), out, 0, 0, 0, 1024, 1024, smem=1024)
    far = memory.map(0, (128, 1 << 31), (1 << 12,), (128, 8), 128)
    with pytest.raises(EmulatorError, match=r"access outside of the arrays at .*hopper.cu"):
        k(1, 32, far, out, 0, 1 << 30, 0, 1024, 1024, smem=1024)
    three = memory.map(0, (128, 4, 2), (128, 512), (128, 4, 2), 128)
    with pytest.raises(EmulatorError, match="a box whose rank is not that of its map"):
        k(1, 32, three, out, 0, 0, 0, 1024, 1024, smem=1024)


def test_boxes_are_stored_inside_of_the_tensor_only() -> None:
    memory, k = Memory(12 * 256), kernel(COPIES, "store<0>")
    to = memory.bytes.view("u2").reshape(12, 128)
    pattern = np.arange(512, dtype="u2").reshape(8, 64)
    for x, y in ((0, 0), (8, 2), (72, 5), (-16, -3)):
        to[...] = 0xFFFF
        k(1, 32, memory.map(1, (96, 10), (256,), (64, 8), 128), x, y, smem=1024, shuffle_threads=True)
        wanted = np.full((40, 256), 0xFFFF, "u2")
        wanted[8 + y : 16 + y, 64 + x : 128 + x] = pattern
        wanted = wanted[8:20, 64:192]
        wanted[10:] = 0xFFFF
        wanted[:, 96:] = 0xFFFF
        np.testing.assert_array_equal(to, wanted)


def test_a_line_that_ends_inside_of_16_bytes_takes_what_lies_behind_along() -> None:
    memory = Memory(10 * 256)
    to = memory.bytes.view("u2").reshape(10, 128)
    to[...] = 0xFFFF
    kernel(COPIES, "store<0>")(1, 32, memory.map(1, (12, 10), (256,), (64, 8), 128), 0, 0, smem=1024)
    assert (to[:8, :16] == np.arange(512).reshape(8, 64)[:, :16]).all()
    assert (to[:, 16:] == 0xFFFF).all()


def test_stores_that_are_not_ordered_are_reported() -> None:
    memory = Memory(2048)
    box = memory.map(1, (64, 8), (128,), (64, 8), 128)
    with pytest.raises(EmulatorError, match=r"(?s)without fence.proxy.async at .*hopper.cu.*written by thread"):
        kernel(COPIES, "store<1>")(1, 32, box, 0, 0, smem=1024)
    failed = 0
    for seed in range(6):
        try:
            kernel(COPIES, "store<2>")(1, 32, box, 0, 0, smem=1024, seed=seed)
        except EmulatorError as e:
            failed += "a block ends while cp.async.bulk.tensor to global memory still uses" in str(e)
    assert failed
    with pytest.raises(EmulatorError, match="shared address that is not a multiple of 128"):
        kernel(COPIES, "store_wide")(1, 32, box, smem=2048)


def test_the_driver_refuses_what_it_cannot_describe() -> None:
    m = Memory(4096)
    assert m.map(1, (64, 8), (128,), (64, 8), 128)
    for extents, strides, box, swizzle in (
        ((0, 8), (128,), (64, 8), 128), ((64, 2**32 + 1), (128,), (64, 8), 128), ((64, 8), (120,), (64, 8), 128),
        ((64, 8), (2**40,), (64, 8), 128), ((64, 8), (128,), (64, 257), 128), ((64, 8), (128,), (0, 8), 128),
        ((64, 8), (128,), (65, 8), 0), ((64, 8), (128,), (64, 8), 64), ((8,) * 6, (16,) * 5, (8,) * 6, 0),
    ):  # fmt: skip
        assert not m.map(1, extents, strides, box, swizzle), (extents, strides, box, swizzle)
    good = (1, (64, 8), (128,), (64, 8), 128)
    assert not m.map(*good, shift=8)
    for changes in ({"steps": [1, 2]}, {"interleave": 1}, {"fill": 1}, {"kind": 10}, {"promotion": 4}):
        assert not m.map(*good, **changes), changes
    room = ctypes.create_string_buffer(m.map(*good), 192)
    place = (ctypes.addressof(room) + 63) & ~63
    ctypes.memmove(place, m.map(*good), 128)
    assert maps.replace(place, 4096) == 0
    assert maps.TensorMap.from_address(place).address == 4096
    assert maps.replace(place, 4104) == maps.replace(place + 16, 4096) == maps.INVALID_VALUE


def test_blocks_of_a_cluster_share_copies_and_numbers() -> None:
    memory, k = Memory(2048), kernel(COPIES, "share<0>")
    x = memory.bytes[:1024]
    x[...] = np.random.default_rng(0).integers(0, 256, 1024)
    box = memory.map(0, (128, 8), (128,), (128, 4), 0)
    assert (k.cluster, k.most_threads) == ((2, 1, 1), 64)
    for seed in range(4):
        out, sums = np.zeros(2048, "u1"), np.zeros(2, "f4")
        k(2, 64, box, out, sums, smem=1024, seed=seed, shuffle_threads=True)
        np.testing.assert_array_equal(out.reshape(2, 1024), np.stack([x, x]))
        assert sums.tolist() == [24, 14]
    with pytest.raises(EmulatorError, match=r"a grid of \(3, 1, 1\) is not whole clusters of \(2, 1, 1\)"):
        k(3, 64, box, out, sums, smem=1024)
    with pytest.raises(EmulatorError, match=r"a block of .* threads, at most 64 may be in one"):
        k(2, 96, box, out, sums, smem=1024)


@pytest.mark.parametrize(
    ("way", "text"),
    [(1, "an mbarrier that is not initialised"), (2, "another block's shared memory by an instruction for the own"),
     (3, "before fence.mbarrier_init of the thread that initialised it"),
     (4, "the shared memory of a block that has ended|more arrivals at an mbarrier")],
)  # fmt: skip
def test_what_blocks_of_a_cluster_may_not_do(way: int, text: str) -> None:
    memory, k = Memory(2048), kernel(COPIES, f"share<{way}>")
    box = memory.map(0, (128, 8), (128,), (128, 4), 0)
    with pytest.raises(EmulatorError, match=rf"({text}) at .*hopper.cu"):
        for seed in range(8):
            k(2, 64, box, np.zeros(2048, "u1"), np.zeros(2, "f4"), smem=1024, seed=seed, shuffle_threads=True)


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [("uninitialised", 0, "an mbarrier that is not initialised at .*hopper.cu"),
     ("too_many", 20, "more arrivals at an mbarrier than its phase has at .*hopper.cu"),
     ("too_many", 0, "mbarrier.init with a count that is not 1 to"),
     ("overwritten", 0, "an mbarrier whose 8 bytes were overwritten"),
     ("again", 0, "mbarrier.init of an mbarrier that is initialised already"),
     ("waits", 3, r"(?s)deadlock in block .*phase 0, 2 of 3 arrivals missing, 48 bytes missing .*hopper.cu"),
     ("registers<160>", 0, "deadlock in block|a number that is not"), ("registers<100>", 0, "not a multiple of 8 from 24 to 256"),
     ("half_a_group<24>", 0, r"(?s)deadlock in block .*setmaxnreg.dec: 64 of 128 threads")],
)  # fmt: skip
def test_barriers_and_registers_that_are_wrong(name: str, number: int, text: str) -> None:
    threads = 512 if name == "registers<160>" else 256 if "registers" in name else 128 if "half" in name else 32
    k = kernel(BARRIERS, name)
    if name == "registers<160>":  # 24 + 3 * 160 of 4 * 128: there is room
        k(1, threads, number)
        with pytest.raises(
            EmulatorError, match=r"setmaxnreg.inc to 176 registers: warpgroup \d has 128, and \d+ a thread are free"
        ):
            kernel(BARRIERS, "registers<176>")(1, threads, number)
        return
    with pytest.raises(EmulatorError, match=text):
        k(1, threads, number)


def test_phases_of_an_mbarrier() -> None:
    for seed in range(3):
        kernel(BARRIERS, "phases")(1, 64, 5, seed=seed, shuffle_threads=True)


def test_an_arrival_after_copies_waits_for_them() -> None:
    x, late = np.arange(256, dtype="f4").reshape(64, 4), 0
    for seed in range(4):
        y = np.zeros_like(x)
        kernel(BARRIERS, "copies<true>")(1, 64, x, y, smem=1024, seed=seed, shuffle_threads=True)
        np.testing.assert_array_equal(y, x[::-1])
        kernel(BARRIERS, "copies<false>")(1, 64, x, y, smem=1024, seed=seed, shuffle_threads=True)
        late += not np.array_equal(y, x[::-1])
    assert late == 4
