/* Top to bottom in the order of the pass. */
#include "engine/forward_device.h"

#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "core/device.h"
#include "engine/rope_frequencies.h"
#include "engine/rows.h"
#include "fovea/mla.h"
#include "ops/layer_table.h"

enum { alignment = 256 };

static int32_t q_size(const fv_model_config *config) { return config->num_heads * config->head_size; }

static int32_t qkv_size(const fv_model_config *config)
{
    return q_size(config) + 2 * config->num_kv_heads * config->head_size;
}

static bool is_mla(const fv_model_config *config) { return config->attention == FV_ATTENTION_MLA; }

static int32_t largest_ffn_size(const fv_model_config *config)
{
    return fv_max_i32(config->ffn_size, config->experts.num_shared * config->experts.ffn_size);
}

/* --- creation ----------------------------------------------------------------------------------------------- */

static fv_status create_buffers(fv_device_forward *forward, size_t tokens, size_t logit_rows)
{
    const fv_model_config *config = &forward->model->config;
    const bool has_heads = !is_mla(config);
    const size_t hidden = (size_t)config->hidden_size, ffn = (size_t)largest_ffn_size(config);
    const size_t num_used = (size_t)config->experts.num_used, num_experts = (size_t)config->experts.num_experts;
    const size_t qkv = has_heads ? (size_t)qkv_size(config) : 0, wide = sizeof(float), narrow = sizeof(uint16_t);
    const size_t angles = (size_t)forward->max_position * (size_t)config->rope_size / 2;
    float *angle_tables = NULL; /* cosines and sines of each group */
    const struct {
        void *pointer; /* to the pointer */
        size_t rows, row_bytes;
    } buffers[] = {
        {&forward->hidden, tokens, hidden * wide},
        {&forward->normed, tokens, hidden * narrow},
        {&forward->normed_f32, tokens, num_experts > 0 ? hidden * wide : 0},
        {&forward->qkv, tokens, qkv * wide},
        {&forward->heads, tokens, qkv * narrow},
        {&forward->attended, tokens, has_heads ? (size_t)q_size(config) * narrow : 0},
        {&forward->attention, tokens, hidden * wide},
        {&forward->projected, tokens, hidden * wide},
        {&forward->gate_up, tokens, 2 * ffn * wide},
        {&forward->activated, tokens, ffn * narrow},
        {&forward->route_scratch, tokens, 3 * num_experts * wide},
        {&forward->experts, tokens, num_used * sizeof(int32_t)},
        {&forward->expert_weights, tokens, num_used * wide},
        {&forward->expert_parts, tokens, num_used * hidden * wide},
        {&angle_tables, 2 * (size_t)config->num_groups, angles * wide},
        {&forward->logit_hidden, logit_rows, hidden * narrow},
        {&forward->logits, logit_rows, (size_t)config->vocabulary_size * wide},
    };
    size_t offsets[FV_ARRAY_LEN(buffers)], bytes = 0;
    for (int32_t i = 0; i < FV_ARRAY_LEN(buffers); i++) {
        offsets[i] = bytes;
        bytes += (size_t)fv_round_up((int64_t)(buffers[i].rows * buffers[i].row_bytes), alignment);
    }
    const fv_status status = fv_device_alloc(&forward->memory, forward->device, bytes);
    if (status != FV_OK) {
        return fv_fail(status, "no memory for %zu bytes of activations: %s", bytes, fv_last_error());
    }
    for (int32_t i = 0; i < FV_ARRAY_LEN(buffers); i++) {
        const void *at = (char *)forward->memory + offsets[i];
        memcpy(buffers[i].pointer, &at, sizeof(at));
    }
    for (int32_t i = 0; i < config->num_groups; i++) {
        forward->cosines[i] = angle_tables + (size_t)(2 * i) * angles;
        forward->sines[i] = angle_tables + (size_t)(2 * i + 1) * angles;
    }
    forward->memory_bytes = bytes;
    /* Rows of padding are multiplied too: any numbers do, but no NaN that never came from the model. */
    return fv_device_fill(forward->device, forward->memory, 0, bytes, NULL);
}

