// C[M,N] = alpha * A[M,K] @ B[K,N] + beta * C + bias, A in CSR, few columns of B, on the CUDA cores. sm_80 and later.
//
//   records  {int64 start, uint32 row, int32 length}[R]  rows of A, longest first, pieces of cut rows before them (row_bins.cuh)
//   indices  Index[nnz]     columns          data  T[nnz]    values
//   B        T: element (k, c) at k*ldb + c, or, BCol, at k + c*ldb
//   C        Out: element (i, c) at i*c_row + c*c_col         bias  Out[M], or null
//   cuts, sums, arrived     rows that were cut (`Pieces` in gather.cuh)
//
// A block first copies NC columns of B, all K rows of them, to shared memory as rows of NC values, whatever the layout of B: the
// transpose of a column-major B is part of that copy. Then it gathers rows of B from there: a row of 32 bytes takes shared memory
// a quarter of the time that it takes the L2 cache, and no second launch has to prepare B, turn C or add a bias.
//
// A slot, which is LANES lanes of a warp, computes a row or a part of one; each lane has VEC columns. 2^log slots share a row
// and take its items in turn, one by one, so that a warp loads neighbouring items together; the lanes of a slot load the
// same item. Sums of slots, and of the pieces of a row, are added in a fixed order: the same operands give the same bits.
//
// Grid: x walks the tasks of all bins, a block takes several of them; y: tiles of NC columns.
//   T, Out   value types of A, B and of C; sums are float (double for double)
//   U        items of a slot whose loads are in flight together, and as many of the next step
//   CUT      there are pieces        Epilogue  false: alpha = 1, beta = 0, no bias
#include "spformat/column_panel.cuh"

using spformat::Bins;
using spformat::load_if;
using spformat::Record;
using spformat::Task;
using spformat::word_t;

// U items of a row as one slot takes them, 2^log apart.
template <class T, class Index, int U> struct Items {
  int column[U];
  word_t<sizeof(T)> value[U];

  // The items at these pointers; `left` (<= 0: none): items from there to the end of the row.
  __device__ __forceinline__ void fetch(const Index* indices, const T* data, int left, int log) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = u << log;
      const bool live = at < left;
      const auto k = load_if(reinterpret_cast<const word_t<sizeof(Index)>*>(indices + at), live);
      value[u] = load_if(reinterpret_cast<const word_t<sizeof(T)>*>(data + at), live);
      column[u] = live ? static_cast<int>(reinterpret_cast<const Index&>(k)) : -1;
    }
  }
};

