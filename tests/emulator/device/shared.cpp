// The window of shared memory: from pointers to 32-bit addresses and back.
#include "emulator.h"

#include <cstdio>
#include <vector>

#pragma GCC visibility push(hidden)

namespace emu {

u32 dynamic_alignment = 16;

struct Array {
    char* start;
    u32 size, address, image;  // image: where the array is in the images below
};
static std::vector<Array> arrays;  // the dynamic one first, its start that of the block that runs
static std::vector<char*> dynamic_starts;
static std::vector<std::vector<char>> images;  // by rank: the arrays of known size of a block while another one runs
static u32 inside;                             // the rank whose arrays are in their place

void set_window(const Options& o, const char* base, const std::vector<char*>& starts) {
    arrays.clear();
    dynamic_starts = starts;
    arrays.push_back({starts[0], (u32)o.smem, DYNAMIC_BASE + (u32)(reinterpret_cast<size_t>(starts[0]) % ALIKE), 0});
    u32 next = STATIC_BASE, image = 0;
    for (u64 r = 0; r < o.count; ++r) {
        char* const start = const_cast<char*>(base) + o.ranges[2 * r];
        const u32 size = (u32)o.ranges[2 * r + 1];
        const u32 address = next + ((u32)reinterpret_cast<size_t>(start) - next) % ALIKE;
        arrays.push_back({start, size, address, image});
        next = address + size + ALIKE, image += size;
    }
    images.assign(starts.size(), std::vector<char>(image));
    inside = 0;
    dynamic_shared = starts[0];
}

void fill_shared(u32 rank) {
    if (rank == inside)
        for (size_t i = 1; i < arrays.size(); ++i) memset(arrays[i].start, 0xCD, arrays[i].size);
    else
        std::fill(images[rank].begin(), images[rank].end(), char(0xCD));
}

void enter_block(u32 rank) {
    if (rank == inside) return;
    for (size_t i = 1; i < arrays.size(); ++i) {
        memcpy(images[inside].data() + arrays[i].image, arrays[i].start, arrays[i].size);
        memcpy(arrays[i].start, images[rank].data() + arrays[i].image, arrays[i].size);
    }
    inside = rank;
    arrays[0].start = dynamic_shared = dynamic_starts[rank];
}

void check_behind_dynamic(const char* end) {
    const char* const behind = arrays[0].start + arrays[0].size;
    const char* const p = std::find_if(behind, end, [](char c) { return c != char(0xCD); });
    if (p == end) return;
    char what[96];
    snprintf(what, sizeof what, "a block writes %lld bytes behind the end of the dynamic shared memory", (long long)(p - behind));
    fail(what, nullptr);
}

u32 shared_address(const void* p) {
    const char* const at = static_cast<const char*>(p);
    for (const Array& a : arrays)  // of two neighbours, the one that the address is inside of
        if (at >= a.start && at < a.start + a.size) return block_rank * WINDOW + a.address + (u32)(at - a.start);
    for (const Array& a : arrays)
        if (at == a.start + a.size) return block_rank * WINDOW + a.address + a.size;
    char more[64];
    snprintf(more, sizeof more, "\n  address #%p", p);
    fail("the shared address of something that is not in shared memory", __builtin_return_address(0), more);
}

static char* pointer_in(u32 rank, u32 address, u32 bytes, u32 alignment, void* where) {
    char more[160];
    for (size_t i = 0; i < arrays.size(); ++i) {
        const Array& a = arrays[i];
        if (address < a.address || address > a.address + a.size || bytes > a.address + a.size - address) continue;
        if (address % alignment) {
            snprintf(more, sizeof more, "\n  shared address 0x%x, for %u bytes on a multiple of %u", address, bytes, alignment);
            fail("access to a shared address that is not aligned", where, more);
        }
        char* const start = rank == inside ? a.start : i == 0 ? dynamic_starts[rank] : images[rank].data() + a.image;
        return start + (address - a.address);
    }
    const Array* near = &arrays[0];
    for (const Array& a : arrays)
        if (a.address <= address && a.address >= near->address) near = &a;
    snprintf(more, sizeof more, "\n  %u bytes at shared address 0x%x: byte %lld of %s shared memory of %u bytes", bytes, address,
             (long long)address - near->address, near == &arrays[0] ? "the dynamic" : "an array of the static", near->size);
    fail("access outside of the shared memory of the block", where, more);
}

char* shared_pointer(u32 address, u32 bytes, u32 alignment) {
    void* const where = __builtin_return_address(0);
    if (address / WINDOW == block_rank) return pointer_in(block_rank, address % WINDOW, bytes, alignment, where);
    char more[96];
    snprintf(more, sizeof more, "\n  shared address 0x%x, of block %u of the cluster, in block %u", address, address / WINDOW, block_rank);
    fail("access to another block's shared memory by an instruction for the own", where, more);
}

char* cluster_pointer(u32 address, u32 bytes, u32 alignment, void* where) {
    const u32 rank = address / WINDOW;
    char more[96];
    snprintf(more, sizeof more, "\n  shared address 0x%x, in a cluster of %u blocks", address, cluster_size);
    if (rank >= cluster_size) fail("access to the shared memory of a block that the cluster does not have", where, more);
    if (exited(rank)) fail("access to the shared memory of a block that has ended", where, more);
    return pointer_in(rank, address % WINDOW, bytes, alignment, where);
}

u32 cluster_map(u32 address, u32 rank) {
    if (rank >= cluster_size) fail("mapa names a block that the cluster does not have", __builtin_return_address(0));
    return address % WINDOW + rank * WINDOW;
}

}  // namespace emu

#pragma GCC visibility pop
