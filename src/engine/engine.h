/* What an engine is made of; sessions use it. */
#ifndef FV_ENGINE_ENGINE_H
#define FV_ENGINE_ENGINE_H

#include "core/error.h"
#include "engine/chat_template.h"
#include "engine/gemm.h"
#include "engine/model_device.h"
#include "engine/tokenizer.h"
#include "fovea/engine.h"

struct fv_engine {
    fv_context *context;
    fv_device *device;            /* where weights, caches and layers are */
    fv_device_model device_model; /* zeroed on the CPU */
    fv_gguf *gguf;                /* NULL with random weights, as the next */
    fv_tokenizer *tokenizer;
    fv_chat_template chat_template; /* if has_chat_template */
    bool has_chat_template;
    char chat_why_not[FV_ERROR_BYTES];
    fv_gemm_library *gemm;
    fv_model *model;
    double load_seconds;
};

/* Finds the device that the options name and creates engine->gemm for it (engine_device.c). FV_ERR_UNSUPPORTED: it
 * has no GEMM or layers, its layers do not take the model's sizes, or another compute type is asked for; FV_ERR_NO_MEMORY:
 * the weights of the file or shape would not fit. */
fv_status fv_engine_open_device(fv_engine *engine, const fv_engine_options *options, const char *path);

/* How many bytes of a text fv_engine_encode, and fv_engine_encode_chat of a message, leave out, as no token stands for
 * them. FV_ERR_UNSUPPORTED where there is no tokenizer. */
fv_status fv_engine_count_dropped(int64_t *num_dropped, const fv_engine *engine, const char *text, size_t bytes);

#endif
