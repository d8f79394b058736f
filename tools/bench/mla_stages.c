/* Work of the stages by the sizes of their matrices, and a GEMM that is timed by the weights it reads. */
#include "bench/mla_stages.h"

#include <string.h>

#include "bench/samples.h"
#include "core/device_probes.h"
#include "core/error.h"

const char *fv_mla_stage_name(fv_mla_stage stage)
{
    static const char *const names[] = {
        [FV_MLA_DOWN] = "QKV_down",       [FV_MLA_UP] = "Q_up",         [FV_MLA_ABSORB] = "absorb",
        [FV_MLA_ATTENTION] = "attention", [FV_MLA_PROJECT] = "project", [FV_MLA_W_O] = "W_o",
    };
    return names[stage];
}

/* num_matrices products [m, k] by [k, n]. */
static fv_mla_work product(const fv_mla_sizes *sizes, double num_matrices, double m, double n, double k)
{
    const double element = (double)fv_dtype_bytes(sizes->dtype);
    return (fv_mla_work){element * num_matrices * (m * k + k * n + m * n), 2 * num_matrices * m * n * k};
}

/* Every cached entry is read once; each head multiplies it twice, with its query and with its probability. */
static fv_mla_work attention(const fv_mla_sizes *sizes, double num_keys)
{
    const fv_mla_shape *mla = &sizes->mla;
    const double entry = mla->kv_lora_rank + mla->qk_rope_head_dim, rows = (double)sizes->batch * mla->num_heads;
    return (fv_mla_work){
        .bytes = sizes->batch * num_keys * entry * (double)fv_dtype_bytes(sizes->kv_dtype) +
                 rows * (entry + mla->kv_lora_rank) * (double)fv_dtype_bytes(sizes->dtype),
        .operations = 2 * rows * num_keys * (entry + mla->kv_lora_rank),
    };
}

fv_mla_work fv_mla_stage_work(const fv_mla_sizes *sizes, fv_mla_stage stage, int32_t num_keys)
{
    const fv_mla_shape *mla = &sizes->mla;
    const double batch = sizes->batch, heads = mla->num_heads, lora = mla->kv_lora_rank;
    const double entry = lora + mla->qk_rope_head_dim, head = mla->qk_nope_head_dim + mla->qk_rope_head_dim;
    switch (stage) {
    case FV_MLA_DOWN: return product(sizes, 1, batch, sizes->q_lora + entry, sizes->dim);
    case FV_MLA_UP: return product(sizes, 1, batch, heads * head, sizes->q_lora);
    case FV_MLA_ABSORB: return product(sizes, heads, batch, lora, mla->qk_nope_head_dim);
    case FV_MLA_ATTENTION: return attention(sizes, num_keys);
    case FV_MLA_PROJECT: return product(sizes, heads, batch, mla->v_head_dim, lora);
    case FV_MLA_W_O: return product(sizes, 1, batch, sizes->dim, heads * mla->v_head_dim);
    case FV_MLA_NUM_STAGES: break;
    }
    return (fv_mla_work){0};
}

/* kv_up is read by both of its products, as it lies and transposed. */
static fv_mla_stage stage_of(const fv_mla_layer *layer, const fv_gemm *gemm)
{
    if (gemm->b == layer->q_down.data) return FV_MLA_DOWN; /* with kv_down, whose rows follow */
    if (gemm->b == layer->q_up.data) return FV_MLA_UP;
    if (gemm->b == layer->o.data) return FV_MLA_W_O;
    return gemm->b_is_transposed ? FV_MLA_PROJECT : FV_MLA_ABSORB;
}

/* Two events around a product on a device. */
static fv_status add_span(fv_mla_timer *timer, const fv_gemm *gemm, fv_stream stream)
{
    fv_device *device = timer->device;
    if (timer->num_spans == FV_MLA_MAX_SPANS) {
        return fv_fail(FV_ERR_NO_SPACE, "a run with more than %d products", FV_MLA_MAX_SPANS);
    }
    const int32_t i = timer->num_spans++;
    fv_status status = FV_OK;
    if (!timer->spans[i].start) status = device->probes->timer_create(&timer->spans[i].start, device);
    if (status == FV_OK && !timer->spans[i].end) status = device->probes->timer_create(&timer->spans[i].end, device);
    timer->spans[i].stage = stage_of(timer->layer, gemm);
    if (status == FV_OK) status = fv_event_record(device, timer->spans[i].start, stream);
    if (status == FV_OK) status = timer->gemm(timer->gemm_user, gemm, stream);
    return status == FV_OK ? fv_event_record(device, timer->spans[i].end, stream) : status;
}

fv_status fv_mla_timer_gemm(void *user, const fv_gemm *gemm, fv_stream stream)
{
    fv_mla_timer *timer = user;
    if (!timer->device->host_is_device) return add_span(timer, gemm, stream);
    const double start = fv_now_us();
    const fv_status status = timer->gemm(timer->gemm_user, gemm, stream);
    timer->stage_us[stage_of(timer->layer, gemm)] += fv_now_us() - start;
    return status;
}

void fv_mla_timer_begin(fv_mla_timer *timer)
{
    memset(timer->stage_us, 0, sizeof(timer->stage_us));
    timer->num_spans = 0;
}

fv_status fv_mla_timer_end(fv_mla_timer *timer)
{
    for (int32_t i = 0; i < timer->num_spans; i++) {
        double us = 0;
        const fv_status status = timer->device->probes->timer_elapsed(&us, timer->device, timer->spans[i].start,
                                                                      timer->spans[i].end);
        if (status != FV_OK) return status;
        timer->stage_us[timer->spans[i].stage] += us;
    }
    return FV_OK;
}

void fv_mla_timer_deinit(fv_mla_timer *timer)
{
    for (int32_t i = 0; i < FV_MLA_MAX_SPANS; i++) {
        if (timer->spans[i].start) fv_event_destroy(timer->device, timer->spans[i].start);
        if (timer->spans[i].end) fv_event_destroy(timer->device, timer->spans[i].end);
    }
}
