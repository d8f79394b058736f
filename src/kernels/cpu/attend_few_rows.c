/* attend_paged for few rows: decode, and verification of a few tokens.
 *
 * Bound by the bytes of K and V, so they are read once, where they lie, and converted in registers.
 * For each tile of keys the item's KV heads are served in turn: whole rows of the cache are used up
 * while they are near, and the rows of the next tile are prefetched between the arithmetic, a line for
 * each line that is worked on, and that before it once more. Without that, waiting and arithmetic add up instead of
 * overlapping.
 *
 * Rows go in groups of R = 1, 2 or 4 that share each converted key (row_group.h), 3 rows in one of 3. Eight dot
 * products (R rows x 8 / R keys), of 3 rows twelve, are reduced together, which leaves the scores in the order of the
 * softmax.
 *
 * A tile ends where the cache ends and dense rows begin; those that are stored in another dtype than
 * the cache are copied to fp32 first.
 *
 * The products are those of few_rows.h, at level avx512 those of few_wide.h; level avx512_bf16 has those of
 * few_pairs.h, and leaves other caches than bf16 to its base. */
#if defined(__AVX2__)
#define FV_FEW_HAS_3_ROWS 1
#endif
#if defined(FV_HAS_PAIRS)
#define FV_PREFETCH_ASKS 3
#include "kernels/cpu/few_pairs.h"
FV_FEW_DEFINE_BF16
static const fv_few_kernels kernels_of[][5] = FV_FEW_KERNEL_TABLE_BF16;
#else
#define FV_PREFETCH_ASKS 2
#if defined(__AVX512BW__)
#include "kernels/cpu/few_wide.h"
#else
#include "kernels/cpu/few_rows.h"
#endif
FV_FEW_DEFINE_ALL
static const fv_few_kernels kernels_of[][5] = FV_FEW_KERNEL_TABLE;
#endif

/* Keys of one tile that share a source, for one head. `first` and `end` count from the tile's first key. */
typedef struct tile_rows {
    const fv_key_source *source;
    fv_key_rows rows;
    int32_t first_key; /* of the tile */
    int32_t first, end;
    int64_t v_stride; /* of the rows of values, see fv_key_rows */
    int32_t turn;     /* 0 or 1: whose row tables it uses */
} tile_rows;

typedef struct few_scratch {
    fv_row_group *groups;   /* [heads][num_groups] */
    float *q;               /* [heads][num_groups][D][R], see fv_few_pack_query */
    float *sums;            /* [heads][num_groups][Dv in blocks of columns][R][block], lane order */
    float *row;             /* [D or Dv] */
    float *scores;          /* [tile][R], and FV_FEW_SCORES_AHEAD, which loads of whole vectors reach */
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

#define TILE_BYTES (64 * 1024) /* of K and V, all heads */

/* Scratch is sized before the cache is known. */
#define MAX_ELEMENT_BYTES 4

static few_scratch few_scratch_of(const fv_attend_params *params, int32_t num_rows, void *memory)
{
    const size_t of_head = (size_t)fv_round_up(num_rows, fv_few_rows_in_group(num_rows));
    const size_t rows = of_head * (size_t)params->num_kv_heads;
    const size_t tile = (size_t)params->tile_keys;
    const size_t k_size = (size_t)fv_few_padded(params->head_size), v_size = (size_t)fv_few_padded(params->v_head_size);
    const size_t widest = k_size > v_size ? k_size : v_size;
    few_scratch scratch = {0};
    scratch.groups = fv_scratch_take(memory, &scratch.bytes, rows * sizeof(fv_row_group));
    scratch.q = fv_scratch_take(memory, &scratch.bytes, rows * k_size * sizeof(float));
    scratch.sums = fv_scratch_take(memory, &scratch.bytes, rows * v_size * sizeof(float));
    scratch.row = fv_scratch_take(memory, &scratch.bytes, widest * sizeof(float));
    scratch.scores = fv_scratch_take(memory, &scratch.bytes, (tile * 4 + FV_FEW_SCORES_AHEAD) * sizeof(float));
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
                          fv_few_scores_of_key(few->num_rows));
    }
    for (int32_t r = 0; r < padded_rows; r++) {
        const char *from = fv_attend_q_row(few->job, kv_head, fv_min_i32(r, few->job->num_rows - 1));
        float *q = few->scratch.q +
                   (int64_t)(head * padded_rows + r / few->num_rows * few->num_rows) * fv_few_padded(head_size);
        fv_row_load_lanes(few->scratch.row, from, head_size, params->q_dtype, fv_few_query_order(few->job->lane_dtype));
        fv_few_pack_query(q, few->scratch.row, r % few->num_rows, head_size, few->num_rows);
    }
    const int64_t num_sums = (int64_t)padded_rows * fv_few_padded(params->v_head_size);
    memset(few->scratch.sums + head * num_sums, 0, (size_t)num_sums * sizeof(float));
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

