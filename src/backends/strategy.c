/* Choosing variants and laying out memory. What a workspace has beyond the least is shared out, so that a
 * small one leads to more chunks and fewer segments, never to more memory:
 *
 *   scratch x workers | partial results: a quarter | gathered K, V: a quarter | two state buffers: half
 *
 * MLA has two more, absorbed queries and attended latents, of an eighth, which its states give. */
#include "backends/strategy.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backends/context_room.h"
#include "backends/static_list.h"
#include "core/error.h"
#include "planner/lane_cut.h"

#define STATIC_SEGMENTS 16
#define MOST_STATIC_SEGMENTS 65535             /* the last dimension of a GPU's grid */
#define DEFAULT_WORKSPACE_BYTES (256ull << 20) /* beside the scratch */
#define MAX_SLOT_BYTES (64ull << 20)
#define DEFAULT_MLA_WORKSPACE_BYTES (1024ull << 20) /* a row of 128 expanded heads takes 80 KiB */
#define MOST_WEIGHED_ROWS (1 << 24)                 /* of a Q block: far more than any kernel has */
#define MOST_WORK_ITEMS (1 << 26)                   /* of a plan, */
#define MOST_INDICES (1 << 28)                      /* numbers of its index arrays, */
#define MOST_CALLS (1 << 24)                        /* and kernel calls of a step */

/* --- variants ----------------------------------------------------------------------------------------- */

/* The smallest Q block that takes `rows` at once, or else the largest; of those that rescale as the backend
 * wants. */
static const fv_attend_variant *fitting_variant(const char **refusal, const fv_problem *problem,
                                                const fv_attend_variant *variants, int32_t num_variants, int64_t rows,
                                                fv_rescaling rescaling)
{
    const fv_attend_variant *best = NULL;
    *refusal = "the table has none";
    for (int32_t i = 0; i < num_variants; i++) {
        const fv_attend_variant *variant = &variants[i];
        const char *reason = variant->why_not(problem);
        if (variant->rescaling != rescaling) reason = "no variant rescales as the backend wants";
        if (reason) {
            *refusal = reason;
            continue;
        }
        const int32_t fits = variant->block_m >= rows;
        if (!best || (fits && (best->block_m < rows || variant->block_m < best->block_m)) ||
            (!fits && best->block_m < rows && variant->block_m > best->block_m)) {
            best = variant;
        }
    }
    return best;
}

/* Variants of one operation, and what they have to serve. */
typedef struct variant_list {
    const char *operation;
    const fv_attend_variant *variants;
    int32_t num_variants;
    const fv_problem *problem;
    fv_rescaling rescaling;
} variant_list;

/* A variant that is asked for: there is none of the name, or it does not serve the problem. */
static fv_status refuse_variant(const fv_plan *plan, const char *asked, const variant_list *list)
{
    const char *reason = NULL;
    char names[256] = "";
    size_t used = 0;
    for (int32_t i = 0; i < list->num_variants; i++) {
        const fv_attend_variant *variant = &list->variants[i];
        const char *why_not = variant->why_not(list->problem);
        if (strcmp(variant->name, asked) == 0) reason = why_not;
        if (why_not || used >= sizeof(names)) continue;
        used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", used ? ", " : "", variant->name);
    }
    if (reason) {
        return fv_fail(FV_ERR_UNSUPPORTED, "variant '%s' of %s does not serve the problem: %s; kernels %s that do: %s",
                       asked, list->operation, reason, plan->kernels->name, names);
    }
    return fv_fail(FV_ERR_INVALID, "no variant '%s' of %s; kernels %s that serve the problem: %s", asked,
                   list->operation, plan->kernels->name, names);
}

static fv_status choose_variant(const fv_attend_variant **chosen, const fv_plan *plan, const char *asked,
                                const variant_list *list)
{
    const fv_attend_variant *variants = list->variants;
    /* With a shared prefix all sequences' rows may meet in one Q block. */
    const int32_t tokens = plan->rule.cascade ? fv_max_i32(plan->bounds.max_query_len, plan->bounds.max_num_seqs)
                                              : plan->bounds.max_query_len;
    const char *refusal;
    *chosen = fitting_variant(&refusal, list->problem, variants, list->num_variants,
                              (int64_t)tokens * fv_group_of(list->problem), list->rescaling);
    if (!*chosen) {
        return fv_fail(FV_ERR_UNSUPPORTED, "no %s of kernels %s serves the problem: %s", list->operation,
                       plan->kernels->name, refusal);
    }
    if (!asked) return FV_OK;
    for (int32_t i = 0; i < list->num_variants; i++) {
        if (strcmp(variants[i].name, asked) != 0 || variants[i].why_not(list->problem)) continue;
        *chosen = &variants[i];
        return FV_OK;
    }
    return refuse_variant(plan, asked, list);
}

