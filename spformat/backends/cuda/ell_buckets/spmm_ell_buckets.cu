// C[M,N] = A[M,K] @ B[K,N], A in ELL buckets, B and C row-major.
//
//   row_ids  Row[R]      row of each ELL row          indices  Index[S]   columns, negative = padding
//   data     T[S]        values                       B  T[K, ldb bytes]  C  Out[M, ldc]
//   records  {int64 start, uint32 row, int32 length}  stretches of split rows: neighbouring ELL rows of one row in one
//            bucket; then the rows that own no ELL row, length 0. The first table.pieces records belong to rows with
//            several stretches (`Pieces` in gather.cuh)
//
// Where many rows have items in several parts of K, each part has a launch of its own, and the rows that a former launch
// has stored are read from C and added to (ADD; Out is then the type of the sums): no workspace, always the same order,
// and one part of B in L2 at a time.
//
// Grid: x walks the blocks of all bins, y the column tiles. A bin is a bucket's direct ELL rows, or records of one size.
// Every block has the same number of stored slots: a slot of lanes takes 8 / width ELL rows of a bucket narrower than 8,
// one ELL row, or a 2^-log part of one. Where items of direct rows lie follows from the bin: nothing is loaded to find
// them. A padded slot loads nothing.
//
// Template parameters as in spmm_csr.cu; Row is the type of row_ids; ADD: there are sums to add to C.
// Buckets after SparseTIR (Ye et al., ASPLOS'23).
#include "spformat/gather.cuh"
#include "spformat/launch_order.cuh"

using spformat::Record;
using spformat::wait_for_launch_before;

constexpr int MAX_BINS = 32, NARROW = 8;

struct Bin {
  unsigned first_block;
  short log_width;  // of a bucket; -1: records; -2: records whose sums are added to C
  short log_slots;
  long long first, end;  // ELL rows or records
  long long start;       // of a bucket: where the items of ELL row `first` are
};

struct Bins {
  unsigned blocks;
  unsigned count;
  long long pieces;
  Bin bin[MAX_BINS];
};

// What a slot of one block works on; the record, or the row of a wide bucket, is on its way.
struct Task {
  uint4 record;  // a Record
  long long ell_row;
  int log;
  int log_width;  // of a bucket narrower than 8; -2: the sum is added to C; else -1
  bool live;
};

template <class Row>
__device__ __forceinline__ Task locate(const Bins& bins, const Record* records, const Row* row_ids, unsigned block, int slot,
                                       int log_all) {
  Task task{{}, 0, 0, -1, false};
  if (block >= bins.blocks) return task;
  unsigned i = 0;
  while (i + 1 < bins.count && block >= bins.bin[i + 1].first_block) ++i;
  const Bin& bin = bins.bin[i];
  Record& record = reinterpret_cast<Record&>(task.record);
  const long long local = block - bin.first_block;
  const int log_width = bin.log_width;
  if (log_width >= 0 && 1 << log_width < NARROW) {
    task.log_width = log_width;
    const long long skip = ((local << log_all) + slot) * (NARROW >> log_width);
    task.ell_row = bin.first + skip;
    record.start = bin.start + (skip << log_width);
    const long long items = (bin.end - task.ell_row) << log_width;
    record.length = items > NARROW ? NARROW : static_cast<int>(items);
    return task;
  }
  task.log = bin.log_slots;
  const long long skip = (local << (log_all - task.log)) + (slot >> task.log), at = bin.first + skip;
  task.live = at < bin.end;
  if (log_width >= 0) {
    record.start = bin.start + (skip << log_width);
    record.length = task.live ? 1 << log_width : 0;
    const auto row = spformat::load_if(reinterpret_cast<const spformat::word_t<sizeof(Row)>*>(row_ids + at), task.live);
    record.row = static_cast<unsigned>(reinterpret_cast<const Row&>(row));
  } else {
    task.log_width = log_width;
    task.record = spformat::load_if(reinterpret_cast<const uint4*>(records + at), task.live);
  }
  return task;
}

