/* kv_copy: whole blocks from one cache view to another of the same shape on the same device, with their
 * scale planes. Copies between a device and the host are made of its copy functions (ops/kv_copy.c). */
#ifndef FV_OPS_KV_COPY_H
#define FV_OPS_KV_COPY_H

#include "core/compiler.h"
#include "core/device.h"
#include "fovea/view.h"

typedef struct fv_kv_copy_params {
    fv_kv_view dst; /* may be the same cache as src */
    fv_kv_view src;
    const int64_t *dst_blocks; /* [num_pairs]; a pair with a block outside its cache is skipped. No block is the */
    const int64_t *src_blocks; /* destination of two pairs, or of one and the source of another */
    int32_t num_pairs;
} fv_kv_copy_params;

/* Is pair `pair` inside both caches? */
FV_SHARED_INLINE int32_t fv_kv_copy_pair_valid(const fv_kv_copy_params *params, int64_t pair)
{
    const int64_t dst = params->dst_blocks[pair], src = params->src_blocks[pair];
    return dst >= 0 && dst < params->dst.num_blocks && src >= 0 && src < params->src.num_blocks;
}

typedef fv_status (*fv_kv_copy_fn)(const fv_launch *launch, const fv_kv_copy_params *params);

#endif
