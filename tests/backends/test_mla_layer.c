/* The MLA layer against its definition written out in double and not absorbed: k = [W_UK c, R r], v = W_UV c, each
 * key rotated at its own position. Output and updated cache, with raw and with rotated keys. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "core/float.h"
#include "fovea/fovea.h"

enum { MAX_SEQS = 8, MAX_POSITIONS = 512, PADDING = 3 };

typedef struct lens {
    int32_t query_len, seq_len;
} lens;

/* What is tested. */
typedef struct setting {
    fv_mla_shape mla;
    int32_t hidden, q_lora;
    int32_t has_norms;
    fv_rope_style style;
    fv_dtype dtype, kv_dtype; /* of activations and weights; of the cache */
    int32_t block_size;
    const char *backend, *kernels;
    const lens *seqs;
    int32_t num_seqs;
} setting;

typedef struct scene {
    setting set;
    fv_context *context;
    fv_plan *plan;
    int32_t num_tokens, max_seq_len, max_query_len, width, num_blocks;
    int32_t query_start[MAX_SEQS + 1], seq_lens[MAX_SEQS];
    int32_t *block_table, *positions; /* [num_seqs, width]; [num_tokens] */
    int64_t *slots;
    float *cos, *sin;                  /* [MAX_POSITIONS, R / 2] */
    double *keys[MAX_SEQS];            /* [seq_len, L + R], not rotated */
    char *x, *out, *cache, *workspace; /* x and out [num_tokens, N + PADDING] */
    char *q_down, *q_up, *kv_down, *kv_up, *o;
    float *q_norm, *kv_norm;
    fv_kv_view view;
    fv_mla_layer layer;
} scene;

/* --- numbers ---------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

static void *allocate(size_t bytes)
{
    void *memory = aligned_alloc(256, (bytes + 511) / 256 * 256);
    assert_non_null(memory);
    return memory;
}

/* Uniform, mean 0, variance 1. */
static float number(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return ((float)(random_state >> 40) * 0x1p-23f - 1.0f) * 1.7320508f;
}

static double load(const char *from, int64_t index, fv_dtype dtype)
{
    return fv_float_load(from + index * (int64_t)fv_dtype_bytes(dtype), dtype);
}

static char *random_array(int64_t count, float factor, fv_dtype dtype)
{
    char *array = allocate((size_t)count * fv_dtype_bytes(dtype));
    for (int64_t i = 0; i < count; i++) {
        fv_float_store(array + i * (int64_t)fv_dtype_bytes(dtype), factor * number(), dtype);
    }
    return array;
}

/* Weights [outputs, inputs] that keep the variance. */
static char *random_weights(const scene *s, int64_t outputs, int64_t inputs)
{
    return random_array(outputs * inputs, 1 / sqrtf((float)inputs), s->set.dtype);
}

/* What an engine brings: here three loops, over rows of b that lie in a row of fp32. */
static fv_status plain_gemm(void *user, const fv_gemm *g, fv_stream stream)
{
    (void)user, (void)stream;
    float *column = allocate(sizeof(float) * (size_t)g->k);
    const int64_t a_bytes = (int64_t)fv_dtype_bytes(g->a_dtype), b_bytes = (int64_t)fv_dtype_bytes(g->b_dtype);
    for (int64_t i = 0; i < g->num_matrices; i++) {
        for (int64_t n = 0; n < g->n; n++) {
            const char *b = (const char *)g->b + i * g->b_matrix_stride +
                            n * (g->b_is_transposed ? g->b_row_stride : b_bytes);
            const int64_t b_step = g->b_is_transposed ? b_bytes : g->b_row_stride;
            for (int64_t k = 0; k < g->k; k++) column[k] = fv_float_load(b + k * b_step, g->b_dtype);
            for (int64_t m = 0; m < g->m; m++) {
                const char *a = (const char *)g->a + i * g->a_matrix_stride + m * g->a_row_stride;
                char *c = (char *)g->c + i * g->c_matrix_stride + m * g->c_row_stride;
                double sum = 0;
                for (int64_t k = 0; k < g->k; k++) {
                    sum += (double)fv_float_load(a + k * a_bytes, g->a_dtype) * column[k];
                }
                fv_float_store(c + n * (int64_t)fv_dtype_bytes(g->c_dtype), (float)sum, g->c_dtype);
            }
        }
    }
    free(column);
    return FV_OK;
}

