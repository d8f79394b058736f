/* The oracle itself: hand-computed rows, a dense softmax written another way, and ranks of context
 * parallelism merged against one rank. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "reference/oracle.h"
#include "reference/scene.h"
#include "support/attend_run.h"

static void test_one_key_gives_its_value(void **state)
{
    (void)state;
    scene *s = scene_create(1, 1, (int32_t[]){1}, (int32_t[]){1}, 1, 1, 2, 1);
    memcpy(s->q, (float[]){3, 4}, 8);
    memcpy(s->k[0], (float[]){1, 2}, 8);
    memcpy(s->v[0], (float[]){5, -7}, 8);
    s->params.scale = 0.5f;
    scene_write_cache(s);
    scene_attend(s);
    assert_near(s->out[0], 5, 0);
    assert_near(s->out[1], -7, 0);
    assert_near(s->lse[0], 5.5, 0);

    s->sinks[0] = 5.5f; /* as heavy as the key */
    s->params.sinks = s->sinks;
    scene_attend(s);
    assert_near(s->out[0], 2.5, 1e-6);
    assert_near(s->lse[0], 5.5 + log(2), 1e-6);

    s->params.sinks = NULL;
    s->params.soft_cap = 2;
    s->params.scale = 1e30f;
    scene_attend(s);
    assert_near(s->lse[0], 2, 1e-6);
    scene_destroy(s);
}

static void test_equal_keys_give_the_mean(void **state)
{
    (void)state;
    scene *s = scene_create(1, 1, (int32_t[]){1}, (int32_t[]){4}, 1, 1, 1, 3);
    s->q[0] = 0;
    memcpy(s->v[0], (float[]){1, 2, 4, 9}, 16);
    scene_write_cache(s);
    scene_attend(s);
    assert_near(s->out[0], 4, 1e-6);
    assert_near(s->lse[0], log(4), 1e-6);
    s->params.window = 2;
    scene_attend(s);
    assert_near(s->out[0], 6.5, 1e-6);
    s->params.window = 1;
    scene_attend(s);
    assert_near(s->out[0], 9, 1e-6);

    s->params.window = 0;
    s->params.alibi = FV_ALIBI_LINEAR;
    s->slopes[0] = (float)log(2); /* weights 1/8 1/4 1/2 1 */
    s->params.alibi_slopes = s->slopes;
    scene_attend(s);
    assert_near(s->out[0], (1 / 8.0 + 2 / 4.0 + 4 / 2.0 + 9) / (15 / 8.0), 1e-5);
    scene_destroy(s);
}

static void test_no_key_gives_zero(void **state)
{
    (void)state;
    scene *s = scene_create(1, 3, (int32_t[]){1, 0, 2}, (int32_t[]){0, 0, 2}, 2, 1, 4, 2);
    s->params.sinks = s->sinks;
    s->tree[1] = 0; /* this token sees nothing, the next both */
    s->tree[2] = 3;
    s->params.tree_mask = s->tree;
    for (int32_t i = 0; i < 8 * 3; i++) s->out[i] = NAN;
    scene_write_cache(s);
    scene_attend(s);
    for (int32_t i = 0; i < 16; i++) assert_near(s->out[i], 0, 0);
    for (int32_t i = 0; i < 4; i++) assert_near(s->lse[i], -INFINITY, 0);
    scene_assert_dense(s, 1e-6);
    scene_destroy(s);
}

static scene *mixed_scene(void)
{
    return scene_create(1, 3, (int32_t[]){1, 6, 3}, (int32_t[]){37, 6, 30}, 6, 2, 24, 5);
}

static void test_features_match_dense(void **state)
{
    (void)state;
    for (int32_t features = 0; features < 128; features++) {
        scene *s = mixed_scene();
        if (features & 1) s->params.window = 1 + features % 9;
        if (features & 2) s->params.soft_cap = 0.4f;
        if (features & 4) s->params.sinks = s->sinks;
        if (features & 8) s->params.alibi = features & 16 ? FV_ALIBI_SQRT : FV_ALIBI_LINEAR;
        if (features & 32) s->causal[1] = 0;
        s->params.alibi_slopes = s->slopes;
        s->params.causal = s->causal;
        for (int32_t i = 0; i < MAX_TOKENS; i++) s->tree[i] = 0x25 + (uint64_t)(features * i);
        if (features & 64) s->params.tree_mask = s->tree;
        scene_write_cache(s);
        scene_attend(s);
        scene_assert_dense(s, 2e-6);
        scene_destroy(s);
    }
}

