// Which rows of a CSR matrix a block works on: bins of rows of one length class, in a table that is a kernel parameter.
// The host's side is runtime/row_work.py.
#pragma once
#include "spformat/gather.cuh"

namespace spformat {

constexpr int MAX_BINS = 16;

struct Bin {
  unsigned first_block;
  int log_slots;
  long long first, end;  // records
};

struct Bins {
  unsigned blocks;
  unsigned count;
  long long pieces;
  Bin bin[MAX_BINS];
};

// A record on its way: what a slot of one block works on.
struct Task {
  uint4 record;
  int log;
  bool live;
};

__device__ __forceinline__ Task locate(const Bins& bins, const Record* records, unsigned block, int slot, int log_all) {
  Task task{{}, 0, false};
  if (block >= bins.blocks) return task;
  unsigned i = 0;
  while (i + 1 < bins.count && block >= bins.bin[i + 1].first_block) ++i;
  const Bin& bin = bins.bin[i];
  task.log = bin.log_slots;
  const long long row_of_block = static_cast<long long>(block - bin.first_block) << (log_all - task.log);
  const long long at = bin.first + row_of_block + (slot >> task.log);
  task.live = at < bin.end;
  task.record = load_if(reinterpret_cast<const uint4*>(records + at), task.live);
  return task;
}

}  // namespace spformat
