// Hopper warpgroup matrix instructions (sm_90a): D[64, N] += A[64, k] * B[k, N], f32 sums in registers.
//
// A and B come from shared memory through 64-bit descriptors (ss), or A from registers (rs). All 128 threads of a
// warpgroup issue together. A k step is 16 columns of bf16 / f16, or 32 logical columns of a 2:4 operand (sp_rs).
//
// Accumulator of lane l in warp w (of 4): row 16w + l/4 + 8*((i/2)%2), column 8*(i/4) + 2*(l%4) + i%2 for d[i].
// A fragment (rs): a[0..3] = rows l/4 and l/4 + 8 of columns 2*(l%4)..+1, then the same rows of columns + 8: what
// ldmatrix.x4 delivers from a k-contiguous tile.
//
// Use: fence(); ss<..>(d, ..) ...; commit(); wait<0>(). Between the first instruction and wait nothing may touch d.
#pragma once

#include "spformat/dtypes.cuh"

namespace spformat::wgmma {

enum Swizzle : u32 { NONE = 0, B128 = 1, B64 = 2, B32 = 3 };

// Shared-memory operand. `address`: 32-bit shared address, aligned to the swizzle pattern (8 rows: 1024, 512, 256 bytes).
// k-contiguous ("K-major") tiles with one swizzle row per matrix row: `stride` = bytes between groups of 8 rows; `leading`
// is ignored. Step k by adding the bytes of 16 values to the address: the pattern depends on address bits only.
// n-contiguous ("MN-major", Trans = 1) tiles: a swizzle row holds 64 (B128) values of one k; `stride` = bytes between
// groups of 8 k, `leading` = bytes between neighbouring groups of 64 values along the row or column axis.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride, Swizzle swizzle) {
    // In a cluster a shared address has the block's rank from bit 24 up; what the descriptor holds is the offset.
    return static_cast<u64>(leading >> 4 << 16 | (address & 0x3ffff) >> 4) |
           static_cast<u64>(stride >> 4 | static_cast<u32>(swizzle) << 30) << 32;
}
// The same operand `sixteenths` times 16 bytes further; cheaper than a new descriptor.
__device__ __forceinline__ u64 advanced(u64 descriptor, u32 sixteenths) {
    return (descriptor & 0xffffffff00000000ull) | (static_cast<u32>(descriptor) + sixteenths);
}

// Before the first instruction: registers and shared memory written by this thread become visible to the tensor cores.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `Left` committed groups run.
template <int Left>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}
// Keeps the compiler from moving reads or writes of the accumulators across this point.
template <int Count>
__device__ __forceinline__ void pin(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <typename T>
inline constexpr bool is_bf16 = same_type<T, __nv_bfloat16>::value;

template <int N>
struct Shape;  // one per width below

// clang-format off
#define SPFORMAT_WGMMA_SS(N, TYPE, REGS, P0, P1, P2, P3, P4)                                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\n"                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " REGS ", " P0 ", " P1                \
               ", p, 1, 1, " P3 ", " P4 ";\n}"                                                                         \
               : SPFORMAT_ACC : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB))
#define SPFORMAT_WGMMA_RS(N, TYPE, REGS, P0, P1, P2, P3, P4, P5, P6)                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\n"                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " REGS ", {" P0 ", " P1 ", " P2       \
               ", " P3 "}, " P4 ", p, 1, 1, " P6 ";\n}"                                                                \
               : SPFORMAT_ACC : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TransB))
#define SPFORMAT_WGMMA_SP(N, TYPE, REGS, P0, P1, P2, P3, P4, P5, P6, P7, P8)                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P6 ", 0;\n"                                                         \
               "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE " " REGS ", {" P0 ", " P1 ", " P2    \
               ", " P3 "}, " P4 ", " P5 ", " P7 ", p, 1, 1, " P8 ";\n}"                                                \
               : SPFORMAT_ACC : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(meta), "r"(accumulate),        \
                 "n"(Selector), "n"(TransB))
