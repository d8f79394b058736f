/* attend_paged for few rows: decode, and verification of a few tokens.
 *
 * Bound by the bytes of K and V, so they are read once, where they lie, and converted in registers.
 * For each tile of keys the item's KV heads are served in turn: whole rows of the cache are used up
 * while they are near, and the rows of the next tile are prefetched between the arithmetic, a line for
 * each line that is worked on. Without that, waiting and arithmetic add up instead of overlapping.
 *
 * Rows go in groups of R = 1, 2 or 4 that share each converted key (row_group.h). Eight dot products
 * (R rows x 8 / R keys) are reduced together, which leaves the scores in the order of the softmax.
 *
 * A tile ends where the cache ends and dense rows begin; those that are stored in another dtype than
 * the cache are copied to fp32 first. */
#include "kernels/cpu/attend_item.h"
#include "kernels/cpu/prefetch_stream.h"
#include "kernels/cpu/row_group.h"

/* Keys of one tile that share a source, for one head. `first` and `end` count from the tile's first key. */
typedef struct tile_rows {
    const fv_key_source *source;
    const char *const *k;      /* element 0 of each key's row, less the offset; entries from first / 8 * 8 to the */
    const char *const *v;      /* next multiple of 8 behind end are valid */
    fv_prefetch_stream *ahead; /* memory that the next tile will want */
    int64_t k_offset, v_offset;
    int32_t first_key; /* of the tile */
    int32_t first, end;
    int32_t turn; /* 0 or 1: whose row tables it uses */
} tile_rows;

typedef void (*accumulate_fn)(float *sums, const float *weights, const float *rescale, const tile_rows *tile,
                              int32_t first, int32_t end, int32_t v_head_size);

typedef struct few_scratch {
    fv_row_group *groups;   /* [heads][num_groups] */
    float *q;               /* [heads][num_groups * R][D], lane order */
    float *sums;            /* [heads][num_groups][Dv in blocks of columns][R][block], lane order */
    float *row;             /* [Dv] */
    float *scores;          /* [tile][R] */
    float *k_scales;        /* [tile] */
    float *v_scales;        /* [tile] */
    const char **k_rows[2]; /* [tile] of this tile and the next, in turn */
    const char **v_rows[2];
    const char **k_copied; /* [tile] rows in k_copies, where they cannot be read in place */
    const char **v_copied;
    char *k_copies; /* [tile][D] */
    char *v_copies; /* [tile][Dv] */
    size_t bytes;
} few_scratch;

#define ACCUMULATE_KEYS 16     /* keys taken together in the product with V */
#define TILE_BYTES (64 * 1024) /* of K and V, all heads */

/* Scratch is sized before the cache is known. */
#define MAX_ELEMENT_BYTES 4

static few_scratch few_scratch_of(const fv_attend_params *params, int32_t num_rows, void *memory)
{
    const size_t padded = (size_t)fv_round_up(num_rows, fv_rows_in_group(num_rows));
    const size_t rows = padded * (size_t)params->num_kv_heads;
    const size_t tile = (size_t)params->tile_keys;
    const size_t k_size = (size_t)params->head_size, v_size = (size_t)params->v_head_size;
    few_scratch scratch = {0};
    scratch.groups = fv_scratch_take(memory, &scratch.bytes, rows * sizeof(fv_row_group));
    scratch.q = fv_scratch_take(memory, &scratch.bytes, rows * k_size * sizeof(float));
    scratch.sums = fv_scratch_take(memory, &scratch.bytes, rows * v_size * sizeof(float));
    scratch.row = fv_scratch_take(memory, &scratch.bytes, v_size * sizeof(float));
    scratch.scores = fv_scratch_take(memory, &scratch.bytes, tile * 4 * sizeof(float));
    scratch.k_scales = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(float));
    scratch.v_scales = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(float));
    for (int32_t i = 0; i < 2; i++) scratch.k_rows[i] = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(char *));
    for (int32_t i = 0; i < 2; i++) scratch.v_rows[i] = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(char *));
    scratch.k_copied = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(char *));
    scratch.v_copied = fv_scratch_take(memory, &scratch.bytes, tile * sizeof(char *));
    scratch.k_copies = fv_scratch_take(memory, &scratch.bytes, tile * k_size * MAX_ELEMENT_BYTES);
    scratch.v_copies = fv_scratch_take(memory, &scratch.bytes, tile * v_size * MAX_ELEMENT_BYTES);
    return scratch;
}

