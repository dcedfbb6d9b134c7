// y = x W^T + bias, in shares of a caller's parallel region. The arithmetic is in matmul_packed.h and matmul_plain.h;
// here is only which thread does which tiles, and in which order.
#include <stdlib.h>

#include "hfa.h"
#include "matmul_plain.h"
#include "packed_shape.h"
#include "parallel.h"
#include "tiles.h"

namespace hfa {
namespace {

// Blocks of 16 rows whose weights, and tokens whose codes, are read again and again: a panel of weights stays in the
// second-level cache, a span of tokens in the first-level one.
constexpr int64_t kPanelBytes = 512 << 10, kSpanBytes = 28 << 10;

// A panel's spans one after another, in each all blocks of the panel. Threads take even shares of this order: whole
// panels where there are as many, so that each weight is read by one thread.
struct Blocking {
    int64_t blocks, panel, m, span, spans;

    Blocking(const HfaWeight& w, const PackedShape& shape, int64_t ldq, int64_t tokens, int nthreads) : m(tokens) {
        blocks = (w.n + 15) / 16;
        panel = shape.block_bytes ? kPanelBytes / shape.block_bytes : blocks;
        const int64_t even = (blocks + nthreads - 1) / nthreads;
        if (panel > even) panel = even;
        if (panel < 1) panel = 1;
        span = ldq ? kSpanBytes / ldq / 12 * 12 : m;
        if (span < 12) span = 12;
        spans = (m + span - 1) / span;
    }
    int64_t items() const { return blocks * spans; }
    // Block and first token of an item.
    void at(int64_t item, int64_t* block, int64_t* token) const {
        const int64_t first = item / (panel * spans) * panel, left = blocks - first;
        const int64_t width = left < panel ? left : panel, within = item - first * spans;
        *block = first + within % width;
        *token = within / width * span;
    }
};

TileFns tiles_of(const HfaWeight& w) {
    const bool asym = w.zero, wide = w.act_bits == 16;
    switch (w.code) {
        case HFA_NF4: return nf4_tiles(wide);
        case HFA_E4M3: return float_tiles(false);
        case HFA_E5M2: return float_tiles(true);
    }
    if (w.chunk == 0) return token_tiles();
    if (has_minimums(w.scale_dtype)) return minimum_tiles(w.bits, wide);
    switch (w.bits) {
        case 6: return int6_tiles(wide);
        case 5: return int5_tiles(wide);
        case 4: return int4_tiles(asym, wide);
        case 3: return int3_tiles(asym, wide);
        case 2: return int2_tiles(asym, wide);
        default: return int8_tiles(asym, wide);
    }
}

void packed(const HfaWeight* w, const HfaActs* acts, int64_t m, const Out& out, int tid, int nthreads) {
    const PackedShape shape(*w);
    const TileFns fns = tiles_of(*w);
    const Blocking blocking(*w, shape, acts->ldq, m, nthreads);
    const Range mine = share(blocking.items(), tid, nthreads);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
        int64_t b, t;
        blocking.at(item, &b, &t);
        const int64_t last = t + blocking.span < m ? t + blocking.span : m;
        const uint8_t* data = static_cast<const uint8_t*>(w->data) + b * shape.block_bytes;
        const void* scale = static_cast<const uint8_t*>(w->scale) + shape.scales_at(*w, b);
        const uint8_t* zero = w->zero ? w->zero + shape.zeros_at(b) : nullptr;
        const int rows = w->n - b * 16 < 16 ? (int)(w->n - b * 16) : 16;
        while (t < last) {
            int i = 0;
            while (!fns.of[i] || kTileSizes[i] > last - t) ++i;
            fns.of[i](w, data, scale, zero, acts, t, out, b * 16, rows);
            t += kTileSizes[i];
        }
    }
}

}  // namespace
}  // namespace hfa

HFA_EXPORT void hfa_matmul(const HfaWeight* w, const HfaActs* acts, const float* x, int64_t ldx, int64_t m, void* y,
                           int32_t y_dtype, int64_t ldy, int tid, int nthreads) {
    using namespace hfa;
    const Out out{y, ldy, y_dtype};
    if (w->kind != HFA_PACKED) return plain(w, x, ldx, m, y, y_dtype, ldy, tid, nthreads);
    packed(w, acts, m, out, tid, nthreads);
}

HFA_EXPORT int hfa_linear(const HfaWeight* w, const void* x, int32_t x_dtype, int64_t ldx, int64_t m, void* y,
                          int32_t y_dtype, int64_t ldy, int nthreads) {
    using namespace hfa;
    if (m == 0 || w->n == 0) return 0;
    const bool is_packed = w->kind == HFA_PACKED, convert = !is_packed && x_dtype != HFA_F32;
    // Waking a thread takes some microseconds: one more for each 2^17 weights read, or products of four tokens.
    const int64_t worth = 1 + (w->n * w->k * (m + 3) / 4 >> 17);
    if (nthreads > worth) nthreads = (int)worth;
    // Few activations are quantized by each thread for itself: a microsecond, where a barrier may take more.
    const bool each = is_packed && m * w->k <= 4096;
    int64_t bytes = is_packed ? hfa_acts_bytes(w, m) : convert ? m * w->k * 4 : 0;
    bytes = (bytes + 63) / 64 * 64;
    void* scratch = nullptr;
    if (bytes && posix_memalign(&scratch, 64, bytes * (each ? nthreads : 1))) return -1;
    Barrier barrier;
    parallel(nthreads, [&](int tid, int n) {
        const float* xf = static_cast<const float*>(x);
        int64_t ld = ldx;
        HfaActs acts{};
        if (is_packed) {
            hfa_acts_view(w, static_cast<uint8_t*>(scratch) + (each ? tid * bytes : 0), m, &acts);
            hfa_quantize_rows(w, x, x_dtype, ldx, m, &acts, each ? 0 : tid, each ? 1 : n);
            if (!each) barrier.wait(n);
        } else if (convert) {
            float* to = static_cast<float*>(scratch);
            const Range mine = share(m * ((w->k + 15) / 16), tid, n);
            for (int64_t i = mine.begin; i < mine.end; ++i) {
                const int64_t token = i / ((w->k + 15) / 16), at = i % ((w->k + 15) / 16) * 16;
                const int left = w->k - at < 16 ? (int)(w->k - at) : 16;
                store_as(to, token * w->k + at, HFA_F32, load_as(x, token * ldx + at, x_dtype, left), left);
            }
            barrier.wait(n);
            xf = to;
            ld = w->k;
        }
        hfa_matmul(w, &acts, xf, ld, m, y, y_dtype, ldy, tid, n);
    });
    free(scratch);
    return 0;
}
