#include "accuracy/emulated.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "kernels/cpu_tables.h"

const fv_attend_variant *accuracy_emulated_variant(const char *name)
{
    for (int32_t i = 0; i < fv_cpu_emulated_amx.num_mla_decode; i++) {
        const fv_attend_variant *variant = &fv_cpu_emulated_amx.mla_decode[i];
        if (strcmp(variant->name, name) == 0) return variant;
    }
    return NULL;
}

/* The call without its tensors and items. */
static fv_attend_params params_of(const fv_attend_variant *variant, const accuracy_samples *samples)
{
    return (fv_attend_params){
        .q_dtype = FV_DTYPE_BF16,
        .out_dtype = FV_DTYPE_BF16,
        .num_heads = samples->num_heads,
        .num_kv_heads = 1,
        .head_size = ACCURACY_HEAD_SIZE,
        .v_head_size = ACCURACY_LATENT,
        .scale = 1 / sqrtf(ACCURACY_HEAD_SIZE),
        .context_parallel = {.world = 1, .interleave = 1},
        .block_q = 1,
        .tile_keys = variant->tile_keys,
    };
}

static size_t worker_bytes(const fv_attend_variant *variant, const fv_attend_params *params)
{
    return (size_t)fv_round_up((int64_t)variant->scratch_bytes(params), FV_CACHE_LINE);
}

size_t accuracy_emulated_scratch(const fv_attend_variant *variant, const accuracy_samples *samples, int32_t num_workers)
{
    const fv_attend_params params = params_of(variant, samples);
    return worker_bytes(variant, &params) * (size_t)num_workers;
}

fv_status accuracy_emulated_run(uint16_t *out, const fv_attend_variant *variant, const accuracy_samples *samples,
                                int32_t num_samples, const fv_executor *executor, void *scratch)
{
    fv_work_item *items = calloc((size_t)num_samples, sizeof(*items));
    if (!items) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d work items", num_samples);
    for (int32_t i = 0; i < num_samples; i++) {
        items[i] = (fv_work_item){
            .seq = i,
            .table_row = i,
            .num_tokens = 1,
            .num_kv_heads = 1,
            .end_key = samples->context,
            .partial = -1,
            .query_start = i,
            .query_end = i + 1,
            .seq_len = samples->context,
        };
    }

    fv_attend_params params = params_of(variant, samples);
    params.q = samples->q;
    params.q_head_stride = ACCURACY_HEAD_SIZE * (int64_t)sizeof(uint16_t);
    params.q_token_stride = params.q_head_stride * samples->num_heads;
    params.out = out;
    params.out_head_stride = ACCURACY_LATENT * (int64_t)sizeof(uint16_t);
    params.out_token_stride = params.out_head_stride * samples->num_heads;
    params.num_seqs = num_samples;
    params.query_start = samples->query_start;
    params.seq_lens = samples->seq_lens;
    params.block_table = samples->block_table;
    params.block_table_stride = params.block_table_width = samples->table_stride;
    params.items = items;
    params.num_items = num_samples;
    params.scratch = scratch;
    params.scratch_bytes = worker_bytes(variant, &params);
    fv_status status = fv_kv_view_init(&params.cache, samples->latents, FV_KV_LAYOUT_LATENT, FV_DTYPE_BF16,
                                       samples->num_blocks, ACCURACY_BLOCK_SIZE, 1, ACCURACY_HEAD_SIZE);
    if (status == FV_OK) status = variant->launch(&(fv_launch){.executor = executor}, &params);
    free(items);
    return status;
}
