#include "bench/report.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bench/ceilings.h"
#include "bench/origin.h"
#include "bench/summary.h"
#include "core/cpu.h"
#include "core/error.h"
#include "json.h"

#define MAX_BACKENDS 64

double fv_bench_ceiling_us(const char **kind, const fv_bench_row *row)
{
    const double flops_per_us = row->measured.flops_per_us;
    const double peak_us = flops_per_us > 0 ? row->flops / flops_per_us : 0;
    *kind = row->measured.read_us >= peak_us ? "read" : "peak";
    return row->measured.read_us >= peak_us ? row->measured.read_us : peak_us;
}

static double gigabytes_per_second(double bytes, double us) { return bytes / us * 1e-3; }

static double mebibytes(size_t bytes) { return (double)bytes / (1 << 20); }
static double kibibytes(size_t bytes) { return (double)bytes / (1 << 10); }

void fv_bench_print_heading(const fv_bench_setting *setting)
{
    printf("%s, %d threads", setting->problem, setting->num_threads);
    if (setting->shared_prefix) printf(", first %d keys of a group shared", setting->shared_prefix);
    if (setting->stored) printf(", new keys in the cache already");
    printf("\n\n%-18s %-24s %-9s %-5s %11s %5s %6s %7s %8s  %-19s %6s %8s %8s %-12s %s\n", "batch", "backend",
           "kernels", "path", "median us", "+-%", "x best", "GB/s", "TFLOP/s", "ceiling", "of it", "work MiB",
           "plan KiB", "layout", "x faster");
}

void fv_bench_print_row(const fv_bench_row *row)
{
    printf("%-18s %-24s %-9s ", row->batch, row->backend, row->kernels);
    if (row->skipped[0]) {
        printf("skipped: %s\n", row->skipped);
        return;
    }
    const fv_measurement *m = &row->measured;
    const char *kind = NULL;
    const double ceiling_us = fv_bench_ceiling_us(&kind, row);
    char ceiling[64], best[32] = "";
    if (strcmp(kind, "read") == 0) {
        snprintf(ceiling, sizeof(ceiling), "read %.1f GB/s %s",
                 gigabytes_per_second((double)row->read_bytes, m->read_us), row->is_cold ? "cold" : "warm");
    } else {
        snprintf(ceiling, sizeof(ceiling), "peak %.3f TFLOP/s", m->flops_per_us * 1e-6);
    }
    if (row->best_ratio > 0) snprintf(best, sizeof(best), "%.2f", row->best_ratio);
    printf("%-5s %11.1f %5.1f %6s %7.2f %8.4f  %-19s %5.1f%% %8.2f %8.1f %-12s", m->path, m->run.median_us,
           100 * m->run.spread, best, gigabytes_per_second((double)row->read_bytes, m->run.median_us),
           row->flops / m->run.median_us * 1e-6, ceiling, 100 * ceiling_us / m->run.median_us,
           mebibytes(m->workspace_bytes), kibibytes(m->buffer_bytes), m->layout);
    if (row->reference_ratio > 0) printf(" %.1f", row->reference_ratio);
    if (row->old_ratio > 0) printf("  %.2f x the old speed", row->old_ratio);
    if (m->all_runs > 0) printf("  %d of %d runs quiet", m->quiet_runs, m->all_runs);
    if (m->all_runs > 0 && m->quiet_runs == 0) printf(", all count");
    printf("\n");
}

void fv_bench_print_summary(const fv_bench_row *rows, int32_t num_rows)
{
    fv_backend_score backends[MAX_BACKENDS];
    const int32_t num_backends = fv_bench_summarize(backends, MAX_BACKENDS, rows, num_rows);
    if (num_backends < 2) return;
    printf("\n%-18s %s\n", "batch", "best backend");
    for (int32_t i = 0; i < num_rows; i++) {
        if (fv_bench_is_best(&rows[i], rows)) printf("%-18s %s\n", rows[i].batch, rows[i].backend);
    }
    printf("\n%-24s %11s  %-18s %s\n", "backend", "worst ratio", "on batch", "best or within 5% on");
    for (int32_t i = 0; i < num_backends; i++) {
        const fv_backend_score *b = &backends[i];
        if (b->num_measured == 0) {
            printf("%-24s refused on all\n", b->backend);
            continue;
        }
        printf("%-24s %11.2f  %-18s %d of %d", b->backend, b->worst_ratio, b->worst_batch, b->num_near,
               b->num_measured);
        if (b->num_refused) printf(", refused on %d", b->num_refused);
        printf("\n");
    }
}

