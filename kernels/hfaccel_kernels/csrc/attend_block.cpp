// Scores, softmax and the sum of values of one block; how its keys and values come out of the pages.
#include "attend_block.h"

#include <type_traits>

namespace hfa {
namespace {

constexpr int kGroup = 16;  // keys whose scores are one vector, lane 4g + v key 4g + v; made of four sums v of four keys g

// Words of 4 bytes hold several channels. Of each 4 * per_word channels, step b takes b, per_word + b, 2 per_word + b ..
template <int DTYPE> constexpr int per_word = DTYPE == HFA_F32 ? 1 : DTYPE == HFA_PAGES_I8 ? 4 : 2;

inline int64_t score_steps(const HfaPages& p) {
    const int64_t bytes = p.k_size * page_bytes(p.dtype);
    return (bytes + 15) / 16 * (p.dtype == HFA_F32 ? 1 : p.dtype == HFA_PAGES_I8 ? 4 : 2);
}

template <int DTYPE, int B> inline Vf channel(Vi words) {
    if constexpr (DTYPE == HFA_F32) return from_bits(words);
    else if constexpr (DTYPE == HFA_F16) return half_words(B ? shift_right<16>(words) : words);
    else if constexpr (DTYPE == HFA_PAGES_I8) return to_float(shift_right<24>(shift_left<24 - 8 * B>(words)));
    else return from_bits(B ? words & splat_i((int32_t)0xffff0000) : shift_left<16>(words));
}
template <int DTYPE, class Each> inline void each_channel(const Vi* words, Each&& each) {
    auto one = [&](auto b) __attribute__((always_inline)) {
        Vf k[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) k[v] = channel<DTYPE, decltype(b)::value>(words[v]);
        each(decltype(b)::value, k);
    };
    one(std::integral_constant<int, 0>());
    if constexpr (per_word<DTYPE> > 1) one(std::integral_constant<int, 1>());
    if constexpr (per_word<DTYPE> > 2) {
        one(std::integral_constant<int, 2>());
        one(std::integral_constant<int, 3>());
    }
}

// Where the keys of a block lie. Those that hold nothing read as the first of their group: their scores are masked.
struct KeyRows {
    const uint8_t* row[kKeys];
    int64_t later[kKeys];  // bytes to the same row of the next block, 0 where there is none
    int64_t bytes;
    int count;