/* The angles of every position of a group: tables on the host first. */
static fv_status create_angles(fv_device_forward *forward, int32_t group)
{
    const fv_model_config *config = &forward->model->config;
    const int32_t num_pairs = config->rope_size / 2;
    const size_t count = (size_t)forward->max_position * (size_t)num_pairs;
    double *frequencies = calloc((size_t)num_pairs, sizeof(*frequencies));
    float *tables = malloc(2 * count * sizeof(*tables));
    fv_status status = FV_OK;
    if (!frequencies || !tables) {
        status = fv_fail(FV_ERR_NO_MEMORY, "no memory for the angles of %d positions", forward->max_position);
        goto done;
    }
    fv_rope_frequencies(frequencies, config->rope_size, &config->groups[group].rope);
    for (int32_t position = 0; position < forward->max_position; position++) {
        float *cosines = tables + (size_t)position * (size_t)num_pairs;
        fv_rope_angles(cosines, cosines + count, position, frequencies, num_pairs,
                       config->groups[group].rope.magnitude);
    }
    const size_t bytes = count * sizeof(*tables);
    status = fv_device_copy_in(forward->device, forward->cosines[group], tables, bytes, NULL);
    if (status == FV_OK) {
        status = fv_device_copy_in(forward->device, forward->sines[group], tables + count, bytes, NULL);
    }
    if (status == FV_OK) status = fv_stream_synchronize(forward->device, NULL);

done:
    free(frequencies);
    free(tables);
    return status;
}

fv_status fv_device_forward_init(fv_device_forward *forward, const fv_model *model, const fv_device_model *weights,
                                 fv_device *device, int32_t max_tokens, int32_t max_position, int32_t max_logit_rows)
{
    *forward = (fv_device_forward){
        .model = model,
        .weights = weights,
        .device = device,
        .max_position = max_position,
    };
    fv_status status = create_buffers(forward, (size_t)max_tokens, (size_t)max_logit_rows);
    for (int32_t i = 0; i < model->config.num_groups && status == FV_OK; i++) status = create_angles(forward, i);
    if (status != FV_OK) fv_device_forward_deinit(forward);
    return status;
}

void fv_device_forward_deinit(fv_device_forward *forward)
{
    if (forward->device) fv_device_free(forward->device, forward->memory);
    memset(forward, 0, sizeof(*forward));
}

/* --- what the parts share ----------------------------------------------------------------------------------- */

/* What the functions of a layer see. */
typedef struct device_pass {
    fv_device_forward *forward;
    const fv_device_pass *pass;
    const fv_model_config *config;
    const fv_layer_table *layers;
    fv_launch launch;
    int32_t index, group; /* of the layer */
    const fv_model_layer *layer;
    const fv_device_layer *vectors;
} device_pass;

static device_pass begin_pass(fv_device_forward *forward, const fv_device_pass *pass, fv_stream stream)
{
    return (device_pass){
        .forward = forward,
        .pass = pass,
        .config = &forward->model->config,
        .layers = forward->device->layers,
        .launch = {forward->device, NULL, stream},
    };
}

/* y = x W^T, y in fp32. */
static fv_status multiply(const device_pass *on, float *y, const void *x, const fv_gemm_weight *weight,
                          int32_t num_rows)
{
    const int64_t in_features = fv_gemm_weight_in_features(weight), out_features = fv_gemm_weight_out_features(weight);
    const fv_gemm gemm = {
        .struct_size = sizeof(gemm),
        .num_matrices = 1,
        .m = num_rows,
        .n = (int32_t)out_features,
        .k = (int32_t)in_features,
        .b_is_transposed = 1,
        .a_dtype = FV_DTYPE_BF16,
        .b_dtype = FV_DTYPE_BF16,
        .c_dtype = FV_DTYPE_F32,
        .a = x,
        .a_row_stride = in_features * (int64_t)sizeof(uint16_t),
        .b = fv_gemm_weight_data(weight),
        .b_row_stride = in_features * (int64_t)sizeof(uint16_t),
        .c = y,
        .c_row_stride = out_features * (int64_t)sizeof(float),
    };
    return fv_device_gemm(on->forward->device, &gemm, on->launch.stream);
}

