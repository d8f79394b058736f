/* The oracle itself: hand-computed rows, a dense softmax written another way, latent attention against
 * its non-absorbed expansion, and ranks of context parallelism merged against one rank. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"
#include "reference/oracle.h"
#include "reference/reference.h"

#define MAX_SEQS 4
#define MAX_TOKENS 16
#define MAX_KEYS 64
#define MAX_HEADS 8
#define MAX_SIZE 640
#define MAX_BLOCKS 80

/* Everything of a small fp32 problem. Keys of a sequence are also kept dense, for the other way. */
typedef struct scene {
    float q[MAX_TOKENS * MAX_HEADS * MAX_SIZE];
    float out[MAX_TOKENS * MAX_HEADS * MAX_SIZE];
    float lse[MAX_TOKENS * MAX_HEADS];
    float k[MAX_SEQS][MAX_KEYS * MAX_HEADS * MAX_SIZE]; /* [key, Hkv, D] */
    float v[MAX_SEQS][MAX_KEYS * MAX_HEADS * MAX_SIZE];
    float *cache;
    float partial_out[MAX_TOKENS * 8 * MAX_HEADS * MAX_SIZE];
    float partial_max[MAX_TOKENS * 8 * MAX_HEADS];
    float partial_sum[MAX_TOKENS * 8 * MAX_HEADS];
    float sinks[MAX_HEADS], slopes[MAX_HEADS];
    uint8_t causal[MAX_SEQS];
    uint64_t tree[MAX_TOKENS];
    int32_t query_start[MAX_SEQS + 1], seq_lens[MAX_SEQS], table[MAX_SEQS * MAX_KEYS];
    fv_attend_params params;
} scene;

static uint64_t random_state = 1;

static float random_float(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(random_state >> 11) * 0x1p-53 * 2 - 1);
}

static void fill_random(float *values, size_t count)
{
    for (size_t i = 0; i < count; i++) values[i] = random_float();
}

/* A scene of `num_seqs` sequences with random tensors; the cache is NaN where no key lies and the
 * blocks are dealt out backwards. */
static scene *scene_create(int32_t num_seqs, const int32_t *query_lens, const int32_t *seq_lens, int32_t num_heads,
                           int32_t num_kv_heads, int32_t head_size, int32_t block_size)
{
    scene *s = calloc(1, sizeof(*s));
    assert_non_null(s);
    fill_random(s->q, sizeof(s->q) / sizeof(float));
    fill_random(s->sinks, MAX_HEADS);
    fill_random(s->slopes, MAX_HEADS);
    const size_t cache_floats = (size_t)2 * MAX_BLOCKS * (size_t)block_size * (size_t)num_kv_heads * (size_t)head_size;
    s->cache = malloc(cache_floats * sizeof(float));
    assert_non_null(s->cache);
    for (size_t i = 0; i < cache_floats; i++) s->cache[i] = NAN;
    fv_attend_params *p = &s->params;
    *p = (fv_attend_params){
        .q = s->q, .q_token_stride = num_heads * head_size * 4, .q_head_stride = head_size * 4,
        .out = s->out, .out_token_stride = num_heads * head_size * 4, .out_head_stride = head_size * 4,
        .lse = s->lse, .lse_token_stride = num_heads * 4, .lse_head_stride = 4,
        .q_dtype = FV_DTYPE_F32, .out_dtype = FV_DTYPE_F32,
        .num_heads = num_heads, .num_kv_heads = num_kv_heads, .head_size = head_size, .v_head_size = head_size,
        .scale = (float)(1 / sqrt(head_size)), .context_parallel = {1, 0, 1},
        .num_seqs = num_seqs, .query_start = s->query_start, .seq_lens = s->seq_lens,
        .block_table = s->table, .block_table_stride = MAX_KEYS, .block_table_width = MAX_KEYS,
        .block_q = 1, .tile_keys = 4, .num_segments = 1,
        .partial_out = s->partial_out, .partial_max = s->partial_max, .partial_sum = s->partial_sum,
    };
    assert_int_equal(fv_kv_view_init(&p->cache, s->cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F32, MAX_BLOCKS,
                                     block_size, num_kv_heads, head_size), FV_OK);
    int32_t block = MAX_BLOCKS - 1;
    for (int32_t r = 0; r < num_seqs; r++) {
        s->causal[r] = 1;
        s->seq_lens[r] = seq_lens[r];
        s->query_start[r + 1] = s->query_start[r] + query_lens[r];
        fill_random(s->k[r], (size_t)(seq_lens[r] * num_kv_heads * head_size));
        fill_random(s->v[r], (size_t)(seq_lens[r] * num_kv_heads * head_size));
        for (int32_t i = 0; i < MAX_KEYS; i++)
            s->table[r * MAX_KEYS + i] = i * block_size < seq_lens[r] ? block-- : -1000000;
    }
    p->num_q_blocks = s->query_start[num_seqs] + num_seqs;
    return s;
}

