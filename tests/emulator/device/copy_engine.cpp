// Copies of the copy engine: checked when they are asked for, performed later.
#include <cstdio>

#include "emulator.h"

#pragma GCC visibility push(hidden)

namespace emu {

// The byte of a box, or of an operand of a warpgroup product, at `address` when pieces of 16 bytes are exchanged within `span`.
u32 exchanged(u32 address, u32 span) {
    return span == 128 ? address ^ (address >> 3 & 0x70) : span == 64 ? address ^ (address >> 3 & 0x30)
           : span == 32 ? address ^ (address >> 3 & 0x10) : address;
}

static const TensorMap& map_at(size_t at, void* where) {
    if (at % 64) fail("a tensor map that does not lie on a multiple of 64", where);
    const TensorMap& m = *reinterpret_cast<const TensorMap*>(at);
    if (m.magic != TENSOR_MAP) fail("a tensor map that cuTensorMapEncodeTiled did not write", where);
    return m;
}

static u32 box_bytes(const TensorMap& m) {
    u32 bytes = m.item;
    for (int d = 0; d < m.rank; ++d) bytes *= m.box[d];
    return bytes;
}

static const TensorMap& checked(size_t map, u32 shared, const Coordinates& c, void* where) {
    const TensorMap& m = map_at(map, where);
    char more[128];
    snprintf(more, sizeof more, "\n  %d coordinates, a map of rank %d, shared address 0x%x", c.number, m.rank, shared);
    if (c.number != m.rank) fail("a copy of a box whose rank is not that of its map", where, more);
    if (shared % 128) fail("a copy of a box at a shared address that is not a multiple of 128", where, more);
    // An H200 answered "illegal instruction" to loads that started anywhere else in a line.
    if ((long long)c.at[0] * m.item % 16) fail("a copy of a box that starts at no multiple of 16 bytes of its lines", where, more);
    if (m.swizzle && m.box[0] * m.item != m.swizzle) unsupported("a box whose lines are shorter than its swizzle");
    return m;
}

// Calls `line` for every line of a box: its number, whether it is inside of the tensor, and its first byte in global memory.
template <class F> static void each_line(const TensorMap& m, const Coordinates& c, F line) {
    u32 lines = 1;
    for (int d = 1; d < m.rank; ++d) lines *= m.box[d];
    for (u32 i = 0; i < lines; ++i) {
        bool inside = true;
        u64 at = m.address;
        u32 left = i;
        for (int d = 1; d < m.rank; ++d) {
            const long long x = (long long)c.at[d] + left % m.box[d];
            left /= m.box[d];
            inside &= x >= 0 && x < (long long)m.extents[d];
            at += (u64)x * m.strides[d - 1];
        }
        line(i, inside, at);
    }
}

class Load : public Operation {
  public:
    TensorMap map;
    Coordinates c;
    u32 to, barrier, blocks;  // blocks: a bit for each that gets the box
    size_t from = 0;          // of a run of bytes, without a map
    u32 bytes;
    std::vector<u32> left;    // blocks that have not got it yet
    bool perform() override {
        const u32 block = left.back();
        left.pop_back();
        std::vector<unsigned char> data(bytes, 0);
        if (from)
            memcpy(data.data(), reinterpret_cast<const void*>(from), bytes);
        else
            each_line(map, c, [&](u32 i, bool inside, u64 at) {
                const u32 line = map.box[0] * map.item;
                const long long first = c.at[0] < 0 ? -(long long)c.at[0] : 0;
                const long long end = std::min<long long>(map.box[0], (long long)map.extents[0] - c.at[0]);
                if (inside && first < end)
                    memcpy(data.data() + i * line + first * map.item,
                           reinterpret_cast<const char*>(at) + (c.at[0] + first) * map.item, (end - first) * map.item);
            });
        const u32 place = to % WINDOW + block * WINDOW;
        char* const out = cluster_pointer(place, bytes, 16, nullptr);
        for (u32 i = 0; i < bytes; i += 16) memcpy(out + (from ? i : exchanged(place + i, map.swizzle) - place), data.data() + i, 16);
        unit_wrote(place, bytes);
        mbarrier_complete(barrier % WINDOW + block * WINDOW, bytes);
        return left.empty();
    }
    bool uses(u32 of_rank) const override {
        for (const u32 b : left)
            if (b == of_rank) return true;
        return false;
    }
    const char* name() const override { return from ? "cp.async.bulk to shared memory" : "cp.async.bulk.tensor to shared memory"; }
};

void prefetch_map(size_t map) { map_at(map, __builtin_return_address(0)); }

static void start(std::shared_ptr<Load> o, u32 to, u32 barrier, u32 blocks, void* where) {
    o->asked = origin(where), o->rank = block_rank, o->to = to, o->barrier = barrier;
    if (to / WINDOW != barrier / WINDOW) fail("a bulk copy to another block than that of its mbarrier", where);
    if (!blocks) blocks = 1u << to / WINDOW;
    if (blocks >> cluster_size) fail("a bulk copy to blocks that the cluster does not have", where);
    for (u32 b = 0; b < cluster_size; ++b) {
        if (!(blocks >> b & 1)) continue;
        const u32 place = to % WINDOW + b * WINDOW;
        // Pieces change places within a multiple of the span: the whole of it must exist.
        cluster_pointer(place, o->bytes, 16, where);
        if (b == block_rank) check_mbarrier(barrier % WINDOW + b * WINDOW, where);
        o->left.push_back(b);
    }
    for (size_t i = o->left.size(); i-- > 1;) std::swap(o->left[i], o->left[random_number() % (i + 1)]);
    later(o);
}

void load_box(u32 to, size_t map, u32 barrier, const Coordinates& c, u32 blocks) {
    enter();
    void* const where = __builtin_return_address(0);
    auto o = std::make_shared<Load>();
    o->map = checked(map, to, c, where), o->c = c, o->bytes = box_bytes(o->map);
    start(o, to, barrier, blocks, where);
    leave();
}

void load_bytes(u32 to, size_t from, u32 bytes, u32 barrier) {
    enter();
    void* const where = __builtin_return_address(0);
    if (to % 16 || from % 16 || bytes % 16 || !bytes) fail("a bulk copy whose addresses or size are not multiples of 16, or of nothing", where);
    auto o = std::make_shared<Load>();
    o->from = from, o->bytes = bytes;
    start(o, to, barrier, 0, where);
    leave();
}

void bring_bytes(size_t from, u32 bytes) {
    if (from % 16 || bytes % 16 || !bytes)
        fail("bytes brought to L2 whose address or number is not a multiple of 16, or none", __builtin_return_address(0));
    for (u32 i = 0; i < bytes; i += 16) *reinterpret_cast<const volatile char*>(from + i);
    *reinterpret_cast<const volatile char*>(from + bytes - 1);
}

// ---- stores, in groups of a thread
class Store : public Operation {
  public:
    TensorMap map;
    Coordinates c;
    u32 from, thread, group, bytes;
    u64 since;
    bool has_read = false, done = false;
    std::vector<unsigned char> data;
    bool perform() override {
        if (done) return true;
        if (!has_read) {
            check_fenced(from / WINDOW, from, bytes, since);
            const char* const in = cluster_pointer(from, bytes, 16, nullptr);
            data.resize(bytes);
            for (u32 i = 0; i < bytes; i += 16) memcpy(data.data() + i, in + (exchanged(from + i, map.swizzle) - from), 16);
            has_read = true;
            return false;
        }
        each_line(map, c, [&](u32 i, bool inside, u64 at) {
            const u32 line = map.box[0] * map.item;
            // Pieces of 16 bytes are written whole, also the last one of a line that ends inside of it.
            const long long extent = (map.extents[0] * map.item + 15) / 16 * 16, begin = (long long)c.at[0] * map.item;
            const long long first = begin < 0 ? -begin : 0, end = std::min<long long>(line, extent - begin);
            if (inside && first < end) memcpy(reinterpret_cast<char*>(at) + begin + first, data.data() + i * line + first, end - first);
        });
        return done = true;
    }
    bool uses(u32 of_rank) const override { return !has_read && of_rank == from / WINDOW; }
    const char* name() const override { return "cp.async.bulk.tensor to global memory"; }
};

struct Stores {
    std::vector<std::shared_ptr<Store>> flying;
    u32 group = 0;
};
static std::vector<Stores> stores;  // by thread of the cluster

void copy_engine_begin() { stores.assign(cluster_size * threads_of_block(), {}); }

void copy_engine_thread_ends() {
    for (const auto& o : stores[thread_number()].flying)
        if (o->group == stores[thread_number()].group) {
            act(&o->asked);
            fail("a thread ends before it commits a bulk store (cp.async.bulk.commit_group)", nullptr);
        }
}

void store_box(size_t map, u32 from, const Coordinates& c) {
    enter();
    void* const where = __builtin_return_address(0);
    auto o = std::make_shared<Store>();
    o->map = checked(map, from, c, where), o->c = c, o->bytes = box_bytes(o->map);
    shared_pointer(from, o->bytes, 16);
    Stores& mine = stores[thread_number()];
    o->asked = origin(where), o->rank = block_rank, o->from = from, o->thread = thread_number(), o->group = mine.group;
    o->since = last_fence();
    mine.flying.push_back(o);
    later(o);
    leave();
}

void commit_stores() { ++stores[thread_number()].group; }

void wait_stores(u32 left, bool only_read) {
    enter();
    Stores& mine = stores[thread_number()];
    std::vector<std::shared_ptr<Store>> rest;
    for (const auto& o : mine.flying) {
        if (o->group + left < mine.group) {
            if (!o->has_read) perform_now(*o);
            if (!only_read && !o->done) perform_now(*o);
        }
        if (!o->done) rest.push_back(o);
    }
    mine.flying = std::move(rest);
    leave();
}

}  // namespace emu

#pragma GCC visibility pop
