/* Mutants of the operations: the reference's kernel behind a wrong parameter. */
#include "check/cache_ops.h"
#include "check/merges.h"
#include "check/mla_weights.h"
#include "check/operations.h"
#include "check/row_ops.h"
#include "core/compiler.h"
#include "planner/plan.h"
#include "reference/reference.h"

#define MUTANT_SEED 77
#define NUM_INDICES 60 /* random cases in which a fault must show */

/* --- kv_copy ---------------------------------------------------------------------------------------------- */

static fv_status copy_less_slots(const fv_launch *launch, const fv_kv_copy_params *params)
{
    fv_kv_copy_params wrong = *params;
    wrong.dst.block_size--;
    return fv_reference_kv_copy(launch, &wrong);
}

static fv_status copy_less_heads(const fv_launch *launch, const fv_kv_copy_params *params)
{
    fv_kv_copy_params wrong = *params;
    wrong.dst.num_kv_heads--;
    return fv_reference_kv_copy(launch, &wrong);
}

static fv_status copy_less_pairs(const fv_launch *launch, const fv_kv_copy_params *params)
{
    fv_kv_copy_params wrong = *params;
    if (wrong.num_pairs > 0) wrong.num_pairs--;
    return fv_reference_kv_copy(launch, &wrong);
}

static fv_status copy_without_scales(const fv_launch *launch, const fv_kv_copy_params *params)
{
    fv_kv_copy_params wrong = *params;
    wrong.dst.v_scales.data = NULL;
    return fv_reference_kv_copy(launch, &wrong);
}

/* x-packed and shuffled keys only: their dense elements lie elsewhere in the block, not beyond it. */
static fv_status copy_without_chunks(const fv_launch *launch, const fv_kv_copy_params *params)
{
    fv_kv_copy_params wrong = *params;
    if (params->dst.layout != FV_KV_LAYOUT_STRIDED) wrong.src.k.element_chunk = wrong.dst.k.element_chunk = 0;
    return fv_reference_kv_copy(launch, &wrong);
}

/* --- rope, rope_kv_write --------------------------------------------------------------------------------- */

static fv_status rope_in_other_style(const fv_launch *launch, const fv_rope_params *params)
{
    fv_rope_params wrong = *params;
    wrong.style = params->style == FV_ROPE_HALF ? FV_ROPE_INTERLEAVED : FV_ROPE_HALF;
    return fv_reference_rope(launch, &wrong);
}

static fv_status rope_without_count(const fv_launch *launch, const fv_rope_params *params)
{
    fv_rope_params wrong = *params;
    wrong.num_tokens_at = NULL;
    return fv_reference_rope(launch, &wrong);
}

static fv_status rope_of_q_only(const fv_launch *launch, const fv_rope_params *params)
{
    fv_rope_params wrong = *params;
    wrong.k.data = NULL;
    return fv_reference_rope(launch, &wrong);
}

/* Interleaved pairs only: in the half style rope_dim says which elements are pairs, too. */
static fv_status rope_less_pairs(const fv_launch *launch, const fv_rope_params *params)
{
    fv_rope_params wrong = *params;
    if (wrong.style == FV_ROPE_INTERLEAVED) wrong.rope_dim -= 2;
    return fv_reference_rope(launch, &wrong);
}

/* The heads of a token run on into the gap after them. */
static fv_status rope_more_heads(const fv_launch *launch, const fv_rope_params *params)
{
    fv_rope_params wrong = *params;
    if (wrong.rope_dim * (int64_t)fv_dtype_bytes(wrong.dtype) + wrong.q.num_heads * wrong.q.head_stride <=
        wrong.q.token_stride)
        wrong.q.num_heads++;
    return fv_reference_rope(launch, &wrong);
}

static fv_status write_unrotated(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    const fv_status status = fv_reference_kv_write(launch, &params->write);
    return status == FV_OK ? fv_reference_rope(launch, &params->rope) : status;
}

static fv_status write_without_k_scale(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    fv_rope_kv_write_params wrong = *params;
    wrong.write.k_scale = NULL;
    return fv_reference_rope_kv_write(launch, &wrong);
}

