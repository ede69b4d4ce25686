// mbarriers: phases, arrivals and bytes, beside the 8 bytes in shared memory, which hold a number that ordinary data is not.
#include <cstdio>
#include <unordered_map>

#include "emulator.h"

#pragma GCC visibility push(hidden)

namespace emu {

constexpr int MOST_PENDING = (1 << 20) - 1;
struct Barrier {
    u32 count, pending, initialised_by;
    int bytes;  // announced and not there yet; below zero if they came first
    u64 phase, word;
    bool published;  // a fence has followed init
};
static std::unordered_map<u32, Barrier> mbarriers;  // by address in the window of the cluster

void mbarriers_begin() { mbarriers.clear(); }

static char* place_of(u32 address, void* where) {
    return address / WINDOW == block_rank ? shared_pointer(address, 8, 8) : cluster_pointer(address, 8, 8, where);
}

static void write_word(u32 address, Barrier& b, void* where) {
    // The state that a program sees is opaque: a number that ordinary data is not.
    b.word = (b.phase * 0x9E3779B97F4A7C15ull) ^ ((u64)b.pending << 40) ^ ((u64)(u32)b.bytes << 8) ^ 0xB5ull;
    memcpy(place_of(address, where), &b.word, 8);
}

static Barrier& barrier_at(u32 address, void* where) {
    char* const place = place_of(address, where);
    char more[64];
    snprintf(more, sizeof more, "\n  mbarrier at shared address 0x%x", address);
    const auto found = mbarriers.find(address);
    if (found == mbarriers.end()) fail("an mbarrier that is not initialised", where, more);
    if (memcmp(place, &found->second.word, 8)) fail("an mbarrier whose 8 bytes were overwritten", where, more);
    return found->second;
}

static void advance(u32 address, Barrier& b, void* where) {
    if (b.pending == 0 && b.bytes == 0) ++b.phase, b.pending = b.count;
    write_word(address, b, where);
}

static void check_published(const Barrier& b, void* where) {
    if (!b.published) fail("an mbarrier is used by another unit or block before fence.mbarrier_init of the thread that initialised it", where);
}

void check_mbarrier(u32 address, void* where) { check_published(barrier_at(address, where), where); }

void mbarrier_init(u32 address, u32 count) {
    enter();
    void* const where = __builtin_return_address(0);
    if (!count || count > MOST_PENDING) fail("mbarrier.init with a count that is not 1 to 2^20 - 1", where);
    place_of(address, where);
    if (mbarriers.count(address)) fail("mbarrier.init of an mbarrier that is initialised already", where);
    Barrier& b = mbarriers[address] = Barrier{count, count, thread_number(), 0, 0, 0, false};
    write_word(address, b, where);
    leave();
}

void mbarrier_fence_init() {
    for (auto& [address, b] : mbarriers)
        if (b.initialised_by == thread_number()) b.published = true;
    yield();
}

static void arrive(u32 address, u32 count, void* where) {
    Barrier& b = barrier_at(address, where);
    if (count > b.pending) {
        char more[160];
        snprintf(more, sizeof more, "\n  mbarrier at shared address 0x%x: %u arrivals a phase, %u missing in this one, %d bytes missing",
                 address, b.count, b.pending, b.bytes);
        fail("more arrivals at an mbarrier than its phase has", where, more);
    }
    b.pending -= count;
    advance(address, b, where);
}

static void expect(u32 address, u32 bytes, void* where) {
    Barrier& b = barrier_at(address, where);
    b.bytes += (int)bytes;
    if (bytes > MOST_PENDING || b.bytes > MOST_PENDING) fail("more bytes than an mbarrier counts (2^20 - 1)", where);
    write_word(address, b, where);
}

void mbarrier_arrive(u32 address, u32 count) {
    enter();
    void* const where = __builtin_return_address(0);
    shared_pointer(address, 8, 8);
    arrive(address, count, where);
    leave();
    if (random_number() % 8 == 0) yield();
}

void mbarrier_arrive_cluster(u32 address) {
    enter();
    void* const where = __builtin_return_address(0);
    if (address / WINDOW != block_rank) check_mbarrier(address, where);
    arrive(address, 1, where);
    leave();
    if (random_number() % 8 == 0) yield();
}

void mbarrier_expect(u32 address, u32 bytes, bool arrives) {
    enter();
    void* const where = __builtin_return_address(0);
    shared_pointer(address, 8, 8);
    expect(address, bytes, where);
    if (arrives) arrive(address, 1, where);
    leave();
    if (random_number() % 8 == 0) yield();
}

void mbarrier_complete(u32 address, u32 bytes) {
    Barrier& b = barrier_at(address, nullptr);
    check_published(b, nullptr);
    b.bytes -= (int)bytes;
    if (b.bytes < -MOST_PENDING) fail("more bytes than an mbarrier counts (2^20 - 1)", nullptr);
    advance(address, b, nullptr);
}

static bool completed(u64 address, u64 parity) { return (mbarriers[(u32)address].phase & 1) != parity; }
static void describe(u64 address, u64 parity, char* text, size_t room) {
    const Barrier& b = mbarriers[(u32)address];
    snprintf(text, room, "mbarrier.try_wait of parity %llu at shared address 0x%x: phase %llu, %u of %u arrivals missing, %d bytes missing",
             parity, (u32)address, b.phase, b.pending, b.count, b.bytes);
}

u32 mbarrier_try_wait(u32 address, u32 parity) {
    enter();
    void* const where = __builtin_return_address(0);
    if (parity > 1) fail("mbarrier.try_wait.parity of a parity that is not 0 or 1", where);
    shared_pointer(address, 8, 8);
    barrier_at(address, where);
    if (random_number() % 8 == 0) {  // it may give up at any time
        const u32 done = completed(address, parity);
        leave();
        yield();
        return done;
    }
    wait_until({&completed, &describe, address, parity}, where);
    return 1;
}

class ArriveAfterCopies : public Operation {
  public:
    u32 address, thread, end;
    bool perform() override {
        land_copies_of(thread, end);
        arrive(address, 1, nullptr);
        return true;
    }
    bool uses(u32 of_rank) const override { return of_rank == rank; }
    const char* name() const override { return "cp.async.mbarrier.arrive"; }
};

void mbarrier_arrive_after_copies(u32 address) {
    enter();
    void* const where = __builtin_return_address(0);
    shared_pointer(address, 8, 8);
    barrier_at(address, where);
    auto o = std::make_shared<ArriveAfterCopies>();
    o->asked = origin(where), o->rank = block_rank, o->address = address;
    o->thread = thread_number(), o->end = copies_so_far();
    later(o);
    leave();
}

}  // namespace emu

#pragma GCC visibility pop
