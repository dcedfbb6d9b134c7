// Where the bytes of a packed weight lie (layouts.py): blocks of 16 rows, in each the groups of K one after another,
// in each group whole steps, the last one filled up.
#pragma once

#include "hfa.h"

namespace hfa {

constexpr int64_t kTileGroups = 16, kHeadBytes = 8;  // double_scales.py

struct PackedShape {
    int64_t group, groups;      // K-elements a scale serves, groups of a row
    int64_t step, step_bytes;   // K-elements and bytes of one step of 16 rows
    int64_t block_bytes;        // of 16 rows

    explicit PackedShape(const HfaWeight& w) {
        group = w.group < 0 || w.group > w.k ? w.k : w.group;
        step = w.bits == 8 ? 4 : w.bits == 4 ? 8 : w.bits == 2 ? 16 : 32;
        step_bytes = w.bits == 3 ? 192 : 64;
        groups = group ? (w.k + group - 1) / group : 0;
        const int64_t whole = group ? w.k / group : 0, rest = w.k - whole * group;
        block_bytes = (whole * ((group + step - 1) / step) + (rest + step - 1) / step) * step_bytes;
    }
    // Bytes before the scales and zero points of a block.
    int64_t scales_at(const HfaWeight& w, int64_t block) const {
        if (w.scale_dtype == HFA_DOUBLE)
            return block * ((groups + kTileGroups - 1) / kTileGroups * kHeadBytes + groups * 16);
        return block * groups * 16 * (w.scale_dtype == HFA_F32 ? 4 : 2);
    }
    int64_t zeros_at(int64_t block) const { return block * groups * 16; }
};

}  // namespace hfa
