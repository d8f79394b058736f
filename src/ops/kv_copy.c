/* fv_kv_copy and the swap: blocks within a device by a kernel, between a device and the host by the
 * device's copies, run by run. */
#include "core/error.h"
#include "fovea/ops.h"
#include "kvcache/kv_block_runs.h"
#include "ops/ops_check.h"

static fv_status check_views(const fv_kv_view *dst, const fv_kv_view *src, const int64_t *dst_blocks,
                             const int64_t *src_blocks, int32_t num_pairs)
{
    fv_status status = fv_ops_check_cache(dst);
    if (status == FV_OK) status = fv_ops_check_cache(src);
    if (status == FV_OK) status = fv_kv_views_match(dst, src);
    if (status != FV_OK) return status;
    if (num_pairs < 0) return fv_fail(FV_ERR_INVALID, "%d pairs of blocks; accepted: 0 or more", num_pairs);
    if (num_pairs > 0 && (!dst_blocks || !src_blocks)) {
        return fv_fail(FV_ERR_INVALID, "dst_blocks or src_blocks is NULL");
    }
    return FV_OK;
}

/* Blocks that the host can read. */
static fv_status check_blocks(const char *name, const int64_t *blocks, int32_t num_pairs, int64_t num_blocks)
{
    for (int32_t i = 0; i < num_pairs; i++) {
        if (blocks[i] >= 0 && blocks[i] < num_blocks) continue;
        return fv_fail(FV_ERR_INVALID, "%s[%d] is %lld; accepted: 0 to %lld", name, i, (long long)blocks[i],
                       (long long)num_blocks - 1);
    }
    return FV_OK;
}

static fv_status check_pairs(const fv_kv_view *dst, const fv_kv_view *src, const int64_t *dst_blocks,
                             const int64_t *src_blocks, int32_t num_pairs)
{
    const fv_status status = check_blocks("dst_blocks", dst_blocks, num_pairs, dst->num_blocks);
    return status == FV_OK ? check_blocks("src_blocks", src_blocks, num_pairs, src->num_blocks) : status;
}

fv_status fv_kv_copy(fv_device *device, const fv_kv_view *dst, const int64_t *dst_blocks, const fv_kv_view *src,
                     const int64_t *src_blocks, int32_t num_pairs, fv_stream stream)
{
    fv_status status = fv_ops_check_device(device);
    if (status == FV_OK) status = check_views(dst, src, dst_blocks, src_blocks, num_pairs);
    if (status == FV_OK && device->host_is_device) status = check_pairs(dst, src, dst_blocks, src_blocks, num_pairs);
    if (status == FV_OK) status = fv_ops_check_kernel(device, "kv_copy", fv_ops_kernels(device)->kv_copy != NULL);
    if (status != FV_OK) return status;
    const fv_kv_copy_params params = {*dst, *src, dst_blocks, src_blocks, num_pairs};
    const fv_launch launch = fv_ops_launch(device, stream);
    return fv_ops_kernels(device)->kv_copy(&launch, &params);
}

/* A device's copy function, in or out. */
typedef fv_status (*copy_fn)(fv_device *device, void *dst, const void *src, size_t bytes, fv_stream stream);

static fv_status swap(fv_device *device, const fv_kv_view *dst, const int64_t *dst_blocks, const fv_kv_view *src,
                      const int64_t *src_blocks, int32_t num_pairs, copy_fn copy, fv_stream stream)
{
    fv_status status = fv_ops_check_device(device);
    if (status == FV_OK) status = check_views(dst, src, dst_blocks, src_blocks, num_pairs);
    if (status == FV_OK) status = check_pairs(dst, src, dst_blocks, src_blocks, num_pairs);
    if (status != FV_OK) return status;
    fv_kv_block_runs runs;
    fv_kv_block_runs_init(&runs, dst, src);
    for (int32_t pair = 0; pair < num_pairs; pair++) {
        for (int32_t i = 0; i < runs.num_parts; i++) {
            const fv_kv_part *part = &runs.parts[i];
            for (int64_t run = 0; run < part->num_runs; run++) {
                char *to;
                const char *from;
                fv_kv_part_run(&to, &from, part, dst_blocks[pair], src_blocks[pair], run);
                status = copy(device, to, from, (size_t)part->run_bytes, stream);
                if (status != FV_OK) return status;
            }
        }
    }
    return FV_OK;
}

fv_status fv_kv_copy_in(fv_device *device, const fv_kv_view *device_dst, const int64_t *dst_blocks,
                        const fv_kv_view *host_src, const int64_t *src_blocks, int32_t num_pairs, fv_stream stream)
{
    return swap(device, device_dst, dst_blocks, host_src, src_blocks, num_pairs, fv_device_copy_in, stream);
}

fv_status fv_kv_copy_out(fv_device *device, const fv_kv_view *host_dst, const int64_t *dst_blocks,
                         const fv_kv_view *device_src, const int64_t *src_blocks, int32_t num_pairs, fv_stream stream)
{
    return swap(device, host_dst, dst_blocks, device_src, src_blocks, num_pairs, fv_device_copy_out, stream);
}
