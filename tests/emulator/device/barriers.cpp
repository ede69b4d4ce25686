// Named barriers: who has arrived at each of the sixteen.
#include "emulator.h"

#include <vector>

#pragma GCC visibility push(hidden)

namespace emu {

constexpr u32 BARRIERS = 16;
struct Barrier {
    u32 arrived, count;
};
struct Table {
    Barrier barriers[BARRIERS];
};
static std::vector<Table> tables;  // of each block of the cluster

void start_barriers(u32 blocks) { tables.assign(blocks, Table{}); }

static void nothing(WarpWide* const*) {}

void named_barrier(u32 id, u32 count, bool wait) {
    void* const where = __builtin_return_address(0);
    if (id >= BARRIERS) fail("a block has the named barriers 0 to 15", where);
    if (!count || count % 32) fail("a named barrier for a number of threads that is not whole warps", where);
    WarpWide together{&nothing, wait ? "bar.sync" : "bar.arrive"};
    warp_wide(together);
    enter();
    Barrier& b = tables[block_rank].barriers[id];
    if (b.arrived && b.count != count) fail("threads meet at a named barrier with different counts", where);
    b.count = count;
    if (++b.arrived == count) {
        b.arrived = 0;
        wake(id);
        leave();
    } else if (wait) {
        park(id, where);
    } else {
        leave();
    }
}

}  // namespace emu

#pragma GCC visibility pop
