/* kv_write and kv_gather of a table, on the caches of the attention cases: all layouts, dtypes, scales. */
#include <string.h>

#include "check/runs.h"
#include "check/written.h"
#include "core/float.h"
#include "reference/reference.h"

static fv_kv_write_params write_params(const check_scene *scene, const int64_t *slots)
{
    return (fv_kv_write_params){
        .k = scene->k.data,
        .k_token_stride = scene->k.stride_bytes[0],
        .k_head_stride = scene->k.stride_bytes[1],
        .v = scene->v.data,
        .v_token_stride = scene->v.stride_bytes[0],
        .v_head_stride = scene->v.stride_bytes[1],
        .src_dtype = scene->k.dtype,
        .cache = scene->view,
        .slot_mapping = slots,
        .num_tokens = scene->num_tokens,
        .k_scale = scene->k_scale,
        .v_scale = scene->v_scale,
        .num_kv_scales = scene->num_kv_scales,
    };
}

/* The scene's slots, some of them made into ones that must be skipped. */
static int64_t *spoiled_slots(check_scene *scene)
{
    check_random random = {scene->test->seed ^ 0x5107};
    const int64_t num_slots = scene->view.num_blocks * scene->view.block_size;
    const int64_t skipped[] = {-1, INT64_MIN, num_slots, num_slots + 5, INT64_MAX};
    int64_t *slots = check_arena_alloc(&scene->arena, (size_t)scene->num_tokens * sizeof(int64_t));
    memcpy(slots, scene->slot_mapping, (size_t)scene->num_tokens * sizeof(int64_t));
    for (int32_t token = 0; token < scene->num_tokens; token++)
        if (check_random_chance(&random, 10)) slots[token] = CHECK_RANDOM_PICK(&random, skipped);
    return slots;
}

void check_run_kv_write(check_result *result, check_scene *scene, const check_lane *lane, const fv_kernel_table *table)
{
    check_result_init(result, scene->test->id, "%s/kv_write", table->name);
    const int64_t *slots = spoiled_slots(scene);
    const fv_kv_write_params params = write_params(scene, slots);
    char *reference = check_arena_alloc(&scene->arena, scene->cache_bytes);
    check_scene_reset(scene, 0);
    fv_reference_kv_write(NULL, &params);
    memcpy(reference, scene->cache, scene->cache_bytes);

    check_scene_reset(scene, 0);
    const fv_launch launch = check_lane_launch(lane);
    int32_t differs;
    if (check_lane_ran(lane, table->kv_write(&launch, &params)) != FV_OK)
        check_result_fail(result, "%s", fv_last_error());
    else if (!check_written_compare(&differs, scene, reference, slots))
        check_result_fail(result, "the cache is not what the reference makes of it");
}

/* Dense rows that the gather fills. */
typedef struct gather_run {
    fv_kv_gather_params params;
    int32_t *key_start, *out_start;
} gather_run;

static void *alloc_rows(check_scene *scene, int64_t *token_stride, int64_t *head_stride, int32_t num_rows, int32_t size,
                        check_random *random)
{
    const int64_t element = (int64_t)fv_dtype_bytes(scene->test->problem.q_dtype);
    *head_stride = (size + check_random_int(random, 0, 3)) * element;
    *token_stride = *head_stride * scene->view.num_kv_heads + check_random_int(random, 0, 3) * element;
    return check_arena_alloc_fenced(&scene->arena, (size_t)(*token_stride * num_rows));
}

