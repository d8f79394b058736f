/* Backends compared: ratios within a batch, and what they come to over all batches. */
#ifndef FV_TOOLS_BENCH_SUMMARY_H
#define FV_TOOLS_BENCH_SUMMARY_H

#include "bench/report.h"

#define FV_NEAR_BEST 1.05 /* a ratio up to this is "best or within 5%" */

/* One backend over all batches, with the kernels of the first row. */
typedef struct fv_backend_score {
    const char *backend;
    double worst_ratio; /* time / that of the best backend of the batch; 0: never measured */
    const char *worst_batch;
    int32_t num_near; /* batches on which it is best or near that */
    int32_t num_measured, num_refused;
} fv_backend_score;

/* Fills in best_ratio and reference_ratio of the rows of one batch. `reference` names the kernels that are
 * measured to compare with, not to win. */
void fv_bench_fill_ratios(fv_bench_row *rows, int32_t num_rows, const char *reference);

/* Fills `backends`, room for max_backends, in the order of the rows; returns their number. */
int32_t fv_bench_summarize(fv_backend_score *backends, int32_t max_backends, const fv_bench_row *rows,
                           int32_t num_rows);

/* 1: the row is the fastest of its batch with the kernels of the first row of all. */
int32_t fv_bench_is_best(const fv_bench_row *row, const fv_bench_row *rows);

#define FV_CLIFF 1.3 /* time / ceiling of neighbours should differ by less */

/* Steps between neighbours: two batches in a row of one backend with the same kernels. */
typedef struct fv_bench_cliffs {
    int32_t num_steps;
    int32_t num_cliffs;            /* of these steps, whose ratio of time to ceiling changes by more than FV_CLIFF */
    double worst;                  /* the largest change; 1: none */
    const fv_bench_row *from, *to; /* what changes so; NULL: nothing */
} fv_bench_cliffs;

/* `reference` names the kernels that are left out where there are others. */
fv_bench_cliffs fv_bench_find_cliffs(const fv_bench_row *rows, int32_t num_rows, const char *reference);

double fv_bench_ratio_to_ceiling(const fv_bench_row *row);

#endif
