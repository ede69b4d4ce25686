// C[M,N] = A[M,K] @ B[K,N], A in CSR, B and C row-major.
//
//   records  {int64 start, uint32 row, int32 length}[R]  rows of A sorted by length, longest first; the first
//            bins.pieces records are pieces of rows that were cut (`Pieces` in gather.cuh)
//   indices  Index[nnz]     columns          data  T[nnz]    values
//   B        T[K, ldb bytes]                 C     Out[M, ldc]
//
// Grid: x walks the blocks of all bins (longest rows first), y the column tiles, so that one column panel of B is in
// L2 at a time. A block of a bin holds SLOTS >> log_slots rows, each dealt to 1 << log_slots slots (gather.cuh).
// A grid narrower than bins.blocks gives every block several tasks, whose dependent loads then overlap.
// Every row of A has exactly one record, or pieces; empty rows too: all of C is written.
//
// T, Out   value types of A, B and of C; sums are float (double for double)
// VEC      columns per load of B: VEC * sizeof(T) <= 16 bytes, and B, C, ldb, ldc and n are multiples of it
// LANES    lanes per slot; TILES: loads per lane and item; a column tile is LANES * VEC * TILES columns wide
// BATCH    items a slot takes at a time; DEPTH: of these, items whose loads are in flight together
// CUT      there are pieces
// RESIDENT the block first copies its column panel of B, all K rows, to dynamic shared memory, and gathers from there
// BLOCKS   blocks of THREADS threads per SM that the registers must allow; it also keeps ptxas from trading the
//          loads in flight for more occupancy
//
// Row-length binning after Sputnik (Gale et al., SC'20) and RoDe (Pang et al., PPoPP'24).
#include "spformat/launch_order.cuh"
#include "spformat/row_bins.cuh"

using spformat::Bins;
using spformat::Record;
using spformat::Task;
using spformat::wait_for_launch_before;

template <class T, class Out, class Index, int VEC, int LANES, int TILES, int BATCH, int DEPTH, int THREADS,
          int BLOCKS, bool CUT, bool RESIDENT>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    spmm_csr(const __grid_constant__ Bins bins, const Record* __restrict__ records, const Index* __restrict__ indices,
             const T* __restrict__ data, long long nnz, long long K, const long long* __restrict__ cuts,
             spformat::sum_t<T>* __restrict__ sums, unsigned* __restrict__ arrived, const T* __restrict__ B, Out* __restrict__ C, int n, int ldb, long long ldc, long long prefetch) {
  static_assert(VEC * sizeof(T) <= 16, "a load of B is at most 16 bytes");
  static_assert((LANES & (LANES - 1)) == 0 && LANES <= 32, "a slot is a power of two of lanes inside a warp");
  static_assert(BATCH % DEPTH == 0, "a batch is whole groups of DEPTH loads");
  using S = spformat::sum_t<T>;
  using Batch = spformat::Batch<T, Index, LANES, BATCH>;
  constexpr int SLOTS = THREADS / LANES, LOG_SLOTS = spformat::log2_of(SLOTS);
  __shared__ S scratch[THREADS / 32 * TILES * VEC * LANES];
  const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;

  const spformat::Pieces<S> pieces{cuts, sums, arrived};

  // Two tasks ahead the record is loaded, one task ahead the first batch of items.
  Task task = spformat::locate(bins, records, blockIdx.x, slot, LOG_SLOTS);
  Task next = spformat::locate(bins, records, blockIdx.x + gridDim.x, slot, LOG_SLOTS);
  const long long threads = static_cast<long long>(gridDim.x) * gridDim.y * THREADS;
  const long long thread = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
  if (prefetch) {
    spformat::prefetch_l2(indices, nnz * sizeof(Index), thread, threads);
    spformat::prefetch_l2(data, nnz * sizeof(T), thread, threads);
  }
  wait_for_launch_before();
  spformat::prefetch_l2(B, prefetch, thread, threads);  // bytes of B, 0: none
  const auto fetch = [&](const Task& t) {
    Batch batch;
    const int part = slot & ((1 << t.log) - 1);
    spformat::fetch_first(batch, reinterpret_cast<const Record&>(t.record), part, indices, data, lane);
    return batch;
  };
  Batch batch = fetch(task);

  constexpr int ROW = TILES * LANES;  // words of a row of a panel
  const int col = (blockIdx.y * ROW + lane) * VEC, width = n - col;
  const auto panel = [&] {
    if constexpr (RESIDENT) {
      using Panel = spformat::SharedPanel<T, VEC, LANES, ROW>;
      extern __shared__ uint4 resident[];
      auto* words = reinterpret_cast<typename Panel::W*>(resident);
      Panel::template fill<THREADS>(words, B, ldb, static_cast<int>(K), blockIdx.y * ROW * VEC, n);
      __syncthreads();
      return Panel{words + lane};
    } else {
      return spformat::GlobalPanel<T, VEC, LANES>{B + col, ldb, width};
    }
  }();
  for (unsigned block = blockIdx.x; block < bins.blocks; block += gridDim.x) {
    const Task after = spformat::locate(bins, records, block + 2 * gridDim.x, slot, LOG_SLOTS);
    const Batch next_batch = fetch(next);
    const Record& record = reinterpret_cast<const Record&>(task.record);
    const int part = slot & ((1 << task.log) - 1);
    S sum[TILES][VEC] = {};
    spformat::gather_row<DEPTH, VEC, TILES>(sum, batch, indices + record.start, data + record.start, record.length, part,
                                            task.log, panel, lane);
    spformat::combine_slots<LANES, TILES, VEC>(sum, task.log, scratch);
    const bool first = task.live && part == 0;
    if (CUT && block < bins.pieces)  // known of the block, so that the compiler sees its warps whole
      spformat::store_piece<LANES>(C, ldc, pieces, record.row, block, n, col, sum, first);
    else if (first)
      spformat::store_row<LANES>(C + static_cast<long long>(record.row) * ldc + col, sum, width);
    task = next, next = after, batch = next_batch;
  }
}
