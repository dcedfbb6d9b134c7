// Row-major fp32, bf16 or fp16 weights read in place, times fp32 activations.
//
//   lane l of a 16-lane accumulator takes the elements k = l mod 16 in order, one fma each (a last short step is filled
//   with zeros); at the end the lanes are added in halves (reduce_add). Nothing else decides a bit of y[t, r].
#pragma once

#include "simd.h"

namespace hfa {

// What a tile does beside its sums: ask for the four rows behind its own; that and store its own as fp32, ldk elements
// apart, the last 16 filled up with zeros; or nothing, they come from the cache.
enum class From { memory, keep, cache };

// Four rows at `rows` (ld elements apart) times T tokens -> out[t * ldo + r].
template <int DTYPE, int T, From FROM = From::memory>
static inline void plain_tile(const void* rows, int64_t ld, int64_t k, const float* x, int64_t ldx, float* out,
                              int64_t ldo, float* kept = nullptr, int64_t ldk = 0) {
    Vf acc[T][4];
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < 4; ++r) acc[t][r] = splat(0.0f);
    const int64_t whole = k / 16 * 16;
    // A row is too short a stream for the hardware's own prefetcher.
    constexpr int64_t size = DTYPE == HFA_F32 ? 4 : 2, kLine = 64 / size;
    const char* next = static_cast<const char*>(rows) + 4 * ld * size;
    for (int64_t at = 0; at < whole; at += 16) {
        if (FROM != From::cache && at % kLine == 0)
            for (int r = 0; r < 4; ++r) HFA_PREFETCH(next + (r * ld + at) * size);
        Vf w[4];
        for (int r = 0; r < 4; ++r) {
            w[r] = load_as(rows, r * ld + at, DTYPE);
            if (FROM == From::keep) store(kept + r * ldk + at, w[r]);
        }
        for (int t = 0; t < T; ++t) {
            const Vf xv = load(x + t * ldx + at);
            for (int r = 0; r < 4; ++r) acc[t][r] = fma(w[r], xv, acc[t][r]);
        }
    }
    if (const int left = (int)(k - whole)) {
        Vf last[T][4];  // else all sums would go through memory, whatever k is
        memcpy(last, acc, sizeof(acc));
        for (int r = 0; r < 4; ++r) {
            const Vf wv = load_as(rows, r * ld + whole, DTYPE, left);
            if (FROM == From::keep) store(kept + r * ldk + whole, wv);
            for (int t = 0; t < T; ++t) last[t][r] = fma(wv, load_as(x, t * ldx + whole, HFA_F32, left), last[t][r]);
        }
        for (int t = 0; t < T; ++t) reduce_add4(last[t], out + t * ldo);
        return;
    }
    for (int t = 0; t < T; ++t) reduce_add4(acc[t], out + t * ldo);
}

void plain(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy,
           int tid, int nthreads);

}  // namespace hfa
