#pragma once

// Portable C++; the compiler vectorizes what the base instruction set allows.

namespace hfa {

struct Vf { float v[16]; };
struct Vi { int32_t v[16]; };
struct Vb { uint8_t v[64]; };

constexpr int kTileTokens = 1;  // and no unrolling: two thirds of the compile time, and no slower
constexpr int kUnroll = 1;
constexpr int kPlainTokens = 1;
constexpr int kSubRows = 1;
constexpr int kCode8Zero = 0;  // codes8 leaves them signed

#define HFA_EACH for (int l = 0; l < 16; ++l)

static inline Vf splat(float x) { Vf r; HFA_EACH r.v[l] = x; return r; }
static inline Vf load(const float* p) { Vf r; memcpy(r.v, p, 64); return r; }
static inline void store(float* p, Vf a) { memcpy(p, a.v, 64); }
static inline Vf operator+(Vf a, Vf b) { HFA_EACH a.v[l] += b.v[l]; return a; }
static inline Vf operator-(Vf a, Vf b) { HFA_EACH a.v[l] -= b.v[l]; return a; }
static inline Vf operator*(Vf a, Vf b) { HFA_EACH a.v[l] *= b.v[l]; return a; }
static inline Vf operator/(Vf a, Vf b) { HFA_EACH a.v[l] /= b.v[l]; return a; }
static inline Vf max(Vf a, Vf b) { HFA_EACH a.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l]; return a; }
static inline Vf min(Vf a, Vf b) { HFA_EACH a.v[l] = a.v[l] < b.v[l] ? a.v[l] : b.v[l]; return a; }
static inline Vf fma(Vf a, Vf b, Vf c) { HFA_EACH c.v[l] = fmaf(a.v[l], b.v[l], c.v[l]); return c; }

