/* Command-line values shared by the subcommands. Every reader returns FV_ERR_INVALID with a text that
 * names the option, the value given and what is accepted; fv_args_fail() prints that text. */
#ifndef FV_TOOLS_ARGS_H
#define FV_TOOLS_ARGS_H

#include <getopt.h>

#include "fovea/dtype.h"

/* A decimal integer in [min, max]; "k" after it is x 1024. */
fv_status fv_args_i32(int32_t *value, const char *option, const char *text, int32_t min, int32_t max);
fv_status fv_args_i64(int64_t *value, const char *option, const char *text, int64_t min, int64_t max);

/* A finite decimal number in [min, max]. */
fv_status fv_args_f64(double *value, const char *option, const char *text, double min, double max);

/* "32/8": 32 query heads, 8 KV heads; "32": as many of both. Digits alone, as many as the library takes. */
fv_status fv_args_heads(int32_t *num_heads, int32_t *num_kv_heads, const char *option, const char *text);

fv_status fv_args_dtype(fv_dtype *dtype, const char *option, const char *text);

/* One of `num_names` words: *index is its place in `names`. */
fv_status fv_args_choice(int32_t *index, const char *option, const char *text, const char *const *names,
                         int32_t num_names);

/* What getopt_long's answers ':' (a value is missing) and '?' (no such option) mean. Use it with
 * opterr = 0 and an option string that starts with ':', right after the call. */
fv_status fv_args_refuse(int answer, int argc, char **argv);

/* An operand where the command takes none. */
fv_status fv_args_refuse_operand(const char *operand, const char *command);

/* Writes out what standard output still holds. FV_ERR_IO: some of it, now or before, could not be written. */
fv_status fv_output_flush(void);

/* Prints "fovea COMMAND: TEXT" with the text of the last failure on stderr. Returns 2, the exit code
 * of wrong usage. */
int fv_args_fail(const char *command);

/* The same for a failure that is not one of usage: returns 1. */
int fv_run_fail(const char *command);

/* One of both: what was given is wrong where `status` is FV_ERR_INVALID. */
int fv_status_fail(const char *command, fv_status status);

#endif
