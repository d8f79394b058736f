/* Random values by the gigabyte: normal ones of a dtype, or entries of a cache, cut from a pool. */
#ifndef FV_TOOLS_BENCH_RANDOM_DATA_H
#define FV_TOOLS_BENCH_RANDOM_DATA_H

#include "fovea/device.h"
#include "fovea/dtype.h"
#include "fovea/view.h"

typedef struct fv_random_pool {
    char *data;
    size_t bytes;
    size_t unit; /* bytes that stay together: an element, or an entry */
    uint64_t state;
    fv_device *device; /* that fills; NULL: the CPU */
    void *on_device;   /* the pool there */
} fv_random_pool;

/* xorshift64* (Vigna, 2016). The state is not 0. */
uint64_t fv_random_next(uint64_t *state);

/* Values of mean 0 and variance 1. */
fv_status fv_random_pool_init(fv_random_pool *pool, fv_dtype dtype);
void fv_random_pool_deinit(fv_random_pool *pool); /* takes a zeroed one */

/* What fills a cache: values as above, or, of FV_KV_LAYOUT_LATENT_FP8_DS, entries of such values with their scales. */
fv_status fv_random_pool_init_cache(fv_random_pool *pool, fv_kv_layout layout, fv_dtype dtype);

/* Multiplies the values of a pool of `dtype`. */
void fv_random_pool_scale(fv_random_pool *pool, fv_dtype dtype, float factor);

/* Makes fv_random_fill fill memory of `device`; the CPU: nothing to do. */
fv_status fv_random_pool_send(fv_random_pool *pool, fv_device *device);

/* Fills `bytes` from random places of the pool, some 8 KiB of whole units at a time: fast, and no two pages alike. On a
 * device the memory ends at a multiple of 16 bytes, which are filled. */
fv_status fv_random_fill(fv_random_pool *pool, void *data, size_t bytes);

#endif
