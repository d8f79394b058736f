/* The body of simd_probe_<isa>.c; FV_ISA and FV_PROBE_ISA name the level. */
#include "kernels/cpu/isa.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/simd.h"
#include "kernels/simd_probe.h"

static void load8(float *to, const void *from, fv_dtype dtype) { fv_store_f32(to, fv_load8(from, dtype)); }

static void store_natural(float *to, fv_f32x16 lanes, fv_dtype dtype)
{
    const fv_f32x16 natural = fv_natural_of_lanes(lanes, dtype);
    fv_store_f32(to, natural.a);
    fv_store_f32(to + 8, natural.b);
}

static void load16(float *to, const void *from, fv_dtype dtype) { store_natural(to, fv_load16(from, dtype), dtype); }

static void reorder(float *to, const float *from, fv_dtype dtype)
{
    const fv_f32x16 natural = {fv_load_f32(from), fv_load_f32(from + 8)};
    store_natural(to, fv_lanes_of_natural(natural, dtype), dtype);
}

static void store8(void *to, const float *from, fv_dtype dtype) { fv_store8(to, fv_load_f32(from), dtype); }
static void exp2_8(float *to, const float *from) { fv_store_f32(to, fv_exp2(fv_load_f32(from))); }

static void exp2_16(float *to, const float *from)
{
    fv_lanes x[2] = {fv_lanes_load(from), fv_lanes_load(from + 16)};
    fv_lanes_exp2_each(x, 2);
    fv_lanes_store(to, x[0]);
    fv_lanes_store(to + 16, x[1]);
}

static void tanh_16(float *to, const float *from) { fv_lanes_store(to, fv_lanes_tanh(fv_lanes_load(from))); }
static void tanh_8(float *to, const float *from) { fv_store_f32(to, fv_tanh(fv_load_f32(from))); }

static void max_8(float *to, const float *a, const float *b)
{
    fv_store_f32(to, fv_max(fv_load_f32(a), fv_load_f32(b)));
}
static void min_8(float *to, const float *a, const float *b)
{
    fv_store_f32(to, fv_min(fv_load_f32(a), fv_load_f32(b)));
}

static void reduce8(float *to, const float *from)
{
    fv_f32x8 sums[8];
    for (int32_t i = 0; i < 8; i++) sums[i] = fv_load_f32(from + 8 * i);
    fv_store_f32(to, fv_reduce8(sums));
}

static void max_by_period(float *to, const float *from, int32_t period)
{
    fv_store_f32(to, fv_max_by_period(fv_load_f32(from), period));
}

static void sum_by_period(float *to, const float *from, int32_t period)
{
    fv_store_f32(to, fv_sum_by_period(fv_load_f32(from), period));
}

static int32_t any(const int32_t *mask) { return fv_any(fv_load_i32(mask)); }

const simd_probe FV_ISA_SYMBOL(simd_probe) = {
    FV_PROBE_ISA, load8, load16, reorder, store8,        exp2_8,        exp2_16, tanh_8,
    tanh_16,      max_8, min_8,  reduce8, max_by_period, sum_by_period, any,
};
