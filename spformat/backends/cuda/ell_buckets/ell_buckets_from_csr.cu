// CSR to ELL buckets: the layout of formats/ell_buckets.py, bit for bit. sm_80 and later. Launcher: ell_buckets_from_csr.py.
//
// A segment is what a row of the matrix has in a part of the columns: neighbours in the CSR. It becomes one ELL row, or
// chunks of the widest bucket. A *group* is the direct or the split half of a bucket; group 2 * bucket is the direct one.
// A warp takes a *tile* of neighbouring rows in one part: count_ell_rows says how many ELL rows of each group come from
// each tile, their prefix sums say where these start, and place_ell_rows goes through the tiles once more.
//
//   indptr   Ptr[M+1]           as in the CSR; indices Idx[nnz], values T[nnz] likewise
//   cuts     Ptr[parts-1][M]    the first item of a row that lies beyond the part
//   split    u8[M]              whether the row has several ELL rows; with one part it is not needed, nor are cuts
//   starts   i64[parts][2 * widths][tiles]   ELL rows of a group that come from a tile; then the first of them
//   tables   i64[3][buckets+1]  as ell_buckets.cuh has them
//   counts   i64[2][buckets]    ELL rows of each bucket, and those of split rows; host memory that the device can write
//   spans    Span[R]            the items of each ELL row
#include "spformat/ell_buckets.cuh"
#include "spformat/last_block.cuh"
#include "spformat/prefix_sum.cuh"

using namespace spformat;
using ell_buckets::bucket_of;
using ell_buckets::Buckets;
using ell_buckets::MOST_WIDTHS;
using ell_buckets::Widths;

constexpr int CUT_THREADS = 256;                              // 32 rows, eight parts at a time
constexpr int TILE_WARPS = 4, MOST_GROUPS = 2 * MOST_WIDTHS;  // tiles of a block; groups of a part
constexpr int TABLE_THREADS = 1024, TABLE_BATCH = 4;
constexpr int FILL_THREADS = 256, FILL_BATCH = 8;  // slots of a thread

// Items of an ELL row: positions first .. first+items-1 of the CSR.
template <class Ptr> struct __align__(2 * sizeof(Ptr)) Span {
    Ptr first;
    int items;
};

template <class Ptr> struct Segments {
    const Ptr *indptr, *cuts;
    i64 M;
    int parts;
    __device__ __forceinline__ Ptr begin(i64 row, int part) const {
        return part == 0 ? indptr[row] : cuts[(part - 1) * M + row];
    }
    __device__ __forceinline__ Ptr end(i64 row, int part) const {
        return part == parts - 1 ? indptr[row + 1] : cuts[part * M + row];
    }
};

template <class Ptr> __device__ __forceinline__ Ptr chunks_of(Ptr length, int widest) {
    return length <= widest ? Ptr(length > 0) : (length - 1) / widest + 1;
}

template <class Ptr, class Idx>
__global__ void __launch_bounds__(CUT_THREADS)
cut_rows_at_parts(const Ptr* __restrict__ indptr, const Idx* __restrict__ indices, Ptr* cuts, u8* __restrict__ split, i64 M,
                  int parts, i64 part_size, int widest) {
    __shared__ int chunks[32];
    const int r = threadIdx.x % 32, step = CUT_THREADS / 32;
    const i64 row = static_cast<i64>(blockIdx.x) * 32 + r;
    if (threadIdx.x < 32) chunks[r] = 0;
    if (row < M) {
        const Ptr begin = indptr[row], end = indptr[row + 1];
        for (int part = threadIdx.x / 32; part < parts - 1; part += step) {
            const i64 column = (part + 1) * part_size;
            Ptr low = begin, high = end;
            while (low < high) {
                const Ptr middle = low + (high - low) / 2;
                if (indices[middle] < column)
                    low = middle + 1;
                else
                    high = middle;
            }
            cuts[part * M + row] = low;
        }
    }
    __syncthreads();
    if (row < M) {
        const Segments<Ptr> segments{indptr, cuts, M, parts};
        int here = 0;  // two stand for any larger number, which may not fit
        for (int part = threadIdx.x / 32; part < parts && here < 2; part += step) {
            const Ptr n = chunks_of(static_cast<Ptr>(segments.end(row, part) - segments.begin(row, part)), widest);
            here += n < 2 ? static_cast<int>(n) : 2;
        }
        if (here) atomicAdd(chunks + r, here);
    }
    __syncthreads();
    if (threadIdx.x < 32 && row < M) split[row] = chunks[r] > 1;
}

