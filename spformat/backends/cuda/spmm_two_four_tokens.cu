// C[M,N] = A[M,K] @ B[K,N] for few columns (N <= 64), A 2:4 sparse (format two-four): streams the weights once. sm_80 up.
//
//   weights   u32[Mp/16 * Kp/64 + SPARE, 288]  records of two_four_records.cu; Mp = pad(M, 32), Kp = pad(K, 64);
//                                              up to Step - 1 records behind the last one are read, not used
//   b         T[K, N]         row k at b + k*ldb (BCol: column n at b + n*ldb)
//   c         Out[M, N]       row i at c + i*ldc (CCol: column n at c + n*ldc); every element is written
//   partials  f32[tiles, Splits, ROWS*NT*8], counters  u32[tiles], zero: only without Cluster and with Splits > 1
//
// Grid: (tiles of ROWS = 16*MT*Warps rows, Splits ranges of K); N <= 8*NT. With Cluster the splits of a tile are one thread
// block cluster and add up through distributed shared memory; else the block that finishes last adds them. Both add in the
// order of the splits, so the same input gives the same bits.
//
// Weights and B come by cp.async, Step slabs of 64 columns a stage, Stages stages. The records of a warp are one contiguous
// stream, which DRAM serves faster than 64 bytes from each of many rows.
#include "spformat/cp_async.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"

using namespace spformat;

#if __CUDA_ARCH__ >= 900
#define CLUSTER_OF(n) __cluster_dims__(1, n, 1)
#else
#define CLUSTER_OF(n)
#endif

constexpr int DEPTH = 64;  // columns of A in a slab