static fv_status choose_variants(fv_plan *plan, const fv_strategy *strategy)
{
    const fv_kernel_table *kernels = plan->kernels;
    const variant_list paged = {"attend_paged", kernels->attend_paged, kernels->num_attend_paged, &plan->problem,
                                FV_RESCALING_MULTIPLY};
    const variant_list mla = {"mla_decode", kernels->mla_decode, kernels->num_mla_decode, &plan->problem,
                              strategy->rescaling};
    const variant_list dense = {"attend_dense", kernels->attend_dense, kernels->num_attend_dense, &plan->dense_problem,
                                FV_RESCALING_MULTIPLY};
    const int32_t is_mla = plan->problem.kind == FV_ATTENTION_MLA;
    const fv_status status = choose_variant(&plan->paged, plan, plan->options.variant, is_mla ? &mla : &paged);
    const int32_t needs_dense = strategy->needs_dense || plan->problem.type == FV_ATTENTION_ENCODER || plan->absorbs;
    if (status != FV_OK || !needs_dense) return status;
    return choose_variant(&plan->dense, plan, NULL, &dense);
}

/* --- the workspace -------------------------------------------------------------------------------------- */

static size_t slot_bytes(const fv_plan *plan)
{
    return (size_t)plan->problem.mha.num_heads * (size_t)(plan->problem.mha.v_head_size + 2) * sizeof(float);
}

/* A row of both state buffers. */
static size_t state_row_bytes(const fv_plan *plan)
{
    const fv_mha_shape *dense = &plan->dense_problem.mha;
    return 2 * (size_t)dense->num_heads * (size_t)(dense->v_head_size + 1) * sizeof(float);
}

/* Elements of a row of gathered K, or of gathered latents. */
static size_t gather_k_elements(const fv_plan *plan)
{
    return (size_t)plan->problem.mha.num_kv_heads * (size_t)plan->problem.mha.head_size;
}

/* Of gathered V, or of latents expanded to nope parts and values of all heads. */
static size_t gather_v_elements(const fv_plan *plan)
{
    const fv_mla_shape *mla = &plan->problem.mla;
    if (plan->absorbs) return (size_t)mla->num_heads * (size_t)(mla->qk_nope_head_dim + mla->v_head_dim);
    return (size_t)plan->problem.mha.num_kv_heads * (size_t)plan->problem.mha.v_head_size;
}

static size_t gather_row_bytes(const fv_plan *plan)
{
    return (gather_k_elements(plan) + gather_v_elements(plan)) * fv_dtype_bytes(plan->gather_dtype);
}

/* A row of absorbed queries and of attended latents. */
static size_t absorb_row_bytes(const fv_plan *plan)
{
    const fv_mha_shape *mha = &plan->problem.mha;
    return (size_t)mha->num_heads * (size_t)(mha->head_size + mha->v_head_size) * fv_dtype_bytes(plan->problem.q_dtype);
}

/* The dtype that holds what the cache stands for: that of the queries where it is exact, else fp32. */
static fv_dtype exact_gather_dtype(const fv_problem *problem)
{
    const int32_t is_small = fv_dtype_bytes(problem->kv_dtype) == 1;
    const int32_t is_exact = problem->kv_dtype == problem->q_dtype || is_small;
    if (problem->kind == FV_ATTENTION_MLA) return problem->q_dtype; /* what the expanded keys are rounded to anyway */
    return is_exact && problem->kv_scaling == FV_KV_SCALING_NONE ? problem->q_dtype : FV_DTYPE_F32;
}

static size_t context_bytes(const fv_plan *plan, fv_context_limits limits)
{
    return (size_t)limits.state_tokens * state_row_bytes(plan) + (size_t)limits.gather_rows * gather_row_bytes(plan);
}