static fv_status write_first_scale(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    fv_rope_kv_write_params wrong = *params;
    if (wrong.write.num_kv_scales > 1) wrong.write.num_kv_scales = 1;
    return fv_reference_rope_kv_write(launch, &wrong);
}

static fv_status write_without_q(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    fv_rope_kv_write_params wrong = *params;
    wrong.rope.q.data = NULL;
    return fv_reference_rope_kv_write(launch, &wrong);
}

static fv_status write_without_copy(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    fv_rope_kv_write_params wrong = *params;
    wrong.q_copy.data = NULL;
    return fv_reference_rope_kv_write(launch, &wrong);
}

static fv_status write_without_count(const fv_launch *launch, const fv_rope_kv_write_params *params)
{
    fv_rope_kv_write_params wrong = *params;
    wrong.write.num_tokens_at = NULL;
    return fv_reference_rope_kv_write(launch, &wrong);
}

static const char *no_reason(const fv_launch *launch, const fv_mla_query_params *params)
{
    (void)launch, (void)params;
    return NULL;
}

static fv_status query_in_other_style(const fv_launch *launch, const fv_mla_query_params *params)
{
    fv_mla_query_params wrong = *params;
    const fv_status status = fv_reference_mla_query(launch, params);
    if (status != FV_OK) return status;
    wrong.keys.rope.k.data = NULL; /* the keys are as they should be */
    wrong.keys.write.num_tokens = 0;
    wrong.keys.rope.style = params->keys.rope.style == FV_ROPE_HALF ? FV_ROPE_INTERLEAVED : FV_ROPE_HALF;
    return fv_reference_mla_query(launch, &wrong);
}

static fv_status query_of_less_depth(const fv_launch *launch, const fv_mla_query_params *params)
{
    fv_mla_query_params wrong = *params;
    wrong.depth--;
    return fv_reference_mla_query(launch, &wrong);
}

static fv_status query_of_first_weights(const fv_launch *launch, const fv_mla_query_params *params)
{
    fv_mla_query_params wrong = *params;
    wrong.kv_up_head_stride = 0;
    return fv_reference_mla_query(launch, &wrong);
}

static fv_status query_without_keys(const fv_launch *launch, const fv_mla_query_params *params)
{
    fv_mla_query_params wrong = *params;
    wrong.keys.write.num_tokens = 0;
    return fv_reference_mla_query(launch, &wrong);
}

static const fv_mla_query_step query_mutants[] = {
    {no_reason, no_reason, query_in_other_style},
    {no_reason, no_reason, query_of_less_depth},
    {no_reason, no_reason, query_of_first_weights},
    {no_reason, no_reason, query_without_keys},
};

/* --- merges ------------------------------------------------------------------------------------------------- */

static fv_status merge_less_ranks(const fv_launch *launch, const fv_merge_ranks_params *params)
{
    fv_merge_ranks_params wrong = *params;
    if (wrong.num_ranks > 1) wrong.num_ranks--;
    return fv_reference_merge_ranks(launch, &wrong);
}

static fv_status merge_ranks_without_sinks(const fv_launch *launch, const fv_merge_ranks_params *params)
{
    fv_merge_ranks_params wrong = *params;
    wrong.sinks = NULL;
    return fv_reference_merge_ranks(launch, &wrong);
}

static fv_status merge_without_total(const fv_launch *launch, const fv_merge_ranks_params *params)
{
    fv_merge_ranks_params wrong = *params;
    wrong.total_lse = NULL;
    return fv_reference_merge_ranks(launch, &wrong);
}

static fv_status merge_without_lse(const fv_launch *launch, const fv_merge_ranks_params *params)
{
    fv_merge_ranks_params wrong = *params;
    wrong.lse = NULL;
    return wrong.out ? fv_reference_merge_ranks(launch, &wrong) : FV_OK;
}

static fv_status merge_states_without_sinks(const fv_launch *launch, const fv_merge_params *params)
{
    fv_merge_params wrong = *params;
    wrong.sinks = NULL;
    return fv_reference_merge_states(launch, &wrong);
}

static fv_status merge_first_state(const fv_launch *launch, const fv_merge_params *params)
{
    fv_merge_params wrong = *params;
    wrong.b = wrong.a;
    return fv_reference_merge_states(launch, &wrong);
}

