#include "accuracy/device.h"

#include "bench/bench_memory.h"
#include "core/compiler.h"

static size_t q_bytes(const accuracy_samples *samples)
{
    return (size_t)samples->num_samples * (size_t)samples->num_heads * ACCURACY_HEAD_SIZE * sizeof(uint16_t);
}

static size_t latent_bytes(const accuracy_samples *samples)
{
    return (size_t)samples->num_blocks * ACCURACY_BLOCK_SIZE * ACCURACY_HEAD_SIZE * sizeof(uint16_t);
}

static size_t out_bytes(const accuracy_samples *samples, int32_t num_samples)
{
    return (size_t)num_samples * (size_t)samples->num_heads * ACCURACY_LATENT * sizeof(uint16_t);
}

fv_status accuracy_device_init(accuracy_device *at, fv_device *device, const accuracy_samples *samples,
                               size_t workspace_bytes)
{
    *at = (accuracy_device){.device = device};
    const size_t num_samples = (size_t)samples->num_samples, index_bytes = sizeof(int32_t);
    const size_t table_bytes = num_samples * (size_t)samples->table_stride * index_bytes;
    fv_status status = fv_stream_create(&at->stream, device);
    if (status == FV_OK) status = fv_bench_alloc(&at->q, device, q_bytes(samples));
    if (status == FV_OK) status = fv_bench_alloc(&at->latents, device, latent_bytes(samples));
    if (status == FV_OK) status = fv_bench_alloc(&at->out, device, out_bytes(samples, samples->num_samples));
    if (status == FV_OK) status = fv_bench_alloc(&at->workspace, device, workspace_bytes + 1); /* there may be none */
    if (status == FV_OK) status = fv_bench_send(&at->block_table, device, samples->block_table, table_bytes);
    if (status == FV_OK) {
        status = fv_bench_send(&at->query_start, device, samples->query_start, (num_samples + 1) * index_bytes);
    }
    if (status == FV_OK) status = fv_bench_send(&at->seq_lens, device, samples->seq_lens, num_samples * index_bytes);
    if (status != FV_OK) accuracy_device_deinit(at);
    return status;
}

void accuracy_device_deinit(accuracy_device *at)
{
    void *arrays[] = {at->q, at->latents, at->block_table, at->query_start, at->seq_lens, at->out, at->workspace};
    if (at->stream) fv_stream_destroy(at->device, at->stream);
    for (int32_t i = 0; i < FV_ARRAY_LEN(arrays); i++) fv_bench_free(at->device, arrays[i]);
    *at = (accuracy_device){0};
}

fv_status accuracy_device_send(accuracy_device *at, const accuracy_samples *samples)
{
    const fv_status status = fv_device_copy_in(at->device, at->q, samples->q, q_bytes(samples), at->stream);
    if (status != FV_OK) return status;
    return fv_device_copy_in(at->device, at->latents, samples->latents, latent_bytes(samples), at->stream);
}

fv_status accuracy_device_run(uint16_t *out, const accuracy_device *at, fv_plan *plan, const accuracy_samples *samples,
                              int32_t num_samples)
{
    const fv_batch batch = {
        .struct_size = sizeof(batch),
        .num_seqs = num_samples,
        .num_tokens = num_samples,
        .query_start = at->query_start,
        .seq_lens = at->seq_lens,
        .block_table = at->block_table,
        .block_table_stride = samples->table_stride,
        .block_table_width = samples->table_stride,
        .host_query_start = samples->query_start,
        .host_seq_lens = samples->seq_lens,
    };
    const int64_t num_heads = samples->num_heads;
    fv_layer layer = {
        .struct_size = sizeof(layer),
        .q = fv_tensor_3d(at->q, FV_DTYPE_BF16, num_samples, num_heads, ACCURACY_HEAD_SIZE),
        .out = fv_tensor_3d(at->out, FV_DTYPE_BF16, num_samples, num_heads, ACCURACY_LATENT),
    };
    fv_status status = fv_kv_view_init(&layer.kv_cache, at->latents, FV_KV_LAYOUT_LATENT, FV_DTYPE_BF16,
                                       samples->num_blocks, ACCURACY_BLOCK_SIZE, 1, ACCURACY_HEAD_SIZE);
    if (status == FV_OK) status = fv_plan_update(plan, &batch, at->stream);
    if (status == FV_OK) status = fv_plan_run(plan, &layer, at->workspace, at->stream);
    if (status == FV_OK) {
        status = fv_device_copy_out(at->device, out, at->out, out_bytes(samples, num_samples), at->stream);
    }
    const fv_status waited = fv_stream_synchronize(at->device, at->stream);
    return status == FV_OK ? waited : status;
}