size_t FV_ISA_SYMBOL(fv_attend_few_scratch)(const fv_attend_params *params)
{
    return few_scratch_of(params, FV_DECODE_ROWS, NULL).bytes;
}

FV_ALWAYS_INLINE int64_t element_bytes_of(const fv_dtype dtype)
{
    return dtype == FV_DTYPE_F32 ? 4 : dtype == FV_DTYPE_F16 || dtype == FV_DTYPE_BF16 ? 2 : 1;
}

/* Columns of a block of sums. */
FV_ALWAYS_INLINE int32_t block_width(const int32_t num_rows) { return FV_LANES * FV_LANES / num_rows; }

/* --- scores = K q ----------------------------------------------------------------------------------- */

/* Scores of the keys [first, end), and of those that share a vector with them. */
FV_ALWAYS_INLINE void dot(float *scores, const float *q, const tile_rows *tile, int32_t first, int32_t end,
                          int32_t head_size, const int32_t num_rows, const fv_dtype dtype)
{
    const int32_t num_keys = FV_LANES / num_rows;
    const int64_t bytes = element_bytes_of(dtype);
    for (int32_t key = first / num_keys * num_keys; key < end; key += num_keys) {
        const char *k[FV_LANES];
        fv_f32x8 sums[FV_LANES];
        FV_UNROLL
        for (int32_t j = 0; j < num_keys; j++) k[j] = tile->k[key + j] + tile->k_offset;
        FV_UNROLL
        for (int32_t i = 0; i < FV_LANES; i++) sums[i] = fv_splat(0.0f);

        const char *ahead = fv_prefetch_take(tile->ahead, head_size * num_keys * bytes);
        int32_t d = 0;
        for (; d + 16 <= head_size; d += 16) {
            fv_f32x16 keys[FV_LANES];
            fv_prefetch_bytes(ahead + d * num_keys * bytes, 16 * num_keys * bytes);
            FV_UNROLL
            for (int32_t j = 0; j < num_keys; j++) keys[j] = fv_load16(k[j] + d * bytes, dtype);
            FV_UNROLL
            for (int32_t r = 0; r < num_rows; r++) {
                const fv_f32x8 a = fv_load_f32(q + r * head_size + d);
                FV_UNROLL
                for (int32_t j = 0; j < num_keys; j++) {
                    sums[j * num_rows + r] = fv_fma(a, keys[j].a, sums[j * num_rows + r]);
                }
            }
            FV_UNROLL
            for (int32_t r = 0; r < num_rows; r++) {
                const fv_f32x8 b = fv_load_f32(q + r * head_size + d + 8);
                FV_UNROLL
                for (int32_t j = 0; j < num_keys; j++) {
                    sums[j * num_rows + r] = fv_fma(b, keys[j].b, sums[j * num_rows + r]);
                }
            }
        }
        if (d < head_size) {
            FV_UNROLL
            for (int32_t j = 0; j < num_keys; j++) {
                const fv_f32x8 one = fv_load8(k[j] + d * bytes, dtype);
                FV_UNROLL
                for (int32_t r = 0; r < num_rows; r++) {
                    sums[j * num_rows + r] = fv_fma(fv_load_f32(q + r * head_size + d), one, sums[j * num_rows + r]);
                }
            }
        }
        fv_store_f32(scores + key * num_rows, fv_reduce8(sums));
    }
}

/* --- sums = sums * rescale + weights V ---------------------------------------------------------------- */

