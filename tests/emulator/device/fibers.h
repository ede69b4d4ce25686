// What kernels and the scheduler share: who runs, and the operations at which threads meet. The scheduler is in fibers.cpp.
#pragma once

#define EMU_API extern "C" __attribute__((visibility("default")))
#define EMU_INTRINSIC inline __attribute__((always_inline, artificial))
#pragma GCC visibility push(hidden)

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emu {

using u32 = unsigned;
using u64 = unsigned long long;

enum Op : int { SYNCTHREADS, SYNCTHREADS_OR, SYNCTHREADS_AND, SYNCTHREADS_COUNT, SYNCWARP, SHFL, BALLOT, ANY, ALL, UNI, MATCH_ANY,
                MATCH_ALL, RED_ADD, RED_MIN_U, RED_MAX_U, RED_MIN_S, RED_MAX_S, RED_OR, RED_AND, RED_XOR, WARP_WIDE, NAMED,
                WAITING };

extern int current;           // the thread that runs, as its number in the block
extern char* dynamic_shared;  // the dynamic shared memory of the block
extern u32 block_rank, cluster_size;  // of the block in its cluster, whose blocks run at the same time; blocks of a cluster

struct Options {
    u32 grid[3], block[3];
    u64 smem, seed;
    int shuffle_blocks, shuffle_threads;
    double timeout;
    u32 cluster[3];      // blocks of a cluster
    u64 count;           // of the ranges of static shared memory, relative to emu_run
    const long long* ranges;
    char* stacks;
};

void yield();  // other threads of the block run first
u64 block_op(Op op, u64 value);
u64 warp_op(Op op, u32 mask, u64 value, u32 source = 32);  // source: the lane whose value a shuffle takes, 32 for the own
// An instruction of all 32 lanes of a warp: the last lane that comes runs it for all, on what every lane brought.
struct WarpWide {
    void (*run)(WarpWide* const* lanes);
    const char* name;
};
void warp_wide(WarpWide& mine);
void park(u32 id, void* where);  // the thread waits until somebody wakes those of this number
void wake(u32 id);
void enter();  // from here to leave() the thread is not interrupted
void leave();
// Until `ready` says yes to its two numbers; `describe` writes what the thread waits for into a report of a deadlock.
struct Condition {
    bool (*ready)(u64, u64);
    void (*describe)(u64, u64, char* text, size_t room);
    u64 a, b;
};
void wait_until(const Condition& c, void* where);
u64 random_number();
[[noreturn]] void unsupported(const char* text);
[[noreturn]] void fail(const char* what, void* where, const char* more = "");  // an error at the place in the code `where`
int run(void (*entry)(void**), void** args, const Options& o, char* text, u64 room, const char* base);
double now();

}  // namespace emu

#pragma GCC visibility pop
