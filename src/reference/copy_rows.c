/* copy_rows: piece by piece. */
#include <string.h>

#include "reference/reference.h"

fv_status fv_reference_copy_rows(const fv_launch *launch, const fv_copy_rows_params *params)
{
    (void)launch;
    for (int64_t token = 0; token < params->num_tokens; token++) {
        for (int64_t head = 0; head < params->num_heads; head++) {
            memcpy((char *)params->dst + token * params->dst_token_stride + head * params->dst_head_stride,
                   (const char *)params->src + token * params->src_token_stride + head * params->src_head_stride,
                   (size_t)params->row_bytes);
        }
    }
    return FV_OK;
}
