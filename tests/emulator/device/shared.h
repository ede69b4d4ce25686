// Shared memory as PTX addresses it: 32-bit numbers in a window of the block.
//
// The window holds the dynamic shared memory from DYNAMIC_BASE on and the arrays of known size from STATIC_BASE on, with gaps
// between them: an address of a gap is an error. Generic addresses and those of the window are the same modulo ALIKE, so that
// swizzles mean the same in both. Bits 24 to 31 are the rank of the block in its cluster: the addresses of one block are those
// of another but for these bits.
#pragma once
#pragma GCC visibility push(hidden)

namespace emu {

constexpr u32 ALIKE = 1024, DYNAMIC_BASE = 1024, STATIC_BASE = 1 << 20, WINDOW = 1 << 24;

extern u32 dynamic_alignment;  // what the launched kernel declares, at least 16

// Before the first block of a launch. starts: where the dynamic shared memory is of each block of a cluster.
void set_window(const Options& o, const char* base, const std::vector<char*>& starts);
void fill_shared(u32 rank);  // the arrays of known size of a block, before it starts
void enter_block(u32 rank);  // from now on the arrays of known size, which lie at one place for all, are those of this block
u32 shared_address(const void* p);                    // an error if p is not in shared memory (its end counts as inside)
// `bytes` at an address of the window, which is a multiple of `alignment`; an error if they are outside of an array.
char* shared_pointer(u32 address, u32 bytes, u32 alignment);
// The same in any block of the cluster that has not ended.
char* cluster_pointer(u32 address, u32 bytes, u32 alignment, void* where);
u32 cluster_map(u32 address, u32 rank);  // mapa

void check_behind_dynamic(const char* end);  // after a block: what the alignment left free before `end` is as it was

// The array that a kernel declares as extern __shared__, on a multiple of N bytes.
template <u32 N> struct Aligned {
    static inline const u32 noted = dynamic_alignment = std::max(dynamic_alignment, N);
};
template <class T, u32 N> T* dynamic_array() {
    static_cast<void>(*const_cast<const volatile u32*>(&Aligned<(N > alignof(T) ? N : u32(alignof(T)))>::noted));
    return reinterpret_cast<T*>(dynamic_shared);
}

}  // namespace emu

#pragma GCC visibility pop
