// C[M,N] = A[M,K] @ B[K,N], A in CSR with 16-bit values, on Hopper's wgmma. Operands, grid and block: record_products.cuh.
//
//   records, starts    the items of A with their places in the registers (csr_records.cuh)
//
// A becomes dense on its way to the registers: a warp places the items of 16 rows x 64 columns in 2 KB of shared memory that is
// zero elsewhere, and reads that as fragments.
#include "spformat/csr_records.cuh"
#include "spformat/record_products.cuh"

using namespace spformat;
using namespace spformat::expanding;

struct CSRRecords : PlainRecords {
    static constexpr int ROWS = csr_records::ROWS, IMAGE = csr_records::IMAGE;
    unsigned char* image;

    __device__ __forceinline__ CSRRecords(unsigned char* image) : image(image) { csr_records::clear_image(image); }
    __device__ __forceinline__ void take(u32 (&a)[4][4], const unsigned char* record, u32 note, int) {
        if (note) return csr_records::take_part(a, record, threadIdx.x / 32 % csr_records::PARTS, image);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i][0] = a[i][1] = a[i][2] = a[i][3] = 0;
    }
    template <class T>
    static __device__ __forceinline__ float stored_only(const u8* records, const u32* starts, int steps, int row, const T* b,
                                                        i64 b_k) {
        return csr_records::stored_sum<T>(records, starts, steps, row, b, b_k);
    }
};

template <class T, class Out, int WG, int BN, int STAGES, int Parts, int Resident, bool Ahead, bool BCol, bool CCol>
__global__ void __cluster_dims__(Parts, 1, 1) __launch_bounds__(threads<WG, BN>, Resident)
spmm_csr_expanding_sm90a(const __grid_constant__ RecordExtents s, const u8* __restrict__ records, const u32* __restrict__ starts,
                         const __grid_constant__ TensorMap b_map, const T* __restrict__ B, i64 b_k, i64 b_n,
                         const __grid_constant__ TensorMap c_map, int by_copies, Out* C, int N, i64 ldc,
                         int first_tile, const CopyTo copied_b) {
    multiply_records<CSRRecords, T, Out, WG, BN, STAGES, Parts, Ahead, BCol, CCol>(s, records, starts, b_map, B, b_k, b_n, c_map,
                                                                                   by_copies, C, N, ldc, first_tile, copied_b);
}
