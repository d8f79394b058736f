/* The orders of the AMX kernels for items of many rows (attend_many_tiles.c; attend_tiles.c), emulated, against sums of
 * doubles: around the number of strips from which on they are taken, where references have to move, and for
 * rows that see few keys. */
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
#include "kvcache/kv_address.h"
#include "reference/attend_row.h"

/* Tokens of one head: each is a row. */
enum {
    LEAST_TOKENS = 7 * 16 + 1, /* FV_TILE_MANY_STRIPS strips */
    LEAST_HALVES = 3 * 16 + 1, /* FV_TILE_PIECED_STRIPS strips */
    COPY_TOKENS = 15 * 16 + 1, /* FV_TILE_COPY_STRIPS strips */
    ODD_TOKENS = 300,          /* 19 strips, the last one of 12 rows; two blocks of keys: the last rows outlive one */
    EVEN_TOKENS = 320,
    MAX_TOKENS = 600,
    BLOCK_SIZE = 608, /* whole tiles of keys */
    MAX_SIZE = 256,
};

typedef struct scene {
    int32_t num_tokens, size, window;
    fv_dtype dtype; /* of q, k and v */
    fv_dtype out_dtype;
    int32_t without_lse;
    int32_t split; /* tokens from there on are an item of their own */
    float slope;   /* of ALiBi; 0: none */
    float cap;     /* of scores; 0: none */
    float sink;
    int32_t has_sink;
    int32_t is_paged;  /* keys and values are read from `view`, a cache of e4m3 */
    int32_t is_scaled; /* those of the cache have scales of their own */
    float k_scales[MAX_TOKENS], v_scales[MAX_TOKENS];
    fv_kv_view view;
    uint8_t cache[2 * BLOCK_SIZE * MAX_SIZE * sizeof(uint16_t)];
    uint16_t q[MAX_TOKENS][MAX_SIZE], k[MAX_TOKENS][MAX_SIZE], v[MAX_TOKENS][MAX_SIZE];
    _Alignas(float) char out[MAX_TOKENS * MAX_SIZE * sizeof(float)];
    float lse[MAX_TOKENS];
} scene;

static void fill(uint16_t *to, int32_t num, fv_dtype dtype, uint32_t *state)
{
    for (int32_t i = 0; i < num; i++) {
        *state = *state * 1664525u + 1013904223u;
        fv_float_store(&to[i], (float)(int32_t)*state * 0x1p-31f, dtype);
    }
}

/* Element 0 of a query is 1: what element 0 of a key is, its scores have more. */
static scene *scene_in(fv_dtype dtype, int32_t num_tokens)
{
    static scene s;
    uint32_t state = 5;
    s.num_tokens = num_tokens;
    s.size = 96;
    s.window = 0;
    s.dtype = s.out_dtype = dtype;
    s.without_lse = 0;
    s.slope = s.cap = 0;
    s.has_sink = 0;
    s.is_paged = s.is_scaled = s.split = 0;
    for (int32_t i = 0; i < MAX_TOKENS; i++) s.k_scales[i] = s.v_scales[i] = 1.0f;
    fill(&s.q[0][0], MAX_TOKENS * MAX_SIZE, dtype, &state);
    fill(&s.k[0][0], MAX_TOKENS * MAX_SIZE, dtype, &state);
    fill(&s.v[0][0], MAX_TOKENS * MAX_SIZE, dtype, &state);
    for (int32_t i = 0; i < MAX_TOKENS; i++) fv_float_store(&s.q[i][0], 1.0f, dtype);
    return &s;
}

static scene *scene_of(int32_t num_tokens) { return scene_in(FV_DTYPE_BF16, num_tokens); }
static scene *half_scene_of(int32_t num_tokens) { return scene_in(FV_DTYPE_F16, num_tokens); }

/* Keys and values to what is near to them in a cache of one block. */
static void put_in(scene *s, fv_kv_layout layout, fv_dtype dtype)
{
    s->is_paged = 1;
    s->view.struct_size = sizeof(s->view);
    assert_int_equal(fv_kv_view_init(&s->view, s->cache, layout, dtype, 1, BLOCK_SIZE, 1, s->size), FV_OK);
    for (int32_t i = 0; i < s->num_tokens * s->size; i++) {
        const int32_t key = i / s->size, d = i % s->size;
        uint16_t *const numbers[2] = {&s->k[key][d], &s->v[key][d]};
        const fv_kv_plane *planes[2] = {&s->view.k, &s->view.v};
        for (int32_t p = 0; p < 2; p++) {
            char *at = (char *)planes[p]->data + fv_kv_offset(planes[p], 0, 0, key, d);
            fv_float_store(at, fv_float_load(numbers[p], s->dtype), dtype);
            fv_float_store(numbers[p], fv_float_load(at, dtype), s->dtype);
        }
    }
}

