// CUDA's functions: barriers, warps, atomics, loads and stores with hints, bits and numbers.
#pragma once

namespace emu {

template <class T> EMU_INTRINSIC u64 bits_of(T x) { u64 b = 0; memcpy(&b, &x, sizeof x); return b; }
template <class T> EMU_INTRINSIC T of_bits(u64 b) { T x; memcpy(&x, &b, sizeof x); return x; }
EMU_INTRINSIC u32 lane() { return current % 32; }
// The lane that a shuffle reads, as PTX defines it, 32 for the own value.
EMU_INTRINSIC u32 shfl_up_source(u32 d, u32 width) { const int first = lane() & ~(width - 1), s = (int)lane() - (int)d; return s >= first ? s : 32; }
EMU_INTRINSIC u32 shfl_down_source(u32 d, u32 width) { const u32 last = lane() | (width - 1), s = lane() + d; return s <= last ? s : 32; }
EMU_INTRINSIC u32 shfl_xor_source(u32 d, u32 width) { const u32 last = lane() | (width - 1), s = lane() ^ d; return s <= last ? s : 32; }
EMU_INTRINSIC u32 shfl_source(u32 s, u32 width) { return (lane() & ~(width - 1)) | (s & (width - 1)); }

}  // namespace emu

// ---- barriers
EMU_INTRINSIC void __syncthreads() { emu::block_op(emu::SYNCTHREADS, 0); }
EMU_INTRINSIC int __syncthreads_or(int p) { return (int)emu::block_op(emu::SYNCTHREADS_OR, p != 0); }
EMU_INTRINSIC int __syncthreads_and(int p) { return (int)emu::block_op(emu::SYNCTHREADS_AND, p != 0); }
EMU_INTRINSIC int __syncthreads_count(int p) { return (int)emu::block_op(emu::SYNCTHREADS_COUNT, p != 0); }
EMU_INTRINSIC void __syncwarp(unsigned mask = ~0u) { emu::warp_op(emu::SYNCWARP, mask, 0); }
EMU_INTRINSIC void __threadfence() { emu::yield(); }
EMU_INTRINSIC void __threadfence_block() { emu::yield(); }
EMU_INTRINSIC void __threadfence_system() { emu::yield(); }
EMU_INTRINSIC void __nanosleep(unsigned) { emu::yield(); }
[[noreturn]] EMU_INTRINSIC void __trap() { emu::unsupported("__trap()"); }

