// to[c][r] = from[r][c]: from is Word[rows, ld_from], to is Word[cols, ld_to], both row-major; Word is an unsigned
// integer of the element's size. A block of 32 x 8 threads moves 32 x 32 tiles through shared memory, so that both
// sides are read and written in whole lines. Zeros follow up to word `fill` of a line of `to` (at least `rows`).
// Grid: x over column tiles, y over row tiles, both strided.

template <class Word>
__global__ void __launch_bounds__(256)
    transpose(const Word* __restrict__ from, Word* __restrict__ to, long long rows, long long cols, long long ld_from,
              long long ld_to, long long fill) {
  __shared__ Word tile[32][33];  // 33: a column of the tile lies in 32 different banks
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  for (long long r0 = blockIdx.y * 32LL; r0 < fill; r0 += gridDim.y * 32LL)
    for (long long c0 = blockIdx.x * 32LL; c0 < cols; c0 += gridDim.x * 32LL) {
#pragma unroll
      for (int i = y; i < 32; i += 8)
        if (c0 + x < cols) tile[i][x] = r0 + i < rows ? from[(r0 + i) * ld_from + c0 + x] : Word(0);
      __syncthreads();
#pragma unroll
      for (int i = y; i < 32; i += 8)
        if (c0 + i < cols && r0 + x < fill) to[(c0 + i) * ld_to + r0 + x] = tile[x][i];
      __syncthreads();
    }
}