// What a warp's lane has of 32 neighbouring segments, and where its ELL rows stand among the warp's.
template <class Ptr> struct Lane {
    i64 row;
    Ptr begin, length, chunks;
    int group;           // of the part; -1 for an empty segment
    bool widest;         // the group that may have several ELL rows of a segment
    i64 before, total;   // ELL rows of the same group: in lanes before this one, and in the warp
    i64 chunked;         // ELL rows of the widest split group in the warp

    // row0: that of lane 0. last: the end of the tile.
    __device__ __forceinline__ Lane(const Segments<Ptr>& segments, const u8* split, int part, i64 row0, i64 last,
                                    const int* widths, int levels) {
        const int lane = threadIdx.x % 32, widest_width = widths[levels - 1];
        row = row0 + lane, begin = length = 0;
        if (row < last) begin = segments.begin(row, part), length = segments.end(row, part) - begin;
        chunks = chunks_of(length, widest_width), group = -1;
        if (length > 0) {
            int low = 0, high = levels - 1;  // the narrowest width that is enough, else the widest
            while (low < high) {
                const int middle = (low + high) / 2;
                if (widths[middle] < length)
                    low = middle + 1;
                else
                    high = middle;
            }
            group = 2 * low + (split ? split[row] : chunks > 1);
        }
        widest = group == 2 * levels - 1;
        const u32 same = __match_any_sync(~0u, group);
        before = __popc(same & ((1u << lane) - 1)), total = __popc(same), chunked = 0;
        if (__any_sync(~0u, widest)) {
            const i64 mine = widest ? static_cast<i64>(chunks) : 0;
            const i64 sum = sum_before_lane(mine);
            chunked = __shfl_sync(~0u, sum + mine, 31);
            if (widest) before = sum, total = chunked;
        }
    }
    __device__ __forceinline__ bool first_of_group() const { return before == 0 && group >= 0; }
};

// The tile of a warp.
struct Tile {
    int part;
    i64 number, row, last;  // number: in its part
    __device__ __forceinline__ Tile(i64 M, i64 tiles, i64 rows) {
        const i64 warp = static_cast<i64>(blockIdx.x) * TILE_WARPS + threadIdx.x / 32;
        part = static_cast<int>(warp / tiles), number = warp % tiles, row = number * rows;
        last = row + rows < M ? row + rows : M;
    }
};

// By one block of Threads: the prefix sums of starts, and the tables of the buckets. widths: in shared memory, `levels` of them.
template <int Threads>
__device__ __forceinline__ void sum_tiles(i64* starts, i64 tiles, int buckets, const int* widths, int levels, i64* tables, i64* counts) {
    __shared__ i64 sums[33];
    const i64 entries = 2 * tiles * buckets;
    i64 rows = 0;
    for (i64 at = static_cast<i64>(threadIdx.x) * TABLE_BATCH, base = 0; base < entries;
         base += Threads * TABLE_BATCH, at += Threads * TABLE_BATCH) {
        i64 value[TABLE_BATCH], mine = 0, total;
#pragma unroll
        for (int e = 0; e < TABLE_BATCH; ++e) value[e] = at + e < entries ? *const_cast<volatile i64*>(starts + at + e) : 0;
#pragma unroll
        for (int e = 0; e < TABLE_BATCH; ++e) mine += value[e];
        i64 sum = rows + sum_before_thread<Threads>(mine, sums, total);
#pragma unroll
        for (int e = 0; e < TABLE_BATCH; ++e) {
            if (at + e < entries) starts[at + e] = sum;
            sum += value[e];
        }
        rows += total;
        __syncthreads();
    }
    i64 slots = 0;
    for (int base = 0; base < buckets; base += Threads) {
        const int bucket = base + threadIdx.x;
        const bool live = bucket < buckets;
        i64 first = 0, here = 0, width = 0, total;
        if (live) {
            const i64 end = bucket + 1 < buckets ? starts[2 * (bucket + 1) * tiles] : rows;
            first = starts[2 * bucket * tiles], here = end - first, width = widths[bucket % levels];
            counts[bucket] = here, counts[buckets + bucket] = end - starts[(2 * bucket + 1) * tiles];
        }
        const i64 before = sum_before_thread<Threads>(here * width, sums, total);
        if (live) {
            tables[bucket] = first, tables[buckets + 1 + bucket] = slots + before;
            tables[2 * (buckets + 1) + bucket] = width;
        }
        slots += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) tables[buckets] = rows, tables[2 * buckets + 1] = slots, tables[3 * buckets + 2] = 0;
}