static fv_status reduce_without_sinks(const fv_launch *launch, const fv_reduce_params *params)
{
    fv_reduce_params wrong = *params;
    wrong.sinks = NULL;
    return fv_reference_reduce_segments(launch, &wrong);
}

/* --- rows --------------------------------------------------------------------------------------------------- */

static fv_status norm_without_epsilon(const fv_launch *launch, const fv_rms_norm_params *params)
{
    fv_rms_norm_params wrong = *params;
    wrong.epsilon = 0;
    return fv_reference_rms_norm(launch, &wrong);
}

static fv_status norm_less_elements(const fv_launch *launch, const fv_rms_norm_params *params)
{
    fv_rms_norm_params wrong = *params;
    wrong.size--;
    return fv_reference_rms_norm(launch, &wrong);
}

static fv_status norm_less_rows(const fv_launch *launch, const fv_rms_norm_params *params)
{
    fv_rms_norm_params wrong = *params;
    if (wrong.num_rows > 0) wrong.num_rows--;
    return fv_reference_rms_norm(launch, &wrong);
}

static fv_status copy_less_bytes(const fv_launch *launch, const fv_copy_rows_params *params)
{
    fv_copy_rows_params wrong = *params;
    wrong.row_bytes--;
    return fv_reference_copy_rows(launch, &wrong);
}

static fv_status copy_more_bytes(const fv_launch *launch, const fv_copy_rows_params *params)
{
    fv_copy_rows_params wrong = *params;
    if (wrong.row_bytes < wrong.src_head_stride && wrong.row_bytes < wrong.dst_head_stride) wrong.row_bytes++;
    return fv_reference_copy_rows(launch, &wrong);
}

static fv_status copy_less_pieces(const fv_launch *launch, const fv_copy_rows_params *params)
{
    fv_copy_rows_params wrong = *params;
    wrong.num_heads--;
    return fv_reference_copy_rows(launch, &wrong);
}

/* --- MLA with weights ----------------------------------------------------------------------------------------- */

static void expand_less_keys(fv_plan *plan, fv_layer *layer)
{
    (void)layer;
    for (int32_t i = 0; i < plan->num_calls; i++)
        if (plan->calls[i].operation == FV_OP_EXPAND) plan->calls[i].num_rows--;
}

static void use_first_weights(fv_plan *plan, fv_layer *layer)
{
    (void)plan;
    layer->kv_up.stride_bytes[0] = 0;
}

static void rotate_one_further(fv_plan *plan, fv_layer *layer)
{
    const int32_t half = plan->problem.mla.qk_rope_head_dim / 2;
    if (!layer->rope_cos) return;
    layer->rope_cos += half;
    layer->rope_sin += half;
}

/* The sound run is that of the reference's own table. */
static void run_spoiled(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                        int32_t index, check_mla_fault fault)
{
    check_run_mla_weights_spoiled(result, lane, seed, index, table == &fv_reference_kernels ? NULL : fault);
}

static void run_less_keys(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                          int32_t index)
{
    run_spoiled(result, lane, table, seed, index, expand_less_keys);
}

static void run_first_weights(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                              int32_t index)
{
    run_spoiled(result, lane, table, seed, index, use_first_weights);
}

static void run_one_further(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                            int32_t index)
{
    run_spoiled(result, lane, table, seed, index, rotate_one_further);
}

/* --- running them ------------------------------------------------------------------------------------------- */

typedef struct operation_mutant {
    const char *name;
    void (*run)(check_result *result, const check_lane *lane, const fv_kernel_table *table, uint64_t seed,
                int32_t index);
    fv_kernel_table table; /* with the faulty kernel */
} operation_mutant;

