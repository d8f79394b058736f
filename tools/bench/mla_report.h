/* The results of `fovea bench mla-layer`, and how they are printed. */
#ifndef FV_TOOLS_BENCH_MLA_REPORT_H
#define FV_TOOLS_BENCH_MLA_REPORT_H

#include "bench/mla_stages.h"

/* Medians of one length. */
typedef struct fv_mla_result {
    int32_t length; /* cached tokens before the new one */
    char plan[768]; /* fv_plan_describe */
    double stage_us[FV_MLA_NUM_STAGES], total_us;
    double plain_us;          /* on a device: without a graph, as the stages; 0 on the CPU */
    double bytes_per_us;      /* of a read of W_o */
    double operations_per_us; /* of the multiply-add units; on a device of a GEMM */
} fv_mla_result;

/* What the results were measured on: the CPU's threads, or a device. */
typedef struct fv_mla_setting {
    int32_t num_threads;
    const char *device; /* its description; NULL: the CPU */
    int argc;           /* the command */
    char **argv;
} fv_mla_setting;

void fv_mla_print_heading(const fv_mla_sizes *sizes, const fv_mla_setting *setting);
void fv_mla_print_result(const fv_mla_sizes *sizes, const fv_mla_result *result);
void fv_mla_print_json(const fv_mla_sizes *sizes, const fv_mla_setting *setting, const fv_mla_result *results,
                       int32_t num_results);

#endif
