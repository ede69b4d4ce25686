// Whether data and indices of a vector n:m matrix are valid, in one pass: as VectorNM.check_memory and check_canonical
// require. The other arrays of a packed matrix follow from these; they are computed again and compared.
//
//   data     T[W, Q*length]     values as unsigned words; `mask` has the bits that decide whether one is zero
//   indices  u8[W, Q]
//   bad      becomes 1 if something is wrong
//
// `span` lanes read a vector.
#include "spformat/scan.cuh"

namespace spformat {

template <class T>
__global__ void __launch_bounds__(scan::THREADS)
vector_nm_scan(const T* __restrict__ data, const u8* __restrict__ indices, i64 M, i64 K, i64 W, i64 Q, int n, int m,
               int length, u64 mask, int span, u64* bad) {
    const T live = (T)mask;
    const i64 vectors = W * Q;
    bool wrong = false;
    scan::share(vectors, span, [&](i64 v, int lane) {
        const bool there = v < vectors;
        const i64 u = v / Q, q = v - u * Q, rows = M - q * length;  // rows: of the vector inside the matrix
        const T* vector = data + v * length;
        bool held = false;
        scan::each(vector, there ? length : 0, lane, span, [&](T value) {
            held |= value & live;
            wrong |= value && !(value & live);  // a -0.0
        });
        held = scan::summed(held, span);
        if (!there) return;
        if (rows < length)
#pragma unroll 1
            for (int i = lane; i < length; i += span) wrong |= i >= rows && (vector[i] & live);
        if (lane) return;
        const int index = indices[v], rank = u % n;
        wrong |= index >= m;
        wrong |= rank && indices[v - Q] >= index;
        // Positions ascend, so a position equals its rank exactly if every lower position is stored, too.
        wrong |= held ? u / n * m + index >= K : index != rank;
    });
    scan::report(wrong, bad);
}

}  // namespace spformat
