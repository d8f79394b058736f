/* mla_decode for few rows, query tokens x heads: decode on a rank with few heads.
 *
 * Bound by the bytes of the cache, so each latent is read once for all rows: a tile is as small as half an L1
 * cache, its rows are keys first and values right after, and the lines of the next tile are prefetched between
 * the arithmetic of both products (few_rows.h, few_wide.h), twice, for a core drops prefetches when its miss buffers
 * are full. Latents are converted in registers where they lie; those in fp8, those to be rotated and those with a scale
 * for each token are brought to fp32 first, a smaller tile of them. */
#define FV_FEW_ASKS_BY_LINE 1
#if defined(__AVX512BW__)
#include "kernels/cpu/few_wide.h"
#else
#include "kernels/cpu/few_rows.h"
#endif
#include "kernels/cpu/latent_rows.h"
#include "kernels/cpu/mla_decode_rows.h"

FV_FEW_DEFINE_ALL

static const fv_few_kernels kernels_of[][5] = FV_FEW_KERNEL_TABLE;

enum {
    TILE_KEYS = 16,
    COPIED_TILE_KEYS = 8,
    ASKS = 2,       /* for each line */
    ASK_PARTS = 4,  /* of a tile: each is asked for ASKS times before the next one */
    COPIED_ROWS = 4 /* above so many the copies of mla_many_rows.c serve better */
};

typedef struct few_scratch {
    fv_row_group *groups;
    float *q;    /* [groups][D, padded][R], see fv_few_pack_query */
    float *sums; /* of each group [Dv, padded, in blocks of columns][R][block], lane order */
    float *row;  /* [D] */
    float *scores;
    float *latents;           /* [tile][stride] of those that are brought to fp32 */
    float *copy;              /* one row of them */
    const char **rows[2];     /* [tile] of this tile and the next, in turn */
    const char **asked;       /* [ASKS * tile] of the next, in the order in which they are asked for */
    const char **addresses;   /* [tile], while they are brought to fp32 */
    const char **latent_rows; /* [tile] rows of `latents` */
    int32_t stride;
    size_t bytes;
} few_scratch;

typedef struct few_item {
    const fv_attend_job *job;
    few_scratch scratch;
    int32_t num_groups;
    int32_t num_rows; /* R */
    int32_t tile_keys;
    int32_t in_place;
    int32_t row_bytes; /* of an entry in the cache */
    fv_dtype dtype;    /* of the rows that are worked on */
} few_item;

/* `first` and `end` count from the tile's first key. */
typedef struct few_tile {
    int32_t first_key;
    int32_t first, end;
    int32_t turn;
} few_tile;

static few_scratch few_scratch_of(const fv_attend_params *params, int32_t num_rows, void *memory)
{
    const size_t rows = (size_t)fv_round_up(num_rows, fv_rows_in_group(num_rows));
    const size_t q_size = (size_t)fv_few_padded(params->head_size), v_size = (size_t)fv_few_padded(params->v_head_size);
    few_scratch scratch = {.stride = (int32_t)fv_round_up(params->head_size, 16)};
    const size_t row_bytes = (size_t)scratch.stride * sizeof(float);
    scratch.groups = fv_scratch_take(memory, &scratch.bytes, rows * sizeof(fv_row_group));
    scratch.q = fv_scratch_take(memory, &scratch.bytes, rows * q_size * sizeof(float));
    scratch.sums = fv_scratch_take(memory, &scratch.bytes, rows * v_size * sizeof(float));
    scratch.row = fv_scratch_take(memory, &scratch.bytes, row_bytes);
    scratch.scores = fv_scratch_take(memory, &scratch.bytes, (TILE_KEYS * 4 + FV_FEW_SCORES_AHEAD) * sizeof(float));
    scratch.latents = fv_scratch_take(memory, &scratch.bytes, COPIED_TILE_KEYS * row_bytes);
    scratch.copy = fv_scratch_take(memory, &scratch.bytes, row_bytes);
    for (int32_t i = 0; i < 2; i++) {
        scratch.rows[i] = fv_scratch_take(memory, &scratch.bytes, TILE_KEYS * sizeof(char *));
    }
    scratch.asked = fv_scratch_take(memory, &scratch.bytes, ASKS * TILE_KEYS * sizeof(char *));
    scratch.addresses = fv_scratch_take(memory, &scratch.bytes, COPIED_TILE_KEYS * sizeof(char *));
    scratch.latent_rows = fv_scratch_take(memory, &scratch.bytes, COPIED_TILE_KEYS * sizeof(char *));
    return scratch;
}

size_t FV_ISA_SYMBOL(fv_mla_few_scratch)(const fv_attend_params *params)
{
    return few_scratch_of(params, FV_DECODE_ROWS, NULL).bytes;
}

