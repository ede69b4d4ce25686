// Lines of B that start anywhere, copied by the blocks of the product itself, before their first steps, to lines that the copy
// engine can address. Beside a launch of its own, whose blocks are still there when those of the product come, clusters of blocks
// that share multiprocessors may have to wait for room.
//
// Each of the first `shares` blocks copies an equal part and counts it. Whoever is about to load from the copy waits until all parts
// are counted. Who waits for long copies all of them: the same bytes, so that it does not matter who writes them, and the kernel ends
// even if one block runs at a time. Blocks that do not wait any more are counted, too; the last one clears the count.
// sm_90 and later.
#pragma once
#include "spformat/tma.cuh"
#include "spformat/units.cuh"

namespace spformat {

// Where a kernel copies lines to. ctypes counterpart: own_copy.CopyTo.
struct CopyTo {
    u32* count;  // 0 before and after; null: nothing is copied
    u16* lines;
    i64 ld;      // elements between lines, which start on 16 bytes and have room for whole units
    int shares;
};

class OwnCopy {
public:
    // B: element (k, n) at k*b_k + n*b_n, of 16 bits. BCol: its columns are copied, else its rows.
    template <bool BCol, class T>
    static __device__ __forceinline__ OwnCopy of(const CopyTo& to, const T* B, i64 b_k, i64 b_n, int K, int N) {
        static_assert(sizeof(T) == 2, "16-bit values");
        OwnCopy x;
        x.from_ = reinterpret_cast<const u16*>(B), x.to_ = to.lines;
        x.count_ = to.count, x.ld_to_ = to.ld, x.shares_ = to.shares;
        x.ld_from_ = BCol ? b_n : b_k, x.lines_ = BCol ? N : K, x.along_ = BCol ? K : N;
        return x;
    }
    __device__ __forceinline__ bool wanted() const { return count_ != nullptr; }

    // This block's part. All threads call it; a barrier of the block comes between this and `wait`.
    __device__ __forceinline__ void copy() const {
        if (blockIdx.x < shares_) copy_share<4>(blockIdx.x, threadIdx.x, blockDim.x);
    }

    // Until all lines are there, for loads of the copy engine by this warp. All lanes of one warp of each block call it; then one
    // of its threads calls `leave`.
    __device__ __forceinline__ void wait() const {
        constexpr u32 PATIENCE = 256;  // times that the count is looked at, more than 100 us
        const int lane = threadIdx.x % 32;
        bool there = false;
        if (lane == 0) {
            if (blockIdx.x < shares_)
                asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count_), "r"(1u) : "memory");
            for (u32 looked = 0; !there && looked < PATIENCE; ++looked) {
                u32 count;
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(count_) : "memory");
                there = count >= shares_;
            }
        }
        if (!__shfl_sync(0xFFFFFFFFu, there, 0))
            for (u32 share = 0; share < shares_; ++share) copy_share<1>(share, lane, 32);
        __syncwarp();
        asm volatile("fence.proxy.async.global;" ::: "memory");  // what ordinary stores wrote, the copy engine reads
    }
    // This block does not look at the count any more. Who sees the count of blocks that left sees all that they have copied.
    __device__ __forceinline__ void leave() const {
        u32 before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(count_), "r"(1u) : "memory");
        if (before == shares_ + gridDim.x - 1) *count_ = 0;
    }

private:
    const u16* from_;
    u16* to_;
    u32* count_;  // of parts that are copied, and of blocks that do not look at it any more
    i64 ld_from_, ld_to_;
    int lines_, along_;
    u32 shares_;

    // Part `share` of all units of 16 bytes, by so many threads, Each units of a thread at a time.
    template <int Each> __device__ __forceinline__ void copy_share(u32 share, u32 thread, u32 threads) const {
        const u32 of_line = (along_ + 7) / 8, units = lines_ * of_line, part = (units + shares_ - 1) / shares_;
        const u32 stop = min(units, (share + 1) * part);
        const u64 begin = reinterpret_cast<u64>(from_), end = begin + ((lines_ - 1) * ld_from_ + along_) * 2;
#pragma unroll 1
        for (u32 unit0 = share * part + thread; unit0 < stop; unit0 += threads * Each) {
            uint4 low[Each], high[Each];
            u16* target[Each];
            u32 bytes[Each], single = 0;
#pragma unroll
            for (int e = 0; e < Each; ++e) {
                const u32 unit = unit0 + e * threads, line = unit / of_line, first = (unit - line * of_line) * 8;
                const u64 at = begin + (line * ld_from_ + first) * 2, start = at & ~u64(15);
                const bool inside = start >= begin && start + 32 <= end;
                target[e] = unit < stop && inside ? to_ + line * ld_to_ + first : nullptr;
                if (unit < stop && !inside) single |= 1u << e;
                bytes[e] = static_cast<u32>(at) & 15;
                if (target[e]) low[e] = reinterpret_cast<const uint4*>(start)[0], high[e] = reinterpret_cast<const uint4*>(start)[1];
            }
#pragma unroll
            for (int e = 0; e < Each; ++e)
                if (target[e]) *reinterpret_cast<uint4*>(target[e]) = shifted(low[e], high[e], bytes[e]);
            // At the beginning and the end of the matrix, where the two pieces that hold a unit are not all of it: value by value.
#pragma unroll 1
            for (; single; single &= single - 1) {
                const u32 unit = unit0 + (__ffs(single) - 1) * threads, line = unit / of_line, first = (unit - line * of_line) * 8;
#pragma unroll 1
                for (u32 i = first; i < min(first + 8, u32(along_)); ++i) to_[line * ld_to_ + i] = from_[line * ld_from_ + i];
            }
        }
    }
};

}  // namespace spformat
