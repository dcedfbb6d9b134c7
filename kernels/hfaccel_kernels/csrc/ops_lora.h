// LoRA beside a matrix product: y[t] += scale[s] * (x[t] a[s]^T) b[s] for a token whose adapter is in slot s
// (hfaccel/lora/slots.py). Tokens next to each other with one adapter read it once; each token's sums run in one
// order, whatever stands beside it.
#pragma once

#include "matmul_plain.h"

namespace hfa {

// One record's table: matrices [slots, rank, width] of `dtype`, and what of them each slot uses.
struct LoraTable {
    const char* data;
    int32_t dtype;
    int64_t rank, width;
    const float* scale;  // shrink only
    const int32_t* ranks;

    int64_t size() const { return dtype == HFA_F32 ? 4 : 2; }
    const char* at(int64_t slot) const { return data + slot * rank * width * size(); }
};

// Calls run(slot, rank, first, last) for each run of tokens of [begin, end) with one adapter that names the module.
template <class SlotOf, class Run>
static inline void lora_runs(const LoraTable& table, int64_t begin, int64_t end, SlotOf slot_of, Run run) {
    for (int64_t t = begin; t < end;) {
        const int32_t slot = slot_of(t);
        int64_t last = t + 1;
        while (last < end && slot_of(last) == slot) ++last;
        const int64_t rank = slot < 0 ? 0 : table.ranks[slot];
        if (rank > 0) run(slot, rank, t, last);
        t = last;
    }
}

// out [., rank of the slot] = scale * x a^T for tokens [first, last); the dot products of matmul_plain.h.
static inline void lora_shrink(const LoraTable& table, int32_t slot, int64_t rank, const float* x, int64_t ldx,
                               int64_t first, int64_t last, float* out, int64_t ldo) {
    HfaWeight a{};
    a.data = table.at(slot);
    a.kind = table.dtype == HFA_F32 ? HFA_PLAIN_F32 : table.dtype == HFA_BF16 ? HFA_PLAIN_BF16 : HFA_PLAIN_F16;
    a.n = rank;
    a.k = a.ld = table.width;
    plain(&a, x + first * ldx, ldx, last - first, out + first * ldo, HFA_F32, ldo, 0, 1);
    const Vf scale = splat(table.scale[slot]);
    for (int64_t t = first; t < last; ++t)
        for (int64_t r = 0; r < rank; r += 16) {
            const int n = rank - r < 16 ? (int)(rank - r) : 16;
            store_as(out, t * ldo + r, HFA_F32, load_as(out, t * ldo + r, HFA_F32, n) * scale, n);
        }
}

// y[first .. last, begin .. end) += h b[:, offset ..]; the lanes are columns, ranks run in order.
static inline void lora_expand(const LoraTable& table, int32_t slot, int64_t rank, const float* h, int64_t ldh,
                               int64_t first, int64_t last, int64_t offset, float* y, int64_t ldy, int64_t begin,
                               int64_t end) {
    const char* b = table.at(slot);
    constexpr int kTokens = 4;
    for (int64_t c = begin; c < end; c += 32) {
        const int n0 = end - c < 16 ? (int)(end - c) : 16;
        const int n1 = end - c - 16 < 0 ? 0 : end - c - 16 < 16 ? (int)(end - c - 16) : 16;
        for (int64_t t = first; t < last; t += kTokens) {
            const int tokens = last - t < kTokens ? (int)(last - t) : kTokens;
            Vf acc[kTokens][2];
            for (int i = 0; i < kTokens; ++i) acc[i][0] = acc[i][1] = splat(0.0f);
            for (int64_t r = 0; r < rank; ++r) {
                const int64_t at = r * table.width + offset + c;
                const Vf b0 = load_as(b, at, table.dtype, n0);
                const Vf b1 = n1 ? load_as(b, at + 16, table.dtype, n1) : splat(0.0f);
                for (int i = 0; i < kTokens; ++i) {
                    const Vf s = splat(i < tokens ? h[(t + i) * ldh + r] : 0.0f);
                    acc[i][0] = fma(s, b0, acc[i][0]);
                    acc[i][1] = fma(s, b1, acc[i][1]);
                }
            }
            for (int i = 0; i < tokens; ++i)
                for (int half = 0; half < 2; ++half) {
                    const int n = half ? n1 : n0;
                    if (!n) continue;
                    const int64_t at = (t + i) * ldy + c + half * 16;
                    store_as(y, at, HFA_F32, load_as(y, at, HFA_F32, n) + acc[i][half], n);
                }
        }
    }
}

}  // namespace hfa
