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
};
static std::vector<Flight> flights;

void start_copies(int threads) {
    flights.resize(threads);
    for (Flight& f : flights) f.copies.clear(), f.group = 0;
}

void copy_later(char* to, const unsigned char* bytes, u32 size) {
    enter();
    Flight& f = flights[current];
    f.copies.push_back({to, {}, size, f.group});
    memcpy(f.copies.back().bytes, bytes, size);
    memset(to, 0xFF, size);
    leave();
}

void commit_copies() { ++flights[current].group; }

// Those of groups below `end` arrive.
static void land(u32 end) {
    enter();
    std::vector<Copy>& copies = flights[current].copies;
    size_t landed = 0;
    for (; landed < copies.size() && copies[landed].group < end; ++landed)
        memcpy(copies[landed].to, copies[landed].bytes, copies[landed].size);
    copies.erase(copies.begin(), copies.begin() + landed);
    leave();
}

void land_copies(u32 groups_left) {
    const u32 group = flights[current].group;
    land(group > groups_left ? group - groups_left : 0);
}
void land_all_copies() { land(flights[current].group + 1); }

}  // namespace emu

#pragma GCC visibility pop
