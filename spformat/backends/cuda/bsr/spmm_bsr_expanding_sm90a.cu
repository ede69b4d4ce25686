// C[M,N] = A[M,K] @ B[K,N], A in BSR or DBSR with 16-bit values, on Hopper's wgmma. Blocks of Height x Width: 16 or 32 high; 16, 32
// or 64 wide. Grid, block and the other operands: record_products.cuh.
//
//   records   T[blocks, Height, Width]   the blocks of A as they are stored, on a 16-byte boundary
//   starts    u32[filled * ceil(K/64) + 1]   of the blocks that a block row has in 64 columns: which of the 64/Width are there, a
//             bit each from bit 28 up, and how many blocks of A come before them. Lines are the block rows that have blocks, then
//             the others
//
// A becomes dense on its way to the registers: ldmatrix reads a block where there is one, and zeros elsewhere. Blocks that are not
// stored are multiplied as zeros, so that this pays where a third of the blocks or more is there.
#include "spformat/record_products.cuh"

using namespace spformat;
using namespace spformat::expanding;

template <class T, int Height, int Width> struct BlockRecords {
    static constexpr int ROWS = Height, STEPS = 1, IMAGE = 16;  // the image is zeros
    static constexpr bool NOTES = true;
    static constexpr u32 BLOCK = ROWS * Width * sizeof(T);
    u32 zeros;

    __device__ __forceinline__ BlockRecords(unsigned char* image) : zeros(shared_address(image)) {
        if (threadIdx.x % 32 == 0) *reinterpret_cast<uint4*>(image) = uint4{};
        __syncwarp();
    }
    static __device__ __forceinline__ u64 offset(u32 start) { return static_cast<u64>(start & 0x0FFFFFFF) * BLOCK; }
    static __device__ __forceinline__ u32 bytes(u32 start, u32) { return __popc(start >> 28) * BLOCK; }
    static __device__ __forceinline__ u32 note(u32 start) { return start >> 28; }

    __device__ __forceinline__ void take(u32 (&a)[4][4], const unsigned char* record, u32 there, int) const {
        // Tile lane/8 of ldmatrix is rows 0-7, then 8-15, of columns 0-7, then of columns 8-15.
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % (Height / 16) * 16 + lane % 16;
        const u32 from = shared_address(record) + row * (2 * Width) + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 bit = 1u << i * 16 / Width, block = __popc(there & (bit - 1));
            ldmatrix_x4(a[i], there & bit ? from + block * BLOCK + i * 16 % Width * 2 : zeros);
        }
    }
    template <class>
    static __device__ __forceinline__ float stored_only(const u8* records, const u32* starts, int steps, int row, const T* b, i64 b_k) {
        float sum = 0;
        starts += static_cast<i64>(row / ROWS) * steps;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const T* values = reinterpret_cast<const T*>(records + offset(starts[step])) + row % ROWS * Width;
            for (u32 left = starts[step] >> 28; left; left &= left - 1, values += ROWS * Width) {
                const T* const of = b + (static_cast<i64>(step) * DEPTH + (__ffs(left) - 1) * Width) * b_k;
#pragma unroll 1
                for (int k = 0; k < Width; ++k)
                    if (to_float(values[k]) != 0) sum += to_float(values[k]) * to_float(of[k * b_k]);
            }
        }
        return sum;
    }
};

template <class T, class Out, int Height, int Width, int WG, int BN, int STAGES, int Parts, int Resident, bool Ahead, bool BCol, bool CCol>
__global__ void __cluster_dims__(Parts, 1, 1) __launch_bounds__(threads<WG, BN>, Resident)
spmm_bsr_expanding_sm90a(const __grid_constant__ RecordExtents s, const u8* __restrict__ records, const u32* __restrict__ starts,
                         const __grid_constant__ TensorMap b_map, const T* __restrict__ B, i64 b_k, i64 b_n,
                         const __grid_constant__ TensorMap c_map, int by_copies, Out* C, int N, i64 ldc,
                         int first_tile, const CopyTo copied_b) {
    multiply_records<BlockRecords<T, Height, Width>, T, Out, WG, BN, STAGES, Parts, Ahead, BCol, CCol>(
            s, records, starts, b_map, B, b_k, b_n, c_map, by_copies, C, N, ldc, first_tile, copied_b);
}
