/* The order of the AMX kernels for items of many rows (attend_many_tiles.c), emulated, against sums of doubles: around
 * the number of strips from which on it is taken, where references have to move, and for rows that see few keys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/float.h"
#include "kernels/cpu_tables.h"
#include "reference/attend_row.h"

/* Tokens of one head: each is a row. */
enum {
    LEAST_TOKENS = 15 * 16 + 1, /* FV_TILE_COPY_STRIPS strips */
    ODD_TOKENS = 300,           /* 19 strips, the last one of 12 rows; two blocks of keys: the last rows outlive one */
    EVEN_TOKENS = 320,
    MAX_TOKENS = 600,
    MAX_SIZE = 256,
};

typedef struct scene {
    int32_t num_tokens, size, window;
    fv_dtype out_dtype;
    int32_t without_lse;
    uint16_t q[MAX_TOKENS][MAX_SIZE], k[MAX_TOKENS][MAX_SIZE], v[MAX_TOKENS][MAX_SIZE];
    char out[MAX_TOKENS * MAX_SIZE * sizeof(float)];
    float lse[MAX_TOKENS];
} scene;

static void fill(uint16_t *to, int32_t num, uint32_t *state)
{
    for (int32_t i = 0; i < num; i++) {
        *state = *state * 1664525u + 1013904223u;
        to[i] = fv_bf16_of_f32((float)(int32_t)*state * 0x1p-31f);
    }
}

/* Element 0 of a query is 1: what element 0 of a key is, its scores have more. */
static scene *scene_of(int32_t num_tokens)
{
    static scene s;
    uint32_t state = 5;
    s.num_tokens = num_tokens;
    s.size = 96;
    s.window = 0;
    s.out_dtype = FV_DTYPE_BF16;
    s.without_lse = 0;
    fill(&s.q[0][0], MAX_TOKENS * MAX_SIZE, &state);
    fill(&s.k[0][0], MAX_TOKENS * MAX_SIZE, &state);
    fill(&s.v[0][0], MAX_TOKENS * MAX_SIZE, &state);
    for (int32_t i = 0; i < MAX_TOKENS; i++) s.q[i][0] = fv_bf16_of_f32(1.0f);
    return &s;
}

static fv_attend_params params_of(scene *s, const int32_t *query_start)
{
    const int64_t row_bytes = MAX_SIZE * 2, out_bytes = s->size * (int64_t)fv_dtype_bytes(s->out_dtype);
    return (fv_attend_params){
        .q = s->q,
        .q_token_stride = row_bytes,
        .q_head_stride = row_bytes,
        .out = s->out,
        .out_token_stride = out_bytes,
        .out_head_stride = out_bytes,
        .lse = s->without_lse ? NULL : s->lse,
        .lse_token_stride = sizeof(float),
        .lse_head_stride = sizeof(float),
        .dense = {.k = s->k,
                  .k_token_stride = row_bytes,
                  .k_head_stride = row_bytes,
                  .v = s->v,
                  .v_token_stride = row_bytes,
                  .v_head_stride = row_bytes,
                  .dtype = FV_DTYPE_BF16},
        .q_dtype = FV_DTYPE_BF16,
        .out_dtype = s->out_dtype,
        .num_heads = 1,
        .num_kv_heads = 1,
        .head_size = s->size,
        .v_head_size = s->size,
        .scale = 1.0f,
        .window = s->window,
        .context_parallel = {.world = 1, .interleave = 1},
        .num_seqs = 1,
        .query_start = query_start,
        .seq_lens = query_start + 1,
        .block_q = s->num_tokens,
        .tile_keys = 64,
    };
}

static void attend(fv_attend_params *params)
{
    const int32_t num_tokens = params->seq_lens[0];
    const fv_work_item item = {.num_tokens = num_tokens, .num_kv_heads = 1, .end_key = num_tokens, .partial = -1};
    const fv_attend_variant *variant = &fv_cpu_emulated_amx.attend_dense[0];
    const fv_executor executor = {.num_workers = 1};
    params->items = &item;
    params->num_items = 1;
    params->scratch_bytes = variant->scratch_bytes(params);
    params->scratch = aligned_alloc(64, params->scratch_bytes);
    assert_non_null(params->scratch);
    assert_int_equal(variant->launch(&(fv_launch){.executor = &executor}, params), FV_OK);
    free(params->scratch);
    params->scratch = NULL;
}

