// The copy engine (TMA): boxes of tensors and runs of bytes between global and shared memory.
//
// A tensor map is what tensor_maps.py writes where the driver would: the numbers that describe the tensor.
#pragma once
#pragma GCC visibility push(hidden)

namespace emu {

constexpr u64 TENSOR_MAP = 0x70614D726F736E54ull;
struct TensorMap {
    u64 magic, address;        // magic: TENSOR_MAP
    u64 extents[5];            // elements, innermost first
    u64 strides[4];            // bytes, of dimensions 1, 2, ..
    unsigned short box[5];     // elements
    unsigned char item, rank;  // bytes of an element
    unsigned short swizzle;    // bytes of the span in which pieces of 16 bytes change places; 0: none
    unsigned short spare;
};
static_assert(sizeof(TensorMap) == 104 && sizeof(TensorMap) <= 128, "a map has room in the driver's 128 bytes");

void copy_engine_begin();
void copy_engine_thread_ends();

struct Coordinates {
    int at[5];
    int number;
};
void prefetch_map(size_t map);
// A box to shared memory; `blocks`: the blocks of the cluster that get it, 0 for the one of the address.
void load_box(u32 to, size_t map, u32 barrier, const Coordinates& c, u32 blocks);
void load_bytes(u32 to, size_t from, u32 bytes, u32 barrier);
void bring_bytes(size_t from, u32 bytes);  // to L2: nothing is kept, but all of it must be there
void store_box(size_t map, u32 from, const Coordinates& c);
void commit_stores();
void wait_stores(u32 left, bool only_read);  // all but the newest groups of the thread: read, or written

}  // namespace emu

#pragma GCC visibility pop
