#include "bench/random_data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench_memory.h"
#include "core/compiler.h"
#include "core/device_probes.h"
#include "core/error.h"
#include "core/float.h"
#include "kvcache/kv_address.h"
#include "kvcache/latent_entry.h"

#define POOL_ELEMENTS (1 << 20)
#define POOL_ENTRIES (1 << 12)
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

static fv_status make_pool(fv_random_pool *pool, size_t unit, size_t num_units)
{
    *pool = (fv_random_pool){.unit = unit, .bytes = unit * num_units, .state = 0x9e3779b97f4a7c15u};
    pool->data = malloc(pool->bytes);
    return pool->data ? FV_OK : fv_fail(FV_ERR_NO_MEMORY, "no memory for random data");
}

fv_status fv_random_pool_init(fv_random_pool *pool, fv_dtype dtype)
{
    const fv_status status = make_pool(pool, fv_dtype_bytes(dtype), POOL_ELEMENTS);
    if (status != FV_OK) return status;
    for (char *at = pool->data; at < pool->data + pool->bytes; at += pool->unit)
        fv_float_store(at, next_normal(&pool->state), dtype);
    return FV_OK;
}

/* Elements that share a scale, which is returned. */
static float store_entry_tile(char *to, uint64_t *state)
{
    float values[FV_DS_TILE], largest = 0;
    for (int32_t i = 0; i < FV_DS_TILE; i++) {
        values[i] = next_normal(state);
        largest = fmaxf(largest, fabsf(values[i]));
    }
    const float scale = fv_scale_of_largest(largest, FV_DTYPE_F8_E4M3);
    for (int32_t i = 0; i < FV_DS_TILE; i++) fv_float_store(to + i, values[i] / scale, FV_DTYPE_F8_E4M3);
    return scale;
}

static void store_entry(char *entry, uint64_t *state)
{
    for (int32_t i = 0; i < FV_DS_LATENT / FV_DS_TILE; i++) {
        const float scale = store_entry_tile(entry + (size_t)i * FV_DS_TILE, state);
        memcpy(entry + FV_DS_SCALES_AT + (size_t)i * sizeof(scale), &scale, sizeof(scale));
    }
    for (int32_t i = 0; i < FV_DS_ROPE; i++)
        fv_float_store(entry + FV_DS_ROPE_AT + (size_t)i * 2, next_normal(state), FV_DTYPE_BF16);
}

fv_status fv_random_pool_init_cache(fv_random_pool *pool, fv_kv_layout layout, fv_dtype dtype)
{
    if (layout != FV_KV_LAYOUT_LATENT_FP8_DS) return fv_random_pool_init(pool, dtype);
    const fv_status status = make_pool(pool, FV_DS_ENTRY_BYTES, POOL_ENTRIES);
    if (status != FV_OK) return status;
    for (char *at = pool->data; at < pool->data + pool->bytes; at += pool->unit) store_entry(at, &pool->state);
    return FV_OK;
}

void fv_random_pool_scale(fv_random_pool *pool, fv_dtype dtype, float factor)
{
    for (char *at = pool->data; at < pool->data + pool->bytes; at += pool->unit)
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
    const size_t unit = pool->unit < DEVICE_ALIGNMENT ? DEVICE_ALIGNMENT : pool->unit;
    const fv_status status = pool->device->probes->fill_random(pool->device, data, whole, pool->on_device, pool->bytes,
                                                               unit, seed, NULL);
    return status == FV_OK ? fv_stream_synchronize(pool->device, NULL) : status;
}

fv_status fv_random_fill(fv_random_pool *pool, void *data, size_t bytes)
{
    if (pool->on_device) return fill_on_device(pool, data, bytes);
    const size_t piece = PIECE_BYTES / pool->unit * pool->unit, places = (pool->bytes - piece) / pool->unit;
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t size = bytes - at < piece ? bytes - at : piece;
        const size_t from = (size_t)(fv_random_next(&pool->state) % places) * pool->unit;
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