/* Of a row over its keys: the LSE and, in `out`, the result. */
static double expect_row(double out[MAX_SIZE], const scene *s, int32_t token, fv_key_range keys)
{
    double scores[MAX_TOKENS], max = -INFINITY, sum = 0;
    for (int32_t key = keys.first; key < keys.end; key++) {
        scores[key] = 0;
        for (int32_t d = 0; d < s->size; d++)
            scores[key] += (double)fv_f32_of_bf16(s->q[token][d]) * fv_f32_of_bf16(s->k[key][d]);
        max = fmax(max, scores[key]);
    }
    for (int32_t d = 0; d < s->size; d++) out[d] = 0;
    for (int32_t key = keys.first; key < keys.end; key++) {
        const double weight = exp(scores[key] - max);
        sum += weight;
        for (int32_t d = 0; d < s->size; d++) out[d] += weight * fv_f32_of_bf16(s->v[key][d]);
    }
    for (int32_t d = 0; d < s->size; d++) out[d] /= sum;
    return max + log(sum);
}

/* Rows from num_judged on may be anything. Values are below 1: weights are rounded to 2^-9 of their size, results too. */
static void judge_rows(scene *s, int32_t num_judged)
{
    const int32_t query_start[2] = {0, s->num_tokens};
    fv_attend_params params = params_of(s, query_start);
    attend(&params);
    for (int32_t token = 0; token < num_judged; token++) {
        double expected[MAX_SIZE];
        const double lse = expect_row(expected, s, token, fv_attend_row_of(&params, 0, token, 0).keys);
        assert_true(s->without_lse || fabs(s->lse[token] - lse) <= 1e-5 * fmax(1, fabs(lse)));
        for (int32_t d = 0; d < s->size; d++) {
            const float value = fv_float_load(
                s->out + token * params.out_token_stride + d * (int64_t)fv_dtype_bytes(s->out_dtype), s->out_dtype);
            assert_true(fabs(value - expected[d]) <= 0x1p-7);
        }
    }
}

static void judge(scene *s)
{
    judge_rows(s, s->num_tokens);
    s->without_lse = 1;
    judge_rows(s, s->num_tokens);
    s->out_dtype = FV_DTYPE_F32;
    judge_rows(s, s->num_tokens);
}

static void orders_meet_at_sixteen_strips(void **state)
{
    (void)state;
    judge(scene_of(LEAST_TOKENS - 1));
    judge(scene_of(LEAST_TOKENS));
    judge(scene_of(ODD_TOKENS));
    judge(scene_of(EVEN_TOKENS));
    judge(scene_of(MAX_TOKENS));
}

static void heads_have_all_sizes(void **state)
{
    (void)state;
    for (int32_t size = 32; size <= MAX_SIZE; size += 32) {
        scene *s = scene_of(ODD_TOKENS);
        s->size = size;
        judge(s);
    }
}

/* After the step of 32 keys that references are of: by 2^43, then by more than fp32 holds, and in a later block. */
static void blocks_whose_scores_grow_are_done_again(void **state)
{
    (void)state;
    static const struct {
        int32_t key;
        float score;
    } steps[] = {{40, 30}, {100, 200}, {290, 400}};
    scene *s = scene_of(ODD_TOKENS);
    for (int32_t i = 0; i < FV_ARRAY_LEN(steps); i++) {
        s->k[steps[i].key][0] = fv_bf16_of_f32(steps[i].score);
        s->out_dtype = FV_DTYPE_BF16;
        s->without_lse = 0;
        judge(s);
    }
}

static void rows_see_few_keys(void **state)
{
    (void)state;
    static const int32_t windows[] = {1, 3, 20, 33};
    for (int32_t i = 0; i < FV_ARRAY_LEN(windows); i++) {
        scene *s = scene_of(ODD_TOKENS);
        s->window = windows[i];
        judge(s);
    }
}

/* Of a strip whose windows begin at a border of blocks some rows have a reference when the others find theirs. */
static void windows_begin_at_a_border(void **state)
{
    (void)state;
    scene *s = scene_of(MAX_TOKENS);
    s->window = 300;
    judge(s);
}

