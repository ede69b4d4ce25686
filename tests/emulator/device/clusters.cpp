// The barrier of a cluster, stores to other blocks, and registers that warpgroups hand over.
#include <cstdio>

#include "emulator.h"

#pragma GCC visibility push(hidden)

namespace emu {

// ---- the barrier of a cluster
struct Meeting {
    u64 phase;
    u32 arrived, expected;  // of the threads that have not ended
};
static Meeting meeting;
static std::vector<u64> arrivals;  // of each thread of the cluster
static std::vector<u64> waits;

void clusters_begin() {
    meeting = {0, 0, cluster_size * threads_of_block()};
    arrivals.assign(meeting.expected, 0);
    waits.assign(arrivals.size(), 0);
}

static void nothing(WarpWide* const*) {}
static void advance_meeting() {
    if (meeting.arrived == meeting.expected) meeting.arrived = 0, ++meeting.phase;
}
void clusters_thread_ends() {  // it counts as arrived
    if (arrivals[thread_number()] != waits[thread_number()] && arrivals[thread_number()] > meeting.phase) --meeting.arrived;
    --meeting.expected;
    advance_meeting();
}

void cluster_arrive() {
    void* const where = __builtin_return_address(0);
    WarpWide together{&nothing, "barrier.cluster.arrive.aligned"};
    warp_wide(together);
    enter();
    const u32 t = thread_number();
    if (arrivals[t] != waits[t]) fail("barrier.cluster.arrive twice without a wait between", where);
    ++arrivals[t];
    ++meeting.arrived;
    advance_meeting();
    leave();
}

static bool met(u64 phase, u64) { return meeting.phase >= phase; }
static void describe_meeting(u64 phase, u64, char* text, size_t room) {
    snprintf(text, room, "barrier.cluster.wait: %u of %u threads of the cluster have arrived", meeting.arrived, meeting.expected);
}

void cluster_wait() {
    void* const where = __builtin_return_address(0);
    WarpWide together{&nothing, "barrier.cluster.wait.aligned"};
    warp_wide(together);
    enter();
    const u32 t = thread_number();
    if (arrivals[t] == waits[t]) fail("barrier.cluster.wait without an arrive before", where);
    ++waits[t];
    wait_until({&met, &describe_meeting, waits[t], 0}, where);
}

class RemoteStore : public Operation {
  public:
    u32 address, barrier, bytes;
    unsigned char words[16];
    bool perform() override {
        memcpy(cluster_pointer(address, bytes, bytes, nullptr), words, bytes);
        unit_wrote(address, bytes);
        mbarrier_complete(barrier, bytes);
        return true;
    }
    bool uses(u32 of_rank) const override { return of_rank == address / WINDOW; }
    const char* name() const override { return "st.async"; }
};

void store_async(u32 address, const void* words, u32 bytes, u32 barrier) {
    enter();
    void* const where = __builtin_return_address(0);
    cluster_pointer(address, bytes, bytes, where);
    check_mbarrier(barrier, where);
    if (address / WINDOW != barrier / WINDOW) fail("st.async to another block than that of its mbarrier", where);
    auto o = std::make_shared<RemoteStore>();
    o->asked = origin(where), o->rank = block_rank, o->address = address, o->barrier = barrier, o->bytes = bytes;
    memcpy(o->words, words, bytes);
    later(o);
    leave();
}

// ---- registers: those of a block are handed from warpgroup to warpgroup
struct Registers {
    int left;
    std::vector<u32> of_warpgroup, asked;
    std::vector<std::vector<u32>> by_warp;
};
static std::vector<Registers> registers;  // by rank

static u32 registers_at_start() { return std::min(255u, 65536 / threads_of_block()) / 8 * 8; }

void registers_begin() {
    const u32 groups = (threads_of_block() + 127) / 128;
    registers.assign(cluster_size, {0, std::vector<u32>(groups, registers_at_start()), std::vector<u32>(groups, 0), {}});
}

static bool enough(u64 group, u64 count) {
    const Registers& r = registers[block_rank];
    return r.of_warpgroup[group] == count || r.left + (int)r.of_warpgroup[group] >= (int)count;
}
static void describe_registers(u64 group, u64 count, char* text, size_t room) {
    snprintf(text, room, "setmaxnreg.inc to %llu registers: warpgroup %llu has %u, and %d a thread are free", count, group,
             registers[block_rank].of_warpgroup[group], registers[block_rank].left);
}

void set_registers(u32 count, bool more) {
    void* const where = __builtin_return_address(0);
    if (count % 8 || count < 24 || count > 256) fail("setmaxnreg of a number that is not a multiple of 8 from 24 to 256", where);
    if (threads_of_block() % 128) fail("setmaxnreg in a block that is not whole warpgroups", where);
    WarpWide together{&nothing, more ? "setmaxnreg.inc" : "setmaxnreg.dec"};
    warp_wide(together);
    warpgroup_meets(more ? "setmaxnreg.inc" : "setmaxnreg.dec", count, where);
    enter();
    Registers& r = registers[block_rank];
    const u32 group = current / 128;
    if (r.of_warpgroup[group] != count && (r.of_warpgroup[group] < count) != more)
        fail(more ? "setmaxnreg.inc to fewer registers than the warpgroup has" : "setmaxnreg.dec to more registers than the warpgroup has", where);
    leave();
    wait_until({&enough, &describe_registers, group, count}, where);
    enter();
    r.left -= (int)count - (int)r.of_warpgroup[group];
    r.of_warpgroup[group] = count;
    leave();
}

}  // namespace emu

#pragma GCC visibility pop