/* Repeats the first and the last row of the tile in the entries that share a vector with them. */
static void pad_copied(const char **copied, const tile_rows *tile)
{
    for (int32_t i = tile->first / FV_LANES * FV_LANES; i < tile->first; i++) copied[i] = copied[tile->first];
    for (int32_t i = tile->end; i % FV_LANES != 0; i++) copied[i] = copied[tile->end - 1];
}

/* Where the tile's keys of one head are; copies them first where they cannot be read in place. */
static void find_head_keys(tile_rows *tile, const few_item *few, int32_t kv_head)
{
    const few_scratch *scratch = &few->scratch;
    const fv_key_source *source = tile->source;
    const char **rows = scratch->k_rows[tile->turn];
    tile->rows.k = rows;
    tile->rows.k_offset = kv_head * source->k.head_stride;
    if (source->k_in_place && source->shared_size == 0) return;
    const int64_t copy_bytes = few->job->params->head_size * (int64_t)fv_dtype_bytes(source->dtype);
    for (int32_t i = tile->first; i < tile->end; i++) {
        char *to = scratch->k_copies + i * copy_bytes;
        fv_attend_copy_key(to, rows[i] + tile->rows.k_offset, few->job, source, tile->first_key + i);
        scratch->k_copied[i] = to;
    }
    pad_copied(scratch->k_copied, tile);
    tile->rows.k = scratch->k_copied;
    tile->rows.k_offset = 0;
}

/* And its values. */
static void find_head_values(tile_rows *tile, const few_item *few, int32_t kv_head)
{
    const few_scratch *scratch = &few->scratch;
    const fv_key_source *source = tile->source;
    const int32_t size = few->job->params->v_head_size;
    const char **rows = scratch->v_rows[tile->turn];
    tile->rows.v = rows;
    tile->rows.v_offset = kv_head * source->v.head_stride;
    tile->rows.v_stride = tile->v_stride;
    if (source->v_in_place) return;
    const int64_t copy_bytes = size * (int64_t)fv_dtype_bytes(source->dtype);
    for (int32_t i = tile->first; i < tile->end; i++) {
        char *to = scratch->v_copies + i * copy_bytes;
        fv_attend_copy_row(to, rows[i] + tile->rows.v_offset, few->job, source, &source->v, size);
        scratch->v_copied[i] = to;
    }
    pad_copied(scratch->v_copied, tile);
    tile->rows.v = scratch->v_copied;
    tile->rows.v_offset = 0;
    tile->rows.v_stride = 0;
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
    const fv_few_kernels *kernels = &kernels_of[tile->source->dtype][num_rows];
    const int32_t has_scales = tile->source == &job->cache;

    find_head_keys(tile, few, kv_head);
    find_head_values(tile, few, kv_head);
    const float factor = fv_few_factor(tile->source->dtype);
    fv_softmax_span span = {
        .job = job,
        .first_key = tile->first_key,
        .scale = fv_attend_score_scale(job, kv_head),
        .weight_factor = factor,
    };
    span.scale.dot *= factor;
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
        const int32_t num_keys = FV_LANES / fv_few_scores_of_key(num_rows);
        span.first = first;
        span.end = end;
        span.first_row = g * num_rows;
        span.is_edge = some_masked || first % num_keys != 0 || end % num_keys != 0;

        float rescale[FV_LANES];
        kernels->dot(scratch->scores, scratch->q + first_row * fv_few_padded(params->head_size), &tile->rows, first,
                     end, params->head_size);
        const int32_t max_grew = kernels->softmax(group, scratch->scores, rescale, &span);
        const fv_few_accumulate_fn add = some_masked ? kernels->accumulate_masked : kernels->accumulate;
        add(scratch->sums + first_row * fv_few_padded(params->v_head_size), scratch->scores, max_grew ? rescale : NULL,
            &tile->rows, first, end, params->v_head_size);
    }
}

