// Instructions of a whole warp on matrices: ldmatrix, stmatrix, movmatrix, mma and mma.sp of sm_80 (stmatrix: sm_90).
//
// Lane 4g+t. An 8x8 tile of 16-bit items: lane l's word holds items 2t, 2t+1 of row g (.trans: items g of rows 2t, 2t+1).
// mma m16n8: d[r] = D[g + 8 (r/2)][2t + r%2].
//   16-bit types:  a[r] = A[g + 8 (r%2)][2t + 8 (r/2) ..+1]   b[r] = B[2t + 8r ..+1][g]
//   tf32:          a[r] = A[g + 8 (r%2)][t + 4 (r/2)]         b[r] = B[t + 4r][g]; the lowest 13 bits are not read
//   mma.sp m16n8k32: a as for k = 16, over the kept values. Word e of lanes t = 2F, 2F+1 (F: the selector) has the places of
//   columns 16 (t-2F) .. +15, of row g in the low half and of row g+8 in the high one: two bits for each kept value. Where
//   they do not increase PTX defines nothing: an error, or for kept zeros, which a copied box may be filled up with, a row of NaN.
// Products are exact and added in double precision; the sum is rounded towards zero to float32, once. A GPU adds in an order and
// with a precision that nobody documents: results that are not exact in float32 differ in their last bits.
#pragma once
#pragma GCC visibility push(hidden)

namespace emu {

enum Kind { F16, BF16, TF32 };
float half_value(u32 bits);  // of a float16

struct Tiles : WarpWide {
    char* row;  // ldmatrix, stmatrix: where the row of this lane is
    u32 words[4];
};
void run_ldmatrix_1(WarpWide* const* lanes);
void run_ldmatrix_2(WarpWide* const* lanes);
void run_ldmatrix_4(WarpWide* const* lanes);
void run_ldmatrix_1_trans(WarpWide* const* lanes);
void run_ldmatrix_2_trans(WarpWide* const* lanes);
void run_ldmatrix_4_trans(WarpWide* const* lanes);
void run_stmatrix_1(WarpWide* const* lanes);
void run_stmatrix_2(WarpWide* const* lanes);
void run_stmatrix_4(WarpWide* const* lanes);
void run_stmatrix_1_trans(WarpWide* const* lanes);
void run_stmatrix_2_trans(WarpWide* const* lanes);
void run_stmatrix_4_trans(WarpWide* const* lanes);
void run_movmatrix(WarpWide* const* lanes);

// Rows are 16 bytes on multiples of 16; lanes from 8 * Count on give no address.
template <int Count, bool Trans> EMU_INTRINSIC void ldmatrix(u32 (&words)[Count], u32 address) {
    constexpr auto run = Count == 1 ? Trans ? &run_ldmatrix_1_trans : &run_ldmatrix_1
                         : Count == 2 ? Trans ? &run_ldmatrix_2_trans : &run_ldmatrix_2
                                      : Trans ? &run_ldmatrix_4_trans : &run_ldmatrix_4;
    Tiles mine{{run, "ldmatrix"}, current % 32 < 8 * Count ? shared_pointer(address, 16, 16) : nullptr, {}};
    warp_wide(mine);
    for (int i = 0; i < Count; ++i) words[i] = mine.words[i];
}
template <int Count, bool Trans> EMU_INTRINSIC void stmatrix(u32 address, const u32 (&words)[Count]) {
    constexpr auto run = Count == 1 ? Trans ? &run_stmatrix_1_trans : &run_stmatrix_1
                         : Count == 2 ? Trans ? &run_stmatrix_2_trans : &run_stmatrix_2
                                      : Trans ? &run_stmatrix_4_trans : &run_stmatrix_4;
    Tiles mine{{run, "stmatrix"}, current % 32 < 8 * Count ? shared_pointer(address, 16, 16) : nullptr, {}};
    for (int i = 0; i < Count; ++i) mine.words[i] = words[i];
    warp_wide(mine);
}
EMU_INTRINSIC u32 movmatrix(u32 word) {
    Tiles mine{{&run_movmatrix, "movmatrix"}, nullptr, {word}};
    warp_wide(mine);
    return mine.words[0];
}

struct Product : WarpWide {
    Kind kind;
    int k, selector;  // k: rows of B
    void* where;      // in the code, for errors
    u32 a[4], b[4], e;
    float d[4];
};
__attribute__((noinline)) static void* here() { return __builtin_return_address(0); }
void run_mma(WarpWide* const* lanes);
void run_mma_sp(WarpWide* const* lanes);

template <size_t A, size_t B>
EMU_INTRINSIC void mma(Kind kind, int k, float (&d)[4], const u32 (&a)[A], const u32 (&b)[B], const float (&c)[4]) {
    Product mine{{&run_mma, "mma"}, kind, k, 0, here(), {}, {}, 0, {c[0], c[1], c[2], c[3]}};
    for (size_t i = 0; i < A; ++i) mine.a[i] = a[i];
    for (size_t i = 0; i < B; ++i) mine.b[i] = b[i];
    warp_wide(mine);
    for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
}
EMU_INTRINSIC void mma_sp(Kind kind, float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], const float (&c)[4], u32 e, int selector) {
    Product mine{{&run_mma_sp, "mma.sp"}, kind, 32, selector, here(), {a[0], a[1], a[2], a[3]}, {b[0], b[1], b[2], b[3]}, e,
                 {c[0], c[1], c[2], c[3]}};
    warp_wide(mine);
    for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
}

}  // namespace emu

#pragma GCC visibility pop
