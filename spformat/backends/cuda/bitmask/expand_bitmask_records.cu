// The records of a Bitmask with 16-bit values (include/spformat/bitmask_records.cuh) as a dense matrix, every element written
// once. sm_80 and later. Launcher: expand_bitmask_records.py.
//
//   records, starts    `steps` records a row tile of 16 rows, `count` in all
//   x                  u16[M, ld], the result, zeros where no bit is set; columns K .. ld-1 become zeros
//   room               bytes of the longest record, rounded up to 128
//
// One warp a record: the record comes to shared memory, each lane takes a value for each of its set bits, and the four lanes of
// a row exchange words until each has whole units of 16 bytes. Aligned: rows of x start on 16 bytes.
#include "spformat/bitmask_fragments.cuh"
#include "spformat/cp_async.cuh"
#include "spformat/ldmatrix.cuh"

using namespace spformat;

constexpr int WARPS = 8, LONGEST = (RECORD_VALUES + 2048) / 16;  // warps of a block; pieces of a record without zeros

// Of four lanes in a row, lane t has word t of four units; then it has the four words of unit t.
__device__ __forceinline__ void gather_unit(u32 (&w)[4], int t) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(~0u, t & 1 ? w[i] : w[i + 1], 1);
        if (t & 1) w[i] = other;
        else w[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 other = __shfl_xor_sync(~0u, t & 2 ? w[i] : w[i + 2], 2);
        if (t & 2) w[i] = other;
        else w[i + 2] = other;
    }
}

template <bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
expand_bitmask_records(const u8* __restrict__ records, const u32* __restrict__ starts, i64 M, i64 steps, i64 count, int room,
                       u16* __restrict__ x, i64 ld) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const i64 number = static_cast<i64>(blockIdx.x) * WARPS + warp;
    if (number >= count) return;
    const u32 start = starts[number];
    const int pieces = static_cast<int>(starts[number + 1] - start);
    const u8* from = records + static_cast<u64>(start) * 16;
    const u32 record = shared_address(shared) + warp * room;
#pragma unroll
    for (int i = 0; i < LONGEST; i += 32)
        if (i + lane < pieces) cp_async_16(record + 16 * (i + lane), from + 16 * (i + lane));
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();

    u32 bits, groups[4], a[4][4];
    load_head(record, lane, bits, groups);
    take_record(a, record, bits, groups);

    const i64 row0 = number / steps * 16 + g, column0 = number % steps * 64;
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 w[4] = {a[2 * half][side], a[2 * half][side + 2], a[2 * half + 1][side], a[2 * half + 1][side + 2]};
            gather_unit(w, t);
            const i64 row = row0 + 8 * side, column = column0 + 32 * half + 8 * t;
            if (row >= M || column >= ld) continue;
            u16* to = x + row * ld + column;
            if constexpr (Aligned) {
                *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (column + e < ld) to[e] = static_cast<u16>(w[e / 2] >> (16 * (e % 2)));
            }
        }
}