template <class T, class Out, class Index, int NC, int THREADS, int BLOCKS, int U, bool CUT, bool BCol, bool Epilogue>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    spmm_csr_tokens(const __grid_constant__ Bins bins, const Record* __restrict__ records, const Index* __restrict__ indices,
                    const T* __restrict__ data, long long nnz, int prefetch, int K, const long long* __restrict__ cuts,
                    spformat::sum_t<T>* __restrict__ sums, unsigned* __restrict__ arrived, const T* __restrict__ B, Out* C, int n,
                    long long ldb, long long c_row, long long c_col, const Out* __restrict__ bias, double alpha, double beta) {
  using S = spformat::sum_t<T>;
  using Columns = spformat::ColumnPanel<T, NC, THREADS>;
  constexpr int VEC = Columns::VEC, LANES = Columns::LANES, DEPTH = U < 4 ? U : 4;
  constexpr int SLOTS = THREADS / LANES, LOG_SLOTS = spformat::log2_of(SLOTS);
  static_assert(VEC * LANES == NC && LANES <= 8, "a row of B is a power of two of words, at most 128 bytes");
  static_assert(U % DEPTH == 0, "a step is whole groups of DEPTH rows of B");
  extern __shared__ uint4 room[];
  __shared__ S scratch[THREADS / 32 * NC];
  __shared__ bool last;
  const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES, first_col = blockIdx.y * NC;
  const spformat::ColumnSums<Out, S, Epilogue> result{C, c_row, c_col, n, bias, static_cast<S>(alpha), static_cast<S>(beta)};

  // Two tasks ahead the record is loaded, one task ahead the first items.
  Task task = spformat::locate(bins, records, blockIdx.x, slot, LOG_SLOTS);
  Task next = spformat::locate(bins, records, blockIdx.x + gridDim.x, slot, LOG_SLOTS);
  if (prefetch) {
    const long long threads = static_cast<long long>(gridDim.x) * gridDim.y * THREADS;
    const long long thread = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
    spformat::prefetch_l2(indices, nnz * sizeof(Index), thread, threads);
    spformat::prefetch_l2(data, nnz * sizeof(T), thread, threads);
  }
  const auto fetch = [&](const Task& t) {
    Items<T, Index, U> items;
    const Record& record = reinterpret_cast<const Record&>(t.record);
    const int part = slot & ((1 << t.log) - 1);
    items.fetch(indices + record.start + part, data + record.start + part, record.length - part, t.log);
    return items;
  };
  Items<T, Index, U> items = fetch(task);

  auto* const panel = reinterpret_cast<typename Columns::W*>(room);
  if constexpr (BCol) Columns::from_columns(panel, B, ldb, K, first_col, n);
  else Columns::from_rows(panel, B, ldb, K, first_col, n);
  __syncthreads();

  for (unsigned block = blockIdx.x; block < bins.blocks; block += gridDim.x) {
    const Task after = spformat::locate(bins, records, block + 2 * gridDim.x, slot, LOG_SLOTS);
    const Items<T, Index, U> next_items = fetch(next);
    const Record& record = reinterpret_cast<const Record&>(task.record);
    const int part = slot & ((1 << task.log) - 1), step = U << task.log;
    const Index* k_at = indices + record.start + part;
    const T* value_at = data + record.start + part;
    S sum[1][VEC] = {};
    for (int left = record.length - part; left > 0;) {
      Items<T, Index, U> following;
      k_at += step, value_at += step, left -= step;
      following.fetch(k_at, value_at, left, task.log);
#pragma unroll
      for (int g = 0; g < U; g += DEPTH) {
        typename Columns::W words[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
          words[d] = typename Columns::W{};
          if (items.column[g + d] >= 0) words[d] = panel[items.column[g + d] * LANES + lane];
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
          const S a = spformat::widen(reinterpret_cast<const T&>(items.value[g + d]));
#pragma unroll
          for (int v = 0; v < VEC; ++v) sum[0][v] += a * spformat::widen(reinterpret_cast<const T*>(&words[d])[v]);
        }
      }
      items = following;
    }
    spformat::combine_slots<LANES, 1, VEC>(sum, task.log, scratch);
    const bool first = task.live && part == 0;
    if (CUT && block < bins.pieces) {  // known of the block, so that the compiler sees its warps whole
      if (first) {
#pragma unroll
        for (int v = 0; v < VEC; ++v)
          if (first_col + lane * VEC + v < n) sums[static_cast<long long>(block) * n + first_col + lane * VEC + v] = sum[0][v];
        __threadfence();
      }
      __syncthreads();
      const unsigned cut = reinterpret_cast<const Record*>(records)[block].row;
      const long long begin = cuts[3ll * cut + 1], count = cuts[3ll * cut + 2];
      if (threadIdx.x == 0) {
        unsigned* const counter = arrived + static_cast<long long>(cut) * gridDim.y + blockIdx.y;
        last = atomicAdd(counter, 1u) + 1 == count;
        if (last) *counter = 0;  // for the next launch
        __threadfence();
      }
      __syncthreads();
      if (last && threadIdx.x < NC && first_col + threadIdx.x < n) {  // all pieces, in their order
        S total = 0;
#pragma unroll 4
        for (long long i = begin; i < begin + count; ++i) total += __ldcg(sums + i * n + first_col + threadIdx.x);
        result.store(static_cast<unsigned>(cuts[3ll * cut]), first_col + threadIdx.x, total);
      }
      __syncthreads();  // before `last` changes
    } else if (first) {
      result.store(record.row, first_col + lane * VEC, sum[0]);
    }
    task = next, next = after, items = next_items;
  }
}
