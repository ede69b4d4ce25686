// A 2:4 matrix as dense values in shared memory.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

// 16 neighbouring columns of a row of a 2:4 matrix: eight kept values, and their word of metadata.
template <class T> struct Kept {
    uint4 value[sizeof(T) / 2];
    u32 word;

    __device__ __forceinline__ void decode(T* to) const {
        const u32* w = reinterpret_cast<const u32*>(value);
        uint4* line = reinterpret_cast<uint4*>(to);
        if constexpr (sizeof(T) == 2) {
            u64 out[4];
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const u32 at = word >> (4 * g);
                out[g] = static_cast<u64>(w[g] & 0xffff) << (16 * (at & 3)) | static_cast<u64>(w[g] >> 16) << (16 * (at >> 2 & 3));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                line[i] = make_uint4(u32(out[2 * i]), u32(out[2 * i] >> 32), u32(out[2 * i + 1]), u32(out[2 * i + 1] >> 32));
        } else {
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const u32 i0 = word >> (4 * g) & 3, i1 = word >> (4 * g + 2) & 3;
                u32 out[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) out[i] = i == i0 ? w[2 * g] : i == i1 ? w[2 * g + 1] : 0;
                line[g] = make_uint4(out[0], out[1], out[2], out[3]);
            }
        }
    }
};

}  // namespace spformat
