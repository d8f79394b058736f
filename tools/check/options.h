/* The command line of `fovea check`. */
#ifndef FV_TOOLS_CHECK_OPTIONS_H
#define FV_TOOLS_CHECK_OPTIONS_H

#include "fovea/status.h"

#define CHECK_MAX_BACKENDS 16

typedef struct check_options {
    const char *backends[CHECK_MAX_BACKENDS]; /* names of the library */
    int32_t num_backends;
    const char *kernels;  /* one table; NULL all */
    const char *device;   /* where the kernels run */
    const char *isa;      /* strongest level; NULL what the CPU has */
    int32_t num_emulated; /* tables whose instructions run in plain C */
    const struct fv_kernel_table *emulated[2];
    const char *only; /* a case, or a group of cases; NULL all */
    int32_t num_random;
    int64_t seed;
    int32_t num_threads;
    int32_t quick, list, json, help;
} check_options;

/* Reads the command line; FV_ERR_INVALID with a text. */
fv_status check_options_parse(check_options *options, int argc, char **argv);

void check_options_print_help(void);

#endif
