// A whole record of a Bitmask (bitmask_records.cuh) in shared memory as A fragments of mma m16n8k16.
#pragma once
#include "spformat/bitmask_records.cuh"
#include "spformat/take_group.cuh"

namespace spformat {

// Bits of this lane, and where the values of groups 2k and 2k+1 start: groups[k]. record: an address in shared memory.
__device__ __forceinline__ void load_head(u32 record, int lane, u32& bits, u32 (&groups)[4]) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(record + RECORD_BITS + 4 * lane) : "memory");
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(groups[0]), "=r"(groups[1]), "=r"(groups[2]), "=r"(groups[3]) : "r"(record) : "memory");
}

// a[k]: the fragment of columns 16k .. 16k+15. All lanes of the warp call it, with what load_head gave them.
__device__ __forceinline__ void take_record(u32 (&a)[4][4], u32 record, u32 bits, const u32 (&groups)[4]) {
    u32 before[2];
    bytes_before(bits, before);
    auto at = [&](int q) { return record + (groups[q / 2] >> 16 * (q % 2) & 0xFFFF) + __byte_perm(before[q % 2], 0, 0x4440 + q / 2); };
    take_group<0>(a[0][0], a[0][2], bits, at(0)), take_group<1>(a[0][1], a[0][3], bits, at(1));
    take_group<2>(a[1][0], a[1][2], bits, at(2)), take_group<3>(a[1][1], a[1][3], bits, at(3));
    take_group<4>(a[2][0], a[2][2], bits, at(4)), take_group<5>(a[2][1], a[2][3], bits, at(5));
    take_group<6>(a[3][0], a[3][2], bits, at(6)), take_group<7>(a[3][1], a[3][3], bits, at(7));
}

}  // namespace spformat
