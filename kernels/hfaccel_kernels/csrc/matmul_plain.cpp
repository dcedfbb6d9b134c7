// Tiles of the plain matmul; the arithmetic is in matmul_plain.h.
#include "matmul_plain.h"

#include "parallel.h"

namespace hfa {
namespace {

template <int DTYPE, int T>
void rows16(const HfaWeight* w, int64_t row, int rows, const float* x, int64_t ldx, float* out) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) plain_tile<DTYPE, 4, T>(w, row + r, x, ldx, out + r);
    for (; r < rows; ++r) plain_tile<DTYPE, 1, T>(w, row + r, x, ldx, out + r);
}

template <int DTYPE>
void plain_dtype(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy,
                 int add, int tid, int nthreads) {
    const int64_t blocks = (w->n + 15) / 16;
    const Range mine = share(blocks, tid, nthreads);
    float out[4 * 16] = {};
    for (int64_t b = mine.begin; b < mine.end; ++b) {
        const int64_t row = b * 16;
        const int rows = w->n - row < 16 ? (int)(w->n - row) : 16;
        for (int64_t t = 0; t < m;) {
            const int n = m - t >= 4 ? 4 : 1;
            if (n == 4) rows16<DTYPE, 4>(w, row, rows, x + t * ldx, ldx, out);
            else rows16<DTYPE, 1>(w, row, rows, x + t * ldx, ldx, out);
            for (int i = 0; i < n; ++i) {
                Vf v = load(out + i * 16);
                if (w->bias) v = v + load_as(w->bias, row, w->bias_dtype, rows);
                if (add) v = load_as(y, (t + i) * ldy + row, y_dtype, rows) + v;
                store_as(y, (t + i) * ldy + row, y_dtype, v, rows);
            }
            t += n;
        }
    }
}

}  // namespace

void plain(const HfaWeight* w, const float* x, int64_t ldx, int64_t m, void* y, int32_t y_dtype, int64_t ldy, int add,
           int tid, int nthreads) {
    switch (w->kind) {
        case HFA_PLAIN_F32: return plain_dtype<HFA_F32>(w, x, ldx, m, y, y_dtype, ldy, add, tid, nthreads);
        case HFA_PLAIN_BF16: return plain_dtype<HFA_BF16>(w, x, ldx, m, y, y_dtype, ldy, add, tid, nthreads);
        case HFA_PLAIN_F16: return plain_dtype<HFA_F16>(w, x, ldx, m, y, y_dtype, ldy, add, tid, nthreads);
    }
}

}  // namespace hfa