static void test_segments_match_whole(void **state)
{
    (void)state;
    for (int32_t segments = 1; segments <= 7; segments++) {
        for (int32_t block_q = 1; block_q <= 6; block_q++) {
            scene *s = mixed_scene();
            s->params.sinks = s->sinks;
            s->params.window = block_q == 3 ? 4 : 0;
            s->params.num_segments = segments;
            s->params.block_q = block_q;
            s->params.whole_queries = block_q == 6; /* the longest query */
            if (s->params.whole_queries) s->params.num_q_blocks = s->params.num_seqs;
            scene_write_cache(s);
            scene_attend(s);
            if (segments > 1) attend_run_reduce(&s->params, NULL, 0, fv_reference_reduce_segments);
            scene_assert_dense(s, 2e-6);
            scene_destroy(s);
        }
    }
}

static void test_items_match_grid(void **state)
{
    (void)state;
    scene *s = mixed_scene();
    const fv_work_item items[] = {
        /* whole, a run of heads, and two segments */
        {0, 0, 0, 1, 0, 2, 0, 100, -1, 0, 0, 0}, {1, 1, 0, 4, 0, 1, 0, 6, -1, 0, 0, 0},
        {1, 1, 0, 4, 1, 1, 0, 6, -1, 0, 0, 0},   {1, 1, 4, 2, 0, 2, 0, 6, -1, 0, 0, 0},
        {2, 2, 0, 3, 0, 2, 0, 16, 2, 0, 0, 0},   {2, 2, 0, 3, 0, 2, 16, 32, 5, 0, 0, 0},
    };
    const fv_reduce_item reduce_item = {.first_token = 7, .num_tokens = 3, .partial = 2, .num_segments = 2};
    s->params.items = items;
    s->params.num_items = FV_ARRAY_LEN(items);
    scene_write_cache(s);
    scene_attend(s);
    attend_run_reduce(&s->params, &reduce_item, 1, fv_reference_reduce_segments);
    scene_assert_dense(s, 2e-6);
    scene_destroy(s);
}

static void test_oracle_matches_reference(void **state)
{
    (void)state;
    scene *s = mixed_scene();
    s->params.sinks = s->sinks;
    scene_write_cache(s);
    scene_attend(s);
    const fv_kv_reader reader = fv_kv_reader_of(&s->params);
    double exact[FV_ORACLE_MAX_ROWS][24], ideal[FV_ORACLE_MAX_ROWS][24];
    double *scratch = malloc(fv_oracle_scratch_doubles(&s->params, MAX_KEYS) * sizeof(double));
    assert_non_null(scratch);
    fv_oracle_row rows[FV_ORACLE_MAX_ROWS];
    int32_t num_rows = 0;
    for (int32_t token = 0; token < 3; token++) {
        for (int32_t head = 3; head < 6; head++, num_rows++)
            rows[num_rows] = (fv_oracle_row){.row = fv_attend_row_of(&s->params, 2, token, head),
                                             .exact = exact[num_rows],
                                             .ideal = ideal[num_rows]};
    }
    fv_oracle_attend(rows, num_rows, &s->params, &reader, 2, scratch);
    for (int32_t r = 0; r < num_rows; r++) {
        const int32_t at = rows[r].row.token * 6 + rows[r].row.head;
        assert_near(s->lse[at], rows[r].lse, 1e-6);
        assert_true(rows[r].out_floor > 0 && rows[r].out_floor < 1e-4);
        assert_true(rows[r].lse_floor > 0 && rows[r].lse_floor < 1e-4);
        for (int32_t d = 0; d < 24; d++) {
            assert_near(s->out[at * 24 + d], exact[r][d], 1e-6);
            assert_near(ideal[r][d], exact[r][d], 1e-6);
        }
    }
    free(scratch);
    scene_destroy(s);
}

/* Keys with p = 1, 1/2, 1/4 and 1/8, which bf16 holds: the ideal errs by nothing, a kernel that rounds them at another
 * maximum by up to u of each, of the two largest to the same side, and r in root mean square of the third. */