/* Rows of the state and gather buffers: those of `base`, and what half and a quarter of `surplus` bytes add; not less than the
 * least. */
static fv_context_limits size_contexts(const fv_plan *plan, const fv_context_limits *base,
                                       const fv_context_limits *least, size_t surplus)
{
    const int64_t block_size = plan->problem.block_size;
    const int64_t state_tokens = base->state_tokens + (int64_t)(surplus / 2 / state_row_bytes(plan));
    const int64_t gather_rows = base->gather_rows + (int64_t)(surplus / 4 / gather_row_bytes(plan));
    const int64_t rows = fv_min_i64(gather_rows, fv_context_room_most_rows(plan));
    const int64_t whole_blocks = rows / block_size * block_size;
    return (fv_context_limits){
        .state_tokens = (int32_t)fv_min_i64(state_tokens, fv_max_i32(least->state_tokens, plan->bounds.max_num_tokens)),
        .gather_rows = (int32_t)fv_max_i64(whole_blocks, least->gather_rows),
        .gathers_new = least->gathers_new,
    };
}

static size_t take(size_t *at, size_t bytes)
{
    const size_t offset = *at;
    *at += (size_t)fv_round_up((int64_t)bytes, FV_WORKSPACE_ALIGNMENT);
    return offset;
}

static void lay_out_workspace(fv_plan *plan)
{
    const fv_mha_shape *mha = &plan->problem.mha;
    const size_t heads = (size_t)mha->num_heads, slots = (size_t)plan->room.slot_capacity;
    const size_t gather_rows = (size_t)plan->contexts.gather_rows, states = (size_t)plan->contexts.state_tokens;
    const size_t gather_bytes = gather_rows * fv_dtype_bytes(plan->gather_dtype);
    const size_t absorbed_heads = (size_t)plan->absorb_rows * heads * fv_dtype_bytes(plan->problem.q_dtype);
    const fv_mha_shape *dense = &plan->dense_problem.mha;
    fv_workspace_layout *layout = &plan->workspace;
    size_t at = 0;
    layout->scratch = take(&at, layout->scratch_bytes * (size_t)plan->device->num_workers);
    layout->partial_out = take(&at, slots * heads * (size_t)mha->v_head_size * sizeof(float));
    layout->partial_max = take(&at, slots * heads * sizeof(float));
    layout->partial_sum = take(&at, slots * heads * sizeof(float));
    layout->gather_k = take(&at, gather_bytes * gather_k_elements(plan));
    layout->gather_v = take(&at, gather_bytes * gather_v_elements(plan));
    layout->absorbed_q = take(&at, absorbed_heads * (size_t)mha->head_size);
    layout->latents = take(&at, absorbed_heads * (size_t)mha->v_head_size);
    for (int32_t i = 0; i < 2; i++) {
        layout->state_out[i] = take(&at, states * heads * (size_t)dense->v_head_size * sizeof(float));
        layout->state_lse[i] = take(&at, states * heads * sizeof(float));
    }
    layout->bytes = at;
}

static size_t variant_scratch(const fv_plan *plan, const fv_attend_variant *variant, const fv_problem *problem,
                              const fv_split_rule *rule)
{
    const fv_attend_params params = {
        .q_dtype = problem->q_dtype,
        .out_dtype = problem->out_dtype,
        .num_heads = problem->mha.num_heads,
        .num_kv_heads = problem->mha.num_kv_heads,
        .head_size = problem->mha.head_size,
        .v_head_size = problem->mha.v_head_size,
        .context_parallel = problem->context_parallel,
        .block_q = rule->block_q,
        .tile_keys = rule->tile_keys,
        .cache.layout = problem->kv_layout,
        .max_seq_len = plan->bounds.max_seq_len,
    };
    return variant->scratch_bytes(&params);
}

/* Scratch of a worker for either operation. */
static size_t scratch_bytes(const fv_plan *plan)
{
    const size_t paged = variant_scratch(plan, plan->paged, &plan->problem, &plan->rule);
    const size_t dense = plan->dense ? variant_scratch(plan, plan->dense, &plan->dense_problem, &plan->dense_rule) : 0;
    return (size_t)fv_round_up((int64_t)(paged > dense ? paged : dense), FV_WORKSPACE_ALIGNMENT) +
           FV_SCRATCH_GUARD_BYTES;
}