void fv_bench_print_cliffs(const fv_bench_row *rows, int32_t num_rows, const char *reference)
{
    const fv_bench_cliffs cliffs = fv_bench_find_cliffs(rows, num_rows, reference);
    printf("\n%d steps between neighbours, %d of them change time / ceiling by more than %.1f", cliffs.num_steps,
           cliffs.num_cliffs, FV_CLIFF);
    if (cliffs.from) {
        printf("; the worst by %.2f, from %.2f of %s to %.2f of %s (%s, %s)", cliffs.worst,
               fv_bench_ratio_to_ceiling(cliffs.from), cliffs.from->batch, fv_bench_ratio_to_ceiling(cliffs.to),
               cliffs.to->batch, cliffs.to->backend, cliffs.to->kernels);
    }
    printf("\n");
}

/* Within quotes: a quote is written twice. */
static void print_csv_text(FILE *file, const char *text)
{
    for (; *text; text++) {
        if (*text == '"') fputc('"', file);
        fputc(*text, file);
    }
}

void fv_bench_print_csv(FILE *file, const fv_bench_row *rows, int32_t num_rows)
{
    fprintf(file, "batch,backend,kernels,variant,path,state,median_us,min_us,spread,runs,update_us,gbytes_per_s,"
                  "tflops,ceiling,ceiling_us,ceiling_percent,ratio_to_best,workspace_bytes,plan_buffer_bytes,layout,"
                  "skipped,list_us,plain_us,quiet_runs,all_runs\n");
    for (int32_t i = 0; i < num_rows; i++) {
        const fv_bench_row *row = &rows[i];
        const fv_measurement *m = &row->measured;
        if (row->skipped[0]) {
            fprintf(file, "%s,%s,%s,,,,,,,,,,,,,,,,,,\"", row->batch, row->backend, row->kernels);
            print_csv_text(file, row->skipped);
            fprintf(file, "\",,,,\n");
            continue;
        }
        const char *kind = NULL;
        const double ceiling_us = fv_bench_ceiling_us(&kind, row);
        fprintf(file, "%s,%s,%s,%s,%s,%s,%.3f,%.3f,%.4f,%d,%.3f,%.3f,%.5f,%s,%.3f,%.2f,%.4f,%zu,%zu,%s,", row->batch,
                row->backend, row->kernels, m->variant, m->path, row->is_cold ? "cold" : "warm", m->run.median_us,
                m->run.min_us, m->run.spread, m->run.count, m->update_us,
                gigabytes_per_second((double)row->read_bytes, m->run.median_us), row->flops / m->run.median_us * 1e-6,
                kind, ceiling_us, 100 * ceiling_us / m->run.median_us, row->best_ratio, m->workspace_bytes,
                m->buffer_bytes, m->layout);
        if (m->list.count > 0)
            fprintf(file, ",%.3f,%.3f,", m->list.median_us, m->plain.median_us);
        else
            fprintf(file, ",,,"); /* of a processor */
        if (m->all_runs > 0)
            fprintf(file, "%d,%d\n", m->quiet_runs, m->all_runs);
        else
            fprintf(file, ",\n");
    }
}

static void print_json_samples(fv_json *json, const char *median, const char *spread, const fv_samples *samples)
{
    fv_json_double(json, median, samples->median_us);
    fv_json_double(json, spread, samples->spread);
}

