/* The public API: plan, update, run, with the new K/V written on the way. */
#include <stdio.h>
#include <string.h>

#include "check/runs.h"
#include "check/written.h"
#include "fovea/backend.h"
#include "planner/plan.h"

/* A plan with its workspace. */
typedef struct plan_run {
    fv_plan *plan;
    void *workspace;
    int32_t knows_lengths; /* the batch has the lengths on the host */
} plan_run;

/* Bounds at random above what the batch needs. The static grid of a device wants tensors of max_num_tokens rows. */
static fv_bounds bounds_of(const check_scene *scene, const check_lane *lane, check_random *random)
{
    const check_case *test = scene->test;
    fv_bounds bounds = {
        .struct_size = sizeof(fv_bounds),
        .max_num_seqs = fv_max_i32(1, test->num_seqs) + check_random_int(random, 0, 3),
        .max_num_tokens = fv_max_i32(1, scene->num_tokens) + check_random_int(random, 0, 40),
        .max_query_len = fv_max_i32(1, check_case_max_query_len(test)) + check_random_int(random, 0, 8),
        .max_seq_len = fv_max_i32(1, check_case_max_seq_len(test)) + check_random_int(random, 0, 300),
    };
    /* Half of the plans are for no longer queries: for decode alone they have other kernels, and other cuts. */
    if (test->options.static_list || test->seed >> 20 & 1)
        bounds.max_query_len = fv_max_i32(1, check_case_max_query_len(test));
    if ((test->options.static_grid || test->options.static_list) && !lane->device->host_is_device)
        bounds.max_num_tokens = fv_max_i32(1, scene->num_rows);
    return bounds;
}

/* The least workspace of a plan, as its refusal says it; 0: there is another error. */
static size_t least_workspace(const check_lane *lane, const fv_problem *problem, const fv_bounds *bounds,
                              fv_plan_options options)
{
    fv_plan *plan = NULL;
    options.max_workspace_bytes = 1;
    if (fv_plan_create(&plan, lane->context, problem, bounds, &options) == FV_OK) {
        fv_plan_destroy(plan);
        return 1;
    }
    size_t least = 0;
    const char *at = strstr(fv_last_error(), "or from ");
    return at && sscanf(at, "or from %zu on", &least) == 1 ? least : 0;
}

static fv_batch batch_of(const check_scene *scene)
{
    check_random random = {scene->test->seed ^ 0xba7c4};
    fv_batch batch = {
        .struct_size = sizeof(fv_batch),
        .num_seqs = scene->test->num_seqs,
        .num_tokens = scene->num_tokens,
        .query_start = scene->query_start,
        .seq_lens = scene->seq_lens,
        .block_table = scene->block_table,
        .block_table_stride = scene->block_table_stride,
        .block_table_width = scene->block_table_width,
        .slot_mapping = scene->slot_mapping,
        .causal = scene->causal,
        .tree_mask = scene->tree_mask,
    };
    if (check_random_chance(&random, 50)) {
        batch.max_query_len = check_case_max_query_len(scene->test);
        batch.max_seq_len = check_case_max_seq_len(scene->test);
    }
    if (check_random_chance(&random, 50) || scene->test->options.static_list) {
        batch.host_query_start = scene->query_start;
        batch.host_seq_lens = scene->seq_lens;
        batch.host_causal = scene->causal;
    }
    return batch;
}

static fv_status open_plan(plan_run *run, check_scene *scene, const check_lane *lane, const char *backend,
                           const char *kernels)
{
    check_random random = {scene->test->seed ^ 0x97a4};
    const fv_bounds bounds = bounds_of(scene, lane, &random);
    fv_plan_options options = scene->test->options;
    options.device = lane->device;
    options.backend = backend;
    options.kernels = kernels;
    if (options.static_grid && batch_of(scene).host_query_start) options.static_list = check_random_chance(&random, 50);
    const fv_problem *problem = &scene->test->problem;
    if (scene->test->tight_workspace) options.max_workspace_bytes = least_workspace(lane, problem, &bounds, options);
    const fv_status status = fv_plan_create(&run->plan, lane->context, problem, &bounds, &options);
    if (status != FV_OK) return status;
    const size_t bytes = fv_plan_workspace_bytes(run->plan);
    run->workspace = check_arena_alloc_fenced(&scene->arena, bytes);
    if (run->workspace)
        memset(run->workspace, 0xff, bytes); /* NaN in every dtype: what a run has not written counts for nothing */
    return FV_OK;
}

static fv_layer layer_of(const check_scene *scene)
{
    return (fv_layer){
        .struct_size = sizeof(fv_layer),
        .q = scene->q,
        .k = scene->k,
        .v = scene->test->problem.kind == FV_ATTENTION_MLA ? (fv_tensor){0} : scene->v,
        .kv_cache = scene->view,
        .out = scene->out,
        .lse = scene->lse,
        .sinks = scene->test->problem.sinks ? scene->sinks : NULL,
        .alibi_slopes = scene->test->problem.alibi ? scene->alibi_slopes : NULL,
        .k_scale = scene->k_scale,
        .v_scale = scene->v_scale,
    };
}

