// The sums of all counts before each of them, in one launch. sm_80 and later. Launcher: offsets.py.
//
//   counts  Count[n]         at least 0
//   starts  Start[n+1]       starts[i] = counts[0] + .. + counts[i-1]; the last one is the sum of all
//   sums    u64[2 + blocks]  zeros before the launch and after it, see look_back.cuh
//   total   u64              in host memory, becomes the sum of all counts; or null
#include "spformat/look_back.cuh"

using namespace spformat;

template <class Count, class Start>
__global__ void __launch_bounds__(OFFSETS_THREADS)
offsets(const Count* __restrict__ counts, i64 n, Start* __restrict__ starts, u64* sums, u64* total) {
    write_starts(n, [=](i64 i) { return counts[i]; }, starts, sums, total);
}