/* Adds a key's values, times the weight of each row. */
FV_ALWAYS_INLINE void add_key(fv_f32x8 *acc, const char *row, const float *weights, const int32_t num_vectors,
                              const int32_t num_rows, const fv_dtype dtype, const int32_t masked)
{
    const int64_t bytes = element_bytes_of(dtype);
    fv_f32x8 values[FV_LANES];
    if (num_vectors == 1) values[0] = fv_load8(row, dtype);
    FV_UNROLL
    for (int32_t c = 0; c + 1 < num_vectors; c += 2) {
        const fv_f32x16 pair = fv_load16(row + c * FV_LANES * bytes, dtype);
        values[c] = pair.a;
        values[c + 1] = pair.b;
    }
    FV_UNROLL
    for (int32_t r = 0; r < num_rows; r++) {
        const fv_f32x8 weight = fv_splat(weights[r]);
        const fv_i32x8 seen = (fv_i32x8)(weight != 0.0f);
        FV_UNROLL
        for (int32_t c = 0; c < num_vectors; c++) {
            const fv_f32x8 value = masked ? (fv_f32x8)((fv_i32x8)values[c] & seen) : values[c];
            acc[r * num_vectors + c] = fv_fma(weight, value, acc[r * num_vectors + c]);
        }
    }
}

/* One block of columns: `num_vectors` vectors for each row of the group, side by side in `sums`. `from`
 * is the byte offset of the columns in a row of V. rescale NULL: sums stay as they are. masked: a key of
 * weight 0 adds nothing, whatever its value. */
FV_ALWAYS_INLINE void accumulate_block(float *sums, const float *weights, const float *rescale, const tile_rows *tile,
                                       int32_t first, int32_t end, int64_t from, const int32_t num_vectors,
                                       const int32_t num_rows, const fv_dtype dtype, const int32_t masked)
{
    const int64_t offset = tile->v_offset + from;
    const int64_t key_bytes = num_vectors * FV_LANES * element_bytes_of(dtype);
    const char *ahead = fv_prefetch_take(tile->ahead, (end - first) * key_bytes);
    fv_f32x8 acc[FV_LANES];
    FV_UNROLL
    for (int32_t i = 0; i < num_rows * num_vectors; i++) acc[i] = fv_load_f32(sums + i * FV_LANES);
    if (rescale) {
        FV_UNROLL
        for (int32_t i = 0; i < num_rows * num_vectors; i++) acc[i] *= rescale[i / num_vectors];
    }
    int32_t key = first;
    for (; key + 2 <= end; key += 2) {
        fv_prefetch_bytes(ahead + (key - first) * key_bytes, 2 * key_bytes);
        add_key(acc, tile->v[key] + offset, weights + key * num_rows, num_vectors, num_rows, dtype, masked);
        add_key(acc, tile->v[key + 1] + offset, weights + (key + 1) * num_rows, num_vectors, num_rows, dtype, masked);
    }
    if (key < end) add_key(acc, tile->v[key] + offset, weights + key * num_rows, num_vectors, num_rows, dtype, masked);
    FV_UNROLL
    for (int32_t i = 0; i < num_rows * num_vectors; i++) fv_store_f32(sums + i * FV_LANES, acc[i]);
}

/* Eight accumulators at a time, as in dot: blocks of 64 / R columns, then of 16, then of 8. Few keys at a
 * time, for where the heads of a token lie side by side, the rows of one head are so far apart that a
 * tile's fall into a few sets of the L1 cache, and the next columns would find the keys evicted. */
FV_ALWAYS_INLINE void accumulate(float *sums, const float *weights, const float *rescale, const tile_rows *tile,
                                 int32_t first, int32_t end, int32_t v_head_size, const int32_t num_rows,
                                 const fv_dtype dtype, const int32_t masked)
{
    const int64_t bytes = element_bytes_of(dtype);
    const int32_t width = block_width(num_rows);
    for (int32_t key = first; key < end; key += ACCUMULATE_KEYS, rescale = NULL) {
        const int32_t end_key = fv_min_i32(key + ACCUMULATE_KEYS, end);
        int32_t d = 0;
        for (; d + width <= v_head_size; d += width) {
            accumulate_block(sums + d * num_rows, weights, rescale, tile, key, end_key, d * bytes, width / FV_LANES,
                             num_rows, dtype, masked);
        }
        for (; d + 16 <= v_head_size; d += 16) {
            accumulate_block(sums + d * num_rows, weights, rescale, tile, key, end_key, d * bytes, 2, num_rows, dtype,
                             masked);
        }
        if (d < v_head_size) {
            accumulate_block(sums + d * num_rows, weights, rescale, tile, key, end_key, d * bytes, 1, num_rows, dtype,
                             masked);
        }
    }
}

