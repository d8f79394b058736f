/* libFuzzer target: a model file run to its end. A whole model is damaged, loaded as an engine and asked for texts: shapes
 * that fit each other and nothing else, weights that are no numbers, tokens without text, windows and contexts of
 * any size.
 *
 *     fuzz_session -max_total_time=60
 *
 * The input is not the file, of 20 KB, but what is done to it:
 *
 *   | choices | offset, byte | offset, byte | ...      offsets of 16 bits */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../engine/gguf_builder.h"
#include "core/compiler.h"
#include "core/error.h"
#include "fovea/engine.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { max_steps = 64, edit_bytes = 3 };

/* The first bytes of the input: how the file is used. */
typedef struct choices {
    uint8_t block_size, kv_cache_dtype, max_batched_tokens, max_num_seqs, batch_invariant, top_k, top_p, temperature;
} choices;

static void take_token(void *user, const fv_token_event *event)
{
    volatile char last = 0; /* reads all of the text */
    for (size_t i = 0; i < event->text_bytes; i++) last = event->text[i];
    (void)last;
    *(int32_t *)user += event->finish != FV_FINISH_NONE;
}

static void add_request(int32_t *num_finished, fv_session *session, fv_engine *engine, const choices *chosen,
                        int32_t which)
{
    static const char text[] = "hello  he\xc3\xa9\n\nllo <start_of_turn> hello hello";
    const fv_message message = {"user", text};
    int32_t *tokens, num_tokens;
    const fv_status status = which == 0 ? fv_engine_encode(&tokens, &num_tokens, engine, text, strlen(text))
                                        : fv_engine_encode_chat(&tokens, &num_tokens, engine, &message, 1);
    if (status != FV_OK) return;
    const fv_request request = {
        .struct_size = sizeof(request),
        .prompt = tokens,
        .num_prompt_tokens = num_tokens,
        .max_tokens = 5,
        .temperature = (float)chosen->temperature / 64.0f,
        .top_k = chosen->top_k,
        .top_p = (float)chosen->top_p / 255.0f,
        .ignore_eos = which,
        .on_token = take_token,
        .user = num_finished,
    };
    if (fv_session_add(NULL, session, &request) != FV_OK) (*num_finished)++;
    fv_engine_free_tokens(tokens);
}

static void run_session(fv_engine *engine, const choices *chosen)
{
    static const fv_dtype dtypes[] = {FV_DTYPE_NONE, FV_DTYPE_F32, FV_DTYPE_BF16, FV_DTYPE_F8_E4M3, FV_DTYPE_I8};
    const fv_session_options options = {
        .struct_size = sizeof(options),
        .block_size = chosen->block_size,
        .kv_cache_dtype = dtypes[chosen->kv_cache_dtype % FV_ARRAY_LEN(dtypes)],
        .cache_tokens = 256,
        .max_batched_tokens = chosen->max_batched_tokens,
        .max_num_seqs = chosen->max_num_seqs % 4,
        .batch_invariant = chosen->batch_invariant % 2,
    };
    fv_session *session;
    if (fv_session_create(&session, engine, &options) != FV_OK) return;
    int32_t num_finished = 0, num_unfinished = 1;
    for (int32_t i = 0; i < 2; i++) add_request(&num_finished, session, engine, chosen, i);
    for (int32_t i = 0; i < max_steps && num_unfinished > 0; i++) {
        /* What cannot be served is refused before, and weights that are no numbers end requests. */
        if (fv_session_step(&num_unfinished, session) != FV_OK) abort();
    }
    fv_session_destroy(session);
}

static void damage(gguf_builder *file, const uint8_t *edits, size_t bytes)
{
    for (; bytes >= edit_bytes; bytes -= edit_bytes, edits += edit_bytes) {
        const size_t offset = (size_t)edits[0] | (size_t)edits[1] << 8;
        file->data[offset % file->bytes] = edits[2];
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    choices chosen;
    if (bytes < sizeof(chosen)) return 0;
    memcpy(&chosen, data, sizeof(chosen));
    gguf_builder model;
    build_tiny_gemma(&model);
    damage(&model, data + sizeof(chosen), bytes - sizeof(chosen));
    const int file = memfd_create("fuzz_session", MFD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", file);
    if (file < 0 || write(file, model.data, model.bytes) != (ssize_t)model.bytes) abort();
    const fv_engine_options options = {.struct_size = sizeof(options), .num_threads = 1};
    fv_engine *engine;
    if (fv_engine_create(&engine, path, &options) == FV_OK) {
        run_session(engine, &chosen);
        fv_engine_destroy(engine);
    }
    close(file);
    free(model.data);
    return 0;
}
