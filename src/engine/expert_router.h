/* Which experts a token goes to. Loops over one token, in a fixed order of operations. */
#ifndef FV_ENGINE_EXPERT_ROUTER_H
#define FV_ENGINE_EXPERT_ROUTER_H

#include "engine/model_config.h"

/* An expert of a token, and what its output is multiplied with. */
typedef struct fv_expert_route {
    int32_t expert;
    float weight;
} fv_expert_route;

/* routes [num_used], experts ascending. `logits` [num_experts] of the router become scores, softmax or sigmoid.
 * `bias` [num_experts] or NULL is added to the scores for choosing only (DeepSeek-V3, arXiv 2412.19437,
 * section 2.1.2): first the best groups, then the best experts in them; of equals the first. The weights are
 * the scores without it. `scratch` is [num_experts]. */
void fv_expert_route_row(fv_expert_route *routes, float *logits, const float *bias, const fv_expert_config *experts,
                         float *scratch);

#endif
