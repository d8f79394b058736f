/* What fits a machine, for the files of planner/tiling.h. */
#ifndef FV_PLANNER_TILING_FIT_H
#define FV_PLANNER_TILING_FIT_H

#include "core/compiler.h"
#include "planner/tiling.h"

#define FV_TILING_SUM_BYTES 4
#define FV_TILING_MIN_KV_BUFFERS 3 /* one is read, one is full, one is being filled */

static inline int32_t fv_tiling_has_buffers(const fv_tiling_machine *machine) { return machine->num_registers == 0; }

/* What of a cache is planned with. */
static inline int64_t fv_tiling_usable(int64_t bytes) { return bytes / 4 * 3; }

static inline int32_t fv_ceil_div_i32(int32_t a, int32_t b) { return (int32_t)fv_ceil_div(a, b); }

/* m x n sums fit level 0 beside inputs of the least depth: a row of B and one of A. */
int32_t fv_tiling_base_fits(const fv_tiling_machine *machine, int32_t m, int32_t n);

/* Registers: the sums hide the latency of a multiplication, and the multiplications the loads. */
int32_t fv_tiling_keeps_busy(const fv_tiling_machine *machine, const fv_tile *base);

/* Buffers: the depth of the base tile fits level 0. */
int32_t fv_tiling_depth_fits(const fv_tiling_machine *machine, const fv_product_tiling *product);

/* A stripe of the wider input. */
int64_t fv_tiling_stripe_bytes(const fv_tiling_machine *machine, const fv_product_tiling *product);

/* Buffers that A, rows x depth, takes. */
int32_t fv_tiling_num_buffers(const fv_product_tiling *product, int32_t rows, int32_t depth);

/* Registers: the depth of the fewest equal stripes that fit level 1. */
int32_t fv_tiling_longest_stripe(const fv_tiling_machine *machine, fv_product_tiling product, int32_t depth);

/* Both forms of a step's KV block; Q, O and S of its rows. */
int64_t fv_tiling_keys_bytes(const fv_tiling *tiling, const fv_tiling_machine *machine,
                             const fv_tiling_problem *problem);
int64_t fv_tiling_rows_bytes(const fv_tiling *tiling, const fv_tiling_machine *machine,
                             const fv_tiling_problem *problem);

#endif
