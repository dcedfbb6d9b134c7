// Tiles of 8-bit codes.
#include "tiles.h"

namespace hfa {
namespace {

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

}  // namespace

TileFns int8_tiles(bool asym, bool wide) { return integer_tiles<8>(asym, wide); }
TileFns token_tiles() { return tiles<PerToken>(); }
TileFns float_tiles(bool e5m2) { return e5m2 ? tiles<Floats<true>>() : tiles<Floats<false>>(); }

}  // namespace hfa