#define SPFORMAT_WGMMA_SP_SS(N, TYPE, REGS, P0, P1, P2, P3, P4, P5)                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P3 ", 0;\n"                                                         \
               "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE " " REGS ", " P0 ", " P1 ", " P2      \
               ", " P4 ", p, 1, 1, 0, " P5 ";\n}"                                                                      \
               : SPFORMAT_ACC : "l"(a), "l"(b), "r"(meta), "r"(accumulate), "n"(Selector), "n"(TransB))
// REGS names the N/2 accumulators, P0.. the operands that follow them.
#define SPFORMAT_WGMMA(N, REGS, P0, P1, P2, P3, P4, P5, P6, P7, P8)                                                    \
  template <>                                                                                                          \
  struct Shape<N> {                                                                                                    \
    template <typename T, int TransA, int TransB>                                                                      \
    __device__ __forceinline__ static void ss(float (&d)[N / 2], u64 a, u64 b,                                         \
                                              int accumulate) {                                                        \
      if constexpr (is_bf16<T>) SPFORMAT_WGMMA_SS(N, "bf16", REGS, P0, P1, P2, P3, P4);                                \
      else SPFORMAT_WGMMA_SS(N, "f16", REGS, P0, P1, P2, P3, P4);                                                      \
    }                                                                                                                  \
    template <typename T, int TransB>                                                                                  \
    __device__ __forceinline__ static void rs(float (&d)[N / 2], const u32 (&a)[4], u64 b,                             \
                                              int accumulate) {                                                        \
      if constexpr (is_bf16<T>) SPFORMAT_WGMMA_RS(N, "bf16", REGS, P0, P1, P2, P3, P4, P5, P6);                        \
      else SPFORMAT_WGMMA_RS(N, "f16", REGS, P0, P1, P2, P3, P4, P5, P6);                                              \
    }                                                                                                                  \
    template <typename T, int Selector, int TransB>                                                                    \
    __device__ __forceinline__ static void sp_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b,                          \
                                                 u32 meta, int accumulate) {                                           \
      if constexpr (is_bf16<T>) SPFORMAT_WGMMA_SP(N, "bf16", REGS, P0, P1, P2, P3, P4, P5, P6, P7, P8);                \
      else SPFORMAT_WGMMA_SP(N, "f16", REGS, P0, P1, P2, P3, P4, P5, P6, P7, P8);                                      \
    }                                                                                                                  \
    template <typename T, int Selector, int TransB>                                                                    \
    __device__ __forceinline__ static void sp_ss(float (&d)[N / 2], u64 a, u64 b, u32 meta,                            \
                                                 int accumulate) {                                                     \
      if constexpr (is_bf16<T>) SPFORMAT_WGMMA_SP_SS(N, "bf16", REGS, P0, P1, P2, P3, P4, P5);                         \
      else SPFORMAT_WGMMA_SP_SS(N, "f16", REGS, P0, P1, P2, P3, P4, P5);                                               \
    }                                                                                                                  \
  };
#define SPFORMAT_ACC4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define SPFORMAT_ACC8(o) SPFORMAT_ACC4(o), SPFORMAT_ACC4(o + 4)
#define SPFORMAT_ACC16(o) SPFORMAT_ACC8(o), SPFORMAT_ACC8(o + 8)
#define SPFORMAT_ACC32(o) SPFORMAT_ACC16(o), SPFORMAT_ACC16(o + 16)
#define SPFORMAT_ACC64(o) SPFORMAT_ACC32(o), SPFORMAT_ACC32(o + 32)
#define SPFORMAT_ACC SPFORMAT_ACC4(0)
SPFORMAT_WGMMA(8, "{%0, %1, %2, %3}",
               "%4", "%5", "%6", "%7", "%8", "%9", "%10", "%11", "%12")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC8(0)
SPFORMAT_WGMMA(16, "{%0, %1, %2, %3, %4, %5, %6, %7}",
               "%8", "%9", "%10", "%11", "%12", "%13", "%14", "%15", "%16")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC16(0)
SPFORMAT_WGMMA(32, "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}",
               "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23", "%24")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC32(0)
SPFORMAT_WGMMA(64, "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}",
               "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39", "%40")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC32(0), SPFORMAT_ACC16(32)
SPFORMAT_WGMMA(96, "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}",
               "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55", "%56")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC64(0)
