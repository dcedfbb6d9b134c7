// The C ABI that Python, the qlinear op and the whole-step plan share. Plain C types only.
//
// Functions with (tid, nthreads) hold no parallel region and no barrier: every thread of the caller's region calls
// them with its own tid and does its share. Between hfa_quantize_rows and the hfa_matmul that reads its result the
// caller puts a barrier, unless each thread quantizes everything into a buffer of its own (tid 0 of 1).
#pragma once

#include <stdint.h>

#define HFA_EXPORT extern "C" __attribute__((visibility("default")))
#define HFA_ABI 3  // native.py refuses a library that says another number

// From HFA_DOUBLE on: of scales alone, double_scales.py, layouts.py ("fp16_min") and super_scales.py.
enum HfaDtype {
    HFA_F32 = 0, HFA_BF16 = 1, HFA_F16 = 2, HFA_DOUBLE = 3, HFA_F16_MIN = 4, HFA_SUPER = 5, HFA_SUPER_MIN = 6
};

// kind: HFA_PACKED is a layout of layouts.py (activations become int8, in one or two planes, or beside float8 floats
// that e4m3 holds); the others are row-major [n, k] matrices read in place, times fp32 activations.
enum HfaKind { HFA_PACKED = 0, HFA_PLAIN_F32 = 1, HFA_PLAIN_BF16 = 2, HFA_PLAIN_F16 = 3 };

// What a packed code stands for (codebook.py).
enum HfaCode { HFA_INT = 0, HFA_NF4 = 1, HFA_E4M3 = 2, HFA_E5M2 = 3 };

struct HfaWeight {
    const void* data;       // packed: [NB, block_bytes]; plain: [n, ld]
    const void* scale;      // packed: [NB, G, 16], or [NB, bytes] as scale_dtype says; else NULL
    const uint8_t* zero;    // packed and asymmetric: [NB, G, 16]; else NULL
    const void* bias;       // [n] or NULL
    int64_t n, k;           // out, in
    int64_t ld;             // plain: elements from one row to the next
    int32_t kind;           // HfaKind
    int32_t bits;           // packed: 8, 6, 5, 4, 3, 2
    int32_t group;          // packed: K-elements a scale serves; -1 = k
    int32_t chunk;          // packed: layouts.ACT_CHUNK[act_bits]: 32 for 8 bits, 64 for 16; 0: the whole row
    int32_t act_bits;       // packed: 8 or 16
    int32_t scale_dtype;    // HfaDtype, but HFA_BF16
    int32_t bias_dtype;     // HfaDtype
    int32_t code;           // packed: HfaCode
    float act_scale;        // chunk 0: the scale of the activations, or 0: max|x| / top
};

// Activations of `m` tokens, quantized by hfa_quantize_rows. Chunks follow each other, the last one of a group padded
// with zeros to 32 codes. The layout depends on (k, act_bits, chunk, group) alone, and not even on the group where it
// is a multiple of the chunk: weights for which k and hfa_acts_key are equal share one.
//
// Beside float8 the codes are floats that e4m3 holds, each four in the order 0, 2, 1, 3, rows filled up with zeros to
// sixteen; ldq counts bytes there too.
struct HfaActs {
    int8_t* codes;          // [m, ldq]; act_bits 16: the high plane, code = 128 * high + low, -64 <= low <= 63
    int8_t* low;            // [m, ldq] of act_bits 16; else NULL
    float* scales;          // [m, lds]
    int32_t* minus_sums;    // [m, lds] minus the sum of the chunk's codes
    int64_t ldq, lds;
};

// The same from token `first` on.
static inline struct HfaActs hfa_acts_from(struct HfaActs a, int64_t first) {
    a.codes += first * a.ldq;
    if (a.low) a.low += first * a.ldq;
    a.scales += first * a.lds;
    a.minus_sums += first * a.lds;
    return a;
}

HFA_EXPORT int64_t hfa_acts_key(const HfaWeight* w);
// Bytes that hfa_acts_view needs for m tokens (0 for a plain weight); the buffer is 64-byte aligned.
HFA_EXPORT int64_t hfa_acts_bytes(const HfaWeight* w, int64_t m);
HFA_EXPORT void hfa_acts_view(const HfaWeight* w, void* buffer, int64_t m, HfaActs* acts);
// x [m, ldx] of x_dtype -> acts; shares are (token, piece of a row).
HFA_EXPORT void hfa_quantize_rows(const HfaWeight* w, const void* x, int32_t x_dtype, int64_t ldx, int64_t m,
                                  const HfaActs* acts, int tid, int nthreads);
// y [m, ldy] of y_dtype = x W^T + bias.
// acts for a packed weight; x fp32 [m, ldx] for a plain one. Shares are blocks of 16 output rows (times tiles of m).
HFA_EXPORT void hfa_matmul(const HfaWeight* w, const HfaActs* acts, const float* x, int64_t ldx, int64_t m, void* y,
                           int32_t y_dtype, int64_t ldy, int tid, int nthreads);

// The two above with a parallel region of their own: the torch op. Returns 0, or -1 when scratch memory is short.
HFA_EXPORT int hfa_linear(const HfaWeight* w, const void* x, int32_t x_dtype, int64_t ldx, int64_t m, void* y,
                          int32_t y_dtype, int64_t ldy, int nthreads);
