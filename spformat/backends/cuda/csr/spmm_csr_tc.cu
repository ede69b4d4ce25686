// C[M,N] = A[M,K] @ B[K,N], A in CSR with values of 16 bits or float, on tensor cores: the TCA-SpMM schedule (spformat/preprocess/schedule.py).
//
//   row_id  Id[8 * blocks]   row of each warp, -1 if idle      warp_in_row  Id[8 * blocks]   its number in that row
//   indptr  Pointer[M+1]     indices  Index[nnz]     data  T[nnz]
//   zeros   int64[zero_rows] rows without items      B  T[K, ldb bytes]     C  Out[M, ldc]
//
// Grid: `blocks` thread blocks of 8 warps that the schedule filled, then blocks that write the rows without items.
//
// mma m16n8k8 with the sparse row on the right: item q of a fragment of 64 sits at right[k = q % 8][n = q / 8], G of
// the eight columns n are in use. Left row s*G + r holds B[column of item 8r + k, output column s] at k, so that
// output s is the sum over r < G of acc[s*G + r][r]: the other products are not read. A unit is one instruction,
// 16/G outputs. W neighbouring units are worked on together: left row s*G + r of instruction i serves output
// s*W + i, so that a lane loads W neighbouring elements of B at once.
//
// Rows of up to 64 items: one fragment, in the block's shared buffer. Longer rows: whole blocks, every warp runs over
// all fragments for its share of the columns; columns are divided, not items, so nothing is added across warps.
//
// float: three TF32 products for each of these (split_tf32 in mma.cuh); the lane's two items are k = pair and k = pair + 4
// there, neighbours here: an order of k that left and right side share.
//
// SharedSums: the diagonal is added in shared memory, as the paper has it, else by exchanges between lanes.
//
// T, Out  value types; sums are float.    VEC  most elements per load of B: B, C, ldb, ldc and n are multiples of it.
#include "spformat/dtypes.cuh"
#include "spformat/gather.cuh"
#include "spformat/mma.cuh"

using spformat::u32;

constexpr int WARPS = 8, FRAGMENT = 64;

template <class T> __device__ __forceinline__ void mma_m16n8k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  if constexpr (spformat::same_type<T, __half>::value)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}

// W elements of row k of B from column col on, as words or as 16-bit halves of words; zero where k < 0 or the column is not below
// `end`. One load where all W are wanted.
template <int W, class T> constexpr int words_of = (W * static_cast<int>(sizeof(T)) + 3) / 4;
template <int W, class T, class Index>
__device__ __forceinline__ void load_columns(u32 (&words)[words_of<W, T>], const T* B, long long ldb, Index k, int col, int end) {
  const T* row = reinterpret_cast<const T*>(reinterpret_cast<const char*>(B) + static_cast<long long>(k) * ldb) + col;
  using One = spformat::word_t<sizeof(T)>;
  if constexpr (W == 1) {
    words[0] = spformat::load_if(reinterpret_cast<const One*>(row), k >= 0 && col < end);
  } else {
    using Word = spformat::word_t<W * sizeof(T)>;
    const bool whole = col + W <= end;
    const Word word = spformat::load_if(reinterpret_cast<const Word*>(row), k >= 0 && whole);
#pragma unroll
    for (int i = 0; i < words_of<W, T>; ++i) words[i] = reinterpret_cast<const u32*>(&word)[i];
    if (!whole && k >= 0 && col < end)
      for (int i = 0; i < W; ++i)
        if (col + i < end) {
          const u32 one = reinterpret_cast<const One*>(row)[i];
          if constexpr (sizeof(T) == 2) words[i / 2] |= one << (i % 2 * 16);
          else words[i] = one;
        }
  }
}