/* How long the lanes take for so many Q blocks of `rows` rows, each in segments. */
static float segments_time(const fv_split_rule *rule, int32_t rows, float num_blocks, int64_t segments,
                           float segment_keys)
{
    const float num_items = num_blocks * (float)segments, lanes = (float)rule->num_lanes;
    const float beside = segments > 1 ? fv_lane_part_keys(rule, rows, num_items) : (float)fv_lane_item_keys(rows, 0);
    const int32_t halves = fv_lanes_halve(rule, rows) && num_items > lanes && num_blocks <= 2 * lanes;
    const float time = halves && num_items <= 2 * lanes ? fv_half_lanes_time(rule, num_items, segment_keys, beside)
                                                        : fv_lane_time(rule, num_items, segment_keys, beside);
    return time + (halves && segments > 1 ? FV_HALF_LANE_REDUCTION : 0);
}

/* Segments with which the longest sequences allowed take the lanes of the device the least time: fv_work_list_append
 * weighs the same for a step's own lengths. Segments are whole tiles (fv_grid_item): the last ones may get none. */
static int64_t lane_segments(const fv_plan *plan, int64_t most)
{
    fv_split_rule rule = plan->rule;
    rule.lane_heads = 1; /* the batch may be smaller */
    const int64_t blocks = (int64_t)plan->bounds.max_num_seqs * plan->problem.mha.num_kv_heads;
    const int64_t keys = fv_max_i64(1, plan->bounds.max_seq_len), tiles = fv_ceil_div(keys, plan->rule.tile_keys);
    const int64_t longest = fv_max_i64(1, keys / FV_MIN_LANE_SEGMENT_KEYS);
    const int64_t tokens = fv_ceil_div(plan->bounds.max_num_tokens, plan->bounds.max_num_seqs); /* of a sequence */
    const int32_t rows = (int32_t)fv_min_i64(tokens * plan->group, MOST_WEIGHED_ROWS);
    int64_t best = 1;
    float best_time = INFINITY;
    for (int64_t segments = 1; segments <= fv_min_i64(most, longest); segments++) {
        const int64_t segment_keys = fv_ceil_div(tiles, segments) * plan->rule.tile_keys;
        const int64_t pieces = fv_ceil_div(keys, segment_keys);
        if (pieces < segments) continue; /* as good with fewer */
        const float time = segments_time(&rule, rows, (float)blocks, segments, (float)segment_keys);
        if (time < best_time) {
            best_time = time;
            best = segments;
        }
        if (blocks * segments > 8 * (int64_t)plan->rule.num_lanes) break;
    }
    return best;
}

/* Two segments, where all are one round of the lanes, become one that two lanes share: they hand to each other what
 * they would leave to a reduction (fv_lane_cut_choose, of lists). */
static void pair_segments(fv_plan *plan)
{
    const int64_t lanes = 2 * (int64_t)plan->bounds.max_num_seqs;
    if (plan->rule.splits_items != 1 || plan->num_segments != 2 || lanes > plan->rule.num_lanes) return;
    plan->num_segments = 1;
    plan->splits_cells = 1;
}

/* Segments of the static grid: for decode-like bounds or where path 3D is asked for, as many as the limit of
 * the slots allows. */
static void size_static_grid(fv_plan *plan, size_t slots_limit)
{
    plan->num_segments = 1;
    if (plan->static_list) return;
    const fv_bounds *bounds = &plan->bounds;
    const fv_plan_options *options = &plan->options;
    const int64_t most = (int64_t)(slots_limit / slot_bytes(plan)) / bounds->max_num_tokens;
    const int32_t is_short = fv_plan_decodes(plan);
    const int32_t follows_lanes = plan->rule.num_lanes > 0 && !options->batch_invariant &&
                                  options->path == FV_PATH_AUTO;
    const int32_t is_decode = is_short && (follows_lanes || most >= STATIC_SEGMENTS);
    const int32_t cut = options->path == FV_PATH_3D || (options->path == FV_PATH_AUTO && is_decode);
    int64_t num_segments = !cut ? 1 : follows_lanes ? lane_segments(plan, most) : STATIC_SEGMENTS;
    if (options->path == FV_PATH_3D && options->segment_keys > 0) {
        num_segments = fv_ceil_div(bounds->max_seq_len, options->segment_keys);
    }
    num_segments = fv_min_i64(num_segments, MOST_STATIC_SEGMENTS);
    plan->num_segments = (int32_t)fv_max_i64(1, fv_min_i64(num_segments, most));
    if (cut && follows_lanes) pair_segments(plan);
    if (plan->num_segments < 2) return;
    plan->room.slot_capacity = fv_max_i32(plan->room.slot_capacity, bounds->max_num_tokens * plan->num_segments);
}

