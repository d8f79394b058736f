/* attend_paged and attend_dense on the CPU: one task of the executor for each work item, or cell of the
 * static grid. They are one code: each key has a row, in the cache or among the dense ones.
 *
 * A sequence with few rows (decode, short verification) is bound by the bytes of its keys and
 * values: attend_few_rows.c reads them where they lie, as attend_one_strip.c does for the most of the few rows, and
 * attend_packed_rows.c where they lie in pieces of 16 bytes (x-packed, shuffled). One with many (prefill) is bound by
 * arithmetic: attend_many_rows.c copies each tile into the form that its kernels like. Which one
 * serves an item depends on its sequence's query length and on G alone, so that a row's result does
 * not depend on its batch mates; but an item that spans sequences (a shared prefix) takes the one for
 * all of its rows. */
#include <assert.h>

#include "core/error.h"
#include "core/executor.h"
#include "kernels/cpu/attend_item.h"
#include "kernels/cpu/attend_one_strip.h"
#include "kernels/cpu/attend_packed_rows.h"
#include "kernels/cpu/kernels.h"

/* Of the item's query, of a KV head: what its strategy follows from. */
static int64_t num_rows_of(const fv_attend_params *params, const fv_work_item *item)
{
    const int32_t query_len = params->query_start[item->seq + 1] - params->query_start[item->seq];
    const int64_t group = params->num_heads / params->num_kv_heads;
    return fv_max_i32(query_len, item->num_tokens) * group;
}

/* Without keys where there is none. */
static fv_attend_job job_of_next(const fv_attend_params *params, const fv_work_item *next)
{
    return next ? fv_attend_job_of(params, next) : (fv_attend_job){0};
}

/* `next`: the item that the worker will probably take up afterwards, or NULL. */
static void attend_item(const fv_attend_params *params, const fv_work_item *item, const fv_work_item *next,
                        int32_t worker)
{
    void *scratch = (char *)params->scratch + (size_t)worker * params->scratch_bytes;
    const fv_attend_job job = fv_attend_job_of(params, item);
    const int64_t num_rows = num_rows_of(params, item);
#if FV_HAS_ONE_STRIP
    if (FV_ISA_SYMBOL(fv_attend_one_strip_serves)(&job, num_rows)) {
        const fv_attend_job next_job = job_of_next(params, next);
        FV_ISA_SYMBOL(fv_attend_one_strip)(&job, &next_job, scratch);
        return;
    }
#endif
    const int32_t is_ours = num_rows > FV_DECODE_ROWS ? FV_ISA_SYMBOL(fv_attend_many_serves)(&job)
                                                      : FV_ISA_SYMBOL(fv_attend_few_serves)(&job, num_rows);
#if defined(FV_HAS_PAIRS)
    if (!is_ours && FV_ISA_SYMBOL(fv_attend_few_bytes_serves)(&job, num_rows)) {
        const fv_attend_job next_job = job_of_next(params, next);
        FV_ISA_SYMBOL(fv_attend_few_bytes)(&job, &next_job, scratch);
        return;
    }
#endif
#if FV_BASE_HAS_ONE_STRIP
    if (!is_ours && FV_BASE_SYMBOL(fv_attend_one_strip_serves)(&job, num_rows)) {
        const fv_attend_job next_job = job_of_next(params, next);
        FV_BASE_SYMBOL(fv_attend_one_strip)(&job, &next_job, scratch);
        return;
    }
#endif
    if (num_rows > FV_DECODE_ROWS) {
        if (is_ours)
            FV_ISA_SYMBOL(fv_attend_many_rows)(&job, scratch);
        else
            FV_BASE_SYMBOL(fv_attend_many_rows)(&job, scratch);
        return;
    }
    if (FV_BASE_SYMBOL(fv_attend_packed_serves)(params)) {
        FV_BASE_SYMBOL(fv_attend_packed_rows)(&job, scratch);
        return;
    }
    const fv_attend_job next_job = job_of_next(params, next);
    if (is_ours)
        FV_ISA_SYMBOL(fv_attend_few_rows)(&job, &next_job, scratch);
    else
        FV_BASE_SYMBOL(fv_attend_few_rows)(&job, &next_job, scratch);
}

typedef struct item_list {
    const fv_attend_params *params;
    int32_t num_workers;
} item_list;

/* Workers take items in order, each about as long: a worker's next one is as many further as there are workers. */
static void list_task(void *user, int64_t index, int32_t worker)
{
    const item_list *list = user;
    const fv_attend_params *params = list->params;
    const int64_t next = index + list->num_workers;
    attend_item(params, &params->items[index], next < params->num_items ? &params->items[next] : NULL, worker);
}

