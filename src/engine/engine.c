/* A model in memory: creation in the order file, tokenizer, threads, weights. */
#include "engine/engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/device.h"
#include "engine/clock.h"

static fv_status open_file(fv_engine *engine, const char *path)
{
    fv_status status = fv_gguf_open(&engine->gguf, path);
    if (status != FV_OK) return status;
    /* Before anything is built: most files that cannot be served are refused here. */
    fv_model_config config;
    status = fv_model_config_read(&config, engine->gguf);
    if (status != FV_OK) return status;
    status = fv_tokenizer_create(&engine->tokenizer, engine->gguf);
    if (status != FV_OK) return status;
    if (fv_tokenizer_num_tokens(engine->tokenizer) > config.vocabulary_size) {
        return fv_fail(FV_ERR_IO, "%s: %d tokens in the vocabulary, but embeddings of %d only", path,
                       fv_tokenizer_num_tokens(engine->tokenizer), config.vocabulary_size);
    }
    status = fv_chat_template_init(&engine->chat_template, engine->gguf, engine->tokenizer);
    engine->has_chat_template = status == FV_OK;
    if (status == FV_ERR_UNSUPPORTED) {
        snprintf(engine->chat_why_not, sizeof(engine->chat_why_not), "%s", fv_last_error());
        return FV_OK; /* a model without a chat form still completes text */
    }
    return status;
}

static fv_status load_model(fv_engine *engine, const fv_engine_options *options)
{
    const fv_status status = engine->gguf
                                 ? fv_model_load(&engine->model, engine->gguf, engine->gemm, options->progress,
                                                 options->progress_user)
                                 : fv_model_create_random(&engine->model, options->random_weights, options->random_seed,
                                                          engine->gemm, options->progress, options->progress_user);
    if (status != FV_OK || engine->device->host_is_device) return status;
    return fv_device_model_init(&engine->device_model, engine->model, engine->device);
}

static fv_status open_model(fv_engine *engine, const char *path, const fv_engine_options *options)
{
    if (!options->random_weights) return open_file(engine, path);
    fv_model_config config;
    snprintf(engine->chat_why_not, sizeof(engine->chat_why_not), "random weights have no chat template");
    return fv_model_config_of_shape(&config, options->random_weights);
}

fv_status fv_engine_create(fv_engine **engine, const char *path, const fv_engine_options *options)
{
    const fv_engine_options defaults = {.struct_size = sizeof(defaults)};
    if (engine) *engine = NULL;
    if (!options) options = &defaults;
    fv_status status = fv_check_struct_size("fv_engine_options", options->struct_size, sizeof(*options));
    if (status != FV_OK) return status;
    if (!engine || (!path && !options->random_weights)) return fv_fail(FV_ERR_INVALID, "engine or path is NULL");
    const fv_context_options context_options = {
        .struct_size = sizeof(context_options),
        .num_threads = options->num_threads,
        .log = options->log,
        .log_user = options->log_user,
        .isa = options->isa,
    };
    const double start = fv_clock_seconds();
    fv_engine *made = calloc(1, sizeof(*made));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for an engine");
    status = open_model(made, path, options);
    if (status == FV_OK) status = fv_context_create(&made->context, &context_options);
    if (status == FV_OK) status = fv_engine_open_device(made, options, path);
    if (status == FV_OK) status = load_model(made, options);
    if (status != FV_OK) {
        fv_engine_destroy(made);
        return status;
    }
    made->load_seconds = fv_clock_seconds() - start;
    *engine = made;
    return FV_OK;
}

const char *fv_engine_random_shape(int32_t index) { return fv_model_random_shape(index); }

void fv_engine_destroy(fv_engine *engine)
{
    if (!engine) return;
    fv_device_model_deinit(&engine->device_model);
    fv_model_destroy(engine->model);
    fv_gemm_destroy(engine->gemm);
    fv_context_destroy(engine->context);
    if (engine->has_chat_template) fv_chat_template_deinit(&engine->chat_template);
    fv_tokenizer_destroy(engine->tokenizer);
    fv_gguf_close(engine->gguf);
    free(engine);
}

fv_status fv_engine_get_info(fv_engine_info *info, const fv_engine *engine)
{
    if (!info || info->struct_size != sizeof(*info)) {
        return fv_fail(FV_ERR_INVALID, "fv_engine_info is NULL or its struct_size is not %zu", sizeof(*info));
    }
    const fv_model_config *config = &engine->model->config;
    *info = (fv_engine_info){
        .struct_size = sizeof(*info),
        .architecture = config->architecture,
        .vocabulary_size = config->vocabulary_size,
        .context_length = config->context_length,
        .num_layers = config->num_layers,
        .num_heads = config->num_heads,
        .num_kv_heads = config->num_kv_heads,
        .head_size = config->head_size,
        .num_threads = fv_context_num_workers(engine->context),
        .has_chat_template = engine->has_chat_template,
        .compute_dtype = fv_gemm_dtype(engine->gemm),
        .weight_bytes = engine->model->weight_bytes,
        .load_seconds = engine->load_seconds,
        .gemm = fv_gemm_describe(engine->gemm),
        .chat_why_not = engine->chat_why_not,
        .device = fv_device_name(engine->device),
        .device_description = fv_device_describe(engine->device),
        .decode_weight_bytes = fv_model_decode_bytes(engine->model, !engine->device->host_is_device),
    };
    return FV_OK;
}