/* --- the schedule's host memory ---------------------------------------------------------------------------- */

/* A step's, at most. */
static int64_t room_of_calls(const fv_plan *plan, const fv_context_room *contexts)
{
    const int64_t rounds = plan->bounds.max_num_seqs + 3 * (int64_t)plan->rule.num_passes; /* of decodes */
    return contexts->num_calls + (plan->absorbs && !plan->static_grid ? 2 * rounds : 0) + 16;
}

static fv_status allocate_schedule(fv_plan *plan, int64_t num_calls)
{
    const size_t seqs = (size_t)plan->bounds.max_num_seqs;
    plan->call_capacity = (int32_t)num_calls;
    const size_t run_bytes = seqs * sizeof(fv_query_run), piece_bytes = seqs * sizeof(fv_context_piece);
    const size_t group_bytes = (seqs / 2 + 1) * sizeof(fv_prefix_group);
    const size_t call_bytes = (size_t)plan->call_capacity * sizeof(fv_call);
    plan->schedule_bytes = 2 * run_bytes + piece_bytes + group_bytes + call_bytes + seqs * (sizeof(int32_t) + 1);
    plan->schedule_memory = fv_context_alloc(plan->context, plan->schedule_bytes);
    if (!plan->schedule_memory) return FV_ERR_NO_MEMORY;
    char *at = plan->schedule_memory;
    plan->runs = (fv_query_run *)(void *)at;
    plan->round_runs = (fv_query_run *)(void *)(at += run_bytes);
    plan->pieces = (fv_context_piece *)(void *)(at += run_bytes);
    plan->groups = (fv_prefix_group *)(void *)(at += piece_bytes);
    plan->calls = (fv_call *)(void *)(at += group_bytes);
    plan->extends = (int32_t *)(void *)(at += call_bytes);
    plan->not_causal = (uint8_t *)at + seqs * sizeof(int32_t);
    return FV_OK;
}

static fv_status check_room(const fv_plan *plan, const fv_context_room *contexts, const char *what, int64_t needed,
                            int64_t most)
{
    if (needed <= most) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "bounds of %d tokens, %d sequences of %d need %lld %s; accepted: %lld%s",
                   plan->bounds.max_num_tokens, plan->bounds.max_num_seqs, plan->bounds.max_seq_len, (long long)needed,
                   what, (long long)most, contexts->num_items > 0 ? ". A larger max_workspace_bytes needs fewer" : "");
}

static fv_status allocate(fv_plan *plan)
{
    const fv_context_room contexts = fv_context_room_of(plan, &plan->contexts);
    const int32_t has_list = !plan->static_grid || plan->static_list;
    const int64_t num_items = has_list ? plan->room.item_capacity + contexts.num_items : 0;
    const int64_t num_calls = room_of_calls(plan, &contexts);
    fv_status status = check_room(plan, &contexts, "work items", num_items, MOST_WORK_ITEMS);
    if (status == FV_OK) status = check_room(plan, &contexts, "indices", contexts.num_indices, MOST_INDICES);
    if (status == FV_OK) status = check_room(plan, &contexts, "kernel calls", num_calls, MOST_CALLS);
    if (status == FV_OK) status = check_room(plan, &contexts, "runs", plan->bounds.max_num_seqs, MOST_WORK_ITEMS);
    if (status == FV_OK) status = allocate_schedule(plan, num_calls);
    if (status != FV_OK) return status;
    plan->room.item_capacity = (int32_t)num_items;
    const int64_t flags = fv_ceil_div(plan->bounds.max_num_seqs, (int64_t)sizeof(int32_t)); /* of fv_schedule_step */
    const fv_step_sizes room = {plan->room.item_capacity, has_list ? plan->room.reduce_capacity : 0,
                                (int32_t)(contexts.num_indices + flags)};
    return fv_step_buffers_init(&plan->buffers, plan->device, &room);
}

