// Attention over pages: kernels' paged.py has the formula, this file the order in which it is summed.
//
// Keys are taken in blocks of kKeys slots, at multiples of kKeys of the sequence. For one query row and one block
//   s[j] = sum over d of q[d] * k[j, d], q scaled before, as four sums (attend_block.cpp); int8: times the key's scale;
//          softcap, alibi, mask;   m = max s;   p[j] = e^(s[j] - m);   l = sum p;   o = sum over j, in order, of p[j] v[j]
// Blocks are joined in order to segments, and segments in order:
//   M' = max(M, m);   L = L e^(M - M') + l e^(m - M');   O = O e^(M - M') + o e^(m - M')
// A masked key has p = 0, which changes no sum. Where segments begin follows from the slot alone: 2 * kOctave of one
// block, then kOctave of two, kOctave of four and so on. So neither the rows computed together nor the thread that
// computes a block shows in the result. On decode steps threads share a (sequence, head) by segments: the first keeps
// the joined state, the others their segments apart, and the join record finishes in the same order. Segments, which
// grow with the position, bound what is kept apart: 64 + 32 for each doubling of the context beyond 4,096 slots.
#pragma once

#include <vector>

#include "attend_block.h"
#include "parallel.h"

namespace hfa {

constexpr int kTileRows = 64;    // query rows (tokens x heads of a KV head) that share one conversion of a block
constexpr int64_t kOctave = 32;  // segments between two powers of two: what threads share is even to 1/32

// Blocks of the segment that `block` lies in.
static inline int64_t segment_blocks(int64_t block) {
    int64_t n = 1;
    while (block >= 2 * kOctave * n) n *= 2;
    return n;
}
static inline int64_t count_segments(int64_t blocks) {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; b += segment_blocks(b)) ++count;
    return count;
}
// The border of segments nearest to a block.
static inline int64_t nearest_border(int64_t block) {
    const int64_t size = segment_blocks(block), past = block % size;
    return block - past + (2 * past < size ? 0 : size);
}

// What a thread leaves behind where a (sequence, head) is shared: see the head of this file.
struct Shared {
    int64_t out_row, out_head, out_heads;  // token and query heads it began and did not finish; row -1: none
    int64_t in_row, in_head;               // those that another thread began; row -1: none
    int64_t in_segments;                   // how many of its segments lie in `segments`
    int64_t padding[2];
};

struct Scratch {
    Tiles tiles;
    float *q, *o, *segment_o;                // [kTileRows, D], joined so far and in the segment: [kTileRows, Dv]
    RowState *state, *segment_state;         // [kTileRows]
    Shared* shared;
    float *prefix, *segments;                // [rows, 2 + Dv], [segments, rows, 2 + Dv] of what is shared
};

// Floats of scratch a thread needs; `rows` and `segments` are the most that it may share.
static inline int64_t scratch_floats(int64_t k_size, int64_t v_size, int64_t rows, int64_t segments) {
    const int64_t d = pad_lanes(k_size), dv = pad_lanes(v_size);
    return d * kKeys + kKeys * dv + kTileRows * (d + 2 * dv) + kSubRows * dv + 4 * kTileRows + 16 +
           (1 + segments) * rows * (2 + dv) + 64;
}
static inline Scratch scratch_at(float* at, int64_t k_size, int64_t v_size, int64_t rows) {
    const int64_t d = pad_lanes(k_size), dv = pad_lanes(v_size);
    Scratch s;
    s.tiles.kt = at;
    s.tiles.vt = s.tiles.kt + d * kKeys;
    s.tiles.part = s.tiles.vt + kKeys * dv;
    s.q = s.tiles.part + kSubRows * dv;
    s.o = s.q + kTileRows * d;
    s.segment_o = s.o + kTileRows * dv;
    float* const more = s.segment_o + kTileRows * dv;
    s.state = reinterpret_cast<RowState*>(more);
    s.segment_state = s.state + kTileRows;
    s.shared = reinterpret_cast<Shared*>(more + 4 * kTileRows);
    s.prefix = more + 4 * kTileRows + 16;
    s.segments = s.prefix + rows * (2 + dv);
    return s;
}

