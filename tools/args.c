#include "args.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"

#define MAX_HEADS 65536 /* of the library */

fv_status fv_args_i64(int64_t *value, const char *option, const char *text, int64_t min, int64_t max)
{
    char *end = NULL;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    int32_t wrong = errno != 0 || end == text || !strchr("-0123456789", text[0]); /* strtoll skips white space */
    if (!wrong && *end == 'k') {
        wrong = __builtin_mul_overflow(number, 1024LL, &number);
        end++;
    }
    if (wrong || *end != '\0' || number < min || number > max) {
        return fv_fail(FV_ERR_INVALID, "%s is '%s'; accepted: a whole number from %lld to %lld", option, text,
                       (long long)min, (long long)max);
    }
    *value = number;
    return FV_OK;
}

fv_status fv_args_i32(int32_t *value, const char *option, const char *text, int32_t min, int32_t max)
{
    int64_t wide = 0;
    const fv_status status = fv_args_i64(&wide, option, text, min, max);
    if (status == FV_OK) *value = (int32_t)wide;
    return status;
}

fv_status fv_args_f64(double *value, const char *option, const char *text, double min, double max)
{
    char *end = NULL;
    const double number = strtod(text, &end);
    const char *rest = text + strspn(text, "+-.0123456789eE"); /* strtod skips white space and reads hexadecimal */
    if (end == text || *end != '\0' || *rest != '\0' || !isfinite(number) || number < min || number > max) {
        return fv_fail(FV_ERR_INVALID, "%s is '%s'; accepted: a number from %g to %g", option, text, min, max);
    }
    *value = number;
    return FV_OK;
}

/* Digits of a count up to MAX_HEADS; what follows them, or NULL. */
static const char *read_heads(int32_t *count, const char *text)
{
    char *end;
    if (text[0] < '0' || text[0] > '9') return NULL; /* strtol takes white space and signs */
    const long number = strtol(text, &end, 10);
    *count = (int32_t)number;
    return number >= 1 && number <= MAX_HEADS ? end : NULL;
}

fv_status fv_args_heads(int32_t *num_heads, int32_t *num_kv_heads, const char *option, const char *text)
{
    int32_t query = 0, kv = 0;
    const char *rest = read_heads(&query, text);
    if (rest && *rest == '/') {
        rest = read_heads(&kv, rest + 1);
    } else {
        kv = query;
    }
    if (!rest || *rest != '\0' || query % kv != 0) {
        return fv_fail(
            FV_ERR_INVALID,
            "%s is '%s'; accepted: QUERY/KV heads, e.g. 32/8, each from 1 to %d, the first a multiple of the "
            "second",
            option, text, MAX_HEADS);
    }
    *num_heads = query;
    *num_kv_heads = kv;
    return FV_OK;
}

fv_status fv_args_dtype(fv_dtype *dtype, const char *option, const char *text)
{
    if (fv_dtype_parse(dtype, text) == FV_OK) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "%s is '%s'; accepted: float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, int8", option,
                   text);
}

fv_status fv_args_choice(int32_t *index, const char *option, const char *text, const char *const *names,
                         int32_t num_names)
{
    char accepted[1024] = "";
    size_t used = 0;
    for (int32_t i = 0; i < num_names; i++) {
        if (strcmp(names[i], text) == 0) {
            *index = i;
            return FV_OK;
        }
        if (used < sizeof(accepted)) {
            used += (size_t)snprintf(accepted + used, sizeof(accepted) - used, "%s%s", i ? ", " : "", names[i]);
        }
    }
    return fv_fail(FV_ERR_INVALID, "%s is '%s'; accepted: %s", option, text, accepted);
}

fv_status fv_args_refuse(int answer, int argc, char **argv)
{
    const char *given = optind > 0 && optind <= argc ? argv[optind - 1] : "";
    if (answer == ':') return fv_fail(FV_ERR_INVALID, "%s needs a value; see fovea %s --help", given, argv[0]);
    const char *next = optind < argc ? argv[optind] : "";
    const int is_in_next = optopt > 0 && optopt < 128 && next[0] == '-' && next[1] != '-' && strchr(next + 1, optopt);
    if (optopt != 0 && !is_in_next && strncmp(given, "--", 2) == 0 && strchr(given, '='))
        return fv_fail(FV_ERR_INVALID, "'%s': the option takes no value; see fovea %s --help", given, argv[0]);
    if (optopt > 0 && optopt < 128) { /* a letter: optind may not have passed its word yet */
        return fv_fail(FV_ERR_INVALID, "unknown option '-%c'; fovea %s --help lists what is accepted", optopt, argv[0]);
    }
    return fv_fail(FV_ERR_INVALID,
                   "unknown option '%s', or the begin of several; fovea %s --help lists what is accepted", given,
                   argv[0]);
}

fv_status fv_args_refuse_operand(const char *operand, const char *command)
{
    return fv_fail(FV_ERR_INVALID, "'%s' is not taken; fovea %s --help lists what is accepted", operand, command);
}

fv_status fv_output_flush(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout)) return FV_OK;
    return fv_fail(FV_ERR_IO, "cannot write to standard output");
}

int fv_args_fail(const char *command)
{
    fprintf(stderr, "fovea %s: %s\n", command, fv_last_error());
    return 2;
}

int fv_run_fail(const char *command)
{
    fprintf(stderr, "fovea %s: %s\n", command, fv_last_error());
    return 1;
}

int fv_status_fail(const char *command, fv_status status)
{
    return status == FV_ERR_INVALID ? fv_args_fail(command) : fv_run_fail(command);
}
