/* A scene: the memory of a case, built to hurt. Everything that a kernel must not use is NaN or wild:
 *
 *   cache        NaN in the null block, in blocks of nobody, in slots past the sequence; in some cases other bytes
 *   block table  past the used entries negative, huge or other sequences' ids; 0 before a window
 *   q, k, v      NaN in padding rows and between rows; strides and bases at odd multiples of an element
 *   out, lse     a pattern everywhere, fenced; only the rows of the batch may change
 *
 * Some caches are far: block ids start so high that offsets pass 32 bits, and the planes' base lies as far below the
 * memory. Behind the caches, q, k and v comes memory that must not be read (arena.h).
 */
#ifndef FV_TOOLS_CHECK_SCENE_H
#define FV_TOOLS_CHECK_SCENE_H

#include "check/arena.h"
#include "check/case.h"
#include "check/random.h"
#include "ops/attend_paged.h"

typedef struct check_scene {
    const check_case *test;
    check_arena arena;

    int32_t num_tokens; /* T */
    int32_t num_rows;   /* T', with padding */
    int32_t *query_start, *seq_lens, *block_table;
    int64_t block_table_stride;
    int32_t block_table_width;
    int64_t *slot_mapping; /* NULL: nothing is written */
    uint8_t *causal;       /* NULL: all are */
    uint64_t *tree_mask;

    fv_tensor q, k, v; /* k, v without data where the case has them in the cache */
    fv_tensor out, lse;
    char *out_memory, *lse_memory;
    size_t out_bytes, lse_bytes;
    float *sinks, *alibi_slopes, *k_scale, *v_scale;
    int32_t num_kv_scales;

    fv_kv_view view;     /* of `cache` */
    int32_t first_block; /* 0, or where the blocks of a far cache start */
    char *cache;         /* what the kernels get */
    char *cache_before;  /* before the new K/V are written */
    char *cache_after;   /* after, by the reference */
    size_t cache_bytes;
} check_scene;

void check_scene_init(check_scene *scene, const check_case *test);
void check_scene_deinit(check_scene *scene);

/* Puts `cache` back to cache_before or cache_after, out and lse back to the pattern. */
void check_scene_reset(check_scene *scene, int32_t written);

/* Puts the pattern over the rows of the first tokens of out or lse; takes one without data. */
void check_scene_cover_rows(const fv_tensor *tensor, int32_t num_tokens);

/* Parameters of attend_paged without the schedule. */
fv_attend_params check_scene_params(const check_scene *scene);

/* Does the query of (token, head) hold a NaN? */
int32_t check_scene_query_is_nan(const check_scene *scene, int32_t token, int32_t head);

/* Keys of sequence r on this rank. */
int32_t check_scene_num_keys(const check_scene *scene, int32_t seq);

#endif