static void scene_destroy(scene *s)
{
    free(s->cache);
    free(s);
}

/* Writes the dense keys of sequence r that live on the rank of the context parallelism. */
static void write_cache(scene *s)
{
    const fv_attend_params *p = &s->params;
    for (int32_t r = 0; r < p->num_seqs; r++) {
        int64_t slots[MAX_KEYS];
        const int32_t num_local = fv_local_keys(&p->context_parallel, s->seq_lens[r]);
        const int64_t stride = p->num_kv_heads * p->head_size * 4;
        for (int32_t i = 0; i < num_local; i++) {
            const int64_t position = fv_key_position(&p->context_parallel, i);
            slots[i] = (int64_t)s->table[r * MAX_KEYS + i / p->cache.block_size] * p->cache.block_size +
                       i % p->cache.block_size;
            const fv_kv_write_params write = {
                .k = (char *)s->k[r] + position * stride, .k_token_stride = stride, .k_head_stride = p->head_size * 4,
                .v = (char *)s->v[r] + position * stride, .v_token_stride = stride, .v_head_stride = p->head_size * 4,
                .src_dtype = FV_DTYPE_F32, .cache = p->cache, .slot_mapping = &slots[i], .num_tokens = 1,
            };
            assert_int_equal(fv_reference_kv_write(NULL, &write), FV_OK);
        }
    }
}

static void attend(scene *s)
{
    assert_int_equal(fv_reference_attend_variants[0].launch(NULL, &s->params), FV_OK);
}

static void assert_near(double value, double expected, double tolerance)
{
    if (expected == -INFINITY ? value == -INFINITY : fabs(value - expected) <= tolerance) return;
    fail_msg("%.9g is not %.9g within %g", value, expected, tolerance);
}

static double dense_score(const scene *s, int32_t r, int32_t token, int32_t head, int32_t j)
{
    const fv_attend_params *p = &s->params;
    const float *q = s->q + (token * p->num_heads + head) * p->head_size;
    const float *k = s->k[r] + (j * p->num_kv_heads + head / (p->num_heads / p->num_kv_heads)) * p->head_size;
    double score = 0;
    for (int32_t d = p->head_size - 1; d >= 0; d--) score += (double)p->scale * q[d] * k[d];
    if (p->soft_cap > 0) score = p->soft_cap * tanh(score / p->soft_cap);
    const int32_t position = s->seq_lens[r] - (s->query_start[r + 1] - token);
    if (p->alibi == FV_ALIBI_LINEAR) score += (double)s->slopes[head] * (j - position);
    if (p->alibi == FV_ALIBI_SQRT && j <= position) score -= (double)s->slopes[head] * sqrt(position - j);
    return score;
}

static int dense_sees(const scene *s, int32_t r, int32_t token, int32_t j)
{
    const fv_attend_params *p = &s->params;
    const int32_t position = s->seq_lens[r] - (s->query_start[r + 1] - token);
    const int32_t context = s->seq_lens[r] - (s->query_start[r + 1] - s->query_start[r]);
    if (s->causal[r] && j > position) return 0;
    if (p->window > 0 && (position - j >= p->window || j - position >= p->window)) return 0;
    if (p->tree_mask && j >= context && !(p->tree_mask[token] >> (j - context) & 1)) return 0;
    return 1;
}

