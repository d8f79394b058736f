/* A step of a session:
 *
 *   scheduler: parts  ->  batch arrays  ->  runner: fv_plan_update, layers, logits  ->  sampler  ->  caller */
#include <assert.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/clock.h"
#include "engine/runner.h"

/* Slots and block table of a part in one layer group; its tokens begin at row `first_row`. */
static void fill_group(fv_session *session, int32_t group, int32_t index, int32_t first_row)
{
    const fv_step_part *part = &session->step.parts[index];
    const fv_session_group *to = &session->groups[group];
    const int32_t *blocks = part->sequence->rows[group].blocks;
    const int32_t block_size = session->scheduler.limits.block_size, width = session->step.table_width;
    const int32_t seq_len = part->first_token + part->num_tokens;
    for (int32_t i = 0; i < part->num_tokens; i++) {
        const int32_t position = part->first_token + i;
        to->slots[first_row + i] = (int64_t)blocks[position / block_size] * block_size + position % block_size;
    }
    memcpy(to->block_table + (size_t)index * (size_t)width, blocks,
           (size_t)fv_ceil_div(seq_len, block_size) * sizeof(*blocks));
}

/* The part's tokens at the end of the step's arrays. */
static void append_part(fv_session *session, int32_t index)
{
    fv_step_arrays *step = &session->step;
    const fv_step_part *part = &step->parts[index];
    const fv_session_request *from = (const fv_session_request *)part->sequence;
    const int32_t seq_len = part->first_token + part->num_tokens;
    for (int32_t i = 0; i < session->num_groups; i++) fill_group(session, i, index, step->num_tokens);
    for (int32_t position = part->first_token; position < seq_len; position++) {
        const int32_t row = step->num_tokens++;
        step->tokens[row] = from->tokens[position];
        step->positions[row] = position;
    }
    step->seq_lens[index] = seq_len;
    step->query_start[index + 1] = step->num_tokens;
}

/* Returns whether the step has a part of a prompt. */
static bool fill_step(fv_session *session)
{
    fv_step_arrays *step = &session->step;
    bool has_prefill = false;
    step->num_tokens = 0;
    step->query_start[0] = 0;
    for (int32_t i = 0; i < step->num_parts; i++) {
        append_part(session, i);
        const fv_session_request *from = (const fv_session_request *)step->parts[i].sequence;
        const int32_t prompt_tokens = fv_min_i32(step->parts[i].num_tokens,
                                                 from->num_prompt - step->parts[i].first_token);
        if (prompt_tokens <= 0) continue;
        has_prefill = true;
        session->stats.prompt_tokens_done += prompt_tokens;
    }
    return has_prefill;
}

/* The first row of a part whose logits the request asks for; `end` is the one after its last. */
static int32_t first_asked_row(const fv_session *session, int32_t part, int32_t end)
{
    const fv_step_part *of = &session->step.parts[part];
    const fv_session_request *from = (const fv_session_request *)of->sequence;
    if (!from->on_logits) return end;
    const int32_t skipped = fv_max_i32(from->first_logits - of->first_token, 0);
    return end - fv_max_i32(of->num_tokens - skipped, 0);
}

/* Lists the rows whose logits are wanted: the last of a part that ends at the last known token, all
 * where the request asks for them. Returns how many. */
static int32_t list_logit_rows(fv_session *session)
{
    fv_step_arrays *step = &session->step;
    int32_t count = 0;
    for (int32_t i = 0; i < step->num_parts; i++) {
        const int32_t end = step->query_start[i + 1];
        const int32_t last = step->parts[i].is_last ? end - 1 : end;
        for (int32_t row = fv_min_i32(first_asked_row(session, i, end), last); row < end; row++) {
            step->logit_rows[count] = row;
            step->logit_parts[count++] = i;
        }
    }
    return count;
}

/* `is_end`: the token stands for no text. */
static void tell_token(fv_session_request *of, int32_t token, bool is_end, fv_finish finish)
{
    const bool has_text = of->text.tokenizer != NULL; /* there is a tokenizer */
    fv_text text = {"", 0};
    if (!is_end && has_text) text = fv_text_stream_push(&of->text, token);
    if (finish != FV_FINISH_NONE &&
        has_text) { /* the text may end inside a character: those bytes follow in the stream */
        const fv_text rest = fv_text_stream_flush(&of->text);
        assert(is_end || rest.data == text.data + text.length);
        text = (fv_text){is_end ? rest.data : text.data, text.length + rest.length};
    }
    const fv_token_event event = {
        .request = of->id,
        .token = token,
        .text = text.data,
        .text_bytes = text.length,
        .finish = finish,
    };
    if (of->on_token) of->on_token(of->user, &event);
}

/* Does a row of wanted logits end at the last known token of its request? */
static bool ends_part(const fv_step_arrays *step, int32_t logit_row)
{
    const int32_t part = step->logit_parts[logit_row];
    return step->parts[part].is_last && step->logit_rows[logit_row] == step->query_start[part + 1] - 1;
}

typedef struct sampling {
    fv_session *session;
    const float *logits; /* of the rows from first_row on */
    int32_t first_row;
} sampling;

static void sample_row(void *user, int64_t index, int32_t worker)
{
    const sampling *on = user;
    fv_session *session = on->session;
    const fv_step_arrays *step = &session->step;
    const int32_t vocabulary_size = session->engine->model->config.vocabulary_size;
    const int32_t row = on->first_row + (int32_t)index;
    int32_t *token = &step->next_tokens[index];
    *token = -1;
    if (!ends_part(step, row)) return;
    fv_session_request *to = (fv_session_request *)step->parts[step->logit_parts[row]].sequence;
    char *scratch = (char *)session->sampler_scratch + (size_t)worker * session->sampler_bytes;
    (void)fv_sampler_next(token, &to->sampler, on->logits + index * vocabulary_size, vocabulary_size, scratch);
}

