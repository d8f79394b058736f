/* Measures a column of the accuracy tables: the same samples through the paged backend AMLA with each of the three
 * ways to rescale, against double. */
#ifndef FV_TOOLS_ACCURACY_LAB_H
#define FV_TOOLS_ACCURACY_LAB_H

#include "accuracy/device.h"
#include "accuracy/exact.h"
#include "accuracy/sample.h"
#include "ops/kernel_table.h"

typedef enum accuracy_method {
    ACCURACY_BASE, /* the paper's name: rescales by multiplication */
    ACCURACY_AMLA,
    ACCURACY_UNCOMPENSATED,
    ACCURACY_NUM_METHODS,
} accuracy_method;

typedef struct accuracy_setup {
    int32_t num_samples; /* of a column */
    int32_t num_heads;
    int32_t context;
    uint64_t seed;
    const char *device;  /* as fv_device_find takes it; NULL = "cpu" */
    const char *kernels; /* as in fv_plan_options; on the CPU "amx-emulated" too */
} accuracy_setup;

typedef struct accuracy_column {
    accuracy_distribution distribution;
    double error[ACCURACY_NUM_METHODS]; /* mean over samples of |out - exact| / |exact|, Frobenius norms */
    double max_moved;                   /* how often a block after the first has a larger maximum, per row */
    double integer_moved;               /* and how often n changes with it */
} accuracy_column;

/* What all columns share. */
typedef struct accuracy_lab {
    accuracy_setup setup;
    fv_context *context;
    fv_plan *plans[ACCURACY_NUM_METHODS];
    const fv_attend_variant *emulated[ACCURACY_NUM_METHODS]; /* where there are no plans */
    int32_t block_keys;                                      /* keys between two looks at the maximum */
    accuracy_samples samples;                                /* of a round: one for each worker */
    accuracy_device at;
    uint16_t *out;         /* [samples, heads, 512] bf16 */
    double *exact;         /* [samples, heads rounded up to 8, 512] */
    char *scratch;         /* of accuracy_exact for each worker */
    accuracy_moves *moves; /* of each worker */
} accuracy_lab;

/* `context` is the caller's. deinit takes a zeroed lab. */
fv_status accuracy_lab_init(accuracy_lab *lab, fv_context *context, const accuracy_setup *setup);
void accuracy_lab_deinit(accuracy_lab *lab);

/* The plan in words, or what is measured instead of one. */
const char *accuracy_lab_kernels(const accuracy_lab *lab);

/* The variant's name of a method. */
const char *accuracy_variant(accuracy_method method);

/* Called after each round with the samples that are done. */
typedef void (*accuracy_progress_fn)(void *user, int32_t num_done);

/* Measures distribution->... into *column, whose distribution is set. `progress` may be NULL. */
fv_status accuracy_measure(accuracy_column *column, accuracy_lab *lab, accuracy_progress_fn progress, void *user);

#endif
