// A step's arena: where each buffer and each thread's scratch memory lie, and what a record sees of them.
#pragma once

#include <vector>

#include "ops_attend.h"
#include "ops_lora.h"
#include "plan.h"

namespace hfa {

// Matmuls of so many tokens are taken in pieces: so many for each thread, and not of more columns than this.
constexpr int64_t kPieceTokens = 16, kThreadPieces = 4, kPieceColumns = 512;

static inline int64_t pad64(int64_t v) { return (v + 63) / 64 * 64; }

struct Walk {
    const HfaPlan& plan;
    const HfaStep& step;
    bool replicated, fused;
    std::vector<int64_t> offset, copy;  // of each buffer: bytes into the arena, and from one thread's copy to the next
    int64_t scratch_offset, scratch_bytes, bytes;
    int64_t k_size = 0, v_size = 0, shared_rows = 1;  // largest of any layer
    Barrier barrier;
    mutable WorkSharing sharing;

    Walk(const HfaPlan& p, const HfaStep& s)
        : plan(p), step(s), offset(p.buffers), copy(p.buffers), sharing(s.threads) {
        replicated = s.tokens <= s.replicate && s.asked <= s.tokens;
        fused = true;
        int64_t blocks = 0;
        for (int64_t b = 0; b < s.sequences; ++b) {
            const int64_t n = s.q_starts[b + 1] - s.q_starts[b];
            if (n > 1) fused = false;
            const int64_t here = (s.lengths[b] + s.ahead - 1 + kKeys - 1) / kKeys;
            if (n == 1 && here > blocks) blocks = here;
        }
        bytes = 0;
        for (int i = 0; i < p.buffers; ++i) {
            const HfaBuffer& b = p.buffer[i];
            offset[i] = bytes;
            copy[i] = 0;
            if (b.kind == HFA_BUFFER_OUT) continue;
            int64_t size = pad64(b.kind == HFA_BUFFER_ACTS ? hfa_acts_bytes(b.acts, rows(i)) : rows(i) * b.width * 4);
            if (replicated && b.own) {
                copy[i] = size;
                size *= s.threads;
            }
            bytes += size;
        }
        for (int i = 0; i < p.ops; ++i) {
            const HfaOp& op = p.op[i];
            if (op.kind != HFA_OP_ATTEND) continue;
            const int64_t r = op.view[0].count < kTileRows ? op.view[0].count : kTileRows;
            k_size = op.view[0].size > k_size ? op.view[0].size : k_size;
            v_size = op.view[2].size > v_size ? op.view[2].size : v_size;
            shared_rows = r > shared_rows ? r : shared_rows;
        }
        scratch_offset = bytes;
        scratch_bytes = pad64(scratch_floats(k_size, v_size, shared_rows, count_segments(blocks)) * 4);
        bytes += scratch_bytes * s.threads;
    }

    int64_t rows(int buffer) const {
        const HfaBuffer& b = plan.buffer[buffer];
        return (b.asked ? step.asked : step.tokens) * b.per_row;
    }
    bool in_pieces(const HfaOp& op) const {
        return op.kind == HFA_OP_MATMUL && step.threads > 1 && rows(op.out[0]) >= kPieceTokens;
    }
    int64_t pieces_of(const HfaWeight& w) const {
        const int64_t blocks = (w.n + 15) / 16, least = (w.n + kPieceColumns - 1) / kPieceColumns;
        const int64_t count = kThreadPieces * step.threads > least ? kThreadPieces * step.threads : least;
        return count < blocks ? count : blocks;
    }
    int64_t pieces_of(const HfaOp& op) const {
        int64_t count = 0;
        for (int64_t i = 0; i < op.weights; ++i) count += pieces_of(op.weight[i]);
        return count;
    }
    bool is_out(int buffer) const { return plan.buffer[buffer].kind == HFA_BUFFER_OUT; }
    char* at(int buffer, int tid) const {
        return static_cast<char*>(step.arena) + offset[buffer] + copy[buffer] * tid;
    }
    float* f32(int buffer, int tid) const { return reinterpret_cast<float*>(at(buffer, tid)); }
    int64_t width(int buffer) const { return plan.buffer[buffer].width; }
    // Of a row of the buffer: the slot of its token's adapter.
    auto slots(int buffer) const {
        const bool asked = plan.buffer[buffer].asked;
        return [this, asked](int64_t row) { return step.adapters[asked ? step.rows[row] : row]; };
    }
    Scratch scratch(int tid, const AttendArgs& a) const {
        char* base = static_cast<char*>(step.arena) + scratch_offset + scratch_bytes * tid;
        return scratch_at(reinterpret_cast<float*>(base), a.pages->k_size, a.pages->v_size, shared_rows);
    }
};

static inline LoraTable lora_table(const HfaOp& op) {
    return {static_cast<const char*>(op.ptr[0]), op.dtype[0], op.ints[1], op.ints[2],
            static_cast<const float*>(op.ptr[2]), static_cast<const int32_t*>(op.ptr[1])};
}

static inline AttendArgs attend_args(const Walk& w, const HfaOp& op, int tid) {
    AttendArgs a;
    const HfaView *q = &op.view[0], *k = &op.view[1], *v = &op.view[2];
    a.q = w.f32(q->buffer, tid);
    a.k = w.f32(k->buffer, tid);
    a.v = w.f32(v->buffer, tid);
    a.ldq = w.width(q->buffer);
    a.ldk = w.width(k->buffer);
    a.ldv = w.width(v->buffer);
    a.qv = *q;
    a.kv = *k;
    a.vv = *v;
    a.out = op.out[0] < 0 ? nullptr : w.f32(op.out[0], tid);
    a.ldo = op.out[0] < 0 ? 0 : w.width(op.out[0]);
    a.pages = w.step.pages + op.ints[0];
    a.scale = op.reals[0];
    a.softcap = op.reals[1];
    a.window = op.ints[1];
    a.sinks = static_cast<const float*>(op.ptr[0]);
    a.slopes = static_cast<const float*>(op.ptr[1]);
    return a;
}

}  // namespace hfa