SPFORMAT_WGMMA(128, "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}",
               "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71", "%72")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC64(0), SPFORMAT_ACC32(64)
SPFORMAT_WGMMA(192, "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}",
               "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103", "%104")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC64(0), SPFORMAT_ACC64(64)
SPFORMAT_WGMMA(256, "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}",
               "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135", "%136")
// The widths between these, from names of 8 accumulators at a time.
#define SPFORMAT_REGS0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SPFORMAT_REGS1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SPFORMAT_REGS2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SPFORMAT_REGS3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SPFORMAT_REGS4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SPFORMAT_REGS5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SPFORMAT_REGS6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SPFORMAT_REGS7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SPFORMAT_REGS8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define SPFORMAT_REGS9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define SPFORMAT_REGS10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define SPFORMAT_REGS11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define SPFORMAT_REGS12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define SPFORMAT_REGS13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define SPFORMAT_REGS14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define SPFORMAT_REGS_TO1 SPFORMAT_REGS0 SPFORMAT_REGS1
#define SPFORMAT_REGS_TO2 SPFORMAT_REGS_TO1 SPFORMAT_REGS2
#define SPFORMAT_REGS_TO3 SPFORMAT_REGS_TO2 SPFORMAT_REGS3
#define SPFORMAT_REGS_TO4 SPFORMAT_REGS_TO3 SPFORMAT_REGS4
#define SPFORMAT_REGS_TO5 SPFORMAT_REGS_TO4 SPFORMAT_REGS5
#define SPFORMAT_REGS_TO6 SPFORMAT_REGS_TO5 SPFORMAT_REGS6
#define SPFORMAT_REGS_TO7 SPFORMAT_REGS_TO6 SPFORMAT_REGS7
#define SPFORMAT_REGS_TO8 SPFORMAT_REGS_TO7 SPFORMAT_REGS8
#define SPFORMAT_REGS_TO9 SPFORMAT_REGS_TO8 SPFORMAT_REGS9
#define SPFORMAT_REGS_TO10 SPFORMAT_REGS_TO9 SPFORMAT_REGS10
#define SPFORMAT_REGS_TO11 SPFORMAT_REGS_TO10 SPFORMAT_REGS11
#define SPFORMAT_REGS_TO12 SPFORMAT_REGS_TO11 SPFORMAT_REGS12
#define SPFORMAT_REGS_TO13 SPFORMAT_REGS_TO12 SPFORMAT_REGS13
#define SPFORMAT_REGS_TO14 SPFORMAT_REGS_TO13 SPFORMAT_REGS14
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC16(0), SPFORMAT_ACC8(16)
SPFORMAT_WGMMA(48, "{" SPFORMAT_REGS_TO2 "}",
               "%24", "%25", "%26", "%27", "%28", "%29", "%30", "%31", "%32")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC32(0), SPFORMAT_ACC8(32)
SPFORMAT_WGMMA(80, "{" SPFORMAT_REGS_TO4 "}",
               "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47", "%48")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC32(0), SPFORMAT_ACC16(32), SPFORMAT_ACC8(48)
SPFORMAT_WGMMA(112, "{" SPFORMAT_REGS_TO6 "}",
               "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63", "%64")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC64(0), SPFORMAT_ACC8(64)
SPFORMAT_WGMMA(144, "{" SPFORMAT_REGS_TO8 "}",
               "%72", "%73", "%74", "%75", "%76", "%77", "%78", "%79", "%80")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC64(0), SPFORMAT_ACC16(64)
SPFORMAT_WGMMA(160, "{" SPFORMAT_REGS_TO9 "}",
               "%80", "%81", "%82", "%83", "%84", "%85", "%86", "%87", "%88")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC64(0), SPFORMAT_ACC16(64), SPFORMAT_ACC8(80)
SPFORMAT_WGMMA(176, "{" SPFORMAT_REGS_TO10 "}",
               "%88", "%89", "%90", "%91", "%92", "%93", "%94", "%95", "%96")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC64(0), SPFORMAT_ACC32(64), SPFORMAT_ACC8(96)
