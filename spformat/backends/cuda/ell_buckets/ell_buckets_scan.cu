// Whether the arrays of an ELL bucket matrix are valid: as ELLBuckets.check_memory and check_canonical require, in
// two passes, the slots and then the ELL rows.
//
//   row_ids  Row[R]
//   indices  Column[S]
//   data     T[S]          values as unsigned words
//   source   Source[S]     positions in the CSR
//   tables   i64[4][B+1]   of each bucket the first ELL row, the first slot, the first ELL row that is split, and the width
//   starts   int[S+1]      -1 before; then which ELL row starts at a position of the CSR, the last of those that claim it
//   ends     int[S+1]      as starts: which ELL row ends before it
//   bad      becomes 1 if something is wrong
//
// Chained by position, ELL rows must come in the order of rows, parts and chunks. A chain that starts at 0, and in which
// every other start is an end and nobody's start is claimed by two, leaves no ELL row out and no position.
#include "spformat/ell_buckets.cuh"
#include "spformat/scan.cuh"

namespace spformat {
namespace ell_buckets {

struct Extents {
    i64 M, K, R, S, part;  // part: columns of one
    int buckets, levels;   // levels: buckets of a part, narrowest first
};

struct Tables {
    const i64 *rows, *slots, *split, *widths;
    int levels;
    __device__ __forceinline__ Tables(const i64* tables, Extents e)
        : rows(tables),
          slots(tables + e.buckets + 1),
          split(slots + e.buckets + 1),
          widths(split + e.buckets + 1),
          levels(e.levels) {}
    __device__ __forceinline__ i64 width(int bucket) const { return widths[bucket]; }
    // The width of the next narrower bucket of the part; 0 for the narrowest.
    __device__ __forceinline__ i64 narrower(int bucket) const { return bucket % levels ? widths[bucket - 1] : 0; }
    __device__ __forceinline__ i64 slot(int bucket, i64 row) const { return slots[bucket] + (row - rows[bucket]) * width(bucket); }
};

template <class T, class Column, class Source>
__global__ void __launch_bounds__(scan::THREADS)
slots_scan(const Column* __restrict__ indices, const T* __restrict__ data, const Source* __restrict__ source,
           const i64* __restrict__ tables, int* __restrict__ starts, int* __restrict__ ends, Extents e, u64* bad) {
    const Tables t(tables, e);
    bool wrong = false;
    for (i64 i = scan::thread(); i < e.S; i += scan::threads()) {
        const int b = bucket_of(i, t.slots, e.buckets);
        const u32 at = u32(i - t.slots[b]), width = u32(t.width(b)), k = at % width;  // there are fewer than 2^31 slots
        const int row = (int)(t.rows[b] + at / width);
        const i64 column = indices[i], from = source[i];
        wrong |= (column == -1) != (from == -1);
        if (column == -1) {
            wrong |= data[i] != 0;
            continue;
        }
        wrong |= column < 0 || column >= e.K || column / e.part != b / e.levels;
        if (from < 0 || from >= e.S) {
            wrong = true;
            continue;
        }
        if (k)
            wrong |= indices[i - 1] == -1 || indices[i - 1] >= column || source[i - 1] != from - 1;
        else
            starts[from] = row;
        if (k == width - 1 || indices[i + 1] == -1) ends[from + 1] = row;
    }
    scan::report(wrong, bad);
}

template <class Row, class Column, class Source>
__global__ void __launch_bounds__(scan::THREADS)
rows_scan(const Row* __restrict__ row_ids, const Column* __restrict__ indices, const Source* __restrict__ source,
          const i64* __restrict__ tables, const int* __restrict__ starts, const int* __restrict__ ends, Extents e, u64* bad) {
    const Tables t(tables, e);
    bool wrong = false;
    for (i64 r = scan::thread(); r < e.R; r += scan::threads()) {
        const int b = bucket_of(r, t.rows, e.buckets), part = b / e.levels;
        const i64 width = t.width(b), slot = t.slot(b, r), row = row_ids[r], from = source[slot];
        wrong |= row < 0 || row >= e.M;
        if (from < 0 || from >= e.S) {
            wrong = true;
            continue;
        }
        i64 items = 1, most = width;  // they lie before the first PAD
        while (items < most) {
            const i64 middle = (items + most) / 2;
            if (indices[slot + middle] == -1)
                most = middle;
            else
                items = middle + 1;
        }
        const i64 to = from + items;
        wrong |= starts[from] != r || (from == 0) != (ends[from] == -1);
        const int before = ends[from], after = to < e.S ? starts[to] : -1;
        bool split = false, follows = false;
        if (before >= 0) {
            split = row_ids[before] == row;
            follows = split && bucket_of(before, t.rows, e.buckets) / e.levels == part;
        }
        wrong |= !follows && items <= t.narrower(b);  // a narrower bucket would do
        bool followed = false;
        if (after >= 0) {
            const i64 next = row_ids[after], its = bucket_of(after, t.rows, e.buckets) / e.levels;
            split |= next == row;
            followed = next == row && its == part;
            wrong |= next < row || (next == row && its < part);
            if (followed) {  // chunks of the widest bucket: neighbours, full but for the last
                wrong |= after != r + 1 || b % e.levels != e.levels - 1 || items != width;
                wrong |= after == r + 1 && indices[slot + width - 1] >= indices[slot + width];
            }
        }
        wrong |= split != (r >= t.split[b]);
        const i64 last = r < t.split[b] ? t.split[b] : t.rows[b + 1];  // the end of the ELL rows whose row ids must ascend
        if (r + 1 < last) wrong |= row_ids[r + 1] <= row && !(followed && after == r + 1);
    }
    scan::report(wrong, bad);
}

}  // namespace ell_buckets
}  // namespace spformat
