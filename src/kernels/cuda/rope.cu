/* rope: a warp for each token and head of q and k, in place; rope_kv_write: the same, the warps of k go on to
 * write their rotated row and its v, those of q to copy theirs. One expression rotates in both, so that they agree
 * bit for bit. */
#include "kernels/cuda/copy_bytes.cuh"
#include "kernels/cuda/kv_write_token.cuh"
#include "kernels/cuda/overlap.cuh"
#include "ops/rope.h"

#define WARPS 4

static __device__ __forceinline__ void rotate_head(char *row, const fv_rope_params *params, int64_t position)
{
    const int32_t half = params->rope_dim / 2, bytes = fv_element_bytes(params->dtype);
    const bool interleaved = params->style == FV_ROPE_INTERLEAVED;
    for (int32_t i = threadIdx.x % 32; i < half; i += 32) {
        char *first = row + (int64_t)(interleaved ? 2 * i : i) * bytes;
        char *second = row + (int64_t)(interleaved ? 2 * i + 1 : i + half) * bytes;
        const float a = fv_element_load(first, params->dtype), b = fv_element_load(second, params->dtype);
        const float c = params->cos[position * params->row_stride + i];
        const float s = params->sin[position * params->row_stride + i];
        fv_element_store(first, __fmaf_rn(a, c, -__fmul_rn(b, s)), params->dtype);
        fv_element_store(second, __fmaf_rn(b, c, __fmul_rn(a, s)), params->dtype);
    }
}

static __device__ __forceinline__ void rotate_rows(const fv_rope_rows *rows, const fv_rope_params *params,
                                                   int32_t token, int32_t head)
{
    const int64_t position = fv_rope_position(params, token);
    if (!rows->data || position < 0) return;
    rotate_head((char *)rows->data + token * rows->token_stride + head * rows->head_stride, params, position);
}

/* Heads of q and then of k; those that are absent count none. */
static __host__ __device__ int32_t heads_of(const fv_rope_rows *rows) { return rows->data ? rows->num_heads : 0; }

static __global__ void __launch_bounds__(WARPS * 32, 1) rope(const __grid_constant__ fv_rope_params params)
{
    overlap_begin();
    const int32_t q_heads = heads_of(&params.q), heads = q_heads + heads_of(&params.k);
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t token = (int32_t)(at / heads), head = (int32_t)(at % heads);
    if (token >= fv_rope_tokens(&params)) return;
    const bool is_query = head < q_heads;
    rotate_rows(is_query ? &params.q : &params.k, &params, token, is_query ? head : head - q_heads);
}

extern "C" fv_status fv_cuda_rope(const fv_launch *launch, const fv_rope_params *params)
{
    const int64_t num_rows = (int64_t)params->num_tokens * (heads_of(&params->q) + heads_of(&params->k));
    return fv_cuda_launch_overlapped(launch, "rope", rope, dim3(fv_cuda_blocks(num_rows, WARPS)), WARPS * 32, 0,
                                     *params);
}

/* A head of q to its second place, by the warp that rotated it. */
static __device__ __forceinline__ void copy_rotated(const fv_rope_kv_write_params *params, int32_t token, int32_t head)
{
    const fv_rope_rows *q = &params->rope.q, *copy = &params->q_copy;
    if (!copy->data) return;
    __syncwarp(); /* lanes read what others of the warp rotated */
    copy_bytes((char *)copy->data + token * copy->token_stride + head * copy->head_stride,
               (const char *)q->data + token * q->token_stride + head * q->head_stride,
               (int64_t)params->rope.rope_dim * fv_element_bytes(params->rope.dtype));
}

/* Warps of a token: the heads of q, and for each KV head one for K and one for V. */
static __global__ void __launch_bounds__(WARPS * 32, 1)
    rope_kv_write(const __grid_constant__ fv_rope_kv_write_params params)
{
    overlap_begin();
    const int32_t q_heads = heads_of(&params.rope.q);
    const int32_t rows_of_token = q_heads + 2 * params.write.cache.num_kv_heads;
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t token = (int32_t)(at / rows_of_token), row = (int32_t)(at % rows_of_token);
    if (token >= fv_rope_tokens(&params.rope)) return;
    if (row < q_heads) {
        rotate_rows(&params.rope.q, &params.rope, token, row);
        copy_rotated(&params, token, row);
        return;
    }
    const int32_t head = (row - q_heads) / 2;
    const bool is_value = (row - q_heads) % 2 != 0;
    if (!is_value) {
        rotate_rows(&params.rope.k, &params.rope, token, head);
        __syncwarp(); /* lanes read what others of the warp rotated */
    }
    int64_t block, slot;
    if (!find_slot(&block, &slot, &params.write, token)) return;
    write_head(&params.write, token, head, is_value, block, slot);
}

extern "C" fv_status fv_cuda_rope_kv_write(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    const int32_t rows_of_token = heads_of(&params->rope.q) + 2 * params->write.cache.num_kv_heads;
    const int64_t num_rows = (int64_t)params->rope.num_tokens * rows_of_token;
    return fv_cuda_launch_overlapped(launch, "rope_kv_write", rope_kv_write, dim3(fv_cuda_blocks(num_rows, WARPS)),
                                     WARPS * 32, 0, *params);
}
