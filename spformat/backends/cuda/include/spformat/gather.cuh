// Rows of C as weighted sums of gathered rows of B: what the CSR and the ELL kernel share.
//
// A *slot* is LANES consecutive lanes of a warp. Lane l of a slot owns the columns (t * LANES + l) * VEC .. + VEC - 1
// of a column tile, t < TILES. The items of one row of A are dealt to 2^log consecutive slots in batches of BATCH
// items; every slot sums its batches in registers, and combine_slots() adds the slots in a fixed order, so the same
// operands give the same bits. An item with a negative column is no item: it loads nothing and adds nothing.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

template <int BYTES> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };
template <int BYTES> using word_t = typename Word<BYTES>::type;

__host__ __device__ constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }

// Prefetch `bytes` bytes at `p` into L2, every thread of the grid its share. Operands that are read exactly once from
// DRAM anyway arrive while the first, dependent loads (record, then column index) are still on their way.
__device__ __forceinline__ void prefetch_l2(const void* p, long long bytes, long long thread, long long threads) {
  for (long long at = thread * 128; at < bytes; at += threads * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p) + at));
}

// The word at p, or zero when `live` is false: one predicated load, no branch, so that the loads of a group of items
// are issued back to back. Read-only path: nothing writes A or B while the kernel runs.
__device__ __forceinline__ uint4 load_if(const uint4* p, bool live) {
  uint4 w;
  asm volatile("{.reg .pred q; setp.ne.s32 q, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
               " @q ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "=&r"(w.x), "=&r"(w.y), "=&r"(w.z), "=&r"(w.w) : "l"(p), "r"(static_cast<int>(live)));
  return w;
}
__device__ __forceinline__ uint2 load_if(const uint2* p, bool live) {
  uint2 w;
  asm volatile("{.reg .pred q; setp.ne.s32 q, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0; @q ld.global.nc.v2.u32 {%0, %1}, [%2];}"
               : "=&r"(w.x), "=&r"(w.y) : "l"(p), "r"(static_cast<int>(live)));
  return w;
}
__device__ __forceinline__ unsigned load_if(const unsigned* p, bool live) {
  unsigned w;
  asm volatile("{.reg .pred q; setp.ne.s32 q, %2, 0; mov.u32 %0, 0; @q ld.global.nc.u32 %0, [%1];}"
               : "=&r"(w) : "l"(p), "r"(static_cast<int>(live)));
  return w;
}
__device__ __forceinline__ unsigned short load_if(const unsigned short* p, bool live) {
  unsigned short w;
  asm volatile("{.reg .pred q; setp.ne.s32 q, %2, 0; mov.u16 %0, 0; @q ld.global.nc.u16 %0, [%1];}"
               : "=&h"(w) : "l"(p), "r"(static_cast<int>(live)));
  return w;
}

// BATCH items as the lanes of a slot hold them: item j in lane j % LANES, register j / LANES.
template <class T, class Index, int LANES, int BATCH> struct Batch {
  static constexpr int HELD = BATCH > LANES ? BATCH / LANES : 1;
  Index column[HELD];
  word_t<sizeof(T)> value[HELD];  // as loaded: widened where it is used, so that a prefetched batch waits for nothing

  // The first `live` (<= 0: none) of the items at these pointers.
  __device__ __forceinline__ void fetch(const Index* indices, const T* data, int live, int lane) {
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      const int j = h * LANES + lane;
      const bool use = j < BATCH && j < live;
      const auto k = load_if(reinterpret_cast<const word_t<sizeof(Index)>*>(indices + j), use);
      value[h] = load_if(reinterpret_cast<const word_t<sizeof(T)>*>(data + j), use);
      column[h] = use ? reinterpret_cast<const Index&>(k) : Index(-1);
    }
  }
};

