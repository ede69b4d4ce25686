// C[M,N] = alpha * A[M,K] @ B[K,N] + beta * C + bias, A in CSR, on the CUDA cores, in torch's layout at its best. sm_80 and later.
//
//   indptr  Ptr[M+1]        indices  int[nnz]  columns        data  T[nnz]  values; nnz < 2^31
//   B       T: element (k, c) at k*ldb + c, or, BCol, at k + c*ldb
//   C       Out: element (i, c) at i*c_row + c*c_col          bias  Out[M], or null
//   prefetch  not 0: indices and data are requested for L2 while B is loaded
//
// A block keeps NC columns of B in shared memory, all K rows of them and one of zeros. Its warps take GROUP neighbouring rows of A at
// a time. LANES lanes have 16 bytes of a row of B each and are a slot; 2^LOG slots compute a row of A, each E neighbouring items at a
// time. Items before the row, which the first such load may have, and items behind it meet the row of zeros. The sums of a group
// meet in shared memory and leave along the lines of C, so that neighbouring rows of a column-major C are written together: rows
// that are sorted by length, as spmm_csr_vector.cu has them, write each value to a sector of its own.
//
// Grid: x and the warps of a block walk the groups; y: tiles of NC columns.
//   T, Out   value types of A, B and of C; sums are float (double for double)
//   THREADS, BLOCKS  threads of a block; blocks that run on a multiprocessor at a time (__launch_bounds__)
//   Epilogue  false: alpha = 1, beta = 0, no bias
#include "spformat/column_panel.cuh"
#include "spformat/csr_items.cuh"

using spformat::Items;
using spformat::Row;

// The sums of 2^LOG slots that are STEP lanes apart, in a fixed order. Each level halves what a lane has left: lane `part` ends
// with `width` sums, those from `first` on. All lanes of the warp call it.
template <int LOG, int STEP, int VEC, class S> struct Halved {
  static constexpr int WIDTH = VEC >> LOG > 0 ? VEC >> LOG : 1;

  static __device__ __forceinline__ int first(int part) {
    int at = 0;
#pragma unroll
    for (int level = 0; level < LOG; ++level)
      if (part >> level & 1) at += VEC >> (level + 1);
    return at;
  }
  static __device__ __forceinline__ void add(S (&sum)[VEC], int part) {
#pragma unroll
    for (int level = 0; level < LOG; ++level) {
      const int half = VEC >> (level + 1);
      const bool upper = part >> level & 1;
      if (half > 0) {
#pragma unroll
        for (int v = 0; v < VEC / 2; ++v)
          if (v < half) {
            const S given = upper ? sum[v] : sum[v + half], kept = upper ? sum[v + half] : sum[v];
            sum[v] = kept + __shfl_xor_sync(0xffffffffu, given, STEP << level);
          }
      } else {
        sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], STEP << level);
      }
    }
  }
};

