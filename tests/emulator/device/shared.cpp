// The window of shared memory: from pointers to 32-bit addresses and back.
#include "emulator.h"

#include <cstdio>
#include <vector>

#pragma GCC visibility push(hidden)

namespace emu {

u32 dynamic_alignment = 16;

struct Array {
    char* start;
    u32 size, address;
};
static std::vector<Array> arrays;  // the dynamic one first

void set_window(const Options& o, const char* base) {
    arrays.clear();
    arrays.push_back({dynamic_shared, (u32)o.smem, DYNAMIC_BASE + (u32)(reinterpret_cast<size_t>(dynamic_shared) % ALIKE)});
    u32 next = STATIC_BASE;
    for (u64 r = 0; r < o.count; ++r) {
        char* const start = const_cast<char*>(base) + o.ranges[2 * r];
        const u32 size = (u32)o.ranges[2 * r + 1];
        const u32 address = next + ((u32)reinterpret_cast<size_t>(start) - next) % ALIKE;
        arrays.push_back({start, size, address});
        next = address + size + ALIKE;
    }
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
        if (at >= a.start && at < a.start + a.size) return a.address + (u32)(at - a.start);
    for (const Array& a : arrays)
        if (at == a.start + a.size) return a.address + a.size;
    char more[64];
    snprintf(more, sizeof more, "\n  address #%p", p);
    fail("the shared address of something that is not in shared memory", __builtin_return_address(0), more);
}

char* shared_pointer(u32 address, u32 bytes, u32 alignment) {
    void* const where = __builtin_return_address(0);
    char more[128];
    for (const Array& a : arrays) {
        if (address < a.address || address > a.address + a.size || bytes > a.address + a.size - address) continue;
        if (address % alignment) {
            snprintf(more, sizeof more, "\n  shared address 0x%x, for %u bytes on a multiple of %u", address, bytes, alignment);
            fail("access to a shared address that is not aligned", where, more);
        }
        return a.start + (address - a.address);
    }
    const Array* near = &arrays[0];
    for (const Array& a : arrays)
        if (a.address <= address && a.address >= near->address) near = &a;
    snprintf(more, sizeof more, "\n  %u bytes at shared address 0x%x: byte %lld of %s shared memory of %u bytes", bytes, address,
             (long long)address - near->address, near == &arrays[0] ? "the dynamic" : "an array of the static", near->size);
    fail("access outside of the shared memory of the block", where, more);
}

}  // namespace emu

#pragma GCC visibility pop