static void put_in_cache(scene *s) { put_in(s, FV_KV_LAYOUT_2_NB_BS_H_D, FV_DTYPE_F8_E4M3); }

static fv_attend_params params_of(scene *s, const int32_t *query_start)
{
    static const int32_t table[1];
    const int64_t row_bytes = MAX_SIZE * 2, out_bytes = s->size * (int64_t)fv_dtype_bytes(s->out_dtype);
    fv_attend_params params = {
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
                  .dtype = s->dtype},
        .q_dtype = s->dtype,
        .out_dtype = s->out_dtype,
        .num_heads = 1,
        .num_kv_heads = 1,
        .head_size = s->size,
        .v_head_size = s->size,
        .scale = 1.0f,
        .window = s->window,
        .soft_cap = s->cap,
        .alibi = s->slope != 0 ? FV_ALIBI_LINEAR : FV_ALIBI_NONE,
        .alibi_slopes = &s->slope,
        .sinks = s->has_sink ? &s->sink : NULL,
        .context_parallel = {.world = 1, .interleave = 1},
        .num_seqs = 1,
        .query_start = query_start,
        .seq_lens = query_start + 1,
        .block_q = s->num_tokens,
        .tile_keys = 64,
    };
    if (!s->is_paged) return params;
    memset(&params.dense, 0, sizeof(params.dense));
    params.cache = s->view;
    if (s->is_scaled) {
        params.cache.k_scales = (fv_scale_plane){.data = s->k_scales, .slot_stride = sizeof(float)};
        params.cache.v_scales = (fv_scale_plane){.data = s->v_scales, .slot_stride = sizeof(float)};
    }
    params.block_table = table;
    params.block_table_stride = 1;
    return params;
}

static void attend(fv_attend_params *params, int32_t split)
{
    const int32_t num_tokens = params->seq_lens[0];
    const fv_work_item whole = {.num_tokens = num_tokens, .num_kv_heads = 1, .end_key = num_tokens, .partial = -1};
    fv_work_item items[2] = {whole, whole};
    items[0].num_tokens = items[0].end_key = split;
    items[1].first_token = split;
    items[1].num_tokens -= split;
    const fv_kernel_table *table = &fv_cpu_emulated_amx;
    const fv_attend_variant *variant = params->dense.k ? &table->attend_dense[0] : &table->attend_paged[0];
    const fv_executor executor = {.num_workers = 1};
    params->items = split > 0 ? items : &whole;
    params->num_items = split > 0 ? 2 : 1;
    params->scratch_bytes = variant->scratch_bytes(params);
    params->scratch = aligned_alloc(64, params->scratch_bytes);
    assert_non_null(params->scratch);
    assert_int_equal(variant->launch(&(fv_launch){.executor = &executor}, params), FV_OK);
    free(params->scratch);
    params->scratch = NULL;
}

/* What a row is to be. */
typedef struct expected_row {
    double out[MAX_SIZE];
    double lse;
    double largest; /* of the magnitudes of dot products */
} expected_row;

static expected_row expect_row(const scene *s, int32_t token, fv_key_range keys)
{
    expected_row row = {.largest = 0};
    double scores[MAX_TOKENS], max = -INFINITY, sum = 0;
    for (int32_t key = keys.first; key < keys.end; key++) {
        double dot = 0;
        for (int32_t d = 0; d < s->size; d++)
            dot += (double)fv_float_load(&s->q[token][d], s->dtype) * fv_float_load(&s->k[key][d], s->dtype);
        dot *= s->k_scales[key];
        row.largest = fmax(row.largest, fabs(dot));
        scores[key] = s->slope * (double)(key - token) + (s->cap > 0 ? s->cap * tanh(dot / s->cap) : dot);
        max = fmax(max, scores[key]);
    }
    if (s->has_sink) max = fmax(max, s->sink);
    sum = s->has_sink ? exp(s->sink - max) : 0;
    for (int32_t key = keys.first; key < keys.end; key++) {
        const double weight = exp(scores[key] - max);
        sum += weight;
        const double scaled = weight * s->v_scales[key];
        for (int32_t d = 0; d < s->size; d++) row.out[d] += scaled * fv_float_load(&s->v[key][d], s->dtype);
    }
    for (int32_t d = 0; d < s->size; d++) row.out[d] /= sum;
    row.lse = max + log(sum);
    return row;
}

