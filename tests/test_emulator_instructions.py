"""The emulator's instructions of sm_80: asynchronous copies, matrices of a warp, named barriers, against numpy."""

from __future__ import annotations

from typing import Any

import emulator
import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorError, Kernel
from emulator.ptx import translated

from spformat.backends.cuda.runtime import jit

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")

SOURCE = """
#include "spformat/cp_async.cuh"
#include "spformat/epilogue.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"
using namespace spformat;

// Thread t copies 16 bytes as a group, and 4 as another; `pending` groups may still be in flight when it looks.
template <int Pending> __global__ void copies(const u32* from, u32* to, int valid, int at) {
    __shared__ __align__(16) u32 room[5 * 32];
    for (int i = 0; i < 5; ++i) room[5 * threadIdx.x + i] = 7;
    __syncthreads();
    const u32 shared = shared_address(room);
    cp_async_16(shared + 16 * threadIdx.x, from + 4 * threadIdx.x + at, valid);
    cp_async_commit();
    cp_async_4(shared + 512 + 4 * threadIdx.x, from + threadIdx.x, 4);
    if (Pending < 2) cp_async_commit();
    cp_async_wait<Pending < 2 ? Pending : 0>();
    for (int i = 0; i < 4; ++i) to[5 * threadIdx.x + i] = room[4 * threadIdx.x + i];
    to[5 * threadIdx.x + 4] = room[128 + threadIdx.x];
}
__global__ void predicated(const u32* from, u32* to) {
    __shared__ __align__(16) u32 room[4 * 32];
    for (int i = 0; i < 4; ++i) room[4 * threadIdx.x + i] = 7;
    __syncthreads();
    cp_async_16_if(threadIdx.x % 2, shared_address(room + 4 * threadIdx.x), from + 4 * threadIdx.x, 12);
    asm volatile("cp.async.wait_all;");
    for (int i = 0; i < 4; ++i) to[4 * threadIdx.x + i] = room[4 * threadIdx.x + i];
}
// Tiles from shared memory to registers and back elsewhere.
template <int Count, bool Trans> __global__ void tiles(const u16* from, u32* words, u16* back, int lanes, int shift) {
    __shared__ __align__(16) u16 room[4 * 64];
    for (int i = threadIdx.x; i < 256; i += 32) room[i] = from[i];
    __syncwarp();
    if (threadIdx.x >= lanes) return;
    const u32 row = shared_address(room) + 16 * (threadIdx.x % (8 * Count)) + shift;
    u32 w[4] = {};
    if constexpr (Count == 4 && !Trans) ldmatrix_x4(w, row);
    if constexpr (Count == 4 && Trans) ldmatrix_x4_trans(w, row);
    u32 two[2];
    if constexpr (Count == 2 && !Trans) ldmatrix_x2(two, row), w[0] = two[0], w[1] = two[1];
    if constexpr (Count == 2 && Trans) ldmatrix_x2_trans(two, row), w[0] = two[0], w[1] = two[1];
    if constexpr (Count == 1) asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(w[0]) : "r"(row));
    for (int i = 0; i < 4; ++i) words[4 * threadIdx.x + i] = w[i];
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) room[i] = 0;
    __syncwarp();
    if constexpr (Count == 4 && !Trans) stmatrix_x4(row, w);
    if constexpr (Count == 4 && Trans) stmatrix_x4_trans(row, w);
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) back[i] = room[i];
}
__global__ void turned(const u32* from, u32* to) { to[threadIdx.x] = transpose_8x8(from[threadIdx.x]); }

// a u32[32, 4], b u32[32, 4], d f32[32, 4] as the lanes hold them.
template <int What, class T = __half> __global__ void products(const u32* a, const u32* b, float* d, const u32* e, int lanes) {
    if (threadIdx.x >= lanes) return;
    const int l = threadIdx.x;
    u32 x[4];
    float y[4];
    for (int i = 0; i < 4; ++i) x[i] = a[4 * l + i], y[i] = d[4 * l + i];
    const u32* w = b + 4 * l;
    if constexpr (What == 16) mma_m16n8k16<T>(y, x, w[0], w[1]);
    if constexpr (What == 8) mma_m16n8k8_tf32(y, x, w[0], w[1]);
    if constexpr (What == 4) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(y[0]), "+f"(y[1]), "+f"(y[2]), "+f"(y[3]) : "r"(x[0]), "r"(x[1]), "r"(w[0]));
    }
    if constexpr (What == 32) mma_sp_m16n8k32<T, 0>(y, x, w[0], w[1], w[2], w[3], e[l]);
    if constexpr (What == 33) mma_sp_m16n8k32<T, 1>(y, x, w[0], w[1], w[2], w[3], e[l]);
    for (int i = 0; i < 4; ++i) d[4 * l + i] = y[i];
}

// Warp 0 produces for warp 1 and goes on; warps 2 and 3 meet at a barrier of their own, twice.
__global__ void named(int* y, int count) {
    __shared__ int room[128];
    const int t = threadIdx.x, warp = t / 32;
    room[t] = 0;
    __syncthreads();
    room[t] = t;
    if (warp == 0) asm volatile("bar.arrive %0, %1;" ::"r"(1), "r"(count) : "memory");
    if (warp == 1) asm volatile("bar.sync %0, %1;" ::"r"(1), "n"(64) : "memory");
    for (int i = 0; warp >= 2 && i < 2; ++i) asm volatile("barrier.sync 2, 64;" ::: "memory");
    y[t] = warp == 1 ? room[t - 32] : warp >= 2 ? room[t ^ 32] : -1;
}
__global__ void alone(int* y) {
    if (threadIdx.x < 32) asm volatile("bar.sync 3, 64;" ::: "memory");
    y[threadIdx.x] = 1;
}
"""
SHUFFLED: dict[str, Any] = {"shuffle_threads": True, "seed": 5}


