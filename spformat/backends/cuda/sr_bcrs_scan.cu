// Whether the arrays of an SR-BCRS are valid, in one pass: what SRBCRS.check_memory and check_canonical ask, without names.
//
//   indptr   Index[tiles + 1]      not trusted: a tile is walked only where its ends are in order and inside 0 .. groups
//   indices  Index[groups, g]
//   data     T[groups, t, g]       values as unsigned words; `live` masks the bits that decide whether one is zero
//   bad      counts threads that found something
//
// A block takes a tile of t rows; a thread takes vectors.

namespace spformat {
namespace sr_bcrs {

typedef long long i64;
typedef unsigned long long u64;

constexpr int THREADS = 256;

struct Extents {
    i64 M, K, groups, tiles;
    int t, g;
};

template <typename T, typename Index, typename Pointer>
__global__ void __launch_bounds__(THREADS)
scan(const Pointer* __restrict__ indptr, const Index* __restrict__ indices, const T* __restrict__ data, Extents e, u64 mask,
     u64* __restrict__ bad) {
    const i64 tile = blockIdx.x, start = indptr[tile], stop = indptr[tile + 1];
    bool wrong = (tile == 0 && start != 0) || (tile == e.tiles - 1 && stop != e.groups);
    const bool walks = 0 <= start && start <= stop && stop <= e.groups;
    wrong |= !walks;
    const T live = (T)mask;
    const i64 first = start * e.g, end = walks ? stop * e.g : first;
    const i64 rows = e.M - tile * e.t;  // of the tile inside the matrix
    for (i64 i = first + threadIdx.x; i < end; i += THREADS) {
        const i64 column = indices[i], group = i / e.g;
        const int slot = (int)(i - group * e.g);
        const T* value = data + group * e.t * e.g + slot;
        T held = 0;
#pragma unroll 8
        for (int r = 0; r < e.t; ++r) {
            const T v = value[r * e.g];
            wrong |= v && !(v & live);  // a -0.0
            wrong |= r >= rows && (v & live);
            held |= v & live;
        }
        if (column == -1) {
            wrong |= held || slot == 0 || group != stop - 1;
        } else {
            wrong |= column < 0 || column >= e.K || !held;
            if (i > first) wrong |= indices[i - 1] >= column || (slot && indices[i - 1] == -1);
        }
    }
    if (wrong) atomicAdd(bad, 1ull);
}

}  // namespace sr_bcrs
}  // namespace spformat
