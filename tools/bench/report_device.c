/* Rows of a device: times of graphs beside those of plain launches, and the ceilings of the run. */
#include <string.h>

#include "bench/report.h"

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
