// Attention over pages: kernels' paged.py has the formula, this file the order in which it is summed.
//
// Keys are taken in blocks of kKeys slots, at multiples of kKeys of the sequence. For one query row and one block
//   s[j] = sum over d, in order, of q[d] * k[j, d] (one fma each), q scaled before; int8: times the key's scale;
//          softcap, alibi, mask;   m = max s;   p[j] = e^(s[j] - m);   l = sum p;   o = sum over j, in order, of p[j] v[j]
// and blocks are joined in order:
//   M' = max(M, m);   L = L e^(M - M') + l e^(m - M');   O = O e^(M - M') + o e^(m - M')
// A masked key has p = 0, which changes no sum. So neither the rows computed together nor the thread that computes a
// block shows in the result. On decode steps threads share a (sequence, head) by blocks: the first keeps the joined
// state, the others their blocks apart, and the join record finishes in the same order.
#pragma once

#include <vector>

#include "ops_pages.h"
#include "parallel.h"
#include "plan.h"

namespace hfa {

constexpr int kTileRows = 64;   // query rows (tokens x heads of a KV head) that share one conversion of a block
constexpr int kSubRows = 6;     // rows whose scores are in registers at a time

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

// What a thread leaves behind where a (sequence, head) is shared: see the head of this file.
struct Shared {
    int64_t out_row, out_head, out_heads;  // token and query heads it began and did not finish; row -1: none
    int64_t in_row, in_head;               // those that another thread began; row -1: none
    int64_t in_blocks;                     // how many of its blocks lie in `blocks`
    int64_t padding[2];
};

struct Scratch {
    float *kt, *vt, *q, *o, *part;  // [D, kKeys], [kKeys, Dv], [rows, D], [rows, Dv], [kSubRows, Dv]
    RowState* state;                // [rows]
    Shared* shared;
    float *prefix, *blocks;         // [rows, 2 + Dv], [blocks, rows, 2 + Dv] of what is shared
};

// Floats of scratch a thread needs; `rows` and `blocks` are the most that it may share.
static inline int64_t scratch_floats(int64_t k_size, int64_t v_size, int64_t rows, int64_t blocks) {
    const int64_t d = pad_lanes(k_size), dv = pad_lanes(v_size);
    return d * kKeys + kKeys * dv + kTileRows * (d + dv) + kSubRows * dv + 2 * kTileRows + 16 +
           (1 + blocks) * rows * (2 + dv) + 64;
}
static inline Scratch scratch_at(float* at, int64_t k_size, int64_t v_size, int64_t rows) {
    const int64_t d = pad_lanes(k_size), dv = pad_lanes(v_size);
    Scratch s;
    s.kt = at;
    s.vt = s.kt + d * kKeys;
    s.q = s.vt + kKeys * dv;
    s.o = s.q + kTileRows * d;
    s.part = s.o + kTileRows * dv;
    s.state = reinterpret_cast<RowState*>(s.part + kSubRows * dv);
    s.shared = reinterpret_cast<Shared*>(s.part + kSubRows * dv + 2 * kTileRows);
    s.prefix = s.part + kSubRows * dv + 2 * kTileRows + 16;
    s.blocks = s.prefix + rows * (2 + dv);
    return s;
}

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
static void block_rows(const AttendArgs& a, const Scratch& scratch, const Block& b, int64_t g, int64_t first_slot,
                       const int64_t* slot_of, const int64_t* head_of, const float* q, bool direct, float* m, float* l) {
    const HfaPages& pages = *a.pages;
    const int64_t d = pad_lanes(pages.k_size), dv = pad_lanes(pages.v_size);
    float s[kSubRows * kKeys];
    float key_scale[kKeys], value_scale[kKeys];
    scores<N>(q, d, scratch.kt, pages.k_size, b.count, s);
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
    if (!direct) return sum_values<N>(s, from, to, dv, scratch.part, DenseValues{scratch.vt, dv});
    const uint8_t* row[kKeys];
    int64_t later[kKeys];
    const int64_t bytes = page_bytes(pages.dtype) * pages.v_size;
    for (int j = from; j < to; ++j) {
        row[j] = static_cast<const uint8_t*>(pages.v) + (b.slot[j] * pages.kv_heads + g) * bytes;
        later[j] = b.later(j) * pages.kv_heads * bytes;
    }
    switch (pages.dtype) {
        case HFA_BF16: return sum_values<N>(s, from, to, dv, scratch.part, PageValues<HFA_BF16>{row, later});
        case HFA_F16: return sum_values<N>(s, from, to, dv, scratch.part, PageValues<HFA_F16>{row, later});
        case HFA_F32: return sum_values<N>(s, from, to, dv, scratch.part, PageValues<HFA_F32>{row, later});
        default: return sum_values<N>(s, from, to, dv, scratch.part, PageValues<HFA_PAGES_I8>{row, later});
    }
}

// `rows` query rows (of `heads` KV heads from g on, as many of each) against blocks [first, last). With `apart`, blocks
// are kept there ([block, row, 2 + dv]) instead of being joined.
static inline void attend_blocks(const AttendArgs& a, const Scratch& scratch, const int32_t* table,
                                 int64_t page_tokens, int64_t length, int64_t g, int64_t heads, int rows,
                                 const int64_t* slot_of, const int64_t* head_of, int64_t first, int64_t last,
                                 float* apart) {
    const int64_t d = pad_lanes(a.pages->k_size), dv = pad_lanes(a.pages->v_size);
    const int each = rows / (int)heads;
    const bool direct = each <= kSubRows && a.pages->v_size % 16 == 0;
    Block two[2];
    find_slots(table, page_tokens, first * kKeys, length, &two[first & 1]);
    for (int64_t block = first; block < last; ++block) {
        Block &b = two[block & 1], &next = two[~block & 1];
        b.next = block + 1 < last ? &next : nullptr;
        if (b.next) find_slots(table, page_tokens, (block + 1) * kKeys, length, &next);
        for (int r = 0; r < rows;) {
            const int64_t here = g + r / each;
            if (r % each == 0) {
                load_keys(*a.pages, b, here, scratch.kt);
                if (!direct) load_values(*a.pages, b, here, scratch.vt);
            }
            float m[kSubRows], l[kSubRows];
            const int left = each - r % each, n = left < kSubRows ? left : kSubRows;
            const int64_t *slots = slot_of + r, *of = head_of + r;
            const float* q = scratch.q + r * d;
            switch (n) {
                case 6: block_rows<6>(a, scratch, b, here, block * kKeys, slots, of, q, direct, m, l); break;
                case 5: block_rows<5>(a, scratch, b, here, block * kKeys, slots, of, q, direct, m, l); break;
                case 4: block_rows<4>(a, scratch, b, here, block * kKeys, slots, of, q, direct, m, l); break;
                case 3: block_rows<3>(a, scratch, b, here, block * kKeys, slots, of, q, direct, m, l); break;
                case 2: block_rows<2>(a, scratch, b, here, block * kKeys, slots, of, q, direct, m, l); break;
                default: block_rows<1>(a, scratch, b, here, block * kKeys, slots, of, q, direct, m, l); break;
            }
            if (apart) {
                float* to = apart + ((block - first) * rows + r) * (2 + dv);
                for (int i = 0; i < n; ++i, to += 2 + dv) {
                    to[0] = m[i];
                    to[1] = l[i];
                    memcpy(to + 2, scratch.part + i * dv, dv * 4);
                }
            } else {
                join_rows(n, scratch.state + r, scratch.o + r * dv, m, l, scratch.part, dv, dv);
            }
            r += n;
        }
    }
}

// One (sequence, tile of tokens, KV heads).
struct Item {
    int64_t sequence, g, heads;  // KV heads g .. g + heads - 1
    int64_t token, tokens;       // of the tile, in the step
    int64_t slot, length;        // slot of its first token; slots to look at
    int64_t first, last;         // key blocks
    bool splittable;
};

constexpr int64_t kStreamBlocks = 8;  // from here on a decode step reads a page for all its heads before the next

template <class Each>
static inline void each_item(const HfaStep& step, int64_t kv_heads, int64_t ratio, int64_t window, Each&& each) {
    const int64_t tile = ratio < kTileRows ? kTileRows / ratio : 1;
    for (int64_t b = 0; b < step.sequences; ++b) {
        const int64_t begin = step.q_starts[b], n = step.q_starts[b + 1] - begin, past = step.lengths[b] - n;
        for (int64_t t = 0; t < n; t += tile) {
            Item item;
            item.sequence = b;
            item.token = begin + t;
            item.tokens = n - t < tile ? n - t : tile;
            item.slot = past + t;
            item.length = item.slot + item.tokens;
            item.first = window && item.slot >= window ? (item.slot - window + 1) / kKeys : 0;
            item.last = (item.length + kKeys - 1) / kKeys;
            item.splittable = n == 1;
            const int64_t together = kTileRows / ratio > 0 ? kTileRows / ratio : 1;
            const int64_t width = n == 1 && item.last - item.first >= kStreamBlocks ? together : 1;
            for (item.g = 0; item.g < kv_heads; item.g += width) {
                item.heads = kv_heads - item.g < width ? kv_heads - item.g : width;
                each(item);
            }
        }
    }
}

static inline int64_t slot_index(const HfaStep& step, int64_t sequence, int64_t slot) {
    const int32_t* table = step.block_tables + sequence * step.table_stride;
    return (int64_t)table[slot / step.page_tokens] * step.page_tokens + slot % step.page_tokens;
}

static inline void write_token(const AttendArgs& a, int64_t token, int64_t slot, int64_t g) {
    const HfaPages& p = *a.pages;
    const float* k = a.k + token * a.ldk + a.kv.offset + g * a.kv.stride;
    const float* v = a.v + token * a.ldv + a.vv.offset + g * a.vv.stride;
    write_head(p.k, p.k_scale, slot, g, p.kv_heads, p.k_size, p.dtype, k);
    write_head(p.v, p.v_scale, slot, g, p.kv_heads, p.v_size, p.dtype, v);
}

// The thread's share. `fused`: keys and values of the step's tokens (one a sequence) are written here first.
static inline void attend(const AttendArgs& a, const HfaStep& step, const Scratch& scratch, bool fused, int tid,
                          int nthreads) {
    const HfaPages& pages = *a.pages;
    const int64_t ratio = a.qv.count / a.kv.count, d = pad_lanes(pages.k_size), dv = pad_lanes(pages.v_size);
    int64_t total = 0;
    each_item(step, a.kv.count, ratio, a.window,
              [&](const Item& i) { total += (i.last - i.first) * i.tokens * i.heads * ratio; });
    const int64_t begin = total * tid / nthreads, end = total * (tid + 1) / nthreads;
    scratch.shared->out_row = scratch.shared->in_row = -1;
    int64_t at = 0;
    int64_t slot_of[kTileRows], head_of[kTileRows];
    each_item(step, a.kv.count, ratio, a.window, [&](const Item& item) {
        const int64_t rows = item.tokens * item.heads * ratio, blocks = item.last - item.first, start = at;
        at += blocks * rows;
        int64_t from = 0, to = blocks;
        if (item.splittable) {  // the block whose work starts at x or later
            from = begin <= start ? 0 : (begin - start + rows - 1) / rows;
            to = end >= at ? blocks : (end - start + rows - 1) / rows;
            if (from >= to) return;
        } else if (start < begin || start >= end) {
            return;
        }
        const int32_t* table = step.block_tables + item.sequence * step.table_stride;
        for (int64_t g = item.g; fused && to == blocks && g < item.g + item.heads; ++g)
            write_token(a, item.token, slot_index(step, item.sequence, item.slot), g);
        for (int64_t t = 0, r = 0; t < item.tokens; ++t) {
            for (int64_t h = 0; h < item.heads * ratio; ++h, ++r) {
                slot_of[r] = item.slot + t;
                head_of[r] = item.g * ratio + h;
                const float* q = a.q + (item.token + t) * a.ldq + a.qv.offset + head_of[r] * a.qv.stride;
                for (int64_t i = 0; i < pages.k_size; i += 16) {
                    const int n = pages.k_size - i < 16 ? (int)(pages.k_size - i) : 16;
                    store(scratch.q + r * d + i, load_as(q, i, HFA_F32, n) * splat(a.scale));
                }
                scratch.state[r] = {-INFINITY, 0.0f};
                memset(scratch.o + r * dv, 0, dv * 4);
            }
        }
        attend_blocks(a, scratch, table, step.page_tokens, item.length, item.g, item.heads, (int)rows, slot_of,
                      head_of, item.first + from, item.first + to, from ? scratch.blocks : nullptr);
        if (from) {
            scratch.shared->in_row = item.token;
            scratch.shared->in_head = item.g * ratio;
            scratch.shared->in_blocks = to - from;
        } else if (to < blocks) {
            scratch.shared->out_row = item.token;
            scratch.shared->out_head = item.g * ratio;
            scratch.shared->out_heads = rows;
            for (int64_t r = 0; r < rows; ++r) {
                float* keep = scratch.prefix + r * (2 + dv);
                keep[0] = scratch.state[r].m;
                keep[1] = scratch.state[r].l;
                memcpy(keep + 2, scratch.o + r * dv, dv * 4);
            }
        } else {
            for (int64_t r = 0; r < rows; ++r)
                finish_row(scratch.state[r], scratch.o + r * dv, a.sinks ? a.sinks + head_of[r] : nullptr,
                           pages.v_size,
                           a.out + (item.token + slot_of[r] - item.slot) * a.ldo + head_of[r] * pages.v_size);
        }
    });
}

// Finishes what threads shared, for the heads of tokens [rows.begin, rows.end), into `out`.
template <class ScratchOf>
static inline void join_shared(const AttendArgs& a, int nthreads, int64_t begin, int64_t end, float* out, int64_t ldo,
                               ScratchOf&& scratch_of) {
    const int64_t dv = pad_lanes(a.pages->v_size);
    std::vector<float> joined(dv);
    for (int t = 0; t < nthreads; ++t) {
        const Scratch first = scratch_of(t);
        const int64_t row = first.shared->out_row, head = first.shared->out_head, heads = first.shared->out_heads;
        if (row < begin || row >= end) continue;
        for (int64_t h = 0; h < heads; ++h) {
            const float* keep = first.prefix + h * (2 + dv);
            RowState state{keep[0], keep[1]};
            memcpy(joined.data(), keep + 2, dv * 4);
            for (int u = t + 1; u < nthreads; ++u) {
                const Scratch more = scratch_of(u);
                if (more.shared->in_row != row || more.shared->in_head != head) continue;
                for (int64_t b = 0; b < more.shared->in_blocks; ++b) {
                    const float* part = more.blocks + (b * heads + h) * (2 + dv);
                    join_rows(1, &state, joined.data(), part, part + 1, part + 2, dv, dv);
                }
            }
            finish_row(state, joined.data(), a.sinks ? a.sinks + head + h : nullptr, a.pages->v_size,
                       out + row * ldo + (head + h) * a.pages->v_size);
        }
    }
}

}  // namespace hfa
