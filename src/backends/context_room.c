#include "backends/context_room.h"

/* Queries of a step whose context is gathered: those that are no decodes. */
static int64_t most_extends(const fv_plan *plan)
{
    const fv_bounds *bounds = &plan->bounds;
    if (bounds->max_query_len <= plan->decode_threshold) return 0;
    return fv_min_i64(bounds->max_num_seqs, bounds->max_num_tokens / ((int64_t)plan->decode_threshold + 1));
}

/* Of counts; no more than sums bear. */
static int64_t saturating_product(int64_t a, int64_t b)
{
    const int64_t most = INT64_MAX / 4;
    return b > 0 && a > most / b ? most : a * b;
}

fv_context_limits fv_context_room_least(const fv_plan *plan)
{
    const int32_t block_tokens = fv_max_i32(plan->dense_rule.block_q, fv_short_query_tokens(&plan->dense_problem));
    return (fv_context_limits){2 * block_tokens, fv_max_i32(64, 2 * plan->problem.block_size), plan->absorbs};
}

/* A round fills at least half of the state buffers, a chunk half of the gather buffers. Rounds and chunks follow each other, so
 * that each ends within one run at most, which has a block and a piece more then. */
fv_context_room fv_context_room_of(const fv_plan *plan, const fv_context_limits *limits)
{
    const int64_t extends = most_extends(plan);
    if (limits->state_tokens == 0 || extends == 0) return (fv_context_room){0};
    const fv_bounds *bounds = &plan->bounds;
    const int64_t state = limits->state_tokens, rows = limits->gather_rows;
    const int64_t rounds = 2 * fv_ceil_div(bounds->max_num_tokens, state) + 2;
    const int64_t runs = extends + rounds; /* of all rounds */
    const int64_t chunks = fv_ceil_div(2 * runs * bounds->max_seq_len, rows) + rounds;
    const int64_t pieces = runs + chunks;
    const int64_t span = bounds->max_num_seqs + chunks + rounds;
    const int64_t blocks = runs + fv_ceil_div(bounds->max_num_tokens, plan->dense_rule.block_q);
    const int64_t passes = 2 + fv_ceil_div(2 * (int64_t)bounds->max_seq_len, rows) + 1; /* that a Q block is in */
    return (fv_context_room){
        .num_items = saturating_product(blocks * passes, plan->dense_problem.mha.num_kv_heads),
        .num_calls = 3 * rounds + (plan->absorbs ? 5 : 2) * chunks + pieces,
        .num_indices = 3 * span + chunks,
    };
}
