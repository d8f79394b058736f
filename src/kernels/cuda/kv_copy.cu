/* kv_copy: a block of the cache as runs of bytes (kvcache/kv_block_runs.h), a warp for each run. */
#include "kernels/cuda/copy_bytes.cuh"
#include "kernels/cuda/launch.cuh"

extern "C" {
#include "kvcache/kv_block_runs.h"
}

#define WARPS 8
#define MAX_RUN_BYTES 4096 /* longer runs are cut, so that many warps share them */

typedef struct kv_copy_args {
    fv_kv_copy_params copy;
    fv_kv_block_runs runs;
    int32_t warps_of_part[FV_KV_MAX_PARTS]; /* pieces of all its runs */
    int32_t pieces_of_run[FV_KV_MAX_PARTS];
} kv_copy_args;

static __global__ void __launch_bounds__(WARPS * 32, 1) kv_copy(const __grid_constant__ kv_copy_args args)
{
    const int64_t pair = blockIdx.y;
    if (!fv_kv_copy_pair_valid(&args.copy, pair)) return;
    int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    for (int32_t i = 0; i < args.runs.num_parts; at -= args.warps_of_part[i], i++) {
        if (at >= args.warps_of_part[i]) continue;
        const fv_kv_part *part = &args.runs.parts[i];
        const int64_t run = at / args.pieces_of_run[i];
        const int64_t first = (at - run * args.pieces_of_run[i]) * MAX_RUN_BYTES;
        char *dst;
        const char *src;
        fv_kv_part_run(&dst, &src, part, args.copy.dst_blocks[pair], args.copy.src_blocks[pair], run);
        copy_bytes(dst + first, src + first, fv_min_i64(MAX_RUN_BYTES, part->run_bytes - first));
        return;
    }
}

extern "C" fv_status fv_cuda_kv_copy(const fv_launch *launch, const fv_kv_copy_params *params)
{
    kv_copy_args args = {};
    args.copy = *params;
    fv_kv_block_runs_init(&args.runs, &params->dst, &params->src);
    int64_t num_warps = 0;
    for (int32_t i = 0; i < args.runs.num_parts; i++) {
        const fv_kv_part *part = &args.runs.parts[i];
        args.pieces_of_run[i] = (int32_t)fv_ceil_div(part->run_bytes, MAX_RUN_BYTES);
        args.warps_of_part[i] = (int32_t)(part->num_runs * args.pieces_of_run[i]);
        num_warps += args.warps_of_part[i];
    }
    for (int32_t first = 0; first < params->num_pairs; first += UINT16_MAX) { /* what a grid has in y */
        args.copy.num_pairs = fv_min_i32(UINT16_MAX, params->num_pairs - first);
        args.copy.dst_blocks = params->dst_blocks + first;
        args.copy.src_blocks = params->src_blocks + first;
        const dim3 grid(fv_cuda_blocks(num_warps, WARPS), (uint32_t)args.copy.num_pairs);
        const fv_status status = fv_cuda_launch(launch, "kv_copy", kv_copy, grid, WARPS * 32, 0, args);
        if (status != FV_OK) return status;
    }
    return FV_OK;
}
