/* The layers between an engine's GEMMs, in double, row by row: what the kernels of devices are compared with,
 * and what the null device of the tests runs. */
#include <math.h>

#include "core/float.h"
#include "reference/reference.h"

static void store_bf16(void *row, int64_t index, double value)
{
    ((uint16_t *)row)[index] = fv_bf16_of_f32((float)value);
}

static double load_bf16(const void *row, int64_t index) { return fv_f32_of_bf16(((const uint16_t *)row)[index]); }

static fv_status embed(const fv_launch *launch, const fv_embed_params *params)
{
    (void)launch;
    for (int64_t row = 0; row < params->num_rows; row++) {
        const int64_t token = params->tokens[row];
        const int32_t is_there = token >= 0 && token < params->num_weights;
        for (int64_t i = 0; i < params->size; i++) {
            const double weight = is_there ? load_bf16(params->weights, token * params->size + i) : 0;
            params->hidden[row * params->size + i] = (float)(weight * (double)params->scale);
        }
    }
    return FV_OK;
}

/* What a row's elements are divided by. */
static double root_mean_square(const float *x, int64_t size, double epsilon)
{
    double squares = 0;
    for (int64_t i = 0; i < size; i++) squares += (double)x[i] * (double)x[i];
    return sqrt(squares / (double)size + epsilon);
}

static double added_root(const fv_add_norm_params *params, int64_t row)
{
    if (!params->added_norm) return 1;
    double squares = 0;
    for (int64_t i = 0; i < params->size; i++) {
        const double x = (double)fv_float_load((const char *)params->added + (size_t)(row * params->size + i) *
                                                                                 fv_dtype_bytes(params->added_dtype),
                                               params->added_dtype);
        squares += x * x;
    }
    return sqrt(squares / params->size + (double)params->epsilon);
}

static double added_element(const fv_add_norm_params *params, int64_t row, int64_t i, double root)
{
    if (!params->added) return 0;
    const size_t bytes = fv_dtype_bytes(params->added_dtype);
    const double x = (double)fv_float_load((const char *)params->added + (size_t)(row * params->size + i) * bytes,
                                           params->added_dtype);
    return params->added_norm ? x / root * (double)params->added_norm[i] : x;
}

static fv_status add_norm(const fv_launch *launch, const fv_add_norm_params *params)
{
    (void)launch;
    for (int64_t t = 0; t < params->num_rows; t++) {
        const int64_t row = params->rows ? params->rows[t] : t, size = params->size;
        const float *hidden = params->hidden + row * size;
        const double root = params->added ? added_root(params, row) : 1;
        double squares = 0;
        for (int64_t i = 0; i < size; i++) {
            const float x = (float)((double)hidden[i] + added_element(params, row, i, root));
            squares += (double)x * (double)x;
        }
        const double norm = sqrt(squares / (double)size + (double)params->epsilon);
        for (int64_t i = 0; i < size; i++) {
            const float x = (float)((double)hidden[i] + added_element(params, row, i, root));
            const double y = (double)x / norm * (double)params->weight[i];
            if (!params->rows) params->hidden[row * size + i] = x;
            if (params->normed_f32) params->normed_f32[t * size + i] = (float)y;
            store_bf16(params->normed, t * size + i, y);
        }
    }
    return FV_OK;
}

/* One head of q or k. */
static void norm_and_rotate(void *out, int64_t at, const float *head, const float *norm, int64_t position,
                            const fv_split_heads_params *params)
{
    const double root = norm ? root_mean_square(head, params->head_size, (double)params->epsilon) : 1;
    const int32_t half = params->rope_dim / 2;
    const int32_t is_rotated = position >= 0 && position < params->max_position;
    for (int32_t i = 0; i < params->head_size; i++) {
        store_bf16(out, at + i, (double)head[i] / root * (norm ? (double)norm[i] : 1));
    }
    for (int32_t i = 0; i < half && is_rotated; i++) {
        const int32_t first = params->style == FV_ROPE_INTERLEAVED ? 2 * i : i;
        const int32_t second = params->style == FV_ROPE_INTERLEAVED ? 2 * i + 1 : i + half;
        const double a = (double)head[first] / root * (norm ? (double)norm[first] : 1);
        const double b = (double)head[second] / root * (norm ? (double)norm[second] : 1);
        const double c = (double)params->cos[position * half + i], s = (double)params->sin[position * half + i];
        store_bf16(out, at + first, a * c - b * s);
        store_bf16(out, at + second, b * c + a * s);
    }
}

