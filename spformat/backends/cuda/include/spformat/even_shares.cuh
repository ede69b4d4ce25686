// Tiles of a product dealt to blocks: whole ones in rounds, then the steps along K of the rest in equal shares (stream-K).
//
// As long as two rounds of tiles are left, block r takes a whole tile in each. The steps of the remaining tiles, one tile after
// the other, are cut into `blocks` contiguous shares, of which the first ones have one step more. A share may begin inside
// a tile, whose beginning is that of a share before it: at most one tile of a share.
//
// Sums that a block hands over: the block with the beginning of a tile waits for the shares after its own. Shares are numbered
// against the order in which blocks start, so that it waits only for blocks that run or have ended, and a block hands over its
// sums before it waits itself. The kernel therefore ends even if one block runs at a time.
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
        rounds_ = cdiv(tiles, blocks);
        if (even && tiles % blocks) rounds_ = max(0, tiles / blocks - 1);
        const int left = max(0, tiles - rounds_ * blocks) * steps;
        least_ = left / blocks, longer_ = left % blocks;
        at_ = start(share), stop_ = start(share + 1);
    }
    // The first step of a share, counted from the first tile that is shared out.
    __device__ __forceinline__ int start(int share) const { return share * least_ + min(share, longer_); }
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
    int tiles_, blocks_, rounds_, least_, longer_, at_, stop_, round_ = 0;
};

// Number of this block (or cluster) in the order in which the `blocks` of the launch start. `counter` is 0 before the launch
// and after it. One thread of each calls it.
__device__ __forceinline__ u32 started(u32* counter, u32 blocks) { return atomicInc(counter, blocks - 1); }

// 128 threads of a warpgroup hand over Count sums each, as pieces of 16 bytes, Threads apart; `id`: their named barrier.
template <int Threads, int Count>
__device__ __forceinline__ void hand_over(const float (&sums)[Count], float4* to, u32* flag, int id) {
#pragma unroll
    for (int i = 0; i < Count / 4; ++i)
        to[i * Threads] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    __threadfence();
    named_barrier(id, 128);
    if (threadIdx.x % 128 == 0) atomicExch(flag, 1u);
    __syncwarp();
}

// The same threads of another block add what was handed over; the flag is 0 again.
template <int Threads, int Count>
__device__ __forceinline__ void take_over(float (&sums)[Count], const float4* from, u32* flag, int id) {
    if (threadIdx.x % 128 == 0) {
        while (!*const_cast<volatile u32*>(flag)) {
        }
        *const_cast<volatile u32*>(flag) = 0;
    }
    __threadfence();
    __syncwarp();
    named_barrier(id, 128);
#pragma unroll
    for (int i = 0; i < Count / 4; ++i) {
        const float4 x = __ldcg(from + i * Threads);  // from L2: another block wrote it
        sums[4 * i] += x.x, sums[4 * i + 1] += x.y, sums[4 * i + 2] += x.z, sums[4 * i + 3] += x.w;
    }
}

}  // namespace spformat
