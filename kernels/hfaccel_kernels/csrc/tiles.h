// Tiles of the packed product: 16 rows of T tokens, a function for each T that the registers hold. Which formats share
// a source file is a matter of compile time alone.
#pragma once

#include "matmul_packed.h"

namespace hfa {

struct Out {
    void* y;
    int64_t ld;
    int32_t dtype;
};

// `data`, `scale`, `zero` point at the block's own; its first row is `row`, `rows` of them are real.
using TileFn = void (*)(const HfaWeight*, const uint8_t* data, const void* scale, const uint8_t* zero, const HfaActs*,
                        int64_t token, const Out&, int64_t row, int rows);

constexpr int kTileSizes[] = {12, 8, 4, 2, 1};

struct TileFns {
    TileFn of[5];  // by kTileSizes; NULL: more than the registers hold
};

// In tiles_nibbles.cpp, tiles_bytes.cpp, tiles_planes.cpp, tiles_minimums.cpp. `wide`: 16-bit activations.
TileFns int4_tiles(bool asym, bool wide);
TileFns nf4_tiles(bool wide);
TileFns int8_tiles(bool asym, bool wide);
TileFns token_tiles();
TileFns float_tiles(bool e5m2);
TileFns int3_tiles(bool asym, bool wide);
TileFns int2_tiles(bool asym, bool wide);
TileFns int6_tiles(bool wide);
TileFns int5_tiles(bool wide);
TileFns minimum_tiles(int bits, bool wide);  // 5, 4 or 2

template <int FORMAT, Grid GRID, bool WIDE> struct Integers {
    // What GGUF files alone hold has no tiles of 12: they would add seconds to the build.
    static constexpr bool narrow = WIDE || FORMAT == 6 || FORMAT == 5 || GRID == kMinimums;
    static constexpr int most = narrow ? kTileTokens * 2 / 3 : kTileTokens;
    template <int T>
    static inline void dot(const HfaWeight* w, const uint8_t* data, const void* scale, const uint8_t* zero,
                           const HfaActs* acts, int64_t token, Vf* out) {
        block_dot<FORMAT, GRID, WIDE, T>(w, data, scale, zero, acts, token, out);
    }
};

template <class Format, int T>
void tile(const HfaWeight* w, const uint8_t* data, const void* scale, const uint8_t* zero, const HfaActs* acts,
          int64_t token, const Out& out, int64_t row, int rows) {
    Vf v[T];
    Format::template dot<T>(w, data, scale, zero, acts, token, v);
    for (int t = 0; t < T; ++t) {
        if (w->bias) v[t] = v[t] + load_as(w->bias, row, w->bias_dtype, rows);
        store_as(out.y, (token + t) * out.ld + row, out.dtype, v[t], rows);
    }
}

template <class Format, int T> constexpr TileFn tile_if() {
    if constexpr (T > Format::most && T > 1) return nullptr;
    else return tile<Format, T>;
}
template <class Format> constexpr TileFns tiles() {
    return {{tile_if<Format, 12>(), tile_if<Format, 8>(), tile_if<Format, 4>(), tile_if<Format, 2>(),
             tile_if<Format, 1>()}};
}
template <int FORMAT, Grid GRID> TileFns grid_tiles(bool wide) {
    return wide ? tiles<Integers<FORMAT, GRID, true>>() : tiles<Integers<FORMAT, GRID, false>>();
}
template <int FORMAT> TileFns integer_tiles(bool asym, bool wide) {
    return asym ? grid_tiles<FORMAT, kZeroPoints>(wide) : grid_tiles<FORMAT, kCentred>(wide);
}

}  // namespace hfa
