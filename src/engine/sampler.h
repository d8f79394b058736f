/* The next token from logits: greedy, or by chance after temperature, top-k and top-p, in that order.
 * Own random numbers: the same seed gives the same tokens everywhere. */
#ifndef FV_ENGINE_SAMPLER_H
#define FV_ENGINE_SAMPLER_H

#include "core/error.h"

typedef struct fv_sampler {
    float temperature; /* 0: greedy */
    int32_t top_k;     /* 0: all */
    float top_p;       /* 0 or 1: all; else the fewest likeliest tokens that have this much together */
    uint64_t random_state;
} fv_sampler;

/* FV_ERR_INVALID: a temperature below 0 or not finite, top_k below 0, top_p outside [0, 1]. */
fv_status fv_sampler_init(fv_sampler *sampler, float temperature, int32_t top_k, float top_p, uint64_t seed);

/* Room that fv_sampler_next needs, for any sampler, aligned as by malloc. */
size_t fv_sampler_scratch_bytes(int32_t vocabulary_size);

/* Chooses among logits [vocabulary_size]; among equals the lowest id. NaN is never chosen.
 * FV_ERR_INTERNAL when no logit is a number. */
fv_status fv_sampler_next(int32_t *token, fv_sampler *sampler, const float *logits, int32_t vocabulary_size,
                          void *scratch);

#endif