/* The residual stream takes `added`, and `normed` is its norm. */
static fv_status add_and_norm(const device_pass *on, const void *added, fv_dtype added_dtype, const float *added_norm,
                              const float *weight)
{
    const fv_device_forward *forward = on->forward;
    const fv_add_norm_params params = {
        .hidden = forward->hidden,
        .added = added,
        .added_dtype = added_dtype,
        .added_norm = added_norm,
        .weight = weight,
        .normed = forward->normed,
        .normed_f32 = on->config->experts.num_experts > 0 ? forward->normed_f32 : NULL,
        .epsilon = on->config->rms_epsilon,
        .num_rows = on->pass->num_rows,
        .size = on->config->hidden_size,
    };
    return on->layers->add_norm(&on->launch, &params);
}

/* --- attention ---------------------------------------------------------------------------------------------- */

static fv_status split_heads(const device_pass *on)
{
    const fv_device_forward *forward = on->forward;
    const fv_model_config *config = on->config;
    const fv_split_heads_params params = {
        .out = forward->heads,
        .qkv = forward->qkv,
        .q_norm = on->vectors->q_norm,
        .k_norm = on->vectors->k_norm,
        .cos = forward->cosines[on->group],
        .sin = forward->sines[on->group],
        .positions = on->pass->positions,
        .max_position = forward->max_position,
        .style = config->rope_pairs == FV_ROPE_HALVES ? FV_ROPE_HALF : FV_ROPE_INTERLEAVED,
        .rope_dim = config->rope_size,
        .epsilon = config->rms_epsilon,
        .num_rows = on->pass->num_rows,
        .num_heads = config->num_heads,
        .num_kv_heads = config->num_kv_heads,
        .head_size = config->head_size,
    };
    return on->layers->split_heads(&on->launch, &params);
}

/* [T, num_heads, D] inside rows of `heads`. */
static fv_tensor heads_from(const device_pass *on, int32_t first_head, int32_t num_heads)
{
    const fv_model_config *config = on->config;
    fv_tensor heads = fv_tensor_3d((uint16_t *)on->forward->heads + first_head * config->head_size, FV_DTYPE_BF16,
                                   on->pass->num_rows, num_heads, config->head_size);
    heads.stride_bytes[0] = (int64_t)qkv_size(config) * (int64_t)sizeof(uint16_t);
    return heads;
}

static fv_status attend_heads(const device_pass *on)
{
    fv_device_forward *forward = on->forward;
    const fv_model_config *config = on->config;
    const int32_t q_heads = config->num_heads, kv_heads = config->num_kv_heads, rows = on->pass->num_rows;
    fv_status status = multiply(on, forward->qkv, forward->normed, on->layer->qkv, rows);
    if (status == FV_OK) status = split_heads(on);
    if (status != FV_OK) return status;
    const fv_layer tensors = {
        .struct_size = sizeof(tensors),
        .q = heads_from(on, 0, q_heads),
        .k = heads_from(on, q_heads, kv_heads),
        .v = heads_from(on, q_heads + kv_heads, kv_heads),
        .kv_cache = on->pass->caches[on->index],
        .out = fv_tensor_3d(forward->attended, FV_DTYPE_BF16, rows, q_heads, config->head_size),
    };
    status = fv_plan_run(on->pass->plans[on->group], &tensors, on->pass->workspace, on->launch.stream);
    return status == FV_OK ? multiply(on, forward->attention, forward->attended, on->layer->output, rows) : status;
}

/* Rows [first, first + count) of a weight. */
static fv_tensor rows_of(const fv_gemm_weight *weight, int64_t first, int64_t count)
{
    const int64_t columns = fv_gemm_weight_in_features(weight);
    uint16_t *data = (uint16_t *)(uintptr_t)fv_gemm_weight_data(weight);
    return fv_tensor_2d(data + first * columns, FV_DTYPE_BF16, count, columns);
}

