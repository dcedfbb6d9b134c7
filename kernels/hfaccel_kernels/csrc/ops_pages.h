// Pages of keys and values: how they are written, and how a block of them is brought into registers or fp32 tiles.
#pragma once

#include "ops_math.h"
#include "plan.h"

namespace hfa {

constexpr int kKeys = 64;  // slots of a key block

static inline void transpose16(Vi* r) {
#if defined(HFA_ISA_AVX512)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(r[i].v, r[i + 1].v);
        a[i + 1] = _mm512_unpackhi_epi32(r[i].v, r[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // b[4q + i]: in each 128-bit lane L, columns 4L + i of rows 4q .. 4q + 3
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i].v = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        r[i + 8].v = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        r[i + 4].v = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        r[i + 12].v = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
#else
    int32_t in[16][16], out[16];
    for (int i = 0; i < 16; ++i) store_i(in[i], r[i]);
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) out[j] = in[j][i];
        r[i] = load_i(out);
    }
#endif
}

static inline int64_t page_bytes(int32_t dtype) { return dtype == HFA_PAGES_I8 ? 1 : dtype == HFA_F32 ? 4 : 2; }

template <int DTYPE> static inline Vf load_page(const void* p, int64_t at, int n) {
    if (DTYPE != HFA_PAGES_I8) return load_as(p, at, DTYPE, n);
    const int8_t* codes = static_cast<const int8_t*>(p) + at;
#if defined(HFA_ISA_AVX512)
    if (n >= 16) return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)))};
#endif
    float t[16] = {};
    for (int l = 0; l < n && l < 16; ++l) t[l] = (float)codes[l];
    return load(t);
}

// One head's K or V of one token into its slot.
static inline void write_head(void* pages, float* scales, int64_t slot, int64_t g, int64_t heads, int64_t size,
                              int32_t dtype, const float* x) {
    const int64_t at = (slot * heads + g) * size;
    if (dtype != HFA_PAGES_I8) {
        for (int64_t d = 0; d < size; d += 16) {
            const int n = size - d < 16 ? (int)(size - d) : 16;
            store_as(pages, at + d, dtype, load_as(x, d, HFA_F32, n), n);
        }
        return;
    }
    Vf top = splat(0.0f);
    for (int64_t d = 0; d < size; d += 16)
        top = max(top, vabs(load_as(x, d, HFA_F32, size - d < 16 ? (int)(size - d) : 16)));
    const float scale = reduce_max(top) / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    scales[slot * heads + g] = scale;
    for (int64_t d = 0; d < size; d += 16) {
        const int n = size - d < 16 ? (int)(size - d) : 16;
        int8_t codes[16];
        store_i8(codes, min(max(round_even(load_as(x, d, HFA_F32, n) * splat(inverse)), splat_i(-127)), splat_i(127)));
        memcpy(static_cast<int8_t*>(pages) + at + d, codes, n);
    }
}

// A block's keys: where its slots lie, and K transposed to fp32.
struct Block {
    int64_t slot[kKeys];          // index of (page, offset) in the pool
    int count;                    // slots that hold something
    const Block* next = nullptr;  // the block to ask memory for while this one is read
    int64_t later(int j) const { return next && j < next->count ? next->slot[j] - slot[j] : 0; }
};

static inline void find_slots(const int32_t* table, int64_t page_tokens, int64_t first, int64_t length, Block* b) {
    const int64_t left = length - first;
    b->count = left < kKeys ? (int)left : kKeys;
    int64_t page = first / page_tokens, offset = first % page_tokens;
    int64_t base = (int64_t)table[page] * page_tokens;
    for (int j = 0; j < b->count; ++j) {
        if (offset == page_tokens) {
            offset = 0;
            base = (int64_t)table[++page] * page_tokens;
        }
        b->slot[j] = base + offset++;
    }
}

// kt[d, j] = K of slot j; slots that hold nothing give zeros.
template <int DTYPE> static void load_keys_of(const HfaPages& p, const Block& b, int64_t g, float* kt) {
    const int64_t size = p.k_size, bytes = page_bytes(DTYPE), step = p.kv_heads * size * bytes;
    const uint8_t* base = static_cast<const uint8_t*>(p.k) + g * size * bytes;
    for (int j = 0; j < b.count; j += 16) {
        const uint8_t* row[16];
        int64_t later[16];  // bytes to the same row of the next block, 0 where there is none
        const int n = b.count - j < 16 ? b.count - j : 16;
        for (int i = 0; i < n; ++i) row[i] = base + b.slot[j + i] * step;
        for (int i = 0; i < n; ++i) later[i] = b.later(j + i) * step;
        int64_t d = 0;
#if defined(HFA_ISA_AVX512)
        constexpr int kPerWord = DTYPE == HFA_BF16 ? 2 : DTYPE == HFA_PAGES_I8 ? 4 : 1;
        // several channels move as one int32: fewer shuffles
        for (; kPerWord > 1 && d + 16 * kPerWord <= size; d += 16 * kPerWord) {
            Vi r[16];
            for (int i = 0; i < n; ++i) HFA_PREFETCH_FAR(row[i] + d * bytes + later[i]);
            for (int i = 0; i < 16; ++i)
                r[i] = i < n ? load_i(reinterpret_cast<const int32_t*>(row[i] + d * bytes)) : splat_i(0);
            transpose16(r);
            for (int i = 0; i < 16; ++i) {
                float* to = kt + (d + kPerWord * i) * kKeys + j;
                if (DTYPE == HFA_BF16) {
                    store(to, {_mm512_castsi512_ps(_mm512_slli_epi32(r[i].v, 16))});
                    store(to + kKeys, from_bits(r[i] & splat_i((int32_t)0xffff0000)));
                } else {
                    const __m512i q = r[i].v;
                    store(to, {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(q, 24), 24))});
                    store(to + kKeys, {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(q, 16), 24))});
                    store(to + 2 * kKeys, {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(q, 8), 24))});
                    store(to + 3 * kKeys, {_mm512_cvtepi32_ps(_mm512_srai_epi32(q, 24))});
                }
            }
        }