// Item `item` of an array that is spread over lanes as in Batch, to all lanes of the slot.
template <int LANES, class V, int HELD> __device__ __forceinline__ V broadcast(const V (&held)[HELD], int item) {
  if constexpr (LANES == 1) {
    return held[item];
  } else if constexpr (sizeof(V) == 2) {
    return static_cast<V>(__shfl_sync(0xffffffffu, static_cast<unsigned>(held[item / LANES]), item % LANES, LANES));
  } else if constexpr (sizeof(V) == 8) {
    const auto x = __shfl_sync(0xffffffffu, reinterpret_cast<const long long&>(held[item / LANES]), item % LANES, LANES);
    return reinterpret_cast<const V&>(x);
  } else {
    return __shfl_sync(0xffffffffu, held[item / LANES], item % LANES, LANES);
  }
}

// Items of one row of A, `length` of them from `start` on: a whole row, or a piece of one.
struct Record {
  long long start;
  unsigned row;  // of a piece: the entry in `cuts` of its row
  int length;
};

// Rows that were cut: each piece leaves its sums here, and the last one to arrive adds them all up.
template <class S> struct Pieces {
  const long long* cuts;  // [rows, 3]: row, first piece, number of pieces
  S* sums;                // [pieces, n]
  unsigned* arrived;      // [rows, column tiles]: zeros, before the launch and after it
};

// The first batch of part `part` of a record.
template <class T, class Index, int LANES, int BATCH>
__device__ __forceinline__ void fetch_first(Batch<T, Index, LANES, BATCH>& batch, const Record& r, int part,
                                            const Index* indices, const T* data, int lane) {
  const int first = part * BATCH;
  batch.fetch(indices + r.start + first, data + r.start + first, r.length - first, lane);
}

// Where rows of B come from. `first` is the first column of this lane, `width` counts the columns from there to n;
// word t of item k is VEC elements from column first + t * LANES * VEC on, zero where that is no column.
template <class T, int VEC, int LANES> struct GlobalPanel {
  using W = word_t<sizeof(T) * VEC>;
  const T* first;
  int ldb;  // bytes
  int width;
  template <class Index, int TILES> __device__ __forceinline__ void load(W (&words)[TILES], Index k) const {
    const char* row = reinterpret_cast<const char*>(first) + static_cast<long long>(k) * ldb;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      words[t] = load_if(reinterpret_cast<const W*>(row) + t * LANES, k >= 0 && width > t * LANES * VEC);
  }
};

// A whole column panel of B in shared memory: K rows of ROW words, padded with zeros.
template <class T, int VEC, int LANES, int ROW> struct SharedPanel {
  using W = word_t<sizeof(T) * VEC>;
  const W* first;
  template <class Index, int TILES> __device__ __forceinline__ void load(W (&words)[TILES], Index k) const {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      words[t] = W{};
      if (k >= 0) words[t] = first[static_cast<int>(k) * ROW + t * LANES];
    }
  }
  // The panel of the block, columns col .. col + ROW * VEC - 1 of B[K, n]; to be followed by __syncthreads().
  template <int THREADS> static __device__ __forceinline__ void fill(W* panel, const T* B, int ldb, int K, int col, int n) {
    constexpr int AHEAD = 8;
    for (int at = threadIdx.x; at < K * ROW; at += AHEAD * THREADS) {
      W words[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int word = at + i * THREADS, k = word / ROW, c = col + word % ROW * VEC;
        const char* row = reinterpret_cast<const char*>(B) + static_cast<long long>(k) * ldb;
        words[i] = load_if(reinterpret_cast<const W*>(reinterpret_cast<const T*>(row) + c), k < K && c < n);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (at + i * THREADS < K * ROW) panel[at + i * THREADS] = words[i];
    }
  }
};

