// A launch: parameters of a kernel, its blocks one after the other, and faults as messages.
#pragma once

namespace emu {

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
    const bool in_stack = stacks && a >= stacks && a < stacks + MOST * STACK;
    const bool in_shared = dynamic_end && a >= dynamic_end && a < dynamic_end + PAGE;
    fail(number == SIGFPE ? "integer division by zero" : in_stack ? "the stack of a thread (64 KB) overflows"
         : in_shared ? "access behind the dynamic shared memory of the launch"
         : number == SIGSEGV || number == SIGBUS ? "access outside of the arrays" : "signal", rip, number == SIGFPE ? "" : more);
}

static void set_up(char* given) {  // the stacks, their lowest pages closed, are shared by all kernels of a process
    stacks = given;
    if (dynamic_end) return;
    char* room = static_cast<char*>(mmap(nullptr, DYNAMIC + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(room + DYNAMIC, PAGE, PROT_NONE);
    dynamic_end = room + DYNAMIC;
}

struct Options {
    u32 grid[3], block[3];
    u64 smem, seed;
    int shuffle_blocks, shuffle_threads;
    double timeout;
    u64 count;           // of the ranges of static shared memory, relative to emu_run
    const long long* ranges;
    char* stacks;
};

template <class F> struct Parameters;
template <class... A> struct Parameters<void (*)(A...)> {
    template <class T> static long long describe() {  // size * 16 + kind
        using U = std::remove_cv_t<T>;
        const int kind = std::is_pointer_v<U> ? (std::is_const_v<std::remove_pointer_t<U>> ? 2 : 1) : std::is_floating_point_v<U> ? 3
                         : std::is_integral_v<U> || std::is_enum_v<U> ? (std::is_signed_v<U> ? 4 : 5) : 6;
        return (long long)sizeof(U) * 16 + kind;
    }
    static int list(long long* out) {
        int n = 0;
        ((out[n++] = describe<A>()), ...);
        return n;
    }
    template <class T> static T taken(const void* from) {  // the driver copies arguments, wherever they lie
        alignas(T) char room[sizeof(T)];
        memcpy(room, from, sizeof(T));
        return *reinterpret_cast<T*>(room);
    }
    template <void (*f)(A...), size_t... I> static void call(void** args, std::index_sequence<I...>) {
        f(taken<std::remove_cv_t<A>>(args[I])...);
    }
    template <void (*f)(A...)> static void entry(void** args) { call<f>(args, std::index_sequence_for<A...>{}); }
};

static int run(void (*entry)(void**), void** args, const Options& o, char* text, u64 room, const char* base) {
    set_up(o.stacks);
    report_text = text, report_room = room;
    text[0] = 0;
    body = entry, body_args = args;
    blockDim = dim3(o.block[0], o.block[1], o.block[2]), gridDim = dim3(o.grid[0], o.grid[1], o.grid[2]);
    threads = blockDim.x * blockDim.y * blockDim.z;
    dynamic_shared = dynamic_end - (o.smem + 15) / 16 * 16;
    const u64 blocks = (u64)gridDim.x * gridDim.y * gridDim.z;
    std::mt19937_64 random(o.seed);
    std::vector<u64> order;
    if (o.shuffle_blocks) {
        order.resize(blocks);
        for (u64 i = 0; i < blocks; ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), random);
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
        for (u64 i = 0; i < blocks; ++i) {
            const u64 b = o.shuffle_blocks ? order[i] : i;
            blockIdx = uint3{(u32)(b % gridDim.x), (u32)(b / gridDim.x % gridDim.y), (u32)(b / ((u64)gridDim.x * gridDim.y))};
            for (u64 r = 0; r < o.count; ++r) memset(const_cast<char*>(base) + o.ranges[2 * r], 0xCD, o.ranges[2 * r + 1]);
            run_block(o.shuffle_threads, random);
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
[[noreturn]] __attribute__((noinline)) static void unsupported(const char* text) { fail(text, __builtin_return_address(0)); }

}  // namespace emu

extern "C" {
#define EMU_UB(name, what) __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_##name##_abort(void* data) { emu::undefined(what, data); }
EMU_UB(type_mismatch_v1, "access to an address that is not aligned to its type, or null")
EMU_UB(out_of_bounds, "index outside of an array of known size")
EMU_UB(shift_out_of_bounds, "shift by a negative number or by the width of the type or more")
EMU_UB(divrem_overflow, "division by zero")
EMU_UB(builtin_unreachable, "unreachable code")
}

#define EMU_KERNEL(...)                                                                                             \
    EMU_API int emu_parameters(long long* out) { return emu::Parameters<decltype(&__VA_ARGS__)>::list(out); }       \
    EMU_API int emu_run(void** args, const emu::Options* o, char* text, unsigned long long room) {                   \
        return emu::run(&emu::Parameters<decltype(&__VA_ARGS__)>::entry<&__VA_ARGS__>, args, *o, text, room,         \
                        reinterpret_cast<const char*>(&emu_run));                                                    \
    }
