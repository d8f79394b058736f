/* Weights in the memory of a device. Each worker turns its chunk of rows into bf16 in page-locked memory of its own
 * and sends it through a stream of its own, so that reading, rounding and copying overlap. */
#include <stdlib.h>

#include "core/device.h"
#include "core/float.h"
#include "engine/gemm_kernel.h"
#include "ops/layer_table.h"

typedef struct upload_lane {
    fv_stream stream;
    uint16_t *staging; /* [staging_elements] page-locked */
} upload_lane;

typedef struct gemm_device {
    fv_device *device;
    size_t staging_elements;
    int32_t num_lanes;
    upload_lane lanes[]; /* one for each worker */
} gemm_device;

static void device_destroy(void *state)
{
    gemm_device *on = state;
    if (!on) return;
    for (int32_t i = 0; i < on->num_lanes; i++) {
        fv_device_free_host(on->device, on->lanes[i].staging);
        fv_stream_destroy(on->device, on->lanes[i].stream);
    }
    free(on);
}

fv_status fv_gemm_device_create(void **state, fv_device *device, int32_t num_workers)
{
    gemm_device *made = calloc(1, sizeof(*made) + (size_t)num_workers * sizeof(made->lanes[0]));
    if (!made) return fv_fail(FV_ERR_NO_MEMORY, "no memory for uploads by %d threads", num_workers);
    made->device = device;
    made->num_lanes = num_workers;
    fv_status status = FV_OK;
    for (int32_t i = 0; i < num_workers && status == FV_OK; i++) {
        status = fv_stream_create(&made->lanes[i].stream, device);
    }
    if (status != FV_OK) {
        device_destroy(made);
        return status;
    }
    *state = made;
    return FV_OK;
}

static fv_status device_alloc(void **data, void *state, size_t bytes)
{
    return fv_device_alloc(data, ((gemm_device *)state)->device, bytes);
}

static void device_free(void *state, void *data) { fv_device_free(((gemm_device *)state)->device, data); }

static fv_status device_prepare(size_t *chunk_bytes, void *state, int64_t num_outputs, int64_t in_features)
{
    gemm_device *on = state;
    const size_t elements = (size_t)num_outputs * (size_t)in_features;
    *chunk_bytes = elements * sizeof(uint16_t);
    if (elements <= on->staging_elements) return FV_OK;
    on->staging_elements = 0;
    for (int32_t i = 0; i < on->num_lanes; i++) {
        void *staging = NULL;
        fv_device_free_host(on->device, on->lanes[i].staging);
        on->lanes[i].staging = NULL;
        const fv_status status = fv_device_alloc_host(&staging, on->device, elements * sizeof(uint16_t));
        if (status != FV_OK) return status;
        on->lanes[i].staging = staging;
    }
    on->staging_elements = elements;
    return FV_OK;
}

static fv_status device_pack(void *state, const fv_gemm_chunk *chunk, const float *rows, int32_t worker)
{
    const gemm_device *on = state;
    const upload_lane *lane = &on->lanes[worker];
    const size_t elements = (size_t)chunk->num_outputs * (size_t)chunk->in_features;
    for (size_t i = 0; i < elements; i++) lane->staging[i] = fv_bf16_of_f32(rows[i]);
    const fv_status status = fv_device_copy_in(on->device, chunk->data, lane->staging, elements * sizeof(uint16_t),
                                               lane->stream);
    return status == FV_OK ? fv_stream_synchronize(on->device, lane->stream) : status;
}

static fv_status device_fill_random(void *state, void *data, int64_t out_features, int64_t in_features, uint64_t seed)
{
    const gemm_device *on = state;
    const fv_launch launch = {on->device, NULL, on->lanes[0].stream};
    const fv_fill_random_params params = {
        .out = data,
        .count = out_features * in_features,
        .seed = seed,
        .scale = fv_random_scale(in_features),
    };
    const fv_status status = on->device->layers->fill_random(&launch, &params);
    return status == FV_OK ? fv_stream_synchronize(on->device, on->lanes[0].stream) : status;
}

const fv_gemm_kernel fv_gemm_kernel_device = {
    .dtype = FV_DTYPE_BF16,
    .chunk_outputs = 128,
    .row_block = 1,
    .destroy = device_destroy,
    .alloc = device_alloc,
    .free = device_free,
    .fill_random = device_fill_random,
    .prepare = device_prepare,
    .pack = device_pack,
};
