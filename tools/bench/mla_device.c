#include "bench/mla_device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench/samples.h"
#include "core/device.h"
#include "core/error.h"
#include "core/float.h"

/* --- times --------------------------------------------------------------------------------------------------------- */

static fv_status send_layer(void *user, fv_stream stream)
{
    fv_mla_workload *w = user;
    return fv_mla_run(w->plan, &w->layer, w->workspace, stream);
}

/* The products without events around them: a graph keeps no times. */
static fv_status capture_layer(fv_graph *graph, fv_mla_workload *w, fv_device_clock *clock)
{
    fv_mla_layer *layer = &w->layer;
    layer->gemm = w->timer.gemm;
    layer->gemm_user = w->timer.gemm_user;
    fv_status status = send_layer(w, clock->stream); /* the GEMM chooses its algorithms */
    if (status == FV_OK) status = fv_stream_synchronize(w->device, clock->stream);
    if (status == FV_OK) status = fv_capture(graph, clock, send_layer, w);
    layer->gemm = fv_mla_timer_gemm;
    layer->gemm_user = &w->timer;
    return status;
}

static fv_status time_graph(fv_samples *samples, fv_device *device, fv_device_clock *clock, fv_graph graph,
                            int32_t repeat)
{
    double times_us[FV_CLOCK_MAX_SAMPLES];
    fv_status status = fv_device_clock_begin(clock);
    if (status != FV_OK) return status;
    for (int32_t i = 0; i < repeat && status == FV_OK; i++) {
        status = fv_device_clock_start(clock);
        if (status == FV_OK) status = fv_graph_launch(device, graph, clock->stream);
        if (status == FV_OK) status = fv_device_clock_stop(clock);
    }
    const fv_status ended = fv_device_clock_end(clock, times_us);
    *samples = fv_samples_of(times_us, clock->num_samples);
    return status == FV_OK ? ended : status;
}

/* One plain run: w->timer.stage_us and the whole. */
static fv_status time_stages(double *total_us, fv_mla_workload *w, fv_device_clock *clock)
{
    fv_mla_timer_begin(&w->timer);
    fv_status status = fv_device_clock_begin(clock);
    if (status != FV_OK) return status;
    status = fv_device_clock_start(clock);
    if (status == FV_OK) status = send_layer(w, clock->stream);
    if (status == FV_OK) status = fv_device_clock_stop(clock);
    const fv_status ended = fv_device_clock_end(clock, total_us);
    if (status == FV_OK) status = ended;
    if (status == FV_OK) status = fv_mla_timer_end(&w->timer);
    double products = 0;
    for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) products += w->timer.stage_us[stage];
    w->timer.stage_us[FV_MLA_ATTENTION] = *total_us - products;
    return status;
}

fv_status fv_mla_measure_on_device(fv_mla_result *result, fv_mla_workload *w, fv_device_clock *clock,
                                   const fv_device_ceilings *ceilings, int32_t repeat)
{
    double stages_us[FV_MLA_NUM_STAGES][FV_CLOCK_MAX_SAMPLES], totals_us[FV_CLOCK_MAX_SAMPLES];
    fv_graph graph = NULL;
    fv_samples samples = {0};
    fv_status status = capture_layer(&graph, w, clock);
    if (status == FV_OK) status = time_graph(&samples, w->device, clock, graph, 1); /* warms up */
    if (status == FV_OK) status = time_graph(&samples, w->device, clock, graph, repeat);
    fv_graph_destroy(w->device, graph);
    if (status == FV_OK) status = time_stages(totals_us, w, clock); /* makes the events */
    for (int32_t run = 0; run < repeat && status == FV_OK; run++) {
        status = time_stages(&totals_us[run], w, clock);
        for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) stages_us[stage][run] = w->timer.stage_us[stage];
    }
    if (status != FV_OK) return status;
    for (int32_t stage = 0; stage < FV_MLA_NUM_STAGES; stage++) {
        result->stage_us[stage] = fv_samples_of(stages_us[stage], repeat).median_us;
    }
    result->total_us = samples.median_us;
    result->plain_us = fv_samples_of(totals_us, repeat).median_us;
    result->bytes_per_us = ceilings->read_bytes_per_us;
    result->operations_per_us = ceilings->bf16_flops_per_us;
    return FV_OK;
}

/* --- the result ------------------------------------------------------------------------------------------------------ */

/* The output of one run as the host has it; the caller frees. */
static fv_status run_and_fetch(char **out, fv_mla_workload *w)
{
    const fv_tensor *tensor = &w->layer.out;
    const size_t bytes = (size_t)(tensor->shape[0] * tensor->stride_bytes[0]);
    *out = malloc(bytes);
    if (!*out) return fv_fail(FV_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
    fv_mla_timer_begin(&w->timer);
    fv_status status = send_layer(w, NULL);
    if (status == FV_OK) status = fv_device_copy_out(w->device, *out, tensor->data, bytes, NULL);
    return status == FV_OK ? fv_stream_synchronize(w->device, NULL) : status;
}

/* NaN where either has one. */
static double row_error(const char *row, const char *expected, int64_t size, fv_dtype dtype)
{
    const int64_t bytes = (int64_t)fv_dtype_bytes(dtype);
    double error = 0, norm = 0;
    for (int64_t i = 0; i < size; i++) {
        const double a = fv_float_load(row + i * bytes, dtype), b = fv_float_load(expected + i * bytes, dtype);
        error += (a - b) * (a - b);
        norm += b * b;
    }
    return sqrt(error / norm);
}

fv_status fv_mla_compare(double *error, fv_mla_workload *w, fv_mla_workload *expected)
{
    const fv_tensor *tensor = &w->layer.out;
    char *got = NULL, *wanted = NULL;
    fv_status status = run_and_fetch(&got, w);
    if (status == FV_OK) status = run_and_fetch(&wanted, expected);
    *error = 0;
    for (int64_t row = 0; row < tensor->shape[0] && status == FV_OK; row++) {
        const int64_t at = row * tensor->stride_bytes[0];
        const double of_row = row_error(got + at, wanted + at, tensor->shape[1], tensor->dtype);
        if (!(of_row <= *error)) *error = of_row;
    }
    free(got);
    free(wanted);
    return status;
}