// `rows` query rows (of `heads` KV heads from g on, as many of each) against blocks [first, last). With `apart`,
// segments are kept there ([segment, row, 2 + dv]) instead of being joined. `after`: what will be read next, or null.
// Returns how many segments.
static inline int64_t attend_blocks(const AttendArgs& a, const Scratch& scratch, const int32_t* table,
                                    int64_t page_tokens, int64_t length, int64_t g, int64_t heads, int rows,
                                    const int64_t* slot_of, const int64_t* head_of, int64_t first, int64_t last,
                                    const Block* after, float* apart) {
    const int64_t d = pad_lanes(a.pages->k_size), dv = pad_lanes(a.pages->v_size);
    const int each = rows / (int)heads;
    const bool direct = each <= kSubRows && a.pages->v_size % 16 == 0;
    const Tiles& tiles = scratch.tiles;
    int64_t segments = 0;
    // A segment's result for rows r .. r + n - 1.
    auto finish = [&](int r, int n, const float* m, const float* l, const float* o) {
        if (!apart) return join_rows(n, scratch.state + r, scratch.o + r * dv, m, l, o, dv, dv);
        float* to = apart + (segments * rows + r) * (2 + dv);
        for (int i = 0; i < n; ++i, to += 2 + dv) {
            to[0] = m[i];
            to[1] = l[i];
            memcpy(to + 2, o + i * dv, dv * 4);
        }
    };
    Block two[2];
    find_slots(table, page_tokens, first * kKeys, length, &two[first & 1]);
    for (int64_t block = first; block < last; ++block) {
        Block &b = two[block & 1], &next = two[~block & 1];
        b.next = block + 1 < last ? &next : after;
        if (block + 1 < last) find_slots(table, page_tokens, (block + 1) * kKeys, length, &next);
        const int64_t size = segment_blocks(block);
        const bool begins = block == first || block % size == 0, ends = block + 1 == last || (block + 1) % size == 0;
        for (int r = 0; r < rows;) {
            const int64_t here = g + r / each;
            if (!direct && r % each == 0) {
                load_keys(*a.pages, b, here, tiles.kt);
                load_values(*a.pages, b, here, tiles.vt);
            }
            float m[kSubRows], l[kSubRows];
            const int left = each - r % each, n = left < kSubRows ? left : kSubRows;
            const int64_t *slots = slot_of + r, *of = head_of + r;
            const float* q = scratch.q + r * d;
            block_rows(n, a, tiles, b, here, block * kKeys, slots, of, q, direct, m, l);
            if (size == 1) {
                finish(r, n, m, l, tiles.part);
            } else {
                RowState* state = scratch.segment_state + r;
                float* o = scratch.segment_o + r * dv;
                if (begins) {
                    for (int i = 0; i < n; ++i) state[i] = {-INFINITY, 0.0f};
                    memset(o, 0, n * dv * 4);
                }
                join_rows(n, state, o, m, l, tiles.part, dv, dv);
                if (ends) {
                    for (int i = 0; i < n; ++i) {
                        m[i] = state[i].m;
                        l[i] = state[i].l;
                    }
                    finish(r, n, m, l, o);
                }
            }
            r += n;
        }
        segments += ends;
    }
    return segments;
}

// One (sequence, tile of tokens, KV heads).
struct Item {
    int64_t sequence, g, heads;  // KV heads g .. g + heads - 1
    int64_t token, tokens;       // of the tile, in the step
    int64_t slot, length;        // slot of its first token; slots to look at
    int64_t first, last;         // key blocks
    bool splittable;
};

// A decode step reads a page for all its heads before the next from so many blocks, or sequences, on; fewer are cut
// between threads by heads.
constexpr int64_t kStreamBlocks = 8, kStreamSequences = 8;

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
            const bool stream = step.sequences >= kStreamSequences || item.last - item.first >= kStreamBlocks;
            const int64_t width = n == 1 && stream ? together : 1;
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
        if (item.splittable) {
            auto cut = [&](int64_t x) -> int64_t {  // the block that work x falls into, at a border of segments
                if (x <= start) return 0;
                if (x >= at) return blocks;
                const int64_t border = nearest_border(item.first + (x - start + rows - 1) / rows) - item.first;
                return border < 0 ? 0 : border > blocks ? blocks : border;
            };
            from = cut(begin);
            to = cut(end);
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
                arrange_query(pages, scratch.q + r * d);
                scratch.state[r] = {-INFINITY, 0.0f};
                memset(scratch.o + r * dv, 0, dv * 4);
            }
        }
        Block after;
        const int32_t* starts = step.q_starts + item.sequence;  // a sequence without tokens has no checked pages
        const bool more = item.splittable && to == blocks && item.g + item.heads == a.kv.count &&
                          item.sequence + 1 < step.sequences && starts[2] > starts[1];
        if (more) {
            const int64_t length = step.lengths[item.sequence + 1];
            const int64_t first = a.window && length > a.window ? (length - a.window) / kKeys : 0;
            find_slots(table + step.table_stride, step.page_tokens, first * kKeys, length, &after);
        }
        const int64_t segments = attend_blocks(
            a, scratch, table, step.page_tokens, item.length, item.g, item.heads, (int)rows, slot_of, head_of,
            item.first + from, item.first + to, more ? &after : nullptr, from ? scratch.segments : nullptr);
        if (from) {
            scratch.shared->in_row = item.token;
            scratch.shared->in_head = item.g * ratio;
            scratch.shared->in_segments = segments;
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
    const int64_t dv = pad_lanes(a.pages->v_size), ld = 2 + dv;
    constexpr int kTogether = 8;  // heads whose weights are one exponential
    std::vector<float> joined;
    for (int t = 0; t < nthreads; ++t) {
        const Scratch first = scratch_of(t);
        const int64_t row = first.shared->out_row, head = first.shared->out_head, heads = first.shared->out_heads;
        if (row < begin || row >= end) continue;
        joined.resize(kTogether * dv);
        for (int64_t h = 0; h < heads; h += kTogether) {
            const int n = heads - h < kTogether ? (int)(heads - h) : kTogether;
            RowState state[kTogether];
            float m[kTogether], l[kTogether];
            for (int i = 0; i < n; ++i) {
                const float* keep = first.prefix + (h + i) * ld;
                state[i] = {keep[0], keep[1]};
                memcpy(joined.data() + i * dv, keep + 2, dv * 4);
            }
            for (int u = t + 1; u < nthreads; ++u) {
                const Scratch more = scratch_of(u);
                if (more.shared->in_row != row || more.shared->in_head != head) continue;
                for (int64_t s = 0; s < more.shared->in_segments; ++s) {
                    const float* part = more.segments + (s * heads + h) * ld;
                    for (int i = 0; i < n; ++i) {
                        m[i] = part[i * ld];
                        l[i] = part[i * ld + 1];
                    }
                    join_rows(n, state, joined.data(), m, l, part + 2, ld, dv);
                }
            }
            for (int i = 0; i < n; ++i)
                finish_row(state[i], joined.data() + i * dv, a.sinks ? a.sinks + head + h + i : nullptr,
                           a.pages->v_size, out + row * ldo + (head + h + i) * a.pages->v_size);
        }
    }
}

}  // namespace hfa
