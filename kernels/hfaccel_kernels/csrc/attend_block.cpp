// Scores, softmax and the sum of values of one block; how its keys and values come out of the pages.
#include "attend_block.h"

namespace hfa {
namespace {

inline void transpose16(Vi* r) {
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

template <int DTYPE> void load_keys_of(const HfaPages& p, const Block& b, int64_t g, float* kt) {
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

template <int DTYPE> void load_values_of(const HfaPages& p, const Block& b, int64_t g, float* vt) {
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

// Scores of N rows against V * 16 keys, before scale and mask: s[row, key].
template <int N, int V>
inline void score_tile(const float* q, int64_t ldq, const float* kt, int64_t size, float* s) {
    Vf acc[N][V];
    for (int r = 0; r < N; ++r)
        for (int v = 0; v < V; ++v) acc[r][v] = splat(0.0f);
    for (int64_t d = 0; d < size; ++d) {
        Vf k[V];
        for (int v = 0; v < V; ++v) k[v] = load(kt + d * kKeys + v * 16);
        for (int r = 0; r < N; ++r) {
            const Vf x = splat(q[r * ldq + d]);
            for (int v = 0; v < V; ++v) acc[r][v] = fma(x, k[v], acc[r][v]);
        }
    }
    for (int r = 0; r < N; ++r)
        for (int v = 0; v < V; ++v) store(s + r * kKeys + v * 16, acc[r][v]);
}

template <int N>
inline void scores(const float* q, int64_t ldq, const float* kt, int64_t size, int count, float* s) {
    if (count > 48) return score_tile<N, 4>(q, ldq, kt, size, s);
    if (count > 16) {
        score_tile<N, 2>(q, ldq, kt, size, s);
        if (count > 32) score_tile<N, 1>(q, ldq, kt + 32, size, s + 32);
        return;
    }
    score_tile<N, 1>(q, ldq, kt, size, s);
}

// o[row] = sum over keys first .. last - 1, in order, of p[row, key] * value[key], 2 * PAIRS vectors of channels at d.
template <int N, int PAIRS, class Values>
inline void value_tile(const float* p, int first, int last, int64_t d, int64_t dv, float* o, Values values) {
    Vf acc[N][2 * PAIRS];
    for (int r = 0; r < N; ++r)
        for (int v = 0; v < 2 * PAIRS; ++v) acc[r][v] = splat(0.0f);
    for (int j = first; j < last; ++j) {
        Vf x[2 * PAIRS];
        for (int v = 0; v < PAIRS; ++v) values.get(j, d + v * 32, x + 2 * v);
        for (int r = 0; r < N; ++r) {
            const Vf w = splat(p[r * kKeys + j]);
            for (int v = 0; v < 2 * PAIRS; ++v) acc[r][v] = fma(w, x[v], acc[r][v]);
        }
    }
    for (int r = 0; r < N; ++r)
        for (int v = 0; v < PAIRS; ++v) Values::put(o + r * dv + d + v * 32, acc[r] + 2 * v);
}

template <int N, class Values>
inline void sum_values(const float* p, int first, int last, int64_t dv, float* o, Values values) {
    int64_t d = 0;
    for (; d + 64 <= dv; d += 64) value_tile<N, 2>(p, first, last, d, dv, o, values);
    for (; d + 32 <= dv; d += 32) value_tile<N, 1>(p, first, last, d, dv, o, values);
    if (d == dv) return;
    Vf acc[N];
    for (int r = 0; r < N; ++r) acc[r] = splat(0.0f);
    for (int j = first; j < last; ++j) {
        const Vf x = values.one(j, d);
        for (int r = 0; r < N; ++r) acc[r] = fma(splat(p[r * kKeys + j]), x, acc[r]);
    }
    for (int r = 0; r < N; ++r) store(o + r * dv + d, acc[r]);
}

// p in place of s.
template <int N>
void rows_of(const AttendArgs& a, const Tiles& tiles, const Block& b, int64_t g, int64_t first_slot,
                       const int64_t* slot_of, const int64_t* head_of, const float* q, bool direct, float* m, float* l) {
    const HfaPages& pages = *a.pages;
    const int64_t d = pad_lanes(pages.k_size), dv = pad_lanes(pages.v_size);
    float s[kSubRows * kKeys];
    float key_scale[kKeys], value_scale[kKeys];
    scores<N>(q, d, tiles.kt, pages.k_size, b.count, s);
    const int whole = (b.count + 15) / 16 * 16;
    if (pages.dtype == HFA_PAGES_I8) {
        for (int j = 0; j < whole; ++j) {
            key_scale[j] = j < b.count ? pages.k_scale[b.slot[j] * pages.kv_heads + g] : 0.0f;
            value_scale[j] = j < b.count ? pages.v_scale[b.slot[j] * pages.kv_heads + g] : 0.0f;
        }
    }
    int from = kKeys, to = 0;
    for (int r = 0; r < N; ++r) {
        float* x = s + r * kKeys;
        const int64_t p = slot_of[r];
        int64_t low = a.window && p - a.window + 1 > first_slot ? p - a.window + 1 - first_slot : 0;
        int64_t high = p + 1 - first_slot < b.count ? p + 1 - first_slot : b.count;
        if (high < low) high = low;
        Vf top = splat(-INFINITY);
        for (int j = 0; j < whole; j += 16) {
            Vf v = load(x + j);
            if (pages.dtype == HFA_PAGES_I8) v = v * load(key_scale + j);
            if (a.softcap > 0) v = splat(a.softcap) * vtanh(v / splat(a.softcap));
            if (a.slopes) {
                float gap[16];
                for (int i = 0; i < 16; ++i) gap[i] = (float)(first_slot + j + i - p);
                v = v + splat(a.slopes[head_of[r]]) * load(gap);
            }
            if (j < low || j + 16 > high) {
                float t[16];
                store(t, v);
                for (int i = 0; i < 16; ++i)
                    if (j + i < low || j + i >= high) t[i] = -INFINITY;
                v = load(t);
            }
            store(x + j, v);
            top = max(top, v);
        }
        m[r] = reduce_max(top);
        if (m[r] == -INFINITY) {
            for (int j = 0; j < whole; ++j) x[j] = 0.0f;
            l[r] = 0.0f;
            continue;
        }
        Vf sum = splat(0.0f);
        const Vf peak = splat(m[r]);
        for (int j = 0; j < whole; j += 16) {
            Vf v = vexp(load(x + j) - peak);
            sum = sum + v;
            if (pages.dtype == HFA_PAGES_I8) v = v * load(value_scale + j);
            store(x + j, v);
        }
        l[r] = reduce_add(sum);
        if (low < from) from = (int)low;
        if (high > to) to = (int)high;
    }
    if (!direct) return sum_values<N>(s, from, to, dv, tiles.part, DenseValues{tiles.vt, dv});
    const uint8_t* row[kKeys];
    int64_t later[kKeys];
    const int64_t bytes = page_bytes(pages.dtype) * pages.v_size;
    for (int j = from; j < to; ++j) {
        row[j] = static_cast<const uint8_t*>(pages.v) + (b.slot[j] * pages.kv_heads + g) * bytes;
        later[j] = b.later(j) * pages.kv_heads * bytes;
    }
    switch (pages.dtype) {
        case HFA_BF16: return sum_values<N>(s, from, to, dv, tiles.part, PageValues<HFA_BF16>{row, later});
        case HFA_F16: return sum_values<N>(s, from, to, dv, tiles.part, PageValues<HFA_F16>{row, later});
        case HFA_F32: return sum_values<N>(s, from, to, dv, tiles.part, PageValues<HFA_F32>{row, later});
        default: return sum_values<N>(s, from, to, dv, tiles.part, PageValues<HFA_PAGES_I8>{row, later});
    }
}

}  // namespace

void load_keys(const HfaPages& p, const Block& b, int64_t g, float* kt) {
    switch (p.dtype) {
        case HFA_BF16: return load_keys_of<HFA_BF16>(p, b, g, kt);
        case HFA_F16: return load_keys_of<HFA_F16>(p, b, g, kt);
        case HFA_F32: return load_keys_of<HFA_F32>(p, b, g, kt);
        default: return load_keys_of<HFA_PAGES_I8>(p, b, g, kt);
    }
}

void load_values(const HfaPages& p, const Block& b, int64_t g, float* vt) {
    switch (p.dtype) {
        case HFA_BF16: return load_values_of<HFA_BF16>(p, b, g, vt);
        case HFA_F16: return load_values_of<HFA_F16>(p, b, g, vt);
        case HFA_F32: return load_values_of<HFA_F32>(p, b, g, vt);
        default: return load_values_of<HFA_PAGES_I8>(p, b, g, vt);
    }
}

void block_rows(int n, const AttendArgs& a, const Tiles& tiles, const Block& b, int64_t g, int64_t first_slot,
                const int64_t* slot_of, const int64_t* head_of, const float* q, bool direct, float* m, float* l) {
    switch (n) {
#define HFA_ROWS(N) \
    case N:         \
        if constexpr (N <= kSubRows) return rows_of<N>(a, tiles, b, g, first_slot, slot_of, head_of, q, direct, m, l)
        HFA_ROWS(1);
        HFA_ROWS(2);
        HFA_ROWS(3);
        HFA_ROWS(4);
        HFA_ROWS(5);
        HFA_ROWS(6);
#undef HFA_ROWS
    }
}

}  // namespace hfa