/* --- the scene -------------------------------------------------------------------------------------------------- */

static int32_t entry_size(const scene *s) { return s->set.mla.kv_lora_rank + s->set.mla.qk_rope_head_dim; }
static int32_t query_size(const scene *s) { return s->set.mla.qk_nope_head_dim + s->set.mla.qk_rope_head_dim; }

static void fill_tables(scene *s)
{
    const int32_t half = s->set.mla.qk_rope_head_dim / 2;
    s->cos = allocate(sizeof(float) * MAX_POSITIONS * (size_t)half);
    s->sin = allocate(sizeof(float) * MAX_POSITIONS * (size_t)half);
    for (int32_t position = 0; position < MAX_POSITIONS; position++) {
        for (int32_t i = 0; i < half; i++) {
            const double angle = position * pow(10000, -(double)i / half);
            s->cos[position * half + i] = (float)cos(angle);
            s->sin[position * half + i] = (float)sin(angle);
        }
    }
}

/* The rope part of a key or query at its position. */
static void rotate(double *rope, const scene *s, int32_t position)
{
    const int32_t half = s->set.mla.qk_rope_head_dim / 2, is_half = s->set.style == FV_ROPE_HALF;
    for (int32_t i = 0; i < half; i++) {
        const double cosine = s->cos[position * half + i], sine = s->sin[position * half + i];
        double *first = rope + (is_half ? i : 2 * i), *second = rope + (is_half ? i + half : 2 * i + 1);
        const double a = *first, b = *second;
        *first = a * cosine - b * sine;
        *second = b * cosine + a * sine;
    }
}

static void fill_sequences(scene *s)
{
    const int32_t bs = s->set.block_size;
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        const lens *len = &s->set.seqs[seq];
        s->query_start[seq + 1] = s->query_start[seq] + len->query_len;
        s->seq_lens[seq] = len->seq_len;
        s->max_query_len = fv_max_i32(s->max_query_len, len->query_len);
        s->max_seq_len = fv_max_i32(s->max_seq_len, len->seq_len);
        s->keys[seq] = allocate(sizeof(double) * (size_t)(len->seq_len * entry_size(s)));
    }
    s->num_tokens = s->query_start[s->set.num_seqs];
    s->width = (s->max_seq_len + bs - 1) / bs;
    s->block_table = allocate(sizeof(int32_t) * (size_t)(s->set.num_seqs * s->width));
    s->slots = allocate(sizeof(int64_t) * (size_t)s->num_tokens);
    s->positions = allocate(sizeof(int32_t) * (size_t)s->num_tokens);
    s->num_blocks = 1;
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        int32_t *row = s->block_table + seq * s->width;
        for (int32_t i = 0; i < s->width; i++) row[i] = i * bs < s->seq_lens[seq] ? s->num_blocks++ : 1 << 30;
        for (int32_t token = s->query_start[seq]; token < s->query_start[seq + 1]; token++) {
            const int32_t position = s->seq_lens[seq] - (s->query_start[seq + 1] - token);
            s->positions[token] = position;
            s->slots[token] = (int64_t)row[position / bs] * bs + position % bs;
        }
    }
}

static void fill_weights(scene *s)
{
    const fv_mla_shape *mla = &s->set.mla;
    const int64_t hidden = s->set.hidden, q_lora = s->set.q_lora;
    s->x = random_array((int64_t)s->num_tokens * (hidden + PADDING), 1, s->set.dtype);
    if (q_lora) s->q_down = random_weights(s, q_lora, hidden);
    s->q_up = random_weights(s, (int64_t)mla->num_heads * query_size(s), q_lora ? q_lora : hidden);
    s->kv_down = random_weights(s, entry_size(s), hidden);
    s->kv_up = random_weights(s, (int64_t)mla->num_heads * (mla->qk_nope_head_dim + mla->v_head_dim),
                              mla->kv_lora_rank);
    s->o = random_weights(s, hidden, (int64_t)mla->num_heads * mla->v_head_dim);
    s->q_norm = (float *)(void *)random_array(fv_max_i64(1, q_lora), 1, FV_DTYPE_F32);
    s->kv_norm = (float *)(void *)random_array(mla->kv_lora_rank, 1, FV_DTYPE_F32);
}

