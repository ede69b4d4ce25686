// SR-BCRS in slots (include/spformat/mma_fragments.cuh) as a dense matrix, every element written once. sm_80 and later. Launcher:
// expand_sr_bcrs_slots.py.
//
//   first, pieces    A in slots, Q records for 32 rows
//   x                u16[M, ld], the result, zeros where nothing is stored; columns K .. ld-1 become zeros
//
// A block writes the 32 rows of two records, side by side, which come to shared memory by one copy. It puts their slots where their
// columns belong, zeros elsewhere; ldmatrix turns eight columns of eight rows at a time, from which rows are put together. Aligned:
// rows of x start on 16 bytes.
#include "spformat/cp_async.cuh"
#include "spformat/dense_rows.cuh"
#include "spformat/mma_fragments.cuh"

using namespace spformat;

constexpr int THREADS = 256, WARPS = THREADS / 32, EIGHTS = PANEL_ROWS / 8, EACH = IMAGE_COLUMNS / DEPTH;
constexpr int IMAGE = PANEL_ROWS * IMAGE_PITCH;  // bytes of the rows, which take the place of the slots

template <bool Aligned>
__global__ void __launch_bounds__(THREADS)
expand_sr_bcrs_slots(const u32* __restrict__ first, const u8* __restrict__ pieces, i64 M, u32 Q, u16* __restrict__ x, i64 ld) {
    static_assert(EIGHTS * IMAGE_COLUMNS * 16 <= IMAGE, "slots fit");
    __shared__ __align__(128) unsigned char image[IMAGE], records[EACH * MOST_BYTES];
    uint4* const slots = reinterpret_cast<uint4*>(image);  // by eight rows, then by column
    const u32 pairs = (Q + EACH - 1) / EACH, panel = blockIdx.x / pairs, chunk = (blockIdx.x - panel * pairs) * EACH;
    const u32 count = min(EACH, Q - chunk), half = threadIdx.x / (THREADS / EACH), thread = threadIdx.x % (THREADS / EACH);
    const u32* own = first + static_cast<u64>(panel) * Q + chunk;
    const u32 begin = own[0], all = pieces_between(begin, own[count]), at = half < count ? own[half] : 0;
    const u8* from = pieces + bytes_before(begin);
    for (u32 i = threadIdx.x; i < all; i += THREADS) cp_async_16(shared_address(records) + 16 * i, from + 16 * static_cast<u64>(i));
    cp_async_commit();
#pragma unroll
    for (int i = threadIdx.x; i < EIGHTS * IMAGE_COLUMNS; i += THREADS) slots[i] = uint4{};
    cp_async_wait<0>();
    __syncthreads();
    const unsigned char* record = records + (half < count ? pieces_between(begin, at) * 16 : 0);
    const int places = steps_of(at) * 64;  // a step has four times 16
    for (int i = thread; i < places; i += THREADS / EACH) {
        const unsigned char* header = record + i / 64 * HEADER;
        const int eight = i / 16 % 4, place = i % 16;
        const u32 word = *reinterpret_cast<const u32*>(header + 16 + 4 * word_of(eight));
        if (!(word >> place & 1)) continue;
        const u32 piece = (word >> 16) + __popc(word & ((1u << place) - 1));
        slots[eight * IMAGE_COLUMNS + half * DEPTH + header[place]] = reinterpret_cast<const uint4*>(record)[piece];
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = warp / 4 * 16, columns = warp % 4 * 64;
    const u32 turned = shared_address(slots) + ((rows / 8 + lane / 8 % 2) * IMAGE_COLUMNS + columns + lane / 16 * 8 + lane % 8) * 16;
    u32 a[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ldmatrix_x4_trans(a[i], turned + i * 256);
    __syncthreads();
    put_fragments(image, a, rows, columns);
    __syncthreads();
    const i64 row0 = static_cast<i64>(panel) * PANEL_ROWS, column0 = static_cast<i64>(chunk) * DEPTH, left = ld - column0;
    const int wide = static_cast<int>(left < IMAGE_COLUMNS ? left : IMAGE_COLUMNS);
#pragma unroll
    for (int r = warp; r < PANEL_ROWS; r += WARPS)
        if (row0 + r < M) write_row<Aligned>(x + (row0 + r) * ld + column0, image + r * IMAGE_PITCH, wide);
}
