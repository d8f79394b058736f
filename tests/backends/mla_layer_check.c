/* The MLA layer's definition written out in double and not absorbed: k = [W_UK c, R r], v = W_UV c, each key rotated
 * at its own position; and the comparison with it. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backends/mla_layer_scene.h"
#include "core/compiler.h"

/* y = W x. */
static void linear(double *y, const char *weights, const double *x, int64_t outputs, int64_t inputs, fv_dtype dtype)
{
    for (int64_t i = 0; i < outputs; i++) {
        y[i] = 0;
        for (int64_t j = 0; j < inputs; j++) y[i] += mla_layer_load(weights, i * inputs + j, dtype) * x[j];
    }
}

static void norm(double *x, const float *weight, int32_t size)
{
    double squares = 0;
    for (int32_t i = 0; i < size; i++) squares += x[i] * x[i];
    for (int32_t i = 0; i < size; i++) x[i] *= weight[i] / sqrt(squares / size + 1e-6);
}

static void load_x(double *x, const mla_layer_scene *s, int32_t token)
{
    for (int32_t i = 0; i < s->set.hidden; i++) {
        x[i] = mla_layer_load(s->x, (int64_t)token * (s->set.hidden + MLA_LAYER_PADDING) + i, s->set.dtype);
    }
}

/* Appends the keys of the new tokens, raw, to those of the context. */
void mla_layer_expect_keys(mla_layer_scene *s)
{
    const int32_t size = mla_layer_entry_size(s), lora = s->set.mla.kv_lora_rank;
    double *x = mla_layer_alloc(sizeof(double) * (size_t)s->set.hidden);
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        for (int32_t token = s->query_start[seq]; token < s->query_start[seq + 1]; token++) {
            double *key = s->keys[seq] + s->positions[token] * size;
            load_x(x, s, token);
            linear(key, s->kv_down, x, size, s->set.hidden, s->set.dtype);
            if (s->set.has_norms) norm(key, s->kv_norm, lora);
        }
    }
    free(x);
}

/* [H, P + R] of a token, rotated. */
static void expect_queries(double *q, const mla_layer_scene *s, int32_t token)
{
    const fv_mla_shape *mla = &s->set.mla;
    const int32_t q_lora = s->set.q_lora, inputs = q_lora ? q_lora : s->set.hidden;
    double *x = mla_layer_alloc(sizeof(double) * (size_t)s->set.hidden);
    double *latent = mla_layer_alloc(sizeof(double) * (size_t)inputs);
    load_x(x, s, token);
    if (q_lora) {
        linear(latent, s->q_down, x, q_lora, s->set.hidden, s->set.dtype);
        if (s->set.has_norms) norm(latent, s->q_norm, q_lora);
    }
    linear(q, s->q_up, q_lora ? latent : x, (int64_t)mla->num_heads * mla_layer_query_size(s), inputs, s->set.dtype);
    for (int32_t head = 0; head < mla->num_heads; head++) {
        mla_layer_rotate(q + head * mla_layer_query_size(s) + mla->qk_nope_head_dim, s, s->positions[token]);
    }
    free(x);
    free(latent);
}

/* k [P + R] and v [V] of a head, from a raw entry. */
static void expand(double *k, double *v, const mla_layer_scene *s, const double *entry, int32_t head, int32_t position)
{
    const fv_mla_shape *mla = &s->set.mla;
    const int32_t nope = mla->qk_nope_head_dim, lora = mla->kv_lora_rank;
    const char *kv_up = s->kv_up +
                        (int64_t)head * (nope + mla->v_head_dim) * lora * (int64_t)fv_dtype_bytes(s->set.dtype);
    linear(k, kv_up, entry, nope, lora, s->set.dtype);
    linear(v, kv_up + (int64_t)nope * lora * (int64_t)fv_dtype_bytes(s->set.dtype), entry, mla->v_head_dim, lora,
           s->set.dtype);
    memcpy(k + nope, entry + lora, sizeof(double) * (size_t)mla->qk_rope_head_dim);
    if (!s->keys_are_rotated) mla_layer_rotate(k + nope, s, position);
}

