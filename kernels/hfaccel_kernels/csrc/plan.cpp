// The walker: checks a step and lets every thread of one region walk the records.
#include "plan.h"

#include <time.h>

#include <vector>

#include "ops_columns.h"
#include "ops_experts.h"
#include "ops_pick.h"
#include "ops_rows.h"
#include "parallel.h"
#include "plan_check.h"
#include "plan_walk.h"

namespace hfa {
namespace {

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// turn: of the records that are taken in pieces.
void run(const Walk& w, const HfaOp& op, int64_t turn, int tid, int nthreads) {
    const HfaStep& step = w.step;
    // Rows of a record cut by rows.
    auto mine = [&](int buffer) -> Rows {
        const int64_t rows = w.rows(buffer);
        if (w.replicated) return {0, rows};
        const Range r = share(rows, tid, nthreads);
        return {r.begin, r.end};
    };
    // Columns of a record cut by columns.
    auto columns = [](int64_t n, int at, int count) -> Rows {
        const Range r = share((n + 15) / 16, at, count);
        return {r.begin * 16, r.end * 16 < n ? r.end * 16 : n};
    };
    switch (op.kind) {
        case HFA_OP_EMBED: {
            const HfaWeight& table = *op.weight;
            const Rows r = mine(op.out[0]);
            float* out = w.f32(op.out[0], tid);
            for (int64_t t = r.begin; t < r.end; ++t) {
                embed_row(table, step.ids[t], op.reals[0], out + t * table.k);
                if (op.ptr[0])
                    add_to(out + t * table.k, op.ptr[0], (step.positions[t] + op.ints[0]) * table.k, op.dtype[0],
                           table.k);
            }
            return;
        }
        case HFA_OP_ROPE: {
            const Rows r = mine(op.out[0]);
            float* out = w.f32(op.out[0], tid);
            const int64_t half = w.width(op.out[0]) / 2;
            for (int64_t t = r.begin; t < r.end; ++t)
                rope_row(static_cast<const float*>(op.ptr[0]), half, op.reals[0], step.positions[t],
                         out + t * 2 * half);
            return;
        }
        case HFA_OP_NORM: {
            const HfaView& v = op.view[0];
            const NormArgs args{op.ptr[0],    op.ptr[1],        op.dtype[0],      op.dtype[1],
                                op.reals[0], (op.ints[0] & 1) != 0, (op.ints[0] & 2) != 0};
            const float* x = w.f32(v.buffer, tid);
            float* out = w.f32(op.out[0], tid);
            const int64_t ldx = w.width(v.buffer), ldo = w.width(op.out[0]);
            const Rows r = mine(op.out[0]);
            for (int64_t t = r.begin; t < r.end; ++t)
                for (int64_t h = 0; h < v.count; ++h)
                    norm_row(args, x + t * ldx + v.offset + h * v.stride, v.size, out + t * ldo + h * v.size);
            return;
        }
        case HFA_OP_QUANT: {
            const HfaWeight& like = *w.plan.buffer[op.out[0]].acts;
            const Rows r = mine(op.out[0]);
            HfaActs acts;
            hfa_acts_view(&like, w.at(op.out[0], tid), w.rows(op.out[0]), &acts);
            const int64_t rows = w.rows(op.out[0]), ldx = w.width(op.view[0].buffer);
            const float* x = w.f32(op.view[0].buffer, tid);
            for (int64_t t = r.begin; t < r.end; ++t)  // share t of `rows` is row t
                hfa_quantize_rows(&like, x, HFA_F32, ldx, rows, &acts, (int)t, (int)rows);
            return;
        }
        case HFA_OP_MATMUL: {
            const int in = op.view[0].buffer;
            const int64_t m = w.rows(op.out[0]);
            HfaActs acts{};
            if (op.weight->kind == HFA_PACKED) hfa_acts_view(op.weight, w.at(in, tid), w.rows(in), &acts);
            // Share `at` of `count` of the i-th weight's columns. In sixteens, as records that are cut by columns are,
            // so that each thread finds its own there; else plain weights are handed over whole, to read ahead in.
            auto product = [&](int64_t i, int at, int count, bool sixteens) {
                const HfaWeight& weight = op.weight[i];
                const bool direct = w.is_out(op.out[i]), transposed = op.ints[0];
                char* y = direct ? static_cast<char*>(step.logits) : w.at(op.out[i], tid);
                const int32_t dtype = direct ? step.logits_dtype : HFA_F32;
                const int64_t ldy = direct ? step.logits_ld : w.width(op.out[i]);
                if (!sixteens && !transposed && weight.kind != HFA_PACKED)
                    return hfa_matmul(&weight, &acts, w.f32(in, tid), w.width(in), m, y, dtype, ldy, at, count);
                const Rows c = columns(weight.n, at, count);
                if (c.begin >= c.end) return;
                if (transposed)
                    return matmul_kn(weight, w.f32(in, tid), w.width(in), m, reinterpret_cast<float*>(y), ldy, c.begin,
                                     c.end);
                const HfaWeight cut = part_of(weight, c.begin / 16, (c.end + 15) / 16);
                hfa_matmul(&cut, &acts, w.f32(in, tid), w.width(in), m, y + c.begin * (dtype == HFA_F32 ? 4 : 2), dtype,
                           ldy, 0, 1);
            };
            if (!w.in_pieces(op)) {
                for (int64_t i = 0; i < op.weights; ++i) product(i, tid, nthreads, true);
                return;
            }
            w.sharing.take(w.pieces_of(op), turn, tid, nthreads, [&](int64_t piece) {
                int64_t i = 0, count;
                for (; piece >= (count = w.pieces_of(op.weight[i])); ++i) piece -= count;
                product(i, (int)piece, (int)count, false);
            });
            return;
        }
        case HFA_OP_ROTARY: {
            const HfaView& v = op.view[0];
            const float *x = w.f32(v.buffer, tid), *table = w.f32(op.view[1].buffer, tid);
            float* out = w.f32(op.out[0], tid);
            const int64_t ldx = w.width(v.buffer), ldo = w.width(op.out[0]), ldt = w.width(op.view[1].buffer);
            const Rows r = mine(op.out[0]);
            for (int64_t t = r.begin; t < r.end; ++t)
                for (int64_t h = 0; h < v.count; ++h)
                    rotary_head(x + t * ldx + v.offset + h * v.stride, table + t * ldt, ldt / 2, v.size, op.ints[0],
                                out + t * ldo + h * v.size);
            return;
        }
        case HFA_OP_CACHE: {
            if (w.fused) return;
            const AttendArgs a = attend_args(w, op, tid);
            const Range r = share(step.tokens, tid, nthreads);
            int64_t b = 0;
            for (int64_t t = r.begin; t < r.end; ++t) {
                while (t >= step.q_starts[b + 1]) ++b;
                const int64_t slot = slot_index(step, b, step.lengths[b] - (step.q_starts[b + 1] - t));
                for (int64_t g = 0; g < a.kv.count; ++g) write_token(a, t, slot, g);
            }
            return;
        }
        case HFA_OP_ATTEND: {
            const AttendArgs a = attend_args(w, op, tid);
            attend(a, step, w.scratch(tid, a), w.fused, tid, nthreads);
            return;
        }
        case HFA_OP_JOIN: {
            const AttendArgs a = attend_args(w, op, tid);
            const Rows r = mine(op.out[0]);
            const int64_t width = w.width(op.out[0]);
            memcpy(w.f32(op.out[0], tid) + r.begin * width, w.f32(op.ints[2], tid) + r.begin * width,
                   (r.end - r.begin) * width * 4);
            join_shared(a, nthreads, r.begin, r.end, w.f32(op.out[0], tid), width,
                        [&](int t) { return w.scratch(t, a); });
            return;
        }
        case HFA_OP_ACT: {
            const HfaView &g = op.view[0], &u = op.view[1];
            const float* gate = w.f32(g.buffer, tid) + g.offset;
            const float* up = u.buffer < 0 ? nullptr : w.f32(u.buffer, tid) + u.offset;
            float* out = w.f32(op.out[0], tid);
            const int64_t ldg = w.width(g.buffer), ldu = up ? w.width(u.buffer) : 0, ldo = w.width(op.out[0]);
            const Rows c = columns(g.size, tid, nthreads);
            for (int64_t t = 0; t < w.rows(op.out[0]); ++t)
                act_row(op.ints[0], gate + t * ldg, up ? up + t * ldu : nullptr, out + t * ldo, c.begin, c.end);
            return;
        }
        case HFA_OP_ADD: {
            const Rows r = mine(op.out[0]);
            const int64_t width = w.width(op.out[0]);
            float* x = w.f32(op.out[0], tid);
            const float* y = w.f32(op.view[0].buffer, tid);
            for (int64_t i = r.begin * width; i < r.end * width; i += 16) {
                const int n = r.end * width - i < 16 ? (int)(r.end * width - i) : 16;
                store_as(x, i, HFA_F32, load_as(x, i, HFA_F32, n) + load_as(y, i, HFA_F32, n), n);
            }
            return;
        }
        case HFA_OP_SCALE: {
            const Rows r = mine(op.out[0]);
            const int64_t width = w.width(op.out[0]);
            const float *x = w.f32(op.view[0].buffer, tid), *scale = static_cast<const float*>(op.ptr[0]);
            float* out = w.f32(op.out[0], tid);
            for (int64_t t = r.begin; t < r.end; ++t) {
                for (int64_t i = 0; i < width; i += 16) {
                    const int n = width - i < 16 ? (int)(width - i) : 16;
                    const Vf by = load_as(scale, i, HFA_F32, n);
                    store_as(out, t * width + i, HFA_F32, load_as(x, t * width + i, HFA_F32, n) * by, n);
                }
            }
            return;
        }
        case HFA_OP_LORA_SHRINK: {
            if (!step.adapters) return;
            const LoraTable table = lora_table(op);
            const int in = op.view[0].buffer, out = op.out[0];
            const Rows r = mine(out);
            lora_runs(table, r.begin, r.end, w.slots(out), [&](int32_t slot, int64_t rank, int64_t first, int64_t last) {
                lora_shrink(table, slot, rank, w.f32(in, tid), w.width(in), first, last, w.f32(out, tid), w.width(out));
            });
            return;
        }
        case HFA_OP_LORA_EXPAND: {
            if (!step.adapters) return;
            const LoraTable table = lora_table(op);
            const int in = op.view[0].buffer, out = op.out[0];
            const Rows c = columns(w.width(out), tid, nthreads);
            if (c.begin >= c.end) return;
            lora_runs(table, 0, w.rows(out), w.slots(out), [&](int32_t slot, int64_t rank, int64_t first, int64_t last) {
                lora_expand(table, slot, rank, w.f32(in, tid), w.width(in), first, last, op.ints[3], w.f32(out, tid),
                            w.width(out), c.begin, c.end);
            });
            return;
        }
        case HFA_OP_GATHER: {
            const Rows r = mine(op.out[0]);
            const int64_t width = w.width(op.out[0]);
            const float* x = w.f32(op.view[0].buffer, tid);
            float* out = w.f32(op.out[0], tid);
            for (int64_t t = r.begin; t < r.end; ++t) memcpy(out + t * width, x + step.rows[t] * width, width * 4);
            return;
        }
        case HFA_OP_ROUTE: {
            const int64_t experts = op.view[0].size, k = op.ints[0];
            const float* scores = w.f32(op.view[0].buffer, tid);
            int32_t* chosen = reinterpret_cast<int32_t*>(w.at(op.out[0], tid));
            float* weights = w.f32(op.out[1], tid);
            const Rows r = mine(op.out[1]);
            for (int64_t t = r.begin; t < r.end; ++t)
                route_row(scores + t * experts, experts, k, op.ints[1], chosen + t * k, weights + t * k);
            return;
        }
        case HFA_OP_DISPATCH: {  // rows of x, once for each choice, those of one expert together
            const int32_t* chosen = reinterpret_cast<const int32_t*>(w.at(op.view[1].buffer, tid));
            const int64_t k = op.view[1].size, width = w.width(op.out[0]);
            const Grouping g(chosen, w.rows(op.out[0]), op.ints[0]);
            const float* x = w.f32(op.view[0].buffer, tid);
            float* out = w.f32(op.out[0], tid);
            const Rows r = mine(op.out[0]);
            for (int64_t c = 0; c < w.rows(op.out[0]); ++c)
                if (g.place[c] >= r.begin && g.place[c] < r.end)
                    memcpy(out + g.place[c] * width, x + c / k * width, width * 4);
            return;
        }
        case HFA_OP_EXPERTS: {  // the weights of one expert after another times their rows; ints[0] pieces of columns
            const int in = op.view[0].buffer;
            const int32_t* chosen = reinterpret_cast<const int32_t*>(w.at(op.view[1].buffer, tid));
            const Grouping g(chosen, w.rows(in), op.weights);
            HfaActs acts{};
            if (op.weight->kind == HFA_PACKED) hfa_acts_view(op.weight, w.at(in, tid), w.rows(in), &acts);
            const int64_t ldx = w.width(in), ldy = w.width(op.out[0]), piece = op.weight->n / op.ints[0];
            const Rows c = columns(piece, tid, nthreads);
            for (int64_t e = 0; e < op.weights && c.begin < c.end; ++e) {
                const int64_t first = g.starts[e], m = g.starts[e + 1] - first;
                for (int64_t at = 0; m && at < op.weight->n; at += piece) {
                    HfaWeight part = part_of(op.weight[e], (at + c.begin) / 16, (at + c.end + 15) / 16);
                    const HfaActs here = acts.codes ? hfa_acts_from(acts, first) : acts;
                    hfa_matmul(&part, &here, w.f32(in, tid) + first * ldx, ldx, m,
                               w.f32(op.out[0], tid) + first * ldy + at + c.begin, HFA_F32, ldy, 0, 1);
                }
            }
            return;
        }
        case HFA_OP_MIX: {
            const int32_t* chosen = reinterpret_cast<const int32_t*>(w.at(op.view[1].buffer, tid));
            const float *y = w.f32(op.view[0].buffer, tid), *weights = w.f32(op.view[2].buffer, tid);
            const int64_t k = op.view[1].size, width = w.width(op.out[0]);
            const Grouping g(chosen, w.rows(op.view[0].buffer), op.ints[0]);
            float* out = w.f32(op.out[0], tid);
            const Rows r = mine(op.out[0]);
            for (int64_t t = r.begin; t < r.end; ++t)
                mix_row(weights + t * k, g.place.data() + t * k, k, y, width, out + t * width);
            return;
        }
        case HFA_OP_LOGITS: {
            const int64_t width = w.width(op.view[0].buffer);
            const float* x = w.f32(op.view[0].buffer, tid);
            const Rows c = columns(width, tid, nthreads);
            for (int64_t t = 0; t < step.asked; ++t)
                logits_columns(x + t * width, op.reals[0], op.reals[1], step.logits, t * step.logits_ld,
                               step.logits_dtype, c.begin, c.end);
            return;
        }
    }
}

// Writes a step's candidates and, where another step follows, what it begins with. Whether a run ends here: one of
// `ends` was chosen, or what no embedding has (a head may have more rows).
bool next_tokens(HfaStep& step, int64_t vocab, int64_t round, const Best* lists, int parts) {
    bool ended = false;
    for (int64_t row = 0; row < step.asked; ++row) {
        const int64_t at = (round * step.asked + row) * step.top;
        merge_best(lists + row * parts * step.top, parts, step.top, step.best + at, step.best_ids + at);
        if (step.ahead == 1) continue;
        for (int64_t e = 0; e < step.ends_count; ++e) ended |= step.best_ids[at] == step.ends[e];
        ended |= step.best_ids[at] >= vocab;
        step.ids[row] = step.best_ids[at];
        ++step.positions[row];
        ++step.lengths[row];
    }
    step.done = round + 1;
    return ended;
}

}  // namespace
}  // namespace hfa

