// SR-BCRS as CSR: a first launch counts the nonzeros of each row, a second one writes them. sm_80 and later.
// Launcher: sr_bcrs_to_csr.py.
//
//   first    Start[Mv+1]       first group of each row tile
//   columns  Idx[G, g]         column of each vector, ascending in a tile, -1 after the last
//   data     T[G, t, g]        element (r, s): row r of the tile, vector s; unsigned words of the values' width; Float: -0 is
//                              a zero
//   counts   u32[M, parts]     counting: nonzeros of a row in a part of its tile's groups; writing: in all parts before it
//   indptr   Ptr[M+1]          items of each row (writing)
//   indices  Idx[nnz]          their columns
//   values   T[nnz]            their values
//
// A warp takes a part of a row, and the warps of a block neighbouring rows, so that what one reads of a cache line the others
// use. Wide: g values are a multiple of 16 bytes, and a lane takes so many at once; otherwise one.
#include "spformat/nonzero.cuh"
#include "spformat/prefix_sum.cuh"

using namespace spformat;

constexpr int THREADS = 256, WARPS = THREADS / 32, IN_FLIGHT = 4;

template <class T, bool Float, bool Wide, class Start, class Idx, class Ptr, bool Write>
__global__ void __launch_bounds__(THREADS)
sr_bcrs_to_csr(const Start* __restrict__ first, const Idx* __restrict__ columns, const T* __restrict__ data, i64 M, int t,
               int g, i64 parts, u32* __restrict__ counts, const Ptr* __restrict__ indptr, Idx* __restrict__ indices,
               T* __restrict__ values) {
    constexpr int P = Wide ? 16 / sizeof(T) : 1;
    const int lane = threadIdx.x % 32;
    const i64 job = blockIdx.x * static_cast<i64>(WARPS) + threadIdx.x / 32, tile = job / (parts * t);
    const int rest = static_cast<int>(job - tile * parts * t), part = rest / t, r = rest - part * t;
    const i64 row = tile * t + r;
    if (row >= M) return;
    const i64 begin = first[tile], groups = first[tile + 1] - begin, each = (groups + parts - 1) / parts;
    const i64 n0 = begin + (part * each < groups ? part * each : groups);
    const i64 n1 = begin + ((part + 1) * each < groups ? (part + 1) * each : groups);
    const int pieces = g / P, down = 32 / pieces, across = 32 % pieces;  // from a lane's piece of a row of a group to its next
    i64 n = n0 + lane / pieces, to = Write ? static_cast<i64>(indptr[row]) + counts[row * parts + part] : 0;
    int piece = lane % pieces;
    u32 nonzeros = 0;
    const i64 steps = ((n1 - n0) * pieces + 31) / 32;
    for (i64 step = 0; step < steps; step += IN_FLIGHT) {
        uint4 unit[IN_FLIGHT];
        i64 vector[IN_FLIGHT];  // of the first value of the unit
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            unit[u] = make_uint4(0, 0, 0, 0);
            vector[u] = n * g + piece * P;
            if (n < n1) {
                const T* at = data + (n * t + r) * g + piece * P;
                if (Wide) {
                    unit[u] = *reinterpret_cast<const uint4*>(at);
                } else {
                    const u64 value = *at;
                    unit[u].x = static_cast<u32>(value), unit[u].y = static_cast<u32>(value >> 32);
                }
            }
            n += down, piece += across;
            if (piece >= pieces) piece -= pieces, ++n;
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            const u32 bits = nonzero_bits<T, Float>(unit[u]), own = __popc(bits);
            if (!Write) {
                nonzeros += own;
                continue;
            }
            const u32 before = sum_before_lane(own);
            i64 at = to + before;
#pragma unroll
            for (int e = 0; e < P; ++e)
                if (bits >> e & 1) {
                    indices[at] = columns[vector[u] + e];
                    values[at++] = element_of<T>(unit[u], e);
                }
            to += __shfl_sync(~0u, before + own, 31);
        }
    }
    if (!Write) {
        nonzeros = sum_of_warp(nonzeros);
        if (lane == 0) counts[row * parts + part] = nonzeros;
    }
}
