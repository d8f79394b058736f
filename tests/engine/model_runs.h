/* Runs of a real model against its recording (tests/recordings/README.md), for the tests of each model:
 * the same next token wherever the recorded best two logits differ by more than 0.05, logits close on
 * average. */
#ifndef FV_TESTS_MODEL_RUNS_H
#define FV_TESTS_MODEL_RUNS_H

#include "engine/recordings.h"
#include "fovea/engine.h"

/* The rule for tokens: see the recording's README for how many positions are within the margin. */
#define CLOSE_CALL 0.05

/* Mean absolute difference of the recorded logits; fp32 against fp32 in another order of summation. */
#define MAX_MEAN_ERROR_F32 2e-4
#define MAX_MEAN_ERROR_F16 4e-3    /* keys and values rounded by 2^-11 */
#define MAX_MEAN_ERROR_BF16 0.1    /* weights and activations rounded by 2^-9 */
#define MAX_MEAN_ERROR_STORED 2e-3 /* weights as stored: each 32 activations rounded to 16 bits */

typedef struct fixture {
    const char *path;  /* of the model file */
    fv_engine *engine; /* NULL: no model file */
    recorded_logits logits;
    recorded_essay essay;
} fixture;

/* The model that an environment variable names, and its recordings. Returns 0, also where the variable is
 * not set, or 1 with a message. */
int fixture_open(fixture *f, const char *variable, const char *logits_name, const char *essay_name);
void fixture_close(fixture *f);

/* Skips the test where there is no model. */
const fixture *fixture_or_skip(void **state);

/* What one run over some prompts has seen. */
typedef struct outcome {
    const recorded_logits *recorded;
    int32_t first_prompt; /* of request 0 */
    int64_t num_positions;
    int64_t num_wrong; /* another best token, and no close call */
    double error_sum;
    int64_t num_errors;
    double max_error;
    uint64_t hash[32]; /* of all logits of each request, bit for bit */
} outcome;

/* How the tokens of a prompt come in: all as a prompt, or the recorded continuation one by one. */
typedef enum feeding { FEED_AS_PROMPT, FEED_AS_DECODES } feeding;

/* Which prompts of the recording run together. */
typedef struct prompt_range {
    int32_t first;
    int32_t count;
    feeding fed;
    int32_t first_logits; /* positions before it are computed, but not compared */
    int32_t num_tokens;   /* of each, from its start; 0: all that are recorded */
} prompt_range;

/* `stats` may be NULL. */
outcome run_prompts_on(fv_session *session, const fixture *f, prompt_range range, fv_session_stats *stats);

/* On a session of its own. */
outcome run_prompts(const fixture *f, fv_engine *engine, const fv_session_options *options, prompt_range range,
                    fv_session_stats *stats);

/* Fails the test where a token is wrong or the logits are off. */
void check_outcome(const char *name, const outcome *seen, double max_mean_error);

/* The model with its weights as the file stores them, on an fp32 cache: the first prompts of the recording as such, and
 * num_tokens of each as decodes. */
void check_weights_as_stored(const fixture *f, const fv_session_options *options, int32_t num_prompts,
                             int32_t num_tokens);

/* A session on backend `index`, or NULL with the reason printed where the backend refuses. Other failures
 * fail the test. */
fv_session *create_session_on(fv_engine *engine, fv_session_options options, int32_t index);

void run_to_end(fv_session *session);

/* The perplexity of the recorded essay; `expected` is that of the recording. */
double measure_perplexity(double *expected, const fixture *f, const fv_session_options *options,
                          fv_session_stats *stats);

#endif