static char *entry_at(const scene *s, int32_t seq, int32_t key)
{
    const int32_t bs = s->set.block_size, block = s->block_table[seq * s->width + key / bs];
    return s->cache + ((int64_t)block * bs + key % bs) * entry_size(s) * (int64_t)fv_dtype_bytes(s->set.kv_dtype);
}

/* Raw context keys, and the cache that an engine would have made of them. */
static void fill_context(scene *s)
{
    const fv_dtype dtype = s->set.kv_dtype;
    const int32_t size = entry_size(s), lora = s->set.mla.kv_lora_rank;
    const size_t cache_bytes = (size_t)(s->num_blocks * s->set.block_size * size) * fv_dtype_bytes(dtype);
    double *entry = allocate(sizeof(double) * (size_t)size);
    s->cache = allocate(cache_bytes);
    memset(s->cache, 0xff, cache_bytes);
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        const int32_t context = s->seq_lens[seq] - s->set.seqs[seq].query_len;
        for (int32_t key = 0; key < context; key++) {
            double *raw = s->keys[seq] + key * size;
            uint32_t stored;
            for (int32_t i = 0; i < size; i++) {
                fv_float_store(&stored, number(), dtype);
                raw[i] = fv_float_load(&stored, dtype);
            }
            memcpy(entry, raw, sizeof(double) * (size_t)size);
            if (!s->set.mla.rotate_at_reading) rotate(entry + lora, s, key);
            for (int32_t i = 0; i < size; i++) {
                fv_float_store(entry_at(s, seq, key) + (size_t)i * fv_dtype_bytes(dtype), (float)entry[i], dtype);
            }
        }
    }
    free(entry);
    assert_int_equal(
        fv_kv_view_init(&s->view, s->cache, FV_KV_LAYOUT_LATENT, dtype, s->num_blocks, s->set.block_size, 1, size),
        FV_OK);
    s->view.v_head_size = lora; /* the helper of the view knows ropes of 64 only */
}

static fv_tensor padded_rows(const scene *s, char *data)
{
    fv_tensor tensor = fv_tensor_2d(data, s->set.dtype, s->num_tokens, s->set.hidden);
    tensor.stride_bytes[0] = (s->set.hidden + PADDING) * (int64_t)fv_dtype_bytes(s->set.dtype);
    return tensor;
}

static fv_mla_layer layer_of(const scene *s)
{
    const fv_mla_shape *mla = &s->set.mla;
    const fv_dtype dtype = s->set.dtype;
    const int64_t q_lora = s->set.q_lora, hidden = s->set.hidden;
    fv_mla_layer layer = {
        .struct_size = sizeof(layer),
        .rms_epsilon = 1e-6f,
        .x = padded_rows(s, s->x),
        .out = padded_rows(s, s->out),
        .kv_cache = s->view,
        .q_up = fv_tensor_2d(s->q_up, dtype, (int64_t)mla->num_heads * query_size(s), q_lora ? q_lora : hidden),
        .kv_down = fv_tensor_2d(s->kv_down, dtype, entry_size(s), hidden),
        .kv_up = fv_tensor_3d(s->kv_up, dtype, mla->num_heads, mla->qk_nope_head_dim + mla->v_head_dim,
                              mla->kv_lora_rank),
        .o = fv_tensor_2d(s->o, dtype, hidden, (int64_t)mla->num_heads * mla->v_head_dim),
        .rotation =
            {
                .struct_size = sizeof(fv_rotation),
                .style = s->set.style,
                .rope_dim = mla->qk_rope_head_dim,
                .cos = s->cos,
                .sin = s->sin,
                .max_position = MAX_POSITIONS,
                .positions_32 = s->positions,
            },
        .gemm = plain_gemm,
    };
    if (q_lora) layer.q_down = fv_tensor_2d(s->q_down, dtype, q_lora, hidden);
    if (s->set.has_norms) layer.kv_norm = fv_tensor_1d(s->kv_norm, FV_DTYPE_F32, mla->kv_lora_rank);
    if (s->set.has_norms && q_lora) layer.q_norm = fv_tensor_1d(s->q_norm, FV_DTYPE_F32, q_lora);
    return layer;
}

