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

/* What a worker keeps from item to item, at the start of its scratch. */
typedef struct worker_notes {
    int64_t asked_for; /* the task whose first keys it has asked for, or -1 */
} worker_notes;

#define NOTES_BYTES FV_CACHE_LINE

static void *scratch_of(const fv_attend_params *params, int32_t worker)
{
    return (char *)params->scratch + (size_t)worker * params->scratch_bytes;
}

typedef void (*few_rows_fn)(const fv_attend_job *job, const fv_attend_job *next, void *scratch);

/* What serves the item by rows that are read where they lie, and asks for those of the next one; NULL: no such strategy. */
static few_rows_fn few_rows_of(const fv_attend_job *job, int64_t num_rows, int32_t is_ours)
{
#if FV_HAS_ONE_STRIP
    if (FV_ISA_SYMBOL(fv_attend_one_strip_serves)(job, num_rows)) return FV_ISA_SYMBOL(fv_attend_one_strip);
#endif
#if defined(FV_HAS_PAIRS)
    if (!is_ours && FV_ISA_SYMBOL(fv_attend_few_bytes_serves)(job, num_rows)) return FV_ISA_SYMBOL(fv_attend_few_bytes);
#endif
#if FV_BASE_HAS_ONE_STRIP
    if (!is_ours && FV_BASE_SYMBOL(fv_attend_one_strip_serves)(job, num_rows))
        return FV_BASE_SYMBOL(fv_attend_one_strip);
#endif
    if (num_rows > FV_DECODE_ROWS || FV_BASE_SYMBOL(fv_attend_packed_serves)(job->params)) return NULL;
    return is_ours ? FV_ISA_SYMBOL(fv_attend_few_rows) : FV_BASE_SYMBOL(fv_attend_few_rows);
}

/* `next`: the item that the worker will probably take up afterwards, or NULL. Returns 1 where its first keys have been asked for. */
static int32_t attend_item(const fv_attend_params *params, const fv_work_item *item, const fv_work_item *next,
                           int32_t is_asked_for, int32_t worker)
{
    void *scratch = (char *)scratch_of(params, worker) + NOTES_BYTES;
    fv_attend_job job = fv_attend_job_of(params, item);
    job.is_asked_for = is_asked_for;
    const int64_t num_rows = num_rows_of(params, item);
    const int32_t is_ours = num_rows > FV_DECODE_ROWS ? FV_ISA_SYMBOL(fv_attend_many_serves)(&job)
                                                      : FV_ISA_SYMBOL(fv_attend_few_serves)(&job, num_rows);
    const few_rows_fn few_rows = few_rows_of(&job, num_rows, is_ours);
    if (few_rows) {
        const fv_attend_job next_job = next ? fv_attend_job_of(params, next) : (fv_attend_job){0}; /* without keys */
        few_rows(&job, &next_job, scratch);
        return next != NULL;
    }
    if (num_rows <= FV_DECODE_ROWS)
        FV_BASE_SYMBOL(fv_attend_packed_rows)(&job, scratch);
    else if (is_ours)
        FV_ISA_SYMBOL(fv_attend_many_rows)(&job, scratch);
    else
        FV_BASE_SYMBOL(fv_attend_many_rows)(&job, scratch);
    return 0;
}

/* Items or cells in order, each about as long: a worker's next one is as many further as there are workers. */
typedef struct task_order {
    const fv_attend_params *params;
    const fv_attend_grid *grid; /* NULL: the list */
    int64_t num_tasks;
    int32_t num_workers;
} task_order;

/* NULL: there is none, or a cell without work; `cell` is its memory. */
static const fv_work_item *item_of(const task_order *order, int64_t index, fv_work_item *cell)
{
    if (index >= order->num_tasks) return NULL;
    if (!order->grid) return &order->params->items[index];
    return fv_attend_grid_item(cell, order->grid, index) ? cell : NULL;
}

static void attend_task(void *user, int64_t index, int32_t worker)
{
    const task_order *order = user;
    worker_notes *notes = scratch_of(order->params, worker);
    fv_work_item cells[2];
    const fv_work_item *item = item_of(order, index, &cells[0]);
    if (!item) return;
    const int64_t next = index + order->num_workers;
    const int32_t is_asked_for = notes->asked_for == index;
    const int32_t has_asked = attend_item(order->params, item, item_of(order, next, &cells[1]), is_asked_for, worker);
    notes->asked_for = has_asked ? next : -1;
}

static void attend_all(const fv_launch *launch_at, task_order *order)
{
    order->num_workers = fv_max_i32(1, launch_at->executor->num_workers);
    for (int32_t worker = 0; worker < order->num_workers && worker < order->num_tasks; worker++)
        *(worker_notes *)scratch_of(order->params, worker) = (worker_notes){.asked_for = -1};
    fv_executor_run(launch_at->executor, order->num_tasks, attend_task, order);
}

static fv_status launch(const fv_launch *launch_at, const fv_attend_params *params)
{
    if (params->tile_keys <= 0 || params->tile_keys % FV_LANES != 0) {
        return fv_fail(FV_ERR_INVALID, "tile_keys is %d; accepted: a multiple of 8 from 8", params->tile_keys);
    }
    assert(params->scratch);
    if (params->items) {
        attend_all(launch_at, &(task_order){.params = params, .num_tasks = params->num_items});
        return FV_OK;
    }
    const fv_attend_grid grid = fv_attend_grid_of(params, launch_at->executor->num_workers);
    attend_all(launch_at, &(task_order){.params = params, .grid = &grid, .num_tasks = grid.num_cells});
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
    return NOTES_BYTES + (size_t)fv_round_up((int64_t)most, FV_CACHE_LINE);
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
