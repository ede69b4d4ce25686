// Parameters of a kernel, and the two functions that a library with one kernel exports.
#pragma once

namespace emu {

template <class F> struct Parameters;
template <class... A> struct Parameters<void (*)(A...)> {
    template <class T> static long long describe() {  // size * 16 + kind
        using U = std::remove_cv_t<T>;
        const int kind = std::is_pointer_v<U> ? (std::is_const_v<std::remove_pointer_t<U>> ? 2 : 1) : std::is_floating_point_v<U> ? 3
                         : std::is_integral_v<U> || std::is_enum_v<U> ? (std::is_signed_v<U> ? 4 : 5) : 6;
        return (long long)sizeof(U) * 16 + kind;
    }
    static int list(long long* out) {
        int n = 0;
        ((out[n++] = describe<A>()), ...);
        return n;
    }
    template <class T> static T taken(const void* from) {  // the driver copies arguments, wherever they lie
        alignas(T) char room[sizeof(T)];
        memcpy(room, from, sizeof(T));
        return *reinterpret_cast<T*>(room);
    }
    template <void (*f)(A...), size_t... I> static void call(void** args, std::index_sequence<I...>) {
        f(taken<std::remove_cv_t<A>>(args[I])...);
    }
    template <void (*f)(A...)> static void entry(void** args) { call<f>(args, std::index_sequence_for<A...>{}); }
};

// What a kernel declares before its name: __cluster_dims__(..) __launch_bounds__(..) are calls on this.
struct LaunchShape {
    u32 extents[3] = {1, 1, 1}, threads = 1024;
    constexpr LaunchShape cluster(u32 x, u32 y = 1, u32 z = 1) const {
        LaunchShape s = *this;
        s.extents[0] = x, s.extents[1] = y, s.extents[2] = z;
        return s;
    }
    constexpr LaunchShape bounds(u32 most, u32 = 1, u32 = 1) const {
        LaunchShape s = *this;
        s.threads = most;
        return s;
    }
};

}  // namespace emu

#define __cluster_dims__(...) .cluster(__VA_ARGS__)
#define __launch_bounds__(...) .bounds(__VA_ARGS__)
#define __maxnreg__(...)
#define EMU_SHAPE(...)                                                                                              \
    EMU_API void emu_shape(unsigned* out) {                                                                         \
        constexpr emu::LaunchShape s = __VA_ARGS__;                                                                 \
        for (int i = 0; i < 3; ++i) out[i] = s.extents[i];                                                          \
        out[3] = s.threads;                                                                                         \
    }
#define EMU_KERNEL(...)                                                                                             \
    EMU_API int emu_parameters(long long* out) { return emu::Parameters<decltype(&__VA_ARGS__)>::list(out); }       \
    EMU_API int emu_run(void** args, const emu::Options* o, char* text, unsigned long long room) {                   \
        return emu::run(&emu::Parameters<decltype(&__VA_ARGS__)>::entry<&__VA_ARGS__>, args, *o, text, room,         \
                        reinterpret_cast<const char*>(&emu_run));                                                    \
    }
