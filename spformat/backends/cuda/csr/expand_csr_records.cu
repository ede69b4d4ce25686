// The records of a CSR with 16-bit values (include/spformat/csr_records.cuh) as a dense matrix, every element written once. sm_80
// and later. Launcher: expand_csr_records.py.
//
//   records, starts    `steps` records for 64 rows
//   parts              of all records, 16 rows each
//   x                  u16[M, ld], the result, zeros where nothing is stored; columns K .. ld-1 become zeros
//
// One warp a part. Aligned: rows of x start on 16 bytes.
#include "spformat/csr_records.cuh"
#include "spformat/fragment_rows.cuh"

using namespace spformat;

constexpr int WARPS = 8;  // of a block

template <bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
expand_csr_records(const u8* __restrict__ records, const u32* __restrict__ starts, i64 M, i64 steps, i64 parts,
                   u16* __restrict__ x, i64 ld) {
    __shared__ __align__(16) unsigned char images[WARPS][csr_records::IMAGE];
    const int warp = threadIdx.x / 32;
    const i64 number = static_cast<i64>(blockIdx.x) * WARPS + warp, record = number / csr_records::PARTS;
    if (number >= parts) return;
    const int part = number % csr_records::PARTS;
    u32 a[4][4];
    csr_records::clear_image(images[warp]);
    csr_records::take_part(a, records + static_cast<u64>(starts[record]) * 16, part, images[warp]);
    store_fragments<Aligned>(a, x, ld, record / steps * csr_records::ROWS + part * 16, record % steps * csr_records::COLUMNS, M);
}