static void grid_task(void *user, int64_t index, int32_t worker)
{
    const fv_attend_grid *grid = user;
    fv_work_item item;
    if (fv_attend_grid_item(&item, grid, index)) attend_item(grid->params, &item, NULL, worker);
}

static fv_status launch(const fv_launch *launch_at, const fv_attend_params *params)
{
    if (params->tile_keys <= 0 || params->tile_keys % FV_LANES != 0) {
        return fv_fail(FV_ERR_INVALID, "tile_keys is %d; accepted: a multiple of 8 from 8", params->tile_keys);
    }
    assert(params->scratch);
    if (params->items) {
        item_list list = {params, fv_max_i32(1, launch_at->executor->num_workers)};
        fv_executor_run(launch_at->executor, params->num_items, list_task, &list);
        return FV_OK;
    }
    fv_attend_grid grid = fv_attend_grid_of(params, launch_at->executor->num_workers);
    fv_executor_run(launch_at->executor, grid.num_cells, grid_task, &grid);
    return FV_OK;
}

static fv_status launch_dense(const fv_launch *launch_at, const fv_attend_params *params)
{
    assert(params->dense.k);
    const fv_attend_params dense = fv_attend_without_cache(params);
    return launch(launch_at, &dense);
}

static size_t scratch_bytes(const fv_attend_params *params)
{
    const size_t few = FV_ISA_SYMBOL(fv_attend_few_scratch)(params); /* the base has the same */
    const size_t pairs = FV_ISA_SYMBOL(fv_attend_many_scratch)(params);
    const size_t plain = FV_BASE_SYMBOL(fv_attend_many_scratch)(params), many = pairs > plain ? pairs : plain;
    const size_t packed = FV_BASE_SYMBOL(fv_attend_packed_scratch)(params);
    size_t most = few > many ? few : many;
    if (packed > most) most = packed;
#if FV_HAS_ONE_STRIP
    const size_t strip = FV_ISA_SYMBOL(fv_attend_one_strip_scratch)(params);
    if (strip > most) most = strip;
#endif
#if FV_BASE_HAS_ONE_STRIP
    const size_t of_base = FV_BASE_SYMBOL(fv_attend_one_strip_scratch)(params);
    if (of_base > most) most = of_base;
#endif
    return (size_t)fv_round_up((int64_t)most, FV_CACHE_LINE);
}

static const char *why_not(const fv_problem *problem)
{
    if (problem->kind != FV_ATTENTION_MHA) return "the kernel serves MHA, GQA and MQA, not MLA";
    const int32_t v_head_size = problem->mha.v_head_size ? problem->mha.v_head_size : problem->mha.head_size;
    if (problem->mha.head_size % 8 != 0 || v_head_size % 8 != 0) return "head_size is not a multiple of 8";
    return NULL;
}

/* Of a long query. The more rows meet a tile, the fewer tiles are made; the more keys it has, the fewer passes the sums
 * make through the second-level cache, which is 512 KB on CPUs with vectors of 8 lanes. */
#if defined(__AVX512F__)
#define MANY_NAME "rows384_keys128"
enum { MANY_ROWS = 384, MANY_KEYS = 128 };
#else
#define MANY_NAME "rows288_keys64"
enum { MANY_ROWS = 288, MANY_KEYS = 64 };
#endif

#if FV_HAS_ONE_STRIP
#define SHARED_ROWS FV_ISA_SYMBOL(fv_attend_one_strip_shared_rows)
#else
#define SHARED_ROWS NULL
#endif

const fv_attend_variant FV_ISA_SYMBOL(fv_attend_paged)[FV_NUM_VARIANTS_attend_paged] = {
    {"rows16_keys64", 16, 64, why_not, scratch_bytes, launch, .rescaling = FV_RESCALING_MULTIPLY,
     .shared_rows = SHARED_ROWS},
    {"rows48_keys64", 48, 64, why_not, scratch_bytes, launch, .rescaling = FV_RESCALING_MULTIPLY,
     .shared_rows = SHARED_ROWS},
    {MANY_NAME, MANY_ROWS, MANY_KEYS, why_not, scratch_bytes, launch, .rescaling = FV_RESCALING_MULTIPLY,
     .shared_rows = SHARED_ROWS},
};

const fv_attend_variant FV_ISA_SYMBOL(fv_attend_dense)[FV_NUM_VARIANTS_attend_dense] = {
    {"rows48_keys64", 48, 64, why_not, scratch_bytes, launch_dense, .rescaling = FV_RESCALING_MULTIPLY},
    {MANY_NAME, MANY_ROWS, MANY_KEYS, why_not, scratch_bytes, launch_dense, .rescaling = FV_RESCALING_MULTIPLY},
};
