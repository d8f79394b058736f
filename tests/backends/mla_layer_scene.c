/* Building a batch of the MLA layer. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backends/mla_layer_scene.h"
#include "core/compiler.h"
#include "core/float.h"

/* --- numbers ---------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

void mla_layer_must(fv_status status)
{
    if (status != FV_OK) fail_msg("%s", fv_last_error());
}

void *mla_layer_alloc(size_t bytes)
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

double mla_layer_load(const char *from, int64_t index, fv_dtype dtype)
{
    return fv_float_load(from + index * (int64_t)fv_dtype_bytes(dtype), dtype);
}

static char *random_array(int64_t count, float factor, fv_dtype dtype)
{
    char *array = mla_layer_alloc((size_t)count * fv_dtype_bytes(dtype));
    for (int64_t i = 0; i < count; i++) {
        fv_float_store(array + i * (int64_t)fv_dtype_bytes(dtype), factor * number(), dtype);
    }
    return array;
}

/* Weights [outputs, inputs] that keep the variance. */
static char *random_weights(const mla_layer_scene *s, int64_t outputs, int64_t inputs)
{
    return random_array(outputs * inputs, 1 / sqrtf((float)inputs), s->set.dtype);
}

/* What an engine brings: here three loops, over rows of b that lie in a row of fp32. */
fv_status mla_layer_gemm(void *user, const fv_gemm *g, fv_stream stream)
{
    (void)user, (void)stream;
    float *column = mla_layer_alloc(sizeof(float) * (size_t)g->k);
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

int32_t mla_layer_entry_size(const mla_layer_scene *s) { return s->set.mla.kv_lora_rank + s->set.mla.qk_rope_head_dim; }
int32_t mla_layer_query_size(const mla_layer_scene *s)
{
    return s->set.mla.qk_nope_head_dim + s->set.mla.qk_rope_head_dim;
}

static void fill_tables(mla_layer_scene *s)
{
    const int32_t half = s->set.mla.qk_rope_head_dim / 2;
    s->cos = mla_layer_alloc(sizeof(float) * MLA_LAYER_MAX_POSITIONS * (size_t)half);
    s->sin = mla_layer_alloc(sizeof(float) * MLA_LAYER_MAX_POSITIONS * (size_t)half);
    for (int32_t position = 0; position < MLA_LAYER_MAX_POSITIONS; position++) {
        for (int32_t i = 0; i < half; i++) {
            const double angle = position * pow(10000, -(double)i / half);
            s->cos[position * half + i] = (float)cos(angle);
            s->sin[position * half + i] = (float)sin(angle);
        }
    }
}

/* The rope part of a key or query at its position. */
void mla_layer_rotate(double *rope, const mla_layer_scene *s, int32_t position)
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

/* -1: the key is another rank's. */
int64_t mla_layer_slot(const mla_layer_scene *s, int32_t seq, int32_t key)
{
    int64_t slot = 0;
    mla_layer_must(fv_context_parallel_slot(&slot, key, s->block_table + seq * s->width, s->width, s->set.block_size,
                                            &s->set.context_parallel));
    return slot;
}

static void fill_sequences(mla_layer_scene *s)
{
    const int32_t bs = s->set.block_size;
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        const mla_layer_lens *len = &s->set.seqs[seq];
        s->query_start[seq + 1] = s->query_start[seq] + len->query_len;
        s->seq_lens[seq] = len->seq_len;
        s->max_query_len = fv_max_i32(s->max_query_len, len->query_len);
        s->max_seq_len = fv_max_i32(s->max_seq_len, len->seq_len);
        s->keys[seq] = mla_layer_alloc(sizeof(double) * (size_t)(len->seq_len * mla_layer_entry_size(s)));
    }
    s->num_tokens = s->query_start[s->set.num_seqs];
    s->width = (s->max_seq_len + bs - 1) / bs;
    s->block_table = mla_layer_alloc(sizeof(int32_t) * (size_t)(s->set.num_seqs * s->width));
    s->slots = mla_layer_alloc(sizeof(int64_t) * (size_t)s->num_tokens);
    s->positions = mla_layer_alloc(sizeof(int32_t) * (size_t)s->num_tokens);
    s->num_blocks = 1;
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        int32_t *row = s->block_table + seq * s->width;
        const int32_t local_len = fv_context_parallel_local_len(s->seq_lens[seq], &s->set.context_parallel);
        for (int32_t i = 0; i < s->width; i++) row[i] = i * bs < local_len ? s->num_blocks++ : 1 << 30;
        for (int32_t token = s->query_start[seq]; token < s->query_start[seq + 1]; token++) {
            const int32_t position = s->seq_lens[seq] - (s->query_start[seq + 1] - token);
            s->positions[token] = position;
            s->slots[token] = mla_layer_slot(s, seq, position);
        }
    }
}

