// The records of a CSR with 16-bit values (include/spformat/csr_records.cuh) as a dense matrix, every element written once. sm_80
// and later. Launcher: expand_csr_records.py.
//
//   records, starts    `steps` records for 64 rows
//   x                  u16[M, ld], the result, zeros where nothing is stored; columns K .. ld-1 become zeros
//
// A block of threads writes a run of records. A warp puts 16 rows of one of them together, and writes four rows of the run.
// Aligned: rows of x start on 16 bytes.
#include "spformat/csr_records.cuh"
#include "spformat/record_run.cuh"

using namespace spformat;

constexpr int WARPS = csr_records::PARTS * RecordRun::EACH;  // of a block

template <bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
expand_csr_records(const u8* __restrict__ records, const u32* __restrict__ starts, i64 M, u32 steps, u16* __restrict__ x, i64 ld) {
    extern __shared__ __align__(16) unsigned char shared[];  // images of WARPS parts, in their place then of rows; records
    static_assert(WARPS * csr_records::IMAGE <= csr_records::ROWS * IMAGE_PITCH, "rows have the larger images");
    unsigned char* const staged = shared + csr_records::ROWS * IMAGE_PITCH;
    const int warp = threadIdx.x / 32, part = warp % csr_records::PARTS;
    const u32 own = warp / csr_records::PARTS;
    unsigned char* const image = shared + warp * csr_records::IMAGE;
    const RecordRun run(starts, steps);
    run.copy(records, staged);
    csr_records::clear_image(image);
    cp_async_wait<0>();
    __syncthreads();
    u32 a[4][4];
    if (own < run.count) csr_records::take_part(a, staged + run.offset(own), part, image);
    __syncthreads();
    if (own < run.count) put_fragments(shared, a, part * 16, own * RecordRun::COLUMNS);
    __syncthreads();
    run.write_rows<Aligned, csr_records::ROWS, WARPS>(x, shared, M, ld);
}