static void must(fv_status status)
{
    if (status != FV_OK) fail_msg("%s", fv_last_error());
}

static void make_plan(scene *s)
{
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = FV_ATTENTION_MLA,
        .mla = s->set.mla,
        .q_dtype = s->set.dtype,
        .kv_dtype = s->set.kv_dtype,
        .kv_layout_any = 1,
        .block_size = s->set.block_size,
    };
    const fv_bounds bounds = {sizeof(bounds), s->set.num_seqs, s->num_tokens, s->max_query_len, s->max_seq_len};
    const fv_plan_options options = {
        .struct_size = sizeof(options), .backend = s->set.backend, .kernels = s->set.kernels};
    must(fv_plan_create(&s->plan, s->context, &problem, &bounds, &options));
    const size_t bytes = fv_mla_workspace_bytes(s->plan, s->set.q_lora);
    s->workspace = allocate(bytes);
    memset(s->workspace, 0xff, bytes);
    const fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = s->set.num_seqs,
        .num_tokens = s->num_tokens,
        .query_start = s->query_start,
        .seq_lens = s->seq_lens,
        .block_table = s->block_table,
        .block_table_stride = s->width,
        .block_table_width = s->width,
        .slot_mapping = s->slots,
    };
    must(fv_plan_update(s->plan, &batch, NULL));
}

static void setup_scene(scene *s, const setting *set)
{
    *s = (scene){.set = *set};
    random_state = 1;
    must(fv_context_create(&s->context, NULL));
    fill_tables(s);
    fill_sequences(s);
    fill_weights(s);
    fill_context(s);
    const size_t out_bytes = (size_t)(s->num_tokens * (set->hidden + PADDING)) * fv_dtype_bytes(set->dtype);
    s->out = allocate(out_bytes);
    memset(s->out, 0xff, out_bytes);
    make_plan(s);
    s->layer = layer_of(s);
}

static void teardown_scene(scene *s)
{
    fv_plan_destroy(s->plan);
    void *const memory[] = {s->block_table, s->positions, s->slots,     s->cos,    s->sin,  s->x,
                            s->out,         s->cache,     s->workspace, s->q_down, s->q_up, s->kv_up,
                            s->o,           s->kv_down,   s->q_norm,    s->kv_norm};
    for (int32_t i = 0; i < FV_ARRAY_LEN(memory); i++) free(memory[i]);
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) free(s->keys[seq]);
    fv_context_destroy(s->context);
}

/* --- the definition --------------------------------------------------------------------------------------------- */

/* y = W x. */
static void linear(double *y, const char *weights, const double *x, int64_t outputs, int64_t inputs, fv_dtype dtype)
{
    for (int64_t i = 0; i < outputs; i++) {
        y[i] = 0;
        for (int64_t j = 0; j < inputs; j++) y[i] += load(weights, i * inputs + j, dtype) * x[j];
    }
}

static void norm(double *x, const float *weight, int32_t size)
{
    double squares = 0;
    for (int32_t i = 0; i < size; i++) squares += x[i] * x[i];
    for (int32_t i = 0; i < size; i++) x[i] *= weight[i] / sqrt(squares / size + 1e-6);
}

static void load_x(double *x, const scene *s, int32_t token)
{
    for (int32_t i = 0; i < s->set.hidden; i++) {
        x[i] = load(s->x, (int64_t)token * (s->set.hidden + PADDING) + i, s->set.dtype);
    }
}