/* One row of a group's sums, side by side. */
static void unblock_row(float *to, const float *sums, int32_t row, int32_t num_rows, int32_t v_head_size)
{
    for (int32_t d = 0; d < v_head_size;) {
        int32_t width = block_width(num_rows);
        if (d + width > v_head_size) width = d + 16 > v_head_size ? 8 : 16;
        memcpy(to + d, sums + d * num_rows + row * width, (size_t)width * sizeof(float));
        d += width;
    }
}

/* --- one compiled form for each dtype and R -------------------------------------------------------------- */

typedef struct few_kernels {
    void (*dot)(float *scores, const float *q, const tile_rows *tile, int32_t first, int32_t end, int32_t head_size);
    int32_t (*softmax)(fv_row_group *group, float *scores, float rescale[FV_LANES], const fv_softmax_span *span);
    accumulate_fn accumulate;
    accumulate_fn accumulate_masked;
} few_kernels;

#define DEFINE_KERNELS(NAME, DTYPE, ROWS)                                                                             \
    static void dot_##NAME##_##ROWS(float *scores, const float *q, const tile_rows *tile, int32_t first, int32_t end, \
                                    int32_t head_size)                                                                \
    {                                                                                                                 \
        dot(scores, q, tile, first, end, head_size, ROWS, DTYPE);                                                     \
    }                                                                                                                 \
    static void accumulate_##NAME##_##ROWS(float *sums, const float *weights, const float *rescale,                   \
                                           const tile_rows *tile, int32_t first, int32_t end, int32_t v_head_size)    \
    {                                                                                                                 \
        accumulate(sums, weights, rescale, tile, first, end, v_head_size, ROWS, DTYPE, 0);                            \
    }                                                                                                                 \
    static void accumulate_masked_##NAME##_##ROWS(float *sums, const float *weights, const float *rescale,            \
                                                  const tile_rows *tile, int32_t first, int32_t end,                  \
                                                  int32_t v_head_size)                                                \
    {                                                                                                                 \
        accumulate(sums, weights, rescale, tile, first, end, v_head_size, ROWS, DTYPE, 1);                            \
    }
#define DEFINE_SOFTMAX(ROWS)                                                                   \
    static int32_t softmax_##ROWS(fv_row_group *group, float *scores, float rescale[FV_LANES], \
                                  const fv_softmax_span *span)                                 \
    {                                                                                          \
        return fv_row_group_softmax(group, scores, rescale, span, ROWS);                       \
    }
#define DEFINE_DTYPE(NAME, DTYPE)  \
    DEFINE_KERNELS(NAME, DTYPE, 1) \
    DEFINE_KERNELS(NAME, DTYPE, 2) \
    DEFINE_KERNELS(NAME, DTYPE, 4)

DEFINE_SOFTMAX(1)
DEFINE_SOFTMAX(2)
DEFINE_SOFTMAX(4)
DEFINE_DTYPE(f32, FV_DTYPE_F32)
DEFINE_DTYPE(f16, FV_DTYPE_F16)
DEFINE_DTYPE(bf16, FV_DTYPE_BF16)
DEFINE_DTYPE(e4m3, FV_DTYPE_F8_E4M3)
DEFINE_DTYPE(e5m2, FV_DTYPE_F8_E5M2)
DEFINE_DTYPE(i8, FV_DTYPE_I8)

#define KERNELS_OF(NAME, ROWS)                                                                             \
    {                                                                                                      \
        dot_##NAME##_##ROWS, softmax_##ROWS, accumulate_##NAME##_##ROWS, accumulate_masked_##NAME##_##ROWS \
    }
#define KERNELS_OF_DTYPE(NAME)                                                          \
    {                                                                                   \
        [1] = KERNELS_OF(NAME, 1), [2] = KERNELS_OF(NAME, 2), [4] = KERNELS_OF(NAME, 4) \
    }

