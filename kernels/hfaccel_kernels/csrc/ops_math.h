// exp, tanh, erf over sixteen lanes, written with one rounding an operation, so that every instruction set agrees.
#pragma once

#include "simd.h"

namespace hfa {

static inline int64_t pad_lanes(int64_t v) { return (v + 15) / 16 * 16; }

// 2^n for the integers n >= -127 (0 at -127).
static inline Vf pow2(Vi n) {
#if defined(HFA_ISA_AVX512)
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
#else
    return from_bits((n + splat_i(127)) * splat_i(1 << 23));
#endif
}

// e^x, relative error below 2e-7; exactly 0 below -87.7, finite above 88 (clamped); NaN stays.
static inline Vf vexp(Vf x) {
    x = min(splat(88.0f), max(splat(-88.0f), x));
    const Vi n = round_even(x * splat(1.44269504f));
    const Vf k = to_float(n);
    Vf r = fma(k, splat(-0.693359375f), x);
    r = fma(k, splat(2.12194440e-4f), r);
    Vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    return p * pow2(n);
}

static inline Vf vabs(Vf x) { return from_bits(bits(x) & splat_i(0x7fffffff)); }
// y with the sign of x; y >= 0
static inline Vf with_sign(Vf y, Vf x) {
#if defined(HFA_ISA_AVX512)
    return {_mm512_or_ps(y.v, _mm512_and_ps(x.v, _mm512_set1_ps(-0.0f)))};
#else
    float a[16], b[16];
    store(a, y);
    store(b, x);
    for (int l = 0; l < 16; ++l) a[l] = copysignf(a[l], b[l]);
    return load(a);
#endif
}

// Absolute error below 2e-7.
static inline Vf vtanh(Vf x) {
    const Vf e = vexp(vabs(x) * splat(-2.0f));
    return with_sign((splat(1.0f) - e) / (splat(1.0f) + e), x);
}

// Abramowitz and Stegun 7.1.26: absolute error below 2e-7.
static inline Vf verf(Vf x) {
    const Vf a = vabs(x), t = splat(1.0f) / fma(splat(0.3275911f), a, splat(1.0f));
    Vf p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    return with_sign(splat(1.0f) - p * t * vexp(a * a * splat(-1.0f)), x);
}

static inline Vf vsigmoid_times(Vf x, float slope) {
    return x / (splat(1.0f) + vexp(x * splat(-slope)));
}

}  // namespace hfa
