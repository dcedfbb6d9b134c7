// The whole-step plan: a list of records that every thread of one parallel region walks (hfaccel/runtime/plan.py builds
// it, checks it and says what the records mean).
//
// Threads and buffers. A buffer lies in the arena, one row of `width` a token (or a row of logits asked for). On small
// steps ("replicated") records that work row by row are done by every thread for all rows, into a copy of its own of
// each buffer marked `own`: a norm costs less than a barrier. On large steps a thread does its share of the rows.
// Matrix products, activations and logits are cut by columns (blocks of 16), attention by (sequence, KV head, keys).
// `sync` of a record says in which of the four kinds of step a barrier stands before it. From 16 tokens on a matrix
// product is taken in pieces by whoever is free, and a barrier follows it too.
#pragma once

#include "hfa.h"

#define HFA_PLAN_SCHEMA 2

enum HfaOpKind {
    HFA_OP_EMBED = 1,
    HFA_OP_ROPE = 2,
    HFA_OP_NORM = 3,
    HFA_OP_QUANT = 4,
    HFA_OP_MATMUL = 5,
    HFA_OP_ROTARY = 6,
    HFA_OP_CACHE = 7,
    HFA_OP_ATTEND = 8,
    HFA_OP_ACT = 9,
    HFA_OP_ADD = 10,
    HFA_OP_GATHER = 11,
    HFA_OP_LOGITS = 12,
    HFA_OP_JOIN = 13,
    HFA_OP_ROUTE = 14,
    HFA_OP_EXPERTS = 15,
    HFA_OP_MIX = 16,
    HFA_OP_DISPATCH = 17,
    HFA_OP_SCALE = 18,
    HFA_OP_LORA_SHRINK = 19,
    HFA_OP_LORA_EXPAND = 20,
};

enum HfaActKind {
    HFA_ACT_NONE = 0,
    HFA_ACT_SILU = 1,
    HFA_ACT_GELU_TANH = 2,
    HFA_ACT_GELU_ERF = 3,
    HFA_ACT_RELU = 4,
    HFA_ACT_QUICK_GELU = 5,
    HFA_ACT_RELU2 = 6,
};

// HFA_BUFFER_OUT is the caller's own: what the step returns, in its dtype.
enum HfaBufferKind { HFA_BUFFER_F32 = 0, HFA_BUFFER_ACTS = 1, HFA_BUFFER_I32 = 2, HFA_BUFFER_OUT = 3 };

// `count` heads of `size` columns in the rows of `buffer` (-1: none); head h starts at offset + h * stride.
struct HfaView {
    int32_t buffer, offset, count, size, stride;
};

struct HfaOp {
    int32_t kind;         // HfaOpKind
    int32_t sync;         // bit (replicated | fused << 1): barrier before the record in that kind of step
    HfaView view[3];      // inputs (and updated ones)
    int32_t out[3];       // buffers written, -1: none
    int32_t ints[4];      // by kind, see plan.cpp
    float reals[4];
    const void* ptr[4];   // vectors and tables
    int32_t dtype[4];     // HfaDtype of each
    const HfaWeight* weight;
    int64_t weights;      // how many
};

struct HfaBuffer {
    int64_t width;
    int32_t kind;             // HfaBufferKind
    int32_t per_row;          // rows of the buffer for each token (experts chosen), usually 1
    int32_t asked;            // 0: one row a token; 1: one row a row of logits asked for
    int32_t own;              // replicated steps: one copy a thread
    const HfaWeight* acts;    // HFA_BUFFER_ACTS: a weight whose hfa_acts_key the buffer has
};

struct HfaPlan {
    int32_t schema, ops, buffers, layers;  // layers: attention records, each with pages of its own
    const HfaOp* op;
    const HfaBuffer* buffer;
    int64_t vocab;          // ids 0 .. vocab - 1 are known
    int64_t max_positions;  // rows of the learned position table, or 0
};

// Pages of one layer: [pages, page_tokens, G, D] of `dtype` (HfaDtype, or HFA_PAGES_I8 with fp32 scales
// [pages, page_tokens, G]).
#define HFA_PAGES_I8 16
struct HfaPages {
    void *k, *v;
    float *k_scale, *v_scale;
    int32_t kv_heads, k_size, v_size, dtype;
};

struct HfaStep {
    int64_t tokens, asked, sequences;
    int64_t* ids;                 // [tokens]
    int64_t* positions;           // [tokens]
    const int32_t* block_tables;  // [sequences, table_stride]
    int64_t table_stride;
    const int32_t* q_starts;      // [sequences + 1]
    int32_t* lengths;             // [sequences], the step's tokens included
    const int64_t* rows;          // [asked] indices into the tokens
    const HfaPages* pages;        // [layers]
    int64_t pages_count, page_tokens;
    void* logits;                 // [asked, vocab of the head] of logits_dtype
    int64_t logits_ld;
    int32_t logits_dtype;
    int32_t threads;
    int32_t replicate;            // largest number of tokens for which row records are replicated
    int32_t top;                  // candidates wanted of each row of logits, at most their columns; 0: none
    void* arena;
    int64_t arena_bytes;
    int64_t* profile;             // [ops, 2] nanoseconds of thread 0 in the record and in its barriers, or NULL
    // A run of `ahead` greedy steps in one call: every sequence has one token and its row is asked for, top is 1, the
    // block tables reach as far, and ids, positions and lengths are moved on in place. It ends early after a step in
    // which a row's best is one of `ends` or outside the vocabulary; `done` says how many steps were run.
    int64_t ahead;
    const int64_t* ends;
    int64_t ends_count;
    float* best;                  // [ahead, asked, top] values and ids, best first (ops_pick.h)
    int64_t* best_ids;
    int64_t done;
    const int32_t* adapters;      // [tokens] slot of each token's adapter, -1: none; NULL: no token has one
};

// Bytes of arena a step needs, 64-byte aligned.
HFA_EXPORT int64_t hfa_plan_arena(const HfaPlan* plan, const HfaStep* step);
HFA_EXPORT void hfa_plan_offsets(const HfaPlan* plan, const HfaStep* step, int64_t* offsets);
// Runs a step. 0, or the number of the check that failed (Error of plan_check.h); nothing has been written then.
HFA_EXPORT int hfa_plan_run(const HfaPlan* plan, HfaStep* step);
