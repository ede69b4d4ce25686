// Threads of a block as fibers: a switch of stacks, barriers of the block, operations of a warp, who runs next; clusters one
// after the other, the blocks of one together, and faults as messages. Compiled once, and linked to every kernel.
#include "emulator.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>

#pragma GCC visibility push(hidden)

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

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emu {

int current;
char* dynamic_shared;
u32 block_rank, cluster_size = 1;

enum State : unsigned char { READY, AT_BARRIER, AT_WARP, PARKED, AT_CONDITION, EXITED };
static const char* const names[] = {"__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count", "__syncwarp",
    "__shfl*_sync", "__ballot_sync", "__any_sync", "__all_sync", "__uni_sync", "__match_any_sync", "__match_all_sync", "__reduce_add_sync",
    "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_or_sync", "__reduce_and_sync",
    "__reduce_xor_sync", "an instruction of the whole warp", "a named barrier", ""};

struct Fiber {
    void* sp;
    State state;
    Op op;
    u32 mask, source;   // source: the lane whose value a shuffle takes, 32 for the lane's own
    u64 value, result;
    void* where;
    uint3 tid;
    Condition condition;
};

constexpr size_t STACK = 64 * 1024, PAGE = 4096, DYNAMIC = 256 * 1024;
constexpr int MOST = 1024;
struct Block {
    Fiber fibers[MOST];
    int live, at_barrier;
    uint3 index;
    char* dynamic_end;
};
static std::vector<std::unique_ptr<Block>> blocks;  // of a cluster, by rank; they are kept from launch to launch
static Block* block;                                // the one that runs
static char* stacks;  // one for each fiber, shared by all kernels of a process
static char alternate[64 * 1024];  // where faults are handled: a fiber's own stack may be what overflowed
static int threads;
static std::mt19937_64 random_numbers;
static const Origin* acting;  // who asked for what another unit does now
static void* scheduler_sp;
static u64 stacks_size;
static volatile int in_user;
static volatile int stalled_ticks;
static sigjmp_buf escape;
static char* report_text;
static size_t report_room;
static double deadline;
static void (*body)(void**);
static void** body_args;

double now() {
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

void fail(const char* what, void* where, const char* more) {
    in_user = 0;
    if (acting) where = acting->where, threadIdx = acting->thread, blockIdx = acting->block, acting = nullptr;
    say(0, "%s at @%p in thread (%u,%u,%u) of block (%u,%u,%u), block size (%u,%u,%u), grid (%u,%u,%u)%s", what, where, threadIdx.x,
        threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z, blockDim.x, blockDim.y, blockDim.z, gridDim.x, gridDim.y, gridDim.z,
        more);
    siglongjmp(escape, 1);
}

void enter() { in_user = 0; }
void leave() {
    threadIdx = block->fibers[current].tid;
    stalled_ticks = 0;
    asm volatile("" ::: "memory");
    in_user = 1;
}
// Back to the scheduler; returns when this fiber is run again.
__attribute__((noinline)) static void give_way() {
    Fiber& f = block->fibers[current];
    emu_switch(&f.sp, scheduler_sp);
    leave();
}
void yield() {
    enter();
    give_way();
}

void wait_until(const Condition& c, void* where) {
    enter();
    Fiber& f = block->fibers[current];
    if (c.ready(c.a, c.b)) return leave();
    f.condition = c, f.where = where, f.op = WAITING, f.state = AT_CONDITION;
    give_way();
}
u64 random_number() { return random_numbers(); }

static void release_barrier() {
    auto& [fibers, live, at_barrier, index, end] = *block;
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

// Runs the instruction of the whole warp if all 32 lanes are there.
static void release_wide(Fiber* w, int lanes) {
    WarpWide* all[32];
    const Fiber* waiting = nullptr;
    int there = 0;
    for (int l = 0; l < lanes; ++l) {
        if (w[l].state != AT_WARP || w[l].op != WARP_WIDE) continue;
        all[l] = reinterpret_cast<WarpWide*>(w[l].value), ++there;
        if (waiting && all[l]->run != reinterpret_cast<WarpWide*>(waiting->value)->run)
            fail("lanes of a warp meet at different instructions of the whole warp", w[l].where);
        waiting = w + l;
    }
    for (int l = 0; waiting && l < 32; ++l)
        if (l >= lanes || w[l].state == EXITED) {
            char what[128];
            snprintf(what, sizeof what, "%s of the whole warp, but lane %d %s", reinterpret_cast<WarpWide*>(waiting->value)->name, l,
                     l < lanes ? "has exited" : "does not exist");
            fail(what, waiting->where);
        }
    if (there < 32) return;
    all[0]->run(all);
    for (int l = 0; l < 32; ++l) w[l].state = READY;
}

// Completes the warp operation with this mask if every lane of it that has not exited waits there.
static void release_warp(int warp, u32 mask, Op op) {
    Fiber* const w = block->fibers + 32 * warp;
    const int lanes = std::min(32, threads - 32 * warp);
    if (op == WARP_WIDE) return release_wide(w, lanes);
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

u64 block_op(Op op, u64 value) {
    enter();
    Fiber& f = block->fibers[current];
    f.op = op, f.value = value, f.where = __builtin_return_address(0);
    f.state = AT_BARRIER;
    ++block->at_barrier;
    release_barrier();
    if (f.state == READY)
        leave();
    else
        give_way();
    return f.result;
}

u64 warp_op(Op op, u32 mask, u64 value, u32 source) {
    enter();
    Fiber& f = block->fibers[current];
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

void warp_wide(WarpWide& mine) {
    enter();
    Fiber& f = block->fibers[current];
    f.op = WARP_WIDE, f.mask = ~0u, f.value = reinterpret_cast<u64>(&mine), f.where = __builtin_return_address(0);
    f.state = AT_WARP;
    release_warp(current / 32, ~0u, WARP_WIDE);
    if (f.state == READY)
        leave();
    else
        give_way();
}

void park(u32 id, void* where) {
    enter();
    Fiber& f = block->fibers[current];
    f.op = NAMED, f.mask = id, f.where = where;
    f.state = PARKED;
    give_way();
}
void wake(u32 id) {
    Fiber* const fibers = block->fibers;
    for (int t = 0; t < threads; ++t)
        if (fibers[t].state == PARKED && fibers[t].mask == id) fibers[t].state = READY;
}

static void start_fiber() {
    leave();
    body(body_args);
    enter();
    thread_ends();
    Fiber* const fibers = block->fibers;
    Fiber& f = fibers[current];
    f.state = EXITED;
    --block->live;
    release_barrier();
    const int warp = current / 32;
    for (int l = 32 * warp; l < std::min(threads, 32 * warp + 32); ++l)
        if (fibers[l].state == AT_WARP) release_warp(warp, fibers[l].mask, fibers[l].op);
    emu_switch(&f.sp, scheduler_sp);
    abort();
}

static void deadlock() {
    in_user = 0;
    size_t at = 0;
    for (u32 rank = 0; rank < cluster_size; ++rank) {
        const auto& [fibers, live, at_barrier, index, end] = *blocks[rank];
        at = say(at, "%sdeadlock in block (%u,%u,%u): %d of %d threads have exited, %d wait at a barrier of the block", rank ? "\n" : "",
                 index.x, index.y, index.z, threads - live, threads, at_barrier);
        int shown = 0;
        for (int t = 0; t < threads && shown < 12; ++t) {
            const Fiber& f = fibers[t];
            if (f.state == EXITED) continue;
            const Fiber& p = fibers[t ? t - 1 : 0];
            const Condition &c = f.condition, &d = p.condition;
            if (t && p.state == f.state && p.where == f.where &&
                (f.state == AT_CONDITION ? c.ready == d.ready && c.a == d.a && c.b == d.b : f.state == AT_BARRIER || p.mask == f.mask)) continue;
            if (f.state == AT_CONDITION) {
                char text[200] = "";
                c.describe(c.a, c.b, text, sizeof text);
                at = say(at, "\n  thread %d waits at %s @%p", t, text, f.where);
            } else {
                at = say(at, "\n  thread %d waits at %s", t, names[f.op]);
                if (f.op == WARP_WIDE) at = say(at, ": %s", reinterpret_cast<WarpWide*>(f.value)->name);
                else if (f.state == AT_WARP) at = say(at, " mask %08x", f.mask);
                if (f.state == PARKED) at = say(at, ", %u", f.mask);
                at = say(at, " @%p", f.where);
            }
            ++shown;
        }
    }
    siglongjmp(escape, 1);
}

u32 threads_of_block() { return threads; }
u32 thread_number() { return block_rank * threads + current; }
bool exited(u32 rank) { return blocks[rank]->live == 0; }
Origin origin(void* where) { return {where, threadIdx, blockIdx}; }
void act(const Origin* who) { acting = who; }

static void run_in(u32 rank) {
    enter_block(rank);
    block = blocks[rank].get();
    block_rank = rank, blockIdx = block->index;
}

u32 switch_block(u32 rank) {
    const u32 before = block_rank;
    if (rank != before) run_in(rank);
    return before;
}

// Runs the blocks of a cluster, whose indices are those of `blocks`.
static void run_cluster(bool shuffled) {
    static int order[MOST];
    std::vector<u32> ranks(cluster_size);
    asynchronous_begin(), start_copies(cluster_size * threads), start_barriers(cluster_size);
    for (u32 rank = 0; rank < cluster_size; ++rank) {
        auto& [fibers, live, at_barrier, index, end] = *blocks[rank];
        ranks[rank] = rank;
        live = threads, at_barrier = 0;
        for (int t = 0; t < threads; ++t) {
            Fiber& f = fibers[t];
            f.state = READY;
            f.tid = uint3{t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
            void** top = reinterpret_cast<void**>(stacks + (u64)(rank * threads + t + 1) * STACK - 64);
            *--top = nullptr;  // keeps the stack as a call leaves it: 8 below a multiple of 16 at the entry
            *--top = reinterpret_cast<void*>(&start_fiber);
            for (int i = 0; i < 6; ++i) *--top = nullptr;
            f.sp = top;
        }
    }
    for (int t = 0; t < threads; ++t) order[t] = t;
    // Shuffled: all threads in turn for a while; or one warp alone until it waits; or some warps seldom. So warps may be far ahead
    // of the others or behind them, which shows that a barrier is missing.
    const int warps = (threads + 31) / 32, all_warps = cluster_size * warps;
    std::vector<unsigned char> rest_of(all_warps, 0);  // how many of 256 turns a warp does not get
    int alone = -1, rounds = 0;
    while (true) {
        bool went = land_what_is_due(), left = false, rested = false;
        if (shuffled && rounds-- <= 0) {
            const u64 way = random_numbers() % 8;
            rounds = 1 << random_numbers() % 10;
            alone = way < 4 ? int(random_numbers() % all_warps) : -1;
            for (unsigned char& r : rest_of) r = way < 6 || random_numbers() % 2 ? 0 : random_numbers() % 2 ? 230 : 253;
            std::shuffle(order, order + threads, random_numbers);
        }
        if (shuffled && alone < 0) std::shuffle(order, order + threads, random_numbers), std::shuffle(ranks.begin(), ranks.end(), random_numbers);
        for (const u32 rank : ranks) {
            if (!blocks[rank]->live) continue;
            left = true;
            if (alone >= 0 && alone / warps != (int)rank) continue;
            run_in(rank);
            bool rests[MOST / 32];
            for (int w = 0; w < warps; ++w) {
                const unsigned char r = rest_of[rank * warps + w];
                rests[w] = alone >= 0 ? alone % warps != w : r && random_numbers() % 256 < r;
                rested |= rests[w];
            }
            for (int i = 0; i < threads; ++i) {
                const int t = order[i];
                Fiber& f = block->fibers[t];
                if (rests[t / 32]) continue;
                if (f.state == AT_CONDITION) {
                    current = t;
                    if (f.condition.ready(f.condition.a, f.condition.b)) f.state = READY;
                }
                if (f.state != READY) continue;
                current = t, went = true;
                emu_switch(&scheduler_sp, f.sp);
                in_user = 0;
            }
            if (!block->live) block_ends();
        }
        if (!left) break;
        if (went) continue;
        if (alone >= 0) rounds = 0;
        else if (!rested && !land_one()) deadlock();
    }
    for (u32 rank = 0; rank < cluster_size; ++rank) run_in(rank), check_behind_dynamic(block->dynamic_end);
    asynchronous_end();
}

static void on_tick(int, siginfo_t*, void* context) {
    if (!in_user) return;
    if (now() > deadline) {
        in_user = 0;
        fail("time is up (a loop without end, or a thread that waits for another block that does not run yet)",
             reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]));
    }
    if (++stalled_ticks > 1) yield();  // it may be waiting for another thread of its block in a loop
}

static void on_fault(int number, siginfo_t* info, void* context) {
    in_user = 0;
    void* const rip = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
    char more[64];
    snprintf(more, sizeof more, "\n  fault address #%p", info->si_addr);
    const char* a = static_cast<char*>(info->si_addr);
    const bool in_stack = stacks && a >= stacks && a < stacks + stacks_size;
    const bool in_shared = block && a >= block->dynamic_end && a < block->dynamic_end + PAGE;
    fail(number == SIGFPE ? "integer division by zero" : in_stack ? "the stack of a thread (64 KB) overflows"
         : in_shared ? "access behind the dynamic shared memory of the launch"
         : number == SIGSEGV || number == SIGBUS ? "access outside of the arrays" : "signal", rip, number == SIGFPE ? "" : more);
}

static void set_up(const Options& o) {  // the stacks, their lowest pages closed, are shared by all kernels of a process
    stacks = o.stacks;
    cluster_size = o.cluster[0] * o.cluster[1] * o.cluster[2];
    threads = o.block[0] * o.block[1] * o.block[2];
    stacks_size = (u64)cluster_size * threads * STACK;
    while (blocks.size() < cluster_size) {
        blocks.push_back(std::make_unique<Block>());
        char* room = static_cast<char*>(mmap(nullptr, DYNAMIC + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(room + DYNAMIC, PAGE, PROT_NONE);
        blocks.back()->dynamic_end = room + DYNAMIC;
    }
    block = blocks[0].get();
}

int run(void (*entry)(void**), void** args, const Options& o, char* text, u64 room, const char* base) {
    set_up(o);
    report_text = text, report_room = room;
    text[0] = 0;
    body = entry, body_args = args;
    blockDim = dim3(o.block[0], o.block[1], o.block[2]), gridDim = dim3(o.grid[0], o.grid[1], o.grid[2]);
    std::vector<char*> starts;
    for (u32 rank = 0; rank < cluster_size; ++rank)
        starts.push_back(blocks[rank]->dynamic_end - (o.smem + dynamic_alignment - 1) / dynamic_alignment * dynamic_alignment);
    // Clusters divide the grid, x fastest.
    const dim3 extent(gridDim.x / o.cluster[0], gridDim.y / o.cluster[1], gridDim.z / o.cluster[2]);
    const u64 clusters = (u64)extent.x * extent.y * extent.z;
    random_numbers.seed(o.seed);
    acting = nullptr;
    std::vector<u64> order;
    if (o.shuffle_blocks) {
        order.resize(clusters);
        for (u64 i = 0; i < clusters; ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), random_numbers);
    }
    const int tick_signal = SIGRTMIN + 7;
    const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, tick_signal};
    // A timer for this thread alone: the one of the process belongs to whoever limits the time of tests.
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID, event.sigev_signo = tick_signal;
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    timer_t timer;
    if (timer_create(CLOCK_MONOTONIC, &event, &timer)) {
        say(0, "timer_create failed");
        return 1;
    }
    struct sigaction before[5], action;
    stack_t stack_before, stack_now{};
    stack_now.ss_sp = alternate, stack_now.ss_size = sizeof alternate;
    sigaltstack(&stack_now, &stack_before);
    for (int i = 0; i < 5; ++i) {
        memset(&action, 0, sizeof action);
        action.sa_sigaction = signals[i] == tick_signal ? on_tick : on_fault;
        action.sa_flags = SA_SIGINFO | SA_NODEFER | (signals[i] == tick_signal ? SA_RESTART : SA_ONSTACK);
        sigaction(signals[i], &action, before + i);
    }
    deadline = now() + o.timeout;
    const itimerspec every{{0, 10000000}, {0, 10000000}};
    timer_settime(timer, 0, &every, nullptr);
    volatile int rc = 0;
    if (sigsetjmp(escape, 1) == 0) {
        set_window(o, base, starts);
        for (u64 i = 0; i < clusters; ++i) {
            const u64 c = o.shuffle_blocks ? order[i] : i;
            const u64 x = c % extent.x * o.cluster[0], y = c / extent.x % extent.y * o.cluster[1];
            const u64 z = c / ((u64)extent.x * extent.y) * o.cluster[2];
            for (u32 rank = 0; rank < cluster_size; ++rank) {
                blocks[rank]->index = uint3{(u32)x + rank % o.cluster[0], (u32)y + rank / o.cluster[0] % o.cluster[1],
                                            (u32)z + rank / (o.cluster[0] * o.cluster[1])};
                fill_shared(rank);
                char* const top = blocks[rank]->dynamic_end;
                memset(starts[rank], 0xCD, top - starts[rank]);
            }
            run_cluster(o.shuffle_threads);
        }
    } else {
        rc = 1;
    }
    in_user = 0;
    timer_delete(timer);
    for (int i = 0; i < 5; ++i) sigaction(signals[i], before + i, nullptr);
    sigaltstack(&stack_before, nullptr);
    return rc;
}

struct SourceLocation { const char* file; u32 line, column; };
[[noreturn]] static void undefined(const char* what, const void* data) {
    in_user = 0;
    const SourceLocation& l = *static_cast<const SourceLocation*>(data);
    char text[600];
    snprintf(text, sizeof text, "%s (%s:%u:%u)", what, l.file ? l.file : "?", l.line, l.column);
    fail(text, __builtin_return_address(0));
}
void unsupported(const char* text) { fail(text, __builtin_return_address(0)); }

}  // namespace emu

extern "C" {
#define EMU_UB(name, what) __attribute__((visibility("hidden"), used)) void __ubsan_handle_##name##_abort(void* data) { emu::undefined(what, data); }
EMU_UB(type_mismatch_v1, "access to an address that is not aligned to its type, or null")
EMU_UB(out_of_bounds, "index outside of an array of known size")
EMU_UB(shift_out_of_bounds, "shift by a negative number or by the width of the type or more")
EMU_UB(divrem_overflow, "division by zero")
EMU_UB(builtin_unreachable, "unreachable code")
}

#pragma GCC visibility pop
