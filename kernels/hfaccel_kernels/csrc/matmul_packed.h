// Packed weight times quantized activations, 16 output rows x T tokens at a time. T, threads and blocking do not appear
// in the arithmetic.
//
// Integers (block_dot), and NF4, whose levels are integers:
//
//   y[t, r] = sum over chunks c, in order:  fma(float(dot[t, r, c] - zero[r, c] * sum[t, c]), s_w[r, c] * s_x[t, c], y)
//
// and where codes count from a minimum of each group (kMinimums), without a zero, after each of these
//
//   y = fma(minimum[r, c], float(sum[t, c]) * s_x[t, c], y)
//
// dot is exact in int32 (16-bit activations: 128 * dot of the high plane + dot of the low one), so its own order is
// free; the fp32 order is that of the chunks. One scale a token (token_dot): one chunk.
//
// float8 (float_dot): y = (a + b) * (s_w[r] * s_x[t]), a the sum of fma in order over k = 0, 1, 4, 5, 8, ... and b over
// k = 2, 3, 6, 7, ...
#pragma once

#include "packed_shape.h"
#include "simd.h"

namespace hfa {

constexpr int kNf4 = 14;  // beside 8, 6, 5, 4, 3, 2: the formats of integer products

enum Grid { kCentred, kZeroPoints, kMinimums };  // where codes count from: 2^(bits - 1), a uint8, a float

// k: K-elements, bytes, quads of one step; bits: of the codes that run hands to the dots
template <int FORMAT> struct Step;

template <> struct Step<8> {
    static constexpr int k = 4, bytes = 64, bits = 8;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) { dot(0, codes8(load_line(p))); }
};

template <> struct Step<4> {
    static constexpr int k = 8, bytes = 64, bits = 4;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) {
        const Vb line = load_line(p), mask = splat_b(0x0f);
        dot(0, line & mask);
        dot(1, shr<4>(line) & mask);
    }
};

template <> struct Step<kNf4> {
    static constexpr int k = 8, bytes = 64, bits = 8;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) {
        const Vb line = load_line(p), mask = splat_b(0x0f);
        dot(0, nf4(line & mask));
        dot(1, nf4(shr<4>(line) & mask));
    }
};

template <> struct Step<2> {
    static constexpr int k = 16, bytes = 64, bits = 2;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) {
        const Vb line = load_line(p), mask = splat_b(0x03);
        dot(0, line & mask);
        dot(1, shr<2>(line) & mask);
        dot(2, shr<4>(line) & mask);
        dot(3, shr<6>(line) & mask);
    }
};

template <> struct Step<3> {
    static constexpr int k = 32, bytes = 192, bits = 3;
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

template <> struct Step<5> {
    static constexpr int k = 32, bytes = 320, bits = 5;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) {
        // four low bits out of the shifted line, the fifth out of the shifted top line
        const Vb low = splat_b(0x0f), all = splat_b(0x1f), top = load_line(p + 256);
        const Vb a = load_line(p), b = load_line(p + 64), c = load_line(p + 128), d = load_line(p + 192);
        dot(0, select(low, a, shl<4>(top)) & all);
        dot(1, select(low, shr<4>(a), shl<3>(top)) & all);
        dot(2, select(low, b, shl<2>(top)) & all);
        dot(3, select(low, shr<4>(b), shl<1>(top)) & all);
        dot(4, select(low, c, top) & all);
        dot(5, select(low, shr<4>(c), shr<1>(top)) & all);
        dot(6, select(low, d, shr<2>(top)) & all);
        dot(7, select(low, shr<4>(d), shr<3>(top)) & all);
    }
};

template <> struct Step<6> {
    static constexpr int k = 16, bytes = 192, bits = 6;
    template <class Dot> static inline __attribute__((always_inline)) void run(const uint8_t* p, Dot&& dot) {
        // four low bits out of the shifted line, the others out of the shifted top line
        const Vb low = splat_b(0x0f), all = splat_b(0x3f), top = load_line(p + 128);
        const Vb first = load_line(p), second = load_line(p + 64);
        dot(0, select(low, first, shl<4>(top)) & all);
        dot(1, select(low, shr<4>(first), shl<2>(top)) & all);
        dot(2, select(low, second, top) & all);
        dot(3, select(low, shr<4>(second), shr<2>(top)) & all);
    }
};

