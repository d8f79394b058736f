/* Building caches. */
#include "check/cache_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "fovea/status.h"

#define FAR_BYTES (1ll << 33)

static int32_t is_latent(fv_kv_layout layout)
{
    return layout == FV_KV_LAYOUT_LATENT || layout == FV_KV_LAYOUT_LATENT_FP8_DS;
}

/* Sizes that the layout takes. */
static void fit_sizes(check_cache_shape *shape)
{
    const int32_t x = 16 / (int32_t)fv_dtype_bytes(shape->dtype);
    if (shape->layout == FV_KV_LAYOUT_X_PACKED || shape->layout == FV_KV_LAYOUT_SHUFFLED)
        shape->head_size = (int32_t)fv_round_up(shape->head_size, x);
    if (shape->layout == FV_KV_LAYOUT_SHUFFLED) shape->block_size = (int32_t)fv_round_up(shape->block_size, x);
    if (shape->layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
        shape->dtype = FV_DTYPE_F8_E4M3;
        shape->head_size = 576;
    }
    if (is_latent(shape->layout)) {
        shape->num_kv_heads = 1;
        shape->head_size = fv_max_i32(shape->head_size, 72); /* 64 of them are the rope part */
    }
    if (shape->layout != FV_KV_LAYOUT_STRIDED || shape->scales == CHECK_SCALES_INSIDE)
        shape->v_head_size = shape->head_size;
}

void check_cache_shape_random(check_cache_shape *shape, check_random *random, int32_t with_latent)
{
    static const int32_t block_sizes[] = {1, 3, 8, 16, 17, 64};
    static const fv_dtype dtypes[] = {FV_DTYPE_F32,     FV_DTYPE_F16,     FV_DTYPE_BF16,
                                      FV_DTYPE_F8_E4M3, FV_DTYPE_F8_E5M2, FV_DTYPE_I8};
    *shape = (check_cache_shape){
        .layout = (fv_kv_layout)check_random_int(random, 0,
                                                 with_latent ? FV_KV_LAYOUT_LATENT_FP8_DS : FV_KV_LAYOUT_PACKED_HND),
        .dtype = CHECK_RANDOM_PICK(random, dtypes),
        .block_size = CHECK_RANDOM_PICK(random, block_sizes),
        .num_kv_heads = check_random_int(random, 1, 5),
        .head_size = 8 * check_random_int(random, 4, 34),
        .v_head_size = 8 * check_random_int(random, 4, 34),
    };
    if (check_random_chance(random, 20)) shape->layout = FV_KV_LAYOUT_STRIDED; /* there are many of them */
    const int32_t is_small = fv_dtype_bytes(shape->dtype) == 1 && !is_latent(shape->layout);
    if (is_small && (shape->dtype == FV_DTYPE_I8 || check_random_chance(random, 60))) {
        const int32_t inside = shape->layout == FV_KV_LAYOUT_STRIDED && check_random_chance(random, 50);
        shape->scales = inside ? CHECK_SCALES_INSIDE : CHECK_SCALES_BESIDE;
    }
    for (int32_t i = 0; i < 2; i++) {
        if (check_random_chance(random, 50)) shape->slot_chunk[i] = check_random_int(random, 1, shape->block_size);
        if (check_random_chance(random, 50)) shape->element_chunk[i] = check_random_int(random, 1, 40);
    }
    fit_sizes(shape);
}

/* --- strides that no name fits ------------------------------------------------------------------------- */

/* One dimension of a block: how many steps, and which stride says how far they are. */
typedef struct axis {
    int64_t count;
    int64_t *stride;
} axis;

static int32_t cut(axis *axes, int32_t size, int32_t chunk, int64_t *stride, int64_t *chunk_stride)
{
    axes[0] = (axis){chunk > 0 ? chunk : size, stride};
    if (chunk == 0) return 1;
    axes[1] = (axis){fv_ceil_div(size, chunk), chunk_stride};
    return 2;
}