template <class T, class Out, class Ptr, int NC, int THREADS, int BLOCKS, int LOG, int GROUP, bool BCol, bool Epilogue>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    spmm_csr_panel(const Ptr* __restrict__ indptr, const int* __restrict__ indices, const T* __restrict__ data, long long nnz,
                   int prefetch, int M, int K, const T* __restrict__ B, Out* C, int n, long long ldb, long long c_row,
                   long long c_col, const Out* __restrict__ bias, double alpha, double beta) {
  using S = spformat::sum_t<T>;
  using Columns = spformat::ColumnPanel<T, NC, THREADS>;
  constexpr int WARPS = THREADS / 32, E = sizeof(T) == 8 ? 2 : 4, U = 2, VEC = Columns::VEC, LANES = Columns::LANES;
  constexpr int SLOTS = 32 / LANES, ROWS = SLOTS >> LOG, LINE = GROUP + 1;
  static_assert(ROWS > 0 && GROUP <= 32 && GROUP % ROWS == 0, "passes of whole rows");
  using Sums = Halved<LOG, LANES, VEC, S>;
  extern __shared__ uint4 room[];
  auto* const panel = reinterpret_cast<typename Columns::W*>(room);
  const int thread = threadIdx.x % 32, lane = thread % LANES, slot = thread / LANES, part = slot & ((1 << LOG) - 1);
  const int first_col = blockIdx.y * NC;
  S* const sums = reinterpret_cast<S*>(panel + (K + 1ll) * LANES) + threadIdx.x / 32 * NC * LINE;  // [NC][LINE]
  const spformat::ColumnSums<Out, S, Epilogue> result{C, c_row, c_col, n, bias, static_cast<S>(alpha), static_cast<S>(beta)};

  // Where the rows of a group begin and end: lane i of the warp has those of row i of the group.
  struct Bounds {
    unsigned begin, end;
  };
  const auto bounds_of = [&](int group) {
    const long long row = static_cast<long long>(group) * GROUP + thread % GROUP;
    Bounds b{0, 0};
    if (row < M) b.begin = static_cast<unsigned>(indptr[row]), b.end = static_cast<unsigned>(indptr[row + 1]);
    return b;
  };
  const auto row_of = [&](const Bounds& b, int pass) {
    const int at = pass * ROWS + (slot >> LOG);
    Row row;
    row.begin = __shfl_sync(0xffffffffu, b.begin, at), row.end = __shfl_sync(0xffffffffu, b.end, at);
    row.first = row.begin / E * E + part * E, row.step = E << LOG;
    return row;
  };
  // Neighbouring groups go to different multiprocessors. One group ahead the bounds are loaded.
  const int groups = (M + GROUP - 1) / GROUP, stride = gridDim.x * WARPS;
  int group = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  Bounds bounds = bounds_of(group);
  if (prefetch) {
    const long long threads = static_cast<long long>(gridDim.x) * gridDim.y * THREADS;
    const long long number = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
    spformat::prefetch_l2(indices, nnz * sizeof(int), number, threads);
    spformat::prefetch_l2(data, nnz * sizeof(T), number, threads);
  }
  if constexpr (BCol) Columns::from_columns(panel, B, ldb, K, first_col, n);
  else Columns::from_rows(panel, B, ldb, K, first_col, n);
  if (threadIdx.x < LANES) panel[K * LANES + threadIdx.x] = typename Columns::W{};  // what meets items of other rows
  __syncthreads();

  Items<T, E, U> items;
  Row row = row_of(bounds, 0);
  items.fetch(indices, data, row, nnz);
  for (; group < groups; group += stride) {
    const Bounds next = bounds_of(group + stride);
#pragma unroll 1
    for (int pass = 0; pass < GROUP / ROWS; ++pass) {
      S sum[VEC] = {};
      while (true) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const unsigned item = row.first + u * row.step;
          typename Columns::W words[E];
          S a[E];
#pragma unroll
          for (int e = 0; e < E; ++e) {
            const bool live = item + e >= row.begin && item + e < row.end;
            words[e] = panel[(live ? items.index[u][e] : K) * LANES + lane];
            a[e] = live ? spformat::widen(items.value[u][e]) : S(0);
          }
#pragma unroll
          for (int e = 0; e < E; ++e)
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += a[e] * spformat::widen(reinterpret_cast<const T*>(&words[e])[v]);
        }
        row.first += U * row.step;
        if (row.first >= row.end) break;
        items.fetch(indices, data, row, nnz);
      }
      const int mine = pass * ROWS + (slot >> LOG);
      row = pass + 1 < GROUP / ROWS ? row_of(bounds, pass + 1) : row_of(next, 0);
      items.fetch(indices, data, row, nnz);  // while the sums are added up
      Sums::add(sum, part);
      if (1 << LOG <= VEC || part < VEC) {
        const int first = lane * VEC + Sums::first(part);
#pragma unroll
        for (int w = 0; w < Sums::WIDTH; ++w) sums[(first + w) * LINE + mine] = sum[w];
      }
    }
    __syncwarp();
    const long long top = static_cast<long long>(group) * GROUP;
#pragma unroll 4
    for (int i = thread; i < NC * GROUP; i += 32) {
      const int r = c_col == 1 ? i / NC : i % GROUP, c = c_col == 1 ? i % NC : i / GROUP;
      if (top + r < M) result.store(static_cast<unsigned>(top + r), first_col + c, sums[c * LINE + r]);
    }
    __syncwarp();
    bounds = next;
  }
}
