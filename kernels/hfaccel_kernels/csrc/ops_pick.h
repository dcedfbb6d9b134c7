// The best logits of a row: what a step hands to sampling, and what the next step of a greedy run begins with.
//
// Values are those of the stored logits (rounded to their dtype). The order is that of torch's arg-max, top-k and
// stable sort: NaN before all, then by value, -inf like any other; equal ones (and NaNs) by id.
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
        const bool nan = value != value, other_nan = other.value != other.value;
        if (nan != other_nan) return nan;
        return nan || value == other.value ? id < other.id : value > other.value;
    }
};

// best[0 .. top - 1] of columns [begin, end) of a row at `at`, best first. Where there are fewer columns, the rest is
// worse than any: -inf of id kNone.
constexpr int64_t kNone = INT64_MAX;

static inline void best_of(const void* logits, int64_t at, int32_t dtype, int64_t begin, int64_t end, int top,
                           Best* best) {
    // best[] is a heap with the worst in front, so that only the few columns above it cost more than a comparison.
    std::fill(best, best + top, Best{-INFINITY, kNone});
    constexpr int kVectors = 4;
    for (int64_t c = begin; c < end; c += 16 * kVectors) {
        float lane[16 * kVectors];
        const int n = end - c < 16 * kVectors ? (int)(end - c) : 16 * kVectors;
        if (n == 16 * kVectors) {
            Vf v[kVectors];
            for (int i = 0; i < kVectors; ++i) v[i] = load_as(logits, at + c + 16 * i, dtype);
            if (best[0].id != kNone) {  // a NaN shows in the sum, whatever `max` makes of it; so may infinities
                const float sum = reduce_add((v[0] + v[1]) + (v[2] + v[3]));
                const float most = reduce_max(max(max(v[0], v[1]), max(v[2], v[3])));
                if (sum == sum && !(most > best[0].value)) continue;
            }
            for (int i = 0; i < kVectors; ++i) store(lane + 16 * i, v[i]);
        } else {
            for (int i = 0; i < n; i += 16)
                store(lane + i, load_as(logits, at + c + i, dtype, n - i < 16 ? n - i : 16));
        }
        for (int l = 0; l < n; ++l) {
            const Best one{lane[l], c + l};
            if (!(one < best[0])) continue;
            std::pop_heap(best, best + top);
            best[top - 1] = one;
            std::push_heap(best, best + top);
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
