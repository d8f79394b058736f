#include "bench/report.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench/ceilings.h"
#include "core/cpu.h"
#include "core/error.h"
#include "json.h"

double fv_bench_ceiling_us(const char **kind, const fv_bench_row *row)
{
    const double peak_us = row->flops / row->measured.flops_per_us;
    *kind = row->measured.read_us >= peak_us ? "read" : "peak";
    return row->measured.read_us >= peak_us ? row->measured.read_us : peak_us;
}

static double gigabytes_per_second(double bytes, double us) { return bytes / us * 1e-3; }

void fv_bench_print_heading(const fv_bench_setting *setting)
{
    printf("%s, %d threads\n\n", setting->problem, setting->num_threads);
    printf("%-18s %-14s %-10s %-6s %11s %11s %5s %7s %8s  %-22s %6s %8s\n", "batch", "backend", "kernels", "path",
           "median us", "min us", "+-%", "GB/s", "TFLOP/s", "ceiling", "of it", "x faster");
}

void fv_bench_print_row(const fv_bench_row *row)
{
    printf("%-18s %-14s %-10s ", row->batch, row->backend, row->kernels);
    if (row->skipped[0]) {
        printf("skipped: %s\n", row->skipped);
        return;
    }
    const fv_measurement *m = &row->measured;
    const char *kind = NULL;
    const double ceiling_us = fv_bench_ceiling_us(&kind, row);
    char ceiling[64], ratio[64] = "";
    if (strcmp(kind, "read") == 0) {
        snprintf(ceiling, sizeof(ceiling), "read %.1f GB/s %s",
                 gigabytes_per_second((double)row->read_bytes, m->read_us), row->is_cold ? "cold" : "warm");
    } else {
        snprintf(ceiling, sizeof(ceiling), "peak %.3f TFLOP/s", m->flops_per_us * 1e-6);
    }
    if (row->reference_ratio > 0) snprintf(ratio, sizeof(ratio), "%.1f", row->reference_ratio);
    printf("%-6s %11.1f %11.1f %5.1f %7.2f %8.4f  %-22s %5.1f%% %8s", m->path, m->run.median_us, m->run.min_us,
           100 * m->run.spread, gigabytes_per_second((double)row->read_bytes, m->run.median_us),
           row->flops / m->run.median_us * 1e-6, ceiling, 100 * ceiling_us / m->run.median_us, ratio);
    if (row->old_ratio > 0) printf("  %.2f x the old speed", row->old_ratio);
    printf("\n");
}

void fv_bench_print_csv(FILE *file, const fv_bench_row *rows, int32_t num_rows)
{
    fprintf(file, "batch,backend,kernels,variant,path,state,median_us,min_us,spread,runs,update_us,gbytes_per_s,"
                  "tflops,ceiling,ceiling_us,ceiling_percent,skipped\n");
    for (int32_t i = 0; i < num_rows; i++) {
        const fv_bench_row *row = &rows[i];
        const fv_measurement *m = &row->measured;
        if (row->skipped[0]) {
            fprintf(file, "%s,%s,%s,,,,,,,,,,,,,,\"%s\"\n", row->batch, row->backend, row->kernels, row->skipped);
            continue;
        }
        const char *kind = NULL;
        const double ceiling_us = fv_bench_ceiling_us(&kind, row);
        fprintf(file, "%s,%s,%s,%s,%s,%s,%.3f,%.3f,%.4f,%d,%.3f,%.3f,%.5f,%s,%.3f,%.2f,\n", row->batch, row->backend,
                row->kernels, m->variant, m->path, row->is_cold ? "cold" : "warm", m->run.median_us, m->run.min_us,
                m->run.spread, m->run.count, m->update_us,
                gigabytes_per_second((double)row->read_bytes, m->run.median_us), row->flops / m->run.median_us * 1e-6,
                kind, ceiling_us, 100 * ceiling_us / m->run.median_us);
    }
}

