/* A gemma3 model of a few thousand random weights, written to a file: everything that the architecture
 * has, in milliseconds, where no real model is at hand or several windows would take too long. */
#ifndef FV_TESTS_TINY_MODEL_H
#define FV_TESTS_TINY_MODEL_H

#include <stdbool.h>

#include "fovea/engine.h"

enum {
    TINY_LAYERS = 7,
    TINY_FULL_EVERY = 3, /* layers 2 and 5 are full */
    TINY_WINDOW = 20,
    TINY_CONTEXT = 400,
    TINY_VOCABULARY = 275,
};

/* Writes the file; `path` is a template of mkstemp. `has_chat`: with a chat template of Gemma's form. */
void tiny_model_write(char *path, bool has_chat);

/* An engine on it, with chats; fp32. Fails the test where it cannot be made. */
fv_engine *tiny_model_load(int32_t num_threads);

/* The same where a token's embedding has a NaN, which so has every logit behind it. */
fv_engine *tiny_model_load_broken(int32_t token);

/* The same on a device, in bf16; NULL: the CPU in fp32. */
fv_engine *tiny_model_load_on(const char *device, int32_t num_threads);

#endif
