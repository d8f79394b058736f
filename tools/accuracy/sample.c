#include "accuracy/sample.h"

#include <math.h>
#include <stdlib.h>

#include "check/random.h"
#include "core/error.h"
#include "core/float.h"

fv_status accuracy_samples_init(accuracy_samples *samples, int32_t num_samples, int32_t num_heads, int32_t context,
                                uint64_t seed)
{
    *samples = (accuracy_samples){
        .num_samples = num_samples,
        .num_heads = num_heads,
        .context = context,
        .table_stride = (context + ACCURACY_BLOCK_SIZE - 1) / ACCURACY_BLOCK_SIZE,
    };
    const int32_t num_entries = num_samples * samples->table_stride;
    samples->num_blocks = num_entries + 1;
    const size_t block_bytes = sizeof(uint16_t) * ACCURACY_BLOCK_SIZE * ACCURACY_HEAD_SIZE;
    samples->q = calloc((size_t)num_samples * (size_t)num_heads, sizeof(uint16_t) * ACCURACY_HEAD_SIZE);
    samples->latents = calloc((size_t)samples->num_blocks, block_bytes);
    samples->block_table = calloc((size_t)num_entries, sizeof(int32_t));
    samples->query_start = calloc((size_t)num_samples + 1, sizeof(int32_t));
    samples->seq_lens = calloc((size_t)num_samples, sizeof(int32_t));
    if (!samples->q || !samples->latents || !samples->block_table || !samples->query_start || !samples->seq_lens) {
        accuracy_samples_deinit(samples);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for %d samples of %d keys", num_samples, context);
    }
    check_random random = check_random_of(seed, UINT64_MAX);
    for (int32_t i = 0; i < num_entries; i++) { /* Fisher and Yates, from the inside out */
        const int32_t j = check_random_int(&random, 0, i);
        samples->block_table[i] = samples->block_table[j];
        samples->block_table[j] = i + 1;
    }
    for (int32_t i = 0; i < num_samples; i++) {
        samples->query_start[i + 1] = i + 1;
        samples->seq_lens[i] = context;
    }
    return FV_OK;
}

void accuracy_samples_deinit(accuracy_samples *samples)
{
    free(samples->q);
    free(samples->latents);
    free(samples->block_table);
    free(samples->query_start);
    free(samples->seq_lens);
    *samples = (accuracy_samples){0};
}

static float unit_of(uint32_t bits) { return (float)(bits >> 8) * 0x1p-24f; }

/* ACCURACY_HEAD_SIZE numbers. */
static void fill_row(uint16_t *to, const accuracy_distribution *distribution, check_random *random)
{
    for (int32_t d = 0; d < ACCURACY_HEAD_SIZE; d += 2) {
        const uint64_t bits = check_random_next(random);
        const float a = unit_of((uint32_t)bits), b = unit_of((uint32_t)(bits >> 32));
        float pair[2] = {2 * a - 1, 2 * b - 1};
        if (distribution->shape == ACCURACY_GAUSSIAN) { /* Box and Muller */
            const float radius = sqrtf(-2 * logf(1 - a)), angle = 6.2831853f * b;
            pair[0] = radius * cosf(angle);
            pair[1] = radius * sinf(angle);
        }
        to[d] = fv_bf16_of_f32(distribution->width * pair[0]);
        to[d + 1] = fv_bf16_of_f32(distribution->width * pair[1]);
    }
}

void accuracy_sample_fill(accuracy_samples *samples, int32_t sample, const accuracy_distribution *distribution,
                          uint64_t stream)
{
    check_random random = {stream};
    for (int32_t head = 0; head < samples->num_heads; head++) {
        uint16_t *row = samples->q + ((int64_t)sample * samples->num_heads + head) * ACCURACY_HEAD_SIZE;
        fill_row(row, distribution, &random);
    }
    for (int32_t key = 0; key < samples->context; key++)
        fill_row(accuracy_latent(samples, sample, key), distribution, &random);
}