static void test_oracle_expects_more_than_luck(void **state)
{
    (void)state;
    enum { SIZE = 32, KEYS = 4 };
    const uint16_t q[SIZE] = {0x3f80}; /* 1 in bf16 */
    float cache[2][KEYS][SIZE] = {
        {{0}, {-0.69314718f}, {-1.38629436f}, {-2.07944154f}}, /* k: [slot, element] */
        {{1}, {0, 1}, {0, -1}, {0, 0, 1}},                     /* v */
    };
    const int32_t query_start[2] = {0, 1}, seq_len = KEYS, table = 0;
    fv_attend_params params = {
        .q = q,
        .q_dtype = FV_DTYPE_BF16,
        .out_dtype = FV_DTYPE_F32,
        .num_heads = 1,
        .num_kv_heads = 1,
        .head_size = SIZE,
        .v_head_size = SIZE,
        .scale = 1,
        .context_parallel = {1, 0, 1},
        .num_seqs = 1,
        .query_start = query_start,
        .seq_lens = &seq_len,
        .block_table = &table,
        .block_table_stride = 1,
        .block_table_width = 1,
    };
    assert_int_equal(fv_kv_view_init(&params.cache, cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F32, 1, KEYS, 1, SIZE),
                     FV_OK);
    const fv_kv_reader reader = fv_kv_reader_of(&params);
    double exact[SIZE], ideal[SIZE];
    double *scratch = malloc(fv_oracle_scratch_doubles(&params, KEYS) * sizeof(double));
    assert_non_null(scratch);
    fv_oracle_row row = {.row = fv_attend_row_of(&params, 0, 0, 0), .exact = exact, .ideal = ideal};
    fv_oracle_attend(&row, 1, &params, &reader, 0, scratch);
    assert_near(exact[0], 8.0 / 15, 1e-7);
    assert_near(ideal[1], exact[1], 1e-7);
    assert_near(fv_oracle_rounding(FV_DTYPE_BF16), 0x1p-8 / sqrt(8 * log(2)), 1e-12);
    const double worst = 0x1p-8 / 2 * 0.75 / 1.875, likely = fv_oracle_rounding(FV_DTYPE_BF16) * 0.125 / 1.875;
    assert_near(row.error, sqrt(worst * worst + likely * likely), 1e-6);

    /* Sinks above all scores, as heavy as two keys and far beyond what e^x holds. */
    const float sinks[] = {0.69314718f, 1000};
    params.sinks = &sinks[0];
    fv_oracle_attend(&row, 1, &params, &reader, 0, scratch);
    assert_near(exact[0], 8.0 / 31, 1e-7);
    assert_near(row.lse, log(3.875), 1e-7);
    assert_near(row.error, sqrt(worst * worst + likely * likely) * 15 / 31, 1e-6);
    params.sinks = &sinks[1];
    fv_oracle_attend(&row, 1, &params, &reader, 0, scratch);
    assert_true(exact[0] == 0 && row.lse == 1000);
    assert_true(row.out_floor >= 0 && row.out_floor < 1e-30 && row.lse_floor > 0 && row.lse_floor < 1e-3);

    /* The weight of an infinite value beside them. */
    assert_true(isinf(row.odd_weight));
    cache[1][3][2] = INFINITY;
    params.sinks = &sinks[0];
    fv_oracle_attend(&row, 1, &params, &reader, 0, scratch);
    assert_near(row.odd_weight, 1.0 / 16, 1e-7);
    params.sinks = &sinks[1];
    fv_oracle_attend(&row, 1, &params, &reader, 0, scratch);
    assert_true(row.odd_weight < 1e-37);
    free(scratch);
}

/* Ranks of a context-parallel group, merged, are the whole. */
static void test_ranks_merge_to_whole(void **state)
{
    (void)state;
    for (int32_t world = 2; world <= 4; world++) {
        float out[MAX_TOKENS * 6 * 24], lse[MAX_TOKENS * 6];
        scene *s = NULL;
        for (int32_t rank = 0; rank < world; rank++) {
            if (s) scene_destroy(s);
            s = mixed_scene();
            s->params.context_parallel = (fv_context_parallel){world, rank, world == 3 ? 4 : 1};
            s->params.window = world == 4 ? 9 : 0;
            scene_write_cache(s);
            scene_attend(s);
            if (rank > 0) {
                const fv_merge_side a = {out, 6 * 24 * 4, 24 * 4, lse, 6 * 4, 4};
                const fv_merge_side b = {s->out, 6 * 24 * 4, 24 * 4, s->lse, 6 * 4, 4};
                const fv_merge_params merge = {.out = s->out,
                                               .token_stride = 6 * 24 * 4,
                                               .head_stride = 24 * 4,
                                               .lse = s->lse,
                                               .lse_token_stride = 6 * 4,
                                               .lse_head_stride = 4,
                                               .a = a,
                                               .b = b,
                                               .dtype = FV_DTYPE_F32,
                                               .out_dtype = FV_DTYPE_F32,
                                               .num_tokens = 10,
                                               .num_heads = 6,
                                               .head_size = 24};
                assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
            }
            memcpy(out, s->out, sizeof(out));
            memcpy(lse, s->lse, sizeof(lse));
        }
        scene_assert_dense(s, 2e-6);
        scene_destroy(s);
    }
}