/* The item's tile that starts at key `key`, with the rows looked up; empty at the end of the keys. */
static tile_rows tile_from(const few_item *few, int32_t key, int32_t turn)
{
    const fv_attend_job *job = few->job;
    const int32_t first_key = key / few->tile_keys * few->tile_keys;
    const int32_t end_key = fv_attend_source_end(job, key, fv_min_i32(job->keys.end, first_key + few->tile_keys));
    tile_rows tile = {
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
    tile.v_stride = fv_few_row_stride(v_rows, tile.first, tile.end);
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
    if (tile->first >= tile->end || !source->k_in_place || !source->v_in_place || source->shared_size > 0) {
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

/* Scales of a block lie in a few lines, of all heads; where they lie in the rows, the stream has them. */
#define MAX_SCALE_BYTES 1024

static void prefetch_scales(const few_item *few, const tile_rows *tile, const fv_scale_plane *plane)
{
    const fv_attend_job *job = few->job;
    const int32_t block_size = job->params->cache.block_size;
    const int32_t first_head = job->item->first_kv_head, last_head = first_head + job->item->num_kv_heads - 1;
    if (!plane->data || tile->source != &job->cache) return;
    for (int32_t i = tile->first, num; i < tile->end; i += num) {
        const int32_t key = tile->first_key + i, slot = key % block_size;
        num = fv_min_i32(block_size - slot, tile->end - i);
        const int64_t block = job->table[key / block_size];
        const char *at = fv_scale_address(plane, block, slot, first_head);
        const char *last = fv_scale_address(plane, block, slot + num - 1, last_head);
        if (last < at || last - at > MAX_SCALE_BYTES) return;
        for (; at < last; at += FV_CACHE_LINE) __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(last, 0, 2);
    }
}

/* Asks for what the arithmetic of a tile should find in the cache: its scales at once, its rows little by little,
 * by the stream. */
static fv_prefetch_stream prefetch_tile(const few_item *few, const tile_rows *tile)
{
    prefetch_scales(few, tile, &few->job->params->cache.k_scales);
    prefetch_scales(few, tile, &few->job->params->cache.v_scales);
    const fv_prefetch_stream stream = stream_of(few, tile);
    fv_prefetch_sparsely(stream);
    return stream;
}

static void finish_head(const few_item *few, int32_t head)
{
    const fv_attend_params *params = few->job->params;
    for (int32_t row = 0; row < few->job->num_rows; row++) {
        const int32_t g = row / few->num_rows, lane = row % few->num_rows;
        const fv_row_group *group = &few->scratch.groups[head * few->num_groups + g];
        const int64_t first_row = (int64_t)(head * few->num_groups + g) * few->num_rows;
        fv_few_unblock_row(few->scratch.row, few->scratch.sums + first_row * fv_few_padded(params->v_head_size), lane,
                           few->num_rows, params->v_head_size);
        const fv_f32x8 sum = fv_sum_by_period(group->sum, fv_few_scores_of_key(few->num_rows));
        fv_attend_finish_row(few->job, few->job->item->first_kv_head + head, row, few->scratch.row, group->max[lane],
                             sum[lane]);
    }
}

#if defined(FV_HAS_PAIRS)
static int32_t is_bf16_in_place(const fv_key_source *source)
{
    return source->stored == FV_DTYPE_BF16 && source->dtype == FV_DTYPE_BF16 && source->k_in_place &&
           source->v_in_place && source->shared_size == 0;
}

/* By the parameters of the call alone, so that no item of it differs. */
int32_t FV_ISA_SYMBOL(fv_attend_few_serves)(const fv_attend_job *job)
{
    const fv_attend_params *params = job->params;
    if (params->q_dtype != FV_DTYPE_BF16) return 0;
    if (params->head_size % FV_FEW_UNIT != 0 || params->v_head_size % FV_FEW_UNIT != 0) return 0;
    if (params->cache.dtype != FV_DTYPE_NONE && !is_bf16_in_place(&job->cache)) return 0;
    return !params->dense.k || is_bf16_in_place(&job->dense);
}
#else
int32_t FV_ISA_SYMBOL(fv_attend_few_serves)(const fv_attend_job *job) { return job != NULL; }
#endif

void FV_ISA_SYMBOL(fv_attend_few_rows)(const fv_attend_job *job, const fv_attend_job *next_job, void *memory)
{
    const fv_attend_params *params = job->params;
    const int32_t num_rows = fv_few_rows_in_group(job->num_rows);
    const few_item few = {
        .job = job,
        .scratch = few_scratch_of(params, job->num_rows, memory),
        .num_groups = (job->num_rows + num_rows - 1) / num_rows,
        .num_rows = num_rows,
        .tile_keys = few_tile_keys(params, job->lane_dtype),
    };
    few_item next_few = few;
    next_few.job = next_job;
    const int32_t num_heads = job->item->num_kv_heads;
    for (int32_t head = 0; head < num_heads; head++) head_init(&few, head);

    tile_rows tile = tile_from(&few, job->keys.first, 0);
    fv_prefetch_portion last = fv_prefetch_nothing(few.scratch.q).last;
    while (tile.first < tile.end) {
        const tile_rows next = tile_from(&few, tile.first_key + tile.end, !tile.turn);
        fv_prefetch_stream ahead;
        if (next.first < next.end || next_job->keys.first >= next_job->keys.end) {
            ahead = prefetch_tile(&few, &next);
        } else {
            const tile_rows of_next_item = tile_from(&next_few, next_job->keys.first, !tile.turn);
            ahead = prefetch_tile(&next_few, &of_next_item);
        }
        ahead.last = last;
        tile.rows.ahead = &ahead;
        for (int32_t head = 0; head < num_heads; head++) attend_tile_head(&few, &tile, head);
        tile = next;
        last = ahead.last;
    }
    for (int32_t head = 0; head < num_heads; head++) finish_head(&few, head);
}