static fv_status split_heads(const fv_launch *launch, const fv_split_heads_params *params)
{
    (void)launch;
    const int32_t rotated = params->num_heads + params->num_kv_heads, all = rotated + params->num_kv_heads;
    for (int64_t row = 0; row < params->num_rows; row++) {
        for (int32_t head = 0; head < all; head++) {
            const int64_t at = (row * all + head) * params->head_size;
            if (head < rotated) {
                norm_and_rotate(params->out, at, params->qkv + at,
                                head < params->num_heads ? params->q_norm : params->k_norm, params->positions[row],
                                params);
                continue;
            }
            for (int32_t i = 0; i < params->head_size; i++)
                store_bf16(params->out, at + i, (double)params->qkv[at + i]);
        }
    }
    return FV_OK;
}

static double silu(double x) { return x / (1 + exp(-x)); }

static double gelu(double x)
{
    const double sqrt_2_over_pi = 0.79788456080286536;
    return 0.5 * x * (1 + tanh(sqrt_2_over_pi * (x + 0.044715 * x * x * x)));
}

static fv_status activate(const fv_launch *launch, const fv_activate_params *params)
{
    (void)launch;
    for (int64_t row = 0; row < params->num_rows; row++) {
        const float *gate = params->gate_up + 2 * row * params->size, *up = gate + params->size;
        for (int64_t i = 0; i < params->size; i++) {
            const double x = (double)gate[i];
            store_bf16(params->out, row * params->size + i, (params->is_gelu ? gelu(x) : silu(x)) * (double)up[i]);
        }
    }
    return FV_OK;
}

static void compute_scores(float *scores, const float *x, const fv_route_params *params)
{
    double largest = -INFINITY, sum = 0;
    for (int32_t i = 0; i < params->num_experts; i++) {
        double logit = 0;
        for (int64_t j = 0; j < params->size; j++) {
            logit += (double)x[j] * (double)params->router[i * (int64_t)params->size + j];
        }
        scores[i] = (float)logit;
        largest = fmax(largest, logit);
    }
    for (int32_t i = 0; i < params->num_experts; i++) {
        const double score = params->is_sigmoid ? 1 / (1 + exp(-(double)scores[i])) : exp((double)scores[i] - largest);
        scores[i] = (float)score;
        sum += score;
    }
    for (int32_t i = 0; i < params->num_experts && !params->is_sigmoid; i++)
        scores[i] = (float)((double)scores[i] / sum);
}

static fv_status route(const fv_launch *launch, const fv_route_params *params)
{
    (void)launch;
    for (int64_t row = 0; row < params->num_rows; row++) {
        float *scores = params->scratch + 3 * row * params->num_experts;
        compute_scores(scores, params->x + row * params->size, params);
        fv_route_token(params->experts + row * params->num_used, params->weights + row * params->num_used, scores,
                       scores + params->num_experts, params);
    }
    return FV_OK;
}

static double dot(const void *weights, int64_t row, const void *x, int64_t x_row, int64_t size)
{
    double sum = 0;
    for (int64_t i = 0; i < size; i++) sum += load_bf16(weights, row * size + i) * load_bf16(x, x_row * size + i);
    return sum;
}

