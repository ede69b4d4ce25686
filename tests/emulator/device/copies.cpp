// The copies of every thread that are in flight.
#include "emulator.h"

#include <vector>

#pragma GCC visibility push(hidden)

namespace emu {

struct Copy {
    char* to;
    unsigned char bytes[16];
    u32 size, group;
};
struct Flight {
    std::vector<Copy> copies;  // in the order of their start
    u32 group = 0;             // the one that is being filled
    u64 landed = 0;
};
static std::vector<Flight> flights;

static Flight& flight() { return flights[thread_number()]; }

void start_copies(int threads) {
    flights.resize(threads);
    for (Flight& f : flights) f.copies.clear(), f.group = 0, f.landed = 0;
}

void copy_later(char* to, const unsigned char* bytes, u32 size) {
    enter();
    Flight& f = flight();
    f.copies.push_back({to, {}, size, f.group});
    memcpy(f.copies.back().bytes, bytes, size);
    memset(to, 0xFF, size);
    leave();
}

void commit_copies() { ++flight().group; }

static void land_first(u32 thread, size_t count) {
    Flight& f = flights[thread];
    for (size_t i = 0; i < count; ++i) {
        memcpy(f.copies[i].to, f.copies[i].bytes, f.copies[i].size);
        note_written_by(thread, f.copies[i].to, f.copies[i].size);
    }
    f.copies.erase(f.copies.begin(), f.copies.begin() + count);
    f.landed += count;
}

// Those of groups below `end` arrive.
static void land(u32 end) {
    enter();
    const std::vector<Copy>& copies = flight().copies;
    size_t count = 0;
    while (count < copies.size() && copies[count].group < end) ++count;
    land_first(thread_number(), count);
    leave();
}

u64 copies_so_far() { return flight().landed + flight().copies.size(); }
void land_copies_of(u32 thread, u64 number) {
    const u64 landed = flights[thread].landed;
    if (number > landed) land_first(thread, number - landed);
}

void land_copies(u32 groups_left) {
    const u32 group = flight().group;
    land(group > groups_left ? group - groups_left : 0);
}
void land_all_copies() { land(flight().group + 1); }

}  // namespace emu

#pragma GCC visibility pop
