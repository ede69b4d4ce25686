// C[M,N] = alpha * A[M,K] @ B[K,N] + beta * C + bias, A in SR-BCRS(t, g) with 16-bit values, few columns of B, on the CUDA
// cores. sm_80 and later.
//
//   first, pieces  A in slots (include/spformat/mma_fragments.cuh)
//   B   T: element (k, c) at k*ldb + c, or, BCol, at k + c*ldb
//   C   Out: element (i, c) at i*c_row + c*c_col         bias  Out[M], or null
//   prefetch  not 0: the slots are requested for L2 while B is loaded
//
// NC columns of B are in shared memory as rows of NC values. The warps of a block share the chunks of a panel. A quarter of a
// warp takes eight rows of the panel: each of its lanes loads the slots of two places of a step, 16 bytes each, and multiplies
// their eight values with one row of B. Sums of lanes, and of warps, are added in a fixed order.
//
// Grid: x walks panels; y: tiles of NC columns.
//   T, Out   value types of A, B and of C; sums are float
//   THREADS, BLOCKS  threads of a block; blocks that run on a multiprocessor at a time (__launch_bounds__)
//   Epilogue  false: alpha = 1, beta = 0, no bias
#include "spformat/column_panel.cuh"
#include "spformat/mma_fragments.cuh"

using spformat::HEADER;
using spformat::i64;
using spformat::PANEL_ROWS;
using spformat::u32;
using spformat::u8;

constexpr int EIGHTS = PANEL_ROWS / 8, LANES = 32 / EIGHTS, PLACES = 16, LOADS = PLACES / LANES;

// The slots of a lane in one step: their values, and the rows of B that they meet (-1: no slot).
struct Step {
  uint4 values[LOADS];
  int row[LOADS];

  __device__ __forceinline__ void load(const u8* record, int step, bool live, int eight, int lane, int chunk) {
    const u8* const header = record + step * HEADER;
    const u32 word = spformat::load_if(reinterpret_cast<const u32*>(header + 16) + spformat::word_of(eight), live);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int place = i * LANES + lane;
      const bool there = word >> place & 1;
      const u32 before = __popc(word & ((1u << place) - 1));
      values[i] = spformat::load_if(reinterpret_cast<const uint4*>(record) + (word >> 16) + before, there);
      row[i] = there ? chunk * spformat::DEPTH + header[place] : -1;
    }
  }
};

// Lanes that differ by HALF add their sums of 2*HALF rows, NC each: the upper one keeps the upper half of the rows.
template <int HALF, int NC> __device__ __forceinline__ void fold(float (&sum)[8 * NC], int lane) {
  const bool upper = lane & HALF;
#pragma unroll
  for (int i = 0; i < HALF * NC; ++i) {
    const float given = upper ? sum[i] : sum[i + HALF * NC], kept = upper ? sum[i + HALF * NC] : sum[i];
    sum[i] = kept + __shfl_xor_sync(0xffffffffu, given, HALF);
  }
}

template <class T, class Out, int NC, int THREADS, int BLOCKS, bool BCol, bool Epilogue>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    spmm_sr_bcrs_vector(const u32* __restrict__ first, const u8* __restrict__ pieces, i64 count, int prefetch, i64 M, int K,
                        const T* __restrict__ B, Out* C, int n, i64 ldb, i64 c_row, i64 c_col, const Out* __restrict__ bias,
                        double alpha, double beta) {
  using Columns = spformat::ColumnPanel<T, NC, THREADS>;
  constexpr int WARPS = THREADS / 32;
  static_assert(Columns::LANES == 1, "a lane reads a whole row of the panel at once");
  extern __shared__ uint4 room[];
  __shared__ float sums[WARPS][PANEL_ROWS][NC];
  const int lane = threadIdx.x % LANES, eight = threadIdx.x % 32 / LANES, warp = threadIdx.x / 32, first_col = blockIdx.y * NC;
  const i64 panels = (M + PANEL_ROWS - 1) / PANEL_ROWS;
  const int chunks = (K + spformat::DEPTH - 1) / spformat::DEPTH;
  const spformat::Slots a{first, pieces, chunks};
  const spformat::ColumnSums<Out, float, Epilogue> result{C, c_row, c_col, n, bias, static_cast<float>(alpha),
                                                           static_cast<float>(beta)};
  if (prefetch) {
    const i64 threads = static_cast<i64>(gridDim.x) * gridDim.y * THREADS;
    const i64 thread = (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
    spformat::prefetch_l2(first, (panels * chunks + 1) * sizeof(u32), thread, threads);
    spformat::prefetch_l2(pieces, count * 16, thread, threads);
  }
  auto* const columns = reinterpret_cast<typename Columns::W*>(room);
  if constexpr (BCol) Columns::from_columns(columns, B, ldb, K, first_col, n);
  else Columns::from_rows(columns, B, ldb, K, first_col, n);
  __syncthreads();

  for (i64 panel = blockIdx.x; panel < panels; panel += gridDim.x) {
    float sum[8 * NC] = {};
    const u32* const records = first + panel * chunks;
    u32 next = warp < chunks ? records[warp] : 0;
    for (int chunk = warp; chunk < chunks; chunk += WARPS) {
      const u32 at = next;
      if (chunk + WARPS < chunks) next = records[chunk + WARPS];
      const u8* const record = a.record(at);
      const int steps = spformat::steps_of(at);
      for (int step = 0; step < steps; step += 2) {
        Step two[2];
        two[0].load(record, step, true, eight, lane, chunk);
        two[1].load(record, step + 1, step + 1 < steps, eight, lane, chunk);
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
          for (int i = 0; i < LOADS; ++i) {
            typename Columns::W row = {};
            if (two[s].row[i] >= 0) row = columns[two[s].row[i]];
            const T* const values = reinterpret_cast<const T*>(&two[s].values[i]);
            const T* const b = reinterpret_cast<const T*>(&row);
#pragma unroll
            for (int r = 0; r < 8; ++r) {
              const float x = spformat::widen(values[r]);
#pragma unroll
              for (int c = 0; c < NC; ++c) sum[r * NC + c] += x * spformat::widen(b[c]);
            }
          }
      }
    }
    fold<4, NC>(sum, lane), fold<2, NC>(sum, lane), fold<1, NC>(sum, lane);  // lane j has row j of the eight
#pragma unroll
    for (int c = 0; c < NC; ++c) sums[warp][eight * 8 + lane][c] = sum[c];
    __syncthreads();
    for (int i = threadIdx.x; i < PANEL_ROWS * NC; i += THREADS) {
      const i64 row = panel * PANEL_ROWS + i / NC;
      const int col = first_col + i % NC;
      float total = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) total += sums[w][i / NC][i % NC];
      if (row < M && col < n) {
        // A slot has zeros that are no values; 0 * inf is NaN.
        if (!isfinite(total)) total = spformat::stored_only(a, row, B + (BCol ? col * ldb : col), BCol ? 1 : ldb);
        result.store(static_cast<unsigned>(row), col, total);
      }
    }
    __syncthreads();  // before the sums of the next panel
  }
}