static const few_kernels kernels_of[][5] = {
    [FV_DTYPE_F32] = KERNELS_OF_DTYPE(f32),      [FV_DTYPE_F16] = KERNELS_OF_DTYPE(f16),
    [FV_DTYPE_BF16] = KERNELS_OF_DTYPE(bf16),    [FV_DTYPE_F8_E4M3] = KERNELS_OF_DTYPE(e4m3),
    [FV_DTYPE_F8_E5M2] = KERNELS_OF_DTYPE(e5m2), [FV_DTYPE_I8] = KERNELS_OF_DTYPE(i8),
};

/* Keys of a tile: those of the schedule, or an even part of them, so that this tile and the next, with
 * all KV heads, leave most of a core's L2 cache free. Not of the item's heads: the tiles must not depend
 * on the schedule. */
static int32_t few_tile_keys(const fv_attend_params *params, fv_dtype dtype)
{
    const int64_t key_bytes = (int64_t)params->num_kv_heads * (params->head_size + params->v_head_size) *
                              (int64_t)fv_dtype_bytes(dtype);
    int32_t tile_keys = params->tile_keys;
    while (tile_keys % 32 == 0 && tile_keys * key_bytes > TILE_BYTES) tile_keys /= 2;
    return tile_keys;
}

/* --- one tile, one item -------------------------------------------------------------------------------- */

typedef struct few_item {
    const fv_attend_job *job;
    few_scratch scratch;
    int32_t num_groups; /* of each head */
    int32_t num_rows;   /* R */
    int32_t tile_keys;
} few_item;

static void head_init(const few_item *few, int32_t head)
{
    const fv_attend_params *params = few->job->params;
    const int32_t kv_head = few->job->item->first_kv_head + head;
    const int32_t padded_rows = few->num_groups * few->num_rows;
    const int32_t head_size = params->head_size;
    for (int32_t g = 0; g < few->num_groups; g++) {
        fv_row_group_init(&few->scratch.groups[head * few->num_groups + g], few->job, kv_head, g * few->num_rows,
                          few->num_rows);
    }
    for (int32_t r = 0; r < padded_rows; r++) {
        const char *from = fv_attend_q_row(few->job, kv_head, fv_min_i32(r, few->job->num_rows - 1));
        fv_row_load_lanes(few->scratch.q + (int64_t)(head * padded_rows + r) * head_size, from, head_size,
                          params->q_dtype, few->job->lane_dtype);
    }
    memset(few->scratch.sums + (int64_t)head * padded_rows * params->v_head_size, 0,
           (size_t)padded_rows * (size_t)params->v_head_size * sizeof(float));
}

/* Repeats the first and the last entry over the rest of the tile. */
static void pad_rows(const char **rows, int32_t first, int32_t end, int32_t tile_keys)
{
    for (int32_t i = 0; i < first; i++) rows[i] = rows[first];
    for (int32_t i = end; i < tile_keys; i++) rows[i] = rows[end - 1];
}

static void pad_scales(float *scales, int32_t first, int32_t end)
{
    for (int32_t i = first / FV_LANES * FV_LANES; i < first; i++) scales[i] = 1.0f;
    for (int32_t i = end; i % FV_LANES != 0; i++) scales[i] = 1.0f;
}

/* Where the tile's rows of one head are; copies them first where they cannot be read in place. */
static const char *const *head_rows(int64_t *offset, const char **copied, char *copies, const char **rows,
                                    const few_item *few, const tile_rows *tile, const fv_kv_plane *plane,
                                    int32_t in_place, int32_t kv_head, int32_t num_elements)
{
    *offset = kv_head * plane->head_stride;
    if (in_place) return rows;
    const int64_t copy_bytes = num_elements * (int64_t)fv_dtype_bytes(tile->source->dtype);
    for (int32_t i = tile->first; i < tile->end; i++) {
        fv_attend_copy_row(copies + i * copy_bytes, rows[i] + *offset, few->job, tile->source, plane, num_elements);
        copied[i] = copies + i * copy_bytes;
    }
    for (int32_t i = tile->first / FV_LANES * FV_LANES; i < tile->first; i++) copied[i] = copied[tile->first];
    for (int32_t i = tile->end; i % FV_LANES != 0; i++) copied[i] = copied[tile->end - 1];
    *offset = 0;
    return copied;
}