// ---- warps
EMU_INTRINSIC unsigned __activemask() { emu::unsupported("__activemask(): lanes do not run in lock step here"); }
EMU_INTRINSIC unsigned __ballot_sync(unsigned m, int p) { return (unsigned)emu::warp_op(emu::BALLOT, m, p != 0); }
EMU_INTRINSIC int __any_sync(unsigned m, int p) { return (int)emu::warp_op(emu::ANY, m, p != 0); }
EMU_INTRINSIC int __all_sync(unsigned m, int p) { return emu::warp_op(emu::ALL, m, p != 0) != 0; }
EMU_INTRINSIC int __uni_sync(unsigned m, int p) { return (int)emu::warp_op(emu::UNI, m, p != 0); }
EMU_INTRINSIC unsigned __reduce_add_sync(unsigned m, unsigned x) { return (unsigned)emu::warp_op(emu::RED_ADD, m, x); }
EMU_INTRINSIC int __reduce_add_sync(unsigned m, int x) { return (int)(unsigned)emu::warp_op(emu::RED_ADD, m, (unsigned)x); }
EMU_INTRINSIC unsigned __reduce_min_sync(unsigned m, unsigned x) { return (unsigned)emu::warp_op(emu::RED_MIN_U, m, x); }
EMU_INTRINSIC int __reduce_min_sync(unsigned m, int x) { return (int)(unsigned)emu::warp_op(emu::RED_MIN_S, m, (unsigned)x); }
EMU_INTRINSIC unsigned __reduce_max_sync(unsigned m, unsigned x) { return (unsigned)emu::warp_op(emu::RED_MAX_U, m, x); }
EMU_INTRINSIC int __reduce_max_sync(unsigned m, int x) { return (int)(unsigned)emu::warp_op(emu::RED_MAX_S, m, (unsigned)x); }
EMU_INTRINSIC unsigned __reduce_or_sync(unsigned m, unsigned x) { return (unsigned)emu::warp_op(emu::RED_OR, m, x); }
EMU_INTRINSIC unsigned __reduce_and_sync(unsigned m, unsigned x) { return (unsigned)emu::warp_op(emu::RED_AND, m, x); }
EMU_INTRINSIC unsigned __reduce_xor_sync(unsigned m, unsigned x) { return (unsigned)emu::warp_op(emu::RED_XOR, m, x); }
#define EMU_SHUFFLES(T)                                                                                                     \
    EMU_INTRINSIC T __shfl_sync(unsigned m, T x, int s, int w = 32) { return emu::of_bits<T>(emu::warp_op(emu::SHFL, m, emu::bits_of(x), emu::shfl_source(s, w))); } \
    EMU_INTRINSIC T __shfl_up_sync(unsigned m, T x, unsigned d, int w = 32) { return emu::of_bits<T>(emu::warp_op(emu::SHFL, m, emu::bits_of(x), emu::shfl_up_source(d, w))); } \
    EMU_INTRINSIC T __shfl_down_sync(unsigned m, T x, unsigned d, int w = 32) { return emu::of_bits<T>(emu::warp_op(emu::SHFL, m, emu::bits_of(x), emu::shfl_down_source(d, w))); } \
    EMU_INTRINSIC T __shfl_xor_sync(unsigned m, T x, int d, int w = 32) { return emu::of_bits<T>(emu::warp_op(emu::SHFL, m, emu::bits_of(x), emu::shfl_xor_source(d, w))); }
#define EMU_MATCHES(T)                                                                                                      \
    EMU_INTRINSIC unsigned __match_any_sync(unsigned m, T x) { return (unsigned)emu::warp_op(emu::MATCH_ANY, m, emu::bits_of(x)); } \
    EMU_INTRINSIC unsigned __match_all_sync(unsigned m, T x, int* p) { const unsigned r = (unsigned)emu::warp_op(emu::MATCH_ALL, m, emu::bits_of(x)); *p = r != 0; return r; }
#define EMU_NUMBERS(F) F(int) F(unsigned) F(long) F(unsigned long) F(long long) F(unsigned long long) F(float) F(double)
EMU_NUMBERS(EMU_SHUFFLES)
EMU_NUMBERS(EMU_MATCHES)
EMU_SHUFFLES(__half)
EMU_SHUFFLES(__nv_bfloat16)
EMU_SHUFFLES(__half2)
EMU_SHUFFLES(__nv_bfloat162)

// ---- atomics: one OS thread, so plain operations; the overloads are those of CUDA
#define EMU_ATOMIC(name, T, expression) \
    inline T name(T* p, T x) { const T old = *p; *p = (expression); return old; } \
    inline T name##_block(T* p, T x) { return name(p, x); } \
    inline T name##_system(T* p, T x) { return name(p, x); }