/* Tells the token after the last one, and ends the request or lets it go on. */
static void write_token(fv_session *session, fv_session_request *to, int32_t token)
{
    const fv_engine *engine = session->engine;
    if (to->num_written < to->num_forced) token = to->forced[to->num_written];
    to->tokens[to->num_prompt + to->num_written++] = token;

    const bool is_end = engine->tokenizer && fv_tokenizer_is_end(engine->tokenizer, token);
    fv_finish finish = FV_FINISH_NONE;
    if (to->num_written == to->max_written) finish = FV_FINISH_LENGTH;
    if (is_end && !to->ignore_eos) finish = FV_FINISH_STOP;
    if (finish != FV_FINISH_NONE) to->finish = finish; /* it may be cancelled, but not any more */
    tell_token(to, token, is_end, finish);
    if (finish == FV_FINISH_NONE) {
        fv_scheduler_append(&to->sequence);
    } else {
        fv_session_finish_request(session, to);
    }
}

/* There is nothing to sample from. One that is cancelled ends as such. */
static void end_failed(fv_session *session, fv_session_request *to)
{
    if (to->finish != FV_FINISH_NONE) return;
    to->finish = FV_FINISH_FAILED; /* a callback may not cancel it any more */
    tell_token(to, FV_NO_TOKEN, true, FV_FINISH_FAILED);
    fv_session_finish_request(session, to);
}

void fv_session_end_cancelled(fv_session *session)
{
    while (session->has_cancelled) { /* callbacks may cancel others, before this one too */
        session->has_cancelled = false;
        fv_session_request *next;
        for (fv_session_request *at = session->requests; at; at = next) {
            const bool is_cancelled = at->finish == FV_FINISH_CANCELLED;
            if (is_cancelled) tell_token(at, FV_NO_TOKEN, true, FV_FINISH_CANCELLED);
            next = at->next; /* a callback may have added it */
            if (is_cancelled) fv_session_finish_request(session, at);
        }
    }
}

/* Logits of the wanted rows, as many at a time as there is room for; tokens are sampled on all threads, then told in
 * order. */
static fv_status write_tokens(fv_session *session)
{
    const fv_step_arrays *step = &session->step;
    const int32_t vocabulary_size = session->engine->model->config.vocabulary_size;
    const int32_t num_rows = list_logit_rows(session);
    for (int32_t first = 0; first < num_rows; first += session->max_logit_rows) {
        const int32_t count = fv_min_i32(session->max_logit_rows, num_rows - first);
        const float *all_logits = NULL;
        const fv_status status = session->runner->compute_logits(&all_logits, session, step->logit_rows + first, count);
        if (status != FV_OK) return status;
        sampling rows = {session, all_logits, first};
        fv_context_parallel_for(session->engine->context, count, sample_row, &rows);
        for (int32_t i = 0; i < count; i++) {
            const int32_t row = step->logit_rows[first + i], index = step->logit_parts[first + i];
            const float *logits = all_logits + (int64_t)i * vocabulary_size;
            fv_session_request *to = (fv_session_request *)step->parts[index].sequence;
            const bool is_asked = to->on_logits && step->positions[row] >= to->first_logits;
            if (is_asked) to->on_logits(to->user, to->id, step->positions[row], logits, vocabulary_size);
            if (!ends_part(step, first + i)) continue;
            if (step->next_tokens[i] < 0)
                end_failed(session, to);
            else
                write_token(session, to, step->next_tokens[i]);
        }
    }
    return FV_OK;
}

static void count_step(fv_session *session, bool has_prefill, double seconds, const fv_forward_profile *before)
{
    fv_session_stats *stats = &session->stats;
    const double gemm = session->profile.gemm - before->gemm;
    const double attention = session->profile.attention - before->attention;
    stats->num_steps++;
    if (has_prefill) {
        stats->prefill_tokens += session->step.num_tokens;
        stats->prefill_seconds += seconds;
        stats->prefill_gemm_seconds += gemm;
        stats->prefill_attention_seconds += attention;
    } else {
        stats->decode_tokens += session->step.num_tokens;
        stats->decode_seconds += seconds;
        stats->decode_gemm_seconds += gemm;
        stats->decode_attention_seconds += attention;
    }
}

static fv_status run_step(fv_session *session)
{
    const double start = fv_clock_seconds();
    const fv_forward_profile before = session->profile;
    session->step.num_parts = fv_scheduler_next(session->step.parts, &session->scheduler);
    session->stats.max_running = fv_max_i32(session->stats.max_running, session->scheduler.num_running);
    if (session->step.num_parts == 0) return FV_OK;
    const bool has_prefill = fill_step(session);
    fv_status status = session->runner->run(session);
    if (status == FV_OK) {
        fv_scheduler_commit(&session->scheduler, session->step.parts, session->step.num_parts);
        status = write_tokens(session);
    }
    if (status == FV_OK) count_step(session, has_prefill, fv_clock_seconds() - start, &before);
    return status;
}

fv_status fv_session_step(int32_t *num_unfinished, fv_session *session)
{
    if (session->is_stepping) return fv_fail(FV_ERR_INVALID, "a step from inside a callback of this session");
    if (session->failure != FV_OK) return fv_fail(session->failure, "an earlier step of this session has failed");
    session->is_stepping = true;
    session->failure = run_step(session);
    if (session->failure == FV_OK) fv_session_end_cancelled(session);
    session->is_stepping = false;
    if (session->failure != FV_OK) return session->failure;
    if (num_unfinished) *num_unfinished = session->num_unfinished;
    return FV_OK;
}
