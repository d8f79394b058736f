/* The results of `fovea bench`: rows, and how they are printed. */
#ifndef FV_TOOLS_BENCH_REPORT_H
#define FV_TOOLS_BENCH_REPORT_H

#include <stdio.h>

#include "bench/measure.h"

typedef struct fv_bench_row {
    const char *batch; /* as given */
    char backend[48];
    char kernels[32];  /* asked for: a table's name */
    char skipped[512]; /* why there is no measurement; "" otherwise */
    fv_measurement measured;
    int32_t is_cold;
    int32_t num_copies;
    double flops;
    int64_t read_bytes;
    double best_ratio;      /* this time / that of the fastest backend of the batch with these kernels; 0: none */
    double reference_ratio; /* the reference kernels' time / this time; 0: not measured */
    double old_ratio;       /* time in the file to compare with / this time; 0: not there */
} fv_bench_row;

/* What the rows were measured on. */
typedef struct fv_bench_setting {
    const char *problem;   /* one line */
    int32_t shared_prefix; /* keys asked for */
    int32_t stored;        /* 1: runs write no new keys */
    double quiet_limit_us; /* of the probes of quiet runs (quiet.h); 0: all runs count */
    int32_t num_threads;
    fv_device *device;                  /* where the kernels run */
    const fv_device_ceilings *ceilings; /* NULL on the CPU */
    int32_t argc;                       /* the command */
    char **argv;
} fv_bench_setting;

/* The ceiling of a row: the time that it cannot beat, and what sets it ("read" or "peak", which on a device is that
 * of a GEMM). */
double fv_bench_ceiling_us(const char **kind, const fv_bench_row *row);

void fv_bench_print_heading(const fv_bench_setting *setting);
void fv_bench_print_row(const fv_bench_row *row);

/* The same of a device other than the CPU. */
void fv_bench_print_device_heading(const fv_bench_setting *setting);
void fv_bench_print_device_row(const fv_bench_row *row);

/* Batches that follow each other as neighbours, within each backend and its kernels: where the ratio of time to
 * ceiling changes most. The kernels `reference` are left out where there are others. */
void fv_bench_print_cliffs(const fv_bench_row *rows, int32_t num_rows, const char *reference);

/* Of each batch the best backend; of each backend its worst ratio, and where it is best or near. Prints nothing
 * for a single backend. */
void fv_bench_print_summary(const fv_bench_row *rows, int32_t num_rows);
void fv_bench_print_csv(FILE *file, const fv_bench_row *rows, int32_t num_rows);
void fv_bench_print_json(FILE *file, const fv_bench_setting *setting, const fv_bench_row *rows, int32_t num_rows);

/* Reads a file that fv_bench_print_json wrote, or several of these joined, and fills in old_ratio where problem,
 * shared prefix, stored, batch, backend and kernels are the same. FV_ERR_IO: it cannot be read, has no rows or ends
 * early. */
fv_status fv_bench_compare(fv_bench_row *rows, int32_t num_rows, const fv_bench_setting *setting, const char *path);

#endif
