// The records of a Bitmask with 16-bit values (include/spformat/bitmask_records.cuh) as a dense matrix, every element written
// once. sm_80 and later. Launcher: expand_bitmask_records.py.
//
//   records, starts    `steps` records for 16 rows
//   x                  u16[M, ld], the result, zeros where no bit is set; columns K .. ld-1 become zeros
//
// A block of threads writes a run of records. In a warp, each lane takes a value for each of its set bits in one of them; then
// the warp writes four rows of the run. Aligned: rows of x start on 16 bytes.
#include "spformat/bitmask_fragments.cuh"
#include "spformat/record_run.cuh"

using namespace spformat;

constexpr int WARPS = RecordRun::EACH, ROWS = 16;  // warps of a block, rows of a record

template <bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
expand_bitmask_records(const u8* __restrict__ records, const u32* __restrict__ starts, i64 M, u32 steps, u16* __restrict__ x,
                       i64 ld) {
    extern __shared__ __align__(16) unsigned char shared[];  // an image of ROWS rows, then records
    unsigned char* const staged = shared + ROWS * IMAGE_PITCH;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const RecordRun run(starts, steps);
    run.copy(records, staged);
    cp_async_wait<0>();
    __syncthreads();
    if (warp < run.count) {
        const u32 record = shared_address(staged) + run.offset(warp);
        u32 bits, groups[4], a[4][4];
        load_head(record, lane, bits, groups);
        take_record(a, record, bits, groups);
        put_fragments(shared, a, 0, warp * RecordRun::COLUMNS);
    }
    __syncthreads();
    run.write_rows<Aligned, ROWS, WARPS>(x, shared, M, ld);
}
