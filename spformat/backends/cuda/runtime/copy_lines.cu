// to[line][i] = from[line][i]: lines of `along` words, ld_from and ld_to words apart. Word is an unsigned integer of the
// element's size. A block is 2^narrow threads wide along a line and moves several lines at once. Neighbouring threads
// move neighbouring words, so that lines may start anywhere. Each thread moves EACH words, and all their loads are under
// way before the first store. Zeros follow up to word `fill` of a line of `to` (at least `along`): who multiplies whole pieces
// of a line must not meet what the memory held before, which may be infinite. Grid: x over pieces of a line, y over groups of lines, both strided.

constexpr int THREADS = 256, EACH = 8;

template <class Word>
__global__ void __launch_bounds__(THREADS)
    copy_lines(const Word* __restrict__ from, Word* __restrict__ to, long long lines, long long along,
               long long ld_from, long long ld_to, long long fill, int narrow) {
  const int wide = 1 << narrow, together = THREADS >> narrow, x = threadIdx.x & (wide - 1);
  const long long piece = (long long)wide * EACH;
  for (long long line = blockIdx.y * (long long)together + (threadIdx.x >> narrow); line < lines;
       line += gridDim.y * (long long)together)
    for (long long at = blockIdx.x * piece + x; at < fill; at += gridDim.x * piece) {
      Word word[EACH];
#pragma unroll
      for (int i = 0; i < EACH; ++i) word[i] = at + i * wide < along ? from[line * ld_from + at + i * wide] : Word(0);
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        if (at + i * wide < fill) to[line * ld_to + at + i * wide] = word[i];
    }
}
