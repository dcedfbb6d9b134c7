// Tiles of the plain matmul; the arithmetic is in matmul_plain.h.
#include "matmul_plain.h"

#include "parallel.h"

namespace hfa {
namespace {

// Rows are converted to fp32 from so many tokens on, four at a time, and from so many on in panels of so many floats,
// on the stack.
constexpr int64_t kConvertTokens = 8, kPanelTokens = 24, kPanelFloats = 64 << 10;

template <int DTYPE, int T> int tile_if(int64_t left, const void* rows, int64_t ld, int64_t k, const float* x,
                                        int64_t ldx, float* out) {
    if constexpr (T > kPlainTokens) return 0;
    else {
        if (left < T) return 0;
        plain_tile<DTYPE, T>(rows, ld, k, x, ldx, out);
        return T;
    }
}

// As many tokens as one tile takes; returns how many. 8 are two tiles of 4 rather than 6 and 2.
template <int DTYPE>
int tile(int64_t left, const void* rows, int64_t ld, int64_t k, const float* x, int64_t ldx, float* out) {
    if (left != 8)
        if (const int t = tile_if<DTYPE, 6>(left, rows, ld, k, x, ldx, out)) return t;
    if (const int t = tile_if<DTYPE, 4>(left, rows, ld, k, x, ldx, out)) return t;
    if (const int t = tile_if<DTYPE, 2>(left, rows, ld, k, x, ldx, out)) return t;
    return tile_if<DTYPE, 1>(left, rows, ld, k, x, ldx, out);
}

// y[t, first .. first + count) of up to four sums, with the bias.
void put(const HfaWeight* w, const float* sums, int64_t first, int count, void* y, int32_t y_dtype, int64_t at) {
    if (count == 4 && y_dtype == HFA_F32 && !w->bias) {
        memcpy(static_cast<float*>(y) + at, sums, 4 * sizeof(float));
        return;
    }
    float four[16] = {};
    memcpy(four, sums, count * sizeof(float));
    Vf v = load(four);
    if (w->bias) v = v + load_as(w->bias, first, w->bias_dtype, count);
    store_as(y, at, y_dtype, v, count);
}

// Few tokens: rows are read in place, once.
template <int DTYPE>
void stream(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy,
            const Range& mine) {
    constexpr int64_t size = DTYPE == HFA_F32 ? 4 : 2;
    for (int64_t row = mine.begin * 4; row < mine.end * 4 && row < w->n; row += 4) {
        // The last four rows of a ragged matrix start earlier: rows done twice give the same bits, only new ones
        // are stored. Fewer than four rows in all are taken one by one (ld 0).
        const int count = w->n - row < 4 ? (int)(w->n - row) : 4;
        const int64_t base = w->n < 4 ? row : w->n - row < 4 ? w->n - 4 : row;
        const int parts = w->n < 4 ? count : 1, skip = (int)(row - base);
        for (int part = 0; part < parts; ++part) {
            const void* rows = static_cast<const uint8_t*>(w->data) + (base + part) * w->ld * size;
            const int64_t ld = w->n < 4 ? 0 : w->ld;
            float out[kPlainTokens * 4];
            for (int64_t t = 0; t < m;) {
                const int n = tile<DTYPE>(m - t, rows, ld, w->k, x + t * ldx, ldx, out);
                for (int i = 0; i < n; ++i, ++t)
                    put(w, out + i * 4 + skip, row + part, parts > 1 ? 1 : count, y, y_dtype, t * ldy + row + part);
            }
        }
    }
}

// More tokens: rows are converted to fp32 once. A panel of them lies in the second-level cache, and each tile of tokens
// goes over all of it out of the first-level one.
template <int DTYPE>
void panels(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy,
            const Range& mine) {
    alignas(64) float panel[kPanelFloats];
    const int64_t wide = (w->k + 15) / 16 * 16, end = mine.end * 4 < w->n ? mine.end * 4 : w->n;
    const int64_t height = m < kPanelTokens ? 4 : kPanelFloats / (4 * wide) * 4;
    for (int64_t first = mine.begin * 4; first < end; first += height) {
        const int64_t last = end - first < height ? end : first + height;
        for (int64_t row = first; row < (last + 3) / 4 * 4; ++row)  // what fills up the last four is not stored
            for (int64_t at = 0; at < w->k; at += 16)
                store(panel + (row - first) * wide + at,
                      load_as(w->data, (row < w->n ? row : w->n - 1) * w->ld + at, DTYPE,
                              w->k - at < 16 ? (int)(w->k - at) : 16));
        for (int64_t t = 0; t < m;) {
            int n = 0;
            for (int64_t row = first; row < last; row += 4) {
                float out[kPlainTokens * 4];
                n = tile<HFA_F32>(m - t, panel + (row - first) * wide, wide, w->k, x + t * ldx, ldx, out);
                for (int i = 0; i < n; ++i)
                    put(w, out + i * 4, row, last - row < 4 ? (int)(last - row) : 4, y, y_dtype, (t + i) * ldy + row);
            }
            t += n;
        }
    }
}

template <int DTYPE>
void plain_dtype(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy,
                 int tid, int nthreads) {
    const Range mine = share((w->n + 3) / 4, tid, nthreads);
    const bool fits = w->k > 0 && w->k <= kPanelFloats / 4;
    const bool many = fits && m >= (DTYPE == HFA_F32 ? kPanelTokens : kConvertTokens);
    (many ? panels<DTYPE> : stream<DTYPE>)(w, x, ldx, m, y, y_dtype, ldy, mine);
}

}  // namespace

void plain(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy,
           int tid, int nthreads) {
    switch (w->kind) {
        case HFA_PLAIN_F32: return plain_dtype<HFA_F32>(w, x, ldx, m, y, y_dtype, ldy, tid, nthreads);
        case HFA_PLAIN_BF16: return plain_dtype<HFA_BF16>(w, x, ldx, m, y, y_dtype, ldy, tid, nthreads);
        case HFA_PLAIN_F16: return plain_dtype<HFA_F16>(w, x, ldx, m, y, y_dtype, ldy, tid, nthreads);
    }
}

}  // namespace hfa
