// Mixture of experts: which expert gets which tokens, and sums in the order of experts' numbers, so that a token's
// result does not depend on its neighbours.
#pragma once

#include <vector>

#include "ops_math.h"

namespace hfa {

// Choices of `tokens` rows, `k` each in ascending order of experts, sorted by expert: choice c of all lies at
// place[c], those of expert e at starts[e] .. starts[e + 1] - 1, tokens in order.
struct Grouping {
    std::vector<int64_t> starts, place;

    Grouping(const int32_t* chosen, int64_t choices, int64_t experts) : starts(experts + 1), place(choices) {
        auto expert = [&](int64_t c) { return (uint32_t)chosen[c] < (uint64_t)experts ? chosen[c] : 0; };  // in any case
        for (int64_t c = 0; c < choices; ++c) ++starts[expert(c) + 1];
        for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
        std::vector<int64_t> next(starts.begin(), starts.end() - 1);
        for (int64_t c = 0; c < choices; ++c) place[c] = next[expert(c)]++;
    }
};

// Softmax over all experts, the k largest (of equal ones the first), by ascending expert; the weights are divided by
// their sum where `renormalize`.
static inline void route_row(const float* scores, int64_t experts, int64_t k, bool renormalize, int32_t* chosen,
                             float* weights) {
    std::vector<float> p(pad_lanes(experts), 0.0f);
    float top = -INFINITY, sum = 0.0f;
    for (int64_t e = 0; e < experts; ++e) top = scores[e] > top ? scores[e] : top;
    for (int64_t e = 0; e < experts; e += 16) {
        const int n = experts - e < 16 ? (int)(experts - e) : 16;
        store_as(p.data(), e, HFA_F32, vexp(load_as(scores, e, HFA_F32, n) - splat(top)), n);
    }
    for (int64_t e = 0; e < experts; ++e) sum += p[e];
    std::vector<char> taken(experts, 0);
    for (int64_t i = 0; i < k; ++i) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; ++e)
            if (!taken[e] && (best < 0 || p[e] > p[best])) best = e;
        taken[best] = 1;
    }
    float all = 0.0f;
    for (int64_t e = 0, i = 0; e < experts; ++e) {
        if (!taken[e]) continue;
        chosen[i] = (int32_t)e;
        weights[i++] = p[e] / sum;
        all += p[e] / sum;
    }
    for (int64_t i = 0; renormalize && i < k; ++i) weights[i] /= all;
}

// out = sum over the token's choices, in order, of weight * y[place].
static inline void mix_row(const float* weights, const int64_t* place, int64_t k, const float* y, int64_t width,
                           float* out) {
    for (int64_t d = 0; d < width; d += 16) {
        const int n = width - d < 16 ? (int)(width - d) : 16;
        Vf sum = splat(0.0f);
        for (int64_t i = 0; i < k; ++i)
            sum = sum + splat(weights[i]) * load_as(y, place[i] * width + d, HFA_F32, n);
        store_as(out, d, HFA_F32, sum, n);
    }
}

}  // namespace hfa
