/* rope: a warp for some heads of q or k of a token, in place; rope_kv_write: the same for q, which may be written to a
 * second place, too, and a warp for each head of k, which goes on to write its rotated row, and of v. */
#include "kernels/cuda/copy_bytes.cuh"
#include "kernels/cuda/kv_write_token.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/rope_token.cuh"

#define WARPS 4

/* Warps of a token for the heads of q, or of k; none where those are absent. */
static __host__ __device__ int32_t warps_of(const fv_rope_rows *rows)
{
    return rows->data ? (rows->num_heads + FV_ROPE_HEADS - 1) / FV_ROPE_HEADS : 0;
}

/* The heads of a token's warp number `warp`. */
static __device__ __forceinline__ void rotate_of_warp(const fv_rope_rows *rows, const fv_rope_rows *copy,
                                                      const fv_rope_params *params, int32_t token, int32_t warp)
{
    rotate_heads(rows, copy, params, token, warp * FV_ROPE_HEADS,
                 fv_min_i32(FV_ROPE_HEADS, rows->num_heads - warp * FV_ROPE_HEADS));
}

static __global__ void __launch_bounds__(WARPS * 32, 5) rope(const __grid_constant__ fv_rope_params params)
{
    overlap_begin();
    const fv_rope_rows no_copy = {};
    const int32_t q_warps = warps_of(&params.q), warps = q_warps + warps_of(&params.k);
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t token = (int32_t)(at / warps), warp = (int32_t)(at % warps);
    if (token >= fv_rope_tokens(&params)) return;
    const bool is_query = warp < q_warps;
    rotate_of_warp(is_query ? &params.q : &params.k, &no_copy, &params, token, is_query ? warp : warp - q_warps);
}

extern "C" fv_status fv_cuda_rope(const fv_launch *launch, const fv_rope_params *params)
{
    const int64_t num_warps = (int64_t)params->num_tokens * (warps_of(&params->q) + warps_of(&params->k));
    return fv_cuda_launch_overlapped(launch, "rope", rope, dim3(fv_cuda_blocks(num_warps, WARPS)), WARPS * 32, 0,
                                     *params);
}

/* A token outside the tables is not rotated: its heads of q go to their second place as they are. */
static __device__ __forceinline__ void copy_unrotated(const fv_rope_kv_write_params *params, int32_t token,
                                                      int32_t warp)
{
    const fv_rope_rows *q = &params->rope.q, *copy = &params->q_copy;
    if (!copy->data || fv_rope_position(&params->rope, token) >= 0) return;
    const int32_t first = warp * FV_ROPE_HEADS;
    for (int32_t head = first; head < fv_min_i32(first + FV_ROPE_HEADS, q->num_heads); head++) {
        copy_bytes((char *)copy->data + token * copy->token_stride + head * copy->head_stride,
                   (const char *)q->data + token * q->token_stride + head * q->head_stride,
                   (int64_t)params->rope.rope_dim * fv_element_bytes(params->rope.dtype));
    }
}

/* Warps of a token: those of the heads of q, and for each KV head one for K and one for V. */
static __global__ void __launch_bounds__(WARPS * 32, 5)
    rope_kv_write(const __grid_constant__ fv_rope_kv_write_params params)
{
    overlap_begin();
    const fv_rope_rows no_copy = {};
    const int32_t q_warps = warps_of(&params.rope.q);
    const int32_t warps = q_warps + 2 * params.write.cache.num_kv_heads;
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t token = (int32_t)(at / warps), warp = (int32_t)(at % warps);
    if (token >= fv_rope_tokens(&params.rope)) return;
    if (warp < q_warps) {
        rotate_of_warp(&params.rope.q, &params.q_copy, &params.rope, token, warp);
        copy_unrotated(&params, token, warp);
        return;
    }
    const int32_t head = (warp - q_warps) / 2;
    const bool is_value = (warp - q_warps) % 2 != 0;
    if (!is_value) {
        rotate_heads(&params.rope.k, &no_copy, &params.rope, token, head, 1);
        __syncwarp(); /* lanes read what others of the warp rotated */
    }
    int64_t block, slot;
    if (!find_slot(&block, &slot, &params.write, token)) return;
    write_head(&params.write, token, head, is_value, block, slot);
}

extern "C" fv_status fv_cuda_rope_kv_write(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    const int32_t warps_of_token = warps_of(&params->rope.q) + 2 * params->write.cache.num_kv_heads;
    const int64_t num_warps = (int64_t)params->rope.num_tokens * warps_of_token;
    return fv_cuda_launch_overlapped(launch, "rope_kv_write", rope_kv_write, dim3(fv_cuda_blocks(num_warps, WARPS)),
                                     WARPS * 32, 0, *params);
}