static void find_head_rows(tile_rows *tile, const few_item *few, int32_t kv_head)
{
    const fv_attend_params *params = few->job->params;
    const few_scratch *scratch = &few->scratch;
    const fv_key_source *source = tile->source;
    tile->k = head_rows(&tile->k_offset, scratch->k_copied, scratch->k_copies, scratch->k_rows[tile->turn], few, tile,
                        &source->k, source->k_in_place, kv_head, params->head_size);
    tile->v = head_rows(&tile->v_offset, scratch->v_copied, scratch->v_copies, scratch->v_rows[tile->turn], few, tile,
                        &source->v, source->v_in_place, kv_head, params->v_head_size);
}

/* The scales of the tile's keys in `scales`; NULL where there are none. */
static const float *head_scales(float *scales, const few_item *few, const tile_rows *tile, const fv_scale_plane *plane,
                                const float *head_scale, int32_t kv_head)
{
    fv_attend_find_scales(scales + tile->first, few->job, plane, head_scale, kv_head, tile->first_key + tile->first,
                          tile->first_key + tile->end);
    pad_scales(scales, tile->first, tile->end);
    return scales;
}

static void attend_tile_head(const few_item *few, tile_rows *tile, int32_t head)
{
    const fv_attend_job *job = few->job;
    const fv_attend_params *params = job->params;
    const few_scratch *scratch = &few->scratch;
    const int32_t kv_head = job->item->first_kv_head + head;
    const int32_t num_rows = few->num_rows;
    const few_kernels *kernels = &kernels_of[tile->source->dtype][num_rows];
    const int32_t has_scales = tile->source == &job->cache;

    find_head_rows(tile, few, kv_head);
    fv_softmax_span span = {.job = job, .first_key = tile->first_key, .scale = fv_attend_score_scale(job, kv_head)};
    if (job->has_k_scales && has_scales) {
        span.k_scales = head_scales(scratch->k_scales, few, tile, &params->cache.k_scales, params->k_scale, kv_head);
    }
    if (job->has_v_scales && has_scales) {
        span.v_scales = head_scales(scratch->v_scales, few, tile, &params->cache.v_scales, params->v_scale, kv_head);
    }

    for (int32_t g = 0; g < few->num_groups; g++) {
        fv_row_group *group = &scratch->groups[head * few->num_groups + g];
        const int32_t first = fv_max_i32(group->some.first - tile->first_key, tile->first);
        const int32_t end = fv_min_i32(group->some.end - tile->first_key, tile->end);
        if (first >= end) continue;
        const int64_t first_row = (int64_t)(head * few->num_groups + g) * num_rows;
        const int32_t all_first = group->all.first - tile->first_key, all_end = group->all.end - tile->first_key;
        const int32_t some_masked = all_first > first || all_end < end || params->tree_mask;
        const int32_t num_keys = FV_LANES / num_rows;
        span.first = first;
        span.end = end;
        span.first_row = g * num_rows;
        span.is_edge = some_masked || first % num_keys != 0 || end % num_keys != 0;

        float rescale[FV_LANES];
        kernels->dot(scratch->scores, scratch->q + first_row * params->head_size, tile, first, end, params->head_size);
        const int32_t max_grew = kernels->softmax(group, scratch->scores, rescale, &span);
        const accumulate_fn add = some_masked ? kernels->accumulate_masked : kernels->accumulate;
        add(scratch->sums + first_row * params->v_head_size, scratch->scores, max_grew ? rescale : NULL, tile, first,
            end, params->v_head_size);
    }
}

/* The item's tile that starts at key `key`, with the rows looked up; empty at the end of the keys. */
static tile_rows tile_from(const few_item *few, int32_t key, int32_t turn)
{
    const fv_attend_job *job = few->job;
    const int32_t first_key = key / few->tile_keys * few->tile_keys;
    const int32_t end_key = fv_attend_source_end(job, key, fv_min_i32(job->keys.end, first_key + few->tile_keys));
    const tile_rows tile = {
        .source = fv_attend_source_of(job, key),
        .first_key = first_key,
        .first = key - first_key,
        .end = end_key - first_key,
        .turn = turn,
    };
    if (key >= end_key) return tile;

    const char **k_rows = few->scratch.k_rows[turn], **v_rows = few->scratch.v_rows[turn];
    fv_attend_find_rows(k_rows + tile.first, job, &tile.source->k, key, end_key);
    fv_attend_find_rows(v_rows + tile.first, job, &tile.source->v, key, end_key);
    pad_rows(k_rows, tile.first, tile.end, few->tile_keys);
    pad_rows(v_rows, tile.first, tile.end, few->tile_keys);
    return tile;
}