/* --- the plan --------------------------------------------------------------------------------------------- */

fv_problem fv_dense_problem(const fv_problem *problem)
{
    fv_problem dense = *problem;
    if (problem->kind != FV_ATTENTION_MLA) return dense;
    const fv_mla_shape *mla = &problem->mla;
    dense.kind = FV_ATTENTION_MHA;
    dense.mha = (fv_mha_shape){
        .num_heads = mla->num_heads,
        .num_kv_heads = mla->num_heads,
        .head_size = mla->qk_nope_head_dim + mla->qk_rope_head_dim,
        .v_head_size = mla->v_head_dim,
    };
    return dense;
}

static int32_t may_cascade(const fv_plan *plan)
{
    const fv_plan_options *options = &plan->options;
    if (!plan->device->host_is_device) return 0; /* prefixes are found by reading the block table */
    return options->cascade != FV_CASCADE_OFF && !options->batch_invariant && !options->static_grid &&
           plan->problem.type == FV_ATTENTION_DECODER && plan->bounds.max_num_seqs > 1;
}

/* Room of the work list: a pass over everything, and the partitioned decode of short queries. */
static void size_work_list(fv_plan *plan, size_t slots_limit)
{
    fv_split_rule_fix(&plan->rule, &plan->bounds, slot_bytes(plan), slots_limit);
    fv_work_list_room(&plan->room, &plan->rule, &plan->bounds, slot_bytes(plan), slots_limit);
    if (plan->static_list) fv_work_list_fix(&plan->room, &plan->rule, &plan->bounds);
    if (plan->static_list) return;
    if (!plan->partition_keys || plan->rule.batch_invariant) return;
    fv_split_rule partitioned = plan->rule;
    partitioned.segment_keys = plan->partition_keys;
    fv_bounds decodes = plan->bounds;
    const int64_t max_decode_tokens = (int64_t)decodes.max_num_seqs * fv_short_query_tokens(&plan->problem);
    if (decodes.max_num_tokens > max_decode_tokens) decodes.max_num_tokens = (int32_t)max_decode_tokens;
    fv_work_list room;
    fv_work_list_room(&room, &partitioned, &decodes, slot_bytes(plan), slots_limit);
    plan->room.item_capacity += room.item_capacity;
    plan->room.reduce_capacity += room.reduce_capacity;
    plan->room.slot_capacity = fv_max_i32(plan->room.slot_capacity, room.slot_capacity);
}

/* Tokens of a Q block of decodes, at most. */
static int32_t decode_block_tokens(const fv_plan *plan) { return fv_max_i32(plan->rule.block_q, FV_DECODE_ROWS); }

/* Tokens that are absorbed at once: under a static grid all that there can be, else at least a Q block. */
static int32_t least_absorb_rows(const fv_plan *plan)
{
    if (!plan->absorbs) return 0;
    if (plan->static_grid) return plan->bounds.max_num_tokens;
    return fv_min_i32(plan->bounds.max_num_tokens, decode_block_tokens(plan));
}

/* From one round's first token to the next one's there are absorb_rows, less a Q block that did not fit. */
static int32_t max_decode_rounds(const fv_plan *plan)
{
    const int32_t round_tokens = fv_max_i32(1, plan->absorb_rows - decode_block_tokens(plan) + 1);
    return (int32_t)fv_ceil_div(plan->bounds.max_num_tokens, round_tokens);
}

static int32_t size_absorbed(const fv_plan *plan, int32_t least, size_t budget)
{
    const int64_t most = fv_min_i64(plan->bounds.max_num_tokens,
                                    (int64_t)plan->bounds.max_num_seqs * plan->decode_threshold);
    const int64_t rows = least + (int64_t)(budget / absorb_row_bytes(plan));
    return (int32_t)fv_max_i64(least, fv_min_i64(rows, most));
}

