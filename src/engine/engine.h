/* What an engine is made of; sessions use it. */
#ifndef FV_ENGINE_ENGINE_H
#define FV_ENGINE_ENGINE_H

#include "engine/chat_template.h"
#include "engine/gemm.h"
#include "engine/model.h"
#include "engine/tokenizer.h"
#include "fovea/engine.h"

struct fv_engine {
    fv_context *context;
    fv_gguf *gguf;
    fv_tokenizer *tokenizer;
    fv_chat_template chat_template; /* if has_chat_template */
    bool has_chat_template;
    char chat_why_not[256];
    fv_gemm_library *gemm;
    fv_model *model;
    double load_seconds;
};

#endif
