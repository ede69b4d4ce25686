// The list of operations that other units have still to perform, and the fences between them and ordinary accesses.
#include <cstdio>

#include "emulator.h"

#pragma GCC visibility push(hidden)

namespace emu {

// ---- operations
struct Waiting {
    std::shared_ptr<Operation> operation;
    u64 due;
};
static std::vector<Waiting> in_flight;
static u64 turn;
constexpr u64 LAST = 2000;  // turns after which even a slow operation is performed: somebody may be polling

static u64 due_time() {  // a third at once, a third soon, a third when it is needed
    const u64 x = random_number();
    return x % 3 == 0 ? turn : x % 3 == 1 ? turn + 1 + x / 3 % 6 : turn + LAST;
}

static void proxies_begin();

void asynchronous_begin() {
    in_flight.clear(), turn = 0;
    mbarriers_begin(), proxies_begin(), clusters_begin(), registers_begin(), copy_engine_begin(), warpgroups_begin();
}

bool perform_now(Operation& operation) {
    const u32 before = switch_block(operation.rank);
    act(&operation.asked);
    const bool last = operation.perform();
    act(nullptr);
    switch_block(before);
    return last;
}

void later(std::shared_ptr<Operation> operation) { in_flight.push_back({std::move(operation), due_time()}); }

static void perform_at(size_t i) {
    const std::shared_ptr<Operation> operation = in_flight[i].operation;
    if (perform_now(*operation)) {
        in_flight[i] = std::move(in_flight.back());
        in_flight.pop_back();
    } else {
        in_flight[i].due = due_time();
    }
}

bool land_what_is_due() {
    ++turn;
    bool any = false;
    for (size_t i = in_flight.size(); i-- > 0;)
        if (i < in_flight.size() && in_flight[i].due <= turn) perform_at(i), any = true;
    return any;
}

bool land_one() {
    if (in_flight.empty()) return false;
    perform_at(random_number() % in_flight.size());
    return true;
}

void asynchronous_end() {
    while (land_one()) {
    }
}

void thread_ends() { copy_engine_thread_ends(), warpgroups_thread_ends(), clusters_thread_ends(); }

void block_ends() {
    for (const Waiting& w : in_flight)
        if (w.operation->uses(block_rank)) {
            char what[160];
            snprintf(what, sizeof what, "a block ends while %s still uses its shared memory", w.operation->name());
            act(&w.operation->asked);
            fail(what, nullptr);
        }
}

// ---- proxies: who wrote 16 bytes of shared memory last through an instruction that is seen here, and when
struct Mark {
    u64 time;
    u32 writer;
};
static std::vector<std::vector<Mark>> marks;  // by rank: the dynamic shared memory in pieces of 16 bytes
static std::vector<u64> fences;               // by thread of the cluster
static u64 clock_now;
constexpr u32 PIECES = STATIC_BASE / 16;

static void proxies_begin() {
    marks.assign(cluster_size, {});
    fences.assign(cluster_size * threads_of_block(), 0);
    clock_now = 0;
}

static void write_marks(u32 rank, u32 address, u32 bytes, Mark mark) {
    address %= WINDOW;
    if (address + bytes > STATIC_BASE || !bytes) return;
    std::vector<Mark>& m = marks[rank];
    if (m.empty()) {
        if (!mark.time) return;
        m.resize(PIECES / 4, Mark{0, 0});
    }
    for (u32 i = address / 16; i <= (address + bytes - 1) / 16 && i < m.size(); ++i) m[i] = mark;
}

void note_written(u32 address, u32 bytes) { write_marks(block_rank, address, bytes, {++clock_now, thread_number()}); }
void note_written_by(u32 thread, const char* place, u32 bytes) {
    write_marks(block_rank, shared_address(place), bytes, {++clock_now, thread});
}
void fence_proxy() { fences[thread_number()] = ++clock_now, yield(); }
u64 last_fence() { return fences[thread_number()]; }

void check_fenced(u32 rank, u32 address, u32 bytes, u64 since) {
    const std::vector<Mark>& m = marks[rank];
    if (m.empty() || !bytes) return;
    address %= WINDOW;
    for (u32 i = address / 16; i <= (address + bytes - 1) / 16 && i < m.size(); ++i) {
        const Mark& mark = m[i];
        if (mark.time <= since || mark.time <= fences[mark.writer]) continue;
        char more[128];
        snprintf(more, sizeof more, "\n  shared address 0x%x, written by thread %u of block %u of the cluster", i * 16,
                 mark.writer % threads_of_block(), mark.writer / threads_of_block());
        fail("shared memory that was written by ordinary stores is read by another unit without fence.proxy.async", nullptr, more);
    }
}

void unit_wrote(u32 address, u32 bytes) { write_marks(address / WINDOW, address, bytes, {0, 0}); }

}  // namespace emu

#pragma GCC visibility pop
