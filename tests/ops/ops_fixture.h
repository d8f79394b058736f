/* What the tests of the operations share: a context, the CPU's kernel tables, random numbers, and caches
 * of every kind of layout. */
#ifndef FV_TESTS_OPS_FIXTURE_H
#define FV_TESTS_OPS_FIXTURE_H

#include "core/context.h"
#include "fovea/fovea.h"
#include "ops/kernel_table.h"

/* Fails the test with the library's text unless the status is FV_OK. */
void must(fv_status status);

/* Fails unless `status` is `expected` and the library's text contains `says`. */
void refused(fv_status status, fv_status expected, const char *says);

uint32_t next_random(uint32_t *state);

/* About normal, mean 0, variance 1. */
float next_normal(uint32_t *state);

/* `count` numbers of `dtype` from next_normal, times `factor`. */
void fill_random(void *to, fv_dtype dtype, int64_t count, float factor, uint32_t *state);

/* A launch in the calling thread, without a device. */
fv_launch serial_launch(void);

/* The CPU's tables that this machine can run. */
int32_t cpu_tables(const fv_kernel_table *const **tables);

/* Caches: the named layouts, strides that no name fits (with a rest after the chunks), and scales inside
 * the block or beside it. */
enum { NUM_CACHE_KINDS = 12, CACHE_BYTES = 1 << 16 };

/* A view of `memory` (CACHE_BYTES), of kind [0, NUM_CACHE_KINDS) with `num_blocks` blocks. `dtype` NONE: the
 * kind's own; kinds with scales take int8 and fp8 only. */
void make_cache(fv_kv_view *view, void *memory, int32_t kind, fv_dtype dtype, int64_t num_blocks);

/* 1: the kind has scales for each token and head. */
int32_t cache_has_scales(int32_t kind);

#endif
