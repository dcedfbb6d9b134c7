#pragma once

#include <immintrin.h>

// Two registers a value. Products go through vpmaddubsw, whose int16 holds 2 * 128 * 127: of 8-bit codes the magnitude,
// times the activation with the code's sign.

namespace hfa {

struct Vf { __m256 a, b; };
struct Vi { __m256i a, b; };
struct Vb { __m256i a, b; };

constexpr int kTileTokens = 2;
constexpr int kUnroll = 16;
constexpr int kPlainTokens = 1;
constexpr int kSubRows = 6;
constexpr int kCode8Zero = 0;  // codes8 leaves them signed

static inline Vf splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline Vf operator+(Vf x, Vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline Vf operator-(Vf x, Vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline Vf operator*(Vf x, Vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline Vf operator/(Vf x, Vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline Vf max(Vf x, Vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline Vf min(Vf x, Vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline Vf fma(Vf x, Vf y, Vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline __m128i load128(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
static inline __m256 bf16_8(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}
static inline Vf load_bf16(const uint16_t* p) { return {bf16_8(p), bf16_8(p + 8)}; }
static inline Vf load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))}; }
static inline __m256i round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    // NaN stays one: its rounding would carry into infinity
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}
static inline void store_bf16(uint16_t* p, Vf x) {
    const __m256i both = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
static inline void store_f16(uint16_t* p, Vf x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

#define HFA_HAS_REDUCE
static inline float reduce_add(Vf x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
static inline void reduce_add4(const Vf* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = reduce_add(v[i]);
}

#define HFA_HAS_QUADS
static inline Vf quad_sums(const Vf* x) {
    auto half = [](__m256 a, __m256 b, __m256 c, __m256 d) {
        const __m256 ab = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
        const __m256 cd = _mm256_add_ps(_mm256_shuffle_ps(c, d, 0x44), _mm256_shuffle_ps(c, d, 0xee));
        return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
    };
    return {half(x[0].a, x[1].a, x[2].a, x[3].a), half(x[0].b, x[1].b, x[2].b, x[3].b)};
}
static inline Vf splat4(const float* p) {
    const __m256 x = _mm256_broadcast_ps((const __m128*)p);
    return {x, x};
}
static inline Vi load_quads(const void* a, const void* b, const void* c, const void* d) {
    return {_mm256_set_m128i(load128(b), load128(a)), _mm256_set_m128i(load128(d), load128(c))};
}
static inline Vf half_words(Vi x) {
    const __m128i first = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    auto half = [&](__m256i y) {
        return _mm256_cvtph_ps(_mm_unpacklo_epi64(_mm_shuffle_epi8(_mm256_castsi256_si128(y), first),
                                                  _mm_shuffle_epi8(_mm256_extracti128_si256(y, 1), first)));
    };
    return {half(x.a), half(x.b)};
}

static inline __m256i load256(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline Vi splat_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Vi load_i(const int32_t* p) { return {load256(p), load256(p + 8)}; }
static inline Vi load_u8(const uint8_t* p) {
    const __m128i all = load128(p);
    return {_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
}
static inline void store_i(int32_t* p, Vi x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
static inline void store_i8(int8_t* p, Vi x) {
    const __m256i half = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
static inline Vi operator+(Vi x, Vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline Vi operator-(Vi x, Vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
static inline Vi operator*(Vi x, Vi y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
static inline Vi mul_small(Vi a, Vi b) { return a * b; }
static inline Vi operator&(Vi x, Vi y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
template <int S> static inline Vi shift_left(Vi x) { return {_mm256_slli_epi32(x.a, S), _mm256_slli_epi32(x.b, S)}; }
template <int S> static inline Vi shift_right(Vi x) { return {_mm256_srai_epi32(x.a, S), _mm256_srai_epi32(x.b, S)}; }
static inline Vi max(Vi x, Vi y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
static inline Vi min(Vi x, Vi y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
static inline Vf to_float(Vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline Vi round_even(Vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline Vi bits(Vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
static inline Vf from_bits(Vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

static inline Vb load_line(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
static inline Vb splat_b(uint8_t x) { return {_mm256_set1_epi8((char)x), _mm256_set1_epi8((char)x)}; }
static inline Vb operator&(Vb x, Vb y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
static inline Vb select(Vb m, Vb x, Vb y) {  // bits: m ? x : y
    return {_mm256_or_si256(_mm256_and_si256(m.a, x.a), _mm256_andnot_si256(m.a, y.a)),
            _mm256_or_si256(_mm256_and_si256(m.b, x.b), _mm256_andnot_si256(m.b, y.b))};
}
template <int S> static inline Vb shr(Vb x) { return {_mm256_srli_epi16(x.a, S), _mm256_srli_epi16(x.b, S)}; }
template <int S> static inline Vb shl(Vb x) { return {_mm256_slli_epi16(x.a, S), _mm256_slli_epi16(x.b, S)}; }
static inline Vb codes8(Vb x) { return x; }
static inline __m256i quad256(const int8_t* quad) {
    int32_t q;
    memcpy(&q, quad, 4);
    return _mm256_set1_epi32(q);
}
static inline Vi dot4(Vi acc, Vb codes, const int8_t* quad) {
    const __m256i q = quad256(quad), one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.a, q), one)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.b, q), one))};
}
static inline __m256i dot8_half(__m256i acc, __m256i w, __m256i q) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline Vi dot8(Vi acc, Vb codes, const int8_t* quad) {
    const __m256i q = quad256(quad);
    return {dot8_half(acc.a, codes.a, q), dot8_half(acc.b, codes.b, q)};
}
static inline Vb nf4(Vb nibbles) {
    alignas(16) static constexpr int8_t levels[16] = {HFA_NF4_LEVELS(0)};
    const __m256i table = _mm256_broadcastsi128_si256(load128(levels));
    return {_mm256_shuffle_epi8(table, nibbles.a), _mm256_shuffle_epi8(table, nibbles.b)};
}

template <bool E5M2> static inline __m256i fp8_words(__m256i x) {  // float8 in the upper bytes -> fp16
    if (E5M2) return _mm256_and_si256(x, _mm256_set1_epi16((short)0xff00));
    return _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16((short)0xbf80));
}
static inline Vf halves(__m256i x) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
template <bool E5M2> static inline void fp8_line(const uint8_t* p, Vf* out) {
    const __m256i first = load256(p), second = load256(p + 32);
    out[0] = halves(fp8_words<E5M2>(_mm256_slli_epi16(first, 8)));
    out[1] = halves(fp8_words<E5M2>(_mm256_slli_epi16(second, 8)));
    out[2] = halves(fp8_words<E5M2>(first));
    out[3] = halves(fp8_words<E5M2>(second));
}
static inline Vf splat2(const float* p) {
    double both;
    memcpy(&both, p, 8);
    const __m256 x = _mm256_castpd_ps(_mm256_set1_pd(both));
    return {x, x};
}
static inline __m256 add_pairs8(__m256 a, __m256 b) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(a, b)), 0xd8));
}
static inline Vf add_pairs(Vf x, Vf y) { return {add_pairs8(x.a, x.b), add_pairs8(y.a, y.b)}; }

}  // namespace hfa
