/* Packing extends into rounds and their context into chunks. */
#include "planner/context_round.h"

#include "core/compiler.h"

static fv_key_range seen_keys(const fv_problem *problem, const fv_step *step, int32_t seq, int32_t first_token,
                              int32_t num_tokens)
{
    const int32_t seq_len = step->seq_lens[seq];
    const int32_t causal = step->causal ? step->causal[seq] : 1;
    return fv_block_keys(&problem->context_parallel, seq_len, seq_len - fv_step_query_len(step, seq), first_token,
                         num_tokens, causal, problem->window);
}

fv_key_range fv_context_keys(const fv_problem *problem, const fv_step *step, int32_t seq, int32_t first_token,
                             int32_t num_tokens)
{
    const int32_t context = step->seq_lens[seq] - fv_step_query_len(step, seq);
    fv_key_range keys = seen_keys(problem, step, seq, first_token, num_tokens);
    keys.end = fv_min_i32(keys.end, fv_local_keys(&problem->context_parallel, context));
    keys.first = fv_min_i32(keys.first, keys.end);
    return keys;
}

int32_t fv_context_round_next(fv_context_round *round, fv_query_run *runs, const fv_problem *problem,
                              const fv_step *step, const int32_t *extends, int32_t num_extends, int32_t block_q,
                              const fv_context_limits *limits)
{
    round->num_runs = 0;
    while (round->next_extend < num_extends) {
        const int32_t seq = extends[round->next_extend];
        const int32_t query_len = fv_step_query_len(step, seq);
        const int32_t start = step->query_start[seq] + round->next_token;
        if (round->num_runs == 0) round->first_token = start;
        const int32_t rest = query_len - round->next_token;
        const int32_t room = round->first_token + limits->state_tokens - start;
        int32_t num_tokens = rest;
        if (rest > room) num_tokens = fv_query_is_short(problem, query_len) ? 0 : room / block_q * block_q;
        if (num_tokens <= 0) break;
        const fv_key_range keys = limits->gathers_new
                                      ? seen_keys(problem, step, seq, round->next_token, num_tokens)
                                      : fv_context_keys(problem, step, seq, round->next_token, num_tokens);
        runs[round->num_runs++] = (fv_query_run){seq, round->next_token, num_tokens, keys.first, keys.end};
        round->next_token += num_tokens;
        if (round->next_token < query_len) break;
        round->next_token = 0;
        round->next_extend++;
    }
    return round->num_runs;
}

int32_t fv_context_chunk_next(fv_context_cursor *cursor, fv_context_piece *pieces, const fv_problem *problem,
                              const fv_query_run *runs, int32_t num_runs, const fv_context_limits *limits)
{
    int32_t num_pieces = 0, rows = 0;
    for (; cursor->run < num_runs; cursor->run++, cursor->key = -1) {
        const fv_query_run *run = &runs[cursor->run];
        const int32_t first = cursor->key < 0 ? run->first_key : cursor->key;
        if (first >= run->end_key) continue;
        int32_t end = fv_min_i32(run->end_key, first + (limits->gather_rows - rows));
        if (end < run->end_key) { /* cut where a block ends, if that leaves anything */
            const int32_t whole = end / problem->block_size * problem->block_size;
            if (whole > first)
                end = whole;
            else if (num_pieces > 0)
                return num_pieces;
        }
        if (end <= first) return num_pieces;
        pieces[num_pieces++] = (fv_context_piece){cursor->run, first, end, rows, end == run->end_key};
        rows += end - first;
        if (end == run->end_key) continue;
        cursor->key = end;
        return num_pieces;
    }
    return num_pieces;
}
