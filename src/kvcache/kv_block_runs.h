/* A cache block as runs of bytes that lie together in two views of the same shape: what a copy of the
 * block from one to the other has to move. The layouts that keep a block together give one run, those
 * with K and V apart give two, anything else as many as its strides cut it into.
 *
 *   packed_nhd   K|V K|V K|V ...    parts K and V lie side by side: one part, then one run
 *   2_nb_bs_h_d  K ...   V ...      two parts of one run
 */
#ifndef FV_KVCACHE_KV_BLOCK_RUNS_H
#define FV_KVCACHE_KV_BLOCK_RUNS_H

#include "core/compiler.h"
#include "fovea/view.h"

enum {
    FV_KV_MAX_AXES = 5,   /* head, slot chunk, slot, element chunk, element */
    FV_KV_MAX_PARTS = 10, /* K and V, whose slots and elements may each have a rest, and the scales */
};

typedef struct fv_kv_axis {
    int64_t count;
    int64_t dst_stride;
    int64_t src_stride;
} fv_kv_axis;

/* num_runs runs of run_bytes, at every combination of the axes. */
typedef struct fv_kv_part {
    char *dst; /* of block 0 */
    const char *src;
    int64_t dst_block_stride;
    int64_t src_block_stride;
    int64_t run_bytes;
    int64_t num_runs;
    fv_kv_axis axes[FV_KV_MAX_AXES];
    int32_t num_axes;
} fv_kv_part;

typedef struct fv_kv_block_runs {
    fv_kv_part parts[FV_KV_MAX_PARTS];
    int32_t num_parts;
} fv_kv_block_runs;

/* The runs of `dst` and `src`, which agree in layout, dtype, sizes, chunks and in having scale planes
 * (fv_kv_views_match). Host arithmetic on the views only. */
void fv_kv_block_runs_init(fv_kv_block_runs *runs, const fv_kv_view *dst, const fv_kv_view *src);

/* FV_OK, or FV_ERR_INVALID naming what differs. */
fv_status fv_kv_views_match(const fv_kv_view *dst, const fv_kv_view *src);

/* Where run `run` of [0, num_runs) is in block `dst_block` and comes from in block `src_block`. */
FV_SHARED_INLINE void fv_kv_part_run(char **dst, const char **src, const fv_kv_part *part, int64_t dst_block,
                                     int64_t src_block, int64_t run)
{
    int64_t to = dst_block * part->dst_block_stride, from = src_block * part->src_block_stride;
    for (int32_t i = part->num_axes - 1; i >= 0; i--) {
        const fv_kv_axis *axis = &part->axes[i];
        const int64_t at = run % axis->count;
        run /= axis->count;
        to += at * axis->dst_stride;
        from += at * axis->src_stride;
    }
    *dst = part->dst + to;
    *src = part->src + from;
}

#endif