/* What is measured on a device alone. */
static void print_json_timings(fv_json *json, const fv_measurement *m)
{
    fv_json_double(json, "list_update_us", m->list_update_us);
    print_json_samples(json, "list_us", "list_spread", &m->list);
    print_json_samples(json, "plain_us", "plain_spread", &m->plain);
    print_json_samples(json, "graph_latency_us", "graph_latency_spread", &m->graph_latency);
    print_json_samples(json, "plain_latency_us", "plain_latency_spread", &m->plain_latency);
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
    if (m->all_runs > 0) {
        fv_json_int(json, "quiet_runs", m->quiet_runs);
        fv_json_int(json, "all_runs", m->all_runs);
    }
    fv_json_double(json, "update_us", m->update_us);
    if (m->list.count > 0) print_json_timings(json, m);
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
    fv_json_string(json, "layout", m->layout);
    fv_json_int(json, "workspace_bytes", (int64_t)m->workspace_bytes);
    fv_json_int(json, "plan_buffer_bytes", (int64_t)m->buffer_bytes);
    if (row->best_ratio > 0) fv_json_double(json, "ratio_to_best", row->best_ratio);
    if (row->reference_ratio > 0) fv_json_double(json, "times_faster_than_reference", row->reference_ratio);
    if (row->old_ratio > 0) fv_json_double(json, "times_faster_than_old", row->old_ratio);
    fv_json_string(json, "plan", m->plan);
    fv_json_end_object(json);
}

static void print_json_summary(fv_json *json, const fv_bench_row *rows, int32_t num_rows)
{
    fv_backend_score backends[MAX_BACKENDS];
    const int32_t num_backends = fv_bench_summarize(backends, MAX_BACKENDS, rows, num_rows);
    if (num_backends < 2) return;
    fv_json_begin_array(json, "best_of_batch");
    for (int32_t i = 0; i < num_rows; i++) {
        if (!fv_bench_is_best(&rows[i], rows)) continue;
        fv_json_begin_row(json);
        fv_json_string(json, "batch", rows[i].batch);
        fv_json_string(json, "backend", rows[i].backend);
        fv_json_end_object(json);
    }
    fv_json_end_array(json);
    fv_json_begin_array(json, "backends");
    for (int32_t i = 0; i < num_backends; i++) {
        fv_json_begin_row(json);
        fv_json_string(json, "backend", backends[i].backend);
        fv_json_double(json, "worst_ratio", backends[i].worst_ratio);
        fv_json_string(json, "worst_batch", backends[i].worst_batch);
        fv_json_int(json, "best_or_within_5_percent", backends[i].num_near);
        fv_json_int(json, "measured", backends[i].num_measured);
        fv_json_int(json, "refused", backends[i].num_refused);
        fv_json_end_object(json);
    }
    fv_json_end_array(json);
}

/* The first line of a file without its end; "" where there is none. */
static void read_line(char *text, size_t text_bytes, const char *path)
{
    text[0] = '\0';
    FILE *file = fopen(path, "r");
    if (!file) return;
    if (fgets(text, (int)text_bytes, file)) text[strcspn(text, "\n")] = '\0';
    fclose(file);
}

static void print_json_device(fv_json *json, const fv_bench_setting *setting)
{
    const fv_device_ceilings *c = setting->ceilings;
    char driver[64];
    read_line(driver, sizeof(driver), "/sys/module/nvidia/version");
    fv_json_string(json, "device", fv_device_describe(setting->device));
    fv_json_string(json, "driver", driver);
    fv_json_double(json, "empty_graph_us", c->empty_us);
    fv_json_double(json, "read_gb_per_s", c->read_bytes_per_us * 1e-3);
    fv_json_double(json, "copy_gb_per_s", c->copy_bytes_per_us * 1e-3);
    fv_json_double(json, "gemm_bf16_tflops", c->bf16_flops_per_us * 1e-6);
    fv_json_double(json, "gemm_fp8_tflops", c->fp8_flops_per_us * 1e-6);
}

