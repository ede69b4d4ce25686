// C[M,N] = A[M,K] @ B[K,N], A in SR-BCRS(t, g) with 16-bit values, on Hopper's wgmma. Operands, grid and block: record_products.cuh.
//
//   records, starts    A in slots: `pieces` and `first` of mma_fragments.cuh. A record has 32 rows and two steps along K.
//
// A becomes dense on its way to the registers: a slot is eight rows of a column, which is what a lane of ldmatrix.trans reads. So
// each warp lists where the slots of its 16 rows lie, column by column, and a lane whose column has none reads zeros.
#include "spformat/mma_fragments.cuh"
#include "spformat/record_products.cuh"

using namespace spformat;
using namespace spformat::expanding;

struct SlotRecords {
    static constexpr int ROWS = PANEL_ROWS, STEPS = spformat::DEPTH / expanding::DEPTH;
    static constexpr int LIST = 2 * spformat::DEPTH * 2, IMAGE = LIST + 16;  // two times eight rows; zeros behind them
    static constexpr bool NOTES = true;
    unsigned char* image;  // u16[2][16][8]: of eight rows and column 16i + j, at [..][j][i], the piece of the record; 0: no slot
    u32 zeros;

    __device__ __forceinline__ SlotRecords(unsigned char* image) : image(image), zeros(shared_address(image) + LIST) {
        if (threadIdx.x % 32 == 0) *reinterpret_cast<uint4*>(image + LIST) = uint4{};
    }
    static __device__ __forceinline__ u64 offset(u32 start) { return bytes_before(start); }
    static __device__ __forceinline__ u32 bytes(u32 start, u32 next) { return pieces_between(start, next) * 16; }
    static __device__ __forceinline__ u32 note(u32 start) { return steps_of(start); }

    // Lane 16e + j: the slot of the e-th eight rows at place j of each header.
    __device__ __forceinline__ void list(const unsigned char* record, u32 headers) const {
        const u32 lane = threadIdx.x % 32, place = lane % 16, eight = lane / 16, half = threadIdx.x / 32 % 2;
        __syncwarp();  // no lane still reads the list of the record before
        *reinterpret_cast<uint4*>(image + lane * 16) = uint4{};
        __syncwarp();
#pragma unroll 2
        for (u32 i = 0; i < headers; ++i, record += HEADER) {
            const u32 column = record[place], word = reinterpret_cast<const u32*>(record + 16)[word_of(2 * half + eight)];
            const u32 slot = (word >> 16) + __popc(word & ((1u << place) - 1));
            if (word >> place & 1)
                *reinterpret_cast<u16*>(image + eight * (LIST / 2) + column % 16 * 16 + column / 16 * 2) = static_cast<u16>(slot);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void take(u32 (&a)[4][4], const unsigned char* record, u32 note, int step) const {
        if (step == 0) list(record, note);
        // Tile lane/8 of ldmatrix is rows 0-7, then 8-15, of columns 0-7, then of columns 8-15.
        const u32 lane = threadIdx.x % 32, eight = lane / 8 % 2, column = lane % 8 + lane / 16 * 8, from = shared_address(record);
        const uint2 four = *reinterpret_cast<const uint2*>(image + eight * (LIST / 2) + column * 16 + step * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 slot = (i < 2 ? four.x : four.y) >> i % 2 * 16 & 0xFFFF;
            ldmatrix_x4_trans(a[i], slot ? from + slot * 16 : zeros);
        }
    }
    template <class T>
    static __device__ __forceinline__ float stored_only(const u8* records, const u32* starts, int steps, int row, const T* b,
                                                        i64 b_k) {
        return stored_sum<T>(Slots{starts, records, (steps + STEPS - 1) / STEPS}, row, b, b_k);
    }
};

template <class T, class Out, int WG, int BN, int STAGES, int Parts, int Resident, bool Ahead, bool BCol, bool CCol>
__global__ void __cluster_dims__(Parts, 1, 1) __launch_bounds__(threads<WG, BN>, Resident)
spmm_sr_bcrs_expanding_sm90a(const __grid_constant__ RecordExtents s, const u8* __restrict__ records,
                             const u32* __restrict__ starts, const __grid_constant__ TensorMap b_map, const T* __restrict__ B,
                             i64 b_k, i64 b_n, const __grid_constant__ TensorMap c_map, int by_copies, Out* C, int N, i64 ldc,
                             int first_tile, const CopyTo copied_b) {
    multiply_records<SlotRecords, T, Out, WG, BN, STAGES, Parts, Ahead, BCol, CCol>(s, records, starts, b_map, B, b_k, b_n, c_map,
                                                                                    by_copies, C, N, ldc, first_tile, copied_b);
}
