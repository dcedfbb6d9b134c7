// Attention of a few query rows to one block of keys (attend_block.cpp), and how a block's result joins others.
// ops_attend.h says in which order.
#pragma once

#include "ops_pages.h"
#include "plan.h"

namespace hfa {

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

// fp32 tiles of one block: K and V (where they are converted), and the sums of its rows.
struct Tiles {
    float *kt, *vt, *part;  // [kKeys, D] in the order of scores, [kKeys, Dv], [kSubRows, Dv]
};

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

// One query row [pad_lanes(D)], zeros behind D, in the order in which scores take it.
void arrange_query(const HfaPages& p, float* q);

// n <= kSubRows rows (of one sequence and KV head) against one block: m, l, and o [n, dv] in tiles.part. With `direct`
// keys and values are read
// out of their pages, else out of the tiles.
void block_rows(int n, const AttendArgs& a, const Tiles& tiles, const Block& b, int64_t g, int64_t first_slot,
                const int64_t* slot_of, const int64_t* head_of, const float* q, bool direct, float* m, float* l);

}  // namespace hfa
