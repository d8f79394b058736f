/* A cache whose per-token-head scales lie inside the block: one entry for each slot and head,
 *
 *   | K: row bytes | scale of K | V: row bytes | scale of V |        row = head_size rounded up to 4
 */
#include "core/compiler.h"
#include "core/error.h"
#include "fovea/view.h"

#define SCALE_BYTES 4

static fv_status check_sizes(fv_kv_layout order, fv_dtype dtype, int64_t num_blocks, int32_t block_size,
                             int32_t num_kv_heads, int32_t head_size)
{
    if (order != FV_KV_LAYOUT_PACKED_NHD && order != FV_KV_LAYOUT_PACKED_HND) {
        return fv_fail(FV_ERR_INVALID, "entries with their scales in the order %s; accepted: packed_nhd, packed_hnd",
                       fv_kv_layout_name(order));
    }
    if (dtype != FV_DTYPE_I8 && dtype != FV_DTYPE_F8_E4M3 && dtype != FV_DTYPE_F8_E5M2) {
        return fv_fail(FV_ERR_INVALID, "entries of %s with their scales; accepted: int8, fp8_e4m3, fp8_e5m2",
                       fv_dtype_name(dtype));
    }
    if (num_blocks < 1 || block_size < 1 || num_kv_heads < 1 || head_size < 1) {
        return fv_fail(FV_ERR_INVALID,
                       "KV cache of %lld blocks x %d slots x %d heads x %d elements; accepted: 1 or more of each",
                       (long long)num_blocks, block_size, num_kv_heads, head_size);
    }
    return FV_OK;
}

static int64_t row_bytes(int32_t head_size) { return fv_round_up(head_size, SCALE_BYTES); }

static int64_t entry_bytes(int32_t head_size) { return 2 * (row_bytes(head_size) + SCALE_BYTES); }

fv_status fv_kv_view_inline_scales_bytes(size_t *bytes, fv_kv_layout order, fv_dtype dtype, int64_t num_blocks,
                                         int32_t block_size, int32_t num_kv_heads, int32_t head_size)
{
    if (!bytes) return fv_fail(FV_ERR_INVALID, "bytes is NULL");
    const fv_status status = check_sizes(order, dtype, num_blocks, block_size, num_kv_heads, head_size);
    if (status != FV_OK) return status;
    int64_t all = entry_bytes(head_size);
    if (__builtin_mul_overflow(all, block_size, &all) || __builtin_mul_overflow(all, num_kv_heads, &all) ||
        __builtin_mul_overflow(all, num_blocks, &all)) {
        return fv_fail(FV_ERR_INVALID, "a KV cache of %lld blocks x %d slots x %d heads x %d is beyond 2^63 bytes",
                       (long long)num_blocks, block_size, num_kv_heads, head_size);
    }
    *bytes = (size_t)all;
    return FV_OK;
}

fv_status fv_kv_view_init_inline_scales(fv_kv_view *view, void *data, fv_kv_layout order, fv_dtype dtype,
                                        int64_t num_blocks, int32_t block_size, int32_t num_kv_heads, int32_t head_size)
{
    if (!view) return fv_fail(FV_ERR_INVALID, "view is NULL");
    size_t total;
    const fv_status status = fv_kv_view_inline_scales_bytes(&total, order, dtype, num_blocks, block_size, num_kv_heads,
                                                            head_size);
    if (status != FV_OK) return status;
    const int64_t entry = entry_bytes(head_size), row = row_bytes(head_size);
    const int32_t is_nhd = order == FV_KV_LAYOUT_PACKED_NHD;
    const fv_kv_plane k = {
        .data = data,
        .block_stride = entry * block_size * num_kv_heads,
        .head_stride = is_nhd ? entry : entry * block_size,
        .slot_stride = is_nhd ? entry * num_kv_heads : entry,
        .element_stride = 1,
    };
    const fv_scale_plane k_scales = {
        .data = (char *)data + row,
        .block_stride = k.block_stride,
        .slot_stride = k.slot_stride,
        .head_stride = k.head_stride,
    };
    *view = (fv_kv_view){
        .struct_size = sizeof(*view),
        .layout = FV_KV_LAYOUT_STRIDED,
        .dtype = dtype,
        .block_size = block_size,
        .num_blocks = num_blocks,
        .num_kv_heads = num_kv_heads,
        .head_size = head_size,
        .v_head_size = head_size,
        .k = k,
        .v = k,
        .k_scales = k_scales,
        .v_scales = k_scales,
    };
    view->v.data = (char *)data + entry / 2;
    view->v_scales.data = (char *)data + entry / 2 + row;
    return FV_OK;
}
