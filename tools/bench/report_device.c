/* Rows of a device: times of graphs beside those of plain launches, and the ceilings of the run. */
#include <math.h>
#include <string.h>

#include "bench/report.h"

#define CLIFF 1.3 /* neighbours should differ by less */

void fv_bench_print_device_heading(const fv_bench_setting *setting)
{
    const fv_device_ceilings *c = setting->ceilings;
    const fv_device_probes *probes = setting->device->probes;
    printf("%s\n%s\n", setting->problem, fv_device_describe(setting->device));
    if (setting->shared_prefix) printf("first %d keys of a group shared\n", setting->shared_prefix);
    if (setting->stored) printf("new keys in the cache already\n");
    printf("empty kernel in a graph %.2f us; %lld MiB: read %.2f TB/s, copy %.2f TB/s (read and written); "
           "GEMM %d: bf16 %.0f, fp8 %.0f TFLOP/s\n",
           c->empty_us, (long long)(probes->large_bytes >> 20), c->read_bytes_per_us * 1e-6,
           c->copy_bytes_per_us * 1e-6, probes->gemm_size, c->bf16_flops_per_us * 1e-6, c->fp8_flops_per_us * 1e-6);
    printf("graph: the static grid replayed; list: this step's schedule as a graph; plain: that without a graph\n");
    printf("\n%-16s %-23s %-18s %-4s %10s %5s %10s %10s %6s %6s %8s  %-17s %6s %13s %13s\n", "batch", "backend",
           "variant", "path", "graph us", "+-%", "list us", "plain us", "x best", "TB/s", "TFLOP/s", "ceiling us",
           "of it", "update us", "latency us");
}

static double terabytes_per_second(const fv_bench_row *row)
{
    return (double)row->read_bytes / row->measured.run.median_us * 1e-6;
}

void fv_bench_print_device_row(const fv_bench_row *row)
{
    const fv_measurement *m = &row->measured;
    if (row->skipped[0]) {
        printf("%-16s %-23s skipped: %s\n", row->batch, row->backend, row->skipped);
        return;
    }
    const char *kind = NULL;
    const double ceiling_us = fv_bench_ceiling_us(&kind, row);
    char ceiling[48], best[16] = "", update[32], latency[32];
    snprintf(ceiling, sizeof(ceiling), "%s %.1f%s", strcmp(kind, "peak") == 0 ? "GEMM" : kind, ceiling_us,
             row->is_cold ? "" : " warm");
    snprintf(update, sizeof(update), "%.1f/%.1f", m->update_us, m->list_update_us);
    snprintf(latency, sizeof(latency), "%.1f/%.1f", m->graph_latency.median_us, m->plain_latency.median_us);
    if (row->best_ratio > 0) snprintf(best, sizeof(best), "%.2f", row->best_ratio);
    printf("%-16s %-23s %-18s %-4s %10.2f %5.1f %10.2f %10.2f %6s %6.3f %8.2f  %-17s %5.1f%% %13s %13s", row->batch,
           row->backend, m->variant, m->path, m->run.median_us, 100 * m->run.spread, m->list.median_us,
           m->plain.median_us, best, terabytes_per_second(row), row->flops / m->run.median_us * 1e-6, ceiling,
           100 * ceiling_us / m->run.median_us, update, latency);
    if (row->old_ratio > 0) printf("  %.2f x the old speed", row->old_ratio);
    printf("\n");
}

static double ratio_to_ceiling(const fv_bench_row *row)
{
    const char *kind;
    return row->measured.run.median_us / fv_bench_ceiling_us(&kind, row);
}

void fv_bench_print_cliffs(const fv_bench_row *rows, int32_t num_rows)
{
    double worst = 1;
    const fv_bench_row *before = NULL, *worst_rows[2] = {0};
    int32_t num_steps = 0, num_cliffs = 0;
    for (int32_t i = 0; i < num_rows; i++) {
        if (rows[i].skipped[0]) continue;
        if (before) {
            const double change = exp(fabs(log(ratio_to_ceiling(&rows[i]) / ratio_to_ceiling(before))));
            num_steps++;
            num_cliffs += change > CLIFF;
            if (change > worst) {
                worst = change;
                worst_rows[0] = before;
                worst_rows[1] = &rows[i];
            }
        }
        before = &rows[i];
    }
    printf("\n%d steps between neighbours, %d of them change time / ceiling by more than %.1f", num_steps, num_cliffs,
           CLIFF);
    if (worst_rows[0]) {
        printf("; the worst by %.2f, from %.2f of %s to %.2f of %s", worst, ratio_to_ceiling(worst_rows[0]),
               worst_rows[0]->batch, ratio_to_ceiling(worst_rows[1]), worst_rows[1]->batch);
    }
    printf("\n");
}
