/* reduce_segments: the partial results of a row, merged by maximum and sum; a task for each item. */
#include <math.h>

#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_row.h"

/* A row's segments: segment g's values lie at first + g * stride. */
typedef struct row_segments {
    const float *max, *sum, *out;
    int64_t stride, out_stride;
    int32_t num;
} row_segments;

/* out = sum over the segments of 2^(max - total max) out, 8 columns at a time, times `factor`. */
static void merge_columns(void *to, const row_segments *row, float total_max, float factor, int32_t size,
                          fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    for (int32_t d = 0; d < size; d += 32) {
        const int32_t num_vectors = fv_min_i32(size - d, 32) / FV_LANES;
        fv_f32x8 acc[4] = {fv_splat(0.0f), fv_splat(0.0f), fv_splat(0.0f), fv_splat(0.0f)};
        for (int32_t g = 0; g < row->num; g++) {
            const float max = row->max[g * row->stride];
            if (max == -INFINITY) continue; /* no key: out may be of a row that no item wrote */
            const fv_f32x8 weight = fv_splat(expf(max - total_max));
            const float *out = row->out + g * row->out_stride + d;
            for (int32_t i = 0; i < num_vectors; i++) acc[i] = fv_fma(weight, fv_load_f32(out + i * FV_LANES), acc[i]);
        }
        for (int32_t i = 0; i < num_vectors; i++) {
            fv_store8((char *)to + (size_t)(d + i * FV_LANES) * bytes, acc[i] * factor, dtype);
        }
    }
}

static void reduce_row(const fv_reduce_params *params, const fv_reduce_item *item, int32_t token, int32_t head)
{
    const int64_t at = ((int64_t)item->partial + token) * params->num_heads + head;
    const int64_t stride = (int64_t)fv_reduce_segment_slots(item) * params->num_heads;
    const row_segments row = {
        .max = params->partial_max + at,
        .sum = params->partial_sum + at,
        .out = params->partial_out + at * params->v_head_size,
        .stride = stride,
        .out_stride = stride * params->v_head_size,
        .num = item->num_segments,
    };
    float max = -INFINITY;
    for (int32_t g = 0; g < row.num; g++) {
        const float segment = row.max[g * row.stride];
        if (!(segment <= max)) max = segment; /* takes a NaN on */
    }
    const int32_t is_empty = max == -INFINITY;
    if (params->sinks && !is_empty && params->sinks[head] > max) max = params->sinks[head];

    float sum = 0.0f;
    for (int32_t g = 0; g < row.num; g++) {
        if (row.max[g * row.stride] != -INFINITY) sum += row.sum[g * row.stride] * expf(row.max[g * row.stride] - max);
    }
    if (params->sinks) sum += expf(params->sinks[head] - max);

    const int64_t batch_token = (int64_t)item->first_token + token;
    char *out = (char *)params->out + batch_token * params->out_token_stride + head * params->out_head_stride;
    merge_columns(out, &row, max, is_empty ? 0.0f : 1.0f / sum, params->v_head_size, params->out_dtype);
    if (!params->lse) return;
    char *lse = (char *)params->lse + batch_token * params->lse_token_stride + head * params->lse_head_stride;
    *(float *)(void *)lse = is_empty ? -INFINITY : max + logf(sum);
}

static void reduce_item(const fv_reduce_params *params, const fv_reduce_item *item)
{
    for (int32_t token = 0; token < item->num_tokens; token++) {
        for (int32_t head = 0; head < params->num_heads; head++) reduce_row(params, item, token, head);
    }
}

static void list_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_reduce_params *params = user;
    reduce_item(params, &params->items[index]);
}

static void grid_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    fv_reduce_item item;
    if (fv_grid_reduce_item(&item, user, (int32_t)index)) reduce_item(user, &item);
}

fv_status FV_ISA_SYMBOL(fv_reduce_segments)(const fv_launch *launch, const fv_reduce_params *params)
{
    if (params->items)
        fv_executor_run(launch->executor, params->num_items, list_task, (void *)params);
    else
        fv_executor_run(launch->executor, params->num_q_blocks, grid_task, (void *)params);
    return FV_OK;
}
