/* The command line of `fovea check`. */
#ifndef FV_TOOLS_CHECK_OPTIONS_H
#define FV_TOOLS_CHECK_OPTIONS_H

#include "kernels/cpu_tables.h"

#define CHECK_MAX_BACKENDS 16
#define CHECK_NUM_EMULATED 2

/* A level whose kernels also run with its instructions in plain C, where the CPU does not have them. */
typedef struct check_emulated_level {
    fv_isa isa;
    const fv_kernel_table *table;
} check_emulated_level;

extern const check_emulated_level check_emulated_levels[CHECK_NUM_EMULATED];

typedef struct check_options {
    const char *backends[CHECK_MAX_BACKENDS]; /* names of the library */
    int32_t num_backends;
    const char *kernels;  /* one table; NULL all */
    const char *device;   /* where the kernels run */
    const char *isa;      /* strongest level; NULL what the CPU has */
    int32_t num_emulated; /* tables whose instructions run in plain C */
    const fv_kernel_table *emulated[CHECK_NUM_EMULATED];
    const char *only; /* a case, or a group of cases; NULL all */
    int32_t num_random;
    int64_t seed;
    int32_t num_threads;
    int32_t quick, list, json, help;
} check_options;

/* Reads the command line; FV_ERR_INVALID with a text. */
fv_status check_options_parse(check_options *options, int argc, char **argv);

/* The options that say what runs the cases, each behind a space, as the command line has them: " --device cuda
 * --kernels portable"; "" where none differs from the default. */
void check_options_write_runners(char *text, size_t text_bytes, const check_options *options);

void check_options_print_help(void);

#endif
