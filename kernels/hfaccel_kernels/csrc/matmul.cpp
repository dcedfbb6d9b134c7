// y = x W^T + bias, in shares of a caller's parallel region. The arithmetic is in matmul_packed.h and matmul_plain.h;
// here are only the tiles: which thread does which 16 rows of which tokens.
#include <stdlib.h>

#include "hfa.h"
#include "matmul_packed.h"
#include "matmul_plain.h"
#include "packed_shape.h"
#include "parallel.h"
#include "simd.h"

namespace hfa {
namespace {

struct Out {
    void* y;
    int64_t ld;
    int32_t dtype;
};

// 16 rows of one token, `rows` of them real.
inline void finish(const HfaWeight* w, const Out& out, int64_t token, int64_t row, int rows, Vf v) {
    if (w->bias) v = v + load_as(w->bias, row, w->bias_dtype, rows);
    const int64_t at = token * out.ld + row;
    store_as(out.y, at, out.dtype, v, rows);
}

// What the tiles of a format run: of T tokens from `token` on, 16 rows.
template <int FORMAT, bool ASYM, bool WIDE> struct Integers {
    static constexpr int most = WIDE ? kTileTokens * 2 / 3 : kTileTokens;
    template <int T>
    static inline void dot(const HfaWeight* w, const uint8_t* data, const void* scale, const uint8_t* zero,
                           const HfaActs* acts, int64_t token, Vf* out) {
        block_dot<FORMAT, ASYM, WIDE, T>(w, data, scale, zero, acts, token, out);
    }
};
struct PerToken {
    static constexpr int most = kTileTokens;
    template <int T>
    static inline void dot(const HfaWeight* w, const uint8_t* data, const void* scale, const uint8_t*,
                           const HfaActs* acts, int64_t token, Vf* out) {
        token_dot<T>(w, data, scale, acts, token, out);
    }
};
template <bool E5M2> struct Floats {
    static constexpr int most = kTileTokens;
    template <int T>
    static inline void dot(const HfaWeight* w, const uint8_t* data, const void* scale, const uint8_t*,
                           const HfaActs* acts, int64_t token, Vf* out) {
        float_dot<E5M2, T>(w, data, scale, acts, token, out);
    }
};

using BlockFn = void (*)(const HfaWeight*, const uint8_t*, const void*, const uint8_t*, const HfaActs*, int64_t,
                         const Out&, int64_t, int);

template <class Format, int T>
void packed_tile(const HfaWeight* w, const uint8_t* data, const void* scale, const uint8_t* zero, const HfaActs* acts,
                 int64_t token, const Out& out, int64_t row, int rows) {
    Vf v[T];
    Format::template dot<T>(w, data, scale, zero, acts, token, v);
    for (int t = 0; t < T; ++t) finish(w, out, token + t, row, rows, v[t]);
}

// Tokens of a tile: 12, 8, 4, 2 or 1, as many as the registers of the instruction set hold.
template <class Format, int T> int tile_if(int64_t left, BlockFn* fn) {
    if constexpr (T > Format::most && T > 1) return 0;
    else {
        if (left < T) return 0;
        *fn = packed_tile<Format, T>;
        return T;
    }
}
template <class Format> int tile(int64_t left, BlockFn* fn) {
    if (const int t = tile_if<Format, 12>(left, fn)) return t;
    if (const int t = tile_if<Format, 8>(left, fn)) return t;
    if (const int t = tile_if<Format, 4>(left, fn)) return t;
    if (const int t = tile_if<Format, 2>(left, fn)) return t;
    return tile_if<Format, 1>(left, fn);
}

// Tokens whose codes stay in the second-level cache while all weights pass by.
constexpr int64_t kActBytes = 384 << 10;

template <class Format>
void packed(const HfaWeight* w, const HfaActs* acts, int64_t m, const Out& out, int tid, int nthreads) {
    const int64_t blocks = (w->n + 15) / 16;
    const PackedShape shape(*w);
    int64_t span = acts->ldq ? kActBytes / acts->ldq / 12 * 12 : m;
    if (span < 12) span = 12;
    const int64_t spans = (m + span - 1) / span;
    const Range mine = share(blocks * spans, tid, nthreads);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
        const int64_t b = item % blocks, first = item / blocks * span;
        const int64_t last = first + span < m ? first + span : m;
        const uint8_t* data = static_cast<const uint8_t*>(w->data) + b * shape.block_bytes;
        const void* scale = static_cast<const uint8_t*>(w->scale) + shape.scales_at(*w, b);
        const uint8_t* zero = w->zero ? w->zero + shape.zeros_at(b) : nullptr;
        const int rows = w->n - b * 16 < 16 ? (int)(w->n - b * 16) : 16;
        for (int64_t t = first; t < last;) {
            BlockFn fn;
            const int n = tile<Format>(last - t, &fn);
            fn(w, data, scale, zero, acts, t, out, b * 16, rows);
            t += n;
        }
    }
}

template <int FORMAT>
void integers(const HfaWeight* w, const HfaActs* acts, int64_t m, const Out& out, int tid, int nthreads) {
    if (w->act_bits == 16) {
        if (w->zero) packed<Integers<FORMAT, true, true>>(w, acts, m, out, tid, nthreads);
        else packed<Integers<FORMAT, false, true>>(w, acts, m, out, tid, nthreads);
    } else {
        if (w->zero) packed<Integers<FORMAT, true, false>>(w, acts, m, out, tid, nthreads);
        else packed<Integers<FORMAT, false, false>>(w, acts, m, out, tid, nthreads);
    }
}

}  // namespace
}  // namespace hfa

HFA_EXPORT void hfa_matmul(const HfaWeight* w, const HfaActs* acts, const float* x, int64_t ldx, int64_t m, void* y,
                           int32_t y_dtype, int64_t ldy, int tid, int nthreads) {
    using namespace hfa;
    const Out out{y, ldy, y_dtype};
    if (w->kind != HFA_PACKED) return plain(w, x, ldx, m, y, y_dtype, ldy, tid, nthreads);
    switch (w->code) {
        case HFA_NF4:
            if (w->act_bits == 16) return packed<Integers<kNf4, false, true>>(w, acts, m, out, tid, nthreads);
            return packed<Integers<kNf4, false, false>>(w, acts, m, out, tid, nthreads);
        case HFA_E4M3: return packed<Floats<false>>(w, acts, m, out, tid, nthreads);
        case HFA_E5M2: return packed<Floats<true>>(w, acts, m, out, tid, nthreads);
    }
    if (w->chunk == 0) return packed<PerToken>(w, acts, m, out, tid, nthreads);
    switch (w->bits) {
        case 8: return integers<8>(w, acts, m, out, tid, nthreads);
        case 4: return integers<4>(w, acts, m, out, tid, nthreads);
        case 3: return integers<3>(w, acts, m, out, tid, nthreads);
        case 2: return integers<2>(w, acts, m, out, tid, nthreads);
    }
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
