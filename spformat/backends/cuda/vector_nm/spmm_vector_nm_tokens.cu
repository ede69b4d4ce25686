// C[M,N] = A[M,K] @ B[K,N], A vector n:m, few columns of B, on the CUDA cores with f32 sums. sm_80 and later.
//
//   data     T[W, pitch]      value of row i at its kept column number u, in window u/n (k-major, pitch = padded M)
//   indices  u8[W, groups]    place in the window, for `length` rows each
//   B        T: element (k, c) at k*k_step + c*n_step         C   Out: element (i, c) at i*c_row + c*c_col
//   sums     float[z, x, y, 4*NC, 32]   partial sums, where gridDim.y > 1      arrivals  u32[z, x], zero between launches
//
// Bytes of A decide the time: a lane has four rows and loads their values with one load, U kept columns at a time; 32
// lanes have 128 rows. The 16 warps of a block take kept columns in turn; the windows are cut into gridDim.y ranges of
// `share` windows, and a range into chunks of `chunk`. The rows of B of a chunk lie in shared memory as float, whatever
// B's layout and alignment: no copy of B is needed. Warps add up as a tree; the block of a row tile that finishes last
// adds the ranges in their order: the same bits every run.
//
// Grid: x = tiles of 128 rows, y = ranges, z = tiles of NC columns (strided).
//   Wide     pitch is a multiple of 4: four values are one load
//   Alike    `length` is a multiple of 4: the four rows of a lane share their columns
#include "spformat/dtypes.cuh"

using namespace spformat;

constexpr int WARPS = 16, ROWS = 128;

template <class T> struct alignas(4 * sizeof(T)) Four {
    T v[4];
};
__device__ __forceinline__ Four<float> streamed(const Four<float>* from) {
    const float4 x = __ldcs(reinterpret_cast<const float4*>(from));
    return {{x.x, x.y, x.z, x.w}};
}
template <class T> __device__ __forceinline__ Four<T> streamed(const Four<T>* from) {
    const uint2 x = __ldcs(reinterpret_cast<const uint2*>(from));
    Four<T> four;
    reinterpret_cast<u32*>(four.v)[0] = x.x, reinterpret_cast<u32*>(four.v)[1] = x.y;
    return four;
}

template <class T, class Out, int NC, bool Wide, bool Alike>
__global__ void __launch_bounds__(32 * WARPS, NC <= 4 ? 2 : 1)
    spmm_vector_nm_tokens(const T* __restrict__ data, const u8* __restrict__ indices, i64 M, i64 K, i64 pitch, i64 groups,
                          int length, int n, int m, int windows, int share, int chunk, const T* __restrict__ B,
                          Out* __restrict__ C, i64 N, i64 k_step, i64 n_step, i64 c_row, i64 c_col, float* __restrict__ sums,
                          u32* __restrict__ arrivals) {
    constexpr int U = NC == 4 || NC == 16 || sizeof(T) == 4 || !Alike ? 4 : 8;
    extern __shared__ __align__(16) float shared[];  // B of a chunk [chunk*m, NC]; then sums of half of the warps
    __shared__ bool is_last;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const i64 row = static_cast<i64>(blockIdx.x) * ROWS + lane * 4;
    const int first = min(windows, static_cast<int>(blockIdx.y) * share), last = min(windows, first + share);
    i64 group[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) group[e] = min(groups - 1, (row + (Alike ? 0 : e)) / length);

    for (i64 tile = blockIdx.z; tile * NC < N; tile += gridDim.z) {
        const i64 n0 = tile * NC;
        float acc[4][NC] = {};
        for (int w0 = first; w0 < last; w0 += chunk) {
            const int here = min(chunk, last - w0), count = here * n;
            const i64 k0 = static_cast<i64>(w0) * m;
            __syncthreads();  // the chunk before, or the sums of the tile before, have been read
            for (int i = tid; i < here * m * NC; i += 32 * WARPS) {
                const i64 k = k0 + i / NC, c = n0 + i % NC;
                shared[i] = k < K && c < N ? to_float(B[k * k_step + c * n_step]) : 0.0f;
            }
            __syncthreads();
            const T* const values = data + static_cast<i64>(w0) * n * pitch + row;
            const u8* const places = indices + static_cast<i64>(w0) * n * groups;
            for (int u = warp * U; u < count; u += WARPS * U) {
                Four<T> a[U];
                int place[U][Alike ? 1 : 4];
#pragma unroll
                for (int j = 0; j < U; ++j) {
                    a[j] = {};
                    if (u + j < count) {
                        if (Wide && row < pitch) {
                            a[j] = streamed(reinterpret_cast<const Four<T>*>(values + (u + j) * pitch));
                        } else if (!Wide) {
#pragma unroll
                            for (int e = 0; e < 4; ++e)
                                if (row + e < pitch) a[j].v[e] = values[(u + j) * pitch + e];
                        }
                    }
#pragma unroll
                    for (int e = 0; e < (Alike ? 1 : 4); ++e)
                        place[j][e] = u + j < count ? places[(u + j) * groups + group[e]] : 0;
                }
                int window = u / n, rest = u % n;
#pragma unroll
                for (int j = 0; j < U; ++j) {
                    if (u + j == count) break;  // a zero times an infinite value of B would not be zero
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float* const b = shared + (window * m + place[j][Alike ? 0 : e]) * NC;
                        const float x = to_float(a[j].v[e]);
#pragma unroll
                        for (int c = 0; c < NC; ++c) acc[e][c] += x * b[c];
                    }
                    if (++rest == n) rest = 0, ++window;
                }
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int half = WARPS / 2; half > 0; half /= 2) {
            float* const slot = shared + (warp % half) * ROWS * NC + lane;
            if (warp >= half && warp < 2 * half) {
#pragma unroll
                for (int i = 0; i < 4 * NC; ++i) slot[i * 32] = acc[i / NC][i % NC];
            }
            __syncthreads();
            if (warp < half) {
#pragma unroll
                for (int i = 0; i < 4 * NC; ++i) acc[i / NC][i % NC] += slot[i * 32];
            }
            __syncthreads();
        }
        // Element i of a lane: row i / NC of its four, column i % NC.
        auto store = [&](int i, float x) {
            const i64 at = row + i / NC, c = n0 + i % NC;
            if (at < M && c < N) C[at * c_row + c * c_col] = from_float<Out>(x);
        };
        if (gridDim.y == 1) {
            if (warp == 0) {
#pragma unroll
                for (int i = 0; i < 4 * NC; ++i) store(i, acc[i / NC][i % NC]);
            }
            continue;
        }
        const i64 place = tile * gridDim.x + blockIdx.x;
        float* const parts = sums + place * gridDim.y * ROWS * NC + lane;
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i < 4 * NC; ++i) parts[(static_cast<i64>(blockIdx.y) * 4 * NC + i) * 32] = acc[i / NC][i % NC];
            __threadfence();
            __syncwarp();
            if (lane == 0) {
                is_last = atomicAdd(arrivals + place, 1u) == gridDim.y - 1;
                if (is_last) arrivals[place] = 0;
            }
        }
        __syncthreads();
        if (is_last) {
            __threadfence();
            for (int i = warp; i < 4 * NC; i += WARPS) {
                float sum = 0.0f;
                for (int y = 0; y < gridDim.y; ++y) sum += __ldcg(parts + (static_cast<i64>(y) * 4 * NC + i) * 32);
                store(i, sum);
            }
        }
    }
}
