/* One variant and one function of each operation, which count and pass on to the best kernels of this CPU. */
#include "backends/counting_kernels.h"

#include "core/context.h"
#include "ops/kernel_table.h"

kernel_counts counted;

static const fv_kernel_table *best(void)
{
    const fv_kernel_table *const *tables = NULL;
    const int32_t num_tables = fv_cpu_tables(&tables, fv_cpu_isa());
    return tables[num_tables - 1];
}

static const fv_attend_variant *largest(const fv_attend_variant *variants, int32_t num_variants)
{
    return &variants[num_variants - 1];
}

static void count_items(const fv_attend_params *params)
{
    for (int32_t i = 0; i < params->num_items; i++) {
        const fv_work_item *item = &params->items[i];
        const int32_t query_len = params->query_start[item->seq + 1] - params->query_start[item->seq];
        counted.partial_items += item->partial >= 0;
        counted.shared_items += item->first_token + item->num_tokens > query_len;
        counted.longer_items += !params->batch_invariant && item->num_tokens > params->item_tokens;
        counted.keys_read += (int64_t)(item->end_key - item->first_key) * item->num_kv_heads;
    }
}

static fv_status attend_paged(const fv_launch *launch, const fv_attend_params *params)
{
    counted.paged += params->dense.k == NULL;
    counted.paged_and_new += params->dense.k != NULL;
    count_items(params);
    return largest(best()->attend_paged, best()->num_attend_paged)->launch(launch, params);
}

static fv_status attend_dense(const fv_launch *launch, const fv_attend_params *params)
{
    counted.dense_new += params->dense.key_row == NULL;
    counted.dense_gathered += params->dense.key_row != NULL;
    count_items(params);
    return largest(best()->attend_dense, best()->num_attend_dense)->launch(launch, params);
}

static fv_status reduce_segments(const fv_launch *launch, const fv_reduce_params *params)
{
    counted.reduce_segments++;
    return best()->reduce_segments(launch, params);
}

static fv_status kv_write(const fv_launch *launch, const fv_kv_write_params *params)
{
    counted.kv_write++;
    return best()->kv_write(launch, params);
}

static fv_status kv_gather(const fv_launch *launch, const fv_kv_gather_params *params)
{
    counted.kv_gather++;
    counted.gathered_rows += params->num_rows;
    return best()->kv_gather(launch, params);
}

static fv_status merge_states(const fv_launch *launch, const fv_merge_params *params)
{
    counted.merge_states++;
    return best()->merge_states(launch, params);
}

fv_status counting_device_create(fv_context **context, fv_device **device)
{
    static fv_attend_variant paged, dense;
    static fv_kernel_table table;
    static const fv_kernel_table *const tables[] = {&table};
    const fv_context_options options = {.struct_size = sizeof(options), .num_threads = 2, .no_plugins = 1};
    fv_status status = fv_context_create(context, &options);
    if (status != FV_OK) return status;
    paged = *largest(best()->attend_paged, best()->num_attend_paged);
    dense = *largest(best()->attend_dense, best()->num_attend_dense);
    paged.launch = attend_paged;
    dense.launch = attend_dense;
    table = (fv_kernel_table){
        .name = "counting",
        .attend_paged = &paged,
        .num_attend_paged = 1,
        .attend_dense = &dense,
        .num_attend_dense = 1,
        .reduce_segments = reduce_segments,
        .kv_write = kv_write,
        .kv_gather = kv_gather,
        .merge_states = merge_states,
    };
    status = fv_cpu_device_create(device, *context, tables, 1);
    if (status != FV_OK) return status;
    (*device)->name = "counting";
    return fv_context_add_device(*context, *device);
}