template <class T, class Out, int MT, int NT, int Warps, int Step, int Stages, int Splits, bool Cluster, bool BCol, bool CCol>
__global__ void CLUSTER_OF(Cluster ? Splits : 1) __launch_bounds__(Warps * 32, 2)
spmm_two_four_tokens(const char* __restrict__ weights, int M, int K, const T* __restrict__ b, Out* __restrict__ c, int N,
                     i64 ldb, i64 ldc, float* partials, u32* counters) {
    static_assert(NT == 1 || NT == 2 || NT == 4 || NT == 8, "columns come in 8, 16, 32 or 64");
    constexpr int THREADS = Warps * 32, ROWS = 16 * MT * Warps, COLS = NT * 8, S = Stages;
    constexpr int TILE = 1152;                               // bytes of a record
    constexpr int WARP = Step * MT * TILE;                   // bytes of one warp's weights in a stage
    constexpr int B_SLAB = DEPTH * NT * 16;                  // bytes
    constexpr int STAGE = Warps * WARP + Step * B_SLAB;
    static_assert(Warps * WARP % 128 == 0 && ROWS * COLS * 4 <= S * STAGE, "the sums reuse the stages");
    extern __shared__ __align__(128) char shared[];

    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const int Mp = cdiv(M, 32) * 32, slabs = cdiv(K, DEPTH), split = blockIdx.y;
    const int begin = int(i64(slabs) * split / Splits), end = int(i64(slabs) * (split + 1) / Splits);
    const int row0 = blockIdx.x * ROWS, steps = cdiv(end - begin, Step);
    const u32 ring = shared_address(shared);
    const bool b_vector = vector_aligned(b, ldb);

    const char* from[MT];  // this lane's first chunk of the stream of each row tile
#pragma unroll
    for (int m = 0; m < MT; ++m) {  // rows at or beyond Mp repeat the last tile; they are never written
        const int tile = min(row0 / 16 + warp * MT + m, Mp / 16 - 1);
        from[m] = weights + (i64(tile) * slabs + begin) * TILE + lane * 16;
    }
    auto copy = [&](int step) {
        const u32 stage = ring + step % S * STAGE;
        const int first = begin + step * Step;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const u32 to = stage + warp * WARP + m * (Step * TILE) + lane * 16;
#pragma unroll
            for (int i = 0; i < Step * TILE; i += 512)
                if (i + 512 <= Step * TILE || lane * 16 + i < Step * TILE)
                    cp_async_16(to + i, from[m] + i64(step) * (Step * TILE) + i);
        }
        const u32 to_b = stage + Warps * WARP;
#pragma unroll
        for (int id = tid; id < Step * B_SLAB / 16; id += THREADS) {
            constexpr int per_line = BCol ? DEPTH / 8 : NT;  // chunks
            const int slab = id / (DEPTH * NT), in = id % (DEPTH * NT), across = in / per_line, chunk = in % per_line;
            const int k = (first + slab) * DEPTH + (BCol ? chunk * 8 : across), n = BCol ? across : chunk * 8;
            const int left = (k < K && n < N) ? min(BCol ? K - k : N - n, 8) : 0;
            const T* from = left ? b + (BCol ? i64(n) * ldb + k : i64(k) * ldb + n) : b;
            const u32 to = to_b + slab * B_SLAB + (BCol ? swizzled<128>(across, chunk) : swizzled<NT * 16>(across, chunk));
            if (b_vector) {
                cp_async_16(to, from, left * 2);
            } else {
                u32 word[4] = {0, 0, 0, 0};
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (e < left) word[e / 2] |= u32(reinterpret_cast<const u16*>(from)[e]) << (16 * (e % 2));
                asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                             "r"(word[3]) : "memory");
            }
        }
    };

    const u32 b_lane = BCol ? swizzled<128>(lane % 8, lane / 8) : swizzled<NT * 16>(lane, 0);

    float acc[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[m][n][r] = 0.0f;

#pragma unroll
    for (int step = 0; step < S - 1; ++step) {
        if (step < steps) copy(step);
        cp_async_commit();
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<S - 2>();
        __syncthreads();
        if (step + S - 1 < steps) copy(step + S - 1);
        cp_async_commit();
        const char* stage = shared + step % S * STAGE;
#pragma unroll
        for (int slab = 0; slab < Step; ++slab) {
            if (begin + step * Step + slab >= end) break;
            uint4 kept[MT][2];
            u32 e[MT];
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const char* tile = stage + warp * WARP + (m * Step + slab) * TILE;
                kept[m][0] = reinterpret_cast<const uint4*>(tile)[lane];
                kept[m][1] = reinterpret_cast<const uint4*>(tile)[lane + 32];
                e[m] = reinterpret_cast<const u32*>(tile + 1024)[lane];
            }
            const u32 slab_b = shared_address(stage) + Warps * WARP + slab * B_SLAB;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                u32 w[2][4];
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    if constexpr (BCol) ldmatrix_x4(w[p], slab_b + n * 1024 + (b_lane ^ (p * 64)));
                    else ldmatrix_x4_trans(w[p], slab_b + p * (32 * NT * 16) + (b_lane ^ (n * 16)));
                }
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    const uint4 x = kept[m][0], y = kept[m][1];
                    const u32 first[4] = {x.x, x.y, x.z, x.w}, second[4] = {y.x, y.y, y.z, y.w};
                    mma_sp_m16n8k32<T, 0>(acc[m][n], first, w[0][0], w[0][1], w[0][2], w[0][3], e[m]);
                    mma_sp_m16n8k32<T, 1>(acc[m][n], second, w[1][0], w[1][1], w[1][2], w[1][3], e[m]);
                }
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();

    // This block's sums, in the order of C: [ROWS][COLS], or [COLS][ROWS] for CCol.
    float* own = reinterpret_cast<float*>(shared);
    if constexpr (Splits > 1 && !Cluster) own = partials + (i64(blockIdx.x) * Splits + split) * (ROWS * COLS);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int row = (warp * MT + m) * 16 + g + 8 * (r / 2), col = n * 8 + 2 * t + r % 2;
                own[CCol ? col * ROWS + row : row * COLS + col] = acc[m][n][r];
            }
    int at = tid, stop = ROWS * COLS;
    if constexpr (Splits > 1 && Cluster) {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
        at += split * (ROWS * COLS / Splits);
        stop = (split + 1) * (ROWS * COLS / Splits);
    } else if constexpr (Splits > 1) {
        __threadfence();
        __syncthreads();
        __shared__ bool last;
        if (tid == 0) last = atomicAdd(counters + blockIdx.x, 1) == Splits - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        if (tid == 0) counters[blockIdx.x] = 0;  // ready for the next launch
    } else {
        __syncthreads();
    }
    for (; at < stop; at += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < Splits; ++s) {
            float part;
            if constexpr (Splits > 1 && Cluster) {
#if __CUDA_ARCH__ >= 900
                u32 remote;
                asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(own + at)), "r"(s));
                asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(remote) : "memory");
#endif
            } else if constexpr (Splits > 1) {
                part = __ldcg(partials + (i64(blockIdx.x) * Splits + s) * (ROWS * COLS) + at);
            } else {
                part = own[at];
            }
            sum = s == 0 ? part : sum + part;
        }
        const int row = row0 + (CCol ? at % ROWS : at / COLS), col = CCol ? at / ROWS : at % COLS;
        if (row < M && col < N) c[CCol ? i64(col) * ldc + row : i64(row) * ldc + col] = from_float<Out>(sum);
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (Splits > 1 && Cluster)  // peers may still be reading this block's sums
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
