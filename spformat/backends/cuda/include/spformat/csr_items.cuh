// Items of a CSR as lanes load them: some neighbours at a time, from arrays that start on 16 bytes.
#pragma once
#include "spformat/gather.cuh"

namespace spformat {

// COUNT neighbours in as few loads as there can be.
template <class V, int COUNT> struct Neighbours {
  static constexpr int BYTES = sizeof(V) * COUNT, LOADS = BYTES > 16 ? BYTES / 16 : 1;
  using W = word_t<BYTES / LOADS>;
  W word[LOADS];

  __device__ __forceinline__ void load(const V* from, bool live) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) word[i] = load_if(reinterpret_cast<const W*>(from) + i, live);
  }
  __device__ __forceinline__ V& operator[](int i) { return reinterpret_cast<V*>(word)[i]; }
  __device__ __forceinline__ const V& operator[](int i) const { return reinterpret_cast<const V*>(word)[i]; }
};

// A row as a slot sees it: its items are begin .. end - 1, and the slot takes E of them from `first`, `first` + step, .. on.
struct Row {
  unsigned begin, end, first;
  int step;
};

// Items of a slot: U times E neighbours.
template <class T, int E, int U> struct Items {
  Neighbours<int, E> index[U];
  Neighbours<T, E> value[U];

  __device__ __forceinline__ void fetch(const int* indices, const T* data, const Row& row, unsigned nnz) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const unsigned at = row.first + u * row.step;
      const bool whole = at + E <= nnz;
      index[u].load(indices + at, at < row.end && whole);
      value[u].load(data + at, at < row.end && whole);
      if (at < row.end && !whole) {  // the last items of the matrix
#pragma unroll
        for (int e = 0; e < E; ++e)
          if (at + e < nnz) index[u][e] = indices[at + e], value[u][e] = data[at + e];
      }
    }
  }
};

}  // namespace spformat
