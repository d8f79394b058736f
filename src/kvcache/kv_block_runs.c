/* From the strides of two views to the runs that a block has in common. */
#include "kvcache/kv_block_runs.h"

#include "core/compiler.h"
#include "core/error.h"
#include "kvcache/kv_address.h"
#include "kvcache/latent_entry.h"

static void add_axis(fv_kv_part *part, int64_t count, int64_t dst_stride, int64_t src_stride)
{
    if (count > 1) part->axes[part->num_axes++] = (fv_kv_axis){count, dst_stride, src_stride};
}

static int32_t axis_continues_run(const fv_kv_part *part, const fv_kv_axis *axis)
{
    return axis->dst_stride == part->run_bytes && axis->src_stride == part->run_bytes;
}

/* Takes axes whose steps follow each other without a gap into the run. */
static void lengthen_run(fv_kv_part *part)
{
    for (int32_t i = 0; i < part->num_axes; i++) {
        if (!axis_continues_run(part, &part->axes[i])) continue;
        part->run_bytes *= part->axes[i].count;
        part->num_axes--;
        for (int32_t j = i; j < part->num_axes; j++) part->axes[j] = part->axes[j + 1];
        i = -1; /* a longer run may meet an axis that did not fit before */
    }
}

static int32_t same_axes(const fv_kv_part *a, const fv_kv_part *b)
{
    if (a->num_axes != b->num_axes || a->dst_block_stride != b->dst_block_stride ||
        a->src_block_stride != b->src_block_stride) {
        return 0;
    }
    for (int32_t i = 0; i < a->num_axes; i++) {
        if (a->axes[i].count != b->axes[i].count || a->axes[i].dst_stride != b->axes[i].dst_stride ||
            a->axes[i].src_stride != b->axes[i].src_stride) {
            return 0;
        }
    }
    return 1;
}

/* Do the runs of `b` begin where those of `a` end, in both views? */
static int32_t part_follows(const fv_kv_part *a, const fv_kv_part *b)
{
    return same_axes(a, b) && b->dst == a->dst + a->run_bytes && b->src == a->src + a->run_bytes;
}

/* Joins one pair of parts; 0 when there is none. */
static int32_t join_parts(fv_kv_block_runs *runs)
{
    for (int32_t i = 0; i < runs->num_parts; i++) {
        for (int32_t j = 0; j < runs->num_parts; j++) {
            if (i == j || !part_follows(&runs->parts[i], &runs->parts[j])) continue;
            runs->parts[i].run_bytes += runs->parts[j].run_bytes;
            lengthen_run(&runs->parts[i]);
            runs->parts[j] = runs->parts[--runs->num_parts];
            return 1;
        }
    }
    return 0;
}

/* One dimension of a plane, cut into chunks: whole chunks, or the rest after them. Moves the part to
 * where the piece begins and returns 0 where there is no such piece. */
static int32_t add_piece(fv_kv_part *part, int32_t is_rest, int32_t size, int32_t chunk, const int64_t stride[2],
                         const int64_t chunk_stride[2])
{
    if (chunk <= 0 || chunk >= size) { /* not cut */
        add_axis(part, size, stride[0], stride[1]);
        return !is_rest;
    }
    const int64_t num_chunks = size / chunk;
    if (!is_rest) {
        add_axis(part, num_chunks, chunk_stride[0], chunk_stride[1]);
        add_axis(part, chunk, stride[0], stride[1]);
        return 1;
    }
    part->dst += num_chunks * chunk_stride[0];
    part->src += num_chunks * chunk_stride[1];
    add_axis(part, size % chunk, stride[0], stride[1]);
    return size % chunk > 0;
}

static void add_plane(fv_kv_block_runs *runs, const fv_kv_view *view, const fv_kv_plane *dst, const fv_kv_plane *src,
                      int32_t size)
{
    const int64_t slot[2] = {dst->slot_stride, src->slot_stride};
    const int64_t slot_chunk[2] = {dst->slot_chunk_stride, src->slot_chunk_stride};
    const int64_t element[2] = {dst->element_stride, src->element_stride};
    const int64_t element_chunk[2] = {dst->element_chunk_stride, src->element_chunk_stride};
    for (int32_t rest = 0; rest < 4; rest++) { /* bit 0: of the slots, bit 1: of the elements */
        fv_kv_part part = {
            .dst = dst->data,
            .src = src->data,
            .dst_block_stride = dst->block_stride,
            .src_block_stride = src->block_stride,
            .run_bytes = (int64_t)fv_dtype_bytes(view->dtype),
        };
        add_axis(&part, view->num_kv_heads, dst->head_stride, src->head_stride);
        if (!add_piece(&part, rest & 1, view->block_size, dst->slot_chunk, slot, slot_chunk)) continue;
        if (!add_piece(&part, rest >> 1, size, dst->element_chunk, element, element_chunk)) continue;
        lengthen_run(&part);
        runs->parts[runs->num_parts++] = part;
    }
}

