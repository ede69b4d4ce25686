// Whether the arrays of a bitmask matrix are valid, in one pass: as Bitmask.check_memory and check_canonical require.
//
//   indptr   Pointer[M + 1]
//   bitmask  u8[M, wide]        wide = ceil(K / 8)
//   data     T[items]           values as unsigned words; `live` masks the bits that decide whether one is zero
//   bad      becomes 1 if something is wrong
//
// `span` lanes count the bits of a row.
#include "spformat/scan.cuh"

namespace spformat {

template <class T, class Pointer>
__global__ void __launch_bounds__(scan::THREADS)
bitmask_scan(const Pointer* __restrict__ indptr, const u8* __restrict__ bitmask, const T* __restrict__ data, i64 M, i64 K,
             i64 items, u64 live, int span, u64* bad) {
    const i64 wide = (K + 7) / 8;
    bool wrong = scan::bad_pointer(indptr, M, items);
    scan::each(data, items, scan::thread(), scan::threads(), [&](T value) { wrong |= !(value & (T)live); });
    scan::share(M, span, [&](i64 row, int lane) {
        const bool there = row < M;
        const u8* bytes = bitmask + row * wide;
        u64 ones = 0;
        scan::each(bytes, there ? wide : 0, lane, span, [&](u8 byte) { ones += __popc(byte); });
        ones = scan::summed(ones, span);
        if (!there || lane) return;
        wrong |= (u64)indptr[row + 1] - (u64)indptr[row] != ones;  // unsigned, because a wrong pointer may overflow
        if (K % 8) wrong |= bytes[wide - 1] >> K % 8;
    });
    scan::report(wrong, bad);
}

}  // namespace spformat