/* The dimensions in any order, some with a gap. Returns the bytes of a block. */
static int64_t random_plane(fv_kv_plane *plane, const check_cache_shape *shape, int32_t is_value, check_random *random)
{
    const int64_t element = (int64_t)fv_dtype_bytes(shape->dtype);
    axis axes[5] = {{shape->num_kv_heads, &plane->head_stride}};
    *plane = (fv_kv_plane){.slot_chunk = shape->slot_chunk[is_value], .element_chunk = shape->element_chunk[is_value]};
    int32_t num_axes = 1;
    num_axes += cut(axes + num_axes, shape->block_size, plane->slot_chunk, &plane->slot_stride,
                    &plane->slot_chunk_stride);
    num_axes += cut(axes + num_axes, is_value ? shape->v_head_size : shape->head_size, plane->element_chunk,
                    &plane->element_stride, &plane->element_chunk_stride);
    for (int32_t i = num_axes - 1; i > 0; i--) {
        const int32_t other = check_random_int(random, 0, i);
        const axis kept = axes[i];
        axes[i] = axes[other];
        axes[other] = kept;
    }
    int64_t bytes = element;
    for (int32_t i = 0; i < num_axes; i++) {
        *axes[i].stride = bytes;
        bytes = bytes * axes[i].count +
                (check_random_chance(random, 30) ? check_random_int(random, 1, 3) : 0) * element;
    }
    return bytes;
}

/* The planes of a block side by side, or all of K before all of V, which begins at *v_at. Returns the bytes. */
static size_t strided_view(size_t *v_at, fv_kv_view *view, const check_cache_shape *shape, int64_t num_blocks,
                           check_random *random)
{
    *view = (fv_kv_view){
        .struct_size = sizeof(*view),
        .layout = FV_KV_LAYOUT_STRIDED,
        .dtype = shape->dtype,
        .block_size = shape->block_size,
        .num_blocks = num_blocks,
        .num_kv_heads = shape->num_kv_heads,
        .head_size = shape->head_size,
        .v_head_size = shape->v_head_size,
    };
    const int64_t k_bytes = random_plane(&view->k, shape, 0, random);
    const int64_t v_bytes = random_plane(&view->v, shape, 1, random);
    const int32_t together = check_random_chance(random, 50);
    view->k.block_stride = together ? k_bytes + v_bytes : k_bytes;
    view->v.block_stride = together ? k_bytes + v_bytes : v_bytes;
    *v_at = (size_t)(together ? k_bytes : k_bytes * num_blocks);
    return (size_t)((k_bytes + v_bytes) * num_blocks);
}

/* --- the memory ------------------------------------------------------------------------------------------ */

/* Shapes are such that the layout takes them. */
static void must(fv_status status)
{
    if (status == FV_OK) return;
    fprintf(stderr, "fovea check: a random cache: %s\n", fv_last_error());
    exit(1);
}

static void alloc(check_cache *cache, check_arena *arena, size_t bytes)
{
    cache->bytes = bytes;
    cache->memory = check_arena_alloc_fenced(arena, bytes);
}

/* A scale plane in `memory`, which may lie at any address. */
static void build_scales(fv_scale_plane *plane, const check_cache_shape *shape, char *memory, check_random *random)
{
    const int64_t heads = shape->num_kv_heads, slots = shape->block_size;
    const int32_t head_major = check_random_chance(random, 50);
    *plane = (fv_scale_plane){
        .data = memory,
        .block_stride = heads * slots * 4,
        .slot_stride = head_major ? 4 : heads * 4,
        .head_stride = head_major ? slots * 4 : 4,
    };
}