/* Latents are worked on where they lie. fp8 is not: to decode it twice is no faster than to keep it. */
static int32_t reads_in_place(const fv_attend_params *params)
{
    const fv_kv_view *cache = &params->cache;
    const int64_t bytes = (int64_t)fv_dtype_bytes(cache->dtype);
    return bytes > 1 && !cache->k_scales.data && !params->rotation.cos && fv_plane_is_dense(&cache->k, bytes);
}

int32_t FV_ISA_SYMBOL(fv_mla_few_limit)(const fv_attend_params *params)
{
    return reads_in_place(params) ? FV_DECODE_ROWS : COPIED_ROWS;
}

/* --- one item -------------------------------------------------------------------------------------------- */

static void begin_rows(const few_item *few)
{
    const fv_attend_params *params = few->job->params;
    const few_scratch *scratch = &few->scratch;
    const int32_t padded_rows = few->num_groups * few->num_rows;
    for (int32_t g = 0; g < few->num_groups; g++) {
        fv_row_group_init(&scratch->groups[g], few->job, 0, g * few->num_rows, few->num_rows);
    }
    for (int32_t row = 0; row < padded_rows; row++) {
        const char *from = fv_attend_q_row(few->job, 0, fv_min_i32(row, few->job->num_rows - 1));
        float *q = scratch->q + (int64_t)(row / few->num_rows * few->num_rows) * fv_few_padded(params->head_size);
        fv_row_load_lanes(scratch->row, from, params->head_size, params->q_dtype, few->job->lane_dtype);
        fv_few_pack_query(q, scratch->row, row % few->num_rows, params->head_size, few->num_rows, few->job->lane_dtype);
    }
    memset(scratch->sums, 0, (size_t)padded_rows * (size_t)fv_few_padded(params->v_head_size) * sizeof(float));
    if (few->in_place) return;
    for (int32_t i = 0; i < COPIED_TILE_KEYS; i++) {
        scratch->latent_rows[i] = (const char *)(scratch->latents + (int64_t)i * scratch->stride);
    }
}

/* The item's tile that starts at key `key`, with the rows looked up; empty at the end of the keys. Entries before
 * and behind them repeat the first and the last. */
static few_tile tile_from(const few_item *few, int32_t key, int32_t turn)
{
    const fv_attend_job *job = few->job;
    const int32_t first_key = key / few->tile_keys * few->tile_keys;
    const int32_t end_key = fv_min_i32(job->keys.end, first_key + few->tile_keys);
    const few_tile tile = {first_key, key - first_key, end_key - first_key, turn};
    if (key >= end_key) return tile;

    const char **rows = few->scratch.rows[turn];
    fv_attend_find_rows(rows + tile.first, job, &job->params->cache.k, key, end_key);
    for (int32_t i = 0; i < tile.first; i++) rows[i] = rows[tile.first];
    for (int32_t i = tile.end; i < few->tile_keys; i++) rows[i] = rows[tile.end - 1];
    return tile;
}

/* Aims at the lines of a tile, ASKS times each. */
static void aim_ahead(fv_prefetch_stream *stream, const few_item *few, const few_tile *tile)
{
    if (tile->first >= tile->end) {
        fv_prefetch_aim_at_nothing(stream, few->scratch.q);
        return;
    }
    const char **asked = few->scratch.asked, *const *rows = few->scratch.rows[tile->turn];
    const int32_t part = few->tile_keys / ASK_PARTS;
    int32_t num_asked = 0;
    for (int32_t first = 0; first < few->tile_keys; first += part) {
        for (int32_t i = 0; i < ASKS * part; i++) asked[num_asked++] = rows[first + i % part];
    }
    const fv_prefetch_rows of = {
        .rows = {asked},
        .num_planes = 1,
        .num_heads = 1,
        .row_bytes = few->row_bytes,
        .end = num_asked,
    };
    fv_prefetch_aim(stream, &of, 1, FV_CACHE_LINE);
}

/* Brings the tile's latents to fp32. Rows before and behind the keys are 0: their scores are computed too. */
static void load_latents(const few_item *few, const few_tile *tile)
{
    const few_scratch *scratch = &few->scratch;
    const int64_t stride = scratch->stride;
    memset(scratch->latents, 0, (size_t)(tile->first * stride) * sizeof(float));
    memset(scratch->latents + tile->end * stride, 0, (size_t)((COPIED_TILE_KEYS - tile->end) * stride) * sizeof(float));
    fv_latents_load(scratch->latents + tile->first * stride, scratch->stride, scratch->addresses, scratch->copy,
                    few->job, tile->first_key + tile->first, tile->first_key + tile->end);
}