def test_all_inline_ptx_of_kernels_is_emulated() -> None:
    assert not {p.name for p in jit.HERE.rglob("*.cu*") if "emu::unsupported" in translated(p.read_text())}
    assert 'emu::unsupported("inline PTX that is not emulated: brkpt; ' in translated(
        'asm("brkpt; mov.u32 %0, 1;" : "=r"(x));'
    )
    assert "emu::interpreted" in translated('asm("setp.ne.b32 p, " P2 ", 0;" :: "r"(x));')  # read when it runs


def kernel(instance: str) -> Kernel:
    return Kernel("instructions.cu", instance, [jit.INCLUDE], SOURCE)


# ------------------------------------------------------------------ copies


def test_copies_arrive_when_their_group_is_waited_for() -> None:
    x = np.arange(1, 129, dtype="u4")
    whole, single = x.reshape(32, 4), x[:32, None]
    for pending, first, second in ((0, True, True), (1, True, False), (2, True, False)):
        y = np.zeros((32, 5), "u4")
        kernel(f"copies<{pending}>")(1, 32, x, y, 16, 0, **SHUFFLED)
        np.testing.assert_array_equal(y[:, :4] == whole, first)
        np.testing.assert_array_equal(y[:, 4:] == single, second)
        assert second or (y[:, 4] == 0xFFFFFFFF).all()  # in flight: neither the new word nor the old one
    y[:] = 0
    kernel("copies<0>")(1, 32, x, y, 6, 0)
    np.testing.assert_array_equal(y[:, :4], whole & np.array([0xFFFFFFFF, 0xFFFF, 0, 0], "u4"))
    kernel("copies<0>")(1, 32, x, y, 0, 1 << 30)  # of nothing: the address is not read
    assert not y[:, :4].any()
    y[:] = 0
    kernel("predicated")(1, 32, x, y.reshape(-1)[:128])
    done = y.reshape(-1)[:128].reshape(32, 4)
    np.testing.assert_array_equal(done[1::2], whole[1::2] * np.array([1, 1, 1, 0]))
    assert (done[::2] == 7).all()


def test_copies_from_wrong_addresses_are_reported() -> None:
    x, y = np.zeros(128, "u4"), np.zeros((32, 5), "u4")
    with pytest.raises(
        EmulatorError,
        match=r"cp.async from a global address that is not a multiple of its size at cp_async\.cuh:\d+ < inst",
    ):
        kernel("copies<0>")(1, 32, x, y, 16, 1)
    with pytest.raises(
        EmulatorError, match=r"(?s)access outside of the arrays at cp_async.cuh:.* behind the end of argument 0"
    ):
        kernel("copies<0>")(1, 32, x, y, 16, 4)
    with pytest.raises(EmulatorError, match="more bytes than it writes"):
        kernel("copies<0>")(1, 32, x, y, 17, 0)


# ------------------------------------------------------------------ matrices


