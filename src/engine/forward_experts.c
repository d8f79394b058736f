/* A mixture of experts (DeepSeekMoE, arXiv 2401.06066): the tokens are sorted by expert, so that each expert is a GEMM
 * over its own tokens; then each token adds what its experts made of it, in the order of their numbers,
 * whatever else is in the batch.
 *
 *   token   experts           rows of expert 0   1     2     3
 *     0      0  2             tokens        0 1     |  0  | 1 2
 *     1      0  3             */
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/expert_router.h"
#include "engine/forward_private.h"
#include "engine/rows.h"

fv_status fv_forward_experts_init(fv_forward_experts *experts, const fv_model_config *config, int32_t max_tokens)
{
    const size_t routed = (size_t)max_tokens * (size_t)config->experts.num_used;
    if (routed > INT32_MAX) {
        return fv_fail(FV_ERR_INVALID, "steps of %d tokens for %d experts each; accepted: less than 2^31 together",
                       max_tokens, config->experts.num_used);
    }
    experts->routes = calloc(routed, sizeof(*experts->routes));
    experts->rows = calloc(routed, sizeof(*experts->rows));
    experts->begin = calloc((size_t)config->experts.num_experts + 1, sizeof(*experts->begin));
    if (experts->routes && experts->rows && experts->begin) return FV_OK;
    return fv_fail(FV_ERR_NO_MEMORY, "no memory for the experts of %d tokens", max_tokens);
}

void fv_forward_experts_deinit(fv_forward_experts *experts)
{
    free(experts->routes);
    free(experts->rows);
    free(experts->begin);
    memset(experts, 0, sizeof(*experts));
}

/* In fp32 whatever the compute type: which experts are best is a close call. */
static fv_status compute_logits(const fv_pass *on)
{
    fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const int64_t in_bytes = config->hidden_size * (int64_t)sizeof(float);
    fv_gemm_matrices user = {.context = forward->context, .batch_invariant = on->step->batch_invariant};
    const fv_gemm gemm = {
        .struct_size = sizeof(gemm),
        .num_matrices = 1,
        .m = (int32_t)on->num_rows,
        .n = config->experts.num_experts,
        .k = config->hidden_size,
        .b_is_transposed = 1,
        .a_dtype = FV_DTYPE_F32,
        .b_dtype = FV_DTYPE_F32,
        .c_dtype = FV_DTYPE_F32,
        .a = forward->normed,
        .a_row_stride = in_bytes,
        .b = on->layer->router,
        .b_row_stride = in_bytes,
        .c = forward->experts.logits,
        .c_row_stride = config->experts.num_experts * (int64_t)sizeof(float),
    };
    return fv_gemm_matrices_run(&user, &gemm, NULL);
}

static void route_row(const fv_pass *on, int64_t row)
{
    const fv_expert_config *config = &on->forward->model->config.experts;
    fv_forward_experts *experts = &on->forward->experts;
    fv_expert_route_row(experts->routes + row * config->num_used, experts->logits + row * config->num_experts,
                        on->layer->router_bias, config, experts->scratch + row * config->num_experts);
}

/* Counting sort; a row is an index of fv_forward_experts.routes. */
static void sort_by_expert(const fv_pass *on)
{
    const fv_expert_config *config = &on->forward->model->config.experts;
    fv_forward_experts *experts = &on->forward->experts;
    const int32_t num_routes = (int32_t)on->num_rows * config->num_used;
    memset(experts->begin, 0, ((size_t)config->num_experts + 1) * sizeof(*experts->begin));
    for (int32_t i = 0; i < num_routes; i++) experts->begin[experts->routes[i].expert + 1]++;
    for (int32_t i = 0; i < config->num_experts; i++) experts->begin[i + 1] += experts->begin[i];
    for (int32_t i = 0; i < num_routes; i++) experts->rows[experts->begin[experts->routes[i].expert]++] = i;
    /* Each beginning has moved to the next one's place. */
    memmove(experts->begin + 1, experts->begin, (size_t)config->num_experts * sizeof(*experts->begin));
    experts->begin[0] = 0;
}

static void gather_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const int64_t token = forward->experts.rows[on->expert_begin + row] / config->experts.num_used;
    memcpy(forward->experts.gathered + row * config->hidden_size, forward->normed + token * config->hidden_size,
           (size_t)config->hidden_size * sizeof(float));
}

static void add_row(const fv_pass *on, int64_t row)
{
    const fv_forward *forward = on->forward;
    const fv_model_config *config = &forward->model->config;
    const int32_t route = forward->experts.rows[on->expert_begin + row];
    const int64_t token = route / config->experts.num_used;
    fv_add_scaled_row(forward->projected + token * config->hidden_size,
                      forward->experts.out + row * config->hidden_size, forward->experts.routes[route].weight,
                      config->hidden_size);
}

fv_status fv_pass_add_experts(fv_pass *on)
{
    fv_forward_experts *experts = &on->forward->experts;
    const fv_expert_config *config = &on->forward->model->config.experts;
    fv_status status = compute_logits(on);
    if (status != FV_OK) return status;
    fv_pass_for_rows(on, on->num_rows, route_row);
    sort_by_expert(on);
    on->ffn_size = config->ffn_size;
    for (int32_t i = 0; i < config->num_experts && status == FV_OK; i++) {
        const int32_t num_rows = experts->begin[i + 1] - experts->begin[i];
        if (num_rows == 0) continue;
        on->expert_begin = experts->begin[i];
        fv_pass_for_rows(on, num_rows, gather_row);
        status = fv_pass_feed_forward(on, experts->out, experts->gathered, on->layer->experts_gate_up[i],
                                      on->layer->experts_down[i], num_rows);
        if (status == FV_OK) fv_pass_for_rows(on, num_rows, add_row);
    }
    return status;
}
