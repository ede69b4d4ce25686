// cp.async: copies from global to shared memory that are in flight until their group is waited for.
//
// The bytes are written when the thread waits for their group. From the start of a copy on its place in shared memory holds
// 0xFF bytes, a NaN of every type: a kernel that reads too early, or that starts a copy to what others still read, sees them.
#pragma once
#pragma GCC visibility push(hidden)

namespace emu {

void start_copies(int threads);                                   // of all blocks of a cluster: nothing is in flight
void copy_later(char* to, const unsigned char* bytes, u32 size);  // by the current thread
void commit_copies();
void land_copies(u32 groups_left);  // all but the newest groups of the current thread arrive
void land_all_copies();             // those of no group, too
u64 copies_so_far();                           // of the current thread, since the block started
void land_copies_of(u32 thread, u64 number);   // the first copies of a thread of the cluster, whose block is at hand

EMU_INTRINSIC void cp_async(u32 to, size_t from, u32 size, u32 valid) {
    char* const place = shared_pointer(to, size, size);
    unsigned char bytes[16] = {};
    if (valid > size) fail("cp.async of more bytes than it writes", __builtin_return_address(0));
    if (valid && from % size) unsupported("cp.async from a global address that is not a multiple of its size");
    for (u32 i = 0; i < valid; ++i) bytes[i] = reinterpret_cast<const volatile unsigned char*>(from)[i];
    copy_later(place, bytes, size);
}

}  // namespace emu

#pragma GCC visibility pop