/* The memory, the planes of K and V and the scales inside the block; `beside` bytes of it come after them. */
static size_t build_planes(check_cache *cache, check_arena *arena, const check_cache_shape *shape, int64_t num_blocks,
                           size_t beside, check_random *random)
{
    const int32_t hkv = shape->num_kv_heads, size = shape->head_size, bs = shape->block_size;
    const fv_kv_layout order = check_random_chance(random, 50) ? FV_KV_LAYOUT_PACKED_NHD : FV_KV_LAYOUT_PACKED_HND;
    fv_kv_view *view = &cache->view;
    size_t bytes = 0, v_at;
    if (shape->scales == CHECK_SCALES_INSIDE) {
        must(fv_kv_view_inline_scales_bytes(&bytes, order, shape->dtype, num_blocks, bs, hkv, size));
        alloc(cache, arena, bytes + beside);
        must(fv_kv_view_init_inline_scales(view, cache->memory, order, shape->dtype, num_blocks, bs, hkv, size));
    } else if (shape->layout == FV_KV_LAYOUT_STRIDED) {
        bytes = strided_view(&v_at, view, shape, num_blocks, random);
        alloc(cache, arena, bytes + beside);
        view->k.data = cache->memory;
        view->v.data = cache->memory + v_at;
    } else {
        must(fv_kv_view_bytes(&bytes, shape->layout, shape->dtype, num_blocks, bs, hkv, size));
        alloc(cache, arena, bytes + beside);
        must(fv_kv_view_init(view, cache->memory, shape->layout, shape->dtype, num_blocks, bs, hkv, size));
    }
    return bytes;
}

/* Leaves out every second block, as where the layers of a model take turns. */
static void take_every_second(check_cache *cache)
{
    fv_kv_view *view = &cache->view;
    view->num_blocks /= 2;
    view->k.block_stride *= 2;
    view->v.block_stride *= 2;
    view->k_scales.block_stride *= 2;
    view->v_scales.block_stride *= 2;
}

static void *moved_down(void *data, int64_t bytes) { return data ? (char *)data - bytes : NULL; }

/* Moves all blocks far up: ids and bases, so that the bytes are the same. */
static void move_far(check_cache *cache)
{
    fv_kv_view *view = &cache->view;
    cache->first_block = FAR_BYTES / fv_min_i64(view->k.block_stride, view->v.block_stride);
    view->num_blocks += cache->first_block;
    view->k.data = moved_down(view->k.data, cache->first_block * view->k.block_stride);
    view->v.data = moved_down(view->v.data, cache->first_block * view->v.block_stride);
    view->k_scales.data = moved_down(view->k_scales.data, cache->first_block * view->k_scales.block_stride);
    view->v_scales.data = moved_down(view->v_scales.data, cache->first_block * view->v_scales.block_stride);
}

void check_cache_init(check_cache *cache, check_arena *arena, const check_cache_shape *shape, int64_t num_blocks,
                      check_random *random)
{
    const int32_t every_second = check_random_chance(random, 25), beside = shape->scales == CHECK_SCALES_BESIDE;
    const size_t plane_bytes = beside ? (size_t)(num_blocks * shape->num_kv_heads * shape->block_size) * 4 : 0;
    const size_t odd = (size_t)check_random_int(random, 0, 3);
    *cache = (check_cache){.num_blocks = num_blocks};
    const size_t scales_at = odd + build_planes(cache, arena, shape, every_second ? 2 * num_blocks : num_blocks,
                                                odd + 2 * plane_bytes, random);
    if (every_second) take_every_second(cache);
    if (beside) {
        build_scales(&cache->view.k_scales, shape, cache->memory + scales_at, random);
        build_scales(&cache->view.v_scales, shape, cache->memory + scales_at + plane_bytes, random);
    }
    if (check_random_chance(random, 25)) move_far(cache);
    for (size_t i = 0; i < cache->bytes; i++) cache->memory[i] = (char)check_random_next(random);
    cache->given = memcpy(check_arena_alloc(arena, cache->bytes), cache->memory, cache->bytes);
}