/* Values are below 1. In bf16 weights are off by up to 2^-7.5 of their size, and results rounded to 2^-9; in pieces these have
 * 16 bits, and results 11 or 24. */
static double tolerance_of(const scene *s)
{
    if (s->dtype == FV_DTYPE_BF16) return 0x1p-7;
    return s->out_dtype == FV_DTYPE_F32 ? 0x1p-15 : 0x1p-11;
}

/* Of an LSE: some last places of what scores are made of. */
static double lse_tolerance_of(const scene *s, const expected_row *row)
{
    return 1e-5 * fmax(1, fabs(row->lse)) + 3e-7 * (s->cap > 0 ? s->cap : row->largest);
}

static void expect_rows(expected_row *expected, scene *s, int32_t num_rows)
{
    const int32_t query_start[2] = {0, s->num_tokens};
    const fv_attend_params params = params_of(s, query_start);
    for (int32_t token = 0; token < num_rows; token++)
        expected[token] = expect_row(s, token, fv_attend_row_of(&params, 0, token, 0).keys);
}

static void compare_rows(scene *s, const expected_row *expected, int32_t num_rows)
{
    const int32_t query_start[2] = {0, s->num_tokens};
    fv_attend_params params = params_of(s, query_start);
    attend(&params, s->split);
    for (int32_t token = 0; token < num_rows; token++) {
        const expected_row *row = &expected[token];
        assert_true(s->without_lse || fabs(s->lse[token] - row->lse) <= lse_tolerance_of(s, row));
        for (int32_t d = 0; d < s->size; d++) {
            const float value = fv_float_load(
                s->out + token * params.out_token_stride + d * (int64_t)fv_dtype_bytes(s->out_dtype), s->out_dtype);
            assert_true(fabs(value - row->out[d]) <= tolerance_of(s));
        }
    }
}

static expected_row rows_of_scene[MAX_TOKENS];

/* Rows from num_judged on may be anything. */
static void judge_rows(scene *s, int32_t num_judged)
{
    expect_rows(rows_of_scene, s, num_judged);
    compare_rows(s, rows_of_scene, num_judged);
}

static void judge(scene *s)
{
    judge_rows(s, s->num_tokens);
    s->without_lse = 1;
    compare_rows(s, rows_of_scene, s->num_tokens);
    s->out_dtype = FV_DTYPE_F32;
    compare_rows(s, rows_of_scene, s->num_tokens);
    s->without_lse = 0;
    compare_rows(s, rows_of_scene, s->num_tokens);
}

static void orders_meet_at_eight_strips(void **state)
{
    (void)state;
    judge(scene_of(LEAST_TOKENS - 1));
    judge(scene_of(LEAST_TOKENS));
    judge(scene_of(COPY_TOKENS));
    judge(scene_of(ODD_TOKENS));
    judge(scene_of(EVEN_TOKENS));
    judge(scene_of(MAX_TOKENS));
}

/* The later ones, of as few strips, see keys enough. */
static void later_tokens_meet_there_too(void **state)
{
    (void)state;
    for (int32_t num = LEAST_TOKENS - 1; num <= LEAST_TOKENS; num++) {
        scene *s = scene_of(ODD_TOKENS);
        s->split = ODD_TOKENS - num;
        judge(s);
        s->size = 128;
        judge(s);
    }
}

static void heads_have_all_sizes(void **state)
{
    (void)state;
    for (int32_t size = 32; size <= MAX_SIZE; size += 32) {
        scene *s = scene_of(ODD_TOKENS);
        s->size = size;
        judge(s);
    }
    const int32_t of_no_whole_tiles[] = {8, 40, 80, 104, 232};
    for (int32_t i = 0; i < FV_ARRAY_LEN(of_no_whole_tiles); i++) {
        scene *s = scene_of(ODD_TOKENS);
        s->size = of_no_whole_tiles[i];
        judge(s);
        s = scene_of(100);
        s->size = of_no_whole_tiles[i];
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
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16};
    for (int32_t t = 0; t < FV_ARRAY_LEN(dtypes); t++) {
        scene *s = scene_in(dtypes[t], ODD_TOKENS);
        for (int32_t i = 0; i < FV_ARRAY_LEN(steps); i++) {
            fv_float_store(&s->k[steps[i].key][0], steps[i].score, s->dtype);
            s->out_dtype = s->dtype;
            s->without_lse = 0;
            judge(s);
        }
    }
}