#define EMU_INTS(F, name, e) F(name, int, e) F(name, unsigned, e) F(name, unsigned long long, e)
EMU_INTS(EMU_ATOMIC, atomicAdd, old + x)
EMU_ATOMIC(atomicAdd, float, old + x)
EMU_ATOMIC(atomicAdd, double, old + x)
EMU_ATOMIC(atomicSub, int, old - x)
EMU_ATOMIC(atomicSub, unsigned, old - x)
EMU_INTS(EMU_ATOMIC, atomicOr, old | x)
EMU_INTS(EMU_ATOMIC, atomicAnd, old & x)
EMU_INTS(EMU_ATOMIC, atomicXor, old ^ x)
EMU_INTS(EMU_ATOMIC, atomicMax, old > x ? old : x)
EMU_INTS(EMU_ATOMIC, atomicMin, old < x ? old : x)
EMU_ATOMIC(atomicMax, long long, old > x ? old : x)
EMU_ATOMIC(atomicMin, long long, old < x ? old : x)
EMU_INTS(EMU_ATOMIC, atomicExch, x)
EMU_ATOMIC(atomicExch, float, x)
EMU_ATOMIC(atomicInc, unsigned, old >= x ? 0u : old + 1)
EMU_ATOMIC(atomicDec, unsigned, old == 0 || old > x ? x : old - 1)
#define EMU_CAS(T) inline T atomicCAS(T* p, T expected, T x) { const T old = *p; if (old == expected) *p = x; return old; }
EMU_CAS(int) EMU_CAS(unsigned) EMU_CAS(unsigned long long) EMU_CAS(unsigned short)

// ---- loads and stores with hints
template <class T> EMU_INTRINSIC T __ldg(const T* p) { return *p; }
template <class T> EMU_INTRINSIC T __ldcs(const T* p) { return *p; }
template <class T> EMU_INTRINSIC T __ldcg(const T* p) { return *p; }
template <class T> EMU_INTRINSIC T __ldca(const T* p) { return *p; }
template <class T> EMU_INTRINSIC T __ldcv(const T* p) { return *const_cast<const volatile T*>(p); }
template <class T> EMU_INTRINSIC T __ldlu(const T* p) { return *p; }
template <class T> EMU_INTRINSIC void __stcs(T* p, std::common_type_t<T> x) { *p = x; }
template <class T> EMU_INTRINSIC void __stcg(T* p, std::common_type_t<T> x) { *p = x; }
template <class T> EMU_INTRINSIC void __stwb(T* p, std::common_type_t<T> x) { *p = x; }
template <class T> EMU_INTRINSIC void __stwt(T* p, std::common_type_t<T> x) { *p = x; }

