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
#include "spformat/fragment_rows.cuh"
#include "spformat/ldmatrix.cuh"

using namespace spformat;

constexpr int WARPS = 8, LONGEST = (RECORD_VALUES + 2048) / 16;  // warps of a block; pieces of a record without zeros

template <bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
expand_bitmask_records(const u8* __restrict__ records, const u32* __restrict__ starts, i64 M, i64 steps, i64 count, int room,
                       u16* __restrict__ x, i64 ld) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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

    store_fragments<Aligned>(a, x, ld, number / steps * 16, number % steps * 64, M);
}
