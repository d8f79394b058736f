/* Random caches for the operations that take any: all layouts, all dtypes, strides that no name fits, scales
 * beside the blocks or inside them, and blocks so far from the base that offsets pass 32 bits. */
#ifndef FV_TOOLS_CHECK_CACHE_CASE_H
#define FV_TOOLS_CHECK_CACHE_CASE_H

#include "check/arena.h"
#include "check/random.h"
#include "fovea/view.h"

typedef enum check_scales_place {
    CHECK_SCALES_NONE = 0,
    CHECK_SCALES_BESIDE = 1, /* planes of their own */
    CHECK_SCALES_INSIDE = 2, /* in the block, as vLLM lays them */
} check_scales_place;

/* What two caches must agree in for a copy. */
typedef struct check_cache_shape {
    fv_kv_layout layout;
    fv_dtype dtype;
    int32_t block_size, num_kv_heads, head_size, v_head_size;
    check_scales_place scales;
    int32_t slot_chunk[2], element_chunk[2]; /* of K and V; layout STRIDED */
} check_cache_shape;

typedef struct check_cache {
    fv_kv_view view;
    int64_t first_block; /* blocks below are not there */
    int64_t num_blocks;  /* that are there */
    char *memory, *given;
    size_t bytes;
} check_cache;

/* 0 for `with_latent` leaves out the layouts of MLA. */
void check_cache_shape_random(check_cache_shape *shape, check_random *random, int32_t with_latent);

/* A cache of that shape with strides of its own, full of random bytes, fenced; `given` is a copy of it. */
void check_cache_init(check_cache *cache, check_arena *arena, const check_cache_shape *shape, int64_t num_blocks,
                      check_random *random);

#endif