static void attend_tile(const few_item *few, const few_tile *tile, fv_prefetch_stream *ahead)
{
    const fv_attend_job *job = few->job;
    const fv_attend_params *params = job->params;
    const few_scratch *scratch = &few->scratch;
    const int32_t num_rows = few->num_rows, num_keys = FV_LANES / num_rows;
    const fv_few_kernels *kernels = &kernels_of[few->dtype][num_rows];
    fv_prefetch_stream nothing;
    fv_prefetch_aim_at_nothing(&nothing, scratch->q);

    if (!few->in_place) load_latents(few, tile);
    const char *const *latents = few->in_place ? scratch->rows[tile->turn] : scratch->latent_rows;
    fv_key_rows rows = {
        .k = latents,
        .v = latents,
        .v_stride = fv_few_row_stride(latents, tile->first, tile->end),
        .ahead = ahead,
    };
    assert(fv_few_factor(few->dtype) == 1.0f); /* fp8 is not worked on in place */
    fv_softmax_span span = {
        .job = job,
        .first_key = tile->first_key,
        .scale = fv_attend_score_scale(job, 0),
        .weight_factor = 1.0f,
    };
    for (int32_t g = 0; g < few->num_groups; g++) {
        fv_row_group *group = &scratch->groups[g];
        const int32_t first = fv_max_i32(group->some.first - tile->first_key, tile->first);
        const int32_t end = fv_min_i32(group->some.end - tile->first_key, tile->end);
        if (first >= end) continue;
        const int32_t all_first = group->all.first - tile->first_key, all_end = group->all.end - tile->first_key;
        const int32_t some_masked = all_first > first || all_end < end;
        span.first = first;
        span.end = end;
        span.first_row = g * num_rows;
        span.is_edge = some_masked || first % num_keys != 0 || end % num_keys != 0;

        float rescale[FV_LANES];
        float *sums = scratch->sums + (int64_t)span.first_row * fv_few_padded(params->v_head_size);
        kernels->dot[0](scratch->scores, scratch->q + (int64_t)span.first_row * fv_few_padded(params->head_size), &rows,
                        first, end, params->head_size);
        const int32_t max_grew = kernels->softmax(group, scratch->scores, rescale, &span);
        const fv_few_accumulate_fn add = some_masked ? kernels->accumulate_masked : kernels->accumulate[0];
        add(sums, scratch->scores, max_grew ? rescale : NULL, &rows, first, end, params->v_head_size);
        rows.ahead = &nothing; /* the first group has called for all of the next tile */
    }
}

static void finish_rows(const few_item *few)
{
    const fv_attend_params *params = few->job->params;
    for (int32_t row = 0; row < few->job->num_rows; row++) {
        const int32_t g = row / few->num_rows, lane = row % few->num_rows;
        const fv_row_group *group = &few->scratch.groups[g];
        const float *sums = few->scratch.sums + (int64_t)g * few->num_rows * fv_few_padded(params->v_head_size);
        fv_few_unblock_row(few->scratch.row, sums, lane, few->num_rows, params->v_head_size, few->job->lane_dtype);
        const fv_f32x8 sum = fv_sum_by_period(group->sum, few->num_rows);
        fv_attend_finish_row(few->job, 0, row, few->scratch.row, group->max[lane], sum[lane]);
    }
}

void FV_ISA_SYMBOL(fv_mla_few_rows)(const fv_attend_job *of_item, void *memory)
{
    const fv_attend_params *params = of_item->params;
    const fv_kv_view *cache = &params->cache;
    fv_attend_job job = *of_item;
    const int32_t in_place = reads_in_place(params);
    job.lane_dtype = in_place ? cache->dtype : FV_DTYPE_F32;
    job.k_head_scale = job.v_head_scale = in_place ? params->k_scale : NULL;
    job.has_k_scales = job.has_v_scales = 0;

    const int32_t num_rows = fv_rows_in_group(job.num_rows);
    const int32_t is_ds = cache->layout == FV_KV_LAYOUT_LATENT_FP8_DS;
    const few_item few = {
        .job = &job,
        .scratch = few_scratch_of(params, job.num_rows, memory),
        .num_groups = (job.num_rows + num_rows - 1) / num_rows,
        .num_rows = num_rows,
        .tile_keys = in_place ? TILE_KEYS : COPIED_TILE_KEYS,
        .in_place = in_place,
        .row_bytes = is_ds ? FV_DS_ENTRY_BYTES : params->head_size * (int32_t)fv_dtype_bytes(cache->dtype),
        .dtype = job.lane_dtype,
    };
    begin_rows(&few);
    few_tile tile = tile_from(&few, job.keys.first, 0);
    while (tile.first < tile.end) {
        const few_tile next = tile_from(&few, tile.first_key + tile.end, !tile.turn);
        fv_prefetch_stream ahead;
        aim_ahead(&ahead, &few, &next);
        fv_prefetch_sparsely(&ahead);
        attend_tile(&few, &tile, &ahead);
        tile = next;
    }
    finish_rows(&few);
}
