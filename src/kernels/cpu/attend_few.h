/* attend_paged for few rows: decode, and verification of a few tokens.
 *
 * Bound by the bytes of K and V, so they are read once, where they lie, and converted in registers.
 * For each tile of keys the item's KV heads are served in turn: whole rows of the cache are used up
 * while they are near, and the rows of the next tile are prefetched between the arithmetic, a line for
 * each line that is worked on: in tracks, or in order and those before it again (prefetch_stream.h). Without that,
 * waiting and arithmetic add up instead of overlapping.
 *
 * Rows go in groups of R = 1, 2 or 4 that share each converted key (row_group.h), 3, 5, 6 and 9 rows in groups of 3. Eight dot
 * products (R rows x 8 / R keys), of 3 rows twelve, are reduced together, which leaves the scores in the order of the
 * softmax.
 *
 * A tile ends where the cache ends and dense rows begin; those that are stored in another dtype than
 * the cache are copied to fp32 first.
 *
 * Whoever includes this, once, has chosen the products (few_kernels.h) and defines `kernels_of`, [dtype][R], and
 * FV_FEW_HAS_E4M3_BITS, where it has that. */
#ifndef FV_KERNELS_CPU_ATTEND_FEW_H
#define FV_KERNELS_CPU_ATTEND_FEW_H

#include "kernels/cpu/few_tile.h"

#if defined(__AVX512BW__)
#define TILE_BYTES (128 * 1024) /* of K and V, all heads */
#else
#define TILE_BYTES (64 * 1024)
#endif

typedef struct few_scratch {
    fv_row_group *groups; /* [heads][num_groups] */
    float *q;             /* [heads][num_groups][D][R], see fv_few_pack_query */
    float *sums;          /* [heads][num_groups][Dv in blocks of columns][R][block], lane order */
    float *row;           /* [D or Dv] */
    float *scores;        /* [tile][R], and FV_FEW_SCORES_AHEAD, which loads of whole vectors reach */
    fv_few_tables tables;
    size_t bytes;
} few_scratch;

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
    scratch.tables = fv_few_tables_of(params, memory, &scratch.bytes);
    return scratch;
}

/* --- one tile, one item -------------------------------------------------------------------------------- */

typedef struct few_item {
    const fv_attend_job *job;
    few_scratch scratch;
    int32_t num_groups; /* of each head */
    int32_t num_rows;   /* R */
    fv_dtype dtype;     /* job->lane_dtype, or the kernels' own form of it */
} few_item;

/* Those that e4m3 may have by its bits: where the CPU takes what is subnormal as it is, and no rows have become fp32, whose
 * lane order is another. */
static fv_dtype few_dtype_of(const fv_attend_job *job)
{
#if defined(FV_FEW_HAS_E4M3_BITS)
    const int32_t are_bytes = job->lane_dtype == FV_DTYPE_F8_E4M3 &&
                              (!job->params->dense.k || job->dense.dtype == FV_DTYPE_F8_E4M3);
    const int32_t denormals_are_zeros = (_mm_getcsr() & _MM_DENORMALS_ZERO_MASK) != 0; /* whoever linked -ffast-math */
    if (are_bytes && job->params->subnormals_are_fast && !denormals_are_zeros) return FV_FEW_E4M3_BITS;
#endif
    return job->lane_dtype;
}

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
        fv_row_load_lanes(few->scratch.row, from, head_size, params->q_dtype, fv_few_query_order(few->dtype));
        fv_few_pack_query(q, few->scratch.row, r % few->num_rows, head_size, few->num_rows, few->dtype);
    }
    const int64_t num_sums = (int64_t)padded_rows * fv_few_padded(params->v_head_size);
    memset(few->scratch.sums + head * num_sums, 0, (size_t)num_sums * sizeof(float));
}