static void fill_weights(mla_layer_scene *s)
{
    const fv_mla_shape *mla = &s->set.mla;
    const int64_t hidden = s->set.hidden, q_lora = s->set.q_lora;
    s->x = random_array((int64_t)s->num_tokens * (hidden + MLA_LAYER_PADDING), 1, s->set.dtype);
    const int64_t between = s->set.joins_down ? 0 : 1; /* rows */
    s->q_down = random_weights(s, q_lora + between + mla_layer_entry_size(s), hidden);
    s->kv_down = s->q_down + (q_lora + between) * hidden * (int64_t)fv_dtype_bytes(s->set.dtype);
    s->q_up = random_weights(s, (int64_t)mla->num_heads * mla_layer_query_size(s), q_lora ? q_lora : hidden);
    s->kv_up = random_weights(s, (int64_t)mla->num_heads * (mla->qk_nope_head_dim + mla->v_head_dim),
                              mla->kv_lora_rank);
    s->o = random_weights(s, hidden, (int64_t)mla->num_heads * mla->v_head_dim);
    s->q_norm = (float *)(void *)random_array(fv_max_i64(1, q_lora), 1, FV_DTYPE_F32);
    s->kv_norm = (float *)(void *)random_array(mla->kv_lora_rank, 1, FV_DTYPE_F32);
}

static const float *k_scale_of(const mla_layer_scene *s) { return s->set.k_scale > 0 ? &s->set.k_scale : NULL; }

/* Element i of the entry in a slot, read by the definition of the layout; *unit: what the stored number stands for. */
double mla_layer_load_element(double *unit, const mla_layer_scene *s, int64_t slot, int32_t i)
{
    const char *entry = s->cache + slot * (int64_t)s->entry_bytes;
    *unit = s->set.k_scale > 0 ? s->set.k_scale : 1;
    if (s->set.layout != FV_KV_LAYOUT_LATENT_FP8_DS) return *unit * mla_layer_load(entry, i, s->set.kv_dtype);
    *unit = 1;
    if (i >= 512) return mla_layer_load(entry + 528, i - 512, FV_DTYPE_BF16);
    *unit = mla_layer_load(entry + 512, i / 128, FV_DTYPE_F32);
    return *unit * mla_layer_load(entry, i, FV_DTYPE_F8_E4M3);
}

/* As an engine would have written it in an earlier step. */
static void store_entry(const mla_layer_scene *s, int32_t seq, int32_t key, const double *entry)
{
    const int32_t size = mla_layer_entry_size(s);
    float *row = mla_layer_alloc(sizeof(float) * (size_t)size);
    for (int32_t i = 0; i < size; i++) row[i] = (float)entry[i];
    const fv_tensor k = fv_tensor_3d(row, FV_DTYPE_F32, 1, 1, size),
                    v = fv_tensor_3d(row, FV_DTYPE_F32, 1, 1, s->set.mla.kv_lora_rank);
    const int64_t slot = mla_layer_slot(s, seq, key);
    fv_device *device = NULL;
    mla_layer_must(fv_device_find(&device, s->context, "cpu"));
    mla_layer_must(
        fv_kv_write(device, &s->view, &k, &v, &slot, 1, k_scale_of(s), k_scale_of(s), s->set.k_scale > 0, NULL));
    free(row);
}

static void make_cache(mla_layer_scene *s)
{
    const fv_kv_layout layout = s->set.layout ? s->set.layout : FV_KV_LAYOUT_LATENT;
    size_t bytes = 0;
    mla_layer_must(fv_kv_view_bytes(&bytes, layout, s->set.kv_dtype, s->num_blocks, s->set.block_size, 1,
                                    mla_layer_entry_size(s)));
    s->entry_bytes = bytes / (size_t)(s->num_blocks * s->set.block_size);
    s->cache = mla_layer_alloc(bytes);
    memset(s->cache, 0xff, bytes);
    mla_layer_must(fv_kv_view_init(&s->view, s->cache, layout, s->set.kv_dtype, s->num_blocks, s->set.block_size, 1,
                                   mla_layer_entry_size(s)));
    s->view.v_head_size = s->set.mla.kv_lora_rank; /* the helper of the view knows ropes of 64 only */
}

/* Raw context keys, and the cache that an engine would have made of them. */
static void fill_context(mla_layer_scene *s)
{
    const int32_t size = mla_layer_entry_size(s);
    double *entry = mla_layer_alloc(sizeof(double) * (size_t)size);
    make_cache(s);
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) {
        const int32_t context = s->seq_lens[seq] - s->set.seqs[seq].query_len;
        for (int32_t key = 0; key < context; key++) {
            double *raw = s->keys[seq] + key * size;
            for (int32_t i = 0; i < size; i++) raw[i] = number();
            memcpy(entry, raw, sizeof(double) * (size_t)size);
            if (!s->set.mla.rotate_at_reading) mla_layer_rotate(entry + s->set.mla.kv_lora_rank, s, key);
            store_entry(s, seq, key, entry);
        }
    }
    free(entry);
}

