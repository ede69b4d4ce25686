// Some columns of B in shared memory, and where the sums of those columns go: what the kernels of CSR and SR-BCRS for few columns share.
#pragma once
#include "spformat/row_bins.cuh"

namespace spformat {

// Columns col .. col + NC - 1 of B in shared memory: K rows of NC values, zeros past column n.
template <class T, int NC, int THREADS> struct ColumnPanel {
  static constexpr int VEC = NC * sizeof(T) < 16 ? NC : 16 / sizeof(T), LANES = NC / VEC;
  using W = word_t<sizeof(T) * VEC>;
  // AHEAD, below: loads in flight together, as many as fit the 64 registers of a thread.

  // Row-major B: neighbouring lanes copy neighbouring words.
  static __device__ __forceinline__ void from_rows(W* panel, const T* B, long long ldb, int K, int col, int n) {
    constexpr int AHEAD = sizeof(W) < 4 ? 16 : 64 / sizeof(W);
    const bool whole = reinterpret_cast<unsigned long long>(B) % sizeof(W) == 0 && ldb % VEC == 0 && n % VEC == 0;
    for (int at = threadIdx.x; at < K * LANES; at += AHEAD * THREADS) {
      W words[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int word = at + i * THREADS, k = word / LANES, c = col + word % LANES * VEC;
        const T* const from = B + k * ldb + c;
        if (whole) {
          words[i] = load_if(reinterpret_cast<const W*>(from), k < K && c < n);
        } else {
          auto* const single = reinterpret_cast<word_t<sizeof(T)>*>(&words[i]);
#pragma unroll
          for (int v = 0; v < VEC; ++v)
            single[v] = load_if(reinterpret_cast<const word_t<sizeof(T)>*>(from + v), k < K && c + v < n);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (at + i * THREADS < K * LANES) panel[at + i * THREADS] = words[i];
    }
  }

  // A contiguous vector, 16 bytes at a time; its last values, and a vector that starts elsewhere than at 16 bytes, one by one.
  static __device__ __forceinline__ void from_vector(T* panel, const T* B, int K) {
    constexpr int EACH = 16 / sizeof(T), AHEAD = 4;
    const int words = reinterpret_cast<unsigned long long>(B) % 16 == 0 ? K / EACH : 0;
    for (int at = threadIdx.x; at < words; at += AHEAD * THREADS) {
      uint4 word[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        word[i] = load_if(reinterpret_cast<const uint4*>(B) + at + i * THREADS, at + i * THREADS < words);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (at + i * THREADS < words) reinterpret_cast<uint4*>(panel)[at + i * THREADS] = word[i];
    }
    for (int k = words * EACH + threadIdx.x; k < K; k += THREADS) panel[k] = B[k];
  }

  // Column-major B: a lane loads KV neighbours of each of VEC columns and stores VEC neighbours of KV rows. The eight lanes
  // that shared memory serves together write to different banks: R of them to rows of the panel that lie in a window of 128
  // bytes, for each of the LANES words of a row; half of the lanes store their rows in reverse, because rows k and k + KV*R/2
  // have the same banks.
  static __device__ __forceinline__ void from_columns(W* panel, const T* B, long long ldb, int K, int col, int n) {
    if constexpr (NC == 1) return from_vector(reinterpret_cast<T*>(panel), B + col * ldb, K);
    constexpr int KV = sizeof(T) == 2 ? 2 : 1, AHEAD = VEC < 4 ? 16 / VEC : 2;
    constexpr int R = sizeof(W) == 16 && LANES < 8 ? 8 / LANES : 1, STEP = THREADS / LANES;
    using Pair = word_t<KV * sizeof(T)>;
    using Single = word_t<sizeof(T)>;
    const int chunk = threadIdx.x / R % LANES, first = threadIdx.x / (R * LANES) * R + threadIdx.x % R;
    const bool reverse = KV == 2 && R > 1 && threadIdx.x % R >= R / 2;
    const bool pairs = reinterpret_cast<unsigned long long>(B) % sizeof(Pair) == 0 && ldb % KV == 0;
    const int c = col + chunk * VEC, left = n - c;
    const T* const from = B + c * ldb;
    for (int unit = first; unit * KV < K; unit += AHEAD * STEP) {
      Pair words[AHEAD][VEC];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int k = (unit + i * STEP) * KV;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          const T* const at = from + v * ldb + k;
          if (pairs) {
            words[i][v] = load_if(reinterpret_cast<const Pair*>(at), k + KV <= K && v < left);
          } else {
#pragma unroll
            for (int e = 0; e < KV; ++e)
              reinterpret_cast<Single*>(&words[i][v])[e] =
                  load_if(reinterpret_cast<const Single*>(at + e), k + e < K && v < left);
          }
          if constexpr (KV == 2)  // the last of an odd number of rows
            if (pairs && k + 1 == K) words[i][v] = load_if(reinterpret_cast<const Single*>(at), v < left);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int k = (unit + i * STEP) * KV;
        if constexpr (KV == 2) {
#pragma unroll
          for (int v = 0; v < VEC; ++v)
            if (reverse) words[i][v] = words[i][v] >> 16 | words[i][v] << 16;
        }
#pragma unroll
        for (int e = 0; e < KV; ++e) {
          const int row = k + (e ^ static_cast<int>(reverse));
          W word;
#pragma unroll
          for (int v = 0; v < VEC; ++v)
            reinterpret_cast<Single*>(&word)[v] = reinterpret_cast<const Single*>(&words[i][v])[e];
          if (row < K) panel[row * LANES + chunk] = word;
        }
      }
    }
  }
};

// Where sums go, and what is done to them first.
template <class Out, class S, bool Epilogue> struct ColumnSums {
  Out* c;
  long long c_row, c_col;
  int n;
  const Out* bias;
  S alpha, beta;

  __device__ __forceinline__ S affine(S sum, const Out* to, unsigned row) const {
    if constexpr (Epilogue) {
      sum = alpha != 0 ? alpha * sum : S(0);  // as BLAS: infinities of A and B do not come into C
      if (bias) sum += widen(bias[row]);
      if (beta != 0) sum += beta * widen(*to);
    }
    return sum;
  }
  __device__ __forceinline__ void store(unsigned row, int col, S sum) const {
    if (col >= n) return;
    Out* const to = c + row * c_row + col * c_col;
    *to = narrow<Out>(affine(sum, to, row));
  }
  // VEC neighbouring columns: one store where they are neighbours in memory too.
  template <int VEC> __device__ __forceinline__ void store(unsigned row, int col, S (&sum)[VEC]) const {
    Out* const to = c + row * c_row + col * c_col;
    constexpr int BYTES = sizeof(Out) * VEC < 16 ? sizeof(Out) * VEC : 16;
    if (c_col == 1 && col + VEC <= n && reinterpret_cast<unsigned long long>(to) % BYTES == 0) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) sum[v] = affine(sum[v], to + v, row);
      store_vector<Out, VEC>(to, sum);
    } else {
#pragma unroll
      for (int v = 0; v < VEC; ++v) store(row, col + v, sum[v]);
    }
  }
};

}  // namespace spformat