/* ALiBi is added to scores before their maximum says that the exact way is to be gone: once, for rows of the strip that do not
 * see the key, too. */
static void alibi_is_added_once(void **state)
{
    (void)state;
    const int32_t nums_of_tokens[] = {100, ODD_TOKENS};
    for (int32_t i = 0; i < 2; i++) {
        scene *s = scene_of(nums_of_tokens[i]);
        s->slope = 0.25f;
        judge(s);
        s->k[40][0] = fv_bf16_of_f32(3e30f);
        s->out_dtype = FV_DTYPE_BF16;
        judge(s);
    }
}

/* With slopes as models have them, of which keys nearby weigh most, and with one that favors the first. */
static void alibi_moves_references(void **state)
{
    (void)state;
    const float slopes[] = {1.0f, 0.25f, 0x1p-8f, -0.125f};
    for (int32_t i = 0; i < FV_ARRAY_LEN(slopes); i++) {
        for (int32_t in_halves = 0; in_halves < 2; in_halves++) {
            scene *s = scene_in(in_halves ? FV_DTYPE_F16 : FV_DTYPE_BF16, ODD_TOKENS);
            s->slope = slopes[i];
            judge(s);
            s->out_dtype = s->dtype;
            s->window = 270;
            judge(s);
        }
    }
}

/* References are of the first keys, which later rows do not weigh. */
static void weights_far_below_references_are_right(void **state)
{
    (void)state;
    for (int32_t in_halves = 0; in_halves < 2; in_halves++) {
        scene *s = scene_in(in_halves ? FV_DTYPE_F16 : FV_DTYPE_BF16, ODD_TOKENS);
        s->slope = 1.0f;
        fv_float_store(&s->k[3][0], 150.0f, s->dtype);
        judge(s);
    }
}

static void scores_are_capped(void **state)
{
    (void)state;
    const float caps[] = {0.5f, 5.0f, 50.0f, 200.0f}; /* the last is too large for weights against references */
    for (int32_t i = 0; i < FV_ARRAY_LEN(caps); i++) {
        for (int32_t in_halves = 0; in_halves < 2; in_halves++) {
            scene *s = scene_in(in_halves ? FV_DTYPE_F16 : FV_DTYPE_BF16, ODD_TOKENS);
            s->cap = caps[i];
            judge(s);
            s->out_dtype = s->dtype;
            s->window = 270;
            s->slope = 0.0625f;
            fv_float_store(&s->k[40][0], 30.0f, s->dtype);
            judge(s);
        }
    }
}

