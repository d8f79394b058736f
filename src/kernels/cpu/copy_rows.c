/* copy_rows: a task for each run of tokens. */
#include <string.h>

#include "core/compiler.h"
#include "core/executor.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/kernels.h"

#define BYTES_PER_TASK (64 * 1024)

static int64_t tokens_per_task(const fv_copy_rows_params *params)
{
    return fv_max_i64(1, BYTES_PER_TASK / fv_max_i64(1, params->num_heads * params->row_bytes));
}

static void copy_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_copy_rows_params *params = user;
    const int64_t first = index * tokens_per_task(params);
    const int64_t end = fv_min_i64(first + tokens_per_task(params), params->num_tokens);
    for (int64_t token = first; token < end; token++) {
        char *to = (char *)params->dst + token * params->dst_token_stride;
        const char *from = (const char *)params->src + token * params->src_token_stride;
        for (int64_t head = 0; head < params->num_heads; head++) {
            memcpy(to + head * params->dst_head_stride, from + head * params->src_head_stride,
                   (size_t)params->row_bytes);
        }
    }
}

fv_status FV_ISA_SYMBOL(fv_copy_rows)(const fv_launch *launch, const fv_copy_rows_params *params)
{
    fv_executor_run(launch->executor, fv_ceil_div(params->num_tokens, tokens_per_task(params)), copy_task,
                    (void *)params);
    return FV_OK;
}
