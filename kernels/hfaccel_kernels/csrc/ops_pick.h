// The best logits of a row: what a step hands to sampling, and what the next step of a greedy run begins with.
//
// Values are those of the stored logits (rounded to their dtype); equal ones are ordered by id, so that the best is
// what an arg-max over the row gives. A NaN is
// never chosen; of a row of nothing else, id 0.
#pragma once

#include <algorithm>
#include <vector>

#include "plan.h"
#include "simd.h"

namespace hfa {

struct Best {
    float value;
    int64_t id;
    bool operator<(const Best& other) const {  // "better": the order of the result
        return value > other.value || (value == other.value && id < other.id);
    }
};

// best[0 .. top - 1] of columns [begin, end) of a row at `at`, best first. Where there are fewer, -inf and id `begin`.
static inline void best_of(const void* logits, int64_t at, int32_t dtype, int64_t begin, int64_t end, int top,
                           Best* best) {
    std::fill(best, best + top, Best{-INFINITY, begin});
    // best[] is a heap with the worst in front, so that only the few columns above it cost more than a comparison.
    float worst = -INFINITY;
    int64_t held = 0;
    for (int64_t c = begin; c < end; c += 16) {
        const int n = end - c < 16 ? (int)(end - c) : 16;
        Vf v = load_as(logits, at + c, dtype, n);
        if (n == 16 && held >= top && !(reduce_max(v) > worst)) continue;
        float lane[16];
        store(lane, v);
        for (int l = 0; l < n; ++l) {
            if (!(held < top || lane[l] > worst) || lane[l] != lane[l]) continue;
            std::pop_heap(best, best + top);
            best[top - 1] = {lane[l], c + l};
            std::push_heap(best, best + top);
            worst = best[0].value;
            ++held;
        }
    }
    std::sort_heap(best, best + top);
}

// The best of `parts` lists of `top`, the lists in order of their columns and each best first.
static inline void merge_best(const Best* lists, int parts, int top, float* values, int64_t* ids) {
    if (top == 1) {
        const Best* best = lists;
        for (int i = 1; i < parts; ++i)
            if (lists[i] < *best) best = lists + i;
        *values = best->value;
        *ids = best->id;
        return;
    }
    std::vector<int> next(parts, 0);
    for (int k = 0; k < top; ++k) {
        int from = -1;
        for (int i = 0; i < parts; ++i)
            if (next[i] < top && (from < 0 || lists[i * top + next[i]] < lists[from * top + next[from]])) from = i;
        const Best& best = lists[from * top + next[from]++];
        values[k] = best.value;
        ids[k] = best.id;
    }
}

}  // namespace hfa