/* That weigh as nothing, as some keys and as all of them, and one that is no number. */
static void sinks_are_in_the_denominator(void **state)
{
    (void)state;
    const float sinks[] = {-INFINITY, -30.0f, 2.0f, 9.0f, 300.0f};
    for (int32_t i = 0; i < FV_ARRAY_LEN(sinks); i++) {
        for (int32_t in_halves = 0; in_halves < 2; in_halves++) {
            scene *s = scene_in(in_halves ? FV_DTYPE_F16 : FV_DTYPE_BF16, ODD_TOKENS);
            s->has_sink = 1;
            s->sink = sinks[i];
            judge(s);
            s->out_dtype = s->dtype;
            s->window = 200;
            judge(s);
        }
    }
    scene *s = scene_of(ODD_TOKENS);
    s->has_sink = 1;
    s->sink = NAN;
    const int32_t query_start[2] = {0, s->num_tokens};
    fv_attend_params params = params_of(s, query_start);
    attend(&params, 0);
    for (int32_t token = 0; token < s->num_tokens; token++)
        assert_true(isnan(fv_float_load(s->out + token * params.out_token_stride, s->out_dtype)));
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

/* In scratch of the caller's. */
static void launch_items(fv_attend_params *params, const fv_work_item *items, int32_t num_items)
{
    const fv_executor executor = {.parallel_for = run_in_turns, .num_workers = 2};
    params->items = items;
    params->num_items = num_items;
    assert_int_equal(fv_cpu_emulated_amx.attend_dense[0].launch(&(fv_launch){.executor = &executor}, params), FV_OK);
}

static void take_scratch(fv_attend_params *params, int poison)
{
    params->scratch_bytes = fv_cpu_emulated_amx.attend_dense[0].scratch_bytes(params);
    params->scratch = aligned_alloc(64, 2 * params->scratch_bytes);
    assert_non_null(params->scratch);
    memset(params->scratch, poison, 2 * params->scratch_bytes);
}

static void attend_items(fv_attend_params *params, const fv_work_item *items, int32_t num_items)
{
    take_scratch(params, 0xff);
    launch_items(params, items, num_items);
    free(params->scratch);
}

enum { KEPT_BLOCK = MAX_TOKENS / 2, NUM_KEPT = 4 };

/* Q blocks of two heads, the last first as a plan lists them. */
typedef struct kept_items {
    int32_t query_start[2];
    fv_attend_params params;
    fv_work_item items[NUM_KEPT];
    size_t out_bytes;
} kept_items;

static void make_kept_items(kept_items *made, scene *s, int32_t max_seq_len)
{
    const int32_t head_bytes = s->size * 2;
    made->query_start[0] = 0;
    made->query_start[1] = MAX_TOKENS;
    made->out_bytes = (size_t)MAX_TOKENS * (size_t)(2 * head_bytes);
    fv_attend_params *params = &made->params;
    *params = params_of(s, made->query_start);
    params->lse = NULL;
    params->num_heads = params->num_kv_heads = 2;
    params->q_head_stride = params->dense.k_head_stride = params->dense.v_head_stride = head_bytes;
    params->out_head_stride = head_bytes;
    params->out_token_stride = 2 * head_bytes;
    params->block_q = KEPT_BLOCK;
    params->max_seq_len = max_seq_len;
    for (int32_t i = 0; i < NUM_KEPT; i++) {
        const int32_t first = i < 2 ? KEPT_BLOCK : 0;
        made->items[i] = (fv_work_item){.first_token = first,
                                        .num_tokens = KEPT_BLOCK,
                                        .first_kv_head = i % 2,
                                        .num_kv_heads = 1,
                                        .end_key = first + KEPT_BLOCK,
                                        .partial = -1,
                                        .query_end = MAX_TOKENS,
                                        .seq_len = MAX_TOKENS};
    }
}

static char kept_out[sizeof(((scene *)0)->out)];

/* Together and one by one. */
static void judge_kept_keys(scene *s, int32_t max_seq_len)
{
    kept_items made;
    make_kept_items(&made, s, max_seq_len);
    attend_items(&made.params, made.items, NUM_KEPT);
    memcpy(kept_out, s->out, made.out_bytes);
    memset(s->out, 0, made.out_bytes);
    for (int32_t i = 0; i < NUM_KEPT; i++) attend_items(&made.params, &made.items[i], 1);
    assert_memory_equal(kept_out, s->out, made.out_bytes);
}

/* The same scratch, as it was left, for a launch over other keys and values: with the bits of fresh scratch. */
static void launches_share_no_keys(void **state)
{
    (void)state;
    scene *s = scene_of(MAX_TOKENS);
    kept_items made;
    make_kept_items(&made, s, MAX_TOKENS);
    take_scratch(&made.params, 0); /* as if sequence 0 had been there */
    launch_items(&made.params, made.items, NUM_KEPT);
    memcpy(kept_out, s->out, made.out_bytes);
    for (int32_t key = 0; key < MAX_TOKENS; key++) {
        s->k[key][3] ^= 0x8000; /* the sign */
        s->v[key][5] ^= 0x8000;
    }
    launch_items(&made.params, made.items, NUM_KEPT);
    free(made.params.scratch);
    assert_memory_not_equal(kept_out, s->out, made.out_bytes);
    memcpy(kept_out, s->out, made.out_bytes);
    attend_items(&made.params, made.items, NUM_KEPT);
    assert_memory_equal(kept_out, s->out, made.out_bytes);
}

static void judge_kept_keys_in(fv_dtype dtype, uint16_t infinity)
{
    judge_kept_keys(scene_in(dtype, MAX_TOKENS), MAX_TOKENS);
    judge_kept_keys(scene_in(dtype, MAX_TOKENS), 0); /* two slots for three blocks */
    scene *s = scene_in(dtype, MAX_TOKENS);
    s->window = 290;
    judge_kept_keys(s, MAX_TOKENS);
    s = scene_in(dtype, MAX_TOKENS);
    s->v[MAX_TOKENS / 2 + 5][7] = infinity; /* in a step that the first Q block sees some keys of */
    judge_kept_keys(s, MAX_TOKENS);
}

static void kept_keys_change_nothing(void **state)
{
    (void)state;
    judge_kept_keys_in(FV_DTYPE_BF16, 0x7f80);
    scene *s = scene_of(MAX_TOKENS);
    s->k[MAX_TOKENS / 2 + 5][7] = 0x7f00; /* far too large */
    judge_kept_keys(s, MAX_TOKENS);
}

/* --- fp16, in pieces ----------------------------------------------------------------------------------------------- */

static void halves_come_in_any_number(void **state)
{
    (void)state;
    judge(half_scene_of(20)); /* two strips */
    judge(half_scene_of(45));
    judge(half_scene_of(LEAST_HALVES - 1));
    judge(half_scene_of(LEAST_HALVES));
    judge(half_scene_of(COPY_TOKENS - 1));
    judge(half_scene_of(ODD_TOKENS));
    judge(half_scene_of(MAX_TOKENS));
}

static void halves_have_heads_of_all_sizes(void **state)
{
    (void)state;
    const int32_t sizes[] = {8, 32, 40, 64, 80, 128, 232, 256};
    for (int32_t i = 0; i < FV_ARRAY_LEN(sizes); i++) {
        const int32_t nums_of_tokens[] = {LEAST_HALVES - 1, ODD_TOKENS};
        for (int32_t n = 0; n < 2; n++) {
            scene *s = half_scene_of(nums_of_tokens[n]);
            s->size = sizes[i];
            judge(s);
        }
    }
}

/* Of one byte, whose low pieces are zeros. */
static void halves_meet_bytes(void **state)
{
    (void)state;
    const int32_t sizes[] = {40, 64, 128};
    for (int32_t i = 0; i < FV_ARRAY_LEN(sizes); i++) {
        scene *s = half_scene_of(ODD_TOKENS);
        s->size = sizes[i];
        put_in_cache(s);
        judge(s);
    }
}

/* Bytes whose keys and values have scales of their own; then one is 0, so that what hides a score would not. */
static void keys_have_scales(void **state)
{
    (void)state;
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16};
    const int32_t sizes[] = {40, 64, 128};
    for (int32_t i = 0; i < 2 * FV_ARRAY_LEN(sizes); i++) {
        scene *s = scene_in(dtypes[i % 2], ODD_TOKENS);
        s->size = sizes[i / 2];
        s->is_scaled = 1;
        for (int32_t key = 0; key < ODD_TOKENS; key++) {
            s->k_scales[key] = 0.5f + 0.125f * (float)(key % 7);
            s->v_scales[key] = 0.25f + 0.125f * (float)(key % 5);
        }
        put_in_cache(s);
        judge(s);
        s->k_scales[200] = s->v_scales[210] = 0;
        s->out_dtype = s->dtype;
        s->without_lse = 0;
        judge(s);
    }
}

