/* The small problem, and the dense softmax. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "reference/scene.h"

void scene_fill_random(scene *s, float *values, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        s->random_state = s->random_state * 6364136223846793005u + 1442695040888963407u;
        values[i] = (float)((double)(s->random_state >> 11) * 0x1p-53 * 2 - 1);
    }
}

scene *scene_create(uint64_t seed, int32_t num_seqs, const int32_t *query_lens, const int32_t *seq_lens,
                    int32_t num_heads, int32_t num_kv_heads, int32_t head_size, int32_t block_size)
{
    scene *s = calloc(1, sizeof(*s));
    assert_non_null(s);
    s->random_state = seed;
    scene_fill_random(s, s->q, sizeof(s->q) / sizeof(float));
    scene_fill_random(s, s->sinks, MAX_HEADS);
    scene_fill_random(s, s->slopes, MAX_HEADS);
    const size_t cache_floats = (size_t)2 * MAX_BLOCKS * (size_t)block_size * (size_t)num_kv_heads * (size_t)head_size;
    s->cache = malloc(cache_floats * sizeof(float));
    assert_non_null(s->cache);
    for (size_t i = 0; i < cache_floats; i++) s->cache[i] = NAN;
    fv_attend_params *p = &s->params;
    *p = (fv_attend_params){
        .q = s->q,
        .q_token_stride = num_heads * head_size * 4,
        .q_head_stride = head_size * 4,
        .out = s->out,
        .out_token_stride = num_heads * head_size * 4,
        .out_head_stride = head_size * 4,
        .lse = s->lse,
        .lse_token_stride = num_heads * 4,
        .lse_head_stride = 4,
        .q_dtype = FV_DTYPE_F32,
        .out_dtype = FV_DTYPE_F32,
        .num_heads = num_heads,
        .num_kv_heads = num_kv_heads,
        .head_size = head_size,
        .v_head_size = head_size,
        .scale = (float)(1 / sqrt(head_size)),
        .context_parallel = {1, 0, 1},
        .num_seqs = num_seqs,
        .query_start = s->query_start,
        .seq_lens = s->seq_lens,
        .block_table = s->table,
        .block_table_stride = MAX_KEYS,
        .block_table_width = MAX_KEYS,
        .block_q = 1,
        .tile_keys = 4,
        .num_segments = 1,
        .partial_out = s->partial_out,
        .partial_max = s->partial_max,
        .partial_sum = s->partial_sum,
    };
    assert_int_equal(fv_kv_view_init(&p->cache, s->cache, FV_KV_LAYOUT_NB_2_BS_H_D, FV_DTYPE_F32, MAX_BLOCKS,
                                     block_size, num_kv_heads, head_size),
                     FV_OK);
    int32_t block = MAX_BLOCKS - 1;
    for (int32_t r = 0; r < num_seqs; r++) {
        s->causal[r] = 1;
        s->seq_lens[r] = seq_lens[r];
        s->query_start[r + 1] = s->query_start[r] + query_lens[r];
        scene_fill_random(s, s->k[r], (size_t)(seq_lens[r] * num_kv_heads * head_size));
        scene_fill_random(s, s->v[r], (size_t)(seq_lens[r] * num_kv_heads * head_size));
        for (int32_t i = 0; i < MAX_KEYS; i++)
            s->table[r * MAX_KEYS + i] = i * block_size < seq_lens[r] ? block-- : -1000000;
    }
    p->num_q_blocks = s->query_start[num_seqs] + num_seqs;
    return s;
}

void scene_destroy(scene *s)
{
    free(s->cache);
    free(s);
}

void scene_write_cache(scene *s)
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
                .k = (char *)s->k[r] + position * stride,
                .k_token_stride = stride,
                .k_head_stride = p->head_size * 4,
                .v = (char *)s->v[r] + position * stride,
                .v_token_stride = stride,
                .v_head_stride = p->head_size * 4,
                .src_dtype = FV_DTYPE_F32,
                .cache = p->cache,
                .slot_mapping = &slots[i],
                .num_tokens = 1,
            };
            assert_int_equal(fv_reference_kv_write(NULL, &write), FV_OK);
        }
    }
}

void scene_attend(scene *s) { assert_int_equal(fv_reference_attend_variants[0].launch(NULL, &s->params), FV_OK); }

void assert_near(double value, double expected, double tolerance)
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

void scene_assert_dense(const scene *s, double tolerance)
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
