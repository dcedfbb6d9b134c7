// Packed weight times int8 activations, 16 output rows x T tokens at a time.
//
//   y[t, r] = sum over chunks c, in order:  fma(float(dot[t, r, c] - zero[r, c] * sum[t, c]), s_w[r, c] * s_x[t, c], y)
//
// dot is exact in int32 (16-bit activations: 128 * dot of the high plane + dot of the low one), so its own order is free; the fp32 order is that of the chunks. T, threads and blocking do
// not appear in it.
#pragma once

#include "simd.h"

namespace hfa {

template <int BITS> struct Step;  // k: K-elements, bytes, quads of one step; run: its dots

template <> struct Step<8> {
    static constexpr int k = 4, bytes = 64;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) { dot(0, codes8(load_line(p))); }
};

template <> struct Step<4> {
    static constexpr int k = 8, bytes = 64;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) {
        const Vb line = load_line(p), mask = splat_b(0x0f);
        dot(0, line & mask);
        dot(1, shr<4>(line) & mask);
    }
};

template <> struct Step<2> {
    static constexpr int k = 16, bytes = 64;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) {
        const Vb line = load_line(p), mask = splat_b(0x03);
        dot(0, line & mask);
        dot(1, shr<2>(line) & mask);
        dot(2, shr<4>(line) & mask);
        dot(3, shr<6>(line) & mask);
    }
};

template <> struct Step<3> {
    static constexpr int k = 32, bytes = 192;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) {
        // two low bits out of the shifted line, the third out of the shifted top line
        const Vb low = splat_b(0x03), all = splat_b(0x07), top = load_line(p + 128);
        const Vb first = load_line(p), second = load_line(p + 64);
        dot(0, select(low, first, shl<2>(top)) & all);
        dot(1, select(low, shr<2>(first), shl<1>(top)) & all);
        dot(2, select(low, shr<4>(first), top) & all);
        dot(3, select(low, shr<6>(first), shr<1>(top)) & all);
        dot(4, select(low, second, shr<2>(top)) & all);
        dot(5, select(low, shr<2>(second), shr<3>(top)) & all);
        dot(6, select(low, shr<4>(second), shr<4>(top)) & all);
        dot(7, select(low, shr<6>(second), shr<5>(top)) & all);
    }
};

constexpr int kAhead = 1024;  // bytes: prefetch distance in the weights

// Dots of `steps` steps for T tokens, ldq codes apart; `to_low` is from the high to the low plane.
template <int BITS, bool WIDE, int T>
static inline __attribute__((always_inline)) void step_dots(const uint8_t* data, const int8_t* codes, int64_t ldq, int64_t to_low, Vi* dots,
                             Vi* lows) {
    for (int line = 0; line < Step<BITS>::bytes; line += 64) HFA_PREFETCH(data + kAhead + line);
    Step<BITS>::run(data, [&](int quad, const Vb& line) __attribute__((always_inline)) {
        for (int t = 0; t < T; ++t) {
            const int8_t* x = codes + t / 3 * (3 * ldq) + t % 3 * ldq + quad * 4;  // four pointers and one stride do
            dots[t] = BITS == 8 ? dot8(dots[t], line, x) : dot4(dots[t], line, x);
            if (WIDE) lows[t] = BITS == 8 ? dot8(lows[t], line, x + to_low) : dot4(lows[t], line, x + to_low);
        }
    });
}

// `data`, `scale`, `zero` point at the block's own; acts at the tile's first token.
template <int BITS, bool ASYM, bool WIDE, int T>
static inline void block_dot(const HfaWeight* w, const uint8_t* data, const void* scale, const uint8_t* zero,
                             const HfaActs* acts, int64_t token, Vf* out) {
    using S = Step<BITS>;
    constexpr int kChunk = WIDE ? 64 : 32;
    constexpr int shift = BITS == 8 ? 128 - kCode8Zero : 0;  // the kernel's codes are the unsigned ones minus this
    constexpr bool centred = (1 << (BITS - 1)) == shift;     // a symmetric zero point needs no correction
    const int8_t* codes = acts->codes + token * acts->ldq;
    const int64_t to_low = WIDE ? acts->low - acts->codes : 0;
    const float* xs = acts->scales + token * acts->lds;
    const int32_t* minus = acts->minus_sums + token * acts->lds;
    const int64_t ldq = acts->ldq, lds = acts->lds;
    const int64_t group = w->group < 0 || w->group > w->k ? w->k : w->group;
    Vf acc[T];
    for (int t = 0; t < T; ++t) acc[t] = splat(0.0f);
    for (int64_t start = 0, g = 0; start < w->k; start += group, ++g) {
        const int64_t length = w->k - start < group ? w->k - start : group;
        const Vf sw = load_as(scale, g * 16, w->scale_dtype);
        const Vi zw = ASYM ? load_u8(zero + g * 16) - splat_i(shift) : splat_i(0);
        for (int64_t left = length; left > 0; left -= kChunk) {
            Vi dots[T], lows[T];
            for (int t = 0; t < T; ++t) {
                // -zero * sum, to which the dots are added
                const Vi sum = splat_i(minus[t * lds]);
                const Vi from = ASYM     ? (WIDE ? zw * sum : mul_small(zw, sum))
                                : centred ? splat_i(0)
                                          : shift_left<BITS - 1>(sum);
                dots[t] = WIDE ? splat_i(0) : from;
                lows[t] = from;
            }
            if (left >= kChunk) {
                if constexpr (T <= 4) {
#pragma GCC unroll kUnroll
                    for (int s = 0; s < kChunk / S::k; ++s)
                        step_dots<BITS, WIDE, T>(data + s * S::bytes, codes + s * S::k, ldq, to_low, dots, lows);
                } else {
#pragma GCC unroll 2
                    for (int s = 0; s < kChunk / S::k; ++s)
                        step_dots<BITS, WIDE, T>(data + s * S::bytes, codes + s * S::k, ldq, to_low, dots, lows);
                }
                data += kChunk / S::k * S::bytes;
                codes += kChunk;
            } else {
                for (int64_t at = 0; at < left; at += S::k) {
                    step_dots<BITS, WIDE, T>(data, codes + at, ldq, to_low, dots, lows);
                    data += S::bytes;
                }
                codes += (left + 31) / 32 * 32;
            }
            for (int t = 0; t < T; ++t) {
                const Vi exact = WIDE ? shift_left<7>(dots[t]) + lows[t] : dots[t];
                acc[t] = fma(to_float(exact), sw * splat(xs[t * lds]), acc[t]);
            }
            ++xs;
            ++minus;
        }
    }
    for (int t = 0; t < T; ++t) out[t] = acc[t];
}

}  // namespace hfa
