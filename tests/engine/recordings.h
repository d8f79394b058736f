/* What an independent implementation computed with the same model file; see tests/recordings/README.md. */
#ifndef FV_TESTS_RECORDINGS_H
#define FV_TESTS_RECORDINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What follows tokens [0 .. position] of a prompt. */
typedef struct recorded_position {
    int32_t best_id, second_id;
    float best_logit, second_logit;
    float log_sum_exp;
    float probes[]; /* [num_probes] */
} recorded_position;

typedef struct recorded_prompt {
    int32_t num_prompt_tokens;
    int32_t num_tokens;
    const int32_t *ids;
    const uint8_t *positions; /* [num_tokens] of position_bytes */
} recorded_prompt;

typedef struct recorded_logits {
    uint8_t *file;
    int32_t num_prompts;
    int32_t num_probes;
    int32_t vocabulary_size;
    const int32_t *probe_ids;
    size_t position_bytes;
    recorded_prompt *prompts;
} recorded_logits;

/* Both return false with a message on stderr when the file is not there or not what it should be. */
bool recorded_logits_read(recorded_logits *logits, const char *path);
void recorded_logits_free(recorded_logits *logits);

const recorded_position *recorded_position_at(const recorded_logits *logits, int32_t prompt, int32_t position);

typedef struct recorded_essay {
    uint8_t *file;
    int32_t num_tokens;
    const int32_t *ids;
    const float *nll; /* [num_tokens - 1] */
} recorded_essay;

bool recorded_essay_read(recorded_essay *essay, const char *path);
void recorded_essay_free(recorded_essay *essay);

/* A whole file with a zero behind it, or NULL. The caller frees it. */
uint8_t *read_whole_file(size_t *bytes, const char *path);

#endif
