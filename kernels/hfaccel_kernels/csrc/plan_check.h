// What a step is refused for, before a thread walks it.
#pragma once

#include "plan.h"

namespace hfa {

// What hfa_plan_run returns, and native.py's words for it.
enum Error {
    kOk = 0,
    kSchema = 1,      // plan of another schema
    kStep = 2,        // sizes that contradict each other
    kToken = 3,       // an id outside the vocabulary
    kPosition = 4,    // a position outside the learned table, or negative
    kLength = 5,      // a sequence shorter than its new tokens, or none of them
    kPage = 6,        // a block table entry outside the pool
    kRow = 7,         // an asked row outside the step
    kArena = 8,       // arena too small
    kPlan = 9,        // a record that does not fit its buffers
    kAdapter = 10,    // a slot that no table has
};

// Everything that could send a thread outside its buffers. Costs about a nanosecond a token and a page.
static inline int check(const HfaPlan& plan, const HfaStep& step) {
    if (plan.schema != HFA_PLAN_SCHEMA) return kSchema;
    if (step.tokens < 1 || step.sequences < 1 || step.asked < 0 || step.threads < 1 || step.page_tokens < 1)
        return kStep;
    if (step.ahead < 1 || step.top < 0 || step.top > step.logits_ld) return kStep;
    if (step.ahead > 1 && (step.tokens != step.sequences || step.asked != step.tokens || step.top != 1))
        return kStep;
    const int64_t more = step.ahead - 1;
    if (step.q_starts[0] != 0 || step.q_starts[step.sequences] != step.tokens) return kStep;
    for (int64_t t = 0; t < step.tokens; ++t) {
        if (step.ids[t] < 0 || step.ids[t] >= plan.vocab) return kToken;
        if (step.positions[t] < 0 || (plan.max_positions && step.positions[t] >= plan.max_positions - more))
            return kPosition;
    }
    for (int64_t b = 0; b < step.sequences; ++b) {
        const int64_t n = step.q_starts[b + 1] - step.q_starts[b];
        if (n < 0 || step.lengths[b] < n || (more && n != 1)) return kLength;
        const int64_t pages = n ? (step.lengths[b] + more + step.page_tokens - 1) / step.page_tokens : 0;
        if (pages > step.table_stride) return kPage;
        for (int64_t p = 0; p < pages; ++p) {
            const int32_t page = step.block_tables[b * step.table_stride + p];
            if (page < 0 || page >= step.pages_count) return kPage;
        }
    }
    for (int64_t i = 0; i < step.asked; ++i)
        if (step.rows[i] < 0 || step.rows[i] >= step.tokens || (more && step.rows[i] != i)) return kRow;
    int32_t slot = -1;  // the largest
    for (int64_t t = 0; step.adapters && t < step.tokens; ++t) {
        if (step.adapters[t] < -1) return kAdapter;
        slot = step.adapters[t] > slot ? step.adapters[t] : slot;
    }
    for (int i = 0; i < plan.ops; ++i) {
        const HfaOp& op = plan.op[i];
        if ((op.kind == HFA_OP_LORA_SHRINK || op.kind == HFA_OP_LORA_EXPAND) && slot >= op.ints[0]) return kAdapter;
        for (int j = 0; j < 3; ++j)
            if (op.out[j] >= plan.buffers || op.view[j].buffer >= plan.buffers) return kPlan;
        if (op.kind != HFA_OP_ATTEND && op.kind != HFA_OP_CACHE && op.kind != HFA_OP_JOIN) continue;
        if (op.ints[0] < 0 || op.ints[0] >= plan.layers) return kPlan;
        const HfaPages& p = step.pages[op.ints[0]];
        if (p.kv_heads != op.view[1].count || p.k_size != op.view[1].size || p.v_size != op.view[2].size)
            return kPlan;
    }
    return kOk;
}

}  // namespace hfa
