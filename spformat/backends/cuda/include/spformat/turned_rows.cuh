// Rows of a column-major B for a kernel that gathers rows: its own blocks write them, a panel of columns before the tiles that
// need it, and no launch goes before. 16-bit values, sm_80 and later.
//
// Work is cut into items of COLUMNS columns x DEPTH rows, panel after panel. Warps take items from a counter, and a warp that
// needs a panel takes items until all of that panel are taken, then waits for those that other warps took. Whoever took an
// item waits for nothing before it is written: the kernel ends even if its blocks run one at a time.
#pragma once
#include "spformat/cp_async.cuh"
#include "spformat/epilogue.cuh"
#include "spformat/two_four_stream.cuh"

namespace spformat {

struct Turning {
    const u16* from;  // element (k, n) of B at n * ld + k; 16-byte aligned, as are its lines
    i64 ld;
    u16* to;          // element (k, n) at k * pitch + n; any contents. Up to 7 columns behind N are written, too
    i64 pitch;        // at least N rounded up to a multiple of 8
    u32* words;       // [2 + panels], 0 before the launch and after it: items taken, warps that need none any more, items of
                      // each panel that are written
    int K, N;         // K: a multiple of 8
    int panel;        // columns, a multiple of COLUMNS
};

class TurnedRows {
public:
    static constexpr int COLUMNS = 32, DEPTH = 64;

    // All lanes of a warp call these functions together. Wide: all loads of an item travel at one time, in 32 registers; else
    // half of them do.
    __device__ __forceinline__ explicit TurnedRows(const Turning& t) : t_(t) {}

    // Until the columns of a panel are there for the loads that follow.
    template <bool Wide> __device__ __forceinline__ void wait(int panel) {
        if (panel == ready_ || panel * of_panel() >= items()) return;  // the latter: all of its columns are past N
        const u32 count = min(of_panel(), items() - panel * of_panel());
        const volatile u32* const written = t_.words + 2 + panel;
        while (__shfl_sync(~0u, *written, 0) < count)
            if (!step<Wide>()) __nanosleep(100);
        fence();
        __syncwarp();
        ready_ = panel;
    }
    // Write one item; false where all are taken.
    template <bool Wide> __device__ __forceinline__ bool step() {
        if (done_) return false;
        u32 item = 0;
        if (threadIdx.x % 32 == 0) item = atomicAdd(t_.words, 1u);
        item = __shfl_sync(~0u, item, 0);
        done_ = item >= static_cast<u32>(items());
        if (!done_) write<Wide>(static_cast<int>(item));
        return !done_;
    }
    // This warp calls nothing more; `warps` of the grid say so. The last one clears the words for the next launch.
    __device__ __forceinline__ void leave(u32 warps) {
        __syncwarp();
        if (threadIdx.x % 32) return;
        fence();
        if (atomicInc(t_.words + 1, warps - 1) != warps - 1) return;
        t_.words[0] = 0;
        for (int p = 0; p < cdiv(items(), of_panel()); ++p) t_.words[2 + p] = 0;
    }

private:
    // What was written before is there for who learns of what is written after. Cheaper than __threadfence().
    static __device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

    // Computed again each time: the warps that call this have few registers to spare.
    __device__ __forceinline__ int deep() const { return cdiv(t_.K, DEPTH); }
    __device__ __forceinline__ int of_panel() const { return t_.panel / COLUMNS * deep(); }
    __device__ __forceinline__ int items() const { return cdiv(t_.N, COLUMNS) * deep(); }

    const Turning t_;
    int ready_ = -1;
    bool done_ = false;

    // Lane 4i+q loads 8 rows, 8q on, of the columns 8(i/2) + 2b + i%2, b = 0 .. 3. Word j of these, over the warp, is a tile of 8
    // columns x 8 rows; transposed, lane 4r+s has columns 8s + 2b and the next, so that four tiles make 16 bytes of a row.
    __device__ __forceinline__ void load(uint4 (&x)[4], int n0, int k0) const {
        const int lane = threadIdx.x % 32, k = k0 + lane % 4 * 8;
        const u64 policy = evict_first();
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int n = n0 + lane / 8 * 8 + 2 * b + lane / 4 % 2;
            x[b] = make_uint4(0, 0, 0, 0);
            if (n < t_.N && k < t_.K) x[b] = stream_16(reinterpret_cast<const u32*>(t_.from + n * t_.ld + k), policy);
        }
    }
    __device__ __forceinline__ void store(const uint4 (&x)[4], int n0, int k0) const {
        const int lane = threadIdx.x % 32, n = n0 + lane % 4 * 8, k = k0 + lane / 8 * 8 + lane / 4 % 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 w[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) w[b] = transpose_8x8(j == 0 ? x[b].x : j == 1 ? x[b].y : j == 2 ? x[b].z : x[b].w);
            if (n < t_.N && k + 2 * j < t_.K)
                *reinterpret_cast<uint4*>(t_.to + (k + 2 * j) * t_.pitch + n) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
    template <bool Wide> __device__ __forceinline__ void write(int item) const {
        const int lane = threadIdx.x % 32, group = item / deep();
        const int k0 = (item - group * deep()) * DEPTH, n0 = group * COLUMNS;
        if constexpr (Wide) {
            uint4 low[4], high[4];
            load(low, n0, k0), load(high, n0, k0 + 32);
            store(low, n0, k0), store(high, n0, k0 + 32);
        } else {
#pragma unroll 1
            for (int k = k0; k < k0 + DEPTH; k += 32) {
                uint4 x[4];
                load(x, n0, k), store(x, n0, k);
            }
        }
        fence();
        __syncwarp();
        if (lane == 0) atomicAdd(t_.words + 2 + item / of_panel(), 1u);
    }
};

}  // namespace spformat
