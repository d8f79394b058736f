/* Launches mla_query: the maps of its tensors, and when it is worth it. */
#include "kernels/cuda/mla_query.cuh"

#include "kernels/cuda/hopper/attend.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/tensor_map.cuh"

enum { NOPE = FV_MLA_QUERY_NOPE, ROPE = FV_MLA_QUERY_ROPE, LATENT = FV_MLA_QUERY_LATENT, PANEL = 64 };

static bool is_aligned(const void *data, int64_t stride) { return ((uintptr_t)data | (uintptr_t)stride) % 16 == 0; }

extern "C" const char *fv_hopper_mla_query_why_not(const fv_launch *launch, const fv_mla_query_params *params)
{
    const fv_cuda_state *state = fv_cuda_state_of(launch->device);
    if (!state->hopper || !state->encode_map) return "no kernel of the device makes queries of latents";
    if (params->dtype != FV_DTYPE_BF16 && params->dtype != FV_DTYPE_F16) return "dtype is not of 16 bits";
    if (params->nope_size != NOPE || params->rope_size != ROPE || params->latent_size != LATENT)
        return "sizes are not 128 + 64 and 512";
    if (params->depth < PANEL || params->depth % PANEL != 0) return "depth is not a multiple of 64";
    if (params->keys.write.cache.num_kv_heads != 1) return "more than one KV head";
    const bool aligned = is_aligned(params->x, params->x_row_stride) && is_aligned(params->out, 0) &&
                         is_aligned(params->q_up, params->q_up_row_stride) &&
                         is_aligned(params->kv_up, params->kv_up_row_stride | params->kv_up_head_stride);
    return aligned ? NULL : "rows are not multiples of 16 bytes apart";
}

/* Blocks that write keys: as many as the heads leave room for, if there is a token for each of their warps. */
static int32_t num_writers(const fv_launch *launch, const fv_mla_query_params *params, int32_t num_threads)
{
    const int32_t room = launch->device->num_workers - params->num_heads;
    return fv_max_i32(1, fv_min_i32(room, (int32_t)fv_ceil_div(params->num_rows, num_threads / 32)));
}

/* One round of blocks: a second one, for more tokens, would ask for the weights again, and few heads leave most copy
 * engines idle. Of 132 multiprocessors 64 heads gain 2% of a layer, 32 lose 3%. */
extern "C" const char *fv_hopper_mla_query_slower(const fv_launch *launch, const fv_mla_query_params *params)
{
    const int32_t num_workers = launch->device->num_workers;
    if (params->num_rows > FV_MLA_QUERY_TOKENS) return "more than 128 tokens";
    if (params->num_heads >= num_workers) return "more heads than the multiprocessors take at once";
    return params->num_heads * 5 < num_workers * 2 ? "too few heads for the multiprocessors" : NULL;
}

static bool map_tensors(mla_query_args *args, const fv_cuda_state *state, const fv_mla_query_params *params)
{
    const fv_dtype dtype = params->dtype;
    const int64_t num_rows = params->num_rows, num_heads = params->num_heads, out_stride = (LATENT + ROPE) * 2;
    const fv_cuda_tensor x = {params->x,
                              dtype,
                              {params->depth, num_rows, 1},
                              {params->x_row_stride, num_rows * params->x_row_stride},
                              {PANEL, FV_MLA_QUERY_TOKENS, 1}};
    const fv_cuda_tensor up = {params->q_up,
                               dtype,
                               {params->depth, NOPE + ROPE, num_heads},
                               {params->q_up_row_stride, (NOPE + ROPE) * params->q_up_row_stride},
                               {PANEL, NOPE + ROPE, 1}};
    const fv_cuda_tensor absorb = {params->kv_up,
                                   dtype,
                                   {LATENT, NOPE, num_heads},
                                   {params->kv_up_row_stride, params->kv_up_head_stride},
                                   {PANEL, NOPE, 1}};
    const fv_cuda_tensor out = {
        params->out, dtype, {LATENT + ROPE, num_heads, num_rows}, {out_stride, num_heads * out_stride}, {PANEL, 1, 64}};
    return fv_cuda_map_tensor(&args->x_map, state, &x) && fv_cuda_map_tensor(&args->up_map, state, &up) &&
           fv_cuda_map_tensor(&args->absorb_map, state, &absorb) && fv_cuda_map_tensor(&args->out_map, state, &out);
}

extern "C" fv_status fv_hopper_mla_query(const fv_launch *launch, const fv_mla_query_params *params)
{
    const fv_cuda_state *state = fv_cuda_state_of(launch->device);
    if (params->num_rows == 0) return FV_OK;
    const fv_cuda_mla_query_kernel *kernel = &state->hopper->query[params->dtype == FV_DTYPE_F16];
    mla_query_args args = {};
    args.keys = params->keys;
    args.num_heads = params->num_heads;
    args.num_steps = params->depth / PANEL;
    if (!map_tensors(&args, state, params))
        return state->host.fail(FV_ERR_UNSUPPORTED, "%s: mla_query: the driver maps no such tensors",
                                launch->device->name);
    const dim3 grid((uint32_t)(params->num_heads + num_writers(launch, params, kernel->num_threads)),
                    fv_cuda_blocks(params->num_rows, FV_MLA_QUERY_TOKENS));
    return fv_cuda_launch_overlapped(launch, "mla_query", kernel->kernel, grid, (uint32_t)kernel->num_threads,
                                     (size_t)kernel->shared_bytes, args);
}
