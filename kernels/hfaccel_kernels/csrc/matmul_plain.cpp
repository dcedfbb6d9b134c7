// Tiles of the plain matmul; the arithmetic is in matmul_plain.h.
#include "matmul_plain.h"

#include "parallel.h"

namespace hfa {
namespace {

// bf16 and fp16 rows are kept as fp32 where they meet more than two tiles of tokens, four at a time; those and fp32
// rows from so many tokens on in panels of so many floats, on the stack.
constexpr int64_t kPanelTokens = 24, kPanelFloats = 64 << 10;

// The next tile's tokens: all tiles are as even as can be, since one of few tokens waits for the weights.
int tile_tokens(int64_t left) {
    const int64_t tiles = (left + kPlainTokens - 1) / kPlainTokens;
    return (int)((left + tiles - 1) / tiles);
}

template <int DTYPE, From FROM, int T = kPlainTokens>
void tile(int n, const void* rows, int64_t ld, int64_t k, const float* x, int64_t ldx, float* out,
          int64_t ldo, float* kept = nullptr, int64_t ldk = 0) {
    if constexpr (T > 1)
        if (n < T) return tile<DTYPE, FROM, T - 1>(n, rows, ld, k, x, ldx, out, ldo, kept, ldk);
    plain_tile<DTYPE, T, FROM>(rows, ld, k, x, ldx, out, ldo, kept, ldk);
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
                const int n = tile_tokens(m - t);
                tile<DTYPE, From::memory>(n, rows, ld, w->k, x + t * ldx, ldx, out, 4);
                for (int i = 0; i < n; ++i, ++t)
                    put(w, out + i * 4 + skip, row + part, parts > 1 ? 1 : count, y, y_dtype, t * ldy + row + part);
            }
        }
    }
}

// More tokens: the first tile of them keeps the rows as fp32. A panel of those lies in the second-level cache, and
// each tile goes over all of it out of the first-level one; meanwhile the next panel's rows are asked for, a few lines
// with each tile.
template <int DTYPE>
void panels(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy,
            const Range& mine) {
    alignas(64) float panel[kPanelFloats];
    constexpr int64_t size = DTYPE == HFA_F32 ? 4 : 2;
    const uint8_t* data = static_cast<const uint8_t*>(w->data);
    const int64_t wide = (w->k + 15) / 16 * 16, end = mine.end * 4 < w->n ? mine.end * 4 : w->n;
    const int64_t most = m < kPanelTokens ? 4 : kPanelFloats / (4 * wide) * 4;
    const int64_t parts = (end - mine.begin * 4 + most - 1) / most;  // panels, as even as can be
    const int64_t height = parts ? (mine.end - mine.begin + parts - 1) / parts * 4 : 4;
    for (int64_t first = mine.begin * 4; first < end; first += height) {
        const int64_t last = end - first < height ? end : first + height;
        const int64_t tiles = (last - first + 3) / 4 * ((m + kPlainTokens - 1) / kPlainTokens);
        const int64_t after = (w->n - last < height ? w->n - last : height) * w->ld * size;
        const int64_t step = (after + 64 * tiles - 1) / (64 * tiles) * 64;
        int64_t asked = 0;
        for (int64_t t = 0; t < m;) {
            const int n = tile_tokens(m - t);
            for (int64_t row = first; row < last; row += 4) {
                for (const int64_t to = asked + step; asked < to && asked < after; asked += 64)
                    HFA_PREFETCH_FAR(data + last * w->ld * size + asked);
                // The last four rows of a ragged matrix start earlier, and only new ones are stored.
                const int64_t base = w->n - row < 4 ? w->n - 4 : row;
                const uint8_t* rows = data + base * w->ld * size;
                float sums[kPlainTokens * 4], *kept = panel + (row - first) * wide;
                const bool direct = last - row >= 4 && y_dtype == HFA_F32 && !w->bias;
                float* out = direct ? static_cast<float*>(y) + t * ldy + row : sums;
                const int64_t ldo = direct ? ldy : 4;
                if (t == 0) tile<DTYPE, From::keep>(n, rows, w->ld, w->k, x, ldx, out, ldo, kept, wide);
                else tile<HFA_F32, From::cache>(n, kept, wide, w->k, x + t * ldx, ldx, out, ldo);
                for (int i = 0; i < n && !direct; ++i)
                    put(w, sums + i * 4 + (row - base), row, last - row < 4 ? (int)(last - row) : 4, y, y_dtype,
                        (t + i) * ldy + row);
            }
            t += n;
        }
    }
}

template <int DTYPE>
void plain_dtype(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy,
                 int tid, int nthreads) {
    const Range mine = share((w->n + 3) / 4, tid, nthreads);
    const bool fits = w->k > 0 && w->k <= kPanelFloats / 4 && w->n >= 4;
    const bool many = fits && (DTYPE == HFA_F32 ? m >= kPanelTokens : m > 2 * kPlainTokens);
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