/* Appends the keys of the new tokens, raw, to those of the context. */
static void expect_keys(scene *s)
{
    const int32_t size = entry_size(s), lora = s->set.mla.kv_lora_rank;
    double *x = allocate(sizeof(double) * (size_t)s->set.hidden);
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
static void expect_queries(double *q, const scene *s, int32_t token)
{
    const fv_mla_shape *mla = &s->set.mla;
    const int32_t q_lora = s->set.q_lora, inputs = q_lora ? q_lora : s->set.hidden;
    double *x = allocate(sizeof(double) * (size_t)s->set.hidden);
    double *latent = allocate(sizeof(double) * (size_t)inputs);
    load_x(x, s, token);
    if (q_lora) {
        linear(latent, s->q_down, x, q_lora, s->set.hidden, s->set.dtype);
        if (s->set.has_norms) norm(latent, s->q_norm, q_lora);
    }
    linear(q, s->q_up, q_lora ? latent : x, (int64_t)mla->num_heads * query_size(s), inputs, s->set.dtype);
    for (int32_t head = 0; head < mla->num_heads; head++) {
        rotate(q + head * query_size(s) + mla->qk_nope_head_dim, s, s->positions[token]);
    }
    free(x);
    free(latent);
}

/* k [P + R] and v [V] of a head, from a raw entry. */
static void expand(double *k, double *v, const scene *s, const double *entry, int32_t head, int32_t position)
{
    const fv_mla_shape *mla = &s->set.mla;
    const int32_t nope = mla->qk_nope_head_dim, lora = mla->kv_lora_rank;
    const char *kv_up = s->kv_up +
                        (int64_t)head * (nope + mla->v_head_dim) * lora * (int64_t)fv_dtype_bytes(s->set.dtype);
    linear(k, kv_up, entry, nope, lora, s->set.dtype);
    linear(v, kv_up + (int64_t)nope * lora * (int64_t)fv_dtype_bytes(s->set.dtype), entry, mla->v_head_dim, lora,
           s->set.dtype);
    memcpy(k + nope, entry + lora, sizeof(double) * (size_t)mla->qk_rope_head_dim);
    rotate(k + nope, s, position);
}

/* attended [V] of one head. */
static void expect_head(double *attended, const scene *s, const double *q, int32_t seq, int32_t position, int32_t head)
{
    const int32_t v_size = s->set.mla.v_head_dim;
    double *k = allocate(sizeof(double) * (size_t)query_size(s)), *v = allocate(sizeof(double) * (size_t)v_size);
    double sum = 0;
    for (int32_t d = 0; d < v_size; d++) attended[d] = 0;
    for (int32_t key = 0; key <= position; key++) {
        expand(k, v, s, s->keys[seq] + key * entry_size(s), head, key);
        double score = 0;
        for (int32_t d = 0; d < query_size(s); d++) score += q[d] * k[d];
        const double weight = exp(score / sqrt(query_size(s)));
        sum += weight;
        for (int32_t d = 0; d < v_size; d++) attended[d] += weight * v[d];
    }
    for (int32_t d = 0; d < v_size; d++) attended[d] /= sum;
    free(k);
    free(v);
}

static void expect_output(double *out, const scene *s, int32_t seq, int32_t token)
{
    const fv_mla_shape *mla = &s->set.mla;
    double *q = allocate(sizeof(double) * (size_t)(mla->num_heads * query_size(s)));
    double *attended = allocate(sizeof(double) * (size_t)(mla->num_heads * mla->v_head_dim));
    expect_queries(q, s, token);
    for (int32_t head = 0; head < mla->num_heads; head++) {
        expect_head(attended + head * mla->v_head_dim, s, q + head * query_size(s), seq, s->positions[token], head);
    }
    linear(out, s->o, attended, s->set.hidden, (int64_t)mla->num_heads * mla->v_head_dim, s->set.dtype);
    free(q);
    free(attended);
}

/* --- the checks ------------------------------------------------------------------------------------------------- */

static void assert_close(const scene *s, double found, double expected, const char *what, int32_t row, int32_t element)
{
    const int32_t is_exact = s->set.dtype == FV_DTYPE_F32 && s->set.kv_dtype == FV_DTYPE_F32;
    const double relative = is_exact ? 1e-4 : 2e-2, absolute = is_exact ? 1e-4 : 8e-3;
    if (fabs(found - expected) <= absolute + relative * fabs(expected)) return;
    fail_msg("%s, %s to %s: %s %d, element %d is %g for %g", s->set.backend, fv_dtype_name(s->set.dtype),
             fv_dtype_name(s->set.kv_dtype), what, row, element, found, expected);
}

static void check_cache(const scene *s)
{
    const int32_t size = entry_size(s), lora = s->set.mla.kv_lora_rank;
    double *entry = allocate(sizeof(double) * (size_t)size);
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        for (int32_t key = 0; key < s->seq_lens[seq]; key++) {
            memcpy(entry, s->keys[seq] + key * size, sizeof(double) * (size_t)size);
            if (!s->set.mla.rotate_at_reading) rotate(entry + lora, s, key);
            for (int32_t i = 0; i < size; i++) {
                assert_close(s, load(entry_at(s, seq, key), i, s->set.kv_dtype), entry[i], "cache entry", key, i);
            }
        }
    }
    free(entry);
}