using hfa::Walk;

HFA_EXPORT int64_t hfa_sizeof_plan(int what) {
    switch (what) {
        case 0: return sizeof(HfaOp);
        case 1: return sizeof(HfaBuffer);
        case 2: return sizeof(HfaPlan);
        case 3: return sizeof(HfaPages);
        default: return sizeof(HfaStep);
    }
}

HFA_EXPORT int64_t hfa_plan_arena(const HfaPlan* plan, const HfaStep* step) { return Walk(*plan, *step).bytes; }

// Where each buffer begins in the arena (thread 0's copy): for tests that look inside.
HFA_EXPORT void hfa_plan_offsets(const HfaPlan* plan, const HfaStep* step, int64_t* offsets) {
    const Walk walk(*plan, *step);
    for (int i = 0; i < plan->buffers; ++i) offsets[i] = walk.offset[i];
}

HFA_EXPORT int hfa_plan_run(const HfaPlan* plan, HfaStep* step) {
    using namespace hfa;
    step->done = 0;
    if (const int error = check(*plan, *step)) return error;
    Walk walk(*plan, *step);
    if (walk.bytes > step->arena_bytes) return kArena;
    const int bit = walk.replicated | walk.fused << 1;
    const int64_t found = step->asked * step->top;
    std::vector<Best> lists(found * step->threads);
    bool ended = false;
    parallel(step->threads, [&](int tid, int nthreads) {
        const bool timed = step->profile && tid == 0;
        int64_t turn = 0;
        for (int64_t round = 0; round < step->ahead && !ended; ++round) {
            for (int i = 0; i < plan->ops; ++i) {
                const HfaOp& op = plan->op[i];
                int64_t start = timed ? now_ns() : 0;
                if (op.sync >> bit & 1) walk.barrier.wait(nthreads);
                if (timed) {
                    const int64_t waited = now_ns();
                    step->profile[2 * i + 1] += waited - start;
                    start = waited;
                }
                run(walk, op, turn, tid, nthreads);
                if (timed) step->profile[2 * i] += now_ns() - start;
                if (!walk.in_pieces(op)) continue;
                if (timed) start = now_ns();
                walk.barrier.wait(nthreads);  // any thread may have written what the next record takes for its own
                if (timed) step->profile[2 * i + 1] += now_ns() - start;
                ++turn;
            }
            if (!step->top) continue;
            walk.barrier.wait(nthreads);
            const Range columns = share((step->logits_ld + 15) / 16, tid, nthreads);
            const int64_t end = columns.end * 16 < step->logits_ld ? columns.end * 16 : step->logits_ld;
            for (int64_t row = 0; row < step->asked; ++row)
                best_of(step->logits, row * step->logits_ld, step->logits_dtype, columns.begin * 16, end, step->top,
                        &lists[(row * nthreads + tid) * step->top]);
            walk.barrier.wait(nthreads);
            if (tid == 0) ended = next_tokens(*step, plan->vocab, round, lists.data(), nthreads);
            if (step->ahead > 1) walk.barrier.wait(nthreads);
        }
    });
    if (!step->top) step->done = 1;
    return kOk;
}