/* One output element at a time: slow, and nothing to allocate. */
static double expert_output(const void *gate_up, const void *down, int64_t out, const void *x, int64_t x_row,
                            const fv_run_experts_params *params)
{
    double sum = 0;
    for (int64_t i = 0; i < params->ffn_size; i++) {
        const double gate = dot(gate_up, i, x, x_row, params->size);
        const double up = dot(gate_up, params->ffn_size + i, x, x_row, params->size);
        sum += (double)fv_f32_of_bf16(fv_bf16_of_f32((float)(silu(gate) * up))) *
               load_bf16(down, out * params->ffn_size + i);
    }
    return sum;
}

static fv_status run_experts(const fv_launch *launch, const fv_run_experts_params *params)
{
    (void)launch;
    for (int64_t at = 0; at < (int64_t)params->num_rows * params->num_used; at++) {
        const int32_t expert = params->experts[at];
        for (int64_t i = 0; i < params->size; i++) {
            params->out[at * params->size + i] = (float)expert_output(params->gate_up[expert], params->down[expert], i,
                                                                      params->x, at / params->num_used, params);
        }
    }
    return FV_OK;
}

static fv_status add_experts(const fv_launch *launch, const fv_add_experts_params *params)
{
    (void)launch;
    for (int64_t row = 0; row < params->num_rows; row++) {
        for (int64_t i = 0; i < params->size; i++) {
            float *to = params->sum + row * params->size + i;
            double sum = params->overwrites ? 0 : (double)*to;
            for (int64_t used = 0; used < params->num_used; used++) {
                const int64_t part = row * params->num_used + used;
                sum += (double)params->weights[part] * (double)params->parts[part * params->size + i];
            }
            *to = (float)sum;
        }
    }
    return FV_OK;
}

static fv_status fill_random(const fv_launch *launch, const fv_fill_random_params *params)
{
    (void)launch;
    for (int64_t i = 0; i < params->count; i++) {
        store_bf16(params->out, i, (double)(fv_random_weight(params->seed, params->first + i) * params->scale));
    }
    return FV_OK;
}

static fv_status read_memory(const fv_launch *launch, const fv_read_memory_params *params)
{
    (void)launch;
    const uint32_t *words = params->data;
    for (int64_t i = 0; i < params->bytes / 16 * 4; i++) *params->sum += words[i];
    return FV_OK;
}

const fv_layer_table fv_reference_layers = {
    .embed = embed,
    .add_norm = add_norm,
    .split_heads = split_heads,
    .activate = activate,
    .route = route,
    .run_experts = run_experts,
    .add_experts = add_experts,
    .fill_random = fill_random,
    .read_memory = read_memory,
};

/* --- products ------------------------------------------------------------------------------------------ */

static double product(const fv_gemm *gemm, int64_t matrix, int64_t row, int64_t column)
{
    const int64_t a_bytes = (int64_t)fv_dtype_bytes(gemm->a_dtype), b_bytes = (int64_t)fv_dtype_bytes(gemm->b_dtype);
    const char *a = (const char *)gemm->a + matrix * gemm->a_matrix_stride + row * gemm->a_row_stride;
    const char *b = (const char *)gemm->b + matrix * gemm->b_matrix_stride +
                    column * (gemm->b_is_transposed ? gemm->b_row_stride : b_bytes);
    const int64_t b_step = gemm->b_is_transposed ? b_bytes : gemm->b_row_stride;
    double sum = 0;
    for (int64_t i = 0; i < gemm->k; i++) {
        sum += (double)fv_float_load(a + i * a_bytes, gemm->a_dtype) *
               (double)fv_float_load(b + i * b_step, gemm->b_dtype);
    }
    return sum;
}

void fv_reference_gemm(const fv_gemm *gemm)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(gemm->c_dtype);
    for (int64_t matrix = 0; matrix < gemm->num_matrices; matrix++) {
        for (int64_t row = 0; row < gemm->m; row++) {
            char *c = (char *)gemm->c + matrix * gemm->c_matrix_stride + row * gemm->c_row_stride;
            for (int64_t column = 0; column < gemm->n; column++) {
                fv_float_store(c + column * bytes, (float)product(gemm, matrix, row, column), gemm->c_dtype);
            }
        }
    }
}