// ---- bits and numbers
EMU_INTRINSIC int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INTRINSIC int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INTRINSIC int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
EMU_INTRINSIC int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
EMU_INTRINSIC int __ffs(int x) { return __builtin_ffs(x); }
EMU_INTRINSIC int __ffsll(long long x) { return __builtin_ffsll(x); }
EMU_INTRINSIC unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i); return r; }
EMU_INTRINSIC unsigned long long __brevll(unsigned long long x) { return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32)); }
EMU_INTRINSIC unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned n = s >> (4 * i) & 15;
        unsigned b = both >> (8 * (n & 7)) & 255;
        if (n & 8) b = b & 128 ? 255 : 0;
        r |= b << (8 * i);
    }
    return r;
}
EMU_INTRINSIC unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) { return (unsigned)((((unsigned long long)hi << 32 | lo) << (s & 31)) >> 32); }
EMU_INTRINSIC unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) { return (unsigned)(((unsigned long long)hi << 32 | lo) >> (s & 31)); }
EMU_INTRINSIC unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned s) { s = s < 32 ? s : 32; return (unsigned)((((unsigned long long)hi << 32 | lo) << s) >> 32); }
EMU_INTRINSIC unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned s) { s = s < 32 ? s : 32; return (unsigned)(((unsigned long long)hi << 32 | lo) >> s); }
EMU_INTRINSIC unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
EMU_INTRINSIC int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
EMU_INTRINSIC unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
EMU_INTRINSIC unsigned __vcmpne4(unsigned a, unsigned b) { unsigned r = 0; for (int i = 0; i < 32; i += 8) r |= ((a >> i & 255) != (b >> i & 255) ? 255u : 0u) << i; return r; }
EMU_INTRINSIC unsigned __vcmpeq4(unsigned a, unsigned b) { return ~__vcmpne4(a, b); }
EMU_INTRINSIC unsigned __vcmpne2(unsigned a, unsigned b) { return ((a & 0xFFFF) != (b & 0xFFFF) ? 0xFFFFu : 0u) | (a >> 16 != b >> 16 ? 0xFFFF0000u : 0u); }
EMU_INTRINSIC unsigned __vcmpeq2(unsigned a, unsigned b) { return ~__vcmpne2(a, b); }
EMU_INTRINSIC unsigned __float_as_uint(float x) { return emu::of_bits<unsigned>(emu::bits_of(x)); }
EMU_INTRINSIC int __float_as_int(float x) { return emu::of_bits<int>(emu::bits_of(x)); }
EMU_INTRINSIC float __uint_as_float(unsigned x) { return emu::of_bits<float>(x); }
EMU_INTRINSIC float __int_as_float(int x) { return emu::of_bits<float>((unsigned)x); }
EMU_INTRINSIC long long __double_as_longlong(double x) { return emu::of_bits<long long>(emu::bits_of(x)); }
EMU_INTRINSIC double __longlong_as_double(long long x) { return emu::of_bits<double>((unsigned long long)x); }
EMU_INTRINSIC int __double2hiint(double x) { return (int)(emu::bits_of(x) >> 32); }
EMU_INTRINSIC int __double2loint(double x) { return (int)emu::bits_of(x); }
EMU_INTRINSIC double __hiloint2double(int h, int l) { return emu::of_bits<double>((unsigned long long)(unsigned)h << 32 | (unsigned)l); }
EMU_INTRINSIC double __dadd_rn(double a, double b) { return a + b; }
EMU_INTRINSIC double __dmul_rn(double a, double b) { return a * b; }
EMU_INTRINSIC float __fadd_rn(float a, float b) { return a + b; }
EMU_INTRINSIC float __fmul_rn(float a, float b) { return a * b; }
EMU_INTRINSIC float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMU_INTRINSIC size_t __cvta_generic_to_shared(const void* p) { return emu::shared_address(p); }
EMU_INTRINSIC void* __cvta_shared_to_generic(size_t at) { return emu::shared_pointer((emu::u32)at, 0, 1); }
EMU_INTRINSIC size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }
#define __builtin_assume(x) ((void)0)
EMU_INTRINSIC void __prefetch_global(const void*) {}
EMU_INTRINSIC long long clock64() { return (long long)(emu::now() * 1e9); }
EMU_INTRINSIC bool __isGlobal(const void*) { return true; }
using std::isfinite;
using std::isinf;
using std::isnan;
template <class A, class B> constexpr EMU_INTRINSIC std::common_type_t<A, B> min(A a, B b) { using T = std::common_type_t<A, B>; return T(b) < T(a) ? T(b) : T(a); }
template <class A, class B> constexpr EMU_INTRINSIC std::common_type_t<A, B> max(A a, B b) { using T = std::common_type_t<A, B>; return T(a) < T(b) ? T(b) : T(a); }
EMU_INTRINSIC unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
EMU_INTRINSIC unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }
EMU_INTRINSIC float emu_half_to_float(unsigned short b) { __half_raw r; r.x = b; return __half2float(__half(r)); }
EMU_INTRINSIC unsigned emu_pack_half(float high, float low) { const __half_raw h = __float2half_rn(high), l = __float2half_rn(low); return (unsigned)h.x << 16 | l.x; }
EMU_INTRINSIC unsigned emu_pack_bfloat(float high, float low) { const __nv_bfloat16_raw h = __float2bfloat16_rn(high), l = __float2bfloat16_rn(low); return (unsigned)h.x << 16 | l.x; }
EMU_INTRINSIC unsigned emu_shfl_up_add(unsigned x, unsigned d) { const unsigned o = __shfl_up_sync(~0u, x, d); return emu::lane() >= d ? x + o : x; }
