/* Each stage beside its ceiling; the layer beside their sum, since stages follow each other. */
#include "bench/mla_report.h"

#include <stdio.h>

#include "bench/ceilings.h"
#include "bench/origin.h"
#include "json.h"

typedef struct ceiling {
    double us;
    const char *kind; /* "read" or "peak" */
} ceiling;

static ceiling ceiling_of(const fv_mla_result *result, fv_mla_work work)
{
    const double read_us = work.bytes / result->bytes_per_us;
    const double peak_us = result->operations_per_us > 0 ? work.operations / result->operations_per_us : 0;
    return read_us >= peak_us ? (ceiling){read_us, "read"} : (ceiling){peak_us, "peak"};
}

/* Stages follow each other: the sum of their ceilings. */
static double total_ceiling_us(const fv_mla_sizes *sizes, const fv_mla_result *result)
{
    double sum = 0;
    for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) {
        sum += ceiling_of(result, fv_mla_stage_work(sizes, (fv_mla_stage)stage, result->length + 1)).us;
    }
    return sum;
}

void fv_mla_print_heading(const fv_mla_sizes *sizes, const fv_mla_setting *setting)
{
    const fv_mla_shape *mla = &sizes->mla;
    printf("MLA layer: %d sequences x 1 new token, dim %d, %d heads, q_lora %d, kv_lora %d, rope %d, nope %d, v %d\n",
           sizes->batch, sizes->dim, mla->num_heads, sizes->q_lora, mla->kv_lora_rank, mla->qk_rope_head_dim,
           mla->qk_nope_head_dim, mla->v_head_dim);
    printf("Weights and activations %s, cache %s with %s\n", fv_dtype_name(sizes->dtype),
           fv_dtype_name(sizes->kv_dtype),
           mla->rotate_at_reading ? "unrotated keys, rotated at reading" : "rotated keys");
    if (setting->device) {
        printf("%s; the layer as a graph, the stages without one\n", setting->device);
        return;
    }
    printf("%d threads, %s\n", setting->num_threads, fv_ceiling_isa());
    if (sizes->dtype != FV_DTYPE_F32) return;
    printf("The engine multiplies these products in float32: weights and activations are twice the bytes of the "
           "problem's bfloat16.\n");
}

static void print_line(const char *name, double us, double ceiling_us, const char *kind, fv_mla_work work)
{
    printf("  %-10s %12.3f %12.3f %6.1f%%  %-4s %8.2f %9.1f\n", name, us * 1e-3, ceiling_us * 1e-3,
           100 * ceiling_us / us, kind, work.bytes / us * 1e-3, work.operations / us * 1e-3);
}

void fv_mla_print_result(const fv_mla_sizes *sizes, const fv_mla_result *result)
{
    printf("\nlength %d: %s\n", result->length, result->plan);
    printf("  ceilings: read %.1f GB/s, multiply-add %.1f GFLOP/s\n", result->bytes_per_us * 1e-3,
           result->operations_per_us * 1e-3);
    printf("  %-10s %12s %12s %7s  %-4s %8s %9s\n", "stage", "median ms", "ceiling ms", "of it", "by", "GB/s",
           "GFLOP/s");
    fv_mla_work all = {0};
    for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) {
        const fv_mla_work work = fv_mla_stage_work(sizes, (fv_mla_stage)stage, result->length + 1);
        const ceiling limit = ceiling_of(result, work);
        print_line(fv_mla_stage_name((fv_mla_stage)stage), result->stage_us[stage], limit.us, limit.kind, work);
        all.bytes += work.bytes;
        all.operations += work.operations;
    }
    print_line("layer", result->total_us, total_ceiling_us(sizes, result), "sum", all);
}

static void print_stage(fv_json *json, const fv_mla_sizes *sizes, const fv_mla_result *result, fv_mla_stage stage)
{
    const fv_mla_work work = fv_mla_stage_work(sizes, stage, result->length + 1);
    const ceiling limit = ceiling_of(result, work);
    fv_json_begin_row(json);
    fv_json_string(json, "stage", fv_mla_stage_name(stage));
    fv_json_double(json, "median_us", result->stage_us[stage]);
    fv_json_double(json, "ceiling_us", limit.us);
    fv_json_string(json, "ceiling", limit.kind);
    fv_json_double(json, "of_ceiling", limit.us / result->stage_us[stage]);
    fv_json_double(json, "bytes", work.bytes);
    fv_json_double(json, "operations", work.operations);
    fv_json_end_object(json);
}

static void print_length(fv_json *json, const fv_mla_sizes *sizes, const fv_mla_result *result)
{
    fv_json_begin_object(json, NULL);
    fv_json_int(json, "length", result->length);
    fv_json_string(json, "plan", result->plan);
    fv_json_double(json, "read_gb_per_s", result->bytes_per_us * 1e-3);
    fv_json_double(json, "peak_gflop_per_s", result->operations_per_us * 1e-3);
    fv_json_double(json, "median_us", result->total_us);
    if (result->plain_us > 0) fv_json_double(json, "plain_us", result->plain_us);
    fv_json_double(json, "ceiling_us", total_ceiling_us(sizes, result));
    fv_json_begin_array(json, "stages");
    for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) print_stage(json, sizes, result, (fv_mla_stage)stage);
    fv_json_end_array(json);
    fv_json_end_object(json);
}

void fv_mla_print_json(const fv_mla_sizes *sizes, const fv_mla_setting *setting, const fv_mla_result *results,
                       int32_t num_results)
{
    fv_json json;
    fv_json_init(&json, stdout);
    fv_json_begin_object(&json, NULL);
    fv_json_origin(&json, setting->argc, setting->argv);
    fv_json_int(&json, "batch", sizes->batch);
    fv_json_int(&json, "dim", sizes->dim);
    fv_json_int(&json, "heads", sizes->mla.num_heads);
    fv_json_int(&json, "q_lora", sizes->q_lora);
    fv_json_string(&json, "dtype", fv_dtype_name(sizes->dtype));
    fv_json_string(&json, "kv_dtype", fv_dtype_name(sizes->kv_dtype));
    fv_json_int(&json, "rotated_at_reading", sizes->mla.rotate_at_reading);
    if (setting->device) {
        fv_json_string(&json, "device", setting->device);
    } else {
        fv_json_int(&json, "threads", setting->num_threads);
        fv_json_string(&json, "isa", fv_ceiling_isa());
    }
    fv_json_begin_array(&json, "lengths");
    for (int32_t i = 0; i < num_results; i++) print_length(&json, sizes, &results[i]);
    fv_json_end_array(&json);
    fv_json_end_object(&json);
}
