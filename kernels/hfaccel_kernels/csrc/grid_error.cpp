// grid_error.py's op: how far groups of weights lie from grids. A lane is a row, so sums go over a group in order.
#include "parallel.h"
#include "simd.h"

namespace hfa {
namespace {

constexpr int kRows = 64;  // of a tile: whole cache lines of each of the group's elements

struct Grids {
    const float *w, *h, *scale, *zero;  // [groups, size, n], [groups, size], [groups, n] twice
    float* error;                       // [groups, n]
    int64_t size, n;
    Vf low, high;
};

// `left` rows of group g from row `at` on, all of a tile if `kWhole`.
template <bool kWhole>
void tile(const Grids& a, int64_t g, int64_t at, int left) {
    constexpr int kVectors = kRows / 16;
    const int vectors = kWhole ? kVectors : (left + 15) / 16;
    const auto lanes = [&](int v) { return kWhole || left - 16 * v >= 16 ? 16 : left - 16 * v; };
    const Vf one = splat(1.0f), none = splat(0.0f);
    Vf inverse[kVectors], zero[kVectors], step[kVectors], sum[kVectors];
    for (int v = 0; v < vectors; ++v) {
        const int64_t to = g * a.n + at + 16 * v;
        float s[16];
        store(s, load_as(a.scale, to, HFA_F32, lanes(v)));
        for (float& value : s) value = value == 0.0f ? 1.0f : value;
        step[v] = load(s);
        inverse[v] = one / step[v];
        zero[v] = load_as(a.zero, to, HFA_F32, lanes(v));
        sum[v] = none;
    }
    const float *w = a.w + g * a.size * a.n + at, *h = a.h + g * a.size;
    for (int64_t j = 0; j < a.size; ++j, w += a.n) {
        const Vf weight = splat(h[j]);
        for (int v = 0; v < vectors; ++v) {
            const Vf x = (kWhole ? load(w + 16 * v) : load_as(w, 16 * v, HFA_F32, lanes(v))) * inverse[v] + zero[v];
            const Vf off = to_float(round_even(min(max(x, a.low), a.high))) - x;
            sum[v] = fma(off * off, weight, sum[v]);
        }
    }
    for (int v = 0; v < vectors; ++v)
        store_as(a.error, g * a.n + at + 16 * v, HFA_F32, sum[v] * (step[v] * step[v]), lanes(v));
}

}  // namespace
}  // namespace hfa

HFA_EXPORT void hfa_grid_error(const float* w, const float* h, const float* scale, const float* zero, float* error,
                               int64_t groups, int64_t size, int64_t n, int32_t low, int32_t high, int nthreads) {
    using namespace hfa;
    const Grids grids{w, h, scale, zero, error, size, n, splat((float)low), splat((float)high)};
    const int64_t tiles = (n + kRows - 1) / kRows;
    parallel(nthreads, [&](int tid, int threads) {
        const Range mine = share(groups * tiles, tid, threads);
        for (int64_t i = mine.begin; i < mine.end; ++i) {
            const int64_t at = i % tiles * kRows, left = n - at;
            if (left >= kRows) tile<true>(grids, i / tiles, at, kRows);
            else tile<false>(grids, i / tiles, at, (int)left);
        }
    });
}