static fv_tensor vector_of(const float *values, int64_t size)
{
    return fv_tensor_1d((void *)(uintptr_t)values, FV_DTYPE_F32, size);
}

/* The rows of qkv are those of q_a, or of q where there is none, and then those of kv_a. */
static fv_status attend_latents(const device_pass *on)
{
    fv_device_forward *forward = on->forward;
    const fv_model_config *config = on->config;
    const fv_mla_shape *mla = &config->mla;
    const int64_t rows = on->pass->num_rows, hidden = config->hidden_size, q_lora = config->q_lora_rank;
    const int64_t q_rows = q_lora > 0 ? q_lora : q_size(config);
    fv_mla_layer layer = {
        .struct_size = sizeof(layer),
        .rms_epsilon = config->rms_epsilon,
        .x = fv_tensor_2d(forward->normed, FV_DTYPE_BF16, rows, hidden),
        .out = fv_tensor_2d(forward->attention, FV_DTYPE_BF16, rows, hidden),
        .kv_cache = on->pass->caches[on->index],
        .q_up = rows_of(on->layer->qkv, 0, q_rows),
        .kv_down = rows_of(on->layer->qkv, q_rows, fv_model_config_cache_head_size(config)),
        .kv_norm = vector_of(on->vectors->k_norm, mla->kv_lora_rank),
        .kv_up = fv_tensor_3d((void *)(uintptr_t)on->vectors->kv_up, FV_DTYPE_BF16, config->num_heads,
                              mla->qk_nope_head_dim + mla->v_head_dim, mla->kv_lora_rank),
        .o = rows_of(on->layer->output, 0, hidden),
        .rotation = {.struct_size = sizeof(layer.rotation),
                     .style = FV_ROPE_INTERLEAVED,
                     .rope_dim = config->rope_size,
                     .cos = forward->cosines[on->group],
                     .sin = forward->sines[on->group],
                     .max_position = forward->max_position,
                     .positions_32 = on->pass->positions},
        .gemm = fv_device_gemm,
        .gemm_user = forward->device,
    };
    if (q_lora > 0) {
        layer.q_down = layer.q_up;
        layer.q_norm = vector_of(on->vectors->q_norm, q_lora);
        layer.q_up = rows_of(on->layer->q_up, 0, q_size(config));
    }
    return fv_mla_run(on->pass->plans[on->group], &layer, on->pass->workspace, on->launch.stream);
}

/* --- feed-forward ------------------------------------------------------------------------------------------- */

static fv_status run_dense(const device_pass *on, int32_t ffn_size)
{
    fv_device_forward *forward = on->forward;
    const int32_t rows = on->pass->num_rows;
    const fv_activate_params params = {
        .out = forward->activated,
        .gate_up = forward->gate_up,
        .is_gelu = on->config->activation == FV_ACTIVATION_GELU,
        .num_rows = rows,
        .size = ffn_size,
    };
    fv_status status = multiply(on, forward->gate_up, forward->normed, on->layer->gate_up, rows);
    if (status == FV_OK) status = on->layers->activate(&on->launch, &params);
    return status == FV_OK ? multiply(on, forward->projected, forward->activated, on->layer->down, rows) : status;
}

static fv_status route(const device_pass *on)
{
    const fv_device_forward *forward = on->forward;
    const fv_expert_config *experts = &on->config->experts;
    const fv_route_params params = {
        .experts = forward->experts,
        .weights = forward->expert_weights,
        .scratch = forward->route_scratch,
        .x = forward->normed_f32,
        .router = on->vectors->router,
        .bias = on->vectors->router_bias,
        .weights_scale = experts->weights_scale,
        .is_sigmoid = experts->gating == FV_GATING_SIGMOID,
        .normalises = experts->normalises,
        .num_experts = experts->num_experts,
        .num_used = experts->num_used,
        .num_groups = experts->num_groups,
        .num_used_groups = experts->num_used_groups,
        .num_rows = on->pass->num_rows,
        .size = on->config->hidden_size,
    };
    return on->layers->route(&on->launch, &params);
}