/* The memory of a tile, in the order in which it lies. Nothing where its rows are copied first, or it has none. */
static fv_prefetch_stream stream_of(const few_item *few, const tile_rows *tile)
{
    const fv_attend_params *params = few->job->params;
    const fv_key_source *source = tile->source;
    const fv_kv_plane *k = &source->k;
    const int64_t element_bytes = (int64_t)fv_dtype_bytes(source->dtype);
    const int32_t num_heads = few->job->item->num_kv_heads;
    if (tile->first >= tile->end || !source->k_in_place || !source->v_in_place) {
        return fv_prefetch_nothing(few->scratch.q);
    }
    fv_prefetch_stream stream = {
        .rows = {few->scratch.k_rows[tile->turn], few->scratch.v_rows[tile->turn]},
        .num_planes = 2,
        .num_heads = num_heads,
        .offset = few->job->item->first_kv_head * k->head_stride,
        .head_stride = k->head_stride,
        .row_bytes = params->head_size * element_bytes,
        .first = tile->first,
        .end = tile->end,
        .key = tile->first,
    };
    const int64_t apart = stream.rows[1][tile->first] - stream.rows[0][tile->first];
    if (apart > 0 && apart <= 2 * stream.row_bytes) { /* packed: the value follows its key */
        stream.row_bytes = apart + params->v_head_size * element_bytes;
        stream.num_planes = 1;
    }
    if (k->slot_stride > k->head_stride) { /* a token's heads lie side by side: one row */
        stream.row_bytes += (num_heads - 1) * k->head_stride;
        stream.num_heads = 1;
    }
    fv_prefetch_next_run(&stream);
    return stream;
}

static void finish_head(const few_item *few, int32_t head)
{
    const fv_attend_params *params = few->job->params;
    for (int32_t row = 0; row < few->job->num_rows; row++) {
        const int32_t g = row / few->num_rows, lane = row % few->num_rows;
        const fv_row_group *group = &few->scratch.groups[head * few->num_groups + g];
        const int64_t first_row = (int64_t)(head * few->num_groups + g) * few->num_rows;
        unblock_row(few->scratch.row, few->scratch.sums + first_row * params->v_head_size, lane, few->num_rows,
                    params->v_head_size);
        const fv_f32x8 sum = fv_sum_by_period(group->sum, few->num_rows);
        fv_attend_finish_row(few->job, few->job->item->first_kv_head + head, row, few->scratch.row, group->max[lane],
                             sum[lane]);
    }
}

void FV_ISA_SYMBOL(fv_attend_few_rows)(const fv_attend_job *job, void *memory)
{
    const fv_attend_params *params = job->params;
    const int32_t num_rows = fv_rows_in_group(job->num_rows);
    const few_item few = {
        .job = job,
        .scratch = few_scratch_of(params, job->num_rows, memory),
        .num_groups = (job->num_rows + num_rows - 1) / num_rows,
        .num_rows = num_rows,
        .tile_keys = few_tile_keys(params, job->lane_dtype),
    };
    const int32_t num_heads = job->item->num_kv_heads;
    for (int32_t head = 0; head < num_heads; head++) head_init(&few, head);

    tile_rows tile = tile_from(&few, job->keys.first, 0);
    while (tile.first < tile.end) {
        const tile_rows next = tile_from(&few, tile.first_key + tile.end, !tile.turn);
        fv_prefetch_stream ahead = stream_of(&few, &next);
        tile.ahead = &ahead;
        for (int32_t head = 0; head < num_heads; head++) attend_tile_head(&few, &tile, head);
        tile = next;
    }
    for (int32_t head = 0; head < num_heads; head++) finish_head(&few, head);
}
