#include "bench/summary.h"

#include <math.h>
#include <string.h>

static int32_t is_measured(const fv_bench_row *row) { return row->skipped[0] == '\0'; }

static int32_t same_kernels(const fv_bench_row *a, const fv_bench_row *b)
{
    return strcmp(a->kernels, b->kernels) == 0;
}

/* The row of the reference kernels; NULL where there is no other to compare with it. */
static const fv_bench_row *find_reference(const fv_bench_row *rows, int32_t num_rows, const char *reference)
{
    for (int32_t i = 0; i < num_rows; i++) {
        const int32_t is_reference = strcmp(rows[i].kernels, reference) == 0;
        if (is_reference && is_measured(&rows[i]) && !same_kernels(&rows[i], &rows[0])) return &rows[i];
    }
    return NULL;
}

void fv_bench_fill_ratios(fv_bench_row *rows, int32_t num_rows, const char *reference)
{
    const fv_bench_row *slow = find_reference(rows, num_rows, reference);
    for (int32_t i = 0; i < num_rows; i++) {
        if (!is_measured(&rows[i]) || &rows[i] == slow) continue;
        double best_us = rows[i].measured.run.median_us;
        for (int32_t j = 0; j < num_rows; j++) {
            if (!is_measured(&rows[j]) || !same_kernels(&rows[i], &rows[j])) continue;
            if (rows[j].measured.run.median_us < best_us) best_us = rows[j].measured.run.median_us;
        }
        rows[i].best_ratio = rows[i].measured.run.median_us / best_us;
        if (slow) rows[i].reference_ratio = slow->measured.run.median_us / rows[i].measured.run.median_us;
    }
}

static fv_backend_score *score_of(fv_backend_score *backends, int32_t *num_backends, int32_t max_backends,
                                  const char *backend)
{
    for (int32_t i = 0; i < *num_backends; i++) {
        if (strcmp(backends[i].backend, backend) == 0) return &backends[i];
    }
    if (*num_backends == max_backends) return NULL;
    fv_backend_score *added = &backends[(*num_backends)++];
    *added = (fv_backend_score){.backend = backend};
    return added;
}

int32_t fv_bench_summarize(fv_backend_score *backends, int32_t max_backends, const fv_bench_row *rows, int32_t num_rows)
{
    int32_t num_backends = 0;
    for (int32_t i = 0; i < num_rows; i++) {
        const fv_bench_row *row = &rows[i];
        if (!same_kernels(row, &rows[0])) continue;
        fv_backend_score *score = score_of(backends, &num_backends, max_backends, row->backend);
        if (!score) continue;
        if (!is_measured(row)) {
            score->num_refused++;
            continue;
        }
        score->num_measured++;
        score->num_near += row->best_ratio <= FV_NEAR_BEST;
        if (row->best_ratio <= score->worst_ratio) continue;
        score->worst_ratio = row->best_ratio;
        score->worst_batch = row->batch;
    }
    return num_backends;
}

int32_t fv_bench_is_best(const fv_bench_row *row, const fv_bench_row *rows)
{
    return is_measured(row) && same_kernels(row, rows) && row->best_ratio == 1.0;
}

double fv_bench_ratio_to_ceiling(const fv_bench_row *row)
{
    const char *kind;
    return row->measured.run.median_us / fv_bench_ceiling_us(&kind, row);
}

/* The row of the same backend and kernels for the batch before that of rows[at]; NULL: none. */
static const fv_bench_row *find_neighbour(const fv_bench_row *rows, int32_t at)
{
    for (int32_t i = at - 1; i >= 0; i--) {
        const int32_t is_same = same_kernels(&rows[i], &rows[at]) && strcmp(rows[i].backend, rows[at].backend) == 0;
        if (is_same && is_measured(&rows[i])) return &rows[i];
    }
    return NULL;
}

fv_bench_cliffs fv_bench_find_cliffs(const fv_bench_row *rows, int32_t num_rows, const char *reference)
{
    fv_bench_cliffs cliffs = {.worst = 1};
    for (int32_t i = 0; i < num_rows; i++) {
        const int32_t is_beside = strcmp(rows[i].kernels, reference) == 0 && !same_kernels(&rows[i], &rows[0]);
        if (!is_measured(&rows[i]) || is_beside) continue;
        const fv_bench_row *before = find_neighbour(rows, i);
        if (!before) continue;
        const double change = exp(fabs(log(fv_bench_ratio_to_ceiling(&rows[i]) / fv_bench_ratio_to_ceiling(before))));
        cliffs.num_steps++;
        cliffs.num_cliffs += change > FV_CLIFF;
        if (change <= cliffs.worst) continue;
        cliffs.worst = change;
        cliffs.from = before;
        cliffs.to = &rows[i];
    }
    return cliffs;
}
