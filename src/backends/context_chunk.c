/* Calls of a chunk of gathered context. */
#include "backends/context_chunk.h"

#include "core/error.h"

fv_split_rule fv_context_whole_rule(const fv_plan *plan)
{
    fv_split_rule rule = plan->dense_rule;
    rule.path = FV_PATH_2D;
    rule.cascade = 0;
    return rule;
}

/* The index arrays of a chunk, for the sequences from the first piece's to the last one's:
 * key_start, out_start and key_row. Sequences between that have no piece have no rows. */
static fv_status write_indices(fv_schedule *schedule, fv_call *gather, const fv_context_piece *pieces,
                               int32_t num_pieces)
{
    const fv_plan *plan = schedule->plan;
    const int32_t first_seq = plan->round_runs[pieces[0].run].seq;
    const int32_t num_seqs = plan->round_runs[pieces[num_pieces - 1].run].seq + 1 - first_seq;
    const int32_t num_indices = 3 * num_seqs + 1;
    if (schedule->num_indices + num_indices > plan->buffers.room.num_indices) {
        return fv_fail(FV_ERR_NO_SPACE, "the plan has room for %d indices; the step needs more",
                       plan->buffers.room.num_indices);
    }
    int32_t *key_start = schedule->host.indices + schedule->num_indices;
    int32_t *out_start = key_start + num_seqs, *key_row = out_start + num_seqs + 1;
    int32_t rows = 0;
    for (int32_t i = 0, piece = 0; i < num_seqs; i++) {
        const int32_t has_piece = plan->round_runs[pieces[piece].run].seq == first_seq + i;
        key_start[i] = has_piece ? pieces[piece].first_key : 0;
        out_start[i] = rows;
        key_row[i] = rows - key_start[i];
        if (has_piece) {
            rows += pieces[piece].end_key - pieces[piece].first_key;
            piece++;
        }
    }
    out_start[num_seqs] = rows;
    gather->first_seq = first_seq;
    gather->num_seqs = num_seqs;
    gather->num_rows = rows;
    gather->indices = schedule->num_indices;
    schedule->num_indices += num_indices;
    return FV_OK;
}

fv_status fv_context_chunk_gather(fv_call *chunk, fv_schedule *schedule, const fv_context_piece *pieces,
                                  int32_t num_pieces)
{
    fv_plan *plan = schedule->plan;
    *chunk = (fv_call){.operation = FV_OP_KV_GATHER};
    fv_status status = write_indices(schedule, chunk, pieces, num_pieces);
    if (status == FV_OK) status = fv_schedule_add(schedule, chunk);
    if (status == FV_OK && plan->absorbs) {
        status = fv_schedule_add(schedule, &(fv_call){.operation = FV_OP_EXPAND, .num_rows = chunk->num_rows});
    }
    plan->num_chunks++;
    return status;
}

fv_status fv_context_chunk_attend(fv_schedule *schedule, const fv_call *chunk, const fv_context_round *round,
                                  const fv_context_piece *pieces, int32_t num_pieces, fv_result_target target)
{
    fv_plan *plan = schedule->plan;
    const fv_split_rule rule = fv_context_whole_rule(plan);
    for (int32_t i = 0; i < num_pieces; i++) {
        plan->runs[i] = plan->round_runs[pieces[i].run];
        plan->runs[i].first_key = pieces[i].first_key;
        plan->runs[i].end_key = pieces[i].end_key;
    }
    const int32_t attend = plan->num_calls;
    const fv_status status = fv_schedule_attend(schedule, &rule, FV_OP_ATTEND_DENSE, FV_KEYS_GATHERED, target,
                                                round->first_token, plan->runs, num_pieces);
    if (status != FV_OK || plan->num_calls == attend) return status;
    plan->calls[attend].first_seq = chunk->first_seq;
    plan->calls[attend].num_seqs = chunk->num_seqs;
    plan->calls[attend].indices = chunk->indices;
    return FV_OK;
}

fv_status fv_context_chunk_merge(fv_schedule *schedule, const fv_context_round *round, const fv_context_piece *pieces,
                                 int32_t num_pieces)
{
    const fv_plan *plan = schedule->plan;
    fv_call merge = {.operation = FV_OP_MERGE_STATES, .first_token = round->first_token};
    fv_status status = FV_OK;
    for (int32_t i = 0; i < num_pieces && status == FV_OK; i++) {
        const fv_query_run *run = &plan->round_runs[pieces[i].run];
        const int32_t token = schedule->step->query_start[run->seq] + run->first_token;
        const fv_result_target target = pieces[i].is_last ? FV_TARGET_OUT : FV_TARGET_NEW_STATE;
        const int32_t follows = merge.num_tokens > 0 && merge.target == target &&
                                merge.token + merge.num_tokens == token;
        if (!follows) {
            if (merge.num_tokens > 0) status = fv_schedule_add(schedule, &merge);
            merge.target = target;
            merge.token = token;
            merge.num_tokens = 0;
        }
        merge.num_tokens += run->num_tokens;
    }
    return status == FV_OK ? fv_schedule_add(schedule, &merge) : status;
}
