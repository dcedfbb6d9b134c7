// Attention of a few query rows to one block of keys: scores, softmax and the sum of values, and how a block's result
// joins others. ops_attend.h says in which order.
#pragma once

#include "ops_pages.h"
#include "plan.h"

namespace hfa {

constexpr int kSubRows = 6;  // rows whose scores are in registers at a time

struct AttendArgs {
    const float *q, *k, *v;          // rows of the buffers
    int64_t ldq, ldk, ldv;
    HfaView qv, kv, vv;
    float* out;
    int64_t ldo;
    const HfaPages* pages;
    float scale, softcap;
    int64_t window;                  // 0: none
    const float *sinks, *slopes;     // [H] or NULL
};

// State of one (query row): joined so far.
struct RowState {
    float m, l;
};

// fp32 tiles of one block: K transposed, V (where it is converted), and the sums of its rows.
struct Tiles {
    float *kt, *vt, *part;  // [D, kKeys], [kKeys, Dv], [kSubRows, Dv]
};

// Scores of N rows against V * 16 keys, before scale and mask: s[row, key].
template <int N, int V>
static inline void score_tile(const float* q, int64_t ldq, const float* kt, int64_t size, float* s) {
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
static inline void scores(const float* q, int64_t ldq, const float* kt, int64_t size, int count, float* s) {
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
static inline void value_tile(const float* p, int first, int last, int64_t d, int64_t dv, float* o, Values values) {
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
static inline void sum_values(const float* p, int first, int last, int64_t dv, float* o, Values values) {
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

// O, M, L joined with a block's o, m, l (up to 8 rows; rows whose m is -inf saw nothing of the block).
static inline void join_rows(int rows, RowState* state, float* o_joined, const float* m, const float* l,
                             const float* o, int64_t ldo, int64_t dv) {
    float gap[16] = {}, by[16], top[8];
    for (int r = 0; r < rows; ++r) {
        top[r] = state[r].m > m[r] ? state[r].m : m[r];
        gap[r] = state[r].m - top[r];
        gap[8 + r] = m[r] - top[r];
    }
    store(by, vexp(load(gap)));
    for (int r = 0; r < rows; ++r) {
        if (m[r] == -INFINITY) continue;
        const float old = by[r], now = by[8 + r];
        state[r].m = top[r];
        state[r].l = state[r].l * old + l[r] * now;
        const Vf vo = splat(old), vn = splat(now);
        for (int64_t d = 0; d < dv; d += 16)
            store(o_joined + r * dv + d, load(o_joined + r * dv + d) * vo + load(o + r * ldo + d) * vn);
    }
}

// out = O / (L + e^(sink - M)), in the same order for every row.
static inline void finish_row(RowState s, const float* o, const float* sink, int64_t size, float* out) {
    float by;
    if (sink) {
        const float top = s.m > *sink ? s.m : *sink;
        float e[16] = {s.m - top, *sink - top};
        store(e, vexp(load(e)));
        by = e[0] / (s.l * e[0] + e[1]);
    } else {
        by = 1.0f / s.l;
    }
    for (int64_t d = 0; d < size; d += 16)
        store_as(out, d, HFA_F32, load(o + d) * splat(by), size - d < 16 ? (int)(size - d) : 16);
}

// N rows (of one sequence and KV head) against one block: p in place of s; m, l, and o [N, dv].
template <int N>
static void block_rows(const AttendArgs& a, const Tiles& tiles, const Block& b, int64_t g, int64_t first_slot,
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

}  // namespace hfa
