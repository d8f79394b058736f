#include "bench/random_data.h"

#include <stdlib.h>
#include <string.h>

#include "bench/bench_memory.h"
#include "core/compiler.h"
#include "core/device_probes.h"
#include "core/error.h"
#include "core/float.h"

#define POOL_ELEMENTS (1 << 20)
#define PIECE_BYTES 8192
#define DEVICE_ALIGNMENT 16

uint64_t fv_random_next(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

/* About normal, mean 0 and variance 1: the sum of 12 uniform values, less 6. */
static float next_normal(uint64_t *state)
{
    float sum = -6.0f;
    for (int32_t i = 0; i < 12; i += 3) {
        const uint64_t bits = fv_random_next(state);
        sum += ((float)(bits & 0xfffff) + (float)(bits >> 20 & 0xfffff) + (float)(bits >> 40 & 0xfffff)) / 1048576.0f;
    }
    return sum;
}

fv_status fv_random_pool_init(fv_random_pool *pool, fv_dtype dtype)
{
    *pool = (fv_random_pool){.element = fv_dtype_bytes(dtype), .state = 0x9e3779b97f4a7c15u};
    pool->bytes = pool->element * POOL_ELEMENTS;
    pool->data = malloc(pool->bytes);
    if (!pool->data) return fv_fail(FV_ERR_NO_MEMORY, "no memory for random data");
    for (size_t i = 0; i < POOL_ELEMENTS; i++)
        fv_float_store(pool->data + i * pool->element, next_normal(&pool->state), dtype);
    return FV_OK;
}

void fv_random_pool_scale(fv_random_pool *pool, fv_dtype dtype, float factor)
{
    for (char *at = pool->data; at < pool->data + pool->bytes; at += pool->element)
        fv_float_store(at, factor * fv_float_load(at, dtype), dtype);
}

fv_status fv_random_pool_send(fv_random_pool *pool, fv_device *device)
{
    if (device->host_is_device) return FV_OK;
    pool->device = device;
    return fv_bench_send(&pool->on_device, device, pool->data, pool->bytes);
}

static fv_status fill_on_device(fv_random_pool *pool, void *data, size_t bytes)
{
    const size_t whole = (size_t)fv_round_up((int64_t)bytes, DEVICE_ALIGNMENT);
    const uint64_t seed = fv_random_next(&pool->state);
    const fv_status status = pool->device->probes->fill_random(pool->device, data, whole, pool->on_device, pool->bytes,
                                                               seed, NULL);
    return status == FV_OK ? fv_stream_synchronize(pool->device, NULL) : status;
}

fv_status fv_random_fill(fv_random_pool *pool, void *data, size_t bytes)
{
    if (pool->on_device) return fill_on_device(pool, data, bytes);
    for (size_t at = 0; at < bytes; at += PIECE_BYTES) {
        const size_t size = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
        const size_t from = (size_t)(fv_random_next(&pool->state) % ((pool->bytes - PIECE_BYTES) / pool->element)) *
                            pool->element;
        memcpy((char *)data + at, pool->data + from, size);
    }
    return FV_OK;
}

void fv_random_pool_deinit(fv_random_pool *pool)
{
    if (pool->on_device) fv_bench_free(pool->device, pool->on_device);
    free(pool->data);
    *pool = (fv_random_pool){0};
}
