// Sums of a tile of C of which the blocks of a cluster have a part of K each: a block sends its sums of a strip to the block that
// adds them up, where they lie part after part. Loads from other blocks would need a release of the whole GPU before them, and a
// second barrier behind them.
#pragma once
#include "spformat/tma.cuh"

namespace spformat::parts_of_k {

// This thread's eight sums to its place `to` of a part in block `owner`, four of them HALF bytes behind the others. bar: counts in
// that block what comes from others. Sums that stay in this block, `here`, go by ordinary stores: st.async is slower.
template <int HALF> __device__ __forceinline__ void send(const float* sums, u32 to, int owner, int here, u32 bar) {
    if (owner == here) {
        store_shared_4(to, sums), store_shared_4(to + HALF, sums + 4);
    } else {
        const u32 peer = cluster::map(to, owner), peer_bar = cluster::map(bar, owner);
        cluster::store_async_4(peer, sums, peer_bar);
        cluster::store_async_4(peer + HALF, sums + 4, peer_bar);
    }
}

// sums, eight zeros at first, += what all parts sent to this thread's place `at`, in the order of the parts.
template <int Parts, int HALF> __device__ __forceinline__ void add(float* sums, u32 at) {
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
        const u32 from = at + part * (2 * HALF);
        const float4 x = load_shared_4(from), y = load_shared_4(from + HALF);
        sums[0] += x.x, sums[1] += x.y, sums[2] += x.z, sums[3] += x.w;
        sums[4] += y.x, sums[5] += y.y, sums[6] += y.z, sums[7] += y.w;
    }
}

}  // namespace spformat::parts_of_k
