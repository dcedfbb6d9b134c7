#pragma once

#include <immintrin.h>

namespace hfa {

struct Vf { __m512 v; };
struct Vi { __m512i v; };
struct Vb { __m512i v; };

constexpr int kTileTokens = 12;
constexpr int kUnroll = 16;
constexpr int kPlainTokens = 6;
constexpr int kSubRows = 6;
constexpr int kCode8Zero = 128;  // vpdpbusd takes the codes unsigned

static inline Vf splat(float x) { return {_mm512_set1_ps(x)}; }
static inline Vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, Vf a) { _mm512_storeu_ps(p, a.v); }
static inline Vf operator+(Vf a, Vf b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vf operator-(Vf a, Vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vf operator*(Vf a, Vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vf operator/(Vf a, Vf b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Vf max(Vf a, Vf b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Vf min(Vf a, Vf b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Vf fma(Vf a, Vf b, Vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vf load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline Vf load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline void store_bf16(uint16_t* p, Vf a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    // NaN stays one: its rounding would carry into infinity
    up = _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}
static inline void store_f16(uint16_t* p, Vf a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#define HFA_HAS_REDUCE
static inline __m512 swap_add(__m512 v) {  // lanes (l, l + 2), then (l, l + 1), of each four
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
    return _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
}
static inline float reduce_add(Vf a) {
    const __m512 v = _mm512_add_ps(a.v, _mm512_shuffle_f32x4(a.v, a.v, 0x4e));
    return _mm512_cvtss_f32(swap_add(_mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1))));
}
static inline __m512 pair_add(__m512 a, __m512 b) {  // [8 lanes of a | 8 of b], (l, l + 8) added
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
static inline void reduce_add4(const Vf* v, float* out) {
    const __m512 a = pair_add(v[0].v, v[1].v), b = pair_add(v[2].v, v[3].v);
    const __m512 fours = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, swap_add(fours))));
}

#define HFA_HAS_QUADS
static inline Vf quad_sums(const Vf* a) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_ps(a[0].v, a[1].v, 0x44), _mm512_shuffle_ps(a[0].v, a[1].v, 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_ps(a[2].v, a[3].v, 0x44), _mm512_shuffle_ps(a[2].v, a[3].v, 0xee));
    return {_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd))};
}
static inline Vf splat4(const float* p) { return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))}; }
static inline Vi load_quads(const void* a, const void* b, const void* c, const void* d) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)a));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)b), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)c), 2);
    return {_mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)d), 3)};
}
static inline Vf half_words(Vi a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))}; }

static inline Vi splat_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline Vi load_i(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline Vi load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
static inline void store_i(int32_t* p, Vi a) { _mm512_storeu_si512(p, a.v); }
static inline void store_i8(int8_t* p, Vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }
static inline Vi operator+(Vi a, Vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline Vi operator-(Vi a, Vi b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline Vi operator*(Vi a, Vi b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
// Exact where 0 <= a < 2^15 and b fits int16.
static inline Vi mul_small(Vi a, Vi b) { return {_mm512_madd_epi16(a.v, b.v)}; }
static inline Vi operator&(Vi a, Vi b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int S> static inline Vi shift_left(Vi a) { return {_mm512_slli_epi32(a.v, S)}; }
template <int S> static inline Vi shift_right(Vi a) { return {_mm512_srai_epi32(a.v, S)}; }  // keeps the sign
static inline Vi max(Vi a, Vi b) { return {_mm512_max_epi32(a.v, b.v)}; }
static inline Vi min(Vi a, Vi b) { return {_mm512_min_epi32(a.v, b.v)}; }
static inline Vf to_float(Vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline Vi round_even(Vf a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline Vi bits(Vf a) { return {_mm512_castps_si512(a.v)}; }
static inline Vf from_bits(Vi a) { return {_mm512_castsi512_ps(a.v)}; }

#define HFA_HAS_REDUCE_MAX
static inline float reduce_max(Vf a) { return _mm512_reduce_max_ps(a.v); }

#define HFA_HAS_REDUCE_I
static inline int32_t reduce_add(Vi a) { return _mm512_reduce_add_epi32(a.v); }
static inline int32_t reduce_max(Vi a) { return _mm512_reduce_max_epi32(a.v); }

static inline Vb load_line(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
static inline Vb splat_b(uint8_t x) { return {_mm512_set1_epi8((char)x)}; }
static inline Vb operator&(Vb a, Vb b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline Vb select(Vb m, Vb a, Vb b) { return {_mm512_ternarylogic_epi32(m.v, a.v, b.v, 0xca)}; }  // m ? a : b
template <int S> static inline Vb shr(Vb a) { return {_mm512_srli_epi16(a.v, S)}; }  // bits cross into the low byte
template <int S> static inline Vb shl(Vb a) { return {_mm512_slli_epi16(a.v, S)}; }
static inline Vb codes8(Vb a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8((char)0x80))}; }
static inline Vb nf4(Vb nibbles) {
    alignas(16) static constexpr uint8_t levels[16] = {HFA_NF4_LEVELS(128)};
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)levels)), nibbles.v)};
}
// By hand: GCC 12 loads the broadcast into a register of its own and copies every sum before and after.
static inline __attribute__((always_inline)) Vi dot4(Vi acc, Vb codes, const int8_t* quad) {
    typedef int32_t __attribute__((may_alias)) Quad;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(codes.v), "m"(*(const Quad*)quad));
    return acc;
}
static inline Vi dot8(Vi acc, Vb codes, const int8_t* quad) { return dot4(acc, codes, quad); }

template <bool E5M2> static inline __m512i fp8_words(__m512i x) {  // float8 in the upper bytes -> fp16
    if (E5M2) return _mm512_and_si512(x, _mm512_set1_epi16((short)0xff00));
    return _mm512_and_si512(_mm512_srai_epi16(x, 1), _mm512_set1_epi16((short)0xbf80));
}
template <bool E5M2> static inline void fp8_line(const uint8_t* p, Vf* out) {
    const __m512i line = _mm512_loadu_si512(p);
    const __m512i even = fp8_words<E5M2>(_mm512_slli_epi16(line, 8)), odd = fp8_words<E5M2>(line);
    out[0] = {_mm512_cvtph_ps(_mm512_castsi512_si256(even))};
    out[1] = {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1))};
    out[2] = {_mm512_cvtph_ps(_mm512_castsi512_si256(odd))};
    out[3] = {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1))};
}
static inline Vf splat2(const float* p) {
    double both;
    memcpy(&both, p, 8);
    return {_mm512_castpd_ps(_mm512_set1_pd(both))};
}
static inline Vf add_pairs(Vf a, Vf b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return {_mm512_add_ps(_mm512_permutex2var_ps(a.v, even, b.v), _mm512_permutex2var_ps(a.v, odd, b.v))};
}

}  // namespace hfa