/* The whole batch the plain way: weights of all keys first, then one weighted sum per output element. */
static void assert_dense(const scene *s, double tolerance)
{
    const fv_attend_params *p = &s->params;
    for (int32_t r = 0; r < p->num_seqs; r++) {
        for (int32_t token = s->query_start[r]; token < s->query_start[r + 1]; token++) {
            for (int32_t head = 0; head < p->num_heads; head++) {
                double weights[MAX_KEYS], sum = p->sinks ? exp(p->sinks[head]) : 0;
                int seen = 0;
                for (int32_t j = 0; j < s->seq_lens[r]; j++) {
                    weights[j] = dense_sees(s, r, token, j) ? exp(dense_score(s, r, token, head, j)) : 0;
                    seen += weights[j] > 0;
                    sum += weights[j];
                }
                assert_near(s->lse[token * p->num_heads + head], seen ? log(sum) : -INFINITY, tolerance);
                const int32_t kv_head = head / (p->num_heads / p->num_kv_heads);
                for (int32_t d = 0; d < p->v_head_size; d++) {
                    double expected = 0;
                    for (int32_t j = 0; j < s->seq_lens[r]; j++)
                        expected += weights[j] * s->v[r][(j * p->num_kv_heads + kv_head) * p->head_size + d];
                    assert_near(s->out[(token * p->num_heads + head) * p->head_size + d], seen ? expected / sum : 0,
                                tolerance);
                }
            }
        }
    }
}

static void test_one_key_gives_its_value(void **state)
{
    (void)state;
    scene *s = scene_create(1, (int32_t[]){1}, (int32_t[]){1}, 1, 1, 2, 1);
    memcpy(s->q, (float[]){3, 4}, 8);
    memcpy(s->k[0], (float[]){1, 2}, 8);
    memcpy(s->v[0], (float[]){5, -7}, 8);
    s->params.scale = 0.5f;
    write_cache(s);
    attend(s);
    assert_near(s->out[0], 5, 0);
    assert_near(s->out[1], -7, 0);
    assert_near(s->lse[0], 5.5, 0);

    s->sinks[0] = 5.5f; /* as heavy as the key */
    s->params.sinks = s->sinks;
    attend(s);
    assert_near(s->out[0], 2.5, 1e-6);
    assert_near(s->lse[0], 5.5 + log(2), 1e-6);

    s->params.sinks = NULL;
    s->params.soft_cap = 2;
    s->params.scale = 1e30f;
    attend(s);
    assert_near(s->lse[0], 2, 1e-6);
    scene_destroy(s);
}

static void test_equal_keys_give_the_mean(void **state)
{
    (void)state;
    scene *s = scene_create(1, (int32_t[]){1}, (int32_t[]){4}, 1, 1, 1, 3);
    s->q[0] = 0;
    memcpy(s->v[0], (float[]){1, 2, 4, 9}, 16);
    write_cache(s);
    attend(s);
    assert_near(s->out[0], 4, 1e-6);
    assert_near(s->lse[0], log(4), 1e-6);
    s->params.window = 2;
    attend(s);
    assert_near(s->out[0], 6.5, 1e-6);
    s->params.window = 1;
    attend(s);
    assert_near(s->out[0], 9, 1e-6);

    s->params.window = 0;
    s->params.alibi = FV_ALIBI_LINEAR;
    s->slopes[0] = (float)log(2); /* weights 1/8 1/4 1/2 1 */
    s->params.alibi_slopes = s->slopes;
    attend(s);
    assert_near(s->out[0], (1 / 8.0 + 2 / 4.0 + 4 / 2.0 + 9) / (15 / 8.0), 1e-5);
    scene_destroy(s);
}

static void test_no_key_gives_zero(void **state)
{
    (void)state;
    scene *s = scene_create(3, (int32_t[]){1, 0, 2}, (int32_t[]){0, 0, 2}, 2, 1, 4, 2);
    s->params.sinks = s->sinks;
    s->tree[1] = 0; /* this token sees nothing, the next both */
    s->tree[2] = 3;
    s->params.tree_mask = s->tree;
    for (int32_t i = 0; i < 8 * 3; i++) s->out[i] = NAN;
    write_cache(s);
    attend(s);
    for (int32_t i = 0; i < 16; i++) assert_near(s->out[i], 0, 0);
    for (int32_t i = 0; i < 4; i++) assert_near(s->lse[i], -INFINITY, 0);
    assert_dense(s, 1e-6);
    scene_destroy(s);
}

