// SR-BCRS in slots (include/spformat/mma_fragments.cuh) as a dense matrix, every element written once. sm_80 and later. Launcher:
// expand_sr_bcrs_slots.py.
//
//   first, pieces    A in slots
//   x                u16[M, ld], the result, zeros where nothing is stored; columns K .. ld-1 become zeros
//
// A block writes the 32 rows x DEPTH columns of one record through an image in shared memory. Aligned: rows of x start on 16
// bytes.
#include "spformat/mma_fragments.cuh"

using namespace spformat;

constexpr int THREADS = 128, PITCH = DEPTH + 8;

template <bool Aligned>
__global__ void __launch_bounds__(THREADS)
expand_sr_bcrs_slots(const u32* __restrict__ first, const u8* __restrict__ pieces, i64 M, i64 Q, u16* __restrict__ x, i64 ld) {
    __shared__ __align__(16) u16 image[PANEL_ROWS * PITCH];
    const i64 row0 = blockIdx.x / Q * PANEL_ROWS, column0 = blockIdx.x % Q * DEPTH;
    const u32 at = first[blockIdx.x];
    const u8* record = pieces + bytes_before(at);
    for (int i = threadIdx.x; i < PANEL_ROWS * PITCH / 8; i += THREADS) reinterpret_cast<uint4*>(image)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
#pragma unroll 2
    for (int i = threadIdx.x; i < steps_of(at) * 64; i += THREADS) {  // a step has four times 16 places
        const u8* header = record + i / 64 * HEADER;
        const int eight = i / 16 % 4, place = i % 16;
        const u32 word = __ldg(reinterpret_cast<const u32*>(header + 16) + word_of(eight));
        if (!(word >> place & 1)) continue;
        const u32 piece = (word >> 16) + __popc(word & ((1u << place) - 1));
        const uint4 slot = __ldg(reinterpret_cast<const uint4*>(record) + piece);
        u16* to = image + eight * 8 * PITCH + __ldg(header + place);
        const u32 pairs[4] = {slot.x, slot.y, slot.z, slot.w};
#pragma unroll
        for (int r = 0; r < 8; ++r) to[r * PITCH] = static_cast<u16>(pairs[r / 2] >> (16 * (r % 2)));
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < PANEL_ROWS * (DEPTH / 8); i += THREADS) {
        const int r = i / (DEPTH / 8), c = i % (DEPTH / 8) * 8;
        if (row0 + r >= M || column0 + c >= ld) continue;
        u16* to = x + (row0 + r) * ld + column0 + c;
        const u16* from = image + r * PITCH + c;
        if constexpr (Aligned) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
            for (int e = 0; e < 8; ++e)
                if (column0 + c + e < ld) to[e] = from[e];
        }
    }
}