// The units first .. last-1 of one row for one warp. `slice`: where the row's items start in a buffer of the block.
template <int G, int W, bool SharedSums, class T, class Out, class Index>
__device__ __forceinline__ void multiply(float* sums, Index (&columns)[2][FRAGMENT], T (&values)[2][FRAGMENT], const Index* indices,
                                         const T* data, long long start, int length, int slice, int first, int last,
                                         int passes, const T* B, long long ldb, Out* row, int n) {
  constexpr int PER_UNIT = 16 / G;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int r = group % G, s = group / G, end = min(n, last * PER_UNIT);
  const int fragments = (length + FRAGMENT - 1) / FRAGMENT;
  // Long rows: the whole block works on one, all warps are here; lanes 0-7 bring the warp's eighth of a fragment.
  const bool is_long = G == 8 && length > FRAGMENT;
  const int mine = warp * 8 + lane;
  int buffer = 0;
  for (int pass = 0; pass < passes; ++pass) {
    const int col = (first + pass * W) * PER_UNIT + s * W;
    const bool works = first + pass * W < last;  // passes are those of the widest share: a warp may have fewer
    float acc[W][4] = {};
    Index column = -1;
    T value = T(0.f);
    if (is_long && lane < 8) column = indices[start + mine], value = data[start + mine];
    for (int f = 0; f < fragments; ++f) {
      if (is_long) {
        if (lane < 8) {
          columns[buffer][mine] = column;
          values[buffer][mine] = value;
          const int at = (f + 1) * FRAGMENT + mine;  // on its way while this fragment is multiplied
          column = at < length ? indices[start + at] : Index(-1);
          value = at < length ? data[start + at] : T(0.f);
        }
        __syncthreads();  // two buffers: a warp that is ahead fills the one nobody reads
      }
      if (works) {
        const int q = slice + r * 8 + pair * 2;
        const Index k0 = columns[buffer][q], k1 = columns[buffer][q + 1];
        u32 low0[words_of<W, T>], low1[words_of<W, T>], high0[words_of<W, T>], high1[words_of<W, T>];
        load_columns<W>(low0, B, ldb, k0, col, end);
        load_columns<W>(low1, B, ldb, k1, col, end);
        load_columns<W>(high0, B, ldb, k0, col + 8 / G * W, end);
        load_columns<W>(high1, B, ldb, k1, col + 8 / G * W, end);
        const T* item = &values[buffer][slice + (group < G ? group * 8 : 0) + pair * 2];
        if constexpr (sizeof(T) == 2) {
          const u32 right = group < G ? *reinterpret_cast<const u32*>(item) : 0;
#pragma unroll
          for (int i = 0; i < W; ++i) {
            const u32 take = i % 2 ? 0x7632 : 0x5410;
            mma_m16n8k8<T>(acc[i], __byte_perm(low0[i / 2], low1[i / 2], take),
                           __byte_perm(high0[i / 2], high1[i / 2], take), right);
          }
        } else {
          u32 right[2], right_low[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) spformat::split_tf32(group < G ? item[j] : 0.f, right[j], right_low[j]);
#pragma unroll
          for (int i = 0; i < W; ++i) {
            const u32 left[4] = {low0[i], high0[i], low1[i], high1[i]};
            u32 top[4], bottom[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) spformat::split_tf32(__uint_as_float(left[j]), top[j], bottom[j]);
            spformat::mma_m16n8k8_tf32(acc[i], bottom, right[0], right[1]);
            spformat::mma_m16n8k8_tf32(acc[i], top, right_low[0], right_low[1]);
            spformat::mma_m16n8k8_tf32(acc[i], top, right[0], right[1]);
          }
        }
      }
      if (is_long) buffer ^= 1;
    }
    if constexpr (SharedSums) {  // `sums`: of this warp, G for each of the 16 / G * W outputs
      constexpr int OUTPUTS = PER_UNIT * W;
      __syncwarp();  // the pass before has read its sums
      if (pair == r / 2) {
#pragma unroll
        for (int j = 0; j < 2 * W; ++j)
          sums[r * OUTPUTS + j / W * (OUTPUTS / 2) + s * W + j % W] = r % 2 ? acc[j % W][j / W * 2 + 1] : acc[j % W][j / W * 2];
      }
      __syncwarp();
      for (int o = lane; o < OUTPUTS; o += 32) {
        float y = sums[o];
#pragma unroll
        for (int i = 1; i < G; ++i) y += sums[i * OUTPUTS + o];
        const int out = (first + pass * W) * PER_UNIT + o;
        if (out < end) row[out] = spformat::narrow<Out>(y);
      }
      continue;
    }
    // Sum the diagonal over the 4 * G lanes that hold it: halves of the outputs are exchanged, so that every lane ends
    // with its own outputs. Output j: half h = j / W of the left rows, instruction j % W.
    float x[2 * W];
#pragma unroll
    for (int j = 0; j < 2 * W; ++j) {
      const float even = acc[j % W][j / W * 2], odd = acc[j % W][j / W * 2 + 1];
      x[j] = pair == r / 2 ? (r % 2 ? odd : even) : 0.f;
    }
    int own = 0;  // the first output of this lane
    constexpr int HELD = 2 * W > 4 * G ? 2 * W / (4 * G) : 1;
    bool writes = true;
#pragma unroll
    for (int o = 2 * G, held = 2 * W; o >= 1; o /= 2) {
      const bool up = lane & o;
      if (held > 1) {
        held /= 2;
#pragma unroll
        for (int j = 0; j < W; ++j)
          if (j < held) {
            const float give = up ? x[j] : x[j + held], keep = up ? x[j + held] : x[j];
            x[j] = keep + __shfl_xor_sync(0xffffffffu, give, o);
          }
        own += up ? held : 0;
      } else {
        x[0] += __shfl_xor_sync(0xffffffffu, x[0], o);
        writes = writes && !up;
      }
    }
    const int out = col + own / W * (8 / G * W) + own % W;
    if (writes) {
      float y[HELD];
#pragma unroll
      for (int j = 0; j < HELD; ++j) y[j] = x[j];
      if (out + HELD <= end && out % HELD == 0)
        spformat::store_vector<Out, HELD>(row + out, y);
      else
        for (int j = 0; j < HELD; ++j)
          if (out + j < end) row[out + j] = spformat::narrow<Out>(y[j]);
    }
  }
}