template <class T, class Out, class Row, class Index, int VEC, int LANES, int TILES, int BATCH, int DEPTH, int THREADS,
          int BLOCKS, bool CUT, bool ADD>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    spmm_ell_buckets(const __grid_constant__ Bins bins, const Record* __restrict__ records,
                     const Row* __restrict__ row_ids, const Index* __restrict__ indices, const T* __restrict__ data,
                     const long long* __restrict__ cuts, spformat::sum_t<T>* __restrict__ sums,
                     unsigned* __restrict__ arrived, const T* __restrict__ B, Out* __restrict__ C, int n, int ldb, long long ldc, long long prefetch) {
  static_assert(VEC * sizeof(T) <= 16, "a load of B is at most 16 bytes");
  static_assert((LANES & (LANES - 1)) == 0 && LANES <= 32, "a slot is a power of two of lanes inside a warp");
  static_assert(BATCH % DEPTH == 0 && BATCH >= NARROW, "a batch is whole groups of DEPTH loads, and holds 8 items");
  using S = spformat::sum_t<T>;
  using Batch = spformat::Batch<T, Index, LANES, BATCH>;
  constexpr int SLOTS = THREADS / LANES, LOG_SLOTS = spformat::log2_of(SLOTS);
  constexpr int HELD = NARROW > LANES ? NARROW / LANES : 1;
  __shared__ S scratch[THREADS / 32 * TILES * VEC * LANES];
  const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;

  const spformat::Pieces<S> pieces{cuts, sums, arrived};

  // Two tasks ahead the record is loaded, one task ahead the first batch of items.
  Task task = locate(bins, records, row_ids, blockIdx.x, slot, LOG_SLOTS);
  Task next = locate(bins, records, row_ids, blockIdx.x + gridDim.x, slot, LOG_SLOTS);
  wait_for_launch_before();
  if (prefetch) {  // bytes of B
    const long long threads = static_cast<long long>(gridDim.x) * gridDim.y * THREADS;
    const long long thread = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
    spformat::prefetch_l2(B, prefetch, thread, threads);
  }
  const auto fetch = [&](const Task& t) {
    Batch batch;
    const int part = slot & ((1 << t.log) - 1);
    spformat::fetch_first(batch, reinterpret_cast<const Record&>(t.record), part, indices, data, lane);
    return batch;
  };
  Batch batch = fetch(task);

  const int col = (blockIdx.y * TILES * LANES + lane) * VEC, width = n - col;
  const spformat::GlobalPanel<T, VEC, LANES> panel{B + col, ldb, width};
  for (unsigned block = blockIdx.x; block < bins.blocks; block += gridDim.x) {
    const Task after = locate(bins, records, row_ids, block + 2 * gridDim.x, slot, LOG_SLOTS);
    const Record& record = reinterpret_cast<const Record&>(task.record);
    S sum[TILES][VEC] = {};
    Batch next_batch;
    if (task.log_width >= 0) {  // several ELL rows: store a sum where one ends
      Row rows[HELD];
#pragma unroll
      for (int h = 0; h < HELD; ++h) {
        const int j = h * LANES + lane;
        rows[h] = j < NARROW && j < record.length ? row_ids[task.ell_row + (j >> task.log_width)] : Row(-1);
      }
      next_batch = fetch(next);
      const int mask = (1 << task.log_width) - 1;
#pragma unroll
      for (int g = 0; g < NARROW; g += DEPTH) {
        spformat::word_t<sizeof(T) * VEC> words[DEPTH][TILES];
        spformat::load_items<DEPTH, TILES>(words, batch, g, panel);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
          spformat::add_item<VEC, TILES>(sum, batch, g + d, words[d]);
          const Row row = spformat::broadcast<LANES>(rows, g + d);
          if (((g + d) & mask) == mask) {
            if (row >= 0) spformat::store_row<LANES>(C + static_cast<long long>(row) * ldc + col, sum, width);
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
              for (int v = 0; v < VEC; ++v) sum[t][v] = 0;
          }
        }
      }
    } else {
      next_batch = fetch(next);
      const int part = slot & ((1 << task.log) - 1);
      spformat::gather_row<DEPTH, VEC, TILES>(sum, batch, indices + record.start, data + record.start, record.length, part,
                                              task.log, panel, lane);
      spformat::combine_slots<LANES, TILES, VEC>(sum, task.log, scratch);
      const bool first = task.live && part == 0;
      if (CUT && block < bins.pieces)  // known of the block, so that the compiler sees its warps whole
        spformat::store_piece<LANES>(C, ldc, pieces, record.row, block, n, col, sum, first);
      else if (first) {
        Out* row = C + static_cast<long long>(record.row) * ldc + col;
        if constexpr (ADD)
          if (task.log_width == -2) spformat::add_row<LANES>(sum, row, width);
        spformat::store_row<LANES>(row, sum, width);
      }
    }
    task = next, next = after, batch = next_batch;
  }
}