static void attend_tile_head(void *user, fv_few_tile *tile, int32_t head)
{
    const few_item *few = user;
    const fv_attend_job *job = few->job;
    const fv_attend_params *params = job->params;
    const few_scratch *scratch = &few->scratch;
    const int32_t num_rows = few->num_rows;
    const fv_dtype dtype = tile->source->dtype == job->lane_dtype ? few->dtype : tile->source->dtype;
    const fv_few_kernels *kernels = &kernels_of[dtype][num_rows];
    const float factor = fv_few_factor(dtype);
    fv_softmax_span span = {
        .job = job,
        .k_scales = tile->k_scales,
        .v_scales = tile->v_scales,
        .first_key = tile->first_key,
        .scale = fv_attend_score_scale(job, job->item->first_kv_head + head),
        .weight_factor = factor,
    };
    const float dot_factor = fv_few_take_factor(&span.scale, factor);
    const fv_prefetch_order order = tile->rows.ahead->order;
    const int32_t in_tracks = order == FV_PREFETCH_IN_TRACKS;
    fv_prefetch_stream nothing;
    fv_key_rows rows = tile->rows;
    if (in_tracks) fv_prefetch_aim_at_nothing(&nothing, scratch->q);

    for (int32_t g = 0; g < few->num_groups; g++) {
        fv_row_group *group = &scratch->groups[head * few->num_groups + g];
        const int32_t first = fv_max_i32(group->some.first - tile->first_key, tile->first);
        const int32_t end = fv_min_i32(group->some.end - tile->first_key, tile->end);
        if (first >= end) continue;
        const int64_t first_row = (int64_t)(head * few->num_groups + g) * num_rows;
        const int32_t all_first = group->all.first - tile->first_key, all_end = group->all.end - tile->first_key;
        const int32_t some_masked = all_first > first || all_end < end;
        const int32_t num_keys = FV_LANES / fv_few_scores_of_key(num_rows);
        span.first = first;
        span.end = end;
        span.first_row = g * num_rows;
        span.is_edge = some_masked || first % num_keys != 0 || end % num_keys != 0;

        float rescale[FV_LANES];
        kernels->dot[order](scratch->scores, scratch->q + first_row * fv_few_padded(params->head_size), &rows, first,
                            end, params->head_size);
        if (dot_factor != 1.0f) fv_few_grow_dots(scratch->scores, dot_factor, first, end, num_rows);
        const int32_t max_grew = kernels->softmax(group, scratch->scores, rescale, &span);
        if (in_tracks && some_masked) rows.ahead = &nothing;
        const fv_few_accumulate_fn add = some_masked ? kernels->accumulate_masked : kernels->accumulate[order];
        add(scratch->sums + first_row * fv_few_padded(params->v_head_size), scratch->scores, max_grew ? rescale : NULL,
            &rows, first, end, params->v_head_size);
        if (in_tracks) rows.ahead = &nothing; /* one of a head's groups asks for as much as it reads */
    }
}

static void finish_head(const few_item *few, int32_t head)
{
    const fv_attend_params *params = few->job->params;
    for (int32_t row = 0; row < few->job->num_rows; row++) {
        const int32_t g = row / few->num_rows, lane = row % few->num_rows;
        const fv_row_group *group = &few->scratch.groups[head * few->num_groups + g];
        const int64_t first_row = (int64_t)(head * few->num_groups + g) * few->num_rows;
        fv_few_unblock_row(few->scratch.row, few->scratch.sums + first_row * fv_few_padded(params->v_head_size), lane,
                           few->num_rows, params->v_head_size, few->dtype);
        const fv_f32x8 sum = fv_sum_by_period(group->sum, fv_few_scores_of_key(few->num_rows));
        fv_attend_finish_row(few->job, few->job->item->first_kv_head + head, row, few->scratch.row, group->max[lane],
                             sum[lane]);
    }
}

static void attend_few(const fv_attend_job *job, const fv_attend_job *next_job, void *memory)
{
    const int32_t num_rows = fv_few_rows_in_group(job->num_rows);
    few_item few = {
        .job = job,
        .scratch = few_scratch_of(job->params, job->num_rows, memory),
        .num_groups = (job->num_rows + num_rows - 1) / num_rows,
        .num_rows = num_rows,
        .dtype = few_dtype_of(job),
    };
    const fv_few_keys keys = {
        .job = job,
        .tables = &few.scratch.tables,
        .tile_keys = fv_few_tile_keys(job->params, job->lane_dtype, TILE_BYTES),
    };
    for (int32_t head = 0; head < job->item->num_kv_heads; head++) head_init(&few, head);
    fv_few_keys_walk(&keys, next_job, attend_tile_head, &few);
    for (int32_t head = 0; head < job->item->num_kv_heads; head++) finish_head(&few, head);
}

#endif
