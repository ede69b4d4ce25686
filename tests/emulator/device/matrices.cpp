// What a warp computes with matrices, for all its lanes at once.
#include "emulator.h"

#include <cstdio>
#include <vector>

EMU_API unsigned long long emu_products;
unsigned long long emu_products = 0;  // mma and mma.sp instructions so far

#pragma GCC visibility push(hidden)

namespace emu {

// ---- 8x8 tiles of 16-bit items
using u16 = unsigned short;

static Tiles& tiles(WarpWide* const* lanes, int lane) { return *static_cast<Tiles*>(lanes[lane]); }

template <int Count, bool Trans> static void load_tiles(WarpWide* const* lanes) {
    for (int i = 0; i < Count; ++i)
        for (int l = 0; l < 32; ++l) {
            const int g = l / 4, t = l % 4;
            u16 items[2];
            for (int e = 0; e < 2; ++e) {
                const int row = Trans ? 2 * t + e : g, item = Trans ? g : 2 * t + e;
                memcpy(items + e, tiles(lanes, 8 * i + row).row + 2 * item, 2);
            }
            tiles(lanes, l).words[i] = items[0] | (u32)items[1] << 16;
        }
}
template <int Count, bool Trans> static void store_tiles(WarpWide* const* lanes) {
    for (int i = 0; i < Count; ++i)
        for (int l = 0; l < 32; ++l)
            for (int e = 0; e < 2; ++e) {
                const int g = l / 4, t = l % 4, row = Trans ? 2 * t + e : g, item = Trans ? g : 2 * t + e;
                const u16 value = (u16)(tiles(lanes, l).words[i] >> 16 * e);
                memcpy(tiles(lanes, 8 * i + row).row + 2 * item, &value, 2);
            }
    const u32 warp = thread_number() / 32 * 32;
    for (int i = 0; i < Count; ++i)
        for (int l = 0; l < 32; ++l)
            if (l % 4 == 0) note_written_by(warp + l, tiles(lanes, 8 * i + l / 4).row, 16);
}
void run_ldmatrix_1(WarpWide* const* lanes) { load_tiles<1, false>(lanes); }
void run_ldmatrix_2(WarpWide* const* lanes) { load_tiles<2, false>(lanes); }
void run_ldmatrix_4(WarpWide* const* lanes) { load_tiles<4, false>(lanes); }
void run_ldmatrix_1_trans(WarpWide* const* lanes) { load_tiles<1, true>(lanes); }
void run_ldmatrix_2_trans(WarpWide* const* lanes) { load_tiles<2, true>(lanes); }
void run_ldmatrix_4_trans(WarpWide* const* lanes) { load_tiles<4, true>(lanes); }
void run_stmatrix_1(WarpWide* const* lanes) { store_tiles<1, false>(lanes); }
void run_stmatrix_2(WarpWide* const* lanes) { store_tiles<2, false>(lanes); }
void run_stmatrix_4(WarpWide* const* lanes) { store_tiles<4, false>(lanes); }
void run_stmatrix_1_trans(WarpWide* const* lanes) { store_tiles<1, true>(lanes); }
void run_stmatrix_2_trans(WarpWide* const* lanes) { store_tiles<2, true>(lanes); }
void run_stmatrix_4_trans(WarpWide* const* lanes) { store_tiles<4, true>(lanes); }

void run_movmatrix(WarpWide* const* lanes) {
    u16 tile[8][8];
    for (int l = 0; l < 32; ++l)
        for (int e = 0; e < 2; ++e) tile[l / 4][2 * (l % 4) + e] = (u16)(tiles(lanes, l).words[0] >> 16 * e);
    for (int l = 0; l < 32; ++l) tiles(lanes, l).words[0] = tile[2 * (l % 4)][l / 4] | (u32)tile[2 * (l % 4) + 1][l / 4] << 16;
}

// ---- products
static Product& product(WarpWide* const* lanes, int lane) { return *static_cast<Product*>(lanes[lane]); }

float half_value(u32 bits) {
    static const std::vector<float> values = [] {
        std::vector<float> all(1 << 16);
        for (u32 i = 0; i < all.size(); ++i) all[i] = emu_half_to_float((u16)i);
        return all;
    }();
    return values[bits];
}

// Item `i` of a word.
static float item(Kind kind, u32 word, int i) {
    if (kind == TF32) return of_bits<float>(word & 0xFFFFE000u);
    const u32 bits = word >> 16 * i & 0xFFFF;
    return kind == F16 ? half_value(bits) : of_bits<float>(bits << 16);
}

float rounded_towards_zero(double sum) {
    const float near = (float)sum;
    if (std::isnan(near)) return of_bits<float>(0x7FFFFFFFu);
    return std::isfinite(near) && std::fabs((double)near) > std::fabs(sum) ? std::nextafterf(near, 0.0f) : near;
}

// D += A[16][k] @ B[k][8] with A expanded.
static void add_product(WarpWide* const* lanes, int k, const float (&a)[16][32]) {
    const Kind kind = product(lanes, 0).kind;
    const int items = kind == TF32 ? 1 : 2;
    float b[32][8];
    for (int l = 0; l < 32; ++l)
        for (int r = 0; r < k / 4 / items; ++r)
            for (int e = 0; e < items; ++e) b[items * (l % 4) + 4 * items * r + e][l / 4] = item(kind, product(lanes, l).b[r], e);
    double sums[16][8];
    for (int l = 0; l < 32; ++l)
        for (int r = 0; r < 4; ++r) sums[l / 4 + 8 * (r / 2)][2 * (l % 4) + r % 2] = product(lanes, l).d[r];
    for (int i = 0; i < 16; ++i)
        for (int x = 0; x < k; ++x)
            for (int j = 0; j < 8; ++j) sums[i][j] += (double)a[i][x] * b[x][j];
    for (int l = 0; l < 32; ++l)
        for (int r = 0; r < 4; ++r) product(lanes, l).d[r] = rounded_towards_zero(sums[l / 4 + 8 * (r / 2)][2 * (l % 4) + r % 2]);
}

// A[16][k] as the lanes hold it.
static void take_a(WarpWide* const* lanes, int k, float (&a)[16][32]) {
    const Kind kind = product(lanes, 0).kind;
    const int items = kind == TF32 ? 1 : 2;
    for (int l = 0; l < 32; ++l)
        for (int r = 0; r < k / 2 / items; ++r)
            for (int e = 0; e < items; ++e)
                a[l / 4 + 8 * (r % 2)][items * (l % 4) + 4 * items * (r / 2) + e] = item(kind, product(lanes, l).a[r], e);
}

static void check_alike(WarpWide* const* lanes) {
    const Product& first = product(lanes, 0);
    for (int l = 1; l < 32; ++l) {
        const Product& p = product(lanes, l);
        if (p.kind != first.kind || p.k != first.k || p.selector != first.selector)
            fail("lanes of a warp meet at different products of the whole warp", p.where);
    }
}

void run_mma(WarpWide* const* lanes) {
    ++emu_products;
    check_alike(lanes);
    const int k = product(lanes, 0).k;
    float a[16][32];
    take_a(lanes, k, a);
    add_product(lanes, k, a);
}

void run_mma_sp(WarpWide* const* lanes) {
    ++emu_products;
    check_alike(lanes);
    const int selector = product(lanes, 0).selector;
    float kept[16][32], a[16][32] = {};
    take_a(lanes, 16, kept);
    for (int row = 0; row < 16; ++row)
        for (int group = 0; group < 8; ++group) {  // of four columns, two of them kept
            const Product& p = product(lanes, 4 * (row % 8) + 2 * selector + group / 4);
            const u32 places = p.e >> (16 * (row / 8) + 4 * (group % 4));
            const int first = places & 3, second = places >> 2 & 3;
            if (first >= second) {
                if (kept[row][2 * group] || kept[row][2 * group + 1]) {
                    char what[128];
                    snprintf(what, sizeof what, "mma.sp::ordered_metadata with the places %d, %d (row %d, columns %d to %d): they must increase",
                             first, second, row, 4 * group, 4 * group + 3);
                    fail(what, p.where);
                }
                a[row][4 * group] = NAN;  // zeros that fill up a box: the row of D is undefined, and a kernel may not use it
                continue;
            }
            a[row][4 * group + first] = kept[row][2 * group], a[row][4 * group + second] = kept[row][2 * group + 1];
        }
    add_product(lanes, 32, a);
}

}  // namespace emu

#pragma GCC visibility pop
