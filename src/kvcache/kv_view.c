/* Tensor views, and the named cache layouts as strides.
 *
 *   nb_2_bs_h_d   block | K: slot head d ... | V: slot head d ... |
 *   x_packed      K block: head | d/x | slot | x        V block: head | d | slot
 *   shuffled      K block: head | d/x | slot | x        V block: head | slot/x | d | x      x = 16 bytes
 */
#include <stdint.h>

#include "core/compiler.h"
#include "core/error.h"
#include "kvcache/kv_address.h"
#include "kvcache/latent_entry.h"

static const char *const layout_names[] = {"strided",    "nb_2_bs_h_d", "2_nb_bs_h_d", "x_packed",     "shuffled",
                                           "packed_nhd", "packed_hnd",  "latent",      "latent_fp8_ds"};

const char *fv_kv_layout_name(fv_kv_layout layout)
{
    const int32_t index = (int32_t)layout;
    return index >= 0 && index < FV_ARRAY_LEN(layout_names) ? layout_names[index] : "unknown";
}

fv_tensor fv_tensor_1d(void *data, fv_dtype dtype, int64_t d0)
{
    const int64_t element = (int64_t)fv_dtype_bytes(dtype);
    return (fv_tensor){data, dtype, 1, {d0}, {element}};
}

fv_tensor fv_tensor_2d(void *data, fv_dtype dtype, int64_t d0, int64_t d1)
{
    const int64_t element = (int64_t)fv_dtype_bytes(dtype);
    return (fv_tensor){data, dtype, 2, {d0, d1}, {d1 * element, element}};
}

fv_tensor fv_tensor_3d(void *data, fv_dtype dtype, int64_t d0, int64_t d1, int64_t d2)
{
    const int64_t element = (int64_t)fv_dtype_bytes(dtype);
    return (fv_tensor){data, dtype, 3, {d0, d1, d2}, {d1 * d2 * element, d2 * element, element}};
}

static fv_status check_sizes(fv_kv_layout layout, fv_dtype dtype, int64_t num_blocks, int32_t block_size,
                             int32_t num_kv_heads, int32_t head_size)
{
    if (fv_dtype_bytes(dtype) == 0) {
        return fv_fail(FV_ERR_INVALID, "the KV cache has dtype %d; accepted: the values of fv_dtype but 0 (none)",
                       (int)dtype);
    }
    if (layout <= FV_KV_LAYOUT_STRIDED || layout > FV_KV_LAYOUT_LATENT_FP8_DS) {
        return fv_fail(FV_ERR_INVALID, "layout %s (%d) has no strides of its own; fill in the planes by hand",
                       fv_kv_layout_name(layout), (int)layout);
    }
    if (num_blocks < 1 || block_size < 1 || num_kv_heads < 1 || head_size < 1) {
        return fv_fail(FV_ERR_INVALID,
                       "KV cache of %lld blocks x %d slots x %d heads x %d elements; accepted: 1 or more of each",
                       (long long)num_blocks, block_size, num_kv_heads, head_size);
    }
    const int32_t x = 16 / (int32_t)fv_dtype_bytes(dtype);
    const int32_t chunked = layout == FV_KV_LAYOUT_X_PACKED || layout == FV_KV_LAYOUT_SHUFFLED;
    if (chunked && head_size % x != 0) {
        return fv_fail(FV_ERR_INVALID, "head_size %d with layout %s; accepted: multiples of %d", head_size,
                       fv_kv_layout_name(layout), x);
    }
    if (layout == FV_KV_LAYOUT_SHUFFLED && block_size % x != 0) {
        return fv_fail(FV_ERR_INVALID, "block_size %d with layout shuffled; accepted: multiples of %d", block_size, x);
    }
    const int32_t latent = layout == FV_KV_LAYOUT_LATENT || layout == FV_KV_LAYOUT_LATENT_FP8_DS;
    if (latent && (num_kv_heads != 1 || head_size <= FV_DS_ROPE)) {
        return fv_fail(FV_ERR_INVALID, "latent cache of %d heads of %d; accepted: 1 head, more than %d elements",
                       num_kv_heads, head_size, FV_DS_ROPE);
    }
    if (layout == FV_KV_LAYOUT_LATENT_FP8_DS && (dtype != FV_DTYPE_F8_E4M3 || head_size != FV_DS_LATENT + FV_DS_ROPE)) {
        return fv_fail(FV_ERR_INVALID, "layout latent_fp8_ds with %s entries of %d; accepted: fp8_e4m3 of %d",
                       fv_dtype_name(dtype), head_size, FV_DS_LATENT + FV_DS_ROPE);
    }
    return FV_OK;
}