static fv_status size_workspace(fv_plan *plan, const fv_strategy *strategy)
{
    const int32_t gathers = strategy->needs_gather && !plan->static_grid;
    const int32_t least_absorbed = least_absorb_rows(plan);
    const fv_context_limits fewest = fv_context_room_fewest(plan);
    const fv_context_limits contexts = fv_context_room_least(plan, gather_row_bytes(plan));
    plan->workspace.scratch_bytes = scratch_bytes(plan);
    const size_t least = plan->workspace.scratch_bytes * (size_t)plan->device->num_workers +
                         16 * FV_WORKSPACE_ALIGNMENT + (gathers ? context_bytes(plan, contexts) : 0) +
                         (size_t)least_absorbed * absorb_row_bytes(plan);
    const size_t asked = plan->options.max_workspace_bytes;
    if (asked > 0 && asked < least) {
        return fv_fail(FV_ERR_INVALID,
                       "max_workspace_bytes is %zu; accepted: 0 (chosen), or from %zu bytes, %lld KiB, on", asked,
                       least, (long long)fv_ceil_div((int64_t)least, 1024));
    }
    const size_t usual = plan->absorbs ? DEFAULT_MLA_WORKSPACE_BYTES : DEFAULT_WORKSPACE_BYTES;
    size_t surplus = asked ? asked - least : usual;
    if (plan->absorbs) {
        plan->absorb_rows = size_absorbed(plan, least_absorbed, surplus / 8);
        surplus -= (size_t)(plan->absorb_rows - least_absorbed) * absorb_row_bytes(plan);
    }
    const size_t share = gathers ? surplus / 4 : surplus;
    const size_t slots_limit = share < MAX_SLOT_BYTES ? share : MAX_SLOT_BYTES;
    if (plan->absorbs) plan->rule.num_passes = max_decode_rounds(plan);
    size_work_list(plan, slots_limit);
    size_static_grid(plan, slots_limit);
    if (gathers) plan->contexts = size_contexts(plan, asked ? &contexts : &fewest, &contexts, surplus);
    lay_out_workspace(plan);
    return FV_OK;
}

/* The longest query that is cheaper absorbed, over a long context: a token and a key cost 2 H (2 L + R)
 * operations absorbed, 2 H (P + R + V) expanded, and the expansion 2 H L (P + V) for each key. */
static int32_t absorbed_tokens(const fv_mla_shape *mla)
{
    const int64_t expansion = (int64_t)mla->kv_lora_rank * (mla->qk_nope_head_dim + mla->v_head_dim);
    const int64_t saved = 2 * (int64_t)mla->kv_lora_rank - mla->qk_nope_head_dim - mla->v_head_dim;
    return saved > 0 ? (int32_t)fv_min_i64(expansion / saved, 1 << 30) : 1 << 30;
}

/* Items that the device works on at once; where the rows of one token are several blocks of the kernel, an item takes
 * as many places. */
static int32_t num_lanes(const fv_plan *plan, const fv_attend_variant *variant, int32_t group)
{
    const int32_t at_once = variant->items_at_once ? variant->items_at_once(&plan->problem) : 0;
    const int32_t places = plan->device->num_workers * at_once;
    return places ? fv_max_i32(1, places / (int32_t)fv_ceil_div(group, variant->block_m)) : 0;
}

/* Batch-invariant: how many heads a lane takes is the batch's. */
static int32_t lane_heads(const fv_plan *plan, const fv_attend_variant *variant)
{
    if (!variant->heads_at_once || plan->options.batch_invariant) return 1;
    return variant->heads_at_once(&plan->problem);
}

/* Where workers take items, Q blocks may be halved twice, so that none waits long for the last. Batch-invariant plans cut a
 * query by its own length alone. */
static int32_t least_block_q(const fv_split_rule *rule)
{
    return rule->num_lanes || rule->batch_invariant ? 0 : fv_max_i32(1, rule->block_q / 4);
}

/* As the planner counts them: lanes that do not slow each other down are workers. */
static int32_t num_workers(const fv_plan *plan, const fv_attend_variant *variant, int32_t lanes)
{
    return variant->items_keep_pace && variant->items_keep_pace(&plan->problem) ? lanes : plan->device->num_workers;
}

/* Batch-invariant: what rounds an item fills is the batch's. */
static int32_t splits_items(const fv_plan *plan, const fv_attend_variant *variant)
{
    if (!variant->splits_items || plan->options.batch_invariant) return 0;
    return variant->splits_items(&plan->problem);
}

