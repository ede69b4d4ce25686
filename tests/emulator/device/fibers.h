// Threads of a block as fibers: a switch of stacks, barriers of the block, operations of a warp, and who runs next.
#pragma once

#define EMU_API extern "C" __attribute__((visibility("default")))
#define EMU_INTRINSIC inline __attribute__((always_inline, artificial))

extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.p2align 4
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch,.-emu_switch
)");

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emu {

using u32 = unsigned;
using u64 = unsigned long long;

enum State : unsigned char { READY, AT_BARRIER, AT_WARP, EXITED };
enum Op : int { SYNCTHREADS, SYNCTHREADS_OR, SYNCTHREADS_AND, SYNCTHREADS_COUNT, SYNCWARP, SHFL, BALLOT, ANY, ALL, UNI, MATCH_ANY,
                MATCH_ALL, RED_ADD, RED_MIN_U, RED_MAX_U, RED_MIN_S, RED_MAX_S, RED_OR, RED_AND, RED_XOR };
inline const char* const names[] = {"__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count", "__syncwarp",
    "__shfl*_sync", "__ballot_sync", "__any_sync", "__all_sync", "__uni_sync", "__match_any_sync", "__match_all_sync", "__reduce_add_sync",
    "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_or_sync", "__reduce_and_sync",
    "__reduce_xor_sync"};

struct Fiber {
    void* sp;
    State state;
    Op op;
    u32 mask, source;   // source: the lane whose value a shuffle takes, 32 for the lane's own
    u64 value, result;
    void* where;
    uint3 tid;
};

constexpr size_t STACK = 64 * 1024, PAGE = 4096, DYNAMIC = 256 * 1024;
constexpr int MOST = 1024;
static Fiber fibers[MOST];
static char* stacks;  // one for each fiber, shared by all kernels of a process
static char alternate[64 * 1024];  // where faults are handled: a fiber's own stack may be what overflowed
static char* dynamic_end;
static char* dynamic_shared;
static int current, threads, live, at_barrier;
static void* scheduler_sp;
static volatile int in_user;
static volatile int stalled_ticks;
static sigjmp_buf escape;
static char* report_text;
static size_t report_room;
static double deadline;
static void (*body)(void**);
static void** body_args;

inline double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

inline size_t say(size_t at, const char* format, ...) {
    if (at >= report_room) return at;
    va_list list;
    va_start(list, format);
    const int n = vsnprintf(report_text + at, report_room - at, format, list);
    va_end(list);
    return at + (n > 0 ? n : 0);
}

[[noreturn]] inline void fail(const char* what, void* where, const char* more = "") {
    in_user = 0;
    say(0, "%s at @%p in thread (%u,%u,%u) of block (%u,%u,%u), block size (%u,%u,%u), grid (%u,%u,%u)%s", what, where, threadIdx.x,
        threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z, blockDim.x, blockDim.y, blockDim.z, gridDim.x, gridDim.y, gridDim.z,
        more);
    siglongjmp(escape, 1);
}

inline void enter() { in_user = 0; }
inline void leave() {
    threadIdx = fibers[current].tid;
    stalled_ticks = 0;
    asm volatile("" ::: "memory");
    in_user = 1;
}
// Back to the scheduler; returns when this fiber is run again.
__attribute__((noinline)) static void give_way() {
    Fiber& f = fibers[current];
    emu_switch(&f.sp, scheduler_sp);
    leave();
}
__attribute__((noinline)) static void yield() {
    enter();
    give_way();
}

static void release_barrier() {
    if (!live || at_barrier != live) return;
    bool any = false, all = true;
    u64 count = 0;
    for (int t = 0; t < threads; ++t)
        if (fibers[t].state == AT_BARRIER) any |= fibers[t].value != 0, all &= fibers[t].value != 0, count += fibers[t].value != 0;
    Op op = SYNCTHREADS;
    bool first = true;
    for (int t = 0; t < threads; ++t) {
        Fiber& f = fibers[t];
        if (f.state != AT_BARRIER) continue;
        if (first) op = f.op, first = false;
        if (f.op != op) fail("threads of a block meet at different kinds of __syncthreads", f.where);
    }
    for (int t = 0; t < threads; ++t) {
        Fiber& f = fibers[t];
        if (f.state != AT_BARRIER) continue;
        f.result = f.op == SYNCTHREADS_OR ? any : f.op == SYNCTHREADS_AND ? all : count;
        f.state = READY;
    }
    at_barrier = 0;
}

// Completes the warp operation with this mask if every lane of it that has not exited waits there.
static void release_warp(int warp, u32 mask, Op op) {
    Fiber* const w = fibers + 32 * warp;
    const int lanes = std::min(32, threads - 32 * warp);
    u32 there = 0;
    for (int l = 0; l < lanes; ++l) {
        if (!(mask >> l & 1) || w[l].state == EXITED) continue;
        if (w[l].state != AT_WARP || w[l].mask != mask || w[l].op != op) return;
        there |= 1u << l;
    }
    if (!there) return;
    u64 all = 0;
    bool first = true, same = true;
    u64 example = 0;
    for (int l = 0; l < lanes; ++l) {
        if (!(there >> l & 1)) continue;
        const u64 v = w[l].value;
        const u32 x = (u32)v;
        if (first) example = v, all = op == RED_ADD || op == RED_OR || op == RED_XOR || op == BALLOT || op == ANY ? 0 : op == RED_AND || op == ALL ? ~0ull : v;
        same &= v == example;
        switch (op) {
            case BALLOT: all |= (u64)(v != 0) << l; break;
            case ANY: all |= v != 0; break;
            case ALL: all = all && v != 0; break;
            case RED_ADD: all = (u32)(all + x); break;
            case RED_OR: all |= x; break;
            case RED_AND: all &= x; break;
            case RED_XOR: all ^= x; break;
            case RED_MIN_U: all = std::min((u32)all, x); break;
            case RED_MAX_U: all = std::max((u32)all, x); break;
            case RED_MIN_S: all = (u32)std::min((int)(u32)all, (int)x); break;
            case RED_MAX_S: all = (u32)std::max((int)(u32)all, (int)x); break;
            default: break;
        }
        first = false;
    }
    for (int l = 0; l < lanes; ++l) {
        if (!(there >> l & 1)) continue;
        Fiber& f = w[l];
        if (op == SHFL)  // what comes from a lane that takes no part is undefined
            f.result = f.source == 32 ? f.value : there >> f.source & 1 ? w[f.source].value : 0xBADBADBADBADBADBull;
        else if (op == MATCH_ANY) {
            f.result = 0;
            for (int k = 0; k < lanes; ++k)
                if (there >> k & 1 && w[k].value == f.value) f.result |= 1u << k;
        } else
            f.result = op == MATCH_ALL ? (same ? there : 0) : op == UNI ? same : all;
    }
    for (int l = 0; l < lanes; ++l)
        if (there >> l & 1) w[l].state = READY;
}

__attribute__((noinline)) static u64 block_op(Op op, u64 value) {
    enter();
    Fiber& f = fibers[current];
    f.op = op, f.value = value, f.where = __builtin_return_address(0);
    f.state = AT_BARRIER;
    ++at_barrier;
    release_barrier();
    if (f.state == READY)
        leave();
    else
        give_way();
    return f.result;
}

__attribute__((noinline)) static u64 warp_op(Op op, u32 mask, u64 value, u32 source = 32) {
    enter();
    Fiber& f = fibers[current];
    f.op = op, f.mask = mask, f.value = value, f.source = source, f.where = __builtin_return_address(0);
    if (!(mask >> current % 32 & 1)) fail("a lane calls a warp operation with a mask that does not name it", f.where);
    f.state = AT_WARP;
    release_warp(current / 32, mask, op);
    if (f.state == READY)
        leave();
    else
        give_way();
    return f.result;
}

static void start_fiber() {
    leave();
    body(body_args);
    enter();
    Fiber& f = fibers[current];
    f.state = EXITED;
    --live;
    release_barrier();
    const int warp = current / 32;
    for (int l = 32 * warp; l < std::min(threads, 32 * warp + 32); ++l)
        if (fibers[l].state == AT_WARP) release_warp(warp, fibers[l].mask, fibers[l].op);
    emu_switch(&f.sp, scheduler_sp);
    abort();
}

static void deadlock() {
    in_user = 0;
    size_t at = say(0, "deadlock in block (%u,%u,%u): %d of %d threads have exited, %d wait at a barrier of the block", blockIdx.x, blockIdx.y,
                    blockIdx.z, threads - live, threads, at_barrier);
    int shown = 0;
    for (int t = 0; t < threads && shown < 12; ++t) {
        const Fiber& f = fibers[t];
        if (f.state == EXITED) continue;
        const Fiber& p = fibers[t ? t - 1 : 0];
        if (t && p.state == f.state && p.where == f.where && (f.state == AT_BARRIER || p.mask == f.mask)) continue;
        at = say(at, "\n  thread %d waits at %s", t, names[f.op]);
        if (f.state == AT_WARP) at = say(at, " mask %08x", f.mask);
        at = say(at, " @%p", f.where);
        ++shown;
    }
    siglongjmp(escape, 1);
}

static void run_block(bool shuffled, std::mt19937_64& random) {
    static int order[MOST];
    live = threads, at_barrier = 0;
    memset(dynamic_shared, 0xCD, dynamic_end - dynamic_shared);
    for (int t = 0; t < threads; ++t) {
        Fiber& f = fibers[t];
        order[t] = t;
        f.state = READY;
        f.tid = uint3{t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
        void** top = reinterpret_cast<void**>(stacks + (t + 1) * STACK - 64);
        *--top = nullptr;  // keeps the stack as a call leaves it: 8 below a multiple of 16 at the entry
        *--top = reinterpret_cast<void*>(&start_fiber);
        for (int i = 0; i < 6; ++i) *--top = nullptr;
        f.sp = top;
    }
    while (live) {
        bool went = false;
        if (shuffled) std::shuffle(order, order + threads, random);
        for (int i = 0; i < threads; ++i) {
            const int t = order[i];
            if (fibers[t].state != READY) continue;
            current = t, went = true;
            emu_switch(&scheduler_sp, fibers[t].sp);
            in_user = 0;
        }
        if (!went && live) deadlock();
    }
}

}  // namespace emu
