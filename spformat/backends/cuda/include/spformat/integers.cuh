// Integer types by their width, for every kernel.
#pragma once

namespace spformat {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

}  // namespace spformat
