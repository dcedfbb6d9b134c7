#pragma once

#include <arm_neon.h>

// Four registers a value; the dot product is vdotq_s32 (ARMv8.2 dotprod), whose codes are signed.

namespace hfa {

struct Vf { float32x4_t v[4]; };
struct Vi { int32x4_t v[4]; };
struct Vb { uint8x16_t v[4]; };

constexpr int kTileTokens = 4;
constexpr int kUnroll = 16;
constexpr int kPlainTokens = 1;
constexpr int kSubRows = 6;
constexpr int kCode8Zero = 0;  // codes8 leaves them signed

#define HFA_EACH for (int i = 0; i < 4; ++i)

static inline Vf splat(float x) { Vf r; HFA_EACH r.v[i] = vdupq_n_f32(x); return r; }
static inline Vf load(const float* p) { Vf r; HFA_EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
static inline void store(float* p, Vf a) { HFA_EACH vst1q_f32(p + 4 * i, a.v[i]); }
static inline Vf operator+(Vf a, Vf b) { HFA_EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
static inline Vf operator-(Vf a, Vf b) { HFA_EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
static inline Vf operator*(Vf a, Vf b) { HFA_EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
static inline Vf operator/(Vf a, Vf b) { HFA_EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
// As on x86: b where one is a NaN.
static inline Vf max(Vf a, Vf b) { HFA_EACH a.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); return a; }
static inline Vf min(Vf a, Vf b) { HFA_EACH a.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); return a; }
static inline Vf fma(Vf a, Vf b, Vf c) { HFA_EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
static inline Vf load_bf16(const uint16_t* p) {
    Vf r;
    HFA_EACH r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
    return r;
}
static inline Vf load_f16(const uint16_t* p) {
    Vf r;
    HFA_EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return r;
}
static inline void store_bf16(uint16_t* p, Vf a) {
    HFA_EACH {
        const uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        // NaN stays one: its rounding would carry into infinity
        const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        vst1_u16(p + 4 * i, vshrn_n_u32(vbslq_u32(vceqq_f32(a.v[i], a.v[i]), up, quiet), 16));
    }
}
static inline void store_f16(uint16_t* p, Vf a) {
    HFA_EACH vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}

#define HFA_HAS_QUADS
static inline Vf quad_sums(const Vf* a) {
    Vf r;
    HFA_EACH {
        float32x2_t two[4];
        for (int v = 0; v < 4; ++v) two[v] = vadd_f32(vget_low_f32(a[v].v[i]), vget_high_f32(a[v].v[i]));
        r.v[i] = vcombine_f32(vpadd_f32(two[0], two[1]), vpadd_f32(two[2], two[3]));
    }
    return r;
}
static inline Vf splat4(const float* p) { Vf r; HFA_EACH r.v[i] = vld1q_f32(p); return r; }
static inline Vi load_quads(const void* a, const void* b, const void* c, const void* d) {
    const void* from[4] = {a, b, c, d};
    Vi r;
    HFA_EACH r.v[i] = vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(from[i])));
    return r;
}
static inline Vf half_words(Vi a) {
    Vf r;
    HFA_EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(a.v[i])));
    return r;
}

#define HFA_HAS_REDUCE
static inline float reduce_add(Vf a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
static inline void reduce_add4(const Vf* v, float* out) { HFA_EACH out[i] = reduce_add(v[i]); }

static inline Vi splat_i(int32_t x) { Vi r; HFA_EACH r.v[i] = vdupq_n_s32(x); return r; }
static inline Vi load_i(const int32_t* p) { Vi r; HFA_EACH r.v[i] = vld1q_s32(p + 4 * i); return r; }
static inline Vi load_u8(const uint8_t* p) {
    const uint8x16_t all = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_u8(vget_high_u8(all));
    return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
             vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
static inline void store_i(int32_t* p, Vi a) { HFA_EACH vst1q_s32(p + 4 * i, a.v[i]); }
static inline void store_i8(int8_t* p, Vi a) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
static inline Vi operator+(Vi a, Vi b) { HFA_EACH a.v[i] = vaddq_s32(a.v[i], b.v[i]); return a; }
static inline Vi operator-(Vi a, Vi b) { HFA_EACH a.v[i] = vsubq_s32(a.v[i], b.v[i]); return a; }
static inline Vi operator*(Vi a, Vi b) { HFA_EACH a.v[i] = vmulq_s32(a.v[i], b.v[i]); return a; }
static inline Vi mul_small(Vi a, Vi b) { return a * b; }
static inline Vi operator&(Vi a, Vi b) { HFA_EACH a.v[i] = vandq_s32(a.v[i], b.v[i]); return a; }
template <int S> static inline Vi shift_left(Vi a) { HFA_EACH a.v[i] = vshlq_n_s32(a.v[i], S); return a; }
template <int S> static inline Vi shift_right(Vi a) { HFA_EACH a.v[i] = vshrq_n_s32(a.v[i], S); return a; }
static inline Vi max(Vi a, Vi b) { HFA_EACH a.v[i] = vmaxq_s32(a.v[i], b.v[i]); return a; }
static inline Vi min(Vi a, Vi b) { HFA_EACH a.v[i] = vminq_s32(a.v[i], b.v[i]); return a; }
static inline Vf to_float(Vi a) { Vf r; HFA_EACH r.v[i] = vcvtq_f32_s32(a.v[i]); return r; }
static inline Vi round_even(Vf a) { Vi r; HFA_EACH r.v[i] = vcvtnq_s32_f32(a.v[i]); return r; }
static inline Vi bits(Vf a) { Vi r; HFA_EACH r.v[i] = vreinterpretq_s32_f32(a.v[i]); return r; }
static inline Vf from_bits(Vi a) { Vf r; HFA_EACH r.v[i] = vreinterpretq_f32_s32(a.v[i]); return r; }

static inline Vb load_line(const uint8_t* p) { Vb r; HFA_EACH r.v[i] = vld1q_u8(p + 16 * i); return r; }
static inline Vb splat_b(uint8_t x) { Vb r; HFA_EACH r.v[i] = vdupq_n_u8(x); return r; }
static inline Vb operator&(Vb a, Vb b) { HFA_EACH a.v[i] = vandq_u8(a.v[i], b.v[i]); return a; }
static inline Vb select(Vb m, Vb a, Vb b) {  // bits: m ? a : b
    HFA_EACH a.v[i] = vbslq_u8(m.v[i], a.v[i], b.v[i]);
    return a;
}
template <int S> static inline Vb shr(Vb a) { HFA_EACH a.v[i] = vshrq_n_u8(a.v[i], S); return a; }
template <int S> static inline Vb shl(Vb a) { HFA_EACH a.v[i] = vshlq_n_u8(a.v[i], S); return a; }
static inline Vb codes8(Vb a) { return a; }
static inline Vb nf4(Vb nibbles) {
    static constexpr int8_t levels[16] = {HFA_NF4_LEVELS(0)};
    const uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(levels));
    HFA_EACH nibbles.v[i] = vqtbl1q_u8(table, nibbles.v[i]);
    return nibbles;
}
static inline Vi dot4(Vi acc, Vb codes, const int8_t* quad) {
    int32_t q;
    memcpy(&q, quad, 4);
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(q));
    HFA_EACH acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(codes.v[i]), x);
    return acc;
}
static inline Vi dot8(Vi acc, Vb codes, const int8_t* quad) { return dot4(acc, codes, quad); }

