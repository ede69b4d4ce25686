// 2:4 weights in the order of the tensor cores' registers, written once per matrix. sm_80 and later.
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