static fv_status run_batch(const plan_run *run, const fv_batch *batch, const fv_layer *layer)
{
    fv_status status = fv_plan_update(run->plan, batch, NULL);
    if (status == FV_OK) status = fv_plan_run(run->plan, layer, run->workspace, NULL);
    return status == FV_OK ? fv_stream_synchronize(run->plan->device, NULL) : status;
}

/* Bits of one sequence's rows and lse, gathered. */
static size_t copy_rows(char *to, const check_scene *scene, int32_t seq)
{
    const size_t row_bytes = (size_t)scene->out.shape[2] * fv_dtype_bytes(scene->out.dtype);
    char *at = to;
    for (int32_t token = scene->query_start[seq]; token < scene->query_start[seq + 1]; token++) {
        for (int32_t head = 0; head < scene->out.shape[1]; head++) {
            memcpy(at, (char *)scene->out.data + token * scene->out.stride_bytes[0] + head * scene->out.stride_bytes[1],
                   row_bytes);
            at += row_bytes;
            if (!scene->lse.data) continue;
            memcpy(at, (char *)scene->lse.data + token * scene->lse.stride_bytes[0] + head * scene->lse.stride_bytes[1],
                   sizeof(float));
            at += sizeof(float);
        }
    }
    return (size_t)(at - to);
}

static void shift_tokens(fv_tensor *tensor, int32_t tokens)
{
    if (tensor->data) tensor->data = (char *)tensor->data + tokens * tensor->stride_bytes[0];
    tensor->shape[0] -= tokens;
}

/* Runs sequence `seq` as a batch of one, over the cache that the whole batch left. */
static fv_status run_alone(const plan_run *run, check_scene *scene, int32_t seq)
{
    const int32_t start = scene->query_start[seq];
    int32_t *query_start = check_arena_alloc(&scene->arena, 2 * sizeof(int32_t));
    query_start[1] = scene->query_start[seq + 1] - start;
    const fv_batch batch = {
        .struct_size = sizeof(fv_batch),
        .num_seqs = 1,
        .num_tokens = query_start[1],
        .query_start = query_start,
        .seq_lens = scene->seq_lens + seq,
        .block_table = scene->block_table + seq * scene->block_table_stride,
        .block_table_stride = scene->block_table_stride,
        .block_table_width = scene->block_table_width,
        .slot_mapping = scene->slot_mapping ? scene->slot_mapping + start : NULL,
        .causal = scene->causal ? scene->causal + seq : NULL,
        .tree_mask = scene->tree_mask ? scene->tree_mask + start : NULL,
        .host_query_start = run->knows_lengths ? query_start : NULL,
        .host_seq_lens = run->knows_lengths ? scene->seq_lens + seq : NULL,
        .host_causal = run->knows_lengths && scene->causal ? scene->causal + seq : NULL,
    };
    fv_layer layer = layer_of(scene);
    shift_tokens(&layer.k, start);
    shift_tokens(&layer.v, start);
    shift_tokens(&layer.q, start);
    shift_tokens(&layer.out, start);
    shift_tokens(&layer.lse, start);
    return run_batch(run, &batch, &layer);
}

/* The bits that one sequence got in the whole batch. */
typedef struct mates_test {
    int32_t seq; /* that with the most new tokens */
    char *bits;
    size_t bytes;
} mates_test;

static mates_test keep_bits(check_scene *scene)
{
    mates_test test = {.bits = check_arena_alloc(&scene->arena, 2 * (scene->out_bytes + scene->lse_bytes))};
    for (int32_t r = 1; r < scene->test->num_seqs; r++)
        if (scene->test->lens[r].query_len > scene->test->lens[test.seq].query_len) test.seq = r;
    test.bytes = copy_rows(test.bits, scene, test.seq);
    return test;
}

/* A row's bits must not depend on its mates: the sequence runs alone and must repeat them. Queries and keys that are no
 * numbers may send the heads that an item has together another way. */
static void check_mates(check_result *result, const mates_test *test, const plan_run *run, check_scene *scene)
{
    if (test->bytes == 0 || scene->test->spoilt_keys || scene->test->nan_queries) return;
    check_scene_reset(scene, 1);
    const fv_status status = run_alone(run, scene, test->seq);
    if (status != FV_OK) {
        check_result_fail(result, "sequence %d alone: %s", test->seq, fv_last_error());
        return;
    }
    char *alone = check_arena_alloc(&scene->arena, test->bytes);
    copy_rows(alone, scene, test->seq);
    if (memcmp(alone, test->bits, test->bytes) != 0)
        check_result_fail(result, "batch-invariant, but the bits of sequence %d differ when it runs alone", test->seq);
}