fv_status fv_strategy_create(fv_plan *plan, const fv_strategy *strategy)
{
    const fv_plan_options *options = &plan->options;
    const int32_t is_mla = plan->problem.kind == FV_ATTENTION_MLA;
    plan->group = fv_group_of(&plan->problem);
    plan->absorbs = is_mla && !plan->problem.mla.absorbed;
    plan->dense_problem = fv_dense_problem(&plan->problem);
    plan->lse_by_head = strategy->lse_by_head;
    plan->rule.cascade = may_cascade(plan);
    fv_status status = choose_variants(plan, strategy);
    if (status != FV_OK) return status;

    plan->static_grid = options->static_grid || (options->static_list && !plan->device->host_is_device);
    const int32_t few_tokens = is_mla ? fv_max_i32(1, absorbed_tokens(&plan->problem.mla))
                                      : fv_short_query_tokens(&plan->problem);
    plan->decode_threshold = options->decode_threshold ? options->decode_threshold : few_tokens;
    plan->partition_keys = strategy->partition_keys;
    plan->new_min_query_len = INT32_MAX;
    plan->gather_dtype = exact_gather_dtype(&plan->problem);
    const int32_t lanes = num_lanes(plan, plan->paged, plan->group);
    plan->rule = (fv_split_rule){
        .problem = &plan->problem,
        .block_q = fv_max_i32(1, plan->paged->block_m / plan->group),
        .tile_keys = plan->paged->tile_keys,
        .num_workers = num_workers(plan, plan->paged, lanes),
        .num_lanes = lanes,
        .half_rows = plan->paged->rows_of_halves ? plan->paged->rows_of_halves(&plan->problem) : 0,
        .lane_heads = lane_heads(plan, plan->paged),
        .splits_items = splits_items(plan, plan->paged),
        .deals_keys = plan->paged->deals_keys && plan->paged->deals_keys(&plan->problem),
        .shared_rows = plan->paged->shared_rows ? plan->paged->shared_rows(&plan->problem) : 0,
        .few_row_cost = plan->paged->few_row_cost ? plan->paged->few_row_cost(&plan->problem) : 1,
        .path = options->path,
        .batch_invariant = options->batch_invariant,
        .segment_keys = options->path == FV_PATH_3D || options->batch_invariant ? options->segment_keys : 0,
        .num_segments = strategy->num_segments,
        .cascade = plan->rule.cascade,
    };
    plan->static_list = fv_static_list_serves(plan);
    if (plan->static_list) fv_static_list_fix(plan);
    plan->dense_rule = plan->rule;
    if (!is_mla) plan->rule.least_block_q = least_block_q(&plan->rule);
    if (plan->absorbs) {
        plan->dense_rule.problem = &plan->dense_problem;
        plan->dense_rule.block_q = plan->dense->block_m;
        plan->dense_rule.tile_keys = plan->dense->tile_keys;
        plan->dense_rule.num_lanes = num_lanes(plan, plan->dense, 1);
        plan->dense_rule.num_workers = num_workers(plan, plan->dense, plan->dense_rule.num_lanes);
        plan->dense_rule.lane_heads = 1;
        plan->dense_rule.shared_rows = 0;
        plan->dense_rule.splits_items = 0;
        plan->dense_rule.path = FV_PATH_2D;
        plan->dense_rule.cascade = 0;
    }
    plan->dense_rule.least_block_q = least_block_q(&plan->dense_rule);
    status = size_workspace(plan, strategy);
    return status == FV_OK ? allocate(plan) : status;
}

fv_split_rule fv_strategy_partition_rule(const fv_plan *plan, const fv_step *step, const fv_query_run *runs,
                                         int32_t num_runs)
{
    fv_split_rule rule = plan->rule;
    if (rule.batch_invariant || rule.path == FV_PATH_2D || !plan->partition_keys) return rule;
    rule.num_segments = 0;
    rule.segment_keys = plan->partition_keys;
    for (;; rule.segment_keys *= 2) {
        int64_t slots = 0;
        for (int32_t i = 0; i < num_runs; i++) {
            const int64_t partitions = fv_ceil_div(step->seq_lens[runs[i].seq], rule.segment_keys) + 1;
            slots += partitions * runs[i].num_tokens;
        }
        if (slots <= plan->room.slot_capacity || rule.segment_keys >= plan->bounds.max_seq_len) return rule;
    }
}
