// Tiles of a product dealt to blocks: whole ones in rounds, then the steps along K of the rest in equal shares (stream-K).
//
// As long as two rounds of tiles are left, block r takes a whole tile in each. The steps of the remaining tiles, one tile after
// the other, are cut into `blocks` contiguous shares, of which the first ones have one step more. A share may begin inside
// a tile, whose beginning is that of a share before it: at most one tile of a share.
//
// Sums that a block hands over: the block with the beginning of a tile waits for the shares after its own. Shares are numbered
// against the order in which blocks start, which is that of blockIdx, so that it waits only for blocks that run or have ended,
// and a block hands over its sums before it waits itself. The kernel therefore ends even if one block runs at a time.
//
// A cluster may take the place of a block: its blocks start together and have the same pieces, each of tiles of its own, and
// a block hands sums over to the block of the same rank.
#pragma once
#include "spformat/dtypes.cuh"
#include "spformat/tma.cuh"

namespace spformat {

// A piece of work: steps [begin, end) of a tile. With begin = 0 the block writes the tile.
struct Piece {
    int tile, begin, end;
};

class EvenShares {
public:
    int steps, share;  // of a tile; of this block
    // even: whether the last rounds are shared out; else blocks take whole tiles only
    __device__ __forceinline__ EvenShares(int tiles, int steps, int blocks, int share, bool even)
        : steps(steps), share(share), tiles_(tiles), blocks_(blocks) {
        const int whole = tiles > blocks ? tiles / blocks : tiles == blocks, rest = tiles - whole * blocks;  // divisions take long
        rounds_ = even && rest ? max(0, whole - 1) : whole + (rest > 0);
        if (!even || rest == 0) return;
        const int left = (tiles - rounds_ * blocks) * steps;
        least_ = left / blocks, longer_ = left - least_ * blocks;
        at_ = start(share), stop_ = start(share + 1);
    }
    // The first step of a share, counted from the first tile that is shared out.
    __device__ __forceinline__ int start(int share) const { return share * least_ + min(share, longer_); }
    // How many shares after this one have the last `steps` steps of a tile.
    __device__ __forceinline__ int others(int steps) const {
        int count = 1;
        while (start(share + 1 + count) - stop_ < steps) ++count;
        return count;
    }
    // The next piece of this block, in the order of K within a tile; false after the last one.
    __device__ __forceinline__ bool next(Piece& p) {
        if (round_ < rounds_) {
            p = {round_++ * blocks_ + share, 0, steps};
            return p.tile < tiles_;  // else the last round, and nothing is shared out
        }
        if (at_ == stop_) return false;
        const int tile = at_ / steps;
        p.tile = rounds_ * blocks_ + tile;
        p.begin = at_ - tile * steps;
        p.end = min(steps, p.begin + stop_ - at_);
        at_ += p.end - p.begin;
        return true;
    }

private:
    int tiles_, blocks_, rounds_, least_ = 0, longer_ = 0, at_ = 0, stop_ = 0, round_ = 0;
};

// 128 threads of a warpgroup hand over Count sums each, as pieces of 16 bytes, Threads apart; `id`: their named barrier.
template <int Threads, int Count>
__device__ __forceinline__ void hand_over(const float (&sums)[Count], float4* to, u32* flag, int id) {
#pragma unroll
    for (int i = 0; i < Count / 4; ++i)
        to[i * Threads] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    named_barrier(id, 128);  // the release of one thread covers what it knows that the others have written
    if (threadIdx.x % 128 == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1u) : "memory");
    __syncwarp();
}

// The same threads of another block add, in their order, what `count` blocks have handed over, whose sums lie `stride` pieces and
// whose flags `flag_stride` words apart. The flags are 0 again.
template <int Threads, int Count>
__device__ __forceinline__ void take_over(float (&sums)[Count], const float4* from, i64 stride, u32* flags, int flag_stride,
                                          int count, int id) {
    for (int i = threadIdx.x % 128; i < count; i += 128) {  // every flag is waited for at one time
        u32* const flag = flags + i64(i) * flag_stride;
        u32 there = 0;
        while (!there) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
        *flag = 0;
    }
    __syncwarp();
    named_barrier(id, 128);
    constexpr int PIECES = Count / 4, PART = PIECES < 8 ? PIECES : 4;  // pieces on their way from L2 while others are added
#pragma unroll
    for (int part = 0; part < PIECES; part += PART) {
        const float4* at = from + part * Threads;
        float4 next[PART] = {};
        auto load = [&] {
#pragma unroll
            for (int i = 0; i < PART; ++i)
                if (part + i < PIECES) next[i] = __ldcg(at + i * Threads);  // from L2: another block wrote it
        };
        load();
#pragma unroll 1
        for (int left = count - 1; left >= 0; --left) {
            float4 x[PART];
#pragma unroll
            for (int i = 0; i < PART; ++i) x[i] = next[i];
            at += stride;
            if (left > 0) load();
#pragma unroll
            for (int i = 0; i < PART; ++i) {
                const int to = 4 * (part + i);
                if (to < Count) sums[to] += x[i].x, sums[to + 1] += x[i].y, sums[to + 2] += x[i].z, sums[to + 3] += x[i].w;
            }
        }
    }
}

}  // namespace spformat
