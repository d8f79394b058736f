#include "support/attend_run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/executor.h"

enum { FENCE_BYTES = 64, FENCE = 0x5c };

void attend_run_reduce(const fv_attend_params *params, const fv_reduce_item *reduces, int32_t num_reduces,
                       fv_reduce_segments_fn reduce_segments)
{
    const fv_executor executor = {.num_workers = 1};
    const fv_launch launch = {.executor = &executor};
    const fv_reduce_params reduce = {
        .out = params->out,
        .out_token_stride = params->out_token_stride,
        .out_head_stride = params->out_head_stride,
        .out_dtype = params->out_dtype,
        .lse = params->lse,
        .lse_token_stride = params->lse_token_stride,
        .lse_head_stride = params->lse_head_stride,
        .sinks = params->sinks,
        .num_heads = params->num_heads,
        .v_head_size = params->v_head_size,
        .items = params->items ? reduces : NULL,
        .num_items = num_reduces,
        .num_seqs = params->num_seqs,
        .query_start = params->query_start,
        .block_q = params->block_q,
        .num_q_blocks = params->num_q_blocks,
        .whole_queries = params->whole_queries,
        .num_segments = params->num_segments,
        .partial_out = params->partial_out,
        .partial_max = params->partial_max,
        .partial_sum = params->partial_sum,
    };
    assert_int_equal(reduce_segments(&launch, &reduce), FV_OK);
}

static void run_in_turns(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    const int32_t *num_workers = user;
    for (int64_t i = 0; i < num_tasks; i++) task(task_user, i, (int32_t)(i % *num_workers));
}

void attend_run_variant_by(int32_t num_workers, const fv_attend_params *params, const fv_reduce_item *reduces,
                           int32_t num_reduces, const fv_kernel_table *table, const fv_attend_variant *variant)
{
    const fv_executor executor = {.parallel_for = run_in_turns, .num_workers = num_workers, .user = &num_workers};
    const fv_launch launch = {.executor = &executor};
    fv_attend_params given = *params;
    given.scratch_bytes = variant->scratch_bytes(&given);
    const size_t bytes = given.scratch_bytes * (size_t)num_workers;
    char *scratch = aligned_alloc(64, (size_t)fv_round_up((int64_t)bytes + FENCE_BYTES, 64));
    assert_non_null(scratch);
    memset(scratch, 0xff, bytes);
    memset(scratch + bytes, FENCE, FENCE_BYTES);
    given.scratch = scratch;
    assert_int_equal(variant->launch(&launch, &given), FV_OK);
    for (int32_t i = 0; i < FENCE_BYTES; i++) assert_int_equal(scratch[bytes + (size_t)i], FENCE);
    free(scratch);
    const int32_t has_segments = params->items ? num_reduces > 0 : params->num_segments > 1;
    if (has_segments) attend_run_reduce(params, reduces, num_reduces, table->reduce_segments);
}

void attend_run_variant(const fv_attend_params *params, const fv_reduce_item *reduces, int32_t num_reduces,
                        const fv_kernel_table *table, const fv_attend_variant *variant)
{
    attend_run_variant_by(1, params, reduces, num_reduces, table, variant);
}
