// Pages of keys and values: how they are written, and which of them a block is.
#pragma once

#include "ops_math.h"
#include "plan.h"

namespace hfa {

constexpr int kKeys = 64;  // slots of a key block

static inline int64_t page_bytes(int32_t dtype) { return dtype == HFA_PAGES_I8 ? 1 : dtype == HFA_F32 ? 4 : 2; }

template <int DTYPE> static inline Vf load_page(const void* p, int64_t at, int n) {
    if (DTYPE != HFA_PAGES_I8) return load_as(p, at, DTYPE, n);
    const int8_t* codes = static_cast<const int8_t*>(p) + at;
#if defined(HFA_ISA_AVX512)
    if (n >= 16) return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)))};
#endif
    float t[16] = {};
    for (int l = 0; l < n && l < 16; ++l) t[l] = (float)codes[l];
    return load(t);
}

// One head's K or V of one token into its slot.
static inline void write_head(void* pages, float* scales, int64_t slot, int64_t g, int64_t heads, int64_t size,
                              int32_t dtype, const float* x) {
    const int64_t at = (slot * heads + g) * size;
    if (dtype != HFA_PAGES_I8) {
        for (int64_t d = 0; d < size; d += 16) {
            const int n = size - d < 16 ? (int)(size - d) : 16;
            store_as(pages, at + d, dtype, load_as(x, d, HFA_F32, n), n);
        }
        return;
    }
    const float scale = peak_of(x, HFA_F32, 0, size) / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    scales[slot * heads + g] = scale;
    for (int64_t d = 0; d < size; d += 16) {
        const int n = size - d < 16 ? (int)(size - d) : 16;
        int8_t codes[16];
        store_i8(codes, min(max(round_even(load_as(x, d, HFA_F32, n) * splat(inverse)), splat_i(-127)), splat_i(127)));
        memcpy(static_cast<int8_t*>(pages) + at + d, codes, n);
    }
}

// A block's keys: where its slots lie.
struct Block {
    int64_t slot[kKeys];          // index of (page, offset) in the pool
    int count;                    // slots that hold something
    const Block* next = nullptr;  // the block to ask memory for while this one is read
    int64_t later(int j) const { return next && j < next->count ? next->slot[j] - slot[j] : 0; }
};

static inline void find_slots(const int32_t* table, int64_t page_tokens, int64_t first, int64_t length, Block* b) {
    const int64_t left = length - first;
    b->count = left < kKeys ? (int)left : kKeys;
    int64_t page = first / page_tokens, offset = first % page_tokens;
    int64_t base = (int64_t)table[page] * page_tokens;
    for (int j = 0; j < b->count; ++j) {
        if (offset == page_tokens) {
            offset = 0;
            base = (int64_t)table[++page] * page_tokens;
        }
        b->slot[j] = base + offset++;
    }
}

// K of the block's slots in fp32, in the order of tile_scores; vt[j, d] = V. Both in attend_block.cpp.
void load_keys(const HfaPages& p, const Block& b, int64_t g, float* kt);
void load_values(const HfaPages& p, const Block& b, int64_t g, float* vt);

}  // namespace hfa
