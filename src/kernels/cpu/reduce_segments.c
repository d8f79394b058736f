/* reduce_segments: the partial results of a row, merged by maximum and sum. A task for each item; where those are too
 * few for the workers, as with one long sequence, several, of some heads each. */
#include <math.h>

#include "core/executor.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/kv_row.h"

enum {
    kept_weights = 256,      /* of a row's segments; those of further ones are computed again for each 32 columns */
    tasks_per_worker = 4,    /* where an item is dealt out */
    min_task_floats = 16384, /* of partial results: less is done before another worker has begun */
};

/* A row's segments: segment g's values lie at first + g * stride. */
typedef struct row_segments {
    const float *max, *sum, *out;
    int64_t stride, out_stride;
    int32_t num;
    float total_max;
    float weights[kept_weights];
} row_segments;

static inline float weight_of(const row_segments *row, int32_t g)
{
    return g < kept_weights ? row->weights[g] : expf(row->max[g * row->stride] - row->total_max);
}

/* out = sum over the segments of e^(max - total max) out, 8 columns at a time, times `factor`. */
static void merge_columns(void *to, const row_segments *row, float factor, int32_t size, fv_dtype dtype)
{
    const size_t bytes = fv_dtype_bytes(dtype);
    for (int32_t d = 0; d < size; d += 32) {
        const int32_t num_vectors = fv_min_i32(size - d, 32) / FV_LANES;
        fv_f32x8 acc[4] = {fv_splat(0.0f), fv_splat(0.0f), fv_splat(0.0f), fv_splat(0.0f)};
        for (int32_t g = 0; g < row->num; g++) {
            if (row->max[g * row->stride] == -INFINITY) continue; /* no key: out may be of a row that no item wrote */
            const fv_f32x8 weight = fv_splat(weight_of(row, g));
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
    row_segments row; /* not cleared: the weights are many */
    row.stride = (int64_t)fv_reduce_segment_slots(item) * params->num_heads;
    row.out_stride = row.stride * params->v_head_size;
    row.max = params->partial_max + at;
    row.sum = params->partial_sum + at;
    row.out = params->partial_out + at * params->v_head_size;
    row.num = item->num_segments;
    float max = -INFINITY;
    for (int32_t g = 0; g < row.num; g++) {
        const float segment = row.max[g * row.stride];
        if (max == max && !(segment <= max)) max = segment; /* takes a NaN on, and keeps it */
    }
    const int32_t is_empty = max == -INFINITY;
    if (params->sinks && !is_empty && params->sinks[head] > max) max = params->sinks[head];

    row.total_max = max;
    float sum = 0.0f;
    for (int32_t g = 0; g < row.num; g++) {
        const float segment = row.max[g * row.stride];
        if (segment == -INFINITY) continue;
        const float weight = expf(segment - max);
        if (g < kept_weights) row.weights[g] = weight;
        sum += row.sum[g * row.stride] * weight;
    }
    if (params->sinks) sum += expf(params->sinks[head] - max);

    const int64_t batch_token = (int64_t)item->first_token + token;
    char *out = (char *)params->out + batch_token * params->out_token_stride + head * params->out_head_stride;
    merge_columns(out, &row, is_empty ? 0.0f : 1.0f / sum, params->v_head_size, params->out_dtype);
    if (!params->lse) return;
    char *lse = (char *)params->lse + batch_token * params->lse_token_stride + head * params->lse_head_stride;
    *(float *)(void *)lse = is_empty ? -INFINITY : max + logf(sum);
}

typedef struct reduce_job {
    const fv_reduce_params *params;
    int32_t num_parts; /* tasks of an item */
} reduce_job;

static void reduce_heads(const reduce_job *job, const fv_reduce_item *item, int64_t part)
{
    const int64_t num_heads = job->params->num_heads;
    const int32_t end = (int32_t)(num_heads * (part + 1) / job->num_parts);
    for (int32_t token = 0; token < item->num_tokens; token++) {
        for (int32_t head = (int32_t)(num_heads * part / job->num_parts); head < end; head++) {
            reduce_row(job->params, item, token, head);
        }
    }
}

static void list_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const reduce_job *job = user;
    reduce_heads(job, &job->params->items[index / job->num_parts], index % job->num_parts);
}

static void grid_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const reduce_job *job = user;
    fv_reduce_item item;
    if (!fv_grid_reduce_item(&item, job->params, (int32_t)(index / job->num_parts))) return;
    reduce_heads(job, &item, index % job->num_parts);
}

/* Floats of partial results; of a Q block of the grid those of one token. */
static int64_t partial_floats(const fv_reduce_params *params)
{
    int64_t num_slots = params->items ? 0 : (int64_t)params->num_q_blocks * params->num_segments;
    for (int32_t i = 0; params->items && i < params->num_items; i++) {
        num_slots += (int64_t)params->items[i].num_segments * params->items[i].num_tokens;
    }
    return num_slots * params->num_heads * params->v_head_size;
}

fv_status FV_ISA_SYMBOL(fv_reduce_segments)(const fv_launch *launch, const fv_reduce_params *params)
{
    const int64_t num_items = params->items ? params->num_items : params->num_q_blocks;
    if (num_items <= 0) return FV_OK;
    const int64_t wanted = fv_ceil_div((int64_t)launch->executor->num_workers * tasks_per_worker, num_items);
    const int64_t most = fv_min_i64(params->num_heads, partial_floats(params) / (num_items * min_task_floats));
    reduce_job job = {params, (int32_t)fv_max_i64(1, fv_min_i64(wanted, most))};
    fv_executor_run(launch->executor, num_items * job.num_parts, params->items ? list_task : grid_task, &job);
    return FV_OK;
}