__global__ void __launch_bounds__(TABLE_THREADS)
sum_ell_rows(i64* starts, i64 tiles, int buckets, const __grid_constant__ Widths given, i64* tables, i64* counts) {
    __shared__ int widths[MOST_WIDTHS];
    if (threadIdx.x < given.count) widths[threadIdx.x] = given.width[threadIdx.x];
    __syncthreads();
    sum_tiles<TABLE_THREADS>(starts, tiles, buckets, widths, given.count, tables, counts);
}

// finished: null, or 0 before the launch and after it. Then the last block does what sum_ell_rows does, whose other arguments follow.
template <class Ptr>
__global__ void __launch_bounds__(TILE_WARPS * 32)
count_ell_rows(const Ptr* __restrict__ indptr, const Ptr* __restrict__ cuts, const u8* __restrict__ split, i64 M, int parts,
               i64 tiles, i64 tile_rows, const __grid_constant__ Widths given, i64* starts, u64* finished, int buckets, i64* tables,
               i64* sizes) {
    __shared__ int widths[MOST_WIDTHS];
    __shared__ i64 counts[TILE_WARPS][MOST_GROUPS];
    const int levels = given.count, groups = 2 * levels, lane = threadIdx.x % 32;
    if (threadIdx.x < levels) widths[threadIdx.x] = given.width[threadIdx.x];
    __syncthreads();
    const Tile tile(M, tiles, tile_rows);
    i64* mine = counts[threadIdx.x / 32];
    if (tile.part < parts) {
        for (int g = lane; g < groups; g += 32) mine[g] = 0;
        const Segments<Ptr> segments{indptr, cuts, M, parts};
        for (i64 row = tile.row; row < tile.last; row += 32) {
            const Lane<Ptr> x(segments, split, tile.part, row, tile.last, widths, levels);
            __syncwarp();
            if (x.first_of_group()) mine[x.group] += x.total;
        }
        __syncwarp();
        for (int g = lane; g < groups; g += 32)
            starts[(static_cast<i64>(tile.part) * groups + g) * tiles + tile.number] = mine[g];
    }
    if (!finished) return;
    if (!is_last_block(finished)) return;
    if (threadIdx.x == 0) *finished = 0;
    sum_tiles<TILE_WARPS * 32>(starts, tiles, buckets, widths, levels, tables, sizes);
}

template <class Ptr, class Row>
__global__ void __launch_bounds__(TILE_WARPS * 32)
place_ell_rows(const Ptr* __restrict__ indptr, const Ptr* __restrict__ cuts, const u8* __restrict__ split, i64 M, int parts,
               i64 tiles, i64 tile_rows, const __grid_constant__ Widths given, const i64* __restrict__ starts,
               Row* __restrict__ row_ids, Span<Ptr>* __restrict__ spans) {
    __shared__ int widths[MOST_WIDTHS];
    __shared__ i64 counts[TILE_WARPS][MOST_GROUPS];  // the next ELL row of each group
    const int levels = given.count, groups = 2 * levels, lane = threadIdx.x % 32;
    if (threadIdx.x < levels) widths[threadIdx.x] = given.width[threadIdx.x];
    __syncthreads();
    const Tile tile(M, tiles, tile_rows);
    if (tile.part >= parts) return;
    const int widest = widths[levels - 1];
    i64* next = counts[threadIdx.x / 32];
    for (int g = lane; g < groups; g += 32) next[g] = starts[(static_cast<i64>(tile.part) * groups + g) * tiles + tile.number];
    const Segments<Ptr> segments{indptr, cuts, M, parts};
    for (i64 row = tile.row; row < tile.last; row += 32) {
        const Lane<Ptr> x(segments, split, tile.part, row, tile.last, widths, levels);
        __syncwarp();
        const i64 chunk0 = next[groups - 1];
        if (x.group >= 0 && !x.widest) {
            const i64 to = next[x.group] + x.before;
            row_ids[to] = static_cast<Row>(x.row);
            spans[to] = Span<Ptr>{x.begin, static_cast<int>(x.length)};
        }
        // ELL rows of the widest split group, dealt to the lanes. Their segments' sums tell whose each of them is.
        const i64 after = x.chunked ? sum_before_lane(x.widest ? static_cast<i64>(x.chunks) : 0) : 0;
        for (i64 base = 0; base < x.chunked; base += 32) {
            const i64 number = base + lane;
            int owner = 0;  // the last lane whose chunks start at `number` or before it; lanes without chunks start where the next does
#pragma unroll
            for (int step = 16; step; step /= 2)
                if (__shfl_sync(~0u, after, owner + step) <= number) owner += step;
            const i64 chunk = number - __shfl_sync(~0u, after, owner);
            const Ptr begin = __shfl_sync(~0u, x.begin, owner), length = __shfl_sync(~0u, x.length, owner);
            if (number < x.chunked) {
                const i64 done = chunk * widest, left = length - done;
                row_ids[chunk0 + number] = static_cast<Row>(row + owner);
                const int items = static_cast<int>(left < widest ? left : widest);
                spans[chunk0 + number] = Span<Ptr>{static_cast<Ptr>(begin + done), items};
            }
        }
        __syncwarp();
        if (x.first_of_group()) next[x.group] += x.total;
    }
}

