// C[M,N] = A[M,K] @ B[K,N], A in SR-BCRS with 16-bit values, in slots (include/spformat/mma_fragments.cuh). CUDA cores. sm_80 and
// later. Launcher: spmm_sr_bcrs.py.
//
//   first, pieces    A in slots
//   B  T: B[k][n] at k*b_row + n*b_col          C  Out: C[i][n] at i*c_row + n*c_col
//
// A warp sums eight rows x 32*COLS columns of C. It walks over the steps of its panel, four at a time, brings the slots of its
// rows to shared memory, and where it has 32 or more, each loads its row of B (lane l: columns l, l+32, ..) and adds it, weighted,
// to the rows. The headers of four steps are loaded while the slots of those before come. Slots hold zeros beside values, but a value of B that is not
// finite meets none: sums that are not finite are computed again over the values that are not zero.
// Grid: x = units of eight rows, WARPS/SPLIT a block; y walks tiles of 32*COLS columns. SPLIT warps share a unit, chunk by chunk,
// and their sums are added in the order of the warps: the same bits every run.
#include "spformat/mma_fragments.cuh"

using namespace spformat;

// The value that has these bits.
template <class T> __device__ __forceinline__ float value_of(u16 bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return to_float(value);
}

template <class T, class Out, int COLS, int WARPS, int SPLIT>
__global__ void __launch_bounds__(32 * WARPS)
    slot_products(const u32* __restrict__ first, const u8* __restrict__ pieces, i64 M, i64 K, const T* __restrict__ B,
                       Out* __restrict__ C, i64 N, i64 b_row, i64 b_col, i64 c_row, i64 c_col) {
    static_assert(WARPS % SPLIT == 0, "a block holds whole units of SPLIT warps");
    static_assert(sizeof(T) == 2, "slots have 16-bit values");
    constexpr int ROWS = 8, BATCH = 32, UNROLL = 4, ROOM = 3 * BATCH + UNROLL;  // fewer than BATCH, what two loads bring, and the end
    struct alignas(16) Weights { float row[ROWS]; };
    __shared__ Weights weights[WARPS][ROOM];
    __shared__ i64 b_offsets[WARPS][ROOM];
    __shared__ float partial[SPLIT > 1 ? WARPS : 1][32 * COLS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % SPLIT;
    const i64 unit = static_cast<i64>(blockIdx.x) * (WARPS / SPLIT) + warp / SPLIT, row0 = unit * ROWS;
    const int eight = unit % (PANEL_ROWS / ROWS);
    const Slots slots{first, pieces, cdiv<i64>(K, DEPTH)};
    const u32* mine = first + unit / (PANEL_ROWS / ROWS) * slots.Q;
    const i64 chunks = row0 < M ? (slots.Q - part + SPLIT - 1) / SPLIT : 0;  // of this warp

    struct Header {
        u32 word, at;  // of the unit's rows, and the entry of the chunk
        i64 k;         // the column of this lane's place
    };
    const u32 bit = 1u << (lane % 16);
    auto slot_of = [&](const Header& h) {
        if (!(h.word & bit)) return make_uint4(0, 0, 0, 0);
        const u32 piece = (h.word >> 16) + __popc(h.word & (bit - 1));
        return __ldg(reinterpret_cast<const uint4*>(slots.record(h.at)) + piece);
    };

    for (i64 n0 = static_cast<i64>(blockIdx.y) * 32 * COLS; n0 < N; n0 += static_cast<i64>(gridDim.y) * 32 * COLS) {
        const T* from[COLS];
#pragma unroll
        for (int c = 0; c < COLS; ++c) from[c] = B + (n0 + lane + 32 * c < N ? (n0 + lane + 32 * c) * b_col : 0);
        float acc[ROWS][COLS] = {};
        int count = 0;  // of slots in shared memory
        auto put = [&](const Header& h, const uint4& slot) {
            const u32 all = __ballot_sync(~0u, h.word & bit);
            const int to = count + __popc(all & ((1u << lane) - 1));
            if (h.word & bit) {
                const u32 pairs[4] = {slot.x, slot.y, slot.z, slot.w};
                Weights w;
#pragma unroll
                for (int r = 0; r < ROWS; ++r) w.row[r] = value_of<T>(static_cast<u16>(pairs[r / 2] >> (16 * (r % 2))));
                weights[warp][to] = w, b_offsets[warp][to] = h.k * b_row;
            }
            count += __popc(all);
        };
        auto add = [&] {
            if (lane < UNROLL) b_offsets[warp][count + lane] = -1;
            __syncwarp();
            for (int j = 0; j < count; j += UNROLL) {
                float b[UNROLL][COLS];
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const i64 offset = b_offsets[warp][j + u];
#pragma unroll
                    for (int c = 0; c < COLS; ++c) b[u][c] = offset < 0 ? 0.0f : to_float(from[c][offset]);
                }
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    if (j + u >= count) break;
                    const Weights w = weights[warp][j + u];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int c = 0; c < COLS; ++c) acc[r][c] += w.row[r] * b[u][c];
                }
            }
            __syncwarp();
            count = 0;
        };
        for (i64 i0 = 0; i0 < chunks; i0 += 32) {
            // Lane i: the entry of chunk i0 + i of this warp, and the steps through it. The steps of all 32 are one sequence.
            const i64 chunk = part + (i0 + lane) * SPLIT;
            const u32 at = i0 + lane < chunks ? mine[chunk] : 0;
            int ends = steps_of(at);
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int before = __shfl_up_sync(~0u, ends, d);
                if (lane >= d) ends += before;
            }
            const int steps = __shfl_sync(~0u, ends, 31);
            auto look = [&](int step) {  // two steps, 16 lanes each
                const int one = __popc(__ballot_sync(~0u, ends <= step)), two = __popc(__ballot_sync(~0u, ends <= step + 1));
                const int which = lane < 16 ? one : two;  // of the chunks
                step += lane / 16;
                Header h{0, __shfl_sync(~0u, at, which), (part + (i0 + which) * SPLIT) * DEPTH};
                const int end = __shfl_sync(~0u, ends, which);
                if (step < steps) {
                    const u8* from = slots.record(h.at) + (step - end + steps_of(h.at)) * HEADER;
                    h.word = __ldg(reinterpret_cast<const u32*>(from + 16) + word_of(eight)), h.k += __ldg(from + lane % 16);
                }
                return h;
            };
            Header one = look(0), two = look(2);
            for (int step = 0; step < steps; step += 4) {
                const Header h0 = one, h1 = two;
                const uint4 s0 = slot_of(h0), s1 = slot_of(h1);
                one = look(step + 4), two = look(step + 6);
                put(h0, s0), put(h1, s1);
                if (count >= BATCH) add();
            }
        }
        if (count) add();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if constexpr (SPLIT > 1) {
                __syncthreads();
#pragma unroll
                for (int c = 0; c < COLS; ++c) partial[warp][lane + 32 * c] = acc[r][c];
                __syncthreads();
                if (part == 0)
#pragma unroll
                    for (int s = 1; s < SPLIT; ++s)
#pragma unroll
                        for (int c = 0; c < COLS; ++c) acc[r][c] += partial[warp + s][lane + 32 * c];
            }
            const i64 row = row0 + r;
            if (part == 0 && row < M)
#pragma unroll
                for (int c = 0; c < COLS; ++c)
                    if (n0 + lane + 32 * c < N) {
                        float sum = acc[r][c];
                        if (!isfinite(sum)) sum = stored_only(slots, row, from[c], b_row);
                        C[row * c_row + (n0 + lane + 32 * c) * c_col] = narrow<Out>(sum);
                    }
        }
    }
}