static void add_scales(fv_kv_block_runs *runs, const fv_kv_view *view, const fv_scale_plane *dst,
                       const fv_scale_plane *src)
{
    if (!dst->data) return;
    fv_kv_part part = {
        .dst = dst->data,
        .src = src->data,
        .dst_block_stride = dst->block_stride,
        .src_block_stride = src->block_stride,
        .run_bytes = sizeof(float),
    };
    add_axis(&part, view->num_kv_heads, dst->head_stride, src->head_stride);
    add_axis(&part, view->block_size, dst->slot_stride, src->slot_stride);
    lengthen_run(&part);
    runs->parts[runs->num_parts++] = part;
}

static void add_ds_entries(fv_kv_block_runs *runs, const fv_kv_view *dst, const fv_kv_view *src)
{
    fv_kv_part part = {
        .dst = dst->k.data,
        .src = src->k.data,
        .dst_block_stride = dst->k.block_stride,
        .src_block_stride = src->k.block_stride,
        .run_bytes = FV_DS_ENTRY_BYTES,
    };
    add_axis(&part, dst->block_size, dst->k.slot_stride, src->k.slot_stride);
    lengthen_run(&part);
    runs->parts[runs->num_parts++] = part;
}

void fv_kv_block_runs_init(fv_kv_block_runs *runs, const fv_kv_view *dst, const fv_kv_view *src)
{
    *runs = (fv_kv_block_runs){0};
    if (dst->layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
        add_ds_entries(runs, dst, src);
    } else {
        add_plane(runs, dst, &dst->k, &src->k, dst->head_size);
        add_scales(runs, dst, &dst->k_scales, &src->k_scales);
        if (dst->layout != FV_KV_LAYOUT_LATENT) { /* where the value is the start of the key */
            add_plane(runs, dst, &dst->v, &src->v, dst->v_head_size);
            add_scales(runs, dst, &dst->v_scales, &src->v_scales);
        }
    }
    while (join_parts(runs)) continue;
    for (int32_t i = 0; i < runs->num_parts; i++) {
        fv_kv_part *part = &runs->parts[i];
        part->num_runs = 1;
        for (int32_t axis = 0; axis < part->num_axes; axis++) part->num_runs *= part->axes[axis].count;
    }
}

static fv_status check_chunks(const char *name, const fv_kv_plane *dst, const fv_kv_plane *src)
{
    if (dst->slot_chunk == src->slot_chunk && dst->element_chunk == src->element_chunk) return FV_OK;
    return fv_fail(FV_ERR_INVALID,
                   "a copy from chunks of %d slots and %d elements of %s to %d and %d; accepted: the same chunks",
                   src->slot_chunk, src->element_chunk, name, dst->slot_chunk, dst->element_chunk);
}

fv_status fv_kv_views_match(const fv_kv_view *dst, const fv_kv_view *src)
{
    if (dst->layout != src->layout) {
        return fv_fail(FV_ERR_INVALID, "a copy from layout %s to %s; accepted: the same layout",
                       fv_kv_layout_name(src->layout), fv_kv_layout_name(dst->layout));
    }
    fv_status status = check_chunks("k", &dst->k, &src->k);
    if (status == FV_OK) status = check_chunks("v", &dst->v, &src->v);
    if (status != FV_OK) return status;
    if (dst->dtype != src->dtype) {
        return fv_fail(FV_ERR_INVALID, "a copy from %s to %s entries; accepted: the same dtype",
                       fv_dtype_name(src->dtype), fv_dtype_name(dst->dtype));
    }
    if (dst->block_size != src->block_size || dst->num_kv_heads != src->num_kv_heads ||
        dst->head_size != src->head_size || dst->v_head_size != src->v_head_size) {
        return fv_fail(FV_ERR_INVALID,
                       "a copy from blocks of %d slots x %d heads x %d and %d elements to %d x %d x %d and %d; "
                       "accepted: the same sizes",
                       src->block_size, src->num_kv_heads, src->head_size, src->v_head_size, dst->block_size,
                       dst->num_kv_heads, dst->head_size, dst->v_head_size);
    }
    if (!dst->k_scales.data != !src->k_scales.data || !dst->v_scales.data != !src->v_scales.data) {
        return fv_fail(FV_ERR_INVALID, "a copy between a cache with scales and one without; accepted: both or neither");
    }
    return FV_OK;
}
