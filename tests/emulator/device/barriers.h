// Named barriers of a block: bar.sync and bar.arrive with a number and a count of threads.
#pragma once
#pragma GCC visibility push(hidden)

namespace emu {

void start_barriers(u32 blocks);  // of the blocks of a cluster: nobody is there
// All 32 lanes call. An error unless the count is whole warps and the same for all that meet.
void named_barrier(u32 id, u32 count, bool wait);

}  // namespace emu

#pragma GCC visibility pop