// The scales of group g of 16 rows.
static inline Vf load_scale(const void* scale, int64_t g, int32_t dtype) {
    if (dtype < HFA_DOUBLE) return load_as(scale, g * 16, dtype);
    if (dtype == HFA_F16_MIN) return load_as(scale, g * 32, HFA_F16);
    const uint8_t* bytes = static_cast<const uint8_t*>(scale);
    if (dtype == HFA_SUPER) {
        const uint8_t* tile = bytes + g / kSuperGroups * (kSuperHead + kSuperGroups * kSuperEach);
        const Vi codes = load_u8(tile + kSuperHead + g % kSuperGroups * kSuperEach);
        return load_as(tile, 0, HFA_F16) * to_float(shift_right<24>(shift_left<24>(codes)));  // int8
    }
    if (dtype == HFA_SUPER_MIN) {
        const uint8_t* tile = bytes + g / kSuperMinGroups * (kSuperMinHead + kSuperMinGroups * kSuperMinEach);
        const uint8_t* codes = tile + kSuperMinHead + g % kSuperMinGroups * kSuperMinEach;
        return load_as(tile, 0, HFA_F16) * to_float(load_u8(codes));
    }
    const uint8_t* tile = bytes + g / kTileGroups * (kHeadBytes + kTileGroups * 16);
    float head[2];  // step, least
    memcpy(head, tile, 8);
    return to_float(load_u8(tile + kHeadBytes + g % kTileGroups * 16)) * splat(head[0]) + splat(head[1]);
}

static inline bool has_minimums(int32_t scale_dtype) {
    return scale_dtype == HFA_F16_MIN || scale_dtype == HFA_SUPER_MIN;
}

// Their minimums.
static inline Vf load_minimum(const void* scale, int64_t g, int32_t dtype) {
    if (dtype == HFA_F16_MIN) return load_as(scale, g * 32 + 16, HFA_F16);
    const uint8_t* tile = static_cast<const uint8_t*>(scale) +
                          g / kSuperMinGroups * (kSuperMinHead + kSuperMinGroups * kSuperMinEach);
    const uint8_t* codes = tile + kSuperMinHead + g % kSuperMinGroups * kSuperMinEach;
    return splat(0.0f) - load_as(tile, 16, HFA_F16) * to_float(load_u8(codes + 16));
}

constexpr int kAhead = 1024;  // bytes: prefetch distance in the weights

// Dots of `steps` steps for T tokens, ldq codes apart; `to_low` is from the high to the low plane.
template <int FORMAT, bool WIDE, int T>
static inline __attribute__((always_inline)) void step_dots(const uint8_t* data, const int8_t* codes, int64_t ldq, int64_t to_low, Vi* dots,
                             Vi* lows) {
    for (int line = 0; line < Step<FORMAT>::bytes; line += 64) HFA_PREFETCH(data + kAhead + line);
    constexpr int bits = Step<FORMAT>::bits;
    Step<FORMAT>::run(data, [&](int quad, const Vb& line) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t) {
            const int8_t* x = codes + t / 3 * (3 * ldq) + t % 3 * ldq + quad * 4;  // four pointers and one stride do
            dots[t] = bits == 8 ? dot8(dots[t], line, x) : dot4(dots[t], line, x);
            if (WIDE) lows[t] = bits == 8 ? dot8(lows[t], line, x + to_low) : dot4(lows[t], line, x + to_low);
        }
    });
}

