/* Small gather buffers make many chunks, and each has items, calls and indices of its own: below some size they take more
 * memory than the buffers give back. */
#include "backends/context_room.h"

#define MAX_GATHER_ROWS (32 * 1024)  /* as in vLLM's ROCM_AITER_FA */
#define FEW_ENTRY_BYTES (1ll << 20)  /* for which no workspace need be larger, */
#define MOST_ENTRY_BYTES (1ll << 30) /* and with which a plan is still made: MOST_WORK_ITEMS of strategy.c */

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

/* From one round's first token to the next one's there are state_tokens, less a Q block that did not fit; all chunks of a round
 * but the last are full, less a cache block. Rounds and chunks follow each other, so that each ends within one run at most, which
 * has a block and a piece more then. */
fv_context_room fv_context_room_of(const fv_plan *plan, const fv_context_limits *limits)
{
    const int64_t extends = most_extends(plan);
    if (limits->state_tokens == 0 || extends == 0) return (fv_context_room){0};
    const fv_bounds *bounds = &plan->bounds;
    const int64_t round_tokens = limits->state_tokens - fv_most_item_tokens(&plan->dense_rule) + 1;
    const int64_t chunk_rows = limits->gather_rows - plan->problem.block_size + 1;
    const int64_t rounds = fv_ceil_div(bounds->max_num_tokens, round_tokens) + 1;
    const int64_t runs = extends + rounds; /* of all rounds */
    const int64_t chunks = fv_ceil_div(runs * bounds->max_seq_len, chunk_rows) + rounds;
    const int64_t pieces = runs + chunks;
    const int64_t span = bounds->max_num_seqs + chunks + rounds;
    const int64_t blocks = runs + fv_ceil_div(bounds->max_num_tokens, fv_least_block_tokens(&plan->dense_rule));
    const int64_t passes = 2 + fv_ceil_div(bounds->max_seq_len, chunk_rows) + 1; /* that a Q block is in */
    return (fv_context_room){
        .num_items = saturating_product(blocks * passes, fv_most_head_runs(&plan->dense_rule)),
        .num_calls = 3 * rounds + (plan->absorbs ? 5 : 2) * chunks + pieces,
        .num_indices = 3 * span + chunks,
    };
}

/* Of all copies that the plan holds. */
static int64_t entry_bytes(const fv_plan *plan, const fv_context_limits *limits)
{
    const fv_context_room room = fv_context_room_of(plan, limits);
    const int64_t copies = plan->device->host_is_device ? 1 : 1 + FV_STAGING_RING;
    const int64_t step_bytes = saturating_product(room.num_items, sizeof(fv_work_item)) +
                               saturating_product(room.num_indices, sizeof(int32_t));
    return saturating_product(step_bytes, copies) + saturating_product(room.num_calls, sizeof(fv_call));
}

int32_t fv_context_room_most_rows(const fv_plan *plan)
{
    const int64_t all_keys = (int64_t)plan->bounds.max_num_seqs * plan->bounds.max_seq_len;
    return (int32_t)fv_min_i64(fv_round_up(all_keys, plan->problem.block_size), MAX_GATHER_ROWS);
}

fv_context_limits fv_context_room_fewest(const fv_plan *plan)
{
    return (fv_context_limits){2 * fv_most_item_tokens(&plan->dense_rule), fv_max_i32(64, 2 * plan->problem.block_size),
                               plan->absorbs};
}

fv_context_limits fv_context_room_least(const fv_plan *plan, size_t row_bytes)
{
    fv_context_limits limits = fv_context_room_fewest(plan);
    const int64_t most_rows = fv_context_room_most_rows(plan);
    while (limits.gather_rows < most_rows) {
        const int64_t most_bytes = fv_max_i64((int64_t)row_bytes * limits.gather_rows, FEW_ENTRY_BYTES);
        if (entry_bytes(plan, &limits) <= fv_min_i64(most_bytes, MOST_ENTRY_BYTES)) break;
        limits.gather_rows = (int32_t)fv_min_i64(2 * (int64_t)limits.gather_rows, most_rows);
    }
    return limits;
}
