// 2:4 weights in the order of the tensor cores' registers, written once per matrix, and from it a dense matrix. sm_80 and later.
//
//   data     u32[Mp, Kp/4]                   pairs of values, row-major; Mp = pad(M, 32), Kp = pad(K, 64)
//   meta     u32x4[Mp/16 * Kp/64, 8]         metadata order "fragment"
//   weights  u32x4[Mp/16 * Kp/64, 72]        one record of 1152 bytes per 16 rows T and 64 columns b, b fastest
//
// Words of a record, with lane 4g+t of mma.sp m16n8k32 and of a warp of wgmma.sp m64nNk32:
//   128s + 16g + 4t + r  =  the pair of values  data[16T + g + 8*(r%2)][32b + 16s + 2t + 8*(r/2) .. +1]: register r of A
//   256 + 4g + t         =  word(16T+g, 4b+t) | word(16T+g+8, 4b+t) << 16: metadata, used with selector s
// so that a warp reads an operand with one contiguous 512-byte load, and a row of tiles is one contiguous stream.
#include "spformat/dtypes.cuh"

using namespace spformat;

// One thread per 16 bytes of the result.
extern "C" __global__ void two_four_records(const u32* __restrict__ data, const uint4* __restrict__ meta,
                                            uint4* __restrict__ weights, i64 records, int slabs) {
    const i64 id = i64(blockIdx.x) * blockDim.x + threadIdx.x, record = id / 72;
    if (record >= records) return;
    const int in = int(id % 72), s = in / 32, g = in % 32 / 4, t = in % 4;
    if (in >= 64) {
        weights[id] = meta[record * 8 + in - 64];
        return;
    }
    const i64 line = i64(slabs) * 16;  // words in a row of data
    const u32* from = data + (record / slabs * 16 + g) * line + record % slabs * 16 + s * 8 + t;
    weights[id] = make_uint4(from[0], from[8 * line], from[4], from[8 * line + 4]);
}

// Four columns of a group from the pair of its kept values; nibble: where they are.
__device__ __forceinline__ uint2 spread(u32 pair, u32 nibble) {
    const u64 four = u64(pair & 0xFFFF) << (16 * (nibble & 3)) | u64(pair >> 16) << (16 * (nibble >> 2 & 3));
    return make_uint2(u32(four), u32(four >> 32));
}

// x[M, ld] = the matrix as a dense one, ld <= Kp. One warp per record; tasks: those of rows below M, slabs: records of 16 rows.
// Lane 4g+t has group 8s + 4i + t of row g + 8h in register 2i + h of half s; the word of that group is with lane 4g + 2s + i.
// Aligned: four columns of x are one store. The nibbles are legal and no value is -0: what validate() promises.
template <bool Aligned>
__global__ void __launch_bounds__(256)
two_four_expand(const u32* __restrict__ weights, u16* __restrict__ x, i64 M, i64 ld, i64 tasks, int slabs) {
    const i64 task = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (task >= tasks) return;  // whole warps
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32* record = weights + task * 288;
    const u32 word = record[256 + lane];
    uint4 kept[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) kept[s] = reinterpret_cast<const uint4*>(record)[32 * s + lane];
    const i64 row0 = task / slabs * 16 + g, column0 = task % slabs * 64 + 4 * t;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        const u32 registers[4] = {kept[s].x, kept[s].y, kept[s].z, kept[s].w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 both = __shfl_sync(~0u, word, 4 * g + 2 * s + i);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint2 four = spread(registers[2 * i + h], both >> (16 * h + 4 * t));
                const i64 row = row0 + 8 * h, column = column0 + 32 * s + 16 * i;
                if (row >= M) continue;
                u16* const to = x + row * ld + column;
                if (Aligned) {
                    if (column < ld) __stcs(reinterpret_cast<uint2*>(to), four);
                } else {
                    const u32 w[2] = {four.x, four.y};
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (column + e < ld) to[e] = u16(w[e / 2] >> (16 * (e % 2)));
                }
            }
        }
    }
}
