// What the *_scan kernels share: one pass over unchecked arrays, to say whether they are valid.
//
// A value that is read from an array is compared first. It is used as an address only if the comparison is true, and nothing
// that could overflow is computed from it before. So a scan never reads outside of its arrays, whatever they contain.
#pragma once
#include "spformat/integers.cuh"

namespace spformat {

namespace scan {

constexpr int THREADS = 256;

// Threads of the whole grid, and the number of this one.
__device__ __forceinline__ i64 threads() { return (i64)gridDim.x * THREADS; }
__device__ __forceinline__ i64 thread() { return (i64)blockIdx.x * THREADS + threadIdx.x; }

// Every thread that finds an invalid element sets `bad`, which is in host memory, to 1.
__device__ __forceinline__ void report(bool wrong, u64* bad) {
    if (wrong) *(volatile u64*)bad = 1;
}

// seen(value) for those of values[0 .. n) that fall to number `at` of `step`: 16 bytes a load but at the ends. Loops are
// kept short where speed does not come from them: a scan is compiled at its first use, and runs once over cold code.
template <class T, class F>
__device__ __forceinline__ void each(const T* __restrict__ values, i64 n, i64 at, i64 step, F seen) {
    constexpr int WIDE = 16 / sizeof(T);
    struct alignas(16) Wide { T lane[WIDE]; };
    const i64 apart = (16 - (u64)values % 16) % 16 / sizeof(T), head = apart < n ? apart : n;
    const i64 wide = (n - head) / WIDE;
    const Wide* body = reinterpret_cast<const Wide*>(values + head);
#pragma unroll 1
    for (i64 i = at; i < head; i += step) seen(values[i]);
#pragma unroll 2
    for (i64 i = at; i < wide; i += step) {
        const Wide w = body[i];
#pragma unroll
        for (int j = 0; j < WIDE; ++j) seen(w.lane[j]);
    }
#pragma unroll 1
    for (i64 i = head + wide * WIDE + at; i < n; i += step) seen(values[i]);
}

// piece(number, lane) for pieces 0 .. count-1, each by `span` neighbouring lanes (a power of two up to 32). All
// lanes of a warp call it equally often, so that it may contain warp-wide operations; some numbers are therefore >= count.
template <class F> __device__ __forceinline__ void share(i64 count, int span, F piece) {
    const int groups = 32 / span, lane = threadIdx.x % 32;
    for (i64 first = thread() / 32 * groups; first < count; first += threads() / 32 * groups)
        piece(first + lane / span, lane % span);
}

// The sum over the `span` lanes of a piece.
__device__ __forceinline__ u64 summed(u64 x, int span) {
    for (int d = span / 2; d; d /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, d);
    return x;
}

// Whether p[0 .. n] does not go from 0 to `end`, or falls anywhere.
template <class P> __device__ __forceinline__ bool bad_pointer(const P* __restrict__ p, i64 n, i64 end) {
    bool wrong = thread() == 0 && (p[0] != 0 || p[n] != end);
#pragma unroll 1
    for (i64 i = thread(); i < n; i += threads()) wrong |= p[i] > p[i + 1];
    return wrong;
}

// Whether one of p[0 .. n] is x. p should ascend; if it does not, the answer is meaningless, but nothing else is read.
template <class P> __device__ __noinline__ bool among(i64 x, const P* __restrict__ p, i64 n) {
    i64 low = 0, high = n;
#pragma unroll 1
    while (low < high) {
        const i64 middle = low + (high - low) / 2;
        if (p[middle] < x)
            low = middle + 1;
        else
            high = middle;
    }
    return p[low] == x;
}

// Whether columns[0 .. n) are not all in 0 .. bound-1 and increasing in each of the `rows` rows of pointer p.
template <class Column, class P>
__device__ __forceinline__ bool bad_columns(const Column* __restrict__ columns, i64 n, i64 bound, const P* __restrict__ p, i64 rows) {
    bool wrong = false;
#pragma unroll 4
    for (i64 i = thread(); i < n; i += threads()) {
        const i64 column = columns[i];
        wrong |= column < 0 || column >= bound;
        if (i && columns[i - 1] >= column) wrong |= !among(i, p, rows);  // a row may start here
    }
    return wrong;
}

}  // namespace scan
}  // namespace spformat