/* One row of `size` numbers in each side. */
static fv_merge_params one_row_merge(float *out, float *lse, const float *a, const float *lse_a, const float *b,
                                     const float *lse_b, int32_t size)
{
    return (fv_merge_params){.out = out,
                             .lse = lse,
                             .a = {.out = a, .lse = lse_a},
                             .b = {.out = b, .lse = lse_b},
                             .dtype = FV_DTYPE_F32,
                             .out_dtype = FV_DTYPE_F32,
                             .num_tokens = 1,
                             .num_heads = 1,
                             .head_size = size};
}

static void test_merge_of_empty_sides(void **state)
{
    (void)state;
    const float empties[] = {-INFINITY, INFINITY, NAN}, sink = 5;
    for (int32_t i = 0; i < 3; i++) {
        float a[2] = {1, 2}, b[2] = {NAN, NAN}, out[2], lse, lse_a = 3, lse_b = empties[i];
        fv_merge_params merge = one_row_merge(out, &lse, a, &lse_a, b, &lse_b, 2);
        assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
        assert_true(out[0] == 1 && out[1] == 2 && lse == 3);
        lse_a = empties[(i + 1) % 3];
        merge.sinks = i == 1 ? &sink : NULL;
        assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
        assert_true(out[0] == 0 && out[1] == 0 && lse == -INFINITY);
    }
    float a[1] = {1}, b[1] = {4}, lse, lse_a = 0, lse_b = (float)log(2);
    const fv_merge_params merge = one_row_merge(a, &lse, a, &lse_a, b, &lse_b, 1);
    assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
    assert_near(a[0], 3, 1e-6);
    assert_near(lse, log(3), 1e-6);
}

/* e^lse 1 and 2 and a sink of e^0 = 1: a quarter and a half of the sides; and into another dtype. */
static void test_merge_counts_a_sink(void **state)
{
    (void)state;
    const float a[1] = {1}, b[1] = {4}, lse_a = 0, lse_b = (float)log(2), sink = 0;
    float out, lse;
    fv_merge_params merge = one_row_merge(&out, &lse, a, &lse_a, b, &lse_b, 1);
    merge.sinks = &sink;
    assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
    assert_near(out, 2.25, 1e-6);
    assert_near(lse, log(4), 1e-6);
    uint16_t half = 0;
    merge.out = &half;
    merge.out_dtype = FV_DTYPE_F16;
    assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
    assert_int_equal(half, 0x4080); /* 2.25 */
}

static void test_kv_gather_returns_what_was_written(void **state)
{
    (void)state;
    static float k[20 * 2 * 24], v[20 * 2 * 24];
    scene *s = mixed_scene();
    scene_write_cache(s);
    const int32_t key_start[] = {11, 0, 29}, out_start[] = {0, 13, 13, 14};
    const fv_kv_gather_params params = {
        .k = k,
        .k_token_stride = 2 * 24 * 4,
        .k_head_stride = 24 * 4,
        .v = v,
        .v_token_stride = 2 * 24 * 4,
        .v_head_stride = 24 * 4,
        .dst_dtype = FV_DTYPE_F32,
        .cache = s->params.cache,
        .num_seqs = 3,
        .block_table = s->table,
        .block_table_stride = MAX_KEYS,
        .block_table_width = MAX_KEYS,
        .key_start = key_start,
        .out_start = out_start,
        .num_rows = 14,
    };
    assert_int_equal(fv_reference_kv_gather(NULL, &params), FV_OK);
    assert_memory_equal(k, s->k[0] + 11 * 48, 13 * 48 * 4);
    assert_memory_equal(v, s->v[0] + 11 * 48, 13 * 48 * 4);
    assert_memory_equal(k + 13 * 48, s->k[2] + 29 * 48, 48 * 4);
    scene_destroy(s);
}

