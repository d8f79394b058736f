/* kv_gather: a warp for each dense row of a head, K and V. The sequence of a row is found by binary search
 * over out_start. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"
#include "kvcache/kv_address.h"
#include "kvcache/latent_entry.h"

#define WARPS 4

static __device__ float ds_element(const char *entry, int32_t d)
{
    if (d < FV_DS_LATENT) {
        const float scale = *(const float *)(entry + FV_DS_SCALES_AT + d / FV_DS_TILE * 4);
        return scale * fv_element_load(entry + d, FV_DTYPE_F8_E4M3);
    }
    return fv_element_load(entry + FV_DS_ROPE_AT + (d - FV_DS_LATENT) * 2, FV_DTYPE_BF16);
}

static __device__ float load_scale(const fv_scale_plane *plane, int64_t block, int64_t slot, int32_t head)
{
    if (!plane->data) return 1.0f;
    const uint8_t *from = (const uint8_t *)fv_scale_address(plane, block, slot, head);
    return __uint_as_float((uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 |
                           (uint32_t)from[3] << 24);
}

static __device__ __forceinline__ float cache_element(const fv_kv_view *cache, const fv_kv_plane *plane,
                                                      const char *row, int32_t d)
{
    if (cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS) return ds_element(row, d);
    return fv_element_load(row + fv_kv_element_offset(plane, d), cache->dtype);
}

/* `rotated` is the local index of a key whose end is rotated; -1: a value, or nothing to rotate. */
static __device__ __forceinline__ void gather_row(char *to, const fv_kv_gather_params *params, const fv_kv_plane *plane,
                                                  const fv_scale_plane *scales, const float *head_scales, int32_t size,
                                                  int64_t block, int64_t slot, int32_t head, int32_t rotated)
{
    const fv_kv_view *cache = &params->cache;
    const fv_key_rotation *rotation = &params->rotation;
    const int32_t bytes = fv_element_bytes(params->dst_dtype);
    const char *row = (const char *)plane->data + fv_kv_row_offset(plane, block, head, slot);
    const float scale = cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS
                            ? 1.0f
                            : fv_scale_of_head(head_scales, params->num_kv_scales, head) *
                                  load_scale(scales, block, slot, head);
    const int32_t half = rotation->rope_dim / 2, plain = rotated < 0 ? size : size - 2 * half;
    for (int32_t d = threadIdx.x % 32; d < plain; d += 32)
        fv_element_store(to + (int64_t)d * bytes, scale * cache_element(cache, plane, row, d), params->dst_dtype);
    if (rotated < 0) return;
    const int64_t at = fv_key_position(&params->context_parallel, rotated) * half;
    for (int32_t i = threadIdx.x % 32; i < half; i += 32) {
        const float low = scale * cache_element(cache, plane, row, plain + i);
        const float high = scale * cache_element(cache, plane, row, plain + half + i);
        const float c = rotation->cos[at + i], s = rotation->sin[at + i];
        fv_element_store(to + (int64_t)(plain + i) * bytes, low * c - high * s, params->dst_dtype);
        fv_element_store(to + (int64_t)(plain + half + i) * bytes, high * c + low * s, params->dst_dtype);
    }
}

static __global__ void __launch_bounds__(WARPS * 32, 1) kv_gather(const __grid_constant__ fv_kv_gather_params params)
{
    const fv_kv_view *cache = &params.cache;
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int32_t row = (int32_t)(at / cache->num_kv_heads), head = (int32_t)(at % cache->num_kv_heads);
    if (row >= params.num_rows) return;
    const int32_t seq = fv_kv_gather_seq(&params, row);
    const int32_t key = params.key_start[seq] + row - params.out_start[seq];
    const int64_t block = params.block_table[seq * params.block_table_stride + key / cache->block_size];
    const int64_t slot = key % cache->block_size;
    if (params.k) {
        char *to = (char *)params.k + row * params.k_token_stride + head * params.k_head_stride;
        gather_row(to, &params, &cache->k, &cache->k_scales, params.k_scale, cache->head_size, block, slot, head,
                   params.rotation.cos ? key : -1);
    }
    if (params.v) {
        const bool is_latent = fv_kv_layout_is_latent(cache->layout);
        char *to = (char *)params.v + row * params.v_token_stride + head * params.v_head_stride;
        gather_row(to, &params, is_latent ? &cache->k : &cache->v, is_latent ? &cache->k_scales : &cache->v_scales,
                   is_latent ? params.k_scale : params.v_scale, cache->v_head_size, block, slot, head, -1);
    }
}

extern "C" fv_status fv_cuda_kv_gather(const fv_launch *launch, const fv_kv_gather_params *params)
{
    const int64_t num_rows = (int64_t)params->num_rows * params->cache.num_kv_heads;
    return fv_cuda_launch(launch, "kv_gather", kv_gather, dim3(fv_cuda_blocks(num_rows, WARPS)), WARPS * 32, 0,
                          *params);
}
