// C[M,N] = alpha * A[M,K] @ B[K,N] + beta * C + bias, A in CSR, few columns of B, on the CUDA cores. sm_80 and later.
//
//   records  {int64 start, uint32 row, int32 length}[R]  rows of A, longest first, pieces of cut rows before them (row_bins.cuh)
//   indices  int[nnz]       columns          data  T[nnz]    values; nnz < 2^31
//   B        T: element (k, c) at k*ldb + c, or, BCol, at k + c*ldb
//   C        Out: element (i, c) at i*c_row + c*c_col         bias  Out[M], or null
//   cuts, sums, arrived     rows that were cut (`Pieces` in gather.cuh)
//   prefetch  not 0: indices and data are requested for L2 while B is loaded
//
// A slot is LANES lanes of a warp, which have 16 bytes of a row of B each; 2^log slots of a warp compute a row of A (Bell and
// Garland 2009 call this the vector kernel of CSR). A slot loads E neighbouring items, 16 bytes of values; the arrays start
// on 16 bytes. Items before the row, which the first such load may have, and items behind it are left out. NC columns of B
// are in shared memory as rows of NC values, so that the rows of B that a warp reads together cost a few cycles and not a
// line of the cache each. Warps wait for each other only once, for B, and there are about as many warps as rows: what bounds
// the kernel is the bytes of A.
//
// Grid: x and the warps of a block walk the tasks (the slots of a warp, some rows); y: tiles of NC columns.
//   T, Out   value types of A, B and of C; sums are float (double for double)
//   THREADS, BLOCKS  threads of a block; blocks that run on a multiprocessor at a time (__launch_bounds__)
//   U        loads of each array that are in flight together
//   CUT      there are pieces        Epilogue  false: alpha = 1, beta = 0, no bias
#include "spformat/column_panel.cuh"
#include "spformat/csr_items.cuh"

using spformat::Items;
using spformat::Record;
using spformat::Row;
using spformat::Task;

template <class T, class Out, int NC, int THREADS, int BLOCKS, int U, bool CUT, bool BCol, bool Epilogue>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    spmm_csr_vector(const __grid_constant__ spformat::Bins bins, const Record* __restrict__ records,
                    const int* __restrict__ indices, const T* __restrict__ data, long long nnz, int prefetch, int K,
                    const long long* __restrict__ cuts, spformat::sum_t<T>* __restrict__ sums, unsigned* __restrict__ arrived,
                    const T* __restrict__ B, Out* C, int n, long long ldb, long long c_row, long long c_col,
                    const Out* __restrict__ bias, double alpha, double beta) {
  using S = spformat::sum_t<T>;
  using Columns = spformat::ColumnPanel<T, NC, THREADS>;
  constexpr int WARPS = THREADS / 32, E = 16 / sizeof(T), DEPTH = NC * sizeof(T) > 8 ? 2 : E < 4 ? E : 4;
  constexpr int VEC = Columns::VEC, LANES = Columns::LANES, SLOTS = 32 / LANES, LOG_SLOTS = spformat::log2_of(SLOTS);
  extern __shared__ uint4 room[];
  const int lane = threadIdx.x % LANES, slot = threadIdx.x % 32 / LANES, first_col = blockIdx.y * NC;
  const unsigned stride = gridDim.x * WARPS;
  const spformat::ColumnSums<Out, S, Epilogue> result{C, c_row, c_col, n, bias, static_cast<S>(alpha), static_cast<S>(beta)};

  const auto row_of = [&](const Task& task) {
    const Record& record = reinterpret_cast<const Record&>(task.record);
    Row row;
    row.begin = static_cast<unsigned>(record.start), row.end = row.begin + record.length;
    row.first = row.begin / E * E + (slot & ((1 << task.log) - 1)) * E, row.step = E << task.log;
    return row;
  };
  // Neighbouring tasks go to different multiprocessors. One task ahead the record is loaded.
  unsigned at = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  Task task = spformat::locate(bins, records, at, slot, LOG_SLOTS);
  if (prefetch) {
    const long long threads = static_cast<long long>(gridDim.x) * gridDim.y * THREADS;
    const long long thread = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
    spformat::prefetch_l2(indices, nnz * sizeof(int), thread, threads);
    spformat::prefetch_l2(data, nnz * sizeof(T), thread, threads);
  }

  auto* const panel = reinterpret_cast<typename Columns::W*>(room);
  if constexpr (BCol) Columns::from_columns(panel, B, ldb, K, first_col, n);
  else Columns::from_rows(panel, B, ldb, K, first_col, n);
  __syncthreads();

  Items<T, E, U> items;
  Row row = row_of(task);  // not before the panel, whose loads need the registers of the items
  items.fetch(indices, data, row, nnz);
  for (; at < bins.blocks; at += stride) {
    const Task next = spformat::locate(bins, records, at + stride, slot, LOG_SLOTS);
    const Record& record = reinterpret_cast<const Record&>(task.record);
    S sum[VEC] = {};
    while (true) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const auto item = row.first + u * row.step;
#pragma unroll
        for (int g = 0; g < E; g += DEPTH) {
          typename Columns::W words[DEPTH];
          bool live[DEPTH];
#pragma unroll
          for (int d = 0; d < DEPTH; ++d) {
            live[d] = item + g + d >= row.begin && item + g + d < row.end;
            words[d] = typename Columns::W{};
            if (live[d]) words[d] = panel[items.index[u][g + d] * LANES + lane];
          }
#pragma unroll
          for (int d = 0; d < DEPTH; ++d) {
            const S a = live[d] ? spformat::widen(items.value[u][g + d]) : S(0);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += a * spformat::widen(reinterpret_cast<const T*>(&words[d])[v]);
          }
        }
      }
      row.first += U * row.step;
      if (row.first >= row.end) break;
      items.fetch(indices, data, row, nnz);
    }
    row = row_of(next);
    items.fetch(indices, data, row, nnz);  // while the sums are added up
#pragma unroll
    for (int step = 1; step < SLOTS; step *= 2)
      if (step < 1 << task.log)
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[v] += __shfl_down_sync(0xffffffffu, sum[v], step * LANES);
    const bool first = task.live && (slot & ((1 << task.log) - 1)) == 0;
    const int col = first_col + lane * VEC;
    if (CUT && at < bins.pieces) {  // a piece has a warp, whose last to arrive adds all of a row in their order
      const unsigned cut = reinterpret_cast<const Record*>(records)[at].row;
      const long long begin = cuts[3ll * cut + 1], count = cuts[3ll * cut + 2];
      if (first) {
#pragma unroll
        for (int v = 0; v < VEC; ++v)
          if (col + v < n) sums[static_cast<long long>(at) * n + col + v] = sum[v];
        __threadfence();
      }
      __syncwarp();
      bool last = false;
      if (threadIdx.x % 32 == 0) {
        unsigned* const counter = arrived + static_cast<long long>(cut) * gridDim.y + blockIdx.y;
        last = atomicAdd(counter, 1u) + 1 == count;
        if (last) *counter = 0;  // for the next launch
        __threadfence();
      }
      const int mine = first_col + threadIdx.x % 32;
      if (__any_sync(0xffffffffu, last) && threadIdx.x % 32 < NC && mine < n) {
        S total = 0;
#pragma unroll 4
        for (long long i = begin; i < begin + count; ++i) total += __ldcg(sums + i * n + mine);
        result.store(static_cast<unsigned>(cuts[3ll * cut]), mine, total);
      }
    } else if (first) {
      result.store(record.row, col, sum);
    }
    task = next;
  }
}
