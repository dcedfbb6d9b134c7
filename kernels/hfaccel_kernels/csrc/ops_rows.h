// Records that work row by row: embedding, rope table, norm, quantization, rotary, residual, gather. And those cut by
// columns: activation, logits. Each takes the rows (or columns) it is to do; the walker in plan.cpp decides which.
//
// Sums over a row run in four accumulators of sixteen lanes, element i in lane i % 16 of accumulator i / 16 % 4, joined
// as (0 + 1) + (2 + 3) and then by reduce_add: a row's bits depend on its width alone.
#pragma once

#include "matmul_packed.h"
#include "ops_math.h"
#include "packed_shape.h"
#include "plan.h"

namespace hfa {

struct Rows {
    int64_t begin, end;
};

// The value of packed element `at` inside a step of 16 rows, as unsigned code (8 bits: code + 128).
static inline int packed_code(const uint8_t* step, int bits, int row, int at) {
    const int quad = at / 4, byte = 4 * row + at % 4;
    switch (bits) {
        case 8: return step[byte] ^ 128;
        case 4: return step[byte] >> 4 * quad & 15;
        case 2: return step[byte] >> 2 * quad & 3;
        case 5:
        case 6: {
            const int low = step[quad / 2 * 64 + byte] >> 4 * (quad % 2) & 15;
            return low | (bits == 5 ? step[256 + byte] >> quad & 1 : step[128 + byte] >> 2 * quad & 3) << 4;
        }
        default:
            return (step[quad / 4 * 64 + byte] >> 2 * (quad % 4) & 3) | (step[128 + byte] >> quad & 1) << 2;
    }
}

// What it stands for, in units of the scale.
static inline float packed_value(const HfaWeight& w, const uint8_t* step, int row, int at, int zero) {
    static constexpr int8_t levels[16] = {HFA_NF4_LEVELS(0)};
    switch (w.code) {
        case HFA_INT: return (float)(packed_code(step, w.bits, row, at) - zero);
        case HFA_NF4: return levels[packed_code(step, 4, row, at)];
    }
    const int code = step[4 * row + at], mantissa_bits = w.code == HFA_E4M3 ? 3 : 2;
    const int magnitude = code & 0x7f, exponent = magnitude >> mantissa_bits, hidden = 1 << mantissa_bits;
    const int mantissa = magnitude % hidden + (exponent ? hidden : 0);
    const int bias = (1 << (6 - mantissa_bits)) - 1 + mantissa_bits;
    const float size = ldexpf((float)mantissa, (exponent ? exponent : 1) - bias);
    return code & 0x80 ? -size : size;
}

// Row `id` of a table: out[k] = multiplier * table[id, k].
static inline void embed_row(const HfaWeight& w, int64_t id, float multiplier, float* out) {
    if (w.kind != HFA_PACKED) {
        const int32_t dtype = w.kind == HFA_PLAIN_F32 ? HFA_F32 : w.kind == HFA_PLAIN_BF16 ? HFA_BF16 : HFA_F16;
        for (int64_t k = 0; k < w.k; k += 16) {
            const int n = w.k - k < 16 ? (int)(w.k - k) : 16;
            store_as(out, k, HFA_F32, load_as(w.data, id * w.ld + k, dtype, n) * splat(multiplier), n);
        }
        return;
    }
    const PackedShape shape(w);
    const int64_t block = id / 16;
    const int row = (int)(id % 16);
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + block * shape.block_bytes;
    for (int64_t g = 0; g < shape.groups; ++g) {
        const int64_t start = g * shape.group, stop = start + shape.group < w.k ? start + shape.group : w.k;
        float lanes[16];
        store(lanes, load_scale(static_cast<const uint8_t*>(w.scale) + shape.scales_at(w, block), g, w.scale_dtype));
        const float scale = lanes[row];
        float minimum = 0.0f;
        int zero = w.zero ? w.zero[shape.zeros_at(block) + g * 16 + row] : 1 << (w.bits - 1);
        if (has_minimums(w.scale_dtype)) {
            const void* scales = static_cast<const uint8_t*>(w.scale) + shape.scales_at(w, block);
            store(lanes, load_minimum(scales, g, w.scale_dtype));
            minimum = lanes[row];
            zero = 0;
        }
        for (int64_t k = start; k < stop; k += shape.step, data += shape.step_bytes)
            for (int i = 0; i < shape.step && k + i < stop; ++i)
                out[k + i] = (packed_value(w, data, row, i, zero) * scale + minimum) * multiplier;
    }
}

static inline void add_to(float* x, const void* y, int64_t at, int32_t dtype, int64_t width) {
    for (int64_t k = 0; k < width; k += 16) {
        const int n = width - k < 16 ? (int)(width - k) : 16;
        store_as(x, k, HFA_F32, load_as(x, k, HFA_F32, n) + load_as(y, at + k, dtype, n), n);
    }
}

static inline void rope_row(const float* inv_freq, int64_t half, float scaling, int64_t position, float* out) {
    for (int64_t i = 0; i < half; ++i) {
        const float angle = (float)position * inv_freq[i];
        out[i] = cosf(angle) * scaling;
        out[half + i] = sinf(angle) * scaling;
    }
}

template <class Term> static inline float sum_over(int64_t size, Term&& term) {
    Vf acc[4] = {splat(0), splat(0), splat(0), splat(0)};
    int64_t k = 0;
    for (; k + 64 <= size; k += 64)
        for (int a = 0; a < 4; ++a) acc[a] = term(acc[a], k + a * 16, 16);
    for (int a = 0; k < size; k += 16, ++a) acc[a] = term(acc[a], k, size - k < 16 ? (int)(size - k) : 16);
    return reduce_add((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

struct NormArgs {
    const void *weight, *bias;
    int32_t weight_dtype, bias_dtype;
    float eps;
    bool centered, unit_offset;
};

static inline void norm_row(const NormArgs& a, const float* x, int64_t size, float* out) {
    float mean = 0.0f, scale;
    if (a.centered) {
        mean = sum_over(size, [&](Vf s, int64_t k, int n) { return s + load_as(x, k, HFA_F32, n); }) / (float)size;
        const float var = sum_over(size, [&](Vf s, int64_t k, int n) {
            Vf d = load_as(x, k, HFA_F32, n) - splat(mean);
            if (n < 16) {  // the lanes behind the end count as the mean
                float t[16];
                store(t, d);
                for (int l = n; l < 16; ++l) t[l] = 0.0f;
                d = load(t);
            }
            return fma(d, d, s);
        });
        scale = 1.0f / sqrtf(var / (float)size + a.eps);
    } else {
        const float squares = sum_over(size, [&](Vf s, int64_t k, int n) {
            const Vf v = load_as(x, k, HFA_F32, n);
            return fma(v, v, s);
        });
        scale = 1.0f / sqrtf(squares / (float)size + a.eps);
    }
    const Vf m = splat(mean), by = splat(scale), unit = splat(a.unit_offset ? 1.0f : 0.0f);
    for (int64_t k = 0; k < size; k += 16) {
        const int n = size - k < 16 ? (int)(size - k) : 16;
        Vf v = load_as(x, k, HFA_F32, n);
        if (a.centered) v = v - m;
        v = v * by;
        if (a.weight) v = v * (unit + load_as(a.weight, k, a.weight_dtype, n));
        if (a.bias) v = v + load_as(a.bias, k, a.bias_dtype, n);
        store_as(out, k, HFA_F32, v, n);
    }
}

// One head: the first 2 * half columns rotate, the others are copied.
static inline void rotary_head(const float* x, const float* cos_sin, int64_t half, int64_t size, bool interleaved,
                               float* out) {
    const float *c = cos_sin, *s = cos_sin + half;
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            out[2 * i] = a * c[i] - b * s[i];
            out[2 * i + 1] = b * c[i] + a * s[i];
        }
    } else {
        for (int64_t i = 0; i < half; i += 16) {
            const int n = half - i < 16 ? (int)(half - i) : 16;
            const Vf a = load_as(x, i, HFA_F32, n), b = load_as(x, half + i, HFA_F32, n);
            const Vf cv = load_as(c, i, HFA_F32, n), sv = load_as(s, i, HFA_F32, n);
            store_as(out, i, HFA_F32, a * cv - b * sv, n);
            store_as(out, half + i, HFA_F32, b * cv + a * sv, n);
        }
    }
    for (int64_t i = 2 * half; i < size; ++i) out[i] = x[i];
}

template <int KIND> static inline Vf activate(Vf x) {
    switch (KIND) {
        case HFA_ACT_SILU: return vsigmoid_times(x, 1.0f);
        case HFA_ACT_QUICK_GELU: return vsigmoid_times(x, 1.702f);
        case HFA_ACT_GELU_TANH: {
            const Vf inner = splat(0.7978845608f) * fma(splat(0.044715f) * x * x, x, x);
            return splat(0.5f) * x * (splat(1.0f) + vtanh(inner));
        }
        case HFA_ACT_GELU_ERF: return splat(0.5f) * x * (splat(1.0f) + verf(x * splat(0.7071067812f)));
        case HFA_ACT_RELU: return max(splat(0.0f), x);
        case HFA_ACT_RELU2: {
            const Vf y = max(splat(0.0f), x);
            return y * y;
        }
        default: return x;
    }
}

template <int KIND>
static inline void act_columns(const float* gate, const float* up, float* out, int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k += 16) {
        const int n = end - k < 16 ? (int)(end - k) : 16;
        Vf v = activate<KIND>(load_as(gate, k, HFA_F32, n));
        if (up) v = v * load_as(up, k, HFA_F32, n);
        store_as(out, k, HFA_F32, v, n);
    }
}

static inline void act_row(int kind, const float* gate, const float* up, float* out, int64_t begin, int64_t end) {
    switch (kind) {
        case HFA_ACT_SILU: return act_columns<HFA_ACT_SILU>(gate, up, out, begin, end);
        case HFA_ACT_GELU_TANH: return act_columns<HFA_ACT_GELU_TANH>(gate, up, out, begin, end);
        case HFA_ACT_GELU_ERF: return act_columns<HFA_ACT_GELU_ERF>(gate, up, out, begin, end);
        case HFA_ACT_RELU: return act_columns<HFA_ACT_RELU>(gate, up, out, begin, end);
        case HFA_ACT_QUICK_GELU: return act_columns<HFA_ACT_QUICK_GELU>(gate, up, out, begin, end);
        case HFA_ACT_RELU2: return act_columns<HFA_ACT_RELU2>(gate, up, out, begin, end);
        default: return act_columns<HFA_ACT_NONE>(gate, up, out, begin, end);
    }
}

static inline void logits_columns(const float* x, float scale, float softcap, void* out, int64_t at, int32_t dtype,
                                  int64_t begin, int64_t end) {
    const Vf by = splat(scale), cap = splat(softcap);
    for (int64_t k = begin; k < end; k += 16) {
        const int n = end - k < 16 ? (int)(end - k) : 16;
        Vf v = load_as(x, k, HFA_F32, n) * by;
        if (softcap > 0) v = cap * vtanh(v / cap);
        store_as(out, at + k, dtype, v, n);
    }
}

}  // namespace hfa
