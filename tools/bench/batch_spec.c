#include "bench/batch_spec.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "core/error.h"

typedef struct group {
    int32_t count;
    int32_t query_len;
    int32_t seq_len;
} group;

static fv_status refuse(const char *text, const char *at, const char *what)
{
    return fv_fail(FV_ERR_INVALID,
                   "batch '%s': %s at '%s'; accepted: (count)q(len)(s(len)), k for x 1024, joined with _, e.g. 32q1s4k",
                   text, what, at);
}

/* Reads digits and an optional k at *at, and moves *at past them. */
static fv_status read_number(int32_t *number, const char **at, const char *text, int32_t max, int32_t takes_k)
{
    const char *start = *at;
    if (!isdigit((unsigned char)*start)) return refuse(text, start, "a number is missing");
    int64_t value = 0;
    for (; isdigit((unsigned char)**at); (*at)++) value = fv_min_i64(value * 10 + (**at - '0'), INT32_MAX);
    if (takes_k && **at == 'k') {
        value *= 1024;
        (*at)++;
    }
    if (value < 1 || value > max) {
        return fv_fail(FV_ERR_INVALID, "batch '%s': the number at '%s' is out of range; accepted: 1 to %d", text, start,
                       max);
    }
    *number = (int32_t)value;
    return FV_OK;
}

static fv_status read_group(group *g, const char **at, const char *text)
{
    const char *start = *at;
    *g = (group){.count = 1};
    fv_status status = FV_OK;
    if (isdigit((unsigned char)**at)) status = read_number(&g->count, at, text, FV_BATCH_SPEC_MAX_SEQS, 0);
    if (status != FV_OK) return status;
    if (**at != 'q') return refuse(text, *at, "'q' is missing");
    (*at)++;
    status = read_number(&g->query_len, at, text, FV_BATCH_SPEC_MAX_LEN, 1);
    if (status != FV_OK) return status;
    g->seq_len = g->query_len;
    if (**at == 's') {
        (*at)++;
        status = read_number(&g->seq_len, at, text, FV_BATCH_SPEC_MAX_LEN, 1);
        if (status != FV_OK) return status;
    }
    if (g->seq_len < g->query_len) {
        return fv_fail(FV_ERR_INVALID, "batch '%s': at '%s' the sequence length %d is below the query length %d", text,
                       start, g->seq_len, g->query_len);
    }
    return FV_OK;
}

static fv_status append_group(fv_batch_spec *spec, const group *g, const char *text)
{
    const int64_t num_seqs = (int64_t)spec->num_seqs + g->count;
    const int64_t num_tokens = spec->num_tokens + (int64_t)g->count * g->query_len;
    if (num_seqs > FV_BATCH_SPEC_MAX_SEQS || num_tokens > FV_BATCH_SPEC_MAX_LEN) {
        return fv_fail(FV_ERR_INVALID, "batch '%s' has more than %d sequences or %d new tokens", text,
                       FV_BATCH_SPEC_MAX_SEQS, FV_BATCH_SPEC_MAX_LEN);
    }
    int32_t *query_lens = realloc(spec->query_lens, (size_t)num_seqs * sizeof(*query_lens));
    if (query_lens) spec->query_lens = query_lens;
    int32_t *seq_lens = realloc(spec->seq_lens, (size_t)num_seqs * sizeof(*seq_lens));
    if (seq_lens) spec->seq_lens = seq_lens;
    int32_t *groups = realloc(spec->groups, (size_t)num_seqs * sizeof(*groups));
    if (groups) spec->groups = groups;
    if (!query_lens || !seq_lens || !groups) return fv_fail(FV_ERR_NO_MEMORY, "no memory for batch '%s'", text);

    for (int32_t i = spec->num_seqs; i < num_seqs; i++) {
        query_lens[i] = g->query_len;
        seq_lens[i] = g->seq_len;
        groups[i] = spec->num_groups;
    }
    spec->num_groups++;
    spec->num_seqs = (int32_t)num_seqs;
    spec->num_tokens = (int32_t)num_tokens;
    spec->max_query_len = fv_max_i32(spec->max_query_len, g->query_len);
    spec->max_seq_len = fv_max_i32(spec->max_seq_len, g->seq_len);
    return FV_OK;
}

fv_status fv_batch_spec_init(fv_batch_spec *spec, const char *text)
{
    *spec = (fv_batch_spec){0};
    const char *at = text;
    fv_status status;
    for (;;) {
        group g;
        status = read_group(&g, &at, text);
        if (status == FV_OK) status = append_group(spec, &g, text);
        if (status != FV_OK || *at == '\0') break;
        if (*at != '_') {
            status = refuse(text, at, "'_' or the end is missing");
            break;
        }
        at++;
    }
    if (status != FV_OK) fv_batch_spec_deinit(spec);
    return status;
}

void fv_batch_spec_deinit(fv_batch_spec *spec)
{
    free(spec->query_lens);
    free(spec->seq_lens);
    free(spec->groups);
    *spec = (fv_batch_spec){0};
}
