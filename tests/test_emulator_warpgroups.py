"""The emulator's products of a warpgroup (wgmma) against numpy, and what it reports."""

from __future__ import annotations

from typing import Any

import emulator
import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatorError
from test_emulator_sm90 import kernel, swizzled

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")

PRODUCTS = """
#include "spformat/tma.cuh"
#include "spformat/wgmma.cuh"
using namespace spformat;
struct Image { u32 leading, stride, swizzle; };
template <class T, int N, int Mode, int TransA, int TransB, int Way>
__global__ void product(const uint4* __restrict__ bytes, int count, int b_at, Image ia, Image ib, const u32* __restrict__ a_regs,
                        const u32* __restrict__ meta, const float* __restrict__ before, int accumulate, float* __restrict__ d) {
    extern __shared__ __align__(1024) uint4 room[];
    for (int i = threadIdx.x; i < count; i += blockDim.x) room[i] = bytes[i];
    tma::fence_shared();
    __syncthreads();
    if (Way == 1 && threadIdx.x == 77) return;
    float acc[N / 2];
    for (int i = 0; i < N / 2; ++i) acc[i] = before[threadIdx.x * (N / 2) + i];
    const u64 a = wgmma::descriptor(shared_address(room), ia.leading, ia.stride, wgmma::Swizzle(ia.swizzle));
    const u64 b = wgmma::descriptor(shared_address(room) + b_at + (Way == 2 ? 128 : 0), ib.leading, ib.stride, wgmma::Swizzle(ib.swizzle));
    u32 r[4];
    for (int i = 0; i < 4; ++i) r[i] = a_regs[threadIdx.x * 4 + i];
    if (Way != 3) wgmma::fence();
    const u64 mine = Way == 4 && threadIdx.x == 3 ? wgmma::advanced(b, 2) : b;
    if constexpr (Mode == 0) wgmma::ss<T, N, TransA, TransB>(acc, a, mine, accumulate);
    if constexpr (Mode == 1) wgmma::rs<T, N, TransB>(acc, r, mine, accumulate);
    if constexpr (Mode == 2) wgmma::sp_rs<T, N, 0, TransB>(acc, r, mine, meta[threadIdx.x], accumulate);
    if constexpr (Mode == 3) wgmma::sp_ss<T, N, 1, TransB>(acc, a, mine, meta[threadIdx.x], accumulate);
    wgmma::commit();
    if (Way == 5) acc[1] = 3;
    if (Way == 6)
        for (int i = 0; i < N / 2; ++i) d[threadIdx.x * (N / 2) + i] = acc[i];
    if (Way == 8) room[threadIdx.x] = uint4{};
    if (Way != 7) wgmma::wait<0>();
    if (Way != 6)
        for (int i = 0; i < N / 2; ++i) d[threadIdx.x * (N / 2) + i] = acc[i];
}
"""


TYPES = {"f16": ("__half", np.dtype("f2")), "bf16": ("__nv_bfloat16", np.dtype(ml_dtypes.bfloat16))}
SWIZZLE = {16: 0, 128: 1, 64: 2, 32: 3}