/* The keys of a sequence for all heads, k [H, seq_len, P + R] and v [H, seq_len, V]. */
typedef struct expanded_keys {
    double *k, *v;
    int32_t num_keys;
} expanded_keys;

static expanded_keys expand_keys(const mla_layer_scene *s, int32_t seq)
{
    const int64_t num_keys = s->seq_lens[seq], heads = s->set.mla.num_heads;
    const int32_t q_size = mla_layer_query_size(s), v_size = s->set.mla.v_head_dim;
    expanded_keys keys = {.num_keys = s->seq_lens[seq]};
    keys.k = mla_layer_alloc(sizeof(double) * (size_t)(heads * num_keys * q_size));
    keys.v = mla_layer_alloc(sizeof(double) * (size_t)(heads * num_keys * v_size));
    for (int32_t i = 0; i < heads * num_keys; i++) {
        const int32_t key = (int32_t)(i % num_keys);
        expand(keys.k + (int64_t)i * q_size, keys.v + (int64_t)i * v_size, s,
               s->keys[seq] + key * mla_layer_entry_size(s), (int32_t)(i / num_keys), key);
    }
    return keys;
}

/* attended [V] of one head. */
static void expect_head(double *attended, const mla_layer_scene *s, const double *q, const expanded_keys *keys,
                        int32_t position, int32_t head)
{
    const int32_t v_size = s->set.mla.v_head_dim;
    const double *k = keys->k + (int64_t)head * keys->num_keys * mla_layer_query_size(s);
    const double *v = keys->v + (int64_t)head * keys->num_keys * v_size;
    double sum = 0;
    for (int32_t d = 0; d < v_size; d++) attended[d] = 0;
    for (int32_t key = 0; key <= position; key++, k += mla_layer_query_size(s), v += v_size) {
        double score = 0;
        for (int32_t d = 0; d < mla_layer_query_size(s); d++) score += q[d] * k[d];
        const double weight = exp(score / sqrt(mla_layer_query_size(s)));
        sum += weight;
        for (int32_t d = 0; d < v_size; d++) attended[d] += weight * v[d];
    }
    for (int32_t d = 0; d < v_size; d++) attended[d] /= sum;
}

static void expect_output(double *out, const mla_layer_scene *s, const expanded_keys *keys, int32_t token)
{
    const fv_mla_shape *mla = &s->set.mla;
    double *q = mla_layer_alloc(sizeof(double) * (size_t)(mla->num_heads * mla_layer_query_size(s)));
    double *attended = mla_layer_alloc(sizeof(double) * (size_t)(mla->num_heads * mla->v_head_dim));
    expect_queries(q, s, token);
    for (int32_t head = 0; head < mla->num_heads; head++) {
        expect_head(attended + head * mla->v_head_dim, s, q + head * mla_layer_query_size(s), keys, s->positions[token],
                    head);
    }
    linear(out, s->o, attended, s->set.hidden, (int64_t)mla->num_heads * mla->v_head_dim, s->set.dtype);
    free(q);
    free(attended);
}

/* --- the checks ------------------------------------------------------------------------------------------------- */

/* What an element of the cache may be off by: the rounding of the activations, and half a step of the cache's dtype. */
static double stored_error(const mla_layer_scene *s, double real, double unit, int32_t element)
{
    const int32_t is_rope_of_ds = s->set.layout == FV_KV_LAYOUT_LATENT_FP8_DS && element >= 512;
    const fv_dtype dtype = is_rope_of_ds ? FV_DTYPE_BF16 : s->set.kv_dtype;
    const double activation = s->set.dtype == FV_DTYPE_F32 ? 1e-4 * (1 + fabs(real)) : 8e-3 + 2e-2 * fabs(real);
    switch (dtype) {
    case FV_DTYPE_F8_E4M3: return activation + fabs(real) / 16 + unit * 0x1p-10; /* 3 bits; steps of 2^-9 near 0 */
    case FV_DTYPE_F8_E5M2: return activation + fabs(real) / 8 + unit * 0x1p-17;
    case FV_DTYPE_BF16: return activation + fabs(real) / 256;
    default: return activation;
    }
}