static void numbers_out_of_sight_stay_there(void **state)
{
    (void)state;
    scene *s = scene_of(ODD_TOKENS);
    s->v[ODD_TOKENS - 1][7] = 0x7f80; /* infinity */
    judge_rows(s, ODD_TOKENS - 1);
    s = scene_of(ODD_TOKENS);
    s->k[ODD_TOKENS - 1][3] = 0x7fc0; /* NaN */
    judge_rows(s, ODD_TOKENS - 1);
    assert_true(isnan(s->lse[ODD_TOKENS - 1]));
}

/* Two workers in turns, for two items each. */
static void run_in_turns(void *user, int64_t num_tasks, fv_task_fn task, void *task_user)
{
    (void)user;
    for (int64_t i = 0; i < num_tasks; i++) task(task_user, i, (int32_t)(i / 2 % 2));
}

static void attend_items(fv_attend_params *params, const fv_work_item *items, int32_t num_items)
{
    const fv_attend_variant *variant = &fv_cpu_emulated_amx.attend_dense[0];
    const fv_executor executor = {.parallel_for = run_in_turns, .num_workers = 2};
    params->items = items;
    params->num_items = num_items;
    params->scratch_bytes = variant->scratch_bytes(params);
    params->scratch = aligned_alloc(64, 2 * params->scratch_bytes);
    assert_non_null(params->scratch);
    memset(params->scratch, 0xff, 2 * params->scratch_bytes);
    assert_int_equal(variant->launch(&(fv_launch){.executor = &executor}, params), FV_OK);
    free(params->scratch);
}

/* Q blocks of two heads, the last first as a plan lists them, together and one by one. */
static void judge_kept_keys(scene *s, int32_t max_seq_len)
{
    enum { BLOCK = MAX_TOKENS / 2, NUM_ITEMS = 4 };
    const int32_t query_start[2] = {0, MAX_TOKENS}, head_bytes = s->size * 2;
    fv_attend_params params = params_of(s, query_start);
    params.lse = NULL;
    params.num_heads = params.num_kv_heads = 2;
    params.q_head_stride = params.dense.k_head_stride = params.dense.v_head_stride = head_bytes;
    params.out_head_stride = head_bytes;
    params.out_token_stride = 2 * head_bytes;
    params.block_q = BLOCK;
    params.max_seq_len = max_seq_len;
    fv_work_item items[NUM_ITEMS];
    for (int32_t i = 0; i < NUM_ITEMS; i++) {
        const int32_t first = i < 2 ? BLOCK : 0;
        items[i] = (fv_work_item){.first_token = first,
                                  .num_tokens = BLOCK,
                                  .first_kv_head = i % 2,
                                  .num_kv_heads = 1,
                                  .end_key = first + BLOCK,
                                  .partial = -1,
                                  .query_end = MAX_TOKENS,
                                  .seq_len = MAX_TOKENS};
    }
    static char together[sizeof(s->out)];
    const size_t bytes = (size_t)MAX_TOKENS * (size_t)(2 * head_bytes);
    attend_items(&params, items, NUM_ITEMS);
    memcpy(together, s->out, bytes);
    memset(s->out, 0, bytes);
    for (int32_t i = 0; i < NUM_ITEMS; i++) attend_items(&params, &items[i], 1);
    assert_memory_equal(together, s->out, bytes);
}

static void kept_keys_change_nothing(void **state)
{
    (void)state;
    judge_kept_keys(scene_of(MAX_TOKENS), MAX_TOKENS);
    judge_kept_keys(scene_of(MAX_TOKENS), 0); /* two slots for three blocks */
    scene *s = scene_of(MAX_TOKENS);
    s->window = 290;
    judge_kept_keys(s, MAX_TOKENS);
    s = scene_of(MAX_TOKENS);
    s->v[MAX_TOKENS / 2 + 5][7] = 0x7f80; /* infinity, in a step that the first Q block sees some keys of */
    judge_kept_keys(s, MAX_TOKENS);
    s = scene_of(MAX_TOKENS);
    s->k[MAX_TOKENS / 2 + 5][7] = 0x7f00; /* far too large */
    judge_kept_keys(s, MAX_TOKENS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders_meet_at_sixteen_strips),
        cmocka_unit_test(heads_have_all_sizes),
        cmocka_unit_test(blocks_whose_scores_grow_are_done_again),
        cmocka_unit_test(rows_see_few_keys),
        cmocka_unit_test(windows_begin_at_a_border),
        cmocka_unit_test(numbers_out_of_sight_stay_there),
        cmocka_unit_test(kept_keys_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
