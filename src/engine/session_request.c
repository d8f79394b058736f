/* Requests of a session: what is refused, what is kept, and their end. */
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "engine/session.h"

static void destroy_request(fv_session_request *finished)
{
    fv_text_stream_deinit(&finished->text);
    free(finished->tokens);
    free(finished->forced);
    free(finished);
}

static fv_status check_tokens(const fv_session *session, const char *name, const int32_t *tokens, int32_t num_tokens)
{
    const int32_t vocabulary_size = session->engine->model->config.vocabulary_size;
    for (int32_t i = 0; i < num_tokens; i++) {
        if (tokens[i] >= 0 && tokens[i] < vocabulary_size) continue;
        return fv_fail(FV_ERR_INVALID, "%s[%d] is %d; accepted: 0 to %d", name, i, tokens[i], vocabulary_size - 1);
    }
    return FV_OK;
}

static fv_status check_request(const fv_session *session, const fv_request *asked)
{
    const int32_t context_length = session->engine->model->config.context_length;
    if (!asked || asked->struct_size != sizeof(*asked)) {
        return fv_fail(FV_ERR_INVALID, "fv_request is NULL or its struct_size is not %zu", sizeof(*asked));
    }
    if (asked->num_prompt_tokens < 1 || asked->max_tokens < 0 || asked->num_forced < 0) {
        return fv_fail(FV_ERR_INVALID,
                       "num_prompt_tokens is %d, max_tokens %d, num_forced %d; accepted: at least 1, 0 and 0",
                       asked->num_prompt_tokens, asked->max_tokens, asked->num_forced);
    }
    if (!asked->prompt || (!asked->forced && asked->num_forced > 0)) {
        return fv_fail(FV_ERR_INVALID, "%s is NULL; accepted: an array of %d tokens",
                       asked->prompt ? "forced" : "prompt",
                       asked->prompt ? asked->num_forced : asked->num_prompt_tokens);
    }
    if (asked->first_logits < 0) {
        return fv_fail(FV_ERR_INVALID, "first_logits is %d; accepted: 0 or more", asked->first_logits);
    }
    if (asked->num_prompt_tokens > context_length) {
        return fv_fail(FV_ERR_INVALID, "the prompt has %d tokens, more than the model's context length of %d",
                       asked->num_prompt_tokens, context_length);
    }
    const fv_status status = check_tokens(session, "prompt", asked->prompt, asked->num_prompt_tokens);
    return status == FV_OK ? check_tokens(session, "forced", asked->forced, asked->num_forced) : status;
}

/* How many tokens it may write. The last one is not computed, so it takes no room in the cache. */
static int32_t limit_written(const fv_session *session, const fv_request *asked)
{
    const int32_t context_length = session->engine->model->config.context_length;
    if (asked->max_tokens > 0) return fv_min_i32(asked->max_tokens, context_length - asked->num_prompt_tokens + 1);
    return fv_max_i32(session->max_sequence_tokens - asked->num_prompt_tokens + 1, 1);
}

static int32_t *copy_tokens(const int32_t *tokens, int32_t num_tokens, int32_t capacity)
{
    int32_t *copy = malloc((size_t)capacity * sizeof(*copy));
    if (copy && num_tokens > 0) memcpy(copy, tokens, (size_t)num_tokens * sizeof(*copy));
    return copy;
}

static fv_status create_request(fv_session_request **out, const fv_session *session, const fv_request *asked)
{
    fv_session_request *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for a request");
    made->num_prompt = asked->num_prompt_tokens;
    made->max_written = limit_written(session, asked);
    made->num_forced = asked->num_forced;
    made->ignore_eos = asked->ignore_eos != 0;
    made->on_token = asked->on_token;
    made->on_logits = asked->on_logits;
    made->first_logits = asked->first_logits;
    made->user = asked->user;
    made->tokens = copy_tokens(asked->prompt, asked->num_prompt_tokens, made->num_prompt + made->max_written);
    made->forced = copy_tokens(asked->forced, asked->num_forced, asked->num_forced + 1);
    fv_status status = FV_OK;
    if (!made->tokens || !made->forced) status = fv_fail(FV_ERR_NO_MEMORY, "no memory for the tokens of a request");
    if (status == FV_OK) {
        status = fv_sampler_init(&made->sampler, asked->temperature, asked->top_k, asked->top_p, asked->seed);
    }
    if (status == FV_OK && session->engine->tokenizer) {
        status = fv_text_stream_init(&made->text, session->engine->tokenizer, false);
    }
    if (status != FV_OK) {
        destroy_request(made);
        return status;
    }
    *out = made;
    return FV_OK;
}

fv_status fv_session_add(int32_t *id, fv_session *session, const fv_request *asked)
{
    fv_status status = check_request(session, asked);
    if (status != FV_OK) return status;
    fv_session_request *made = NULL;
    status = create_request(&made, session, asked);
    if (status != FV_OK) return status;
    status = fv_scheduler_add(&session->scheduler, &made->sequence, made->num_prompt,
                              made->num_prompt + made->max_written - 1);
    if (status != FV_OK) {
        destroy_request(made);
        return status;
    }
    made->id = session->next_id++;
    fv_session_request **end = session->last_request ? &session->last_request->next : &session->requests;
    *end = session->last_request = made;
    session->num_unfinished++;
    session->stats.prompt_tokens_total += made->num_prompt;
    if (id) *id = made->id;
    return FV_OK;
}

static fv_session_request *find_request(const fv_session *session, int32_t id)
{
    fv_session_request *found = session->requests;
    while (found && found->id != id) found = found->next;
    return found;
}

fv_status fv_session_cancel(fv_session *session, int32_t id)
{
    if (session->failure != FV_OK) return fv_fail(session->failure, "an earlier step of this session has failed");
    if (id < 0 || id >= session->next_id) {
        return fv_fail(FV_ERR_INVALID, "request %d is not known; the session has given %d ids, from 0 on", id,
                       session->next_id);
    }
    fv_session_request *found = find_request(session, id);
    if (!found || found->finish != FV_FINISH_NONE) {
        return fv_fail(FV_ERR_INVALID, "request %d has ended or is cancelled already", id);
    }
    found->finish = FV_FINISH_CANCELLED;
    session->has_cancelled = true;
    if (session->is_stepping) return FV_OK;
    session->is_stepping = true;
    fv_session_end_cancelled(session);
    session->is_stepping = false;
    return FV_OK;
}

void fv_session_finish_request(fv_session *session, fv_session_request *finished)
{
    fv_session_request *before = NULL, **at = &session->requests;
    for (; *at != finished; at = &before->next) before = *at;
    *at = finished->next;
    if (session->last_request == finished) session->last_request = before;
    /* What a cancelled one leaves of its prompt does not come. */
    session->stats.prompt_tokens_total -= fv_max_i32(finished->num_prompt - finished->sequence.num_computed, 0);
    fv_scheduler_finish(&session->scheduler, &finished->sequence);
    destroy_request(finished);
    session->num_unfinished--;
}