// The loads of B for DEPTH items of a batch, from item `first` on: all are issued before the first product needs one.
template <int DEPTH, int TILES, class W, class T, class Index, int LANES, int BATCH, class Panel>
__device__ __forceinline__ void load_items(W (&words)[DEPTH][TILES], const Batch<T, Index, LANES, BATCH>& batch, int first,
                                           const Panel& panel) {
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) panel.load(words[d], broadcast<LANES>(batch.column, first + d));
}

// sum += value of the item * its row of B.
template <int VEC, int TILES, class T, class Index, int LANES, int BATCH>
__device__ __forceinline__ void add_item(sum_t<T> (&sum)[TILES][VEC], const Batch<T, Index, LANES, BATCH>& batch, int item,
                                         const word_t<sizeof(T) * VEC> (&words)[TILES]) {
  const auto word = broadcast<LANES>(batch.value, item);
  const sum_t<T> a = widen(reinterpret_cast<const T&>(word));
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const T* b = reinterpret_cast<const T*>(&words[t]);
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[t][v] += a * widen(b[v]);
  }
}

// The share of slot `part` of 2^log in a row of `length` items: batches part, part + 2^log, ... of the items that
// start at indices and data; the first one is in `batch` already. Trip counts are equal in a warp, so that the
// broadcasts meet.
template <int DEPTH, int VEC, int TILES, class T, class Index, int LANES, int BATCH, class Panel>
__device__ __forceinline__ void gather_row(sum_t<T> (&sum)[TILES][VEC], Batch<T, Index, LANES, BATCH> batch,
                                           const Index* indices, const T* data, int length, int part, int log,
                                           const Panel& panel, int lane) {
  const int stride = BATCH << log;
  indices += part * BATCH, data += part * BATCH;
  int mine = length - part * BATCH;  // items left from this slot's batch on; < 0 when the row ends before it
  int most = LANES == 32 ? mine : __reduce_max_sync(0xffffffffu, mine);  // of the slots of this warp
  Batch<T, Index, LANES, BATCH> next;
  while (most > 0) {
    indices += stride, data += stride;
    mine -= stride;
    next.fetch(indices, data, mine, lane);
#pragma unroll
    for (int g = 0; g < BATCH; g += DEPTH)
      if (g == 0 || g < most) {
        word_t<sizeof(T) * VEC> words[DEPTH][TILES];
        load_items<DEPTH, TILES>(words, batch, g, panel);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) add_item<VEC, TILES>(sum, batch, g + d, words[d]);
      }
    batch = next;
    most -= stride;
  }
}

// Add the sums of the 2^log slots of each row into its first slot, in a fixed order. Called by the whole block, with
// the same log. `scratch` holds THREADS / 32 * TILES * VEC * LANES sums.
template <int LANES, int TILES, int VEC, class S>
__device__ __forceinline__ void combine_slots(S (&sum)[TILES][VEC], int log, S* scratch) {
  constexpr int SLOTS_IN_WARP = 32 / LANES;
#pragma unroll
  for (int step = 1; step < SLOTS_IN_WARP; step *= 2)
    if (step < 1 << log)
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[t][v] += __shfl_down_sync(0xffffffffu, sum[t][v], step * LANES);
  if (1 << log <= SLOTS_IN_WARP) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps_of_row = (1 << log) / SLOTS_IN_WARP;
  S* mine = scratch + warp * TILES * VEC * LANES + lane;
  if (lane < LANES)
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int v = 0; v < VEC; ++v) mine[(t * VEC + v) * LANES] = sum[t][v];
  __syncthreads();
  if (lane < LANES && warp % warps_of_row == 0)
    for (int w = 1; w < warps_of_row; ++w)
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[t][v] += mine[(w * TILES * VEC + t * VEC + v) * LANES];
  __syncthreads();
}