static void check_outputs(const scene *s)
{
    double *expected = allocate(sizeof(double) * (size_t)s->set.hidden);
    const int32_t stride = s->set.hidden + PADDING;
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        for (int32_t token = s->query_start[seq]; token < s->query_start[seq + 1]; token++) {
            expect_output(expected, s, seq, token);
            const char *row = s->out + (int64_t)token * stride * (int64_t)fv_dtype_bytes(s->set.dtype);
            for (int32_t i = 0; i < s->set.hidden; i++) {
                assert_close(s, load(row, i, s->set.dtype), expected[i], "output", token, i);
            }
            for (int32_t i = s->set.hidden; i < stride; i++) assert_true(isnan(load(row, i, s->set.dtype)));
        }
    }
    free(expected);
}

static void check(const setting *set)
{
    scene s;
    setup_scene(&s, set);
    must(fv_mla_run(s.plan, &s.layer, s.workspace, NULL));
    expect_keys(&s);
    check_cache(&s);
    check_outputs(&s);
    teardown_scene(&s);
}

static const char *const backends[] = {"TRITON_MLA", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "AMLA"};

/* One new token for each sequence, and a first one. */
static const lens decodes[] = {{1, 33}, {1, 1}, {1, 17}, {1, 100}};

/* The public problem made small: raw keys, no norms. */
static const setting small = {
    .mla = {8, 64, 16, 24, 40, 1, 0},
    .hidden = 64,
    .q_lora = 48,
    .dtype = FV_DTYPE_F32,
    .kv_dtype = FV_DTYPE_F32,
    .block_size = 16,
    .seqs = decodes,
    .num_seqs = FV_ARRAY_LEN(decodes),
};

/* fp32, bf16, and fp32 over a bf16 cache, by every backend. AMLA rounds to bf16: no fp32 tolerance fits it. */
static void check_backends(setting set)
{
    static const fv_dtype dtypes[][2] = {
        {FV_DTYPE_F32, FV_DTYPE_F32}, {FV_DTYPE_BF16, FV_DTYPE_BF16}, {FV_DTYPE_F32, FV_DTYPE_BF16}};
    for (int32_t i = 0; i < FV_ARRAY_LEN(backends) * FV_ARRAY_LEN(dtypes); i++) {
        set.backend = backends[i % FV_ARRAY_LEN(backends)];
        set.dtype = dtypes[i / FV_ARRAY_LEN(backends)][0];
        set.kv_dtype = dtypes[i / FV_ARRAY_LEN(backends)][1];
        if (strcmp(set.backend, "AMLA") == 0 && set.dtype != FV_DTYPE_BF16) continue;
        check(&set);
    }
}

static void test_raw_keys(void **state)
{
    (void)state;
    check_backends(small);
}

static void test_rotated_keys_and_norms(void **state)
{
    (void)state;
    setting set = small;
    set.mla.rotate_at_reading = 0;
    set.has_norms = 1;
    check_backends(set);
    set.style = FV_ROPE_INTERLEAVED;
    check_backends(set);
}

