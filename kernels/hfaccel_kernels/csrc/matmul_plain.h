// Row-major fp32, bf16 or fp16 weights read in place, times fp32 activations.
//
//   lane l of a 16-lane accumulator takes the elements k = l mod 16 in order, one fma each (a last short step is filled
//   with zeros); at the end the lanes are added in halves (reduce_add). Nothing else decides a bit of y[t, r].
#pragma once

#include "simd.h"

namespace hfa {

// One tile: R rows x T tokens. Rows beyond the matrix are never asked for.
template <int DTYPE, int R, int T>
static inline void plain_tile(const HfaWeight* w, int64_t row, const float* x, int64_t ldx, float* out) {
    constexpr int kBytes = DTYPE == HFA_F32 ? 4 : 2;
    const uint8_t* base = static_cast<const uint8_t*>(w->data) + row * w->ld * kBytes;
    Vf acc[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) acc[r][t] = splat(0.0f);
    const int64_t whole = w->k / 16 * 16;
    for (int64_t at = 0; at < whole; at += 16) {
        Vf xv[T];
        for (int t = 0; t < T; ++t) xv[t] = load(x + t * ldx + at);
        for (int r = 0; r < R; ++r) {
            const Vf wv = load_as(base, r * w->ld + at, DTYPE);
            for (int t = 0; t < T; ++t) acc[r][t] = fma(wv, xv[t], acc[r][t]);
        }
    }
    if (const int left = (int)(w->k - whole)) {
        for (int r = 0; r < R; ++r) {
            const Vf wv = load_as(base, r * w->ld + whole, DTYPE, left);
            for (int t = 0; t < T; ++t) acc[r][t] = fma(wv, load_as(x + t * ldx, whole, HFA_F32, left), acc[r][t]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) out[t * 16 + r] = reduce_add(acc[r][t]);
}

void plain(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy, int add,
           int tid, int nthreads);

}  // namespace hfa
