// Hopper asynchronous copies and the barriers they report to (sm_90 and newer): mbarrier, TMA tile loads and stores,
// clusters, register hand-over between warpgroups. Shared addresses are 32-bit (shared_address()).
//
// A load: one thread calls barrier::expect(full, bytes), then load_2d(...); readers call barrier::wait(full, phase). The
// phase of a barrier starts at 0 and flips each time it completes; who must pass at once in the first round waits for
// phase ^ 1.
#pragma once

#include "spformat/ldmatrix.cuh"

namespace spformat {

// The opaque 128 bytes that cuTensorMapEncodeTiled fills (host: tensor_map.py); passed as `const __grid_constant__`.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

namespace barrier {

__device__ __forceinline__ void init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// After all init calls of a thread, before the CTA (or cluster) barrier that publishes them.
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival that also announces `bytes` of TMA traffic for this phase.
__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Announces `bytes` of TMA traffic for this phase, which an arrival has yet to complete.
__device__ __forceinline__ void announce(u32 bar, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrival at the barrier of the same address in CTA `rank` of the cluster: says that this thread's wgmma reads of a stage are
// over. No .release.cluster: the compiler makes that a MEMBAR of the whole GPU, which waits for every load in flight.
__device__ __forceinline__ void arrive_remote(u32 bar, u32 rank) {
    asm volatile(
            "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(rank)
            : "memory");
}
// Counts an arrival when all earlier cp.async of this thread have landed, without changing the expected number.
__device__ __forceinline__ void arrive_after_copies(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Whether the phase with this parity has completed; may suspend the thread for a short while.
__device__ __forceinline__ bool test(u32 bar, u32 parity) {
    u32 done;
    asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    return done != 0;
}
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
    while (!test(bar, parity)) {
    }
}
// The same, ordered against arrivals from other CTAs of the cluster.
__device__ __forceinline__ void wait_cluster(u32 bar, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
                "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                "selp.u32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(bar), "r"(parity)
                : "memory");
    }
}

}  // namespace barrier

namespace tma {

// Coordinates are in elements, innermost dimension first; elements outside the tensor arrive as zero and still count
// towards the announced bytes. `shared`: 128-byte aligned.
__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void load_2d(u32 shared, const TensorMap& map, u32 bar, int x, int y) {
    asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                    shared),
            "l"(&map), "r"(bar), "r"(x), "r"(y)
            : "memory");
}
__device__ __forceinline__ void load_3d(u32 shared, const TensorMap& map, u32 bar, int x, int y, int z) {
    asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
                    "r"(shared),
            "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z)
            : "memory");
}
// The same tile to the same shared offset of every CTA whose bit is set in `ctas`; each gets the bytes on its barrier.
__device__ __forceinline__ void load_2d_multicast(u32 shared, const TensorMap& map, u32 bar, int x, int y,
                                                                                                    u16 ctas) {
    asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
            "l"(&map), "r"(bar), "r"(x), "r"(y), "h"(ctas)
            : "memory");
}
// `bytes` (a multiple of 16) of contiguous global memory, both ends 16-byte aligned.
__device__ __forceinline__ void load_bulk(u32 shared, const void* global, u32 bytes, u32 bar) {
    asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
            "l"(global), "r"(bytes), "r"(bar)
            : "memory");
}
// load_2d under an L2 policy (cp_async.cuh).
__device__ __forceinline__ void load_2d(u32 shared, const TensorMap& map, u32 bar, int x, int y, u64 policy) {
    asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
            "l"(&map), "r"(bar), "r"(x), "r"(y), "l"(policy)
            : "memory");
}
// Elements outside the tensor are not written.
__device__ __forceinline__ void store_2d(const TensorMap& map, u32 shared, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(shared),
                              "r"(x), "r"(y)
                              : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the shared memory of all but `Left` committed stores may be reused.
template <int Left>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Left) : "memory");
}
// Between ordinary shared-memory writes and a TMA store or wgmma that reads them; then a barrier.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tma

namespace cluster {

__device__ __forceinline__ u32 rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ void sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// sync() in two halves that releases nothing: it says that this block has read what others will overwrite, and makes barriers
// known to them (barrier::fence_init() first). An arrival that releases anything else is a MEMBAR of the whole GPU.
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Address of `shared` in block `rank` of the cluster.
__device__ __forceinline__ u32 map(u32 shared, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
    return remote;
}
// 16 bytes to such an address; counted by the barrier `bar` of the same block when they are there.
__device__ __forceinline__ void store_async_4(u32 remote, const float* x, u32 bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(remote),
                 "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(bar)
                 : "memory");
}

}  // namespace cluster

__device__ __forceinline__ float4 load_shared_4(u32 shared) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(shared) : "memory");
    return x;
}

__device__ __forceinline__ void store_shared_4(u32 shared, const float* x) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Register budget of the calling warpgroup (multiples of 8, 24..256); all its warps call it.
template <int Count>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
// Barrier `id` (1..15) among `threads` threads of the CTA.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// This thread's part in such a barrier, without waiting: what it wrote before is there for those who wait.
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("membar.cta;\nbar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace spformat