/* `overwrites`: there is no dense part to add to. */
static fv_status run_experts(const device_pass *on, bool overwrites)
{
    const fv_device_forward *forward = on->forward;
    const fv_expert_config *experts = &on->config->experts;
    const fv_run_experts_params run = {
        .out = forward->expert_parts,
        .x = forward->normed,
        .experts = forward->experts,
        .gate_up = on->vectors->experts_gate_up,
        .down = on->vectors->experts_down,
        .num_rows = on->pass->num_rows,
        .num_used = experts->num_used,
        .size = on->config->hidden_size,
        .ffn_size = experts->ffn_size,
        .num_experts = experts->num_experts,
    };
    const fv_add_experts_params add = {
        .sum = forward->projected,
        .parts = forward->expert_parts,
        .weights = forward->expert_weights,
        .overwrites = overwrites,
        .num_rows = on->pass->num_rows,
        .num_used = experts->num_used,
        .size = on->config->hidden_size,
    };
    fv_status status = route(on);
    if (status == FV_OK) status = on->layers->run_experts(&on->launch, &run);
    return status == FV_OK ? on->layers->add_experts(&on->launch, &add) : status;
}

/* --- the pass ----------------------------------------------------------------------------------------------- */

static fv_status run_layer(device_pass *on, int32_t index)
{
    const fv_device_forward *forward = on->forward;
    const fv_model_config *config = on->config;
    const fv_device_layer *before = index > 0 ? &forward->weights->layers[index - 1] : NULL;
    on->index = index;
    on->group = fv_model_config_group_of(config, index);
    on->layer = &forward->model->layers[index];
    on->vectors = &forward->weights->layers[index];

    fv_status status = add_and_norm(on, before ? forward->projected : NULL, FV_DTYPE_F32,
                                    before ? before->post_ffn_norm : NULL, on->vectors->attention_norm);
    if (status == FV_OK) status = is_mla(config) ? attend_latents(on) : attend_heads(on);
    if (status == FV_OK) {
        status = add_and_norm(on, forward->attention, is_mla(config) ? FV_DTYPE_BF16 : FV_DTYPE_F32,
                              on->vectors->post_attention_norm, on->vectors->ffn_norm);
    }
    const int32_t ffn_size = fv_model_config_ffn_size(config, index);
    if (status == FV_OK && ffn_size > 0) status = run_dense(on, ffn_size);
    if (status != FV_OK || !fv_model_config_has_experts(config, index)) return status;
    return run_experts(on, ffn_size == 0);
}

fv_status fv_device_forward_layers(fv_device_forward *forward, const fv_device_pass *pass)
{
    device_pass on = begin_pass(forward, pass, pass->stream);
    const fv_model *model = forward->model;
    const fv_embed_params embed = {
        .hidden = forward->hidden,
        .weights = fv_gemm_weight_data(model->embedding_rows ? model->embedding_rows : model->head),
        .tokens = pass->tokens,
        .scale = on.config->embedding_scale,
        .num_rows = pass->num_rows,
        .size = on.config->hidden_size,
        .num_weights = on.config->vocabulary_size,
    };
    fv_status status = on.layers->embed(&on.launch, &embed);
    for (int32_t i = 0; i < on.config->num_layers && status == FV_OK; i++) status = run_layer(&on, i);
    return status;
}

fv_status fv_device_forward_logits(fv_device_forward *forward, const int32_t *rows, int32_t num_rows, fv_stream stream)
{
    const device_pass on = begin_pass(forward, NULL, stream);
    const fv_add_norm_params norm = {
        .hidden = forward->hidden,
        .added = forward->projected,
        .added_dtype = FV_DTYPE_F32,
        .added_norm = forward->weights->layers[on.config->num_layers - 1].post_ffn_norm,
        .weight = forward->weights->output_norm,
        .rows = rows,
        .normed = forward->logit_hidden,
        .epsilon = on.config->rms_epsilon,
        .num_rows = num_rows,
        .size = on.config->hidden_size,
    };
    const fv_status status = on.layers->add_norm(&on.launch, &norm);
    if (status != FV_OK) return status;
    return multiply(&on, forward->logits, forward->logit_hidden, forward->model->head, num_rows);
}