/* Pieces of 16 bytes: few rows, two strips and more, and many; rows of no whole parts; queries of either format. */
static void keys_lie_in_pieces(void **state)
{
    (void)state;
    static const fv_kv_layout layouts[] = {FV_KV_LAYOUT_X_PACKED, FV_KV_LAYOUT_SHUFFLED};
    static const fv_dtype dtypes[] = {FV_DTYPE_BF16, FV_DTYPE_F16};
    const int32_t nums_of_tokens[] = {14, 30, 70, ODD_TOKENS}, sizes[] = {80, 128};
    for (int32_t i = 0; i < 2 * 2 * 2 * FV_ARRAY_LEN(nums_of_tokens) * FV_ARRAY_LEN(sizes); i++) {
        scene *s = scene_in(dtypes[i % 2], nums_of_tokens[i / 8 % 4]);
        s->size = sizes[i / 32];
        put_in(s, layouts[i / 2 % 2], i / 4 % 2 ? FV_DTYPE_F8_E4M3 : s->dtype);
        judge(s);
    }
}

static void halves_have_windows_and_slopes(void **state)
{
    (void)state;
    static const int32_t windows[] = {1, 20, 300};
    for (int32_t i = 0; i < FV_ARRAY_LEN(windows); i++) {
        scene *s = half_scene_of(ODD_TOKENS);
        s->window = windows[i];
        judge(s);
    }
    scene *s = half_scene_of(ODD_TOKENS);
    s->slope = 0.25f;
    judge(s);
}

