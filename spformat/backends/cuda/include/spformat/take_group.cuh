// The values of a group of a record (bitmask_records.cuh) as two registers of a fragment of A. sm_80 and later.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

// Two registers of a fragment from the values at `at`: one for each of the four bits of group Q that is set, zero for the
// others. The loads are predicated: a lane without a bit loads nothing, so that fewer banks collide.
template <int Q> __device__ __forceinline__ void take_group(u32& low, u32& high, u32 bits, u32 at) {
    asm volatile(
            "{\n.reg .pred p0, p1, p2, p3;\n.reg .b32 b0, b1, b2, b3, v1, v3;\n"
            "and.b32 b0, %3, %4;\nand.b32 b1, %3, %5;\nand.b32 b2, %3, %6;\nand.b32 b3, %3, %7;\n"
            "setp.ne.u32 p0, b0, 0;\nsetp.ne.u32 p1, b1, 0;\nsetp.ne.u32 p2, b2, 0;\nsetp.ne.u32 p3, b3, 0;\n"
            "mov.b32 %0, 0;\nmov.b32 %1, 0;\n"
            "@p0 ld.shared.u16 %0, [%2];\n@p0 add.u32 %2, %2, 2;\n"
            "@p1 ld.shared.u16 v1, [%2];\n@p1 add.u32 %2, %2, 2;\n"
            "@p2 ld.shared.u16 %1, [%2];\n@p2 add.u32 %2, %2, 2;\n"
            "@p3 ld.shared.u16 v3, [%2];\n"
            "@p1 prmt.b32 %0, %0, v1, 0x5410;\n@p3 prmt.b32 %1, %1, v3, 0x5410;\n}"
            : "=&r"(low), "=&r"(high), "+r"(at)
            : "r"(bits), "n"(1u << (4 * Q)), "n"(2u << (4 * Q)), "n"(4u << (4 * Q)), "n"(8u << (4 * Q)));
}

}  // namespace spformat