/* Hands the list's memory to the caller, or frees it where `status` is a failure. */
static fv_status hand_over(int32_t **tokens, int32_t *num_tokens, fv_token_list *list, fv_status status)
{
    if (status == FV_OK && list->num > INT32_MAX) status = fv_fail(FV_ERR_INVALID, "a text of more than 2^31 tokens");
    if (status != FV_OK) {
        fv_token_list_deinit(list);
        return status;
    }
    *tokens = list->ids;
    *num_tokens = (int32_t)list->num;
    return FV_OK;
}

static fv_status check_tokenizer(const fv_engine *engine)
{
    return engine->tokenizer ? FV_OK : fv_fail(FV_ERR_UNSUPPORTED, "random weights have no tokenizer");
}

fv_status fv_engine_encode(int32_t **tokens, int32_t *num_tokens, const fv_engine *engine, const char *text,
                           size_t bytes)
{
    *tokens = NULL;
    *num_tokens = 0;
    if (check_tokenizer(engine) != FV_OK) return FV_ERR_UNSUPPORTED;
    if (!text && bytes > 0) return fv_fail(FV_ERR_INVALID, "text is NULL; accepted: %zu bytes", bytes);
    fv_token_list list = {0};
    const fv_status status = fv_tokenizer_encode(&list, NULL, engine->tokenizer, (fv_text){text, bytes},
                                                 FV_ENCODE_BEGIN);
    return hand_over(tokens, num_tokens, &list, status);
}

fv_status fv_engine_count_dropped(int64_t *num_dropped, const fv_engine *engine, const char *text, size_t bytes)
{
    *num_dropped = 0;
    if (check_tokenizer(engine) != FV_OK) return FV_ERR_UNSUPPORTED;
    fv_token_list list = {0};
    const fv_status status = fv_tokenizer_encode(&list, num_dropped, engine->tokenizer, (fv_text){text, bytes},
                                                 FV_ENCODE_PLAIN);
    fv_token_list_deinit(&list);
    return status;
}

fv_status fv_engine_encode_chat(int32_t **tokens, int32_t *num_tokens, const fv_engine *engine,
                                const fv_message *messages, int32_t num_messages)
{
    *tokens = NULL;
    *num_tokens = 0;
    if (!engine->has_chat_template) return fv_fail(FV_ERR_UNSUPPORTED, "%s", engine->chat_why_not);
    if (num_messages < 1) return fv_fail(FV_ERR_INVALID, "a chat of %d messages; accepted: 1 or more", num_messages);
    if (!messages) return fv_fail(FV_ERR_INVALID, "messages is NULL; accepted: an array of %d", num_messages);
    for (int32_t i = 0; i < num_messages; i++) {
        if (messages[i].role && messages[i].content) continue;
        return fv_fail(FV_ERR_INVALID, "messages[%d].%s is NULL; accepted: a text", i,
                       messages[i].role ? "content" : "role");
    }
    fv_chat_message *chat = calloc((size_t)num_messages, sizeof(*chat));
    if (!chat) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d messages", num_messages);
    for (int32_t i = 0; i < num_messages; i++) chat[i] = (fv_chat_message){messages[i].role, messages[i].content};
    fv_token_list list = {0};
    const fv_status status = fv_chat_template_encode(&list, &engine->chat_template, engine->tokenizer, chat,
                                                     num_messages, true);
    free(chat);
    return hand_over(tokens, num_tokens, &list, status);
}

void fv_engine_free_tokens(int32_t *tokens) { free(tokens); }

fv_status fv_engine_decode(char **text, size_t *bytes, const fv_engine *engine, const int32_t *tokens,
                           int32_t num_tokens)
{
    *text = NULL;
    *bytes = 0;
    if (check_tokenizer(engine) != FV_OK) return FV_ERR_UNSUPPORTED;
    if (!tokens && num_tokens > 0) return fv_fail(FV_ERR_INVALID, "tokens is NULL; accepted: %d tokens", num_tokens);
    return fv_tokenizer_decode(text, bytes, engine->tokenizer, tokens, num_tokens, false);
}

void fv_engine_free_text(char *text) { free(text); }