/* One key has all of the weight, and references are above it, where ALiBi's maxima will be: an output of fp32 is its value, not
 * what 16 bits of a weight make of it. */
static void halves_of_few_keys_hold_the_largest_weight(void **state)
{
    (void)state;
    enum { LARGEST = 7, FIRST = 32, END = 64 }; /* rows whose keys end in the second step */
    scene *s = half_scene_of(END);
    s->out_dtype = FV_DTYPE_F32;
    s->slope = 0.1f;
    fv_float_store(&s->k[LARGEST][0], 40.0f, FV_DTYPE_F16);
    judge_rows(s, END);
    for (int32_t token = FIRST; token < END; token++) {
        const float *row = (const float *)(const void *)s->out + token * s->size;
        for (int32_t d = 0; d < s->size; d++)
            assert_true(fabs(row[d] - fv_float_load(&s->v[LARGEST][d], FV_DTYPE_F16)) <= 0x1p-21);
    }
}

/* The largest of fp16, whose high piece is 2^16; numbers of one bit, and of none of the usual. */
static void halves_reach_their_ends(void **state)
{
    (void)state;
    scene *s = half_scene_of(ODD_TOKENS);
    for (int32_t i = 0; i < ODD_TOKENS; i++) s->q[i][1] = 0;
    s->q[40][1] = 1; /* 2^-24 */
    s->k[3][1] = 0x7bff;
    s->k[4][1] = 0xfbff;
    s->v[7][2] = 1;
    s->v[7][3] = 0x83ff;
    judge(s);
}

static void halves_out_of_sight_stay_there(void **state)
{
    (void)state;
    static const uint16_t no_numbers[] = {0x7c00, 0xfc00, 0x7e00, 0x7fff, 0xffff};
    for (int32_t i = 0; i < FV_ARRAY_LEN(no_numbers); i++) {
        scene *s = half_scene_of(ODD_TOKENS);
        s->v[ODD_TOKENS - 1][7] = no_numbers[i];
        judge_rows(s, ODD_TOKENS - 1);
        s = half_scene_of(ODD_TOKENS);
        s->k[ODD_TOKENS - 1][3] = no_numbers[i];
        judge_rows(s, ODD_TOKENS - 1);
        s = half_scene_of(ODD_TOKENS);
        s->q[ODD_TOKENS - 1][3] = no_numbers[i];
        judge_rows(s, ODD_TOKENS - 1);
        assert_true((no_numbers[i] & 0x7fff) == 0x7c00 || isnan(s->lse[ODD_TOKENS - 1]));
    }
}

static void kept_halves_change_nothing(void **state)
{
    (void)state;
    judge_kept_keys_in(FV_DTYPE_F16, 0x7c00);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders_meet_at_eight_strips),
        cmocka_unit_test(later_tokens_meet_there_too),
        cmocka_unit_test(heads_have_all_sizes),
        cmocka_unit_test(blocks_whose_scores_grow_are_done_again),
        cmocka_unit_test(alibi_is_added_once),
        cmocka_unit_test(alibi_moves_references),
        cmocka_unit_test(weights_far_below_references_are_right),
        cmocka_unit_test(scores_are_capped),
        cmocka_unit_test(sinks_are_in_the_denominator),
        cmocka_unit_test(rows_see_few_keys),
        cmocka_unit_test(windows_begin_at_a_border),
        cmocka_unit_test(numbers_out_of_sight_stay_there),
        cmocka_unit_test(kept_keys_change_nothing),
        cmocka_unit_test(launches_share_no_keys),
        cmocka_unit_test(halves_come_in_any_number),
        cmocka_unit_test(halves_have_heads_of_all_sizes),
        cmocka_unit_test(halves_meet_bytes),
        cmocka_unit_test(keys_have_scales),
        cmocka_unit_test(keys_lie_in_pieces),
        cmocka_unit_test(halves_have_windows_and_slopes),
        cmocka_unit_test(halves_of_few_keys_hold_the_largest_weight),
        cmocka_unit_test(halves_reach_their_ends),
        cmocka_unit_test(halves_out_of_sight_stay_there),
        cmocka_unit_test(kept_halves_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
