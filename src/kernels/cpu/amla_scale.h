/* The scale of AMLA's output (amla.c, arXiv 2509.25224, section 3 and appendix A) for eight rows, one to a lane:
 * a power of two, and the part of what is left that the weights take in. */
#ifndef FV_KERNELS_CPU_AMLA_SCALE_H
#define FV_KERNELS_CPU_AMLA_SCALE_H

#include <math.h>

#include "kernels/cpu/exponent_add.h"
#include "ops/attend_paged.h"

typedef struct fv_amla_scale {
    fv_f32x8 power; /* n */
    fv_f32x8 scale; /* s */
    fv_f32x8 gamma;
} fv_amla_scale;

static inline void fv_amla_scale_init(fv_amla_scale *scale)
{
    scale->power = fv_splat(0.0f);
    scale->scale = scale->gamma = fv_splat(1.0f);
}

/* Rounds to the type of the product, kept in fp32. */
FV_ALWAYS_INLINE fv_f32x8 fv_amla_round(fv_f32x8 value, fv_dtype dtype)
{
    if (dtype == FV_DTYPE_F32) return value;
    uint16_t stored[FV_LANES];
    if (dtype == FV_DTYPE_F16) {
        fv_store8_f16(stored, value);
        return fv_load8_f16(stored);
    }
    const fv_u32x8 bits = (fv_u32x8)value;
    const fv_u32x8 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    return fv_select((fv_i32x8)(value != value), value, (fv_f32x8)rounded);
}

/* The nearest whole number; from 2^23 on a float is one. */
FV_ALWAYS_INLINE fv_f32x8 fv_amla_whole(fv_f32x8 value)
{
    const fv_f32x8 magnitude = fv_abs(value);
    const fv_f32x8 whole = fv_select((fv_i32x8)(magnitude < 0x1p23f), magnitude + 0x1p23f - 0x1p23f, magnitude);
    return (fv_f32x8)((fv_i32x8)whole | ((fv_i32x8)value & INT32_MIN));
}

/* n, s and gamma for new maxima. Returns what has to be added to the bits of each row of O for the step from
 * `old_max`: nothing where the maximum stayed, or where the row had no key before. `dtype` is that of the product. */
static inline fv_i32x8 fv_amla_scale_move(fv_amla_scale *scale, fv_f32x8 max, fv_f32x8 old_max, fv_dtype dtype,
                                          fv_rescaling rescaling)
{
    const fv_i32x8 moved = (fv_i32x8)(max != old_max) & (fv_i32x8)(old_max != -INFINITY);
    const fv_f32x8 base = fv_select((fv_i32x8)(max == -INFINITY), fv_splat(0.0f), max); /* no key yet: any number */
    const fv_f32x8 n = -fv_amla_whole(base);
    const fv_f32x8 r = fv_exp2(base + n);
    const fv_f32x8 s = rescaling == FV_RESCALING_ADD ? fv_amla_round(r, dtype) : r;
    const fv_f32x8 gamma = r / s;
    const fv_f32x8 error = scale->gamma / gamma - 1.0f;
    const fv_i32x8 addend = fv_exponent_addend(n - scale->power, error) & moved;
    scale->power = n;
    scale->scale = s;
    scale->gamma = gamma;
    return addend;
}

#endif
