// ELL buckets as a dense matrix, every element written once. sm_80 and later. Launcher: ell_buckets_to_dense.py.
//
// What a row has in a part of the columns is one run of slots, columns ascending: an ELL row, or chunks of the widest bucket,
// which are neighbours and full but for the last.
//
//   row_ids  Row[R], indices Idx[S], data T[S]   a valid ELL bucket matrix; values as unsigned words of their width
//   tables   i64[3][buckets+1]   as ell_buckets.cuh has them; or null, then `few` holds it
//   runs     Run[parts][M]       zeros before the first launch, which finds them; an empty one stays zero
//   x        T[M, K]             the result, zeros where nothing is stored; K may be greater than the columns of the parts
#include "spformat/ell_buckets.cuh"
#include "spformat/expand_rows.cuh"
#include "spformat/lower_bound.cuh"

using namespace spformat;
using ell_buckets::bucket_of;
using ell_buckets::Buckets;

constexpr int THREADS = 256;

// Slots begin .. end-1.
template <class Slot> struct __align__(2 * sizeof(Slot)) Run {
    Slot begin, end;
};

template <class Row, class Idx, class Slot>
__global__ void __launch_bounds__(THREADS)
find_runs(const Row* __restrict__ row_ids, const Idx* __restrict__ indices, const i64* __restrict__ tables,
          const __grid_constant__ ell_buckets::FewBuckets few, int count, int levels,
          i64 rows, i64 M, Run<Slot>* __restrict__ runs) {
    const i64 row = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (row >= rows) return;
    const Buckets buckets(tables ? tables : few.table, count);
    const int b = bucket_of(row, buckets.rows, count);
    const i64 slot = buckets.slot(b, row), of = row_ids[row];
    Run<Slot>& run = runs[b / levels * M + of];
    if (row == buckets.rows[b] || row_ids[row - 1] != of) run.begin = static_cast<Slot>(slot);
    if (row + 1 == buckets.rows[b + 1] || row_ids[row + 1] != of)
        run.end = static_cast<Slot>(slot + ell_buckets::items_of(indices + slot, static_cast<int>(buckets.widths[b])));
}

// Each warp writes one image: `width` columns of one row, or `rows` whole rows (then segments = 1 and width = K). `lanes`
// lanes together take the runs that reach into it, one after another.
template <class T, class Idx, class Slot>
__global__ void __launch_bounds__(ROW_WARPS * 32)
expand_runs(const Run<Slot>* __restrict__ runs, const Idx* __restrict__ indices, const T* __restrict__ values, i64 M, i64 K,
            int parts, i64 part_size, T* __restrict__ x, i64 segments, int width, int rows, int lanes) {
    constexpr int BATCH = 8;  // items of a lane whose loads are in flight together
    using Offset = typename Unsigned<sizeof(Idx)>::type;  // from the first column of the image; huge before it
    __shared__ __align__(16) unsigned char images[ROW_WARPS][ROW_IMAGE + 16];
    const int lane = threadIdx.x % 32;
    const i64 task = static_cast<i64>(blockIdx.x) * ROW_WARPS + threadIdx.x / 32, group = task / segments;
    const i64 row0 = group * rows, c0 = (task - group * segments) * width;
    if (row0 >= M) return;
    const int live = static_cast<int>(M - row0 < rows ? M - row0 : rows);
    const int wide = static_cast<int>(K - c0 < width ? K - c0 : width);
    const int count = (live - 1) * width + wide;
    T* to = x + row0 * K + c0;
    T* image = reinterpret_cast<T*>(images[threadIdx.x / 32]);
    const int head = head_of(to);
    clear_image(image, head + count, lane, 32);
    __syncwarp();
    const int first = static_cast<int>(c0 / part_size), across = static_cast<int>((c0 + wide - 1) / part_size) - first + 1;
    for (int base = 0; base < live * across; base += 32 / lanes) {
        const int number = base + lane / lanes, r = number / across, part = first + number % across;
        Run<Slot> run{0, 0};
        if (number < live * across && part < parts) run = runs[part * M + row0 + r];
        i64 at = run.begin;
        const i64 end = run.end;
        if (lanes == 32) {
            if (part * part_size < c0) at = warp_lower_bound(at, end, [&](i64 i) { return indices[i] < c0; });
        } else if (part * part_size < c0) {
            at = first_from(indices, at, end, c0);
        }
        const int most = static_cast<int>(end - at < wide ? end - at : wide);  // columns differ, so there are no more
        const Idx* columns = indices + at;
        const T* items = values + at;
        T* line = image + head + r * width;
        for (int i = lane % lanes; i < most; i += lanes * BATCH) {
            Offset offset[BATCH];
            T value[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                offset[b] = wide, value[b] = 0;
                if (i + b * lanes < most) {
                    offset[b] = static_cast<Offset>(columns[i + b * lanes]) - static_cast<Offset>(c0);
                    value[b] = items[i + b * lanes];
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (offset[b] < static_cast<Offset>(wide)) line[offset[b]] = value[b];
            if (offset[BATCH - 1] >= static_cast<Offset>(wide)) break;  // what follows belongs to later images
        }
    }
    __syncwarp();
    constexpr int P = 16 / sizeof(T);
    for (int q = lane; q * P < head + count; q += 32) store_unit(to, image, head, count, q);
}