static const operation_mutant mutants[] = {
    {"last slot of a block not copied", check_run_kv_copy, {.kv_copy = copy_less_slots}},
    {"last head not copied", check_run_kv_copy, {.kv_copy = copy_less_heads}},
    {"last pair of blocks not copied", check_run_kv_copy, {.kv_copy = copy_less_pairs}},
    {"scales not copied", check_run_kv_copy, {.kv_copy = copy_without_scales}},
    {"chunks of elements taken for dense", check_run_kv_copy, {.kv_copy = copy_without_chunks}},
    {"the other style of rotation", check_run_rope, {.rope = rope_in_other_style}},
    {"padding rotated", check_run_rope, {.rope = rope_without_count}},
    {"k not rotated", check_run_rope, {.rope = rope_of_q_only}},
    {"last pair not rotated", check_run_rope, {.rope = rope_less_pairs}},
    {"one head too many rotated", check_run_rope, {.rope = rope_more_heads}},
    {"k written before it is rotated", check_run_rope_kv_write, {.rope_kv_write = write_unrotated}},
    {"k_scale ignored in the write", check_run_rope_kv_write, {.rope_kv_write = write_without_k_scale}},
    {"scale of head 0 for all in the write", check_run_rope_kv_write, {.rope_kv_write = write_first_scale}},
    {"q not rotated", check_run_rope_kv_write, {.rope_kv_write = write_without_q}},
    {"padding written", check_run_rope_kv_write, {.rope_kv_write = write_without_count}},
    {"q not copied", check_run_rope_kv_write, {.rope_kv_write = write_without_copy}},
    {"queries rotated in the other style", check_run_mla_query, {.mla_query = &query_mutants[0]}},
    {"last of the depth left out", check_run_mla_query, {.mla_query = &query_mutants[1]}},
    {"W_UK of head 0 for all", check_run_mla_query, {.mla_query = &query_mutants[2]}},
    {"new keys not written", check_run_mla_query, {.mla_query = &query_mutants[3]}},
    {"last rank left out", check_run_merge_ranks, {.merge_ranks = merge_less_ranks}},
    {"sink of the ranks ignored", check_run_merge_ranks, {.merge_ranks = merge_ranks_without_sinks}},
    {"total LSE ignored", check_run_merge_ranks, {.merge_ranks = merge_without_total}},
    {"LSE of the ranks not set", check_run_merge_ranks, {.merge_ranks = merge_without_lse}},
    {"sink of a merge ignored", check_run_merge_states, {.merge_states = merge_states_without_sinks}},
    {"one state merged with itself", check_run_merge_states, {.merge_states = merge_first_state}},
    {"epsilon of a norm ignored", check_run_rms_norm, {.rms_norm = norm_without_epsilon}},
    {"last element not normed", check_run_rms_norm, {.rms_norm = norm_less_elements}},
    {"last row not normed", check_run_rms_norm, {.rms_norm = norm_less_rows}},
    {"last byte of a piece not copied", check_run_copy_rows, {.copy_rows = copy_less_bytes}},
    {"a byte too many copied", check_run_copy_rows, {.copy_rows = copy_more_bytes}},
    {"last head's piece not copied", check_run_copy_rows, {.copy_rows = copy_less_pieces}},
    {"last key of a chunk not expanded", run_less_keys, {0}},
    {"weights of head 0 for all", run_first_weights, {0}},
    {"keys rotated one position further", run_one_further, {0}},
    {"sink of a reduction ignored", check_run_reduce_segments, {.reduce_segments = reduce_without_sinks}},
};

/* Finds a random case that the fault fails, and sees that the reference passes it. */
static void judge_mutant(check_result *result, const operation_mutant *mutant, const check_lane *lane)
{
    check_result found, sound;
    for (int32_t index = 0; index < NUM_INDICES; index++) {
        mutant->run(&found, lane, &mutant->table, MUTANT_SEED, index);
        if (found.verdict != CHECK_FAILED) continue;
        mutant->run(&sound, lane, &fv_reference_kernels, MUTANT_SEED, index);
        if (sound.verdict == CHECK_FAILED)
            check_result_fail(result, "the reference itself does not pass for '%s': %.300s", mutant->name, sound.text);
        return;
    }
    check_result_fail(result, "'%s' is not caught", mutant->name);
}

void check_operation_mutants(check_report *report, const check_lane *lane)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(mutants); i++) {
        check_result result;
        check_result_init(&result, "mutants", "mutants");
        judge_mutant(&result, &mutants[i], lane);
        report->mutants++;
        report->mutants_caught += result.verdict == CHECK_PASSED;
        check_report_add(report, &result, "");
    }
}