void fv_bench_print_json(FILE *file, const fv_bench_setting *setting, const fv_bench_row *rows, int32_t num_rows)
{
    char model[128];
    fv_cpu_model(model, sizeof(model));

    fv_json json;
    fv_json_init(&json, file);
    fv_json_begin_object(&json, NULL);
    fv_json_origin(&json, setting->argc, setting->argv);
    fv_json_string(&json, "cpu", model);
    fv_json_string(&json, "ceiling_isa", fv_ceiling_isa());
    fv_json_int(&json, "threads", setting->num_threads);
    if (setting->ceilings) print_json_device(&json, setting);
    fv_json_string(&json, "problem", setting->problem);
    fv_json_int(&json, "shared_prefix", setting->shared_prefix);
    fv_json_bool(&json, "stored", setting->stored);
    if (setting->quiet_limit_us > 0) fv_json_double(&json, "quiet_limit_us", setting->quiet_limit_us);
    fv_json_begin_array(&json, "rows");
    for (int32_t i = 0; i < num_rows; i++) print_json_row(&json, &rows[i]);
    fv_json_end_array(&json);
    print_json_summary(&json, rows, num_rows);
    fv_json_end_object(&json);
}

/* The value of a string member on a line of the file; 0 where it differs from `value`. */
static int32_t line_has(const char *line, const char *key, const char *value)
{
    char member[400];
    snprintf(member, sizeof(member), "\"%s\": \"%s\"", key, value);
    return strstr(line, member) != NULL;
}

/* What a JSON text has open at a place. */
typedef struct json_place {
    int32_t depth, is_in_string, is_escaped;
} json_place;

static void walk_json(json_place *place, const char *text)
{
    for (; *text; text++) {
        if (place->is_in_string) {
            if (*text == '"' && !place->is_escaped) place->is_in_string = 0;
            place->is_escaped = *text == '\\' && !place->is_escaped;
        } else {
            place->is_in_string = *text == '"';
            place->depth += (*text == '{' || *text == '[') - (*text == '}' || *text == ']');
        }
    }
}

/* What the rows of a file were measured with. */
typedef struct old_setting {
    int32_t is_same_problem;
    int32_t shared_prefix, stored; /* 0 where a file of an earlier version does not say */
} old_setting;

/* A problem begins a run. */
static void read_old_setting(old_setting *old, const char *line, const char *problem)
{
    static const char prefix_key[] = "\"shared_prefix\": ";
    const char *prefix = strstr(line, prefix_key);
    if (strstr(line, "\"problem\": ")) *old = (old_setting){.is_same_problem = line_has(line, "problem", problem)};
    if (prefix) old->shared_prefix = (int32_t)strtol(prefix + strlen(prefix_key), NULL, 10);
    if (strstr(line, "\"stored\": ")) old->stored = strstr(line, "\"stored\": true") != NULL;
}

fv_status fv_bench_compare(fv_bench_row *rows, int32_t num_rows, const fv_bench_setting *setting, const char *path)
{
    FILE *file = fopen(path, "r");
    if (!file) return fv_fail(FV_ERR_IO, "--compare is '%s': %s", path, strerror(errno));
    char line[4096]; /* a row of fv_bench_print_json is one line, as each part of the setting before them */
    int32_t num_found = 0;
    old_setting old = {0};
    json_place end = {0};
    while (fgets(line, sizeof(line), file)) {
        walk_json(&end, line);
        read_old_setting(&old, line, setting->problem);
        const char *at = strstr(line, "\"median_us\": ");
        const double old_us = at ? strtod(at + strlen("\"median_us\": "), NULL) : 0;
        if (!(old_us > 0)) continue;
        num_found++;
        const int32_t is_same = old.is_same_problem && old.shared_prefix == setting->shared_prefix &&
                                old.stored == setting->stored;
        for (int32_t i = 0; i < num_rows && is_same; i++) {
            fv_bench_row *row = &rows[i];
            if (row->skipped[0] || !line_has(line, "batch", row->batch) || !line_has(line, "backend", row->backend) ||
                !line_has(line, "kernels", row->kernels)) {
                continue;
            }
            row->old_ratio = old_us / row->measured.run.median_us;
        }
    }
    const int error = ferror(file) ? errno : 0; /* a directory can be opened */
    fclose(file);
    if (error) return fv_fail(FV_ERR_IO, "--compare is '%s': %s", path, strerror(error));
    if (num_found > 0 && end.depth == 0 && !end.is_in_string) return FV_OK;
    return fv_fail(FV_ERR_IO, "--compare is '%s', which %s; accepted: a file written by fovea bench --json", path,
                   num_found > 0 ? "ends early" : "has no rows");
}