static void test_norms_over_raw_keys(void **state)
{
    (void)state;
    setting set = small;
    set.has_norms = 1;
    check_backends(set);
}

/* As DeepSeek-V2-Lite has it. */
static void test_queries_without_latents(void **state)
{
    (void)state;
    setting set = small;
    set.q_lora = 0;
    set.has_norms = 1;
    set.mla.rotate_at_reading = 0;
    check_backends(set);
}

static void test_prefill_and_extend(void **state)
{
    (void)state;
    static const lens mixed[] = {{1, 50}, {30, 30}, {2, 9}, {25, 70}};
    setting set = small;
    set.seqs = mixed;
    set.num_seqs = FV_ARRAY_LEN(mixed);
    set.block_size = 7;
    check_backends(set);
    set.mla.rotate_at_reading = 0;
    set.has_norms = 1;
    check_backends(set);
}

static void test_reference_kernels(void **state)
{
    (void)state;
    setting set = small;
    set.backend = "TRITON_MLA";
    set.kernels = "reference";
    set.has_norms = 1;
    check(&set);
}

/* DeepSeek-V3's sizes. */
static void test_full_size(void **state)
{
    (void)state;
    static const lens one[] = {{1, 12}};
    const setting set = {
        .mla = {128, 512, 64, 128, 128, 1, 0},
        .hidden = 7168,
        .q_lora = 1536,
        .dtype = FV_DTYPE_BF16,
        .kv_dtype = FV_DTYPE_BF16,
        .block_size = 64,
        .backend = "ROCM_AITER_MLA",
        .seqs = one,
        .num_seqs = 1,
    };
    check(&set);
}

static void refused(scene *s, const fv_mla_layer *layer, fv_status expected, const char *says)
{
    assert_int_equal(fv_mla_run(s->plan, layer, s->workspace, NULL), expected);
    if (!strstr(fv_last_error(), says)) fail_msg("'%s' lacks '%s'", fv_last_error(), says);
}

static void test_refusals(void **state)
{
    (void)state;
    scene s;
    setting set = small;
    set.backend = "TRITON_MLA";
    setup_scene(&s, &set);
    fv_mla_layer layer = s.layer;
    layer.gemm = NULL;
    refused(&s, &layer, FV_ERR_INVALID, "fv_mla_layer.gemm is NULL");
    layer = s.layer;
    layer.x.shape[0]--;
    refused(&s, &layer, FV_ERR_INVALID, "x has 2 dimensions [3, 64]; accepted: 2, [4 or more, 64], dense rows");
    layer = s.layer;
    layer.o.shape[1]--;
    refused(&s, &layer, FV_ERR_INVALID, "o has 2 dimensions [64, 319]; accepted: 2, [64, 320], dense rows");
    layer = s.layer;
    layer.out.dtype = FV_DTYPE_BF16;
    layer.out.stride_bytes[1] = 2;
    refused(&s, &layer, FV_ERR_INVALID, "out is bfloat16; the problem says float32");
    layer = s.layer;
    layer.kv_norm = fv_tensor_1d(s.kv_norm, FV_DTYPE_F32, 63);
    refused(&s, &layer, FV_ERR_INVALID, "kv_norm is float32 with 1 dimensions [63]; accepted");
    layer = s.layer;
    layer.rotation.style = FV_ROPE_INTERLEAVED;
    refused(&s, &layer, FV_ERR_UNSUPPORTED, "rotated at reading by halves");
    layer = s.layer;
    layer.rotation.max_position = 50;
    refused(&s, &layer, FV_ERR_INVALID, "max_position is 50");
    teardown_scene(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_raw_keys),
        cmocka_unit_test(test_rotated_keys_and_norms),
        cmocka_unit_test(test_norms_over_raw_keys),
        cmocka_unit_test(test_queries_without_latents),
        cmocka_unit_test(test_prefill_and_extend),
        cmocka_unit_test(test_reference_kernels),
        cmocka_unit_test(test_full_size),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