// A block's first slot: its ELL row, its place there, and the width of its bucket.
struct FirstSlot {
    i64 row;
    u32 place, width;
};

// The slots of a block, which lie in buckets low .. high; Several: in more than one. Every slot is written once, neighbours by
// neighbouring lanes. Loads have no conditions, so that those of all of a thread's slots are in flight together.
template <bool Several, class T, class Idx, class Source, class Ptr>
__device__ __forceinline__ void fill_slots(const Idx* __restrict__ indices, const T* __restrict__ values,
                                           const Span<Ptr>* __restrict__ spans, const Buckets& buckets, FirstSlot first, int low,
                                           int high, i64 start, i64 slots, Idx* __restrict__ to_indices,
                                           T* __restrict__ to_values, Source* __restrict__ source) {
    constexpr int MOST = FILL_THREADS * FILL_BATCH;
    const u32 last = static_cast<u32>(slots - start < MOST ? slots - start : MOST) - 1;
    u32 place[FILL_BATCH];
    Span<Ptr> span[FILL_BATCH];
#pragma unroll
    for (int j = 0; j < FILL_BATCH; ++j) {
        const u32 mine = j * FILL_THREADS + threadIdx.x, offset = mine < last ? mine : last;
        i64 row = first.row;
        u32 at = first.place + offset, width = first.width;  // below 2^21
        if (Several) {
            const int b = low + bucket_of(start + offset, buckets.slots + low, high - low + 1);
            if (b > low) {
                row = buckets.rows[b], at = static_cast<u32>(start + offset - buckets.slots[b]);
                width = static_cast<u32>(buckets.widths[b]);
            }
        }
        const u32 rows = at / width;
        place[j] = at - rows * width, span[j] = spans[row + rows];
    }
    Idx column[FILL_BATCH];
    T value[FILL_BATCH];
#pragma unroll
    for (int j = 0; j < FILL_BATCH; ++j) {
        const Ptr item = span[j].first + (place[j] < static_cast<u32>(span[j].items) ? static_cast<Ptr>(place[j]) : Ptr(0));
        column[j] = indices[item], value[j] = values[item];
    }
#pragma unroll
    for (int j = 0; j < FILL_BATCH; ++j) {
        const u32 offset = j * FILL_THREADS + threadIdx.x;
        const bool live = place[j] < static_cast<u32>(span[j].items);
        if (offset > last) continue;
        to_indices[start + offset] = live ? column[j] : Idx(-1), to_values[start + offset] = live ? value[j] : T(0);
        source[start + offset] = live ? static_cast<Source>(span[j].first + static_cast<Ptr>(place[j])) : Source(-1);
    }
}

template <class T, class Idx, class Source, class Ptr>
__global__ void __launch_bounds__(FILL_THREADS)
fill_ell_slots(const Idx* __restrict__ indices, const T* __restrict__ values, const Span<Ptr>* __restrict__ spans,
               const i64* __restrict__ tables, int count, i64 slots, Idx* __restrict__ to_indices, T* __restrict__ to_values,
               Source* __restrict__ source) {
    __shared__ FirstSlot first;
    __shared__ int low, high;
    const Buckets buckets(tables, count);
    const i64 start = static_cast<i64>(blockIdx.x) * (FILL_THREADS * FILL_BATCH);
    if (threadIdx.x == 0) {
        low = bucket_of(start, buckets.slots, count);
        const i64 at = start - buckets.slots[low], width = buckets.widths[low], row = at / width;
        first.row = buckets.rows[low] + row;
        first.place = static_cast<u32>(at - row * width), first.width = static_cast<u32>(width);
    } else if (threadIdx.x == 32) {
        const i64 end = start + FILL_THREADS * FILL_BATCH;
        high = bucket_of((end < slots ? end : slots) - 1, buckets.slots, count);
    }
    __syncthreads();
    if (low == high)
        fill_slots<false>(indices, values, spans, buckets, first, low, high, start, slots, to_indices, to_values, source);
    else
        fill_slots<true>(indices, values, spans, buckets, first, low, high, start, slots, to_indices, to_values, source);
}