// `data`, `scale`, `zero` point at the block's own; acts at the tile's first token.
template <int FORMAT, Grid GRID, bool WIDE, int T>
static inline void block_dot(const HfaWeight* w, const uint8_t* data, const void* scale, const uint8_t* zero,
                             const HfaActs* acts, int64_t token, Vf* out) {
    using S = Step<FORMAT>;
    constexpr int kChunk = WIDE ? 64 : 32;
    constexpr int shift = S::bits == 8 ? 128 - kCode8Zero : 0;  // the kernel's codes are the unsigned ones minus this
    // a symmetric zero point needs no correction, where it is where the kernel's codes count from
    constexpr bool plain = GRID == kMinimums || (GRID == kCentred && (1 << (S::bits - 1)) == shift);
    constexpr bool zeros = GRID == kZeroPoints;
    const int8_t* codes = acts->codes + token * acts->ldq;
    const int64_t to_low = WIDE ? acts->low - acts->codes : 0;
    const float* xs = acts->scales + token * acts->lds;
    const int32_t* minus = acts->minus_sums + token * acts->lds;
    const int64_t ldq = acts->ldq, lds = acts->lds;
    const int64_t group = w->group < 0 || w->group > w->k ? w->k : w->group;
    Vf acc[T];
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) acc[t] = splat(0.0f);
    for (int64_t start = 0, g = 0; start < w->k; start += group, ++g) {
        const int64_t length = w->k - start < group ? w->k - start : group;
        const Vf sw = load_scale(scale, g, w->scale_dtype);
        const Vf mw = GRID == kMinimums ? load_minimum(scale, g, w->scale_dtype) : splat(0.0f);
        const Vi zw = zeros ? load_u8(zero + g * 16) - splat_i(shift) : splat_i(0);
        for (int64_t left = length; left > 0; left -= kChunk) {
            Vi dots[T], lows[T];
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t) {
                // -zero * sum, to which the dots are added
                const Vi sum = splat_i(minus[t * lds]);
                const Vi from = zeros   ? (WIDE ? zw * sum : mul_small(zw, sum))
                                : plain ? splat_i(0)
                                        : shift_left<S::bits - 1>(sum);
                dots[t] = WIDE ? splat_i(0) : from;
                lows[t] = from;
            }
            if (left >= kChunk) {
                if constexpr (T <= 4) {
#pragma GCC unroll kUnroll
                    for (int s = 0; s < kChunk / S::k; ++s)
                        step_dots<FORMAT, WIDE, T>(data + s * S::bytes, codes + s * S::k, ldq, to_low, dots, lows);
                } else {
#pragma GCC unroll 2
                    for (int s = 0; s < kChunk / S::k; ++s)
                        step_dots<FORMAT, WIDE, T>(data + s * S::bytes, codes + s * S::k, ldq, to_low, dots, lows);
                }
                data += kChunk / S::k * S::bytes;
                codes += kChunk;
            } else {
                for (int64_t at = 0; at < left; at += S::k) {
                    step_dots<FORMAT, WIDE, T>(data, codes + at, ldq, to_low, dots, lows);
                    data += S::bytes;
                }
                codes += (left + 31) / 32 * 32;
            }
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t) {
                const Vi exact = WIDE ? shift_left<7>(dots[t]) + lows[t] : dots[t];
                acc[t] = fma(to_float(exact), sw * splat(xs[t * lds]), acc[t]);
                if (GRID == kMinimums) acc[t] = fma(mw, splat((float)-minus[t * lds] * xs[t * lds]), acc[t]);
            }
            ++xs;
            ++minus;
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) out[t] = acc[t];
}

// 8-bit integers, one scale a token: the chunk is all of K.
template <int T>
static inline void token_dot(const HfaWeight* w, const uint8_t* data, const void* scale, const HfaActs* acts,
                             int64_t token, Vf* out) {
    using S = Step<8>;
    const int8_t* codes = acts->codes + token * acts->ldq;
    Vi dots[T];
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
        const Vi sum = splat_i(acts->minus_sums[(token + t) * acts->lds]);
        dots[t] = kCode8Zero ? shift_left<7>(sum) : splat_i(0);
    }
#pragma GCC unroll 4
    for (int64_t at = 0; at < w->k; at += S::k, data += S::bytes)
        step_dots<8, false, T>(data, codes + at, acts->ldq, 0, dots, nullptr);
    const Vf sw = load_as(scale, 0, w->scale_dtype);
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) out[t] = to_float(dots[t]) * (sw * splat(acts->scales[(token + t) * acts->lds]));
}

template <bool E5M2, int T>
static inline void float_dot(const HfaWeight* w, const uint8_t* data, const void* scale, const HfaActs* acts,
                             int64_t token, Vf* out) {
    const float* x = reinterpret_cast<const float*>(acts->codes + token * acts->ldq);
    const int64_t ldx = acts->ldq / 4;
    Vf low[T], high[T];  // rows 0 to 7 and 8 to 15, two sums of each
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) low[t] = high[t] = splat(0.0f);
#pragma GCC unroll 2
    for (int64_t at = 0; at < w->k; at += 4, data += 64) {
        HFA_PREFETCH(data + 2 * kAhead);  // 117 against 128 us for 1536 x 576 out of memory; integers gain nothing
        Vf line[4];
        fp8_line<E5M2>(data, line);
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t) {
            const float* quad = x + t / 3 * (3 * ldx) + t % 3 * ldx + at;
            const Vf even = splat2(quad), odd = splat2(quad + 2);
            low[t] = fma(line[0], even, low[t]);
            high[t] = fma(line[1], even, high[t]);
            low[t] = fma(line[2], odd, low[t]);
            high[t] = fma(line[3], odd, high[t]);
        }
    }
    const Vf sw = load_as(scale, 0, w->scale_dtype) * splat(E5M2 ? 1.0f : 256.0f);
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t)
        out[t] = add_pairs(low[t], high[t]) * (sw * splat(acts->scales[(token + t) * acts->lds]));
}

}  // namespace hfa
