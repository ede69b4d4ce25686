// Warp-wide tensor-core products, sm_80 and later: D[16,8] += A @ B with float32 sums.
//
// Lane 4g+t (g = lane/4, t = lane%4). Register r of D holds D[g + 8*(r/2)][2t + r%2].
//   dense m16n8k16:  a[r] = A[g + 8*(r%2)][2t + 8*(r/2) ..+1];   b[r] = B[2t + 8r ..+1][g]
//   sparse m16n8k32: a[r] as above over the 16 kept columns;     b[r] = B[2t + 8r ..+1][g], r = 0..3
// "..+1": two neighbours, the lower index in the low half of the word.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

template <class T> __device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(same_type<T, __half>::value || same_type<T, __nv_bfloat16>::value, "T must be __half or __nv_bfloat16");
    if constexpr (same_type<T, __half>::value)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x as the sum of two TF32 values, bit patterns as mma takes them. The first is rounded (magnitudes up at a tie), so that
// the dropped product low*low stays below 2^-22; exponents at the top are truncated, so that no finite x becomes infinite
// and infinities and quiet NaNs pass unchanged.
__device__ __forceinline__ void split_tf32(float x, u32& high, u32& low) {
    const u32 bits = __float_as_uint(x);
    high = ((bits & 0x7f000000u) == 0x7f000000u ? bits : bits + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

// TF32 m16n8k8:  a[r] = A[g + 8*(r%2)][t + 4*(r/2)];   b[r] = B[t + 4r][g]
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2:4 A. The metadata word e of lanes t = 0, 1 (Selector 0) or t = 2, 3 (Selector 1) is used: lane 4g+t with
// s = t - 2*Selector gives columns 16s .. 16s+15 of rows g (low half) and g+8 (high half); nibble j of a half is group j.
template <class T, int Selector>
__device__ __forceinline__ void mma_sp_m16n8k32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 b2, u32 b3, u32 e) {
    static_assert(same_type<T, __half>::value || same_type<T, __nv_bfloat16>::value, "T must be __half or __nv_bfloat16");
    if constexpr (same_type<T, __half>::value)
        asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(b2), "r"(b3), "r"(e), "n"(Selector));
    else
        asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(b2), "r"(b3), "r"(e), "n"(Selector));
}

}  // namespace spformat