SPFORMAT_WGMMA(208, "{" SPFORMAT_REGS_TO12 "}",
               "%104", "%105", "%106", "%107", "%108", "%109", "%110", "%111", "%112")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC64(0), SPFORMAT_ACC32(64), SPFORMAT_ACC16(96)
SPFORMAT_WGMMA(224, "{" SPFORMAT_REGS_TO13 "}",
               "%112", "%113", "%114", "%115", "%116", "%117", "%118", "%119", "%120")
#undef SPFORMAT_ACC
#define SPFORMAT_ACC SPFORMAT_ACC64(0), SPFORMAT_ACC32(64), SPFORMAT_ACC16(96), SPFORMAT_ACC8(112)
SPFORMAT_WGMMA(240, "{" SPFORMAT_REGS_TO14 "}",
               "%120", "%121", "%122", "%123", "%124", "%125", "%126", "%127", "%128")
#undef SPFORMAT_REGS0
#undef SPFORMAT_REGS1
#undef SPFORMAT_REGS2
#undef SPFORMAT_REGS3
#undef SPFORMAT_REGS4
#undef SPFORMAT_REGS5
#undef SPFORMAT_REGS6
#undef SPFORMAT_REGS7
#undef SPFORMAT_REGS8
#undef SPFORMAT_REGS9
#undef SPFORMAT_REGS10
#undef SPFORMAT_REGS11
#undef SPFORMAT_REGS12
#undef SPFORMAT_REGS13
#undef SPFORMAT_REGS14
#undef SPFORMAT_REGS_TO1
#undef SPFORMAT_REGS_TO2
#undef SPFORMAT_REGS_TO3
#undef SPFORMAT_REGS_TO4
#undef SPFORMAT_REGS_TO5
#undef SPFORMAT_REGS_TO6
#undef SPFORMAT_REGS_TO7
#undef SPFORMAT_REGS_TO8
#undef SPFORMAT_REGS_TO9
#undef SPFORMAT_REGS_TO10
#undef SPFORMAT_REGS_TO11
#undef SPFORMAT_REGS_TO12
#undef SPFORMAT_REGS_TO13
#undef SPFORMAT_REGS_TO14
#undef SPFORMAT_ACC
#undef SPFORMAT_ACC4
#undef SPFORMAT_ACC8
#undef SPFORMAT_ACC16
#undef SPFORMAT_ACC32
#undef SPFORMAT_ACC64
#undef SPFORMAT_WGMMA
#undef SPFORMAT_WGMMA_SS
#undef SPFORMAT_WGMMA_RS
#undef SPFORMAT_WGMMA_SP
#undef SPFORMAT_WGMMA_SP_SS
// clang-format on

// D[64, N] (+)= A[64, 16] * B[16, N]. TransA / TransB = 1: that operand is contiguous along its row / column axis
// instead of along k. `accumulate` = 0 overwrites d.
template <typename T, int N, int TransA = 0, int TransB = 0>
__device__ __forceinline__ void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate = 1) {
    Shape<N>::template ss<T, TransA, TransB>(d, a, b, accumulate);
}

// The same with A in registers.
template <typename T, int N, int TransB = 0>
__device__ __forceinline__ void rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate = 1) {
    Shape<N>::template rs<T, TransB>(d, a, b, accumulate);
}

// D[64, N] (+)= A[64, 32] * B[32, N], A 2:4 sparse: 16 kept values per row in registers, `meta` their positions
// (lanes that hold it: selector 0 or 1, formats two-four).
template <typename T, int N, int Selector, int TransB = 0>
__device__ __forceinline__ void sp_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, u32 meta,
                                      int accumulate = 1) {
    Shape<N>::template sp_rs<T, Selector, TransB>(d, a, b, meta, accumulate);
}

// The same with the kept values in shared memory: 32 bytes of 16 values a row, k-contiguous.
template <typename T, int N, int Selector, int TransB = 0>
__device__ __forceinline__ void sp_ss(float (&d)[N / 2], u64 a, u64 b, u32 meta, int accumulate = 1) {
    Shape<N>::template sp_ss<T, Selector, TransB>(d, a, b, meta, accumulate);
}

}  // namespace spformat::wgmma