#endif
        for (; d < size; d += 16) {
            const int left = size - d < 16 ? (int)(size - d) : 16;
            Vi r[16];
            for (int i = 0; i < n; ++i) HFA_PREFETCH_FAR(row[i] + d * bytes + later[i]);
            for (int i = 0; i < 16; ++i) r[i] = i < n ? bits(load_page<DTYPE>(row[i], d, left)) : splat_i(0);
            transpose16(r);
            for (int i = 0; i < left; ++i) store(kt + (d + i) * kKeys + j, from_bits(r[i]));
        }
    }
}

static inline void load_keys(const HfaPages& p, const Block& b, int64_t g, float* kt) {
    switch (p.dtype) {
        case HFA_BF16: return load_keys_of<HFA_BF16>(p, b, g, kt);
        case HFA_F16: return load_keys_of<HFA_F16>(p, b, g, kt);
        case HFA_F32: return load_keys_of<HFA_F32>(p, b, g, kt);
        default: return load_keys_of<HFA_PAGES_I8>(p, b, g, kt);
    }
}

template <int DTYPE> static void load_values_of(const HfaPages& p, const Block& b, int64_t g, float* vt) {
    const int64_t size = p.v_size, dv = pad_lanes(size), bytes = page_bytes(DTYPE), step = p.kv_heads * size * bytes;
    const uint8_t* base = static_cast<const uint8_t*>(p.v) + g * size * bytes;
    for (int j = 0; j < b.count; ++j) {
        const uint8_t* row = base + b.slot[j] * step;
        const int64_t later = b.later(j) * step;
        int64_t d = 0;
        for (int64_t i = 0; later && i < size * bytes; i += 64) HFA_PREFETCH_FAR(row + i + later);
        for (; d + 16 <= size; d += 16) store(vt + j * dv + d, load_page<DTYPE>(row, d, 16));
        if (d < size) store(vt + j * dv + d, load_page<DTYPE>(row, d, (int)(size - d)));
    }
}

static inline void load_values(const HfaPages& p, const Block& b, int64_t g, float* vt) {
    switch (p.dtype) {
        case HFA_BF16: return load_values_of<HFA_BF16>(p, b, g, vt);
        case HFA_F16: return load_values_of<HFA_F16>(p, b, g, vt);
        case HFA_F32: return load_values_of<HFA_F32>(p, b, g, vt);
        default: return load_values_of<HFA_PAGES_I8>(p, b, g, vt);
    }
}

// Values of a key in pairs of vectors, which hold channels d .. d + 31 in the order of their own; `put` restores it.
struct DenseValues {  // fp32 rows converted before
    const float* vt;
    int64_t dv;
    void get(int j, int64_t d, Vf* x) const {
        x[0] = load(vt + j * dv + d);
        x[1] = load(vt + j * dv + d + 16);
    }
    Vf one(int j, int64_t d) const { return load(vt + j * dv + d); }
    static void put(float* to, const Vf* x) {
        store(to, x[0]);
        store(to + 16, x[1]);
    }
};

template <int DTYPE> struct PageValues {  // pages themselves, head sizes in whole vectors
    const uint8_t* const* row;
    const int64_t* later;  // bytes to the same row of the next block
    Vf one(int j, int64_t d) const { return load_page<DTYPE>(row[j], d, 16); }
    void get(int j, int64_t d, Vf* x) const {
        HFA_PREFETCH_FAR(row[j] + d * page_bytes(DTYPE) + later[j]);
#if defined(HFA_ISA_AVX512)
        if (DTYPE == HFA_BF16) {  // even and odd channels apart: no shuffles
            const Vi pair = load_i(reinterpret_cast<const int32_t*>(row[j] + d * 2));
            x[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(pair.v, 16))};
            x[1] = from_bits(pair & splat_i((int32_t)0xffff0000));
            return;
        }
#endif
        x[0] = one(j, d);
        x[1] = one(j, d + 16);
    }
    static void put(float* to, const Vf* x) {
#if defined(HFA_ISA_AVX512)
        if (DTYPE == HFA_BF16) {
            const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            store(to, {_mm512_permutex2var_ps(x[0].v, low, x[1].v)});
            store(to + 16, {_mm512_permutex2var_ps(x[0].v, high, x[1].v)});
            return;
        }
#endif
        DenseValues::put(to, x);
    }
};

}  // namespace hfa