template <class T, class Out, class Pointer, class Index, class Id, int VEC, bool SharedSums>
__global__ void __launch_bounds__(WARPS * 32, sizeof(T) == 2 ? 3 : 2)
    spmm_csr_tc(const Id* __restrict__ row_id, const Id* __restrict__ warp_in_row, int blocks,
                const Pointer* __restrict__ indptr, const Index* __restrict__ indices, const T* __restrict__ data,
                const long long* __restrict__ zeros, long long zero_rows, const T* __restrict__ B, Out* __restrict__ C,
                int n, long long ldb, long long ldc) {
  static_assert(sizeof(T) == 2 || (spformat::same_type<T, float>::value && VEC <= 4), "values of 16 bits, or float");
  __shared__ Index columns[2][FRAGMENT];
  __shared__ __align__(16) T values[2][FRAGMENT];
  __shared__ float sums[SharedSums ? WARPS : 1][SharedSums ? 16 * VEC : 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (blockIdx.x >= blocks) {
    const long long at = static_cast<long long>(blockIdx.x - blocks) * WARPS + warp;
    if (at >= zero_rows) return;
    Out* row = C + zeros[at] * ldc;
    const float nothing[VEC] = {};
    for (int col = lane * VEC; col < n; col += 32 * VEC) spformat::store_vector<Out, VEC>(row + col, nothing);
    return;
  }

  const long long w = static_cast<long long>(blockIdx.x) * WARPS + warp;
  const long long row = row_id[w], part = warp_in_row[w];
  long long start = 0;
  int length = 0;
  if (row >= 0) {
    start = indptr[row];
    length = static_cast<int>(indptr[row + 1] - start);
  }
  const int slice = static_cast<int>((warp - part) & 7) * 8;
  if (length <= FRAGMENT) {  // the warps of a row fill its slice, each an eighth of the buffer
    if (lane < 8) {
      const int q = static_cast<int>(part) * 8 + lane;
      const bool live = row >= 0 && q < length;
      columns[0][warp * 8 + lane] = live ? indices[start + q] : Index(-1);
      values[0][warp * 8 + lane] = live ? data[start + q] : T(0.f);
    }
    __syncthreads();
  }
  if (row < 0) return;

  const int g = length <= 8 ? 1 : length <= 16 ? 2 : length <= 32 ? 4 : 8;
  const bool is_long = length > FRAGMENT;
  const long long warps = is_long ? 8LL * ((length + FRAGMENT - 1) / FRAGMENT) : g;
  const long long units = (static_cast<long long>(n) * g + 15) / 16;
  const int first = static_cast<int>(part * units / warps), last = static_cast<int>((part + 1) * units / warps);
  if (is_long && (part - warp) * units / warps == (part - warp + WARPS) * units / warps) return;  // the whole block
  // Barriers in long rows: width and number of passes must then be the same in all warps of the row.
  const int share = static_cast<int>(units / warps), outputs = is_long ? share * (16 / g) : first * (16 / g);
  int width = VEC;
  while (width > 1 && (share < width || outputs % width || (is_long && units % warps))) width /= 2;
  const int most = is_long ? static_cast<int>((units + warps - 1) / warps) : last - first;
  const int passes = (most + width - 1) / width;
  Out* out = C + row * ldc;

#define SPFORMAT_MULTIPLY(G, W) \
  multiply<G, W, SharedSums>(sums[SharedSums ? warp : 0], columns, values, indices, data, start, length, slice, first, last, passes, B, ldb, out, n)
#define SPFORMAT_WIDTHS(G)                                    \
  if constexpr (VEC >= 8) if (width == 8) { SPFORMAT_MULTIPLY(G, 8); return; } \
  if constexpr (VEC >= 4) if (width == 4) { SPFORMAT_MULTIPLY(G, 4); return; } \
  if constexpr (VEC >= 2) if (width == 2) { SPFORMAT_MULTIPLY(G, 2); return; } \
  SPFORMAT_MULTIPLY(G, 1)
  if (g == 1) { SPFORMAT_WIDTHS(1); }
  else if (g == 2) { SPFORMAT_WIDTHS(2); }
  else if (g == 4) { SPFORMAT_WIDTHS(4); }
  else { SPFORMAT_WIDTHS(8); }
#undef SPFORMAT_WIDTHS
#undef SPFORMAT_MULTIPLY
}