/* A random run of the live keys of each sequence. */
static gather_run build_gather(check_scene *scene)
{
    check_random random = {scene->test->seed ^ 0x6a74e};
    const int32_t num_seqs = scene->test->num_seqs;
    gather_run run = {
        .key_start = check_arena_alloc(&scene->arena, (size_t)num_seqs * sizeof(int32_t)),
        .out_start = check_arena_alloc(&scene->arena, (size_t)(num_seqs + 1) * sizeof(int32_t)),
    };
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        const int32_t num_keys = check_scene_num_keys(scene, seq);
        int32_t first = 0; /* past the blocks that were given back */
        while (first < num_keys &&
               scene->block_table[seq * scene->block_table_stride + first / scene->view.block_size] == 0)
            first += scene->view.block_size;
        first = fv_min_i32(first, num_keys);
        run.key_start[seq] = check_random_int(&random, first, num_keys);
        run.out_start[seq + 1] = run.out_start[seq] +
                                 check_random_int(&random, 0, fv_min_i32(64, num_keys - run.key_start[seq]));
    }
    fv_kv_gather_params *params = &run.params;
    *params = (fv_kv_gather_params){
        .dst_dtype = scene->test->problem.q_dtype,
        .cache = scene->view,
        .num_seqs = num_seqs,
        .block_table = scene->block_table,
        .block_table_stride = scene->block_table_stride,
        .block_table_width = scene->block_table_width,
        .key_start = run.key_start,
        .out_start = run.out_start,
        .num_rows = run.out_start[num_seqs],
        .k_scale = scene->k_scale,
        .v_scale = scene->v_scale,
        .num_kv_scales = scene->num_kv_scales,
    };
    params->k = alloc_rows(scene, &params->k_token_stride, &params->k_head_stride, params->num_rows,
                           scene->view.head_size, &random);
    if (scene->test->problem.kind == FV_ATTENTION_MLA) return run; /* the value is the start of the key */
    params->v = alloc_rows(scene, &params->v_token_stride, &params->v_head_stride, params->num_rows,
                           scene->view.v_head_size, &random);
    return run;
}

static int32_t same_numbers(const char *row, const double *real, int32_t size, fv_dtype dtype)
{
    for (int32_t d = 0; d < size; d++) {
        uint32_t nearest;
        fv_float_store(&nearest, (float)real[d], dtype);
        const char *at = row + (size_t)d * fv_dtype_bytes(dtype);
        if (memcmp(at, &nearest, fv_dtype_bytes(dtype)) == 0) continue; /* a NaN or an infinity, too */
        if (!check_as_near(at, &nearest, real[d], dtype)) return 0;
    }
    return 1;
}

/* First gathered row that is wrong; -1: none. */
static int32_t wrong_row(const check_scene *scene, const fv_kv_gather_params *params)
{
    const fv_attend_params attend = check_scene_params(scene);
    const fv_kv_reader reader = fv_kv_reader_of(&attend);
    double real[FV_REFERENCE_MAX_HEAD_SIZE];
    for (int32_t seq = 0; seq < params->num_seqs; seq++) {
        for (int32_t row = params->out_start[seq]; row < params->out_start[seq + 1]; row++) {
            const int32_t key = params->key_start[seq] + row - params->out_start[seq];
            for (int32_t head = 0; head < scene->view.num_kv_heads; head++) {
                fv_kv_reader_key(real, &reader, seq, seq, key, head);
                const char *k = (char *)params->k + row * params->k_token_stride + head * params->k_head_stride;
                if (!same_numbers(k, real, scene->view.head_size, params->dst_dtype)) return row;
                if (!params->v) continue;
                fv_kv_reader_value(real, &reader, seq, seq, key, head);
                const char *v = (char *)params->v + row * params->v_token_stride + head * params->v_head_stride;
                if (!same_numbers(v, real, scene->view.v_head_size, params->dst_dtype)) return row;
            }
        }
    }
    return -1;
}

void check_run_kv_gather(check_result *result, check_scene *scene, const check_lane *lane, const fv_kernel_table *table)
{
    check_result_init(result, scene->test->id, "%s/kv_gather", table->name);
    check_scene_reset(scene, 1);
    const gather_run run = build_gather(scene);
    const fv_launch launch = check_lane_launch(lane);
    if (check_lane_ran(lane, table->kv_gather(&launch, &run.params)) != FV_OK) {
        check_result_fail(result, "%s", fv_last_error());
        return;
    }
    const int32_t row = wrong_row(scene, &run.params);
    if (row >= 0)
        check_result_fail(result, "gathered row %d is not what the cache holds", row);
    else if (memcmp(scene->cache, scene->cache_after, scene->cache_bytes) != 0)
        check_result_fail(result, "the kernel changed the cache");
    else if (!check_arena_fences_whole(&scene->arena))
        check_result_fail(result, "rows are written beyond their end");
}
