// C[M,N] = A[M,K] @ B[K,N], A with 16-bit values as one bit per element and the nonzeros, on Hopper's wgmma.
// Operands, grid and block: record_products.cuh.
//
//   records, starts    A in the order of the registers (bitmask_records.cuh)
//
// A becomes dense on its way to the registers: a record is in the order in which a warp of wgmma holds 16 rows x 64 columns, so
// each lane reads a value for each of its set bits, and no expanded tile exists.
#include "spformat/bitmask_fragments.cuh"
#include "spformat/record_products.cuh"

using namespace spformat;
using namespace spformat::expanding;

struct BitmaskRecords : PlainRecords {
    static constexpr int ROWS = 16, IMAGE = 0;

    __device__ __forceinline__ BitmaskRecords(unsigned char*) {}
    __device__ __forceinline__ void take(u32 (&a)[4][4], const unsigned char* at, u32 note, int) const {
        const u32 record = shared_address(at);
        u32 bits = 0, groups[4] = {};
        if (note) load_head(record, threadIdx.x % 32, bits, groups);
        take_record(a, record, bits, groups);
    }
    template <class T>
    static __device__ __forceinline__ float stored_only(const u8* records, const u32* starts, int steps, int row, const T* b,
                                                        i64 b_k) {
        return stored_sum<T>(records, starts, steps, row, b, b_k);
    }
};

template <class T, class Out, int WG, int BN, int STAGES, int Parts, int Resident, bool Ahead, bool BCol, bool CCol>
__global__ void __cluster_dims__(Parts, 1, 1) __launch_bounds__(threads<WG, BN>, Resident)
spmm_bitmask_expanding_sm90a(const __grid_constant__ RecordExtents s, const u8* __restrict__ records,
                             const u32* __restrict__ starts, const __grid_constant__ TensorMap b_map, const T* __restrict__ B,
                             i64 b_k, i64 b_n, const __grid_constant__ TensorMap c_map, int by_copies, Out* C, int N, i64 ldc,
                             int first_tile, const CopyTo copied_b) {
    multiply_records<BitmaskRecords, T, Out, WG, BN, STAGES, Parts, Ahead, BCol, CCol>(s, records, starts, b_map, B, b_k, b_n,
                                                                                       c_map, by_copies, C, N, ldc, first_tile, copied_b);
}