// VEC sums as Out at p, streaming: nothing reads C again before it leaves L2.
template <class Out, int VEC, class S> __device__ __forceinline__ void store_vector(Out* p, const S (&sum)[VEC]) {
  constexpr int BYTES = sizeof(Out) * VEC < 16 ? sizeof(Out) * VEC : 16;
  constexpr int PER_WORD = BYTES / sizeof(Out);
  using W = word_t<BYTES>;
#pragma unroll
  for (int i = 0; i < VEC / PER_WORD; ++i) {
    W word;
    Out* out = reinterpret_cast<Out*>(&word);
#pragma unroll
    for (int v = 0; v < PER_WORD; ++v) out[v] = narrow<Out>(sum[i * PER_WORD + v]);
    __stcs(reinterpret_cast<W*>(p) + i, word);
  }
}

// The sums of this lane, at `first`, its first column of a row; `width`: columns from there to the end of the row.
template <int LANES, class Out, int TILES, int VEC, class S>
__device__ __forceinline__ void store_row(Out* first, const S (&sum)[TILES][VEC], int width) {
#pragma unroll
  for (int t = 0; t < TILES; ++t)
    if (width > t * LANES * VEC) store_vector<Out, VEC>(first + t * LANES * VEC, sum[t]);
}

// sum = the row at `first`, which a former launch stored, plus sum; S is the type of C. All loads before the first sum.
template <int LANES, int TILES, int VEC, class S>
__device__ __forceinline__ void add_row(S (&sum)[TILES][VEC], const S* first, int width) {
  using W = word_t<sizeof(S) * VEC < 16 ? sizeof(S) * VEC : 16>;
  constexpr int WORDS = sizeof(S) * VEC / sizeof(W), PER_WORD = VEC / WORDS;
  W words[TILES][WORDS];
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
      words[t][i] = width > t * LANES * VEC ? __ldcs(reinterpret_cast<const W*>(first + t * LANES * VEC) + i) : W{};
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int v = 0; v < VEC; ++v)
      sum[t][v] = reinterpret_cast<const S*>(&words[t][v / PER_WORD])[v % PER_WORD] + sum[t][v];
}

// Stands for what is added to a row beside its pieces, where nothing is.
struct NothingMore {};
template <class> constexpr bool is_nothing = false;
template <> constexpr bool is_nothing<NothingMore> = true;

// A block has summed a piece of a row, in its first slot (`first`). The sums go to pieces.sums; where the piece is the last
// of its row to arrive for these columns, the sum of all of them, always in their order, goes to C: whoever arrives
// last, the bits are the same. more(row, column) is added after them.
template <int LANES, class Out, int TILES, int VEC, class S, class More = NothingMore>
__device__ __forceinline__ void store_piece(Out* C, long long ldc, const Pieces<S>& pieces, unsigned cut, int piece, int n,
                                            int col, const S (&sum)[TILES][VEC], bool first, More more = {}) {
  __shared__ bool last;
  if (first) {
    store_row<LANES>(pieces.sums + static_cast<long long>(piece) * n + col, sum, n - col);
    __threadfence();
  }
  __syncthreads();
  const long long row = pieces.cuts[3ll * cut], begin = pieces.cuts[3ll * cut + 1], count = pieces.cuts[3ll * cut + 2];
  if (threadIdx.x == 0) {
    unsigned* arrived = pieces.arrived + static_cast<long long>(cut) * gridDim.y + blockIdx.y;
    last = atomicAdd(arrived, 1u) + 1 == count;
    if (last) *arrived = 0;  // for the next launch
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  constexpr int COLUMNS = LANES * TILES * VEC;
  const int end = min(n, static_cast<int>(blockIdx.y + 1) * COLUMNS);
  for (int c = blockIdx.y * COLUMNS + threadIdx.x; c < end; c += blockDim.x) {
    S total = 0;
#pragma unroll 4
    for (long long i = begin; i < begin + count; ++i) total += __ldcg(pieces.sums + i * n + c);
    if constexpr (!is_nothing<More>) total += more(row, c);
    C[row * ldc + c] = narrow<Out>(total);
  }
}

}  // namespace spformat
