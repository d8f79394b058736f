/* attend_paged and attend_dense with tiles: attend_tiles.c and, up to 32 rows, attend_few_tiles.c. What tiles do not
 * serve, queries of other dtypes than bf16 and fp16, head sizes that are not multiples of 8, goes to the level below,
 * avx512_bf16; so do one and two rows, up to 4 over pages that are not multiples of 16 keys and over pieces of 16-bit numbers, up to
 * 12 of fp16, and few rows over caches whose keys are strided otherwise.
 *
 * A Q block of 512 rows makes the pairs of V, once for a block of keys, a small part of the products. */
#include "kernels/cpu/amx/item_loop.h"

/* The largest blocks of the base, whose strategies take any number of rows. */
#define PAGED_BASE (&FV_BASE_SYMBOL(fv_attend_paged)[FV_NUM_VARIANTS_attend_paged - 1])
#define DENSE_BASE (&FV_BASE_SYMBOL(fv_attend_dense)[FV_NUM_VARIANTS_attend_dense - 1])

static int32_t attend_item(const fv_attend_params *params, const fv_work_item *item, void *scratch,
                           fv_rescaling rescaling, fv_key_shares *shares)
{
    const fv_attend_job job = fv_attend_job_of(params, item);
    const int32_t query_len = params->query_start[item->seq + 1] - params->query_start[item->seq];
    const int64_t num_rows = (int64_t)fv_max_i32(query_len, item->num_tokens) * job.group;
    return fv_item_loop_tiles(&job, num_rows, scratch, rescaling, shares);
}

static fv_status launch_paged(const fv_launch *launch, const fv_attend_params *params)
{
    return fv_item_loop_run(&(fv_item_loop){launch, params, PAGED_BASE, attend_item, FV_RESCALING_MULTIPLY, NULL});
}

static fv_status launch_dense(const fv_launch *launch, const fv_attend_params *params)
{
    assert(params->dense.k);
    const fv_attend_params dense = fv_attend_without_cache(params);
    return fv_item_loop_run(&(fv_item_loop){launch, &dense, DENSE_BASE, attend_item, FV_RESCALING_MULTIPLY, NULL});
}

static size_t paged_scratch(const fv_attend_params *params) { return fv_item_loop_scratch(params, PAGED_BASE); }
static size_t dense_scratch(const fv_attend_params *params) { return fv_item_loop_scratch(params, DENSE_BASE); }

static const char *paged_why_not(const fv_problem *problem) { return fv_item_loop_why_not(problem, PAGED_BASE); }
static const char *dense_why_not(const fv_problem *problem) { return fv_item_loop_why_not(problem, DENSE_BASE); }

static int32_t layout_has_pieces(fv_kv_layout layout)
{
    return layout == FV_KV_LAYOUT_X_PACKED || layout == FV_KV_LAYOUT_SHUFFLED;
}

/* Are rows of the cache side by side, or in pieces that become rows? What is strided otherwise goes to the base, which deals out
 * nothing. */
static int32_t layout_has_rows(fv_kv_layout layout)
{
    return layout == FV_KV_LAYOUT_NB_2_BS_H_D || layout == FV_KV_LAYOUT_2_NB_BS_H_D ||
           layout == FV_KV_LAYOUT_PACKED_NHD || layout == FV_KV_LAYOUT_PACKED_HND || layout_has_pieces(layout);
}

/* As fv_item_loop_tiles and fv_few_tiles_serve have it, of all items. */
static int32_t few_tiles_serve(const fv_problem *problem)
{
    if (FV_ISA_SYMBOL(fv_tiles_why_not)(problem) || problem->q_dtype != FV_DTYPE_BF16) return 0;
    if (!layout_has_rows(problem->kv_layout)) return 0;
    return problem->block_size % FV_TILE_ROWS == 0;
}

static int32_t paged_deals_keys(const fv_problem *problem)
{
    const int32_t group = problem->mha.num_heads / problem->mha.num_kv_heads;
    if (!few_tiles_serve(problem) || problem->window || problem->context_parallel.world > 1) return 0;
    const int32_t has_piece_words = problem->kv_dtype == FV_DTYPE_BF16 && layout_has_pieces(problem->kv_layout);
    const int32_t is_slow = problem->kv_scaling == FV_KV_SCALING_PER_TOKEN_HEAD || problem->kv_dtype == FV_DTYPE_I8 ||
                            has_piece_words || fv_heads_are_padded(problem->mha.head_size, problem->mha.v_head_size);
    const int32_t least_rows = is_slow ? FV_TILE_LEAST_COPIED_ROWS : FV_TILE_LEAST_ROWS;
    return group >= least_rows && problem->mha.num_kv_heads <= FV_TILE_MAX_HEADS;
}

static int32_t paged_shared_rows(const fv_problem *problem)
{
    if (few_tiles_serve(problem)) return FV_FEW_TILE_ROWS;
    const fv_attend_variant *base = &FV_BASE_SYMBOL(fv_attend_paged)[0];
    return FV_ISA_SYMBOL(fv_tiles_why_not)(problem) && base->shared_rows ? base->shared_rows(problem) : FV_DECODE_ROWS;
}

/* Measured, 32/8 heads of 128: 37 ns for a key of a KV head with four rows, which is read from memory, 0.69 for a row x key of a
 * Q block (docs/notes/cpu-amx.md, "Which items come first"). Where tiles do not serve, neither is faster. */
static int32_t paged_few_row_cost(const fv_problem *problem)
{
    return FV_ISA_SYMBOL(fv_tiles_why_not)(problem) ? 1 : 6;
}

const fv_attend_variant FV_ISA_SYMBOL(fv_attend_paged)[FV_NUM_VARIANTS_attend_paged] = {
    {"tiles16", 16, 64, paged_why_not, paged_scratch, launch_paged, .rescaling = FV_RESCALING_MULTIPLY,
     .deals_keys = paged_deals_keys, .shared_rows = paged_shared_rows, .few_row_cost = paged_few_row_cost},
    {"tiles128", 128, 64, paged_why_not, paged_scratch, launch_paged, .rescaling = FV_RESCALING_MULTIPLY,
     .deals_keys = paged_deals_keys, .shared_rows = paged_shared_rows, .few_row_cost = paged_few_row_cost},
    {"tiles512", 512, 64, paged_why_not, paged_scratch, launch_paged, .rescaling = FV_RESCALING_MULTIPLY,
     .deals_keys = paged_deals_keys, .shared_rows = paged_shared_rows, .few_row_cost = paged_few_row_cost},
};

const fv_attend_variant FV_ISA_SYMBOL(fv_attend_dense)[FV_NUM_VARIANTS_attend_dense] = {
    {"tiles128", 128, 64, dense_why_not, dense_scratch, launch_dense, .rescaling = FV_RESCALING_MULTIPLY},
    {"tiles512", 512, 64, dense_why_not, dense_scratch, launch_dense, .rescaling = FV_RESCALING_MULTIPLY},
};
