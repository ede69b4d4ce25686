// Warpgroup products: their text, who has issued them, their operands in shared memory, and the sums.
#include <cstdio>
#include <deque>
#include <map>
#include <string>

#include "emulator.h"

#pragma GCC visibility push(hidden)

namespace emu {

u32 exchanged(u32 address, u32 span);  // copy_engine.cpp

// ---- text
struct Token {
    int operand;  // -1: a number
    long long number;
};
struct Instruction {
    bool sparse = false, a_in_registers = false;
    int n = 0, k = 0;
    Kind kind = F16;
    std::vector<int> d;
    Token a[4], b, meta, selector, accumulate, negative_a, negative_b, trans_a{-1, 0}, trans_b{-1, 0};
};

static std::vector<std::string> split(const std::string& text, char mark) {
    std::vector<std::string> parts(1);
    int depth = 0;
    for (const char c : text) {
        depth += (c == '{') - (c == '}');
        if (c == mark && !depth)
            parts.emplace_back();
        else if (c != '\n' && c != ' ')
            parts.back() += c;
        else if (!parts.back().empty() && parts.back().back() != ' ')
            parts.back() += ' ';
    }
    for (std::string& p : parts)
        while (!p.empty() && p.back() == ' ') p.pop_back();
    return parts;
}

static Token token(const std::string& text, const std::string& predicate, Token of_predicate) {
    if (text == predicate) return of_predicate;
    if (text[0] == '%') return {std::stoi(text.substr(1)), 0};
    return {-1, std::stoll(text)};
}

static Instruction parsed(const char* source, void* where) {
    std::string text(source);
    while (!text.empty() && (text.back() == '}' || text.back() == '\n' || text.back() == ' ')) {
        const bool brace = text.back() == '}';
        text.pop_back();
        if (brace) break;
    }
    text.erase(0, text.find('{') == 0 ? 1 : 0);
    Instruction i;
    std::string predicate = "?";
    Token of_predicate{-1, 1};
    bool seen = false;
    for (const std::string& statement : split(text, ';')) {
        const size_t space = statement.find(' ');
        const std::string name = statement.substr(0, space);
        if (name.empty() || name == ".reg") continue;
        const std::vector<std::string> x = split(statement.substr(space + 1), ',');
        if (name == "setp.ne.b32" && x.size() == 3 && x[2] == "0") {
            predicate = x[0], of_predicate = token(x[1], "?", {-1, 0});
            continue;
        }
        char types[2][8];
        const char* const sparse = "wgmma.mma_async.sp.sync.aligned.";
        i.sparse = name.rfind(sparse, 0) == 0;
        const std::string rest = name.substr(i.sparse ? strlen(sparse) : strlen("wgmma.mma_async.sync.aligned."));
        if (name.rfind("wgmma.mma_async.", 0) != 0 ||
            sscanf(rest.c_str(), "m64n%dk%d.f32.%7[a-z0-9].%7[a-z0-9]", &i.n, &i.k, types[0], types[1]) != 4 ||
            strcmp(types[0], types[1]) || (strcmp(types[0], "f16") && strcmp(types[0], "bf16")) || i.k != (i.sparse ? 32 : 16) ||
            i.n % 8 || i.n < 8 || i.n > 256 || seen)
            fail("inline PTX that is not emulated, or no product of a warpgroup", where, source);
        i.kind = types[0][0] == 'f' ? F16 : BF16, seen = true;
        size_t at = 0;
        const auto taken = [&] {
            if (at >= x.size()) fail("a product of a warpgroup with too few operands", where, source);
            return token(x[at++], predicate, of_predicate);
        };
        for (const std::string& d : split(x[at++].substr(1, x[0].size() - 2), ',')) i.d.push_back(token(d, "?", {}).operand);
        if ((i.a_in_registers = x[at][0] == '{')) {
            const auto registers = split(x[at].substr(1, x[at].size() - 2), ',');
            ++at;
            if (registers.size() != 4) fail("a product of a warpgroup takes A from four registers", where, source);
            for (int r = 0; r < 4; ++r) i.a[r] = token(registers[r], "?", {});
        } else {
            i.a[0] = taken();
        }
        i.b = taken();
        if (i.sparse) i.meta = taken(), i.selector = taken();
        i.accumulate = taken(), i.negative_a = taken(), i.negative_b = taken();
        if (!i.a_in_registers) i.trans_a = taken();
        i.trans_b = taken();
        if (at != x.size() || (int)i.d.size() != i.n / 2) fail("a product of a warpgroup with another number of operands", where, source);
    }
    if (!seen) fail("inline PTX that is not emulated", where, source);
    return i;
}

// ---- what is in flight
struct Product64 {  // by one instruction of a warpgroup
    const Instruction* what;
    int sums, threads, accumulate, selector, trans_a, trans_b, sign;
    u64 a_descriptor, b_descriptor, since;
    u32 a[128][4], meta[128];
    Origin asked;
};
struct Sums {
    int n;
    std::vector<float> values;  // [64][n]
};
struct Running {
    float* place;
    int sums, n;
    u64 product;  // the newest
    u32 group;
};
struct Issuer {  // a thread
    u64 issued = 0;
    bool fenced = false, fenced_since_wait = false;
    std::vector<u64> groups;  // products issued at the end of each
    std::vector<Running> running;
    std::map<std::pair<float*, int>, int> sums;
};
struct Warpgroup {
    std::deque<Product64> products;  // from number `first` on
    u64 first = 0;                   // those before it are computed
    std::vector<Sums> sums;
    Issuer issuers[128];
    u32 arrived = 0, number = 0;     // at warpgroup_meets
    u64 met = 0;
    const char* name = nullptr;
};
static std::vector<std::unique_ptr<Warpgroup>> warpgroups;  // by rank, and number in the block
static u32 per_block;
static std::map<const char*, Instruction> texts;
constexpr u32 POISON = 0x7FA1B2C3u;

void warpgroups_begin() {
    per_block = (threads_of_block() + 127) / 128;
    warpgroups.clear();
    warpgroups.resize(cluster_size * per_block);
    texts.clear();
}

static u32 own_number() { return block_rank * per_block + current / 128; }
static Warpgroup& own(void* where) {
    if (current / 128 * 128 + 128 > (int)threads_of_block()) fail("an instruction of a warpgroup by a thread that is in no whole warpgroup", where);
    auto& w = warpgroups[own_number()];
    if (!w) w = std::make_unique<Warpgroup>();
    return *w;
}

void warpgroups_thread_ends() {
    const auto& w = warpgroups[own_number()];
    if (w && w->issuers[current % 128].issued && !w->issuers[current % 128].running.empty()) fail("a thread ends while products of its warpgroup are in flight (wgmma.wait_group)", nullptr);
}

static bool have_met(u64 group, u64 met) { return warpgroups[group]->met >= met; }
static void describe_meeting(u64 group, u64, char* text, size_t room) {
    snprintf(text, room, "%s: %u of 128 threads of the warpgroup are there", warpgroups[group]->name, warpgroups[group]->arrived);
}
void warpgroup_meets(const char* name, u32 number, void* where) {
    enter();
    Warpgroup& w = own(where);
    if (w.arrived && (w.number != number || strcmp(w.name, name))) fail("threads of a warpgroup meet at different instructions", where);
    w.name = name, w.number = number;
    const u64 meeting = w.met + 1;
    if (++w.arrived == 128) w.arrived = 0, w.met = meeting;
    wait_until({&have_met, &describe_meeting, own_number(), meeting}, where);
}

// ---- operands in shared memory
struct Layout {
    u32 start, leading, stride, span;  // bytes; span: of the swizzle, 16 for none
};

static Layout layout_of(u64 descriptor, bool along_k, u32 bytes_of_k) {
    constexpr u64 UNUSED = 0xC000ull | 0xC000ull << 16 | 0xC000ull << 32 | 1ull << 48 | 0x3FFull << 52;
    char more[96];
    snprintf(more, sizeof more, "\n  matrix descriptor 0x%016llx", descriptor);
    if (descriptor & UNUSED) fail("a matrix descriptor with bits that must be zero", nullptr, more);
    if (descriptor >> 49 & 7) fail("a matrix descriptor with a base offset, which is not emulated", nullptr, more);
    constexpr u32 spans[4] = {16, 128, 64, 32};
    const Layout l{(u32)(descriptor & 0x3FFF) << 4, (u32)(descriptor >> 16 & 0x3FFF) << 4, (u32)(descriptor >> 32 & 0x3FFF) << 4,
                   spans[descriptor >> 62]};
    if (l.span > 16 && l.start % (8 * l.span) >= l.span)
        fail("a matrix descriptor whose start is not in the first line of the swizzle pattern, without a base offset", nullptr, more);
    if (l.span > 16 && along_k && l.start % l.span + bytes_of_k > l.span)
        fail("an operand of a warpgroup product that leaves its line of the swizzle pattern", nullptr, more);
    return l;
}

static const unsigned short* piece(const Layout& l, u32 linear, u64 since) {  // 16 bytes
    const u32 address = block_rank * WINDOW + exchanged(linear, l.span);
    check_fenced(block_rank, address, 16, since);
    return reinterpret_cast<const unsigned short*>(shared_pointer(address, 16, 16));
}

// out[row * row_step + k * k_step], `rows` along M or N.
static void take(float* out, u64 descriptor, bool trans, Kind kind, int rows, int depth, int row_step, int k_step, u64 since) {
    const Layout l = layout_of(descriptor, !trans, depth * 2);
    const auto value = [kind](unsigned short bits) { return kind == F16 ? half_value(bits) : of_bits<float>((u64)bits << 16); };
    if (!trans)
        for (int r = 0; r < rows; ++r)
            for (int k = 0; k < depth; k += 8) {
                const u32 at = l.start + r / 8 * l.stride + (l.span > 16 ? r % 8 * l.span + 2 * k : r % 8 * 16 + k / 8 * l.leading);
                const unsigned short* from = piece(l, at, since);
                for (int e = 0; e < 8; ++e) out[r * row_step + (k + e) * k_step] = value(from[e]);
            }
    else
        for (int k = 0; k < depth; ++k)
            for (int r = 0; r < rows; r += 8) {
                const u32 at = l.start + k % 8 * l.span +
                               (l.span > 16 ? 2 * r / l.span * l.leading + k / 8 * l.stride + 2 * r % l.span : r / 8 * l.stride + k / 8 * l.leading);
                const unsigned short* from = piece(l, at, since);
                for (int e = 0; e < 8; ++e) out[(r + e) * row_step + k * k_step] = value(from[e]);
            }
}

__attribute__((optimize("O3"), target_clones("avx2", "default"), no_sanitize("undefined"))) static void add(
        float* __restrict__ sums, const float* __restrict__ b, float a, int n) {
    for (int j = 0; j < n; ++j) sums[j] += a * b[j];
}

static void compute(Warpgroup& w, const Product64& p) {
    const Instruction& i = *p.what;
    static float a[64][16], b[32 * 256];
    if (i.a_in_registers)
        for (int t = 0; t < 128; ++t)
            for (int r = 0; r < 4; ++r)
                for (int e = 0; e < 2; ++e) {
                    const u32 bits = p.a[t][r] >> 16 * e & 0xFFFF;
                    a[t / 32 * 16 + t % 32 / 4 + 8 * (r % 2)][2 * (t % 4) + 8 * (r / 2) + e] =
                            i.kind == F16 ? half_value(bits) : of_bits<float>((u64)bits << 16);
                }
    else
        take(&a[0][0], p.a_descriptor, p.trans_a, i.kind, 64, 16, 16, 1, p.since);
    take(b, p.b_descriptor, p.trans_b, i.kind, i.n, i.k, 1, i.n, p.since);
    float* const sums = w.sums[p.sums].values.data();
    if (!p.accumulate) std::fill(sums, sums + 64 * i.n, 0.0f);
    for (int r = 0; r < 64; ++r)
        for (int k = 0; k < 16; ++k) {
            int line = k;
            if (i.sparse) {  // two bits for each kept value, of the four columns that it is from
                const int q = k / 8, lane = r / 16 * 32 + r % 8 * 4 + 2 * p.selector + q;
                const u32 places = p.meta[lane] >> (16 * (r % 16 / 8) + 4 * (k % 8 / 2)) & 15;
                if ((places & 3) >= places >> 2) {
                    if (a[r][k]) {
                        char what[160];
                        snprintf(what, sizeof what, "wgmma.mma_async.sp with the places %u, %u (row %d, columns %d to %d): they must increase",
                                 places & 3, places >> 2, r, k / 2 * 4, k / 2 * 4 + 3);
                        fail(what, nullptr);
                    }
                    add(sums + r * i.n, b, NAN, i.n);  // undefined in PTX: a kernel may not use the row of D
                }
                line = k / 2 * 4 + (k % 2 ? places >> 2 : places & 3);
            }
            add(sums + r * i.n, b + line * i.n, p.sign * a[r][k], i.n);
        }
}

// Computes all products up to number `last`; all threads have issued them.
static void compute_until(Warpgroup& w, u64 last) {
    while (w.first <= last) {
        act(&w.products.front().asked);
        compute(w, w.products.front());
        act(nullptr);
        w.products.pop_front();
        ++w.first;
    }
}

class Step : public Operation {
  public:
    u32 warpgroup;
    u64 product;
    bool perform() override {
        compute_until(*warpgroups[warpgroup], product);
        return true;
    }
    bool uses(u32) const override { return false; }  // the end of a thread is an error already
    const char* name() const override { return "wgmma.mma_async"; }
};

// ---- threads
void wgmma_fence() {
    Issuer& me = own(__builtin_return_address(0)).issuers[current % 128];
    me.fenced = me.fenced_since_wait = true;
}
void wgmma_commit() {
    Issuer& me = own(__builtin_return_address(0)).issuers[current % 128];
    me.groups.push_back(me.issued);
}

static float& sum_of(Warpgroup& w, int sums, int thread, int i) {  // register i of a thread
    Sums& s = w.sums[sums];
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    return s.values[row * s.n + column];
}

static void check_poison(const Running& r, void* where) {
    for (int i = 0; i < r.n / 2; ++i) {
        u32 bits;
        memcpy(&bits, r.place + i, 4);
        if (bits != POISON) fail("accumulators of a warpgroup product in flight were changed before wgmma.wait_group", where);
    }
}

void wgmma_text(const char* text, const Operand* operands, int number) {
    enter();
    void* const where = __builtin_return_address(0);
    Warpgroup& w = own(where);
    auto found = texts.find(text);
    if (found == texts.end()) found = texts.emplace(text, parsed(text, where)).first;
    const Instruction& what = found->second;
    const int t = current % 128;
    Issuer& me = w.issuers[t];
    const auto value = [&](const Token& x) {
        if (x.operand >= number) fail("inline PTX names an operand that it does not have", where);
        return x.operand < 0 ? (u64)x.number : operands[x.operand].value;
    };
    Product64 mine{};
    mine.what = &what, mine.accumulate = value(what.accumulate) != 0;
    mine.trans_a = (int)value(what.trans_a), mine.trans_b = (int)value(what.trans_b);
    const long long sign_a = (long long)value(what.negative_a), sign_b = (long long)value(what.negative_b);
    if (sign_a * sign_a != 1 || sign_b * sign_b != 1) fail("a warpgroup product whose factors are neither 1 nor -1", where);
    mine.sign = (int)(sign_a * sign_b);
    if (what.sparse && (mine.selector = (int)value(what.selector)) > 1) fail("a sparsity selector that is not 0 or 1", where);
    mine.b_descriptor = value(what.b);
    if (!what.a_in_registers) mine.a_descriptor = value(what.a[0]);
    if (!me.fenced) fail("a warpgroup product without wgmma.fence before the first one", where);

    const u64 at = me.issued++;
    if (at - w.first == w.products.size()) {
        w.products.push_back(mine);
        w.products.back().sums = -1, w.products.back().asked = origin(where);
    }
    Product64& p = w.products[at - w.first];
    if (p.what != mine.what && (p.what->n != what.n || p.what->k != what.k || p.what->kind != what.kind || p.what->sparse != what.sparse ||
                                p.what->a_in_registers != what.a_in_registers))
        fail("threads of a warpgroup issue different products", where);
    if (p.accumulate != mine.accumulate || p.trans_a != mine.trans_a || p.trans_b != mine.trans_b || p.sign != mine.sign ||
        p.selector != mine.selector || p.b_descriptor != mine.b_descriptor || p.a_descriptor != mine.a_descriptor)
        fail("threads of a warpgroup issue a product with different descriptors, predicates or selectors", where);
    if (what.a_in_registers)
        for (int r = 0; r < 4; ++r) p.a[t][r] = (u32)value(what.a[r]);
    if (what.sparse) p.meta[t] = (u32)value(what.meta);
    p.since = std::max(p.since, last_fence());

    float* const d = operands[what.d[0]].place;
    for (int i = 0; i < what.n / 2; ++i)
        if (!d || operands[what.d[i]].place != d + i) fail("accumulators of a warpgroup product that are not neighbours", where);
    auto& mine_in = me.sums;
    const auto key = std::make_pair(d, what.n);
    const bool known = mine_in.count(key);
    if (p.sums < 0) {
        if (!known) w.sums.push_back({what.n, std::vector<float>(64 * what.n)});
        p.sums = known ? mine_in[key] : (int)w.sums.size() - 1;
    }
    if (known && mine_in[key] != p.sums) fail("threads of a warpgroup issue a product with different accumulators", where);
    mine_in[key] = p.sums;
    Running* running = nullptr;
    for (Running& r : me.running)
        if (r.place == d && r.n == what.n) running = &r;
    if (running) {
        check_poison(*running, where);
    } else {
        if (p.accumulate) {
            bool changed = !known;
            for (int i = 0; i < what.n / 2; ++i) {
                float& sum = sum_of(w, p.sums, t, i);
                changed |= memcmp(&sum, d + i, 4) != 0;
                sum = d[i];
            }
            if (changed && !me.fenced_since_wait)
                fail("accumulators were written after the last wgmma.wait_group, without wgmma.fence before the next product", where);
        }
        me.running.push_back({d, p.sums, what.n, 0, 0});
        running = &me.running.back();
        for (int i = 0; i < what.n / 2; ++i) memcpy(d + i, &POISON, 4);
    }
    running->product = at, running->group = (u32)me.groups.size();
    if (++p.threads == 128) {
        if (random_number() % 3 == 0) {
            compute_until(w, at);
        } else {
            auto o = std::make_shared<Step>();
            o->asked = p.asked, o->rank = block_rank, o->warpgroup = own_number(), o->product = at;
            later(o);
        }
    }
    leave();
}

// Whether all threads have issued the products before number `end`.
static bool issued(u64 group, u64 end) {
    const Warpgroup& w = *warpgroups[group];
    if (end <= w.first) return true;
    return end - w.first <= w.products.size() && w.products[end - w.first - 1].threads == 128;
}
static void describe_issued(u64 group, u64 end, char* text, size_t room) {
    const Warpgroup& w = *warpgroups[group];
    const u64 at = end - w.first - 1;
    snprintf(text, room, "wgmma.wait_group: %d of 128 threads of the warpgroup have issued the product",
             at < w.products.size() ? w.products[at].threads : 0);
}

void wgmma_wait(u32 left) {
    enter();
    void* const where = __builtin_return_address(0);
    Warpgroup& w = own(where);
    Issuer& me = w.issuers[current % 128];
    if (me.groups.size() <= left) return leave();
    const u32 groups = (u32)me.groups.size() - left;  // those before this number
    const u64 end = me.groups[groups - 1];
    wait_until({&issued, &describe_issued, own_number(), end}, where);
    enter();
    if (end) compute_until(w, end - 1);
    for (size_t r = me.running.size(); r-- > 0;) {
        const Running done = me.running[r];
        if (done.group >= groups) continue;
        check_poison(done, where);
        for (int i = 0; i < done.n / 2; ++i) done.place[i] = sum_of(w, done.sums, current % 128, i);
        me.running.erase(me.running.begin() + r);
        me.fenced_since_wait = false;
    }
    leave();
}

}  // namespace emu

#pragma GCC visibility pop