/* From which query length on the plan attends new tokens as given, where that is not what the cache holds. */
static int32_t new_min_query_len(const plan_run *run, const check_scene *scene)
{
    const fv_problem *problem = &scene->test->problem;
    const int32_t stored_as_given = problem->kv_dtype == problem->q_dtype && problem->kv_scaling == FV_KV_SCALING_NONE;
    if (problem->type == FV_ATTENTION_ENCODER) return 0;
    const int32_t is_static = run->plan->static_grid || !(run->knows_lengths || run->plan->device->host_is_device);
    if (stored_as_given || is_static || !scene->k.data) return INT32_MAX;
    return run->plan->new_min_query_len;
}

/* A step of the first sequences alone, behind one of all: their results have to come anew, those of others stay. Of a batch
 * whose lists and grids are sized by bounds always, else of half; not where the prefix groups of all are counted. */
static fv_status run_fewer(const plan_run *run, check_scene *scene, const fv_batch *all, const fv_layer *layer)
{
    const check_case *test = scene->test;
    if (all->num_seqs < 2 || test->min_groups > 0 || !(run->plan->static_grid || test->seed >> 21 & 1)) return FV_OK;
    fv_batch fewer = *all;
    fewer.num_seqs = (all->num_seqs + 1) / 2;
    fewer.num_tokens = scene->query_start[fewer.num_seqs];
    check_scene_cover_rows(&scene->out, fewer.num_tokens); /* as if nobody had written them */
    check_scene_cover_rows(&scene->lse, fewer.num_tokens);
    return run_batch(run, &fewer, layer);
}

static void judge(check_result *result, const plan_run *run, check_scene *scene, const check_expected *common,
                  const check_lane *lane)
{
    int32_t differs;
    if (scene->test->problem.type == FV_ATTENTION_ENCODER) {
        differs = 0;
        if (memcmp(scene->cache, scene->cache_before, scene->cache_bytes) != 0) {
            check_result_fail(result, "an encoder wrote to the cache");
            return;
        }
    } else if (!check_written_compare(&differs, scene, scene->cache_after, scene->slot_mapping)) {
        check_result_fail(result, "the cache is not what writing the new K/V makes of it");
        return;
    }
    check_expected own;
    const check_expected *expected = common;
    const int32_t as_given = new_min_query_len(run, scene);
    if (differs || as_given < INT32_MAX) {
        check_expected_init(&own, scene, lane, as_given);
        expected = &own;
    }
    const int32_t cuts_rows = !run->plan->static_grid || run->plan->device->host_is_device;
    const int32_t invariant = scene->test->options.batch_invariant && cuts_rows;
    const mates_test mates = invariant ? keep_bits(scene) : (mates_test){0};
    char text[400];
    if (!check_expected_compare(&result->worst, text, sizeof(text), expected, scene)) {
        check_result_fail(result, "%s", text);
    } else if (!check_arena_fences_whole(&scene->arena)) {
        check_result_fail(result, "out, lse or the workspace is written beyond its end");
    } else if (invariant) {
        check_mates(result, &mates, run, scene);
    }
}

void check_run_plan(check_result *result, check_scene *scene, const check_expected *expected, const check_lane *lane,
                    const char *backend, const char *kernels)
{
    check_result_init(result, scene->test->id, kernels ? "%s on %s" : "%s", backend, kernels);
    plan_run run = {0};
    fv_status status = open_plan(&run, scene, lane, backend, kernels);
    if (status == FV_ERR_UNSUPPORTED) {
        char reasons[400];
        const fv_status known = fv_backend_why_not(reasons, sizeof(reasons), backend, lane->device,
                                                   &scene->test->problem);
        if (known == FV_OK && reasons[0])
            check_result_skip(result, "%s: %s", backend, reasons);
        else
            check_result_skip(result, "%s", fv_last_error()); /* of an option */
        return;
    }
    if ((scene->test->options.static_grid || scene->test->options.static_list) && !lane->device->host_is_device &&
        scene->num_rows == 0) {
        check_result_skip(result, "a static grid on a device wants tensors of one row at least");
        fv_plan_destroy(run.plan);
        return;
    }
    check_scene_reset(scene, 0);
    if (status == FV_OK) {
        const fv_batch batch = batch_of(scene);
        const fv_layer layer = layer_of(scene);
        run.knows_lengths = batch.host_query_start != NULL;
        status = run_batch(&run, &batch, &layer);
        if (status == FV_OK) status = run_fewer(&run, scene, &batch, &layer);
    }
    if (status != FV_OK)
        check_result_fail(result, "%s: %s", fv_status_name(status), fv_last_error());
    else if (lane->device->host_is_device && run.plan->num_groups < scene->test->min_groups)
        check_result_fail(result, "%d prefix groups; expected %d or more: %s", run.plan->num_groups,
                          scene->test->min_groups, fv_plan_describe(run.plan));
    else
        judge(result, &run, scene, expected, lane);
    fv_plan_destroy(run.plan);
}