/* Bytes of K and V of one block; 0 when they do not fit in 62 bits. */
static int64_t block_bytes(fv_kv_layout layout, fv_dtype dtype, int32_t block_size, int32_t num_kv_heads,
                           int32_t head_size)
{
    if (layout == FV_KV_LAYOUT_LATENT_FP8_DS) return (int64_t)block_size * FV_DS_ENTRY_BYTES;
    const int64_t planes = layout == FV_KV_LAYOUT_LATENT ? 1 : 2;
    int64_t bytes = (int64_t)fv_dtype_bytes(dtype) * planes;
    if (__builtin_mul_overflow(bytes, block_size, &bytes) || __builtin_mul_overflow(bytes, num_kv_heads, &bytes) ||
        __builtin_mul_overflow(bytes, head_size, &bytes)) {
        return 0;
    }
    return bytes;
}

fv_status fv_kv_view_bytes(size_t *bytes, fv_kv_layout layout, fv_dtype dtype, int64_t num_blocks, int32_t block_size,
                           int32_t num_kv_heads, int32_t head_size)
{
    if (!bytes) return fv_fail(FV_ERR_INVALID, "bytes is NULL");
    const fv_status status = check_sizes(layout, dtype, num_blocks, block_size, num_kv_heads, head_size);
    if (status != FV_OK) return status;
    const int64_t block = block_bytes(layout, dtype, block_size, num_kv_heads, head_size);
    int64_t all;
    if (block == 0 || __builtin_mul_overflow(block, num_blocks, &all)) {
        return fv_fail(FV_ERR_INVALID, "a KV cache of %lld blocks x %d slots x %d heads x %d is beyond 2^63 bytes",
                       (long long)num_blocks, block_size, num_kv_heads, head_size);
    }
    *bytes = (size_t)all;
    return FV_OK;
}

fv_status fv_kv_view_init(fv_kv_view *view, void *data, fv_kv_layout layout, fv_dtype dtype, int64_t num_blocks,
                          int32_t block_size, int32_t num_kv_heads, int32_t head_size)
{
    if (!view) return fv_fail(FV_ERR_INVALID, "view is NULL");
    size_t total;
    const fv_status status = fv_kv_view_bytes(&total, layout, dtype, num_blocks, block_size, num_kv_heads, head_size);
    if (status != FV_OK) return status;

    const int64_t element = (int64_t)fv_dtype_bytes(dtype);
    const int64_t row = head_size * element;     /* one token of one head */
    const int64_t rows = row * num_kv_heads;     /* one token */
    const int64_t plane = rows * block_size;     /* K of a block */
    const int64_t head_plane = row * block_size; /* K of one head of a block */
    const int32_t x = (int32_t)(16 / element);
    char *base = data;
    fv_kv_plane k = {.data = base, .element_stride = element}, v = k;
    switch (layout) {
    case FV_KV_LAYOUT_NB_2_BS_H_D:
    case FV_KV_LAYOUT_2_NB_BS_H_D: {
        const int32_t interleaved = layout == FV_KV_LAYOUT_NB_2_BS_H_D;
        k.block_stride = interleaved ? 2 * plane : plane;
        k.slot_stride = rows;
        k.head_stride = row;
        v = k;
        v.data = base + (interleaved ? plane : plane * num_blocks);
        break;
    }
    case FV_KV_LAYOUT_X_PACKED:
    case FV_KV_LAYOUT_SHUFFLED:
        k.block_stride = plane;
        k.head_stride = head_plane;
        k.slot_stride = 16;
        k.element_chunk = x;
        k.element_chunk_stride = 16 * (int64_t)block_size;
        v.data = base + plane * num_blocks;
        v.block_stride = plane;
        v.head_stride = head_plane;
        v.slot_stride = element;
        if (layout == FV_KV_LAYOUT_X_PACKED) {
            v.element_stride = element * block_size;
        } else {
            v.element_stride = 16;
            v.slot_chunk = x;
            v.slot_chunk_stride = 16 * (int64_t)head_size;
        }
        break;
    case FV_KV_LAYOUT_PACKED_NHD:
    case FV_KV_LAYOUT_PACKED_HND: {
        const int32_t nhd = layout == FV_KV_LAYOUT_PACKED_NHD;
        k.block_stride = 2 * plane;
        k.slot_stride = nhd ? 2 * rows : 2 * row;
        k.head_stride = nhd ? 2 * row : 2 * head_plane;
        v = k;
        v.data = base + row;
        break;
    }
    case FV_KV_LAYOUT_LATENT:
    case FV_KV_LAYOUT_LATENT_FP8_DS:
        k.slot_stride = layout == FV_KV_LAYOUT_LATENT ? row : FV_DS_ENTRY_BYTES;
        k.block_stride = k.slot_stride * block_size;
        v = k;
        break;
    case FV_KV_LAYOUT_STRIDED: break; /* refused above */
    }
    *view = (fv_kv_view){
        .struct_size = sizeof(*view),
        .layout = layout,
        .dtype = dtype,
        .block_size = block_size,
        .num_blocks = num_blocks,
        .num_kv_heads = num_kv_heads,
        .head_size = head_size,
        .v_head_size = layout >= FV_KV_LAYOUT_LATENT ? head_size - FV_DS_ROPE : head_size,
        .k = k,
        .v = v,
    };
    return FV_OK;
}
