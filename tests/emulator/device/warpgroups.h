// Products of a warpgroup (wgmma): D[64][N] += A[64][k] B[k][N], float32 sums, by 128 threads together.
//
// A product is performed at a random time between its last thread and the wait for its group. Until that wait the accumulators
// hold a NaN. Operands are read from shared memory at the time of the product; those in registers when it is asked for.
// Products are added one after another in float32; a GPU adds them in an order that nobody documents.
#pragma once
#pragma GCC visibility push(hidden)

namespace emu {

void warpgroups_begin();
void warpgroups_thread_ends();
// All 128 threads of the warpgroup come here with the same number, or there is an error, or a deadlock.
void warpgroup_meets(const char* name, u32 number, void* where);

void wgmma_fence();
void wgmma_commit();
void wgmma_wait(u32 left);

// An operand of inline PTX: the place of a register that is written, or a number.
struct Operand {
    float* place;
    u64 value;
};
EMU_INTRINSIC Operand inout(float& x) { return {&x, 0}; }
template <class T> EMU_INTRINSIC Operand in(T x) { return {nullptr, (u64)x}; }
void wgmma_text(const char* text, const Operand* operands, int number);  // the PTX of one product, with its operands
template <class... O> EMU_INTRINSIC void interpreted(const char* text, O... operands) {
    const Operand all[] = {operands...};
    wgmma_text(text, all, sizeof...(operands));
}

}  // namespace emu

#pragma GCC visibility pop
