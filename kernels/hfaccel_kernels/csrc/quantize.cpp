// Codes of activations, symmetric, one scale a chunk of a token's K or a token; activations.quantize_activations bit for
// bit.
//   integers   peak = max|x|, scale = peak / top, code = round half to even of x * (1 / peak * top); top = 127 or 16256
//   static     scale as given, code = round half to even of x * (1 / scale), between -127 and 127
//   E4M3       beside float8: scale = peak / 448, code = the e4m3 nearest to x * (1 / peak * 448), kept as a float
// Clamping comes before rounding, in floats: int32 cannot hold what is far beyond a static scale. NaN becomes -top.
#include <float.h>

#include "parallel.h"
#include "simd.h"

namespace hfa {
namespace {

constexpr int64_t kPad = 32;  // codes; the longest k_step of a layout
inline int64_t pad(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

// Where chunks lie. Groups that are whole chunks (or one for the row) do not show: then `group` is k.
struct Pieces {
    int64_t k, group, chunk, per_group, count, k_pad;

    explicit Pieces(const HfaWeight* w) : k(w->k), chunk(w->chunk ? w->chunk : w->k > 0 ? w->k : 1) {
        group = w->group < 0 || w->group >= k || w->group % chunk == 0 ? k : w->group;
        per_group = (group + chunk - 1) / chunk;
        const int64_t whole = group ? k / group : 0, rest = k - whole * group;
        count = whole * per_group + (rest + chunk - 1) / chunk;
        k_pad = whole * pad(group, kPad) + pad(rest, kPad);
    }
};

inline float inverse_of(float peak, float top) { return peak > 0x1p-100f ? 1.0f / peak * top : 0.0f; }

// One chunk of n elements, from x[at] on; `low` is NULL or takes the low plane. `fixed`: its scale, if not 0.
inline void quantize_chunk(const void* x, int32_t dtype, int64_t at, int64_t n, float fixed, int8_t* codes,
                           int8_t* low_codes, float* scale, int32_t* minus_sum) {
    const int32_t limit = low_codes ? 127 * 128 : 127;
    const float peak = peak_of(x, dtype, at, n);
    *scale = fixed == 0.0f ? peak / (float)limit : peak <= FLT_MAX ? fixed : NAN;
    const Vf by = splat(fixed == 0.0f ? inverse_of(peak, (float)limit) : 1.0f / fixed);
    const Vf low = splat((float)-limit), high = splat((float)limit);
    Vi total = splat_i(0);
    for (int64_t i = 0; i < pad(n, kPad); i += 16) {
        Vi code = splat_i(0);
        if (i < n) {
            const int left = n - i < 16 ? (int)(n - i) : 16;
            code = round_even(min(max(load_as(x, at + i, dtype, left) * by, low), high));
        }
        total = total + code;
        if (low_codes) {
            const Vi top_part = shift_right<7>(code + splat_i(64));
            store_i8(low_codes + i, code - shift_left<7>(top_part));
            code = top_part;
        }
        store_i8(codes + i, code);
    }
    *minus_sum = -reduce_add(total);
}

constexpr float kE4m3Top = 448.0f;

// A row of n elements from x[at] on to multiples of its scale that e4m3 holds, as HfaActs has them. For |v| in [2^e,
// 2^(e + 1)), e at least -6, the sum with 1.5 * 2^(e + 20) has its last bit at 2^(e - 3), where e4m3 has its own.
inline void round_row(const void* x, int32_t dtype, int64_t at, int64_t n, float* to, float* scale) {
    const float peak = peak_of(x, dtype, at, n);
    *scale = peak / kE4m3Top;
    const Vf by = splat(inverse_of(peak, kE4m3Top)), top = splat(kE4m3Top);
    for (int64_t i = 0; i < pad(n, 16); i += 16) {
        const int left = n - i < 16 ? (int)(n - i) : 16;
        const Vf v = min(max(load_as(x, at + i, dtype, left) * by, splat(-kE4m3Top)), top);
        const Vf binade = max(from_bits(bits(v) & splat_i(0x7f800000)), splat(0x1p-6f));
        const Vf magic = binade * splat(0x1.8p20f);
        float t[16];
        store(t, (v + magic) - magic);
        for (int q = 0; q < 16; q += 4) {
            to[i + q] = t[q];
            to[i + q + 1] = t[q + 2];
            to[i + q + 2] = t[q + 1];
            to[i + q + 3] = t[q + 3];
        }
    }
}

inline bool is_float8(const HfaWeight* w) { return w->code == HFA_E4M3 || w->code == HFA_E5M2; }

}  // namespace
}  // namespace hfa

using hfa::Pieces;

HFA_EXPORT int64_t hfa_acts_key(const HfaWeight* w) {
    if (w->chunk == 0) {
        int32_t fixed;
        memcpy(&fixed, &w->act_scale, 4);
        return (int64_t)(hfa::is_float8(w) ? 2 : 1) << 60 | (uint32_t)fixed;
    }
    const int64_t group = Pieces(w).group;
    return (int64_t)w->act_bits << 56 | (int64_t)w->chunk << 40 | (group == w->k ? 0 : group);
}

HFA_EXPORT int64_t hfa_acts_bytes(const HfaWeight* w, int64_t m) {
    if (w->kind != HFA_PACKED) return 0;
    const Pieces p(w);
    if (hfa::is_float8(w)) return m * 4 * (hfa::pad(w->k, 16) + 2);
    return m * (w->act_bits / 8 * hfa::pad(p.k_pad, 64) + 2 * 4 * p.count);
}

HFA_EXPORT void hfa_acts_view(const HfaWeight* w, void* buffer, int64_t m, HfaActs* acts) {
    const Pieces p(w);
    acts->ldq = hfa::is_float8(w) ? 4 * hfa::pad(w->k, 16) : hfa::pad(p.k_pad, 64);
    acts->lds = p.count;
    acts->codes = static_cast<int8_t*>(buffer);
    acts->low = w->act_bits == 16 ? acts->codes + m * acts->ldq : nullptr;
    acts->scales = reinterpret_cast<float*>(acts->codes + w->act_bits / 8 * m * acts->ldq);
    acts->minus_sums = reinterpret_cast<int32_t*>(acts->scales + m * acts->lds);
}

HFA_EXPORT void hfa_quantize_rows(const HfaWeight* w, const void* x, int32_t x_dtype, int64_t ldx, int64_t m,
                                  const HfaActs* acts, int tid, int nthreads) {
    const Pieces p(w);
    if (hfa::is_float8(w)) {
        const hfa::Range tokens = hfa::share(m, tid, nthreads);
        for (int64_t t = tokens.begin; t < tokens.end; ++t)
            hfa::round_row(x, x_dtype, t * ldx, w->k, reinterpret_cast<float*>(acts->codes + t * acts->ldq),
                           acts->scales + t);
        return;
    }
    const hfa::Range mine = hfa::share(m * p.count, tid, nthreads);
    for (int64_t at = mine.begin; at < mine.end; ++at) {
        const int64_t token = at / p.count, c = at % p.count, g = c / p.per_group, in = c % p.per_group * p.chunk;
        const int64_t start = g * p.group + in;
        int64_t stop = (g + 1) * p.group < p.k ? (g + 1) * p.group : p.k;
        if (start + p.chunk < stop) stop = start + p.chunk;
        const int64_t to = token * acts->ldq + g * hfa::pad(p.group, hfa::kPad) + in;
        hfa::quantize_chunk(x, x_dtype, token * ldx + start, stop - start, w->act_scale, acts->codes + to,
                            acts->low ? acts->low + to : nullptr, acts->scales + token * acts->lds + c,
                            acts->minus_sums + token * acts->lds + c);
    }
}