def image(x: np.ndarray[Any, Any], trans: int, span: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """[rows, k] in shared memory as descriptors say it, and the descriptor's offsets: leading, stride, swizzle."""
    rows, depth = x.shape
    r, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    if not trans:
        stride, leading = (8 * span, 0) if span > 16 else (256, 128)
        if span == 16:  # core matrices of 8 rows x 16 bytes, one behind the other along k
            stride, leading = 128 * (depth // 8), 128
        at = r // 8 * stride + r % 8 * span + (k * 2 if span > 16 else k // 8 * leading + k % 8 * 2)
    else:
        group = span // 2  # values of a line
        stride, leading = 8 * span, depth // 8 * 8 * span
        at = r // group * leading + k // 8 * stride + k % 8 * span + r % group * 2
        if span == 16:
            stride, leading = leading, stride
    size = -(-(int(at.max()) + 2) // 1024) * 1024
    flat = np.zeros(size // 2, x.dtype)
    flat[at // 2] = x
    return swizzled(flat.view("u1"), span if span > 16 else 0), np.array([leading, stride, SWIZZLE[span]], "u4")


def registers_of(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """u32[128, 4]: the registers of A[64, 16] of 16-bit values."""
    t = np.arange(128)
    row, out = t // 32 * 16 + t % 32 // 4, np.zeros((128, 4), "u4")
    words = np.ascontiguousarray(x).view("u2").astype("u4")
    for r in range(4):
        at, k = row + 8 * (r % 2), 2 * (t % 4) + 8 * (r // 2)
        out[:, r] = words[at, k] | words[at, k + 1] << 16
    return out


def sums_of(d: np.ndarray[Any, Any], n: int) -> np.ndarray[Any, Any]:
    """float32[64, n] from the registers [128, n/2]; and back where d is a matrix."""
    t, i = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    row, col = t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2
    if d.shape == (64, n):
        return np.ascontiguousarray(d[row, col])
    out = np.zeros((64, n), "f4")
    out[row, col] = d
    return out


class Case:
    """A product of integers, its operands as the kernel takes them."""

    def __init__(
        self,
        mode: int,
        kind: str,
        n: int,
        trans: tuple[int, int],
        spans: tuple[int, int],
        accumulate: int,
        seed: int = 0,
    ) -> None:
        rng, (self.c_type, dtype) = np.random.default_rng(seed), TYPES[kind]
        self.name, self.n, sparse = f"{mode}, {trans[0]}, {trans[1]}", n, mode > 1
        kept, b = (
            rng.integers(-3, 4, (64, 16)).astype(dtype),
            rng.integers(-3, 4, (n, 32 if sparse else 16)).astype(dtype),
        )
        a, self.meta = kept.astype("f4"), np.zeros(128, "u4")
        if sparse:
            pairs = np.array([(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])[rng.integers(0, 6, (64, 8))]
            a = np.zeros((64, 32), "f4")
            np.put_along_axis(a.reshape(64, 8, 4), pairs, kept.astype("f4").reshape(64, 8, 2), 2)
            nibbles = (pairs[..., 0] + 4 * pairs[..., 1]).astype("u4")
            words = (nibbles.reshape(64, 2, 4) << np.arange(0, 16, 4, dtype="u4")).sum(2).astype("u4")
            selector = mode - 2
            for t in range(128):  # lanes 2 selector and one more of a quad, words of rows r and r + 8
                row, q = t // 32 * 16 + t % 32 // 4, t % 4 - 2 * selector
                self.meta[t] = words[row, q] | words[row + 8, q] << 16 if q in (0, 1) else 0xFFFFFFFF
        before = rng.integers(-9, 10, (64, n)).astype("f4")
        left, self.a = image(kept, trans[0], spans[0])
        right, self.b = image(b, trans[1], spans[1])
        self.bytes, self.b_at, self.regs = np.concatenate([left, right]), left.size, registers_of(kept)
        self.wanted = a @ b.astype("f4").T + (before if accumulate else 0)
        self.before, self.accumulate = sums_of(before, n), accumulate

    def run(self, way: int = 0, **options: Any) -> np.ndarray[Any, Any]:
        k, d = (
            kernel(PRODUCTS, f"product<{self.c_type}, {self.n}, {self.name}, {way}>"),
            np.zeros((128, self.n // 2), "f4"),
        )
        k(1, 128, self.bytes, self.bytes.size // 16, self.b_at, self.a.tobytes(), self.b.tobytes(), self.regs, self.meta,
          self.before, self.accumulate, d, smem=self.bytes.size, shuffle_threads=True, **options)  # fmt: skip
        return sums_of(d, self.n)


@pytest.mark.parametrize(
    ("mode", "kind", "n", "trans", "spans", "accumulate"),
    [(0, "bf16", 64, (0, 0), (128, 64), 1), (0, "f16", 256, (1, 1), (128, 128), 0), (0, "f16", 32, (0, 1), (32, 64), 1),
     (0, "bf16", 16, (1, 0), (64, 32), 1), (0, "f16", 8, (0, 0), (16, 16), 1), (0, "bf16", 16, (1, 1), (16, 16), 0),
     (1, "f16", 96, (0, 1), (128, 32), 1), (2, "bf16", 128, (0, 1), (128, 128), 1), (2, "f16", 64, (0, 0), (128, 64), 0),
     (3, "bf16", 64, (0, 0), (64, 128), 1), (3, "f16", 192, (0, 1), (32, 128), 0)],
)  # fmt: skip
def test_products_of_a_warpgroup(
    mode: int, kind: str, n: int, trans: tuple[int, int], spans: tuple[int, int], accumulate: int
) -> None:
    """Both operands in shared memory in every swizzle and direction, A in registers, 2:4 A with both selectors."""
    case = Case(mode, kind, n, trans, spans, accumulate)
    for seed in range(2):
        np.testing.assert_array_equal(case.run(seed=seed), case.wanted)


PLAIN = (0, "bf16", 16, (0, 0), (128, 128), 1)


@pytest.mark.parametrize(
    ("way", "text"),
    [(1, r"(?s)deadlock in block .*wgmma.wait_group: 127 of 128 threads of the warpgroup have issued the product"),
     (2, "start is not in the first line of the swizzle pattern"), (3, "without wgmma.fence before the first one"),
     (4, "with different descriptors, predicates or selectors"),
     (5, "accumulators of a warpgroup product in flight were changed"),
     (7, "a thread ends while products of its warpgroup are in flight")],
)  # fmt: skip
def test_products_that_are_wrong_are_reported(way: int, text: str) -> None:
    with pytest.raises(EmulatorError, match=text):
        Case(*PLAIN).run(way)


def test_sums_are_not_there_before_the_wait() -> None:
    assert np.isnan(Case(*PLAIN).run(6)).all()


def test_operands_are_read_until_the_wait() -> None:
    """A kernel that writes over an operand of a product in flight gets wrong sums, sooner or later."""
    case = Case(*PLAIN)
    wrong = [not np.array_equal(case.run(8, seed=seed), case.wanted) for seed in range(6)]
    assert any(wrong)


def test_places_of_kept_values_that_ptx_does_not_define() -> None:
    """With zeros, as a box is filled up with, they spoil the row, which a kernel may ignore; else they are an error."""
    case = Case(2, "bf16", 64, (0, 0), (128, 128), 1)
    case.meta[4 * 5] &= ~np.uint32(0xF << 20)  # lane 20 of warp 0: row 13, columns 4 to 7, kept values 2 and 3
    case.regs[4 * 5 + 1, 1] = 0x3F803F80
    with pytest.raises(EmulatorError, match=r"places 0, 0 \(row 13, columns 4 to 7\): they must increase at .*wgmma"):
        case.run()
    case.regs[4 * 5 + 1, 1] = 0
    got = case.run()
    assert np.isnan(got[13]).all()
    np.testing.assert_array_equal(np.delete(got, 13, 0), np.delete(case.wanted, 13, 0))
