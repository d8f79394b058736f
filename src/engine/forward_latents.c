/* Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1):
 *
 *   normed -> q_a | kv_a        one GEMM; without q_a it gives the queries themselves
 *          -> norm of each latent
 *   q_a    -> q                 [H, P + R], the last R of each head rotated
 *   kv_a   =  latent | key part [L + R], the last R rotated: what the cache keeps, and all that it keeps
 *
 * The plan makes keys and values of the latents, or takes that into the queries; it asks this engine for
 * the products (fv_gemm_matrices_run). */
#include <string.h>

#include "engine/forward_private.h"
#include "engine/rows.h"

static int32_t q_size(const fv_model_config *config) { return config->num_heads * config->head_size; }

/* Elements of a row of fv_forward.qkv before the latents. */
static int32_t q_columns(const fv_model_config *config)
{
    return config->q_lora_rank > 0 ? config->q_lora_rank : q_size(config);
}

static int32_t row_size(const fv_model_config *config)
{
    return q_columns(config) + fv_model_config_cache_head_size(config);
}

static void rotate(const fv_pass *on, float *heads, int64_t row, int32_t num_heads, int32_t head_size)
{
    const fv_forward *forward = on->forward;
    const int64_t angles = fv_pass_angles_at(on, on->group, row);
    fv_rope_row_neighbours(heads, forward->cosines + angles, forward->sines + angles, num_heads, head_size,
                           forward->model->config.rope_size);
}

/* Norms both latents and rotates the key part; a query's latent moves to a dense row. */
static void latents_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    float *q_latent = forward->qkv + row * row_size(config);
    float *latent = q_latent + q_columns(config);
    if (config->q_lora_rank > 0) {
        fv_rms_norm_row(forward->q_latent + row * config->q_lora_rank, q_latent, on->layer->q_norm, config->q_lora_rank,
                        config->rms_epsilon);
    }
    fv_rms_norm_row(latent, latent, on->layer->k_norm, config->mla.kv_lora_rank, config->rms_epsilon);
    rotate(on, latent + config->mla.kv_lora_rank, row, 1, config->rope_size);
}

static float *queries_at(const fv_forward *forward, int64_t row)
{
    const fv_model_config *config = &forward->model->config;
    return config->q_lora_rank > 0 ? forward->q + row * q_size(config) : forward->qkv + row * row_size(config);
}

static void queries_row(const fv_pass *on, int64_t row)
{
    const fv_model_config *config = &on->forward->model->config;
    float *rotated_part = queries_at(on->forward, row) + config->mla.qk_nope_head_dim;
    rotate(on, rotated_part, row, config->num_heads, config->head_size);
}

/* Queries and the cache's new row as attention takes them. */
static void narrow_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const int32_t size = q_size(config), cache_size = fv_model_config_cache_head_size(config);
    uint16_t *to = forward->narrow_qkv + row * (size + cache_size);
    const float *latent = forward->qkv + row * row_size(config) + q_columns(config);
    fv_narrow_row(to, queries_at(forward, row), size, forward->attention_dtype);
    fv_narrow_row(to + size, latent, cache_size, forward->attention_dtype);
}

/* Sets q and k. */
static void set_rows(fv_layer *tensors, fv_pass *on)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const fv_dtype dtype = forward->attention_dtype;
    const int32_t size = q_size(config), cache_size = fv_model_config_cache_head_size(config);
    const int64_t rows = on->num_rows, narrow_bytes = (int64_t)sizeof(uint16_t) * (size + cache_size);
    void *q = queries_at(forward, 0), *k = forward->qkv + q_columns(config);
    int64_t q_bytes = (queries_at(forward, 1) - queries_at(forward, 0)) * (int64_t)sizeof(float);
    int64_t k_bytes = row_size(config) * (int64_t)sizeof(float);
    if (forward->narrow_qkv) {
        fv_pass_for_rows(on, rows, narrow_row);
        q = forward->narrow_qkv;
        k = forward->narrow_qkv + size;
        q_bytes = k_bytes = narrow_bytes;
    }
    tensors->q = fv_tensor_3d(q, dtype, rows, config->num_heads, config->head_size);
    tensors->k = fv_tensor_3d(k, dtype, rows, 1, cache_size);
    tensors->q.stride_bytes[0] = q_bytes;
    tensors->k.stride_bytes[0] = k_bytes;
}

fv_status fv_pass_attend_latents(fv_pass *on)
{
    fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const fv_mla_shape *mla = &config->mla;
    const int64_t rows = on->num_rows;
    fv_pass_for_rows(on, rows, latents_row);
    if (config->q_lora_rank > 0) {
        const fv_status status = fv_pass_multiply(on, forward->q, forward->q_latent, on->layer->q_up, rows);
        if (status != FV_OK) return status;
    }
    fv_pass_for_rows(on, rows, queries_row);

    forward->matrices.batch_invariant = on->step->batch_invariant;
    fv_layer tensors = {
        .struct_size = sizeof(tensors),
        .kv_cache = on->step->caches[on->index],
        .out = fv_pass_attended(on, rows),
        .kv_up = fv_tensor_3d(on->layer->kv_up, FV_DTYPE_F32, config->num_heads,
                              mla->qk_nope_head_dim + mla->v_head_dim, mla->kv_lora_rank),
        .gemm = fv_gemm_matrices_run,
        .gemm_user = &forward->matrices,
    };
    set_rows(&tensors, on);
    return fv_pass_attend(on, &tensors);
}
