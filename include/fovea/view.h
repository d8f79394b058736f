/* Views: tensors and the paged KV cache as pointers with byte strides. A view never owns memory.
 * Strides are signed 64-bit counts of BYTES, so that any order of dimensions, any padding and
 * caches above 2 GiB are expressed the same way. Pointers and strides on devices other than the CPU are multiples
 * of the element (entries of FV_KV_LAYOUT_LATENT_FP8_DS: of 4 bytes), else FV_ERR_INVALID; block copies take any. */
#ifndef FOVEA_VIEW_H
#define FOVEA_VIEW_H

#include "fovea/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FV_MAX_DIMS 4

/* A tensor of up to four dimensions. data == NULL means "absent" where that is allowed. */
typedef struct fv_tensor {
    void *data;
    fv_dtype dtype;
    int32_t num_dims;
    int64_t shape[FV_MAX_DIMS];
    int64_t stride_bytes[FV_MAX_DIMS];
} fv_tensor;

/* A dense row-major view of shape [d0], [d0, d1] or [d0, d1, d2]. */
FV_API fv_tensor fv_tensor_1d(void *data, fv_dtype dtype, int64_t d0);
FV_API fv_tensor fv_tensor_2d(void *data, fv_dtype dtype, int64_t d0, int64_t d1);
FV_API fv_tensor fv_tensor_3d(void *data, fv_dtype dtype, int64_t d0, int64_t d1, int64_t d2);

/* How K and V lie in a cache block. nb = num_blocks, bs = block_size, x = 16 bytes / element. */
typedef enum fv_kv_layout {
    FV_KV_LAYOUT_STRIDED = 0,       /* whatever the strides of the planes say */
    FV_KV_LAYOUT_NB_2_BS_H_D = 1,   /* [nb, 2, bs, Hkv, D]: TRITON_ATTN */
    FV_KV_LAYOUT_2_NB_BS_H_D = 2,   /* [2, nb, bs, Hkv, D]: ROCM_AITER_UNIFIED_ATTN */
    FV_KV_LAYOUT_X_PACKED = 3,      /* K [nb, Hkv, D/x, bs, x], V [nb, Hkv, D, bs]: ROCM_ATTN */
    FV_KV_LAYOUT_SHUFFLED = 4,      /* K [nb, Hkv, D/x, bs, x], V [nb, Hkv, bs/x, D, x]: ROCM_AITER_FA */
    FV_KV_LAYOUT_PACKED_NHD = 5,    /* [nb, bs, Hkv, 2D], K and V side by side: vLLM's NHD order */
    FV_KV_LAYOUT_PACKED_HND = 6,    /* [nb, Hkv, bs, 2D]: vLLM's HND order */
    FV_KV_LAYOUT_LATENT = 7,        /* [nb, bs, kv_lora_rank + rope]: MLA */
    FV_KV_LAYOUT_LATENT_FP8_DS = 8, /* [nb, bs, 656 bytes]: 512 e4m3, 4 fp32 scales, 64 bf16 */
} fv_kv_layout;

/* "nb_2_bs_h_d" and so on; "unknown" for a value that is no layout. */
FV_API const char *fv_kv_layout_name(fv_kv_layout layout);

/* Where the elements of K, or of V, are. Element d of head h at slot s of block b is at
 *
 *   data + b * block_stride + h * head_stride
 *        + (s / slot_chunk)    * slot_chunk_stride    + (s % slot_chunk)    * slot_stride
 *        + (d / element_chunk) * element_chunk_stride + (d % element_chunk) * element_stride
 *
 * where a chunk of 0 means "not cut": s * slot_stride, d * element_stride. All strides in bytes. */
typedef struct fv_kv_plane {
    void *data;
    int64_t block_stride;
    int64_t head_stride;
    int64_t slot_stride;
    int64_t element_stride;
    int64_t slot_chunk_stride;
    int64_t element_chunk_stride;
    int32_t slot_chunk;
    int32_t element_chunk;
} fv_kv_plane;

/* Where fp32 scales of cache entries are: one for each (block, slot, head), byte strides. Readers
 * multiply by it; kv_write computes it and stores it here, so for a writer no stride may be 0. May
 * point into the cache block itself, at any alignment. data == NULL: none. */
typedef struct fv_scale_plane {
    void *data;
    int64_t block_stride;
    int64_t slot_stride;
    int64_t head_stride;
} fv_scale_plane;

/* A paged KV cache of one layer. Block 0 is the null block, for table entries in which no key is seen: padding,
 * and what a window has passed. There its contents are never used. A key that is seen may not lie in it:
 * FV_ERR_INVALID where the host can read the block table, else it is read as any other. For MLA,
 * num_kv_heads is 1, head_size is kv_lora_rank + rope, v_head_size is kv_lora_rank and `v` repeats `k`, whose
 * first v_head_size elements are the values. */
typedef struct fv_kv_view {
    uint32_t struct_size; /* sizeof(fv_kv_view) */
    fv_kv_layout layout;
    fv_dtype dtype;
    int32_t block_size; /* tokens of a block; any size from 1, no power of two needed */
    int64_t num_blocks;
    int32_t num_kv_heads;
    int32_t head_size;
    int32_t v_head_size;
    fv_kv_plane k;
    fv_kv_plane v;
    fv_scale_plane k_scales; /* per-token-head scales; see fv_layer for the others */
    fv_scale_plane v_scales;
} fv_kv_view;

/* What a layout needs: bytes of one layer's cache. FV_ERR_INVALID on sizes that the layout does not
 * take (x-packed and shuffled want head_size, shuffled also block_size, as multiples of x). */
FV_API fv_status fv_kv_view_bytes(size_t *bytes, fv_kv_layout layout, fv_dtype dtype, int64_t num_blocks,
                                  int32_t block_size, int32_t num_kv_heads, int32_t head_size);

/* Fills `view` for dense memory at `data` in the given layout; head sizes of K and V are equal
 * (LATENT: head_size is the whole entry and v_head_size = head_size - 64; LATENT_FP8_DS: head_size 576 and dtype
 * fp8_e4m3, of entries of 656 bytes). Any named layout. */
FV_API fv_status fv_kv_view_init(fv_kv_view *view, void *data, fv_kv_layout layout, fv_dtype dtype, int64_t num_blocks,
                                 int32_t block_size, int32_t num_kv_heads, int32_t head_size);

/* The same with the per-token-head scales inside the block, as vLLM lays them: the entry of one slot
 * and head is
 *
 *   K, head_size bytes | scale of K, fp32 | V, head_size bytes | scale of V, fp32
 *
 * with head_size rounded up to a multiple of 4. `order` says how entries follow each other:
 * FV_KV_LAYOUT_PACKED_NHD (slot, head) or FV_KV_LAYOUT_PACKED_HND (head, slot). dtype int8, fp8_e4m3 or
 * fp8_e5m2. The view's layout is FV_KV_LAYOUT_STRIDED, its planes and scale planes are all set. */
FV_API fv_status fv_kv_view_inline_scales_bytes(size_t *bytes, fv_kv_layout order, fv_dtype dtype, int64_t num_blocks,
                                                int32_t block_size, int32_t num_kv_heads, int32_t head_size);
FV_API fv_status fv_kv_view_init_inline_scales(fv_kv_view *view, void *data, fv_kv_layout order, fv_dtype dtype,
                                               int64_t num_blocks, int32_t block_size, int32_t num_kv_heads,
                                               int32_t head_size);

#ifdef __cplusplus
}
#endif
#endif