template <bool E5M2> static inline uint16x8_t fp8_words(uint16x8_t x) {  // float8 in the upper bytes -> fp16
    if (E5M2) return vandq_u16(x, vdupq_n_u16(0xff00));
    const int16x8_t lower = vshrq_n_s16(vreinterpretq_s16_u16(x), 1);
    return vandq_u16(vreinterpretq_u16_s16(lower), vdupq_n_u16(0xbf80));
}
static inline void halves(uint16x8_t x, float32x4_t* out) {
    const float16x8_t h = vreinterpretq_f16_u16(x);
    out[0] = vcvt_f32_f16(vget_low_f16(h));
    out[1] = vcvt_f32_f16(vget_high_f16(h));
}
template <bool E5M2> static inline void fp8_line(const uint8_t* p, Vf* out) {
    HFA_EACH {
        const uint16x8_t line = vreinterpretq_u16_u8(vld1q_u8(p + 16 * i));
        halves(fp8_words<E5M2>(vshlq_n_u16(line, 8)), out[i / 2].v + i % 2 * 2);
        halves(fp8_words<E5M2>(line), out[2 + i / 2].v + i % 2 * 2);
    }
}
static inline Vf splat2(const float* p) {
    const float32x2_t both = vld1_f32(p);
    Vf r;
    HFA_EACH r.v[i] = vcombine_f32(both, both);
    return r;
}
static inline Vf add_pairs(Vf a, Vf b) {
    return {{vpaddq_f32(a.v[0], a.v[1]), vpaddq_f32(a.v[2], a.v[3]), vpaddq_f32(b.v[0], b.v[1]),
             vpaddq_f32(b.v[2], b.v[3])}};
}

#undef HFA_EACH

}  // namespace hfa