static fv_tensor padded_rows(const mla_layer_scene *s, char *data)
{
    fv_tensor tensor = fv_tensor_2d(data, s->set.dtype, s->num_tokens, s->set.hidden);
    tensor.stride_bytes[0] = (s->set.hidden + MLA_LAYER_PADDING) * (int64_t)fv_dtype_bytes(s->set.dtype);
    return tensor;
}

static fv_mla_layer layer_of(const mla_layer_scene *s)
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
        .q_up = fv_tensor_2d(s->q_up, dtype, (int64_t)mla->num_heads * mla_layer_query_size(s),
                             q_lora ? q_lora : hidden),
        .kv_down = fv_tensor_2d(s->kv_down, dtype, mla_layer_entry_size(s), hidden),
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
                .max_position = MLA_LAYER_MAX_POSITIONS,
                .positions_32 = s->positions,
            },
        .k_scale = k_scale_of(s),
        .gemm = mla_layer_gemm,
    };
    if (q_lora) layer.q_down = fv_tensor_2d(s->q_down, dtype, q_lora, hidden);
    if (s->set.has_norms) layer.kv_norm = fv_tensor_1d(s->kv_norm, FV_DTYPE_F32, mla->kv_lora_rank);
    if (s->set.has_norms && q_lora) layer.q_norm = fv_tensor_1d(s->q_norm, FV_DTYPE_F32, q_lora);
    return layer;
}

static void make_plan(mla_layer_scene *s)
{
    const fv_problem problem = {
        .struct_size = sizeof(problem),
        .kind = FV_ATTENTION_MLA,
        .mla = s->set.mla,
        .q_dtype = s->set.dtype,
        .kv_dtype = s->set.kv_dtype,
        .kv_layout = s->set.layout ? s->set.layout : FV_KV_LAYOUT_LATENT,
        .kv_scaling = s->set.k_scale > 0 ? FV_KV_SCALING_PER_TENSOR : FV_KV_SCALING_NONE,
        .block_size = s->set.block_size,
        .returns_lse = s->set.context_parallel.world > 1,
        .context_parallel = s->set.context_parallel,
    };
    const fv_bounds bounds = {sizeof(bounds), s->set.num_seqs, s->num_tokens, s->max_query_len, s->max_seq_len};
    fv_plan_options options = {
        .struct_size = sizeof(options),
        .backend = s->set.backend,
        .kernels = s->set.kernels,
        .decode_threshold = s->set.decode_threshold,
    };
    if (s->set.tight_workspace) {
        options.max_workspace_bytes = 1;
        assert_int_equal(fv_plan_create(&s->plan, s->context, &problem, &bounds, &options), FV_ERR_INVALID);
        assert_int_equal(sscanf(strstr(fv_last_error(), "or from "), "or from %zu on", &options.max_workspace_bytes),
                         1);
    }
    mla_layer_must(fv_plan_create(&s->plan, s->context, &problem, &bounds, &options));
    const size_t bytes = fv_mla_workspace_bytes(s->plan, s->set.q_lora);
    s->workspace = mla_layer_alloc(bytes);
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
    mla_layer_must(fv_plan_update(s->plan, &batch, NULL));
}

void mla_layer_scene_init(mla_layer_scene *s, const mla_layer_setting *set)
{
    *s = (mla_layer_scene){.set = *set};
    random_state = 1;
    mla_layer_must(fv_context_create(&s->context, NULL));
    fill_tables(s);
    fill_sequences(s);
    fill_weights(s);
    fill_context(s);
    const size_t out_bytes = (size_t)(s->num_tokens * (set->hidden + MLA_LAYER_PADDING)) * fv_dtype_bytes(set->dtype);
    s->out = mla_layer_alloc(out_bytes);
    memset(s->out, 0xff, out_bytes);
    make_plan(s);
    s->layer = layer_of(s);
}

void mla_layer_scene_deinit(mla_layer_scene *s)
{
    fv_plan_destroy(s->plan);
    void *const memory[] = {s->block_table, s->positions, s->slots, s->cos,   s->sin, s->x,      s->out,    s->cache,
                            s->workspace,   s->q_down,    s->q_up,  s->kv_up, s->o,   s->q_norm, s->kv_norm};
    for (int32_t i = 0; i < FV_ARRAY_LEN(memory); i++) free(memory[i]);
    for (int32_t seq = 0; seq < s->set.num_seqs; seq++) free(s->keys[seq]);
    fv_context_destroy(s->context);
}
