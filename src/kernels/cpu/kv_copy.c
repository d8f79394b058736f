/* kv_copy: blocks as runs of bytes; pairs in parallel. */
#include "core/executor.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/kernels.h"
#include "kvcache/kv_block_runs.h"

#include <string.h>

typedef struct copy_job {
    const fv_kv_copy_params *params;
    fv_kv_block_runs runs;
} copy_job;

static void copy_task(void *user, int64_t pair, int32_t worker)
{
    (void)worker;
    const copy_job *job = user;
    if (!fv_kv_copy_pair_valid(job->params, pair)) return;
    for (int32_t i = 0; i < job->runs.num_parts; i++) {
        const fv_kv_part *part = &job->runs.parts[i];
        for (int64_t run = 0; run < part->num_runs; run++) {
            char *dst;
            const char *src;
            fv_kv_part_run(&dst, &src, part, job->params->dst_blocks[pair], job->params->src_blocks[pair], run);
            if (dst != src) memcpy(dst, src, (size_t)part->run_bytes);
        }
    }
}

fv_status FV_ISA_SYMBOL(fv_kv_copy)(const fv_launch *launch, const fv_kv_copy_params *params)
{
    copy_job job = {.params = params};
    fv_kv_block_runs_init(&job.runs, &params->dst, &params->src);
    fv_executor_run(launch->executor, params->num_pairs, copy_task, &job);
    return FV_OK;
}
