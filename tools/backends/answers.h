/* What the backends say to a problem, and what their plans do with a batch. */
#ifndef FV_TOOLS_BACKENDS_ANSWERS_H
#define FV_TOOLS_BACKENDS_ANSWERS_H

#include "fovea/backend.h"
#include "problem_args.h"

#define FV_ANSWER_REASONS_BYTES 4096
#define FV_ANSWER_MAX_REASONS 32
#define FV_ANSWERS_MAX_BACKENDS 64
#define FV_ANSWERS_MAX_PREFIXES 8

/* Of one backend. */
typedef struct fv_answer {
    const char *name;
    const char *summary;
    int32_t rank; /* place in the order of auto, from 1; 0: auto does not ask it */
    int32_t is_chosen;
    const char *layout;                 /* that it would use; "none" for an encoder */
    char text[FV_ANSWER_REASONS_BYTES]; /* the reasons, cut into strings */
    const char *reasons[FV_ANSWER_MAX_REASONS];
    int32_t num_reasons; /* 0: it can */
    char plan[1024];     /* fv_plan_describe after the batch, or why no plan is made; "": not asked */
    size_t workspace_bytes, buffer_bytes;
} fv_answer;

/* Sequences of the batch that follow each other and share their first keys, and what the planner's rule says
 * to it. */
typedef struct fv_prefix_row {
    int32_t first_seq, num_seqs, num_keys;
    int64_t gain;    /* in units of fv_work_cost */
    double of_batch; /* gain / cost of the batch without cascade */
} fv_prefix_row;

typedef struct fv_answers {
    const fv_problem_args *args;
    fv_device *device;
    fv_layer_kind kind;
    fv_answer all[FV_ANSWERS_MAX_BACKENDS]; /* first those that auto asks, in its order */
    int32_t num_all;
    const char *batch;                               /* NULL: not asked */
    fv_prefix_row prefixes[FV_ANSWERS_MAX_PREFIXES]; /* the first of them, worth it or not */
    int32_t num_prefixes;
} fv_answers;

/* Asks all backends. `args` and `device` are kept. */
fv_status fv_answers_init(fv_answers *answers, const fv_problem_args *args, fv_device *device);

/* Adds the plans of all that can for the batch `spec` (bench/batch_spec.h). No cache is made. */
fv_status fv_answers_add_batch(fv_answers *answers, fv_context *context, const char *spec);

/* The backend that auto takes; NULL: none can. */
const char *fv_answers_chosen(const fv_answers *answers);

/* "chosen", "can", "cannot". */
const char *fv_answer_verdict(const fv_answer *answer);

/* What becomes of a shared prefix: "worth it" and so on. */
const char *fv_answers_cascade_verdict(const fv_answers *answers, const fv_prefix_row *prefix);

/* As text, or as JSON, on stdout. */
void fv_answers_print(const fv_answers *answers);
void fv_answers_print_json(const fv_answers *answers);

#endif
