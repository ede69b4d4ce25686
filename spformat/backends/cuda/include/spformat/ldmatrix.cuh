// ldmatrix and the shared-memory swizzles it is read through, sm_75 and later.
//
// ldmatrix reads 8x8 tiles of 16-bit items: lane 8j+i gives the address of row i (16 bytes) of tile j, and lane 4g+t
// receives items 2t, 2t+1 of row g of every tile (with .trans: items g of rows 2t, 2t+1).
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Byte offset of 16-byte chunk `chunk` of line `row` in a tile whose lines are LineBytes long: chunks are permuted inside
// a line so that the eight rows of an 8x8 tile fall into eight different bank groups. LineBytes is a power of two >= 16.
template <int LineBytes> __device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) {
    static_assert(LineBytes >= 16 && (LineBytes & (LineBytes - 1)) == 0, "a line is a power of two of bytes, 16 or more");
    constexpr u32 chunks = LineBytes / 16 < 8 ? LineBytes / 16 : 8;  // chunks that take part in the exchange
    constexpr u32 rows = 8 / chunks;                                // lines that share one 128-byte row of banks
    return row * LineBytes + ((chunk ^ ((row / rows) % chunks)) * 16);
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}

// The way back (sm_90): lane 8j+i gives the address of row i of tile j; tile j is r[j], in the layout that ldmatrix delivers.
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

}  // namespace spformat
