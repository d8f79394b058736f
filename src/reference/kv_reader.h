/* Reads keys and values of the paged cache, or of dense rows, one at a time, as real numbers in double:
 * block table, layout, dtype, scales, the 656-byte latent entry, the rotation at reading and which keys
 * are dense rows are all dealt with here and nowhere else in the reference. */
#ifndef FV_REFERENCE_KV_READER_H
#define FV_REFERENCE_KV_READER_H

#include "kvcache/latent_entry.h"
#include "ops/attend_paged.h"

typedef struct fv_kv_reader {
    const fv_kv_view *view;
    const int32_t *block_table;
    int64_t block_table_stride;
    const float *k_scale; /* [num_scales] or NULL */
    const float *v_scale;
    int32_t num_scales; /* 0, 1 or Hkv */
    int32_t head_size, v_head_size;
    fv_context_parallel context_parallel;
    fv_key_rotation rotation;

    fv_dense_keys dense;         /* k NULL: every key is read from the cache */
    int32_t dense_min_query_len; /* sequences with a shorter query have no dense rows */
    const int32_t *query_start;  /* [R + 1], for dense rows only */
    const int32_t *seq_lens;     /* [R] */
} fv_kv_reader;

/* A reader of the keys of `params`: its dense rows serve every sequence. */
fv_kv_reader fv_kv_reader_of(const fv_attend_params *params);

/* Key `key` (local index) of sequence `seq`, head `head`: head_size elements. Where the key lies in the
 * cache, row `table_row` of the block table finds it. */
void fv_kv_reader_key(double *k, const fv_kv_reader *reader, int32_t seq, int32_t table_row, int32_t key, int32_t head);

/* Its value: v_head_size elements. In the latent layouts the value is the unrotated start of the key,
 * with the key's scale. */
void fv_kv_reader_value(double *v, const fv_kv_reader *reader, int32_t seq, int32_t table_row, int32_t key,
                        int32_t head);

/* The scale of a head: scales[0] where there is one for all, 1 where there is none. */
static inline float fv_head_scale(const float *scales, int32_t num_scales, int32_t head)
{
    if (!scales || num_scales == 0) return 1.0f;
    return scales[num_scales == 1 ? 0 : head];
}

#endif
