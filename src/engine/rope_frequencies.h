/* How far each pair of a head turns from one position to the next, and how that is stretched for contexts
 * longer than the model was trained on. */
#ifndef FV_ENGINE_ROPE_FREQUENCIES_H
#define FV_ENGINE_ROPE_FREQUENCIES_H

#include <stdbool.h>
#include <stdint.h>

/* Linear scaling (Chen et al., arXiv 2306.15595) divides every frequency by `factor`. YaRN (Peng et al.,
 * arXiv 2309.00071) leaves those alone that turn more than beta_fast times within the original context,
 * divides those by `factor` that turn less than beta_slow times, and goes over linearly in between. */
typedef struct fv_rope_scaling {
    float base;
    float factor; /* 1 = none */
    bool is_yarn;
    int32_t original_context; /* of YaRN, as all that follows */
    float beta_fast;
    float beta_slow;
    float magnitude; /* cosines and sines are multiplied by it; 1 without YaRN */
} fv_rope_scaling;

/* frequencies [rope_size / 2], in radians a position. */
void fv_rope_frequencies(double *frequencies, int32_t rope_size, const fv_rope_scaling *scaling);

#endif