void mla_layer_check_cache(const mla_layer_scene *s)
{
    const int32_t size = mla_layer_entry_size(s), lora = s->set.mla.kv_lora_rank;
    double *entry = mla_layer_alloc(sizeof(double) * (size_t)size);
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        for (int32_t key = 0; key < s->seq_lens[seq]; key++) {
            const int64_t slot = mla_layer_slot(s, seq, key);
            if (slot < 0) continue;
            memcpy(entry, s->keys[seq] + key * size, sizeof(double) * (size_t)size);
            if (!s->set.mla.rotate_at_reading) mla_layer_rotate(entry + lora, s, key);
            for (int32_t i = 0; i < size; i++) {
                double unit;
                const double found = mla_layer_load_element(&unit, s, slot, i);
                if (fabs(found - entry[i]) <= stored_error(s, entry[i], unit, i)) continue;
                fail_msg("%s, %s to %s: cache entry %d, element %d is %g for %g", s->set.backend,
                         fv_dtype_name(s->set.dtype), fv_dtype_name(s->set.kv_dtype), key, i, found, entry[i]);
            }
        }
    }
    free(entry);
}

/* From here on the keys of `to` are what the cache of `s` has, so that its rounding is no part of the output's
 * tolerance. */
void mla_layer_read_back(mla_layer_scene *to, const mla_layer_scene *s)
{
    const int32_t size = mla_layer_entry_size(s);
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        for (int32_t i = 0; i < s->seq_lens[seq] * size; i++) {
            double unit;
            const int64_t slot = mla_layer_slot(s, seq, i / size);
            if (slot >= 0) to->keys[seq][i] = mla_layer_load_element(&unit, s, slot, i % size);
        }
    }
    to->keys_are_rotated = !s->set.mla.rotate_at_reading;
}

static void assert_close(const mla_layer_scene *s, double found, double expected, int32_t token, int32_t element)
{
    const int32_t is_f32 = s->set.dtype == FV_DTYPE_F32;
    const double relative = is_f32 ? 1e-4 : 2e-2, absolute = is_f32 ? 1e-4 : 8e-3;
    if (fabs(found - expected) <= absolute + relative * fabs(expected)) return;
    fail_msg("%s, %s to %s: output %d, element %d is %g for %g", s->set.backend, fv_dtype_name(s->set.dtype),
             fv_dtype_name(s->set.kv_dtype), token, element, found, expected);
}

void mla_layer_check_outputs(const mla_layer_scene *s)
{
    double *expected = mla_layer_alloc(sizeof(double) * (size_t)s->set.hidden);
    const int32_t stride = s->set.hidden + MLA_LAYER_PADDING;
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        const expanded_keys keys = expand_keys(s, seq);
        for (int32_t token = s->query_start[seq]; token < s->query_start[seq + 1]; token++) {
            expect_output(expected, s, &keys, token);
            const char *row = s->out + (int64_t)token * stride * (int64_t)fv_dtype_bytes(s->set.dtype);
            for (int32_t i = 0; i < s->set.hidden; i++) {
                assert_close(s, mla_layer_load(row, i, s->set.dtype), expected[i], token, i);
            }
            for (int32_t i = s->set.hidden; i < stride; i++) assert_true(isnan(mla_layer_load(row, i, s->set.dtype)));
        }
        free(keys.k);
        free(keys.v);
    }
    free(expected);
}