    KeyRows(const HfaPages& p, const Block& b, int64_t g) : bytes(p.k_size * page_bytes(p.dtype)), count(b.count) {
        const uint8_t* base = static_cast<const uint8_t*>(p.k) + g * bytes;
        for (int j = 0; j < (count + kGroup - 1) / kGroup * kGroup; ++j) {
            const int real = j < count ? j : j / kGroup * kGroup;
            row[j] = base + b.slot[real] * p.kv_heads * bytes;
            later[j] = b.later(real) * p.kv_heads * bytes;
        }
    }
    // 16 bytes from `at` on of the keys of group j: words[v], lanes 4g .. 4g + 3, of key 4g + v; zeros behind the end.
    inline __attribute__((always_inline)) void words(int j, int64_t at, Vi* out) const {
        if (at % 64 == 0)
#pragma GCC unroll 16
            for (int i = 0; i < kGroup; ++i) HFA_PREFETCH_FAR(row[j + i] + at + later[j + i]);
        if (__builtin_expect(at + 16 > bytes, 0)) return tail(j, at, out);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            out[v] = load_quads(row[j + v] + at, row[j + 4 + v] + at, row[j + 8 + v] + at, row[j + 12 + v] + at);
    }
    __attribute__((noinline)) void tail(int j, int64_t at, Vi* out) const {
        for (int v = 0; v < 4; ++v) {
            uint8_t part[4][16] = {};
            for (int g = 0; g < 4; ++g) memcpy(part[g], row[j + 4 * g + v] + at, bytes - at);
            out[v] = load_quads(part[0], part[1], part[2], part[3]);
        }
    }
};

// kt[group, step, v, lane]: what page_scores has in registers.
template <int DTYPE> void load_keys_of(const KeyRows& keys, float* kt) {
    for (int j = 0; j < keys.count; j += kGroup) {
        for (int64_t at = 0; at < keys.bytes; at += 16) {
            Vi words[4];
            keys.words(j, at, words);
            each_channel<DTYPE>(words, [&](int, const Vf* k) __attribute__((always_inline)) {
                for (int v = 0; v < 4; ++v, kt += 16) store(kt, k[v]);
            });
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

// Scores of N rows against a block, before scale and mask: s[row, key]. Each is four sums over the steps, one fma a
// step, added (0 + 2) + (1 + 3).
template <int N> void tile_scores(const float* q, int64_t ldq, const float* kt, int64_t steps, int count, float* s) {
    for (int j = 0; j < count; j += kGroup) {
        Vf acc[N][4];
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) acc[r][v] = splat(0.0f);
        for (int64_t step = 0; step < steps; ++step, kt += 64) {
            Vf k[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) k[v] = load(kt + v * 16);
#pragma GCC unroll 6
            for (int r = 0; r < N; ++r) {
                const Vf x = splat4(q + r * ldq + step * 4);
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v) acc[r][v] = fma(x, k[v], acc[r][v]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r) store(s + r * kKeys + j, quad_sums(acc[r]));
    }
}

// The same out of the pages.
template <int N, int DTYPE> void page_scores(const float* q, int64_t ldq, const KeyRows& keys, float* s) {
    for (int j = 0; j < keys.count; j += kGroup) {
        Vf acc[N][4];
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) acc[r][v] = splat(0.0f);
        const float* x = q;
        for (int64_t at = 0; at < keys.bytes; at += 16, x += 4 * per_word<DTYPE>) {
            Vi words[4];
            keys.words(j, at, words);
            each_channel<DTYPE>(words, [&](int b, const Vf* k) __attribute__((always_inline)) {
#pragma GCC unroll 6
                for (int r = 0; r < N; ++r) {
                    const Vf four = splat4(x + r * ldq + b * 4);
#pragma GCC unroll 4
                    for (int v = 0; v < 4; ++v) acc[r][v] = fma(four, k[v], acc[r][v]);
                }
            });
        }
#pragma GCC unroll 6
        for (int r = 0; r < N; ++r) store(s + r * kKeys + j, quad_sums(acc[r]));
    }
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
    if (direct) {
        const KeyRows keys(pages, b, g);
        switch (pages.dtype) {
            case HFA_BF16: page_scores<N, HFA_BF16>(q, d, keys, s); break;
            case HFA_F16: page_scores<N, HFA_F16>(q, d, keys, s); break;
            case HFA_F32: page_scores<N, HFA_F32>(q, d, keys, s); break;
            default: page_scores<N, HFA_PAGES_I8>(q, d, keys, s); break;
        }
    } else {
        tile_scores<N>(q, d, tiles.kt, score_steps(pages), b.count, s);
    }
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
    const KeyRows keys(p, b, g);
    switch (p.dtype) {
        case HFA_BF16: return load_keys_of<HFA_BF16>(keys, kt);
        case HFA_F16: return load_keys_of<HFA_F16>(keys, kt);
        case HFA_F32: return load_keys_of<HFA_F32>(keys, kt);
        default: return load_keys_of<HFA_PAGES_I8>(keys, kt);
    }
}

void arrange_query(const HfaPages& p, float* q) {
    const int words = p.dtype == HFA_F32 ? 1 : p.dtype == HFA_PAGES_I8 ? 4 : 2;
    for (int64_t d = 0; words > 1 && d < pad_lanes(p.k_size); d += 4 * words) {
        float t[16];
        for (int i = 0; i < 4 * words; ++i) t[i % words * 4 + i / words] = q[d + i];
        memcpy(q + d, t, 16 * words);
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