/* Takes the new tokens of the scene out of its cache, and gives them to attend_paged as dense rows. */
static void move_new_tokens(scene *s, float *k, float *v)
{
    const int32_t size = s->params.num_kv_heads * s->params.head_size;
    const size_t bytes = (size_t)size * 4;
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int32_t r = 0; r < s->params.num_seqs; r++) {
            const int32_t start = s->query_start[r], end = s->query_start[r + 1];
            for (int32_t token = start; token < end; token++) {
                float *from_k = s->k[r] + (s->seq_lens[r] - end + token) * size;
                float *from_v = s->v[r] + (s->seq_lens[r] - end + token) * size;
                memcpy(pass ? from_k : k + token * size, pass ? k + token * size : from_k, bytes);
                memcpy(pass ? from_v : v + token * size, pass ? v + token * size : from_v, bytes);
                for (int32_t i = 0; i < size && !pass; i++) from_k[i] = from_v[i] = NAN;
            }
        }
        if (!pass) scene_write_cache(s);
    }
    s->params.dense = (fv_dense_keys){.k = k,
                                      .k_token_stride = size * 4,
                                      .k_head_stride = s->params.head_size * 4,
                                      .v = v,
                                      .v_token_stride = size * 4,
                                      .v_head_stride = s->params.head_size * 4,
                                      .dtype = FV_DTYPE_F32};
}

static void test_new_tokens_may_be_dense(void **state)
{
    (void)state;
    static float k[MAX_TOKENS * 48], v[MAX_TOKENS * 48];
    scene *s = mixed_scene();
    move_new_tokens(s, k, v);
    scene_attend(s);
    scene_assert_dense(s, 2e-6);

    fv_kv_reader reader = fv_kv_reader_of(&s->params);
    double key[24];
    reader.dense_min_query_len = 3; /* sequence 0 has one token */
    fv_kv_reader_key(key, &reader, 0, 0, 36, 1);
    assert_true(isnan(key[0]));
    fv_kv_reader_key(key, &reader, 2, 2, 29, 1);
    assert_true(key[0] == s->k[2][29 * 48 + 24]);
    fv_kv_reader_value(key, &reader, 2, 2, 26, 0); /* cached */
    assert_true(key[0] == s->v[2][26 * 48]);
    scene_destroy(s);
}

static void test_all_keys_may_be_dense(void **state)
{
    (void)state;
    static float k[MAX_SEQS * MAX_KEYS * 48], v[MAX_SEQS * MAX_KEYS * 48];
    const int32_t key_row[] = {40, 90, 3};
    scene *s = mixed_scene();
    move_new_tokens(s, k, v);
    for (int32_t r = 0; r < 3; r++) {
        memcpy(k + key_row[r] * 48, s->k[r], (size_t)s->seq_lens[r] * 48 * 4);
        memcpy(v + key_row[r] * 48, s->v[r], (size_t)s->seq_lens[r] * 48 * 4);
    }
    s->params.dense.key_row = key_row;
    s->params.cache = (fv_kv_view){0};
    s->params.block_table = NULL;
    scene_attend(s);
    scene_assert_dense(s, 2e-6);

    /* Only the last sequence, to an output that begins with its first token. */
    const fv_work_item item = {
        .seq = 2, .table_row = 2, .num_tokens = 3, .num_kv_heads = 2, .end_key = 30, .partial = -1};
    float out[3 * 6 * 24], lse[3 * 6];
    memcpy(out, s->out + 7 * 6 * 24, sizeof(out));
    memcpy(lse, s->lse + 7 * 6, sizeof(lse));
    s->params.items = &item;
    s->params.num_items = 1;
    s->params.out_first_token = 7;
    scene_attend(s);
    assert_memory_equal(s->out, out, sizeof(out));
    assert_memory_equal(s->lse, lse, sizeof(lse));
    scene_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_key_gives_its_value),  cmocka_unit_test(test_equal_keys_give_the_mean),
        cmocka_unit_test(test_no_key_gives_zero),        cmocka_unit_test(test_features_match_dense),
        cmocka_unit_test(test_segments_match_whole),     cmocka_unit_test(test_items_match_grid),
        cmocka_unit_test(test_oracle_matches_reference), cmocka_unit_test(test_oracle_expects_more_than_luck),
        cmocka_unit_test(test_ranks_merge_to_whole),     cmocka_unit_test(test_merge_of_empty_sides),
        cmocka_unit_test(test_merge_counts_a_sink),      cmocka_unit_test(test_kv_gather_returns_what_was_written),
        cmocka_unit_test(test_new_tokens_may_be_dense),  cmocka_unit_test(test_all_keys_may_be_dense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