static scene *mixed_scene(void)
{
    return scene_create(3, (int32_t[]){1, 6, 3}, (int32_t[]){37, 6, 30}, 6, 2, 24, 5);
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
        write_cache(s);
        attend(s);
        assert_dense(s, 2e-6);
        scene_destroy(s);
    }
}

static void reduce(scene *s)
{
    const fv_attend_params *p = &s->params;
    const fv_reduce_params params = {
        .out = p->out, .out_token_stride = p->out_token_stride, .out_head_stride = p->out_head_stride,
        .out_dtype = p->out_dtype, .lse = p->lse, .lse_token_stride = p->lse_token_stride,
        .lse_head_stride = p->lse_head_stride, .sinks = p->sinks, .num_heads = p->num_heads,
        .v_head_size = p->v_head_size, .num_seqs = p->num_seqs, .query_start = p->query_start, .block_q = p->block_q,
        .num_q_blocks = p->num_q_blocks, .num_segments = p->num_segments, .partial_out = p->partial_out,
        .partial_max = p->partial_max, .partial_sum = p->partial_sum,
    };
    assert_int_equal(fv_reference_reduce_segments(NULL, &params), FV_OK);
}

static void test_segments_match_whole(void **state)
{
    (void)state;
    for (int32_t segments = 1; segments <= 7; segments++) {
        for (int32_t block_q = 1; block_q <= 4; block_q++) {
            scene *s = mixed_scene();
            s->params.sinks = s->sinks;
            s->params.window = block_q == 3 ? 4 : 0;
            s->params.num_segments = segments;
            s->params.block_q = block_q;
            write_cache(s);
            attend(s);
            if (segments > 1) reduce(s);
            assert_dense(s, 2e-6);
            scene_destroy(s);
        }
    }
}

static void test_items_match_grid(void **state)
{
    (void)state;
    scene *s = mixed_scene();
    const fv_work_item items[] = { /* whole, a run of heads, and two segments */
        {0, 0, 0, 1, 0, 2, 0, 100, -1}, {1, 1, 0, 4, 0, 1, 0, 6, -1}, {1, 1, 0, 4, 1, 1, 0, 6, -1},
        {1, 1, 4, 2, 0, 2, 0, 6, -1},   {2, 2, 0, 3, 0, 2, 0, 16, 2}, {2, 2, 0, 3, 0, 2, 16, 32, 5},
    };
    const fv_reduce_item reduce_item = {7, 3, 2, 2};
    s->params.items = items;
    s->params.num_items = FV_ARRAY_LEN(items);
    write_cache(s);
    attend(s);
    const fv_attend_params *p = &s->params;
    const fv_reduce_params params = {
        .out = p->out, .out_token_stride = p->out_token_stride, .out_head_stride = p->out_head_stride,
        .out_dtype = p->out_dtype, .lse = p->lse, .lse_token_stride = p->lse_token_stride,
        .lse_head_stride = p->lse_head_stride, .num_heads = p->num_heads, .v_head_size = p->v_head_size,
        .items = &reduce_item, .num_items = 1, .partial_out = p->partial_out, .partial_max = p->partial_max,
        .partial_sum = p->partial_sum,
    };
    assert_int_equal(fv_reference_reduce_segments(NULL, &params), FV_OK);
    assert_dense(s, 2e-6);
    scene_destroy(s);
}