@pytest.mark.parametrize(("count", "trans"), [(4, False), (4, True), (2, False), (2, True), (1, False)])
def test_tiles_of_8x8(count: int, trans: bool) -> None:
    x = np.random.default_rng(count).integers(0, 1 << 16, (4, 8, 8)).astype("u2")
    words, back = np.zeros((32, 4), "u4"), np.zeros_like(x)
    kernel(f"tiles<{count}, {str(trans).lower()}>")(1, 32, x, words, back, 32, 0, **SHUFFLED)
    wanted = np.ascontiguousarray(x.transpose(0, 2, 1) if trans else x).reshape(4, 64).view("u4").T.copy()
    wanted[:, count:] = 0
    np.testing.assert_array_equal(words, wanted)
    if count == 4:
        np.testing.assert_array_equal(back, x)


def test_a_tile_is_turned_in_registers() -> None:
    x, y = np.random.default_rng(0).integers(0, 1 << 16, (8, 8)).astype("u2"), np.zeros(32, "u4")
    kernel("turned")(1, 32, x, y, **SHUFFLED)
    np.testing.assert_array_equal(y.view("u2").reshape(8, 8), x.T)


def fragments(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A[16, k] and B[k, 8] as the words of the lanes, u32[32, 4] each, from the tables of the PTX ISA."""
    k, size = A.shape[1], A.itemsize
    items = 4 // size
    lane, r, e = np.ogrid[:32, : k * 16 * size // 128, :items]
    a = A[lane // 4 + 8 * (r % 2), items * (lane % 4) + 4 * items * (r // 2) + e]
    lane, r, e = np.ogrid[:32, : B.shape[0] * 8 * size // 128, :items]
    b = B[items * (lane % 4) + 4 * items * r + e, lane // 4]
    out = np.zeros((2, 32, 4), "u4")
    for to, x in zip(out, (a, b), strict=True):
        words = np.ascontiguousarray(x).reshape(32, -1).view("u4")
        to[:, : words.shape[1]] = words
    return out[0], out[1]


def sums(D: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """D[16, 8] as the lanes hold it."""
    lane, r = np.ogrid[:32, :4]
    return np.ascontiguousarray(D[lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2], np.float32)


@pytest.mark.parametrize(
    ("instance", "k", "dtype"),
    [
        ("16, __half", 16, np.float16),
        ("16, __nv_bfloat16", 16, ml_dtypes.bfloat16),
        ("8", 8, np.float32),
        ("4", 8, ml_dtypes.bfloat16),
    ],
)
def test_dense_products(instance: str, k: int, dtype: Any) -> None:
    rng = np.random.default_rng(k)
    A, B, C = (rng.integers(-9, 10, s).astype(dtype) for s in ((16, k), (k, 8), (16, 8)))
    a, b = fragments(A, B)
    d = sums(C.astype(np.float32))
    kernel(f"products<{instance}>")(1, 32, a, b, d, None, 32, **SHUFFLED)
    np.testing.assert_array_equal(d, sums(A.astype(float) @ B.astype(float) + C.astype(float)))


def test_tf32_drops_the_low_bits_and_sums_are_rounded_towards_zero() -> None:
    A, B = np.zeros((16, 8), np.float32), np.eye(8, dtype=np.float32)
    A[:] = np.array([1 + 2**-10, 1 + 2**-11, -1 - 2**-10 - 2**-13, 2**-137, 2**-136, 0, 1, 3], np.float32)
    a, b = fragments(A, B)
    d = np.zeros((32, 4), np.float32)
    kernel("products<8>")(1, 32, a, b, d, None, 32)
    np.testing.assert_array_equal(d, sums(np.tile([1 + 2**-10, 1, -1 - 2**-10, 0, 2**-136, 0, 1, 3], (16, 1))))
    one, tiny = np.ones((16, 8), np.float32), np.full((8, 8), 2**-28, np.float32)
    a, b = fragments(one, tiny)
    for sign, near in (
        (1, 1),
        (-1, -1 + 2**-24),
    ):  # 1 + 2^-25 is cut to 1; -1 + 2^-25 is cut to the number nearer to zero
        d = np.full((32, 4), sign, np.float32)
        kernel("products<8>")(1, 32, a, b, d, None, 32)
        assert (d == np.float32(near)).all()


@pytest.mark.parametrize("selector", [0, 1])
@pytest.mark.parametrize(("name", "dtype"), [("__half", np.float16), ("__nv_bfloat16", ml_dtypes.bfloat16)])
def test_sparse_products(selector: int, name: str, dtype: Any) -> None:
    rng = np.random.default_rng(selector)
    places = np.sort(rng.random((16, 8, 4)).argsort(axis=2)[:, :, :2], axis=2)  # of the kept values, in groups of four
    kept, B, C = (rng.integers(-9, 10, s).astype(dtype) for s in ((16, 16), (32, 8), (16, 8)))
    A = np.zeros((16, 8, 4))
    np.put_along_axis(A, places, kept.astype(float).reshape(16, 8, 2), axis=2)
    nibbles = places[:, :, 0] | places[:, :, 1] << 2
    halves = (nibbles.reshape(16, 2, 4) << 4 * np.arange(4)).sum(axis=2)  # [row, half of the columns]
    e = rng.integers(0, 1 << 32, (8, 4), dtype=np.uint64).astype("u4")  # the other lanes' words are not read
    e[:, 2 * selector : 2 * selector + 2] = halves[:8] | halves[8:] << 16
    a, b = fragments(kept, B)
    d = sums(C.astype(np.float32))
    k = kernel(f"products<{32 + selector}, {name}>")
    k(1, 32, a, b, d, e, 32, **SHUFFLED)
    np.testing.assert_array_equal(d, sums(A.reshape(16, 32) @ B.astype(float) + C.astype(float)))
    e[3, 2 * selector + 1] |= 0xF00  # row 3, columns 24 to 27
    with pytest.raises(
        EmulatorError, match=r"places 3, 3 \(row 3, columns 24 to 27\): they must increase at mma\.cuh:\d+"
    ):
        k(1, 32, a, b, d, e, 32)


def test_instructions_of_a_warp_need_the_warp() -> None:
    words, d = np.zeros((32, 4), "u4"), np.zeros((32, 4), "f4")
    with pytest.raises(EmulatorError, match=r"mma of the whole warp, but lane 31 has exited at mma\.cuh"):
        kernel("products<16>")(1, 32, words, words, d, None, 31, **SHUFFLED)
    with pytest.raises(EmulatorError, match="mma of the whole warp, but lane 16 does not exist"):
        kernel("products<16>")(1, 16, words, words, d, None, 32)
    x, back = np.zeros(256, "u2"), np.zeros(256, "u2")
    with pytest.raises(
        EmulatorError, match=r"(?s)shared address that is not aligned at ldmatrix\.cuh.*16 bytes on a multiple of 16"
    ):
        kernel("tiles<2, false>")(1, 32, x, words, back, 32, 8)
    with pytest.raises(
        EmulatorError, match=r"(?s)outside of the shared memory of the block at ldmatrix.cuh.*byte 512 of an array"
    ):
        kernel("tiles<4, false>")(1, 32, x, words, back, 32, 16)


# ------------------------------------------------------------------ named barriers


def test_named_barriers() -> None:
    t = np.arange(128)
    for seed in range(4):
        y = np.zeros(128, "i4")
        kernel("named")(1, 128, y, 64, shuffle_threads=True, seed=seed)
        np.testing.assert_array_equal(y, np.select([t < 32, t < 64], [-1, t - 32], t ^ 32))
    with pytest.raises(EmulatorError, match="threads meet at a named barrier with different counts"):
        kernel("named")(1, 128, y, 96)
    with pytest.raises(EmulatorError, match="that is not whole warps"):
        kernel("named")(1, 128, y, 65)
    with pytest.raises(
        EmulatorError, match=r"(?s)deadlock.*32 of 64 threads have exited.*waits at a named barrier, 3 instructions\.cu"
    ):
        kernel("alone")(1, 64, y)


def test_launch_shapes_and_text_of_macros_keep_their_lines() -> None:
    text = (
        "template <class T, int N>\n__global__ void __cluster_dims__(N, 1, 1)  // a cluster\n    __launch_bounds__(N * 32, (N > 2 ? 1 : 2))\n"
        '    twice(T* x) {}\n#define TWO(t, p) \\\n  asm volatile("a " t \\\n  ", " p : ACC : "r"(x), "n"(T))\n#define ACC "+f"(d[0])\n'
    )
    done = translated(text)
    assert done.count("\n") == text.count("\n")
    assert (
        "twice_launch_shape { static constexpr emu::LaunchShape of() { return emu::LaunchShape() __cluster_dims__(N, 1, 1)"
        in done
    )
    assert 'emu::interpreted("a " t    ", " p, ACC, emu::in(x), emu::in(T))' in done
    assert "#define ACC emu::inout(d[0])" in done
