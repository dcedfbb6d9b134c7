// Tiles of the plain matmul; the arithmetic is in matmul_plain.h.
#include "matmul_plain.h"

#include "parallel.h"

namespace hfa {
namespace {

// From this many tokens on, four rows are converted to fp32 once and kept on the stack, if they fit.
constexpr int64_t kConvertTokens = 8, kConvertK = 8192;

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

template <int DTYPE>
void plain_dtype(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy,
                 int tid, int nthreads) {
    constexpr int64_t size = DTYPE == HFA_F32 ? 4 : 2;
    const bool convert = DTYPE != HFA_F32 && m >= kConvertTokens && w->k <= kConvertK;
    float converted[DTYPE == HFA_F32 ? 1 : 4 * kConvertK];
    const int64_t wide = (w->k + 15) / 16 * 16;
    const Range mine = share((w->n + 3) / 4, tid, nthreads);
    for (int64_t row = mine.begin * 4; row < mine.end * 4 && row < w->n; row += 4) {
        // The last four rows of a ragged matrix start earlier: rows done twice give the same bits, only new ones
        // are stored. Fewer than four rows in all are taken one by one (ld 0).
        const int count = w->n - row < 4 ? (int)(w->n - row) : 4;
        const int64_t base = w->n < 4 ? row : w->n - row < 4 ? w->n - 4 : row;
        const int parts = w->n < 4 ? count : 1, skip = (int)(row - base);
        for (int part = 0; part < parts; ++part) {
            const void* rows = static_cast<const uint8_t*>(w->data) + (base + part) * w->ld * size;
            const int64_t ld = w->n < 4 ? 0 : w->ld;
            for (int r = 0; convert && r < 4; ++r)
                for (int64_t at = 0; at < w->k; at += 16)
                    store(converted + r * wide + at,
                          load_as(rows, r * ld + at, DTYPE, w->k - at < 16 ? (int)(w->k - at) : 16));
            float out[kPlainTokens * 4];
            for (int64_t t = 0; t < m;) {
                const int n = convert ? tile<HFA_F32>(m - t, converted, wide, w->k, x + t * ldx, ldx, out)
                                      : tile<DTYPE>(m - t, rows, ld, w->k, x + t * ldx, ldx, out);
                const int64_t first = row + part;
                const int real = parts > 1 ? 1 : count;
                for (int i = 0; i < n; ++i, ++t) {
                    float four[16] = {};
                    memcpy(four, out + i * 4 + skip, real * sizeof(float));
                    Vf v = load(four);
                    if (w->bias) v = v + load_as(w->bias, first, w->bias_dtype, real);
                    store_as(y, t * ldy + first, y_dtype, v, real);
                }
            }
        }
    }
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
