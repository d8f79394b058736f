/* The inputs of the accuracy tables: random queries and latents in bf16, one decode of one token for each sample,
 * the latents in a paged cache whose blocks lie in random order. */
#ifndef FV_TOOLS_ACCURACY_SAMPLE_H
#define FV_TOOLS_ACCURACY_SAMPLE_H

#include "fovea/view.h"

enum {
    ACCURACY_LATENT = 512, /* of DeepSeek-V3: the values are the first 512 elements of a key */
    ACCURACY_ROPE = 64,
    ACCURACY_HEAD_SIZE = ACCURACY_LATENT + ACCURACY_ROPE,
    ACCURACY_BLOCK_SIZE = 64,
};

typedef enum accuracy_shape {
    ACCURACY_GAUSSIAN, /* mean 0, standard deviation `width` */
    ACCURACY_UNIFORM,  /* [-width, width) */
} accuracy_shape;

typedef struct accuracy_distribution {
    accuracy_shape shape;
    float width;
} accuracy_distribution;

/* `num_samples` samples side by side. */
typedef struct accuracy_samples {
    int32_t num_samples;
    int32_t num_heads;
    int32_t context;      /* keys of each */
    int32_t table_stride; /* blocks of each */
    uint16_t *q;          /* [num_samples, num_heads, 576] bf16 */
    uint16_t *latents;    /* [num_blocks, 64, 576] bf16 */
    int32_t *block_table; /* [num_samples, table_stride], block 0 unused */
    int32_t *query_start; /* [num_samples + 1] */
    int32_t *seq_lens;    /* [num_samples] */
    int64_t num_blocks;
} accuracy_samples;

/* Allocates, and shuffles the blocks. deinit takes a zeroed one. */
fv_status accuracy_samples_init(accuracy_samples *samples, int32_t num_samples, int32_t num_heads, int32_t context,
                                uint64_t seed);
void accuracy_samples_deinit(accuracy_samples *samples);

/* Fills one sample. The numbers depend on `stream` alone, not on the sample's place; different samples may be
 * filled at the same time. */
void accuracy_sample_fill(accuracy_samples *samples, int32_t sample, const accuracy_distribution *distribution,
                          uint64_t stream);

/* The latent of key `key` of a sample. */
static inline uint16_t *accuracy_latent(const accuracy_samples *samples, int32_t sample, int32_t key)
{
    const int64_t entry = (int64_t)sample * samples->table_stride + key / ACCURACY_BLOCK_SIZE;
    const int64_t slot = (int64_t)samples->block_table[entry] * ACCURACY_BLOCK_SIZE + key % ACCURACY_BLOCK_SIZE;
    return samples->latents + slot * ACCURACY_HEAD_SIZE;
}

#endif
