// A thread's columns of a product: blocks of a weight as a weight of its own, and the product of a weight that is
// stored the other way round.
#pragma once

#include "packed_shape.h"
#include "simd.h"

namespace hfa {

// The 16-row blocks [begin, end) of a weight as a weight of its own: a thread's columns of the product.
static inline HfaWeight part_of(const HfaWeight& w, int64_t begin, int64_t end) {
    HfaWeight part = w;
    const int64_t row = begin * 16, last = end * 16 < w.n ? end * 16 : w.n;
    part.n = last > row ? last - row : 0;
    if (w.bias) part.bias = static_cast<const char*>(w.bias) + row * (w.bias_dtype == HFA_F32 ? 4 : 2);
    if (w.kind != HFA_PACKED) {
        part.data = static_cast<const char*>(w.data) + row * w.ld * (w.kind == HFA_PLAIN_F32 ? 4 : 2);
        return part;
    }
    const PackedShape shape(w);
    part.data = static_cast<const char*>(w.data) + begin * shape.block_bytes;
    part.scale = static_cast<const char*>(w.scale) + shape.scales_at(w, begin);
    if (w.zero) part.zero = w.zero + shape.zeros_at(begin);
    return part;
}

// y[:, columns] = x W + bias for W [k, n] (Conv1D): the lanes are columns, k runs in order.
static inline void matmul_kn(const HfaWeight& w, const float* x, int64_t ldx, int64_t m, float* y, int64_t ldy,
                             int64_t begin, int64_t end) {
    const int32_t dtype = w.kind == HFA_PLAIN_F32 ? HFA_F32 : w.kind == HFA_PLAIN_BF16 ? HFA_BF16 : HFA_F16;
    constexpr int kTokens = 4;
    for (int64_t c = begin; c < end; c += 32) {
        const int n0 = end - c < 16 ? (int)(end - c) : 16;
        const int n1 = end - c - 16 < 0 ? 0 : end - c - 16 < 16 ? (int)(end - c - 16) : 16;
        for (int64_t t = 0; t < m; t += kTokens) {
            const int tokens = m - t < kTokens ? (int)(m - t) : kTokens;
            Vf acc[kTokens][2];
            for (int i = 0; i < kTokens; ++i) acc[i][0] = acc[i][1] = splat(0.0f);
            for (int64_t k = 0; k < w.k; ++k) {
                const Vf a = load_as(w.data, k * w.ld + c, dtype, n0);
                const Vf b = n1 ? load_as(w.data, k * w.ld + c + 16, dtype, n1) : splat(0.0f);
                for (int i = 0; i < kTokens; ++i) {
                    const Vf s = splat(i < tokens ? x[(t + i) * ldx + k] : 0.0f);
                    acc[i][0] = fma(s, a, acc[i][0]);
                    acc[i][1] = fma(s, b, acc[i][1]);
                }
            }
            for (int i = 0; i < tokens; ++i) {
                for (int h = 0; h < 2; ++h) {
                    const int n = h ? n1 : n0;
                    if (!n) continue;
                    Vf v = acc[i][h];
                    if (w.bias) v = v + load_as(w.bias, c + h * 16, w.bias_dtype, n);
                    store_as(y, (t + i) * ldy + c + h * 16, HFA_F32, v, n);
                }
            }
        }
    }
}

}  // namespace hfa
