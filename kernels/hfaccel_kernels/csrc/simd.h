// Sixteen lanes, written once: every inner loop uses these types, and the build compiles it for one instruction set
// (-DHFA_ISA_AVX512, _AVX2, _NEON or _SCALAR). Each operation rounds once and every order is fixed, so that all
// instruction sets give the same bits.
//
//   Vf  16 floats        Vi  16 int32        Vb  a line of 64 bytes: 16 rows x 4 codes (layouts.py)
//   dot4(acc, codes, quad)   acc[r] += sum_i codes[4r + i] * quad[i]; codes below 8 bits are unsigned. At 8 bits
//                            the line goes through codes8() first, and kCode8Zero is the code that stands for 0.
//   nf4(nibbles)             what codes8() would give of the levels of 64 NF4 codes
//   fp8_line<E5M2>(p, out)   a line of float8 as fp16 arithmetic has it (e4m3: 2^-8 times the value): lanes 2r, 2r + 1
//                            hold codes 0, 2 of rows r (out[0]) and 8 + r (out[1]), codes 1, 3 (out[2], out[3])
//   add_pairs(a, b)          lanes 2r + (2r + 1) of a, then of b; splat2(p): p[0], p[1], p[0], ...
//   splat4(p)                p[0] .. p[3], p[0] ..; load_quads(a, b, c, d): 16 bytes of each
//   quad_sums(a)             lane 4g + v: lanes 4g .. 4g + 3 of a[v], added (0 + 2) + (1 + 3)
//   half_words(a)            the fp16 in the lower half of each lane
//   kTileTokens              tokens whose accumulators fit the registers; kPlainTokens of unpacked weights and kSubRows
//                            query rows likewise
//   kUnroll                  steps of a packed weight that few tokens unroll
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "hfa.h"

#define HFA_NF4_LEVELS(z)  /* codebook.NF4_LEVELS + z */ \
    z - 127, z - 88, z - 67, z - 50, z - 36, z - 23, z - 12, z, z + 10, z + 20, z + 31, z + 43, z + 56, z + 71, \
        z + 92, z + 127

// A macro: GCC takes an inline function that only prefetches for one without effects, and drops its calls.
#define HFA_PREFETCH(p) __builtin_prefetch(p)
#define HFA_PREFETCH_FAR(p) __builtin_prefetch(p, 0, 2)  // into the second-level cache

#if defined(HFA_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(HFA_ISA_AVX2)
#include "simd_avx2.h"
#elif defined(HFA_ISA_NEON)
#include "simd_neon.h"
#elif defined(HFA_ISA_SCALAR)
#include "simd_scalar.h"
#else
#error "one of HFA_ISA_AVX512, _AVX2, _NEON, _SCALAR"
#endif

namespace hfa {

// Sum of 16 lanes: halves added until one is left, (l, l + 8), then 4, 2, 1; of four values at once.
#ifndef HFA_HAS_REDUCE
static inline float reduce_add(Vf v) {
    float t[16];
    store(t, v);
    for (int w = 8; w; w /= 2)
        for (int l = 0; l < w; ++l) t[l] += t[l + w];
    return t[0];
}
static inline void reduce_add4(const Vf* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = reduce_add(v[i]);
}
#endif

#ifndef HFA_HAS_REDUCE_I
static inline int32_t reduce_add(Vi v) {
    int32_t t[16], sum = 0;
    store_i(t, v);
    for (int l = 0; l < 16; ++l) sum += t[l];
    return sum;
}
static inline int32_t reduce_max(Vi v) {
    int32_t t[16];
    store_i(t, v);
    int32_t most = t[0];
    for (int l = 1; l < 16; ++l) most = most > t[l] ? most : t[l];
    return most;
}
#endif

#ifndef HFA_HAS_QUADS
static inline Vf quad_sums(const Vf* a) {
    float t[4][16], out[16];
    for (int v = 0; v < 4; ++v) store(t[v], a[v]);
    for (int l = 0; l < 16; ++l) {
        const float* four = t[l % 4] + l / 4 * 4;
        out[l] = (four[0] + four[2]) + (four[1] + four[3]);
    }
    return load(out);
}
static inline Vf splat4(const float* p) {
    float t[16];
    for (int l = 0; l < 16; ++l) t[l] = p[l % 4];
    return load(t);
}
static inline Vi load_quads(const void* a, const void* b, const void* c, const void* d) {
    int32_t t[16];
    const void* from[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) memcpy(t + 4 * i, from[i], 16);
    return load_i(t);
}
static inline Vf half_words(Vi a) {
    int32_t t[16];
    uint16_t halves[16];
    store_i(t, a);
    for (int l = 0; l < 16; ++l) halves[l] = (uint16_t)t[l];
    return load_f16(halves);
}
#endif

#ifndef HFA_HAS_REDUCE_MAX
static inline float reduce_max(Vf v) {
    float t[16];
    store(t, v);
    for (int w = 8; w; w /= 2)
        for (int l = 0; l < w; ++l) t[l] = t[l] > t[l + w] ? t[l] : t[l + w];
    return t[0];
}
#endif

// 16 elements of any dtype, and the first n of them (the other lanes 0; memory behind them is not touched).
static inline Vf load_as(const void* p, int64_t at, int32_t dtype) {
    if (dtype == HFA_F32) return load(static_cast<const float*>(p) + at);
    const uint16_t* half = static_cast<const uint16_t*>(p) + at;
    return dtype == HFA_BF16 ? load_bf16(half) : load_f16(half);
}
static inline Vf load_as(const void* p, int64_t at, int32_t dtype, int n) {
    if (n >= 16) return load_as(p, at, dtype);
    if (dtype == HFA_F32) {
        float t[16] = {};
        memcpy(t, static_cast<const float*>(p) + at, n * sizeof(float));
        return load(t);
    }
    uint16_t t[16] = {};
    memcpy(t, static_cast<const uint16_t*>(p) + at, n * sizeof(uint16_t));
    return dtype == HFA_BF16 ? load_bf16(t) : load_f16(t);
}

// max |x| over n elements from x[at] on, compared as integers: a NaN is above infinity and so is never lost.
static inline float peak_of(const void* x, int32_t dtype, int64_t at, int64_t n) {
    const Vi magnitude = splat_i(0x7fffffff);
    Vi top = splat_i(0);
    for (int64_t i = 0; i < n; i += 16) {
        const int left = n - i < 16 ? (int)(n - i) : 16;
        top = max(top, bits(load_as(x, at + i, dtype, left)) & magnitude);
    }
    const int32_t peak_bits = reduce_max(top);
    float peak;
    memcpy(&peak, &peak_bits, 4);
    return peak;
}

// Round to nearest even into any dtype.
static inline void store_as(void* p, int64_t at, int32_t dtype, Vf v, int n = 16) {
    if (dtype == HFA_F32) {
        float* to = static_cast<float*>(p) + at;
        if (n >= 16) return store(to, v);
        float t[16];
        store(t, v);
        memcpy(to, t, n * sizeof(float));
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(p) + at;
    uint16_t t[16];
    uint16_t* out = n >= 16 ? to : t;
    if (dtype == HFA_BF16) store_bf16(out, v);
    else store_f16(out, v);
    if (n < 16) memcpy(to, t, n * sizeof(uint16_t));
}

}  // namespace hfa