static void test_oracle_matches_reference(void **state)
{
    (void)state;
    scene *s = mixed_scene();
    s->params.sinks = s->sinks;
    write_cache(s);
    attend(s);
    const fv_kv_reader reader = fv_kv_reader_of(&s->params);
    double exact[FV_ORACLE_MAX_ROWS][24], ideal[FV_ORACLE_MAX_ROWS][24];
    double *scratch = malloc(fv_oracle_scratch_doubles(&s->params, MAX_KEYS) * sizeof(double));
    assert_non_null(scratch);
    fv_oracle_row rows[FV_ORACLE_MAX_ROWS];
    int32_t num_rows = 0;
    for (int32_t token = 0; token < 3; token++) {
        for (int32_t head = 3; head < 6; head++, num_rows++)
            rows[num_rows] = (fv_oracle_row){.row = fv_attend_row_of(&s->params, 2, token, head),
                                             .exact = exact[num_rows], .ideal = ideal[num_rows]};
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

/* Ranks of a context-parallel group, merged, are the whole. */
static void test_ranks_merge_to_whole(void **state)
{
    (void)state;
    for (int32_t world = 2; world <= 4; world++) {
        float out[MAX_TOKENS * 6 * 24], lse[MAX_TOKENS * 6];
        scene *s = NULL;
        for (int32_t rank = 0; rank < world; rank++) {
            random_state = 77;
            if (s) scene_destroy(s);
            s = mixed_scene();
            s->params.context_parallel = (fv_context_parallel){world, rank, world == 3 ? 4 : 1};
            s->params.window = world == 4 ? 9 : 0;
            write_cache(s);
            attend(s);
            if (rank > 0) {
                const fv_merge_side a = {out, 6 * 24 * 4, 24 * 4, lse, 6 * 4, 4};
                const fv_merge_side b = {s->out, 6 * 24 * 4, 24 * 4, s->lse, 6 * 4, 4};
                const fv_merge_params merge = {s->out, 6 * 24 * 4, 24 * 4, s->lse, 6 * 4, 4, a, b,
                                               FV_DTYPE_F32, 10, 6, 24};
                assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
            }
            memcpy(out, s->out, sizeof(out));
            memcpy(lse, s->lse, sizeof(lse));
        }
        assert_dense(s, 2e-6);
        scene_destroy(s);
    }
}

static void test_merge_of_empty_sides(void **state)
{
    (void)state;
    const float empties[] = {-INFINITY, INFINITY, NAN};
    for (int32_t i = 0; i < 3; i++) {
        float a[2] = {1, 2}, b[2] = {NAN, NAN}, out[2], lse, lse_a = 3, lse_b = empties[i];
        fv_merge_params merge = {out, 8, 8, &lse, 4, 4, {a, 8, 8, &lse_a, 4, 4}, {b, 8, 8, &lse_b, 4, 4},
                                 FV_DTYPE_F32, 1, 1, 2};
        assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
        assert_true(out[0] == 1 && out[1] == 2 && lse == 3);
        lse_a = empties[(i + 1) % 3];
        assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
        assert_true(out[0] == 0 && out[1] == 0 && lse == -INFINITY);
    }
    float a[1] = {1}, b[1] = {4}, lse, lse_a = 0, lse_b = (float)log(2);
    const fv_merge_params merge = {a, 4, 4, &lse, 4, 4, {a, 4, 4, &lse_a, 4, 4}, {b, 4, 4, &lse_b, 4, 4},
                                   FV_DTYPE_F32, 1, 1, 1};
    assert_int_equal(fv_reference_merge_states(NULL, &merge), FV_OK);
    assert_near(a[0], 3, 1e-6);
    assert_near(lse, log(3), 1e-6);
}

/* DeepSeek-V2's attention on small sizes, not absorbed: k = [c W_UK, r], v = c W_UV, against
 * mla_decode of [q_nope W_UK^T, q_rope] with W_UV applied to its output. */
enum { LORA = 32, ROPE = 64, NOPE = 12, VALUE = 10, ENTRY = LORA + ROPE, MLA_HEADS = 3 };

static void test_mla_matches_expansion(void **state)
{
    (void)state;
    scene *s = scene_create(2, (int32_t[]){1, 3}, (int32_t[]){19, 7}, MLA_HEADS, 1, ENTRY, 3);
    fv_attend_params *p = &s->params;
    p->v_head_size = LORA;
    assert_int_equal(fv_kv_view_init(&p->cache, s->cache, FV_KV_LAYOUT_LATENT, FV_DTYPE_F32, MAX_BLOCKS, 3, 1, ENTRY),
                     FV_OK);
    write_cache(s);
    static float w_uk[MLA_HEADS][NOPE][LORA], w_uv[MLA_HEADS][LORA][VALUE], q_nope[4][MLA_HEADS][NOPE];
    fill_random(&w_uk[0][0][0], sizeof(w_uk) / 4);
    fill_random(&w_uv[0][0][0], sizeof(w_uv) / 4);
    fill_random(&q_nope[0][0][0], sizeof(q_nope) / 4);
    for (int32_t t = 0; t < 4; t++) {
        for (int32_t h = 0; h < MLA_HEADS; h++) {
            for (int32_t l = 0; l < LORA; l++) {
                float *q = &s->q[(t * MLA_HEADS + h) * ENTRY + l];
                *q = 0;
                for (int32_t d = 0; d < NOPE; d++) *q += q_nope[t][h][d] * w_uk[h][d][l];
            }
        }
    }
    const fv_mla_decode_params params = {.attend = *p, .rope_dim = ROPE};
    assert_int_equal(fv_reference_mla_decode(NULL, &params), FV_OK);

    for (int32_t t = 0; t < 4; t++) {
        const int32_t r = t > 0;
        const int32_t num_keys = r == 0 ? 19 : 7 - (3 - t); /* causal */
        for (int32_t h = 0; h < MLA_HEADS; h++) {
            double sum = 0, expected[VALUE] = {0};
            for (int32_t j = 0; j < num_keys; j++) {
                const float *entry = s->k[r] + j * ENTRY;
                double score = 0;
                for (int32_t d = 0; d < NOPE; d++) {
                    double k = 0;
                    for (int32_t l = 0; l < LORA; l++) k += (double)entry[l] * w_uk[h][d][l];
                    score += q_nope[t][h][d] * k;
                }
                for (int32_t d = 0; d < ROPE; d++)
                    score += (double)s->q[(t * MLA_HEADS + h) * ENTRY + LORA + d] * entry[LORA + d];
                const double weight = exp(p->scale * score);
                sum += weight;
                for (int32_t d = 0; d < VALUE; d++)
                    for (int32_t l = 0; l < LORA; l++) expected[d] += weight * entry[l] * w_uv[h][l][d];
            }
            for (int32_t d = 0; d < VALUE; d++) {
                double value = 0;
                for (int32_t l = 0; l < LORA; l++)
                    value += (double)s->out[(t * MLA_HEADS + h) * ENTRY + l] * w_uv[h][l][d];
                assert_near(value, expected[d] / sum, 1e-5);
            }
            assert_near(s->lse[t * MLA_HEADS + h], log(sum), 1e-5);
        }
    }
    scene_destroy(s);
}

/* Keys that lie unrotated and are rotated at reading = keys rotated before they are written. */
static void test_rotation_at_reading(void **state)
{
    (void)state;
    static float cosines[MAX_KEYS][ROPE / 2], sines[MAX_KEYS][ROPE / 2], plain[4 * MLA_HEADS * ENTRY];
    scene *s = scene_create(2, (int32_t[]){1, 3}, (int32_t[]){19, 7}, MLA_HEADS, 1, ENTRY, 3);
    fv_attend_params *p = &s->params;
    p->v_head_size = LORA;
    assert_int_equal(fv_kv_view_init(&p->cache, s->cache, FV_KV_LAYOUT_LATENT, FV_DTYPE_F32, MAX_BLOCKS, 3, 1, ENTRY),
                     FV_OK);
    for (int32_t j = 0; j < MAX_KEYS; j++) {
        for (int32_t i = 0; i < ROPE / 2; i++) {
            const double angle = j * pow(10000, -2.0 * i / ROPE);
            cosines[j][i] = (float)cos(angle);
            sines[j][i] = (float)sin(angle);
        }
    }
    write_cache(s);
    fv_mla_decode_params params = {.attend = *p, .rope_dim = ROPE, .cos = cosines[0], .sin = sines[0],
                                   .num_positions = MAX_KEYS};
    assert_int_equal(fv_reference_mla_decode(NULL, &params), FV_OK);
    memcpy(plain, s->out, sizeof(plain));

    for (int32_t r = 0; r < 2; r++) {
        for (int32_t j = 0; j < s->seq_lens[r]; j++) {
            float *rope = s->k[r] + j * ENTRY + LORA;
            for (int32_t i = 0; i < ROPE / 2; i++) {
                const float low = rope[i], high = rope[i + ROPE / 2];
                rope[i] = low * cosines[j][i] - high * sines[j][i];
                rope[i + ROPE / 2] = high * cosines[j][i] + low * sines[j][i];
            }
        }
    }
    write_cache(s);
    params.cos = params.sin = NULL;
    assert_int_equal(fv_reference_mla_decode(NULL, &params), FV_OK);
    for (int32_t t = 0; t < 4 * MLA_HEADS; t++)
        for (int32_t d = 0; d < LORA; d++) assert_near(s->out[t * ENTRY + d], plain[t * ENTRY + d], 1e-6);
    scene_destroy(s);
}

/* The 656-byte entry: written, then read by hand, then attended to as the same numbers in fp32. */
static void test_fp8_ds_entry(void **state)
{
    (void)state;
    scene *s = scene_create(1, (int32_t[]){1}, (int32_t[]){5}, 2, 1, 576, 2);
    fv_attend_params *p = &s->params;
    p->v_head_size = 512;
    uint8_t *entries = calloc(MAX_BLOCKS * 2, 656);
    float *read_back = s->v[0];
    assert_non_null(entries);
    assert_int_equal(fv_kv_view_init(&p->cache, entries, FV_KV_LAYOUT_LATENT_FP8_DS, FV_DTYPE_F8_E4M3, MAX_BLOCKS, 2,
                                     1, 576), FV_OK);
    write_cache(s);
    for (int32_t j = 0; j < 5; j++) {
        const uint8_t *entry = entries + (s->table[j / 2] * 2 + j % 2) * 656;
        for (int32_t d = 0; d < 512; d++) {
            float scale;
            memcpy(&scale, entry + 512 + d / 128 * 4, 4);
            read_back[j * 576 + d] = scale * fv_f32_of_e4m3(entry[d]);
            assert_near(read_back[j * 576 + d], s->k[0][j * 576 + d], 448 * scale / 16);
        }
        for (int32_t d = 0; d < 64; d++) {
            uint16_t half;
            memcpy(&half, entry + 528 + d * 2, 2);
            read_back[j * 576 + 512 + d] = fv_f32_of_bf16(half);
            assert_near(read_back[j * 576 + 512 + d], s->k[0][j * 576 + 512 + d], 1.0 / 256);
        }
    }
    const fv_mla_decode_params params = {.attend = *p, .rope_dim = 64};
    assert_int_equal(fv_reference_mla_decode(NULL, &params), FV_OK);
    memcpy(s->k[0], read_back, 5 * 576 * 4);
    memcpy(s->v[0], read_back, 5 * 576 * 4);
    assert_dense(s, 1e-5);
    free(entries);
    scene_destroy(s);
}

static void test_kv_gather_returns_what_was_written(void **state)
{
    (void)state;
    static float k[20 * 2 * 24], v[20 * 2 * 24];
    scene *s = mixed_scene();
    write_cache(s);
    const int32_t key_start[] = {11, 0, 29}, out_start[] = {0, 13, 13, 14};
    const fv_kv_gather_params params = {
        .k = k, .k_token_stride = 2 * 24 * 4, .k_head_stride = 24 * 4,
        .v = v, .v_token_stride = 2 * 24 * 4, .v_head_stride = 24 * 4, .dst_dtype = FV_DTYPE_F32,
        .cache = s->params.cache, .num_seqs = 3, .block_table = s->table, .block_table_stride = MAX_KEYS,
        .block_table_width = MAX_KEYS, .key_start = key_start, .out_start = out_start, .num_rows = 14,
    };
    assert_int_equal(fv_reference_kv_gather(NULL, &params), FV_OK);
    assert_memory_equal(k, s->k[0] + 11 * 48, 13 * 48 * 4);
    assert_memory_equal(v, s->v[0] + 11 * 48, 13 * 48 * 4);
    assert_memory_equal(k + 13 * 48, s->k[2] + 29 * 48, 48 * 4);
    scene_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_key_gives_its_value),
        cmocka_unit_test(test_equal_keys_give_the_mean),
        cmocka_unit_test(test_no_key_gives_zero),
        cmocka_unit_test(test_features_match_dense),
        cmocka_unit_test(test_segments_match_whole),
        cmocka_unit_test(test_items_match_grid),
        cmocka_unit_test(test_oracle_matches_reference),
        cmocka_unit_test(test_ranks_merge_to_whole),
        cmocka_unit_test(test_merge_of_empty_sides),
        cmocka_unit_test(test_mla_matches_expansion),
        cmocka_unit_test(test_rotation_at_reading),
        cmocka_unit_test(test_fp8_ds_entry),
        cmocka_unit_test(test_kv_gather_returns_what_was_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
