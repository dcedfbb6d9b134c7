// Where the bytes of a packed weight lie (layouts.py): blocks of 16 rows, in each the groups of K one after another,
// in each group whole steps, the last one filled up.
#pragma once

#include "hfa.h"

namespace hfa {

constexpr int64_t kTileGroups = 16, kHeadBytes = 8;  // double_scales.py
// super_scales.py: groups of a tile, bytes of its fp16 factors, of one group's codes
constexpr int64_t kSuperGroups = 16, kSuperHead = 32, kSuperEach = 16;
constexpr int64_t kSuperMinGroups = 8, kSuperMinHead = 64, kSuperMinEach = 32;

struct PackedShape {
    int64_t group, groups;      // K-elements a scale serves, groups of a row
    int64_t step, step_bytes;   // K-elements and bytes of one step of 16 rows
    int64_t block_bytes;        // of 16 rows

    explicit PackedShape(const HfaWeight& w) {
        group = w.group < 0 || w.group > w.k ? w.k : w.group;
        step = w.bits == 8 ? 4 : w.bits == 4 ? 8 : w.bits == 2 || w.bits == 6 ? 16 : 32;
        step_bytes = w.bits == 3 || w.bits == 6 ? 192 : w.bits == 5 ? 320 : 64;
        groups = group ? (w.k + group - 1) / group : 0;
        const int64_t whole = group ? w.k / group : 0, rest = w.k - whole * group;
        block_bytes = (whole * ((group + step - 1) / step) + (rest + step - 1) / step) * step_bytes;
    }
    // Bytes before the scales and zero points of a block.
    int64_t scales_at(const HfaWeight& w, int64_t block) const {
        switch (w.scale_dtype) {
            case HFA_DOUBLE: return block * tiled(kTileGroups, kHeadBytes, 16);
            case HFA_SUPER: return block * tiled(kSuperGroups, kSuperHead, kSuperEach);
            case HFA_SUPER_MIN: return block * tiled(kSuperMinGroups, kSuperMinHead, kSuperMinEach);
            case HFA_F16: return block * groups * 32;
            default: return block * groups * 64;
        }
    }
    int64_t zeros_at(int64_t block) const { return block * groups * 16; }
    int64_t tiled(int64_t tile, int64_t head, int64_t each) const {
        return (groups + tile - 1) / tile * head + groups * each;
    }
};

}  // namespace hfa
