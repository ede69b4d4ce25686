// What other units than the threads do: the copy engine, stores to other blocks, warpgroup products; and mbarriers, clusters.
//
// An operation is performed at a random time after it was asked for: at once, some turns later, or not before something
// waits for it. A kernel that waits for less than it needs computes with what was there before.
#pragma once
#pragma GCC visibility push(hidden)

namespace emu {

// Who asked for an operation: messages about it name that place.
struct Origin {
    void* where;
    uint3 thread, block;
};
Origin origin(void* where);     // of the current thread
void act(const Origin* who);    // from now on errors are those of this operation; null: of the thread that runs
bool exited(u32 rank);          // whether all threads of a block of the cluster have ended
u32 threads_of_block();
u32 switch_block(u32 rank);     // the block whose memory is at hand; what it was before
u32 thread_number();            // of the current thread in the cluster

class Operation {
  public:
    Origin asked;
    u32 rank;  // of the block that asked
    virtual ~Operation() = default;
    // Performs a part; true if that was the last one.
    virtual bool perform() = 0;
    // Whether it still reads or writes the shared memory of that block.
    virtual bool uses(u32 of_rank) const = 0;
    virtual const char* name() const = 0;
};
void later(std::shared_ptr<Operation> operation);  // performs it sometime
bool perform_now(Operation& operation);            // the next part, with the memory and the messages of who asked

// ---- called by the scheduler
void asynchronous_begin();  // before the blocks of a cluster start
void asynchronous_end();    // after they have ended: what is left is performed
bool land_what_is_due();    // a turn: true if an operation was performed
bool land_one();            // nothing else can go on; false if nothing is left
void thread_ends();
void block_ends();

// ---- order between ordinary accesses and those of the other units ("proxies")
void note_written(u32 address, u32 bytes);  // by an instruction that the emulator sees: stmatrix, cp.async, st.shared
void note_written_by(u32 thread, const char* place, u32 bytes);
void unit_wrote(u32 address, u32 bytes);    // what another unit writes, others may read
void fence_proxy();                         // fence.proxy.async by the current thread
u64 last_fence();                           // its time
// An error if bytes that another unit reads were written without a fence after that, by the writer or before `since`.
void check_fenced(u32 rank, u32 address, u32 bytes, u64 since);

// ---- mbarriers (mbarriers.cpp)
void mbarriers_begin();
void mbarrier_init(u32 address, u32 count);
void mbarrier_fence_init();
void mbarrier_arrive(u32 address, u32 count);                   // of the own block
void mbarrier_arrive_cluster(u32 address);                      // of any block
void mbarrier_expect(u32 address, u32 bytes, bool arrive);
void mbarrier_complete(u32 address, u32 bytes);                 // bytes have arrived; address in the window of the cluster
u32 mbarrier_try_wait(u32 address, u32 parity);
void mbarrier_arrive_after_copies(u32 address);                 // cp.async.mbarrier.arrive.noinc
void check_mbarrier(u32 address, void* where);                  // an error if there is none that other units may use

// ---- clusters (clusters.cpp)
void clusters_begin();
void clusters_thread_ends();
void cluster_arrive();
void cluster_wait();
void store_async(u32 address, const void* words, u32 bytes, u32 barrier);

// ---- registers of warpgroups (clusters.cpp)
void registers_begin();
void set_registers(u32 count, bool more);

}  // namespace emu

#pragma GCC visibility pop