static void print_json_row(fv_json *json, const fv_bench_row *row)
{
    const fv_measurement *m = &row->measured;
    fv_json_begin_row(json);
    fv_json_string(json, "batch", row->batch);
    fv_json_string(json, "backend", row->backend);
    fv_json_string(json, "kernels", row->kernels);
    if (row->skipped[0]) {
        fv_json_string(json, "skipped", row->skipped);
        fv_json_end_object(json);
        return;
    }
    const char *kind = NULL;
    const double ceiling_us = fv_bench_ceiling_us(&kind, row);
    fv_json_double(json, "median_us", m->run.median_us);
    fv_json_double(json, "min_us", m->run.min_us);
    fv_json_double(json, "spread", m->run.spread);
    fv_json_int(json, "runs", m->run.count);
    fv_json_double(json, "update_us", m->update_us);
    fv_json_string(json, "variant", m->variant);
    fv_json_string(json, "path", m->path);
    fv_json_string(json, "state", row->is_cold ? "cold" : "warm");
    fv_json_int(json, "cache_copies", row->num_copies);
    fv_json_int(json, "read_bytes", row->read_bytes);
    fv_json_double(json, "flops", row->flops);
    fv_json_double(json, "gbytes_per_s", gigabytes_per_second((double)row->read_bytes, m->run.median_us));
    fv_json_double(json, "tflops", row->flops / m->run.median_us * 1e-6);
    fv_json_double(json, "read_us", m->read_us);
    fv_json_double(json, "peak_tflops", m->flops_per_us * 1e-6);
    fv_json_string(json, "ceiling", kind);
    fv_json_double(json, "ceiling_percent", 100 * ceiling_us / m->run.median_us);
    if (row->reference_ratio > 0) fv_json_double(json, "times_faster_than_reference", row->reference_ratio);
    if (row->old_ratio > 0) fv_json_double(json, "times_faster_than_old", row->old_ratio);
    fv_json_string(json, "plan", m->plan);
    fv_json_end_object(json);
}

/* The command as it was typed, words joined with spaces. */
static void join_command(char *text, size_t text_bytes, const fv_bench_setting *setting)
{
    size_t used = (size_t)snprintf(text, text_bytes, "fovea");
    for (int32_t i = 0; i < setting->argc && used < text_bytes; i++) {
        used += (size_t)snprintf(text + used, text_bytes - used, " %s", setting->argv[i]);
    }
}

void fv_bench_print_json(FILE *file, const fv_bench_setting *setting, const fv_bench_row *rows, int32_t num_rows)
{
    char command[1024], model[128], date[32];
    const time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &utc);
    join_command(command, sizeof(command), setting);
    fv_cpu_model(model, sizeof(model));

    fv_json json;
    fv_json_init(&json, file);
    fv_json_begin_object(&json, NULL);
    fv_json_string(&json, "command", command);
    fv_json_string(&json, "date", date);
    fv_json_string(&json, "version", fv_version());
    fv_json_string(&json, "commit", getenv("FOVEA_COMMIT")); /* scripts/bench.sh sets it */
    fv_json_string(&json, "cpu", model);
    fv_json_string(&json, "ceiling_isa", fv_ceiling_isa());
    fv_json_int(&json, "threads", setting->num_threads);
    fv_json_string(&json, "problem", setting->problem);
    fv_json_begin_array(&json, "rows");
    for (int32_t i = 0; i < num_rows; i++) print_json_row(&json, &rows[i]);
    fv_json_end_array(&json);
    fv_json_end_object(&json);
}

/* The value of a string member on a line of the file; 0 where it differs from `value`. */
static int32_t line_has(const char *line, const char *key, const char *value)
{
    char member[160];
    snprintf(member, sizeof(member), "\"%s\": \"%s\"", key, value);
    return strstr(line, member) != NULL;
}

fv_status fv_bench_compare(fv_bench_row *rows, int32_t num_rows, const char *path)
{
    FILE *file = fopen(path, "r");
    if (!file) return fv_fail(FV_ERR_IO, "--compare is '%s': %s", path, strerror(errno));
    char line[4096]; /* a row of fv_bench_print_json is one line */
    int32_t num_found = 0;
    while (fgets(line, sizeof(line), file)) {
        const char *at = strstr(line, "\"median_us\": ");
        const double old_us = at ? strtod(at + strlen("\"median_us\": "), NULL) : 0;
        if (!(old_us > 0)) continue;
        num_found++;
        for (int32_t i = 0; i < num_rows; i++) {
            fv_bench_row *row = &rows[i];
            if (row->skipped[0] || !line_has(line, "batch", row->batch) || !line_has(line, "backend", row->backend) ||
                !line_has(line, "kernels", row->kernels)) {
                continue;
            }
            row->old_ratio = old_us / row->measured.run.median_us;
        }
    }
    fclose(file);
    if (num_found > 0) return FV_OK;
    return fv_fail(FV_ERR_IO, "--compare is '%s', which has no rows; accepted: a file written by fovea bench --json",
                   path);
}