static inline float float_of(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
static inline uint32_t bits_of(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }
static inline float f16_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | rest << 13 | (rest > 0x7c00 ? 0x400000 : 0));
    if (rest < 0x400) return float_of(sign | bits_of((float)rest * 0x1p-24f));  // subnormal: exact
    return float_of(sign | ((rest << 13) + 0x38000000));
}
static inline uint16_t f16_from_float(float f) {
    const uint32_t x = bits_of(f), sign = x >> 16 & 0x8000, mag = x & 0x7fffffff;
    if (mag > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (mag >> 13 & 0x1ff));
    if (mag >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds beyond 65504
    if (mag < 0x38800000)  // subnormal: 0.5 has its last bit at 2^-24, so the sum rounds there, half to even
        return (uint16_t)(sign | (bits_of(float_of(mag) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((mag - 0x38000000 + 0xfff + (mag >> 13 & 1)) >> 13));
}
static inline uint16_t bf16_from_float(float f) {
    const uint32_t x = bits_of(f);
    if (f != f) return (uint16_t)((x | 0x400000) >> 16);
    return (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
static inline Vf load_bf16(const uint16_t* p) { Vf r; HFA_EACH r.v[l] = float_of((uint32_t)p[l] << 16); return r; }
static inline Vf load_f16(const uint16_t* p) { Vf r; HFA_EACH r.v[l] = f16_to_float(p[l]); return r; }
static inline void store_bf16(uint16_t* p, Vf a) { HFA_EACH p[l] = bf16_from_float(a.v[l]); }
static inline void store_f16(uint16_t* p, Vf a) { HFA_EACH p[l] = f16_from_float(a.v[l]); }

static inline Vi splat_i(int32_t x) { Vi r; HFA_EACH r.v[l] = x; return r; }
static inline Vi load_i(const int32_t* p) { Vi r; memcpy(r.v, p, 64); return r; }
static inline Vi load_u8(const uint8_t* p) { Vi r; HFA_EACH r.v[l] = p[l]; return r; }
static inline void store_i(int32_t* p, Vi a) { memcpy(p, a.v, 64); }
static inline void store_i8(int8_t* p, Vi a) {
    HFA_EACH p[l] = (int8_t)(a.v[l] > 127 ? 127 : a.v[l] < -128 ? -128 : a.v[l]);
}
static inline Vi operator+(Vi a, Vi b) { HFA_EACH a.v[l] += b.v[l]; return a; }
static inline Vi operator-(Vi a, Vi b) { HFA_EACH a.v[l] -= b.v[l]; return a; }
static inline Vi operator*(Vi a, Vi b) {  // wraps: pow2 of a NaN's exponent
    HFA_EACH a.v[l] = (int32_t)((uint32_t)a.v[l] * (uint32_t)b.v[l]);
    return a;
}
static inline Vi mul_small(Vi a, Vi b) { return a * b; }
static inline Vi operator&(Vi a, Vi b) { HFA_EACH a.v[l] &= b.v[l]; return a; }
template <int S> static inline Vi shift_left(Vi a) { HFA_EACH a.v[l] = (int32_t)((uint32_t)a.v[l] << S); return a; }
template <int S> static inline Vi shift_right(Vi a) { HFA_EACH a.v[l] >>= S; return a; }
static inline Vi max(Vi a, Vi b) { HFA_EACH a.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l]; return a; }
static inline Vi min(Vi a, Vi b) { HFA_EACH a.v[l] = a.v[l] < b.v[l] ? a.v[l] : b.v[l]; return a; }
static inline Vf to_float(Vi a) { Vf r; HFA_EACH r.v[l] = (float)a.v[l]; return r; }
static inline Vi round_even(Vf a) {  // INT_MIN where there is no int32, as x86 has it
    Vi r;
    HFA_EACH r.v[l] = fabsf(a.v[l]) < 0x1p31f ? (int32_t)rintf(a.v[l]) : INT32_MIN;
    return r;
}
static inline Vi bits(Vf a) { Vi r; memcpy(r.v, a.v, 64); return r; }
static inline Vf from_bits(Vi a) { Vf r; memcpy(r.v, a.v, 64); return r; }

static inline Vb load_line(const uint8_t* p) { Vb r; memcpy(r.v, p, 64); return r; }
static inline Vb splat_b(uint8_t x) { Vb r; memset(r.v, x, 64); return r; }
static inline Vb operator&(Vb a, Vb b) { for (int l = 0; l < 64; ++l) a.v[l] &= b.v[l]; return a; }
static inline Vb select(Vb m, Vb a, Vb b) {  // bits: m ? a : b
    for (int l = 0; l < 64; ++l) a.v[l] = (a.v[l] & m.v[l]) | (b.v[l] & ~m.v[l]);
    return a;
}
template <int S> static inline Vb shr(Vb a) { for (int l = 0; l < 64; ++l) a.v[l] >>= S; return a; }
template <int S> static inline Vb shl(Vb a) { for (int l = 0; l < 64; ++l) a.v[l] <<= S; return a; }
static inline Vb codes8(Vb a) { return a; }
static inline Vb nf4(Vb nibbles) {
    static constexpr int8_t levels[16] = {HFA_NF4_LEVELS(0)};
    for (int l = 0; l < 64; ++l) nibbles.v[l] = (uint8_t)levels[nibbles.v[l]];
    return nibbles;
}
// A call of its own: in line, formats of several planes take twice as long to compile and are 10 to 20 % faster.
static __attribute__((noinline)) Vi dot4(Vi acc, const Vb& codes, const int8_t* quad) {
    HFA_EACH for (int i = 0; i < 4; ++i) acc.v[l] += (int8_t)codes.v[4 * l + i] * quad[i];
    return acc;
}
static inline Vi dot8(Vi acc, const Vb& codes, const int8_t* quad) { return dot4(acc, codes, quad); }

template <bool E5M2> static inline float fp8_half(uint8_t b) {
    return f16_to_float((uint16_t)(E5M2 ? b << 8 : (b & 0x80) << 8 | (b & 0x7f) << 7));
}
template <bool E5M2> static inline void fp8_line(const uint8_t* p, Vf* out) {
    for (int i = 0; i < 64; ++i) out[i % 2 * 2 + i / 32].v[i % 32 / 2] = fp8_half<E5M2>(p[i]);
}
static inline Vf splat2(const float* p) { Vf r; HFA_EACH r.v[l] = p[l % 2]; return r; }
static inline Vf add_pairs(Vf a, Vf b) {
    Vf r;
    HFA_EACH r.v[l] = l < 8 ? a.v[2 * l] + a.v[2 * l + 1] : b.v[2 * l - 16] + b.v[2 * l - 15];
    return r;
}

#undef HFA_EACH

}  // namespace hfa
