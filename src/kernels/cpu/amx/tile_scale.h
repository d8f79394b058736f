/* How the sums of a strip, which stay in memory from block to block, follow its maxima. A variant has one of
 *
 *   FV_RESCALING_MULTIPLY            rows whose maximum grew are multiplied, the others left alone
 *   FV_RESCALING_MULTIPLY_BF16       all rows are, at each block: what the paper of AMLA calls Base
 *   FV_RESCALING_ADD                 AMLA (amla.c): the scale is a power of two, a row whose maximum grew has an integer
 *                                    added to its bits. The weights take in the factor s that is left, in their
 *                                    exponent, where it costs nothing: s p = 2^(score + n - log2 gamma)
 *   FV_RESCALING_ADD_UNCOMPENSATED   the same with gamma = 1 */
#ifndef FV_KERNELS_CPU_AMX_TILE_SCALE_H
#define FV_KERNELS_CPU_AMX_TILE_SCALE_H

#include "kernels/cpu/amx/tile_item.h"

static inline int32_t fv_rescaling_adds(fv_rescaling rescaling)
{
    return rescaling == FV_RESCALING_ADD || rescaling == FV_RESCALING_ADD_UNCOMPENSATED;
}

static inline void fv_tile_scale_init(fv_tile_strip *strip)
{
    for (int32_t v = 0; v < FV_TILE_STRIP_ROWS / FV_LANES; v++) fv_amla_scale_init(&strip->scale[v]);
}

/* n, s and gamma for the strip's new maxima, and what to add to the bits of its sums. dtype: of the queries. */
static inline void fv_tile_scale_move(fv_tile_strip *strip, const float *old_max, fv_dtype dtype,
                                      fv_rescaling rescaling)
{
    for (int32_t v = 0; v < FV_TILE_STRIP_ROWS / FV_LANES; v++) {
        const fv_i32x8 addend = fv_amla_scale_move(&strip->scale[v], fv_load_f32(strip->rows.max + v * FV_LANES),
                                                   fv_load_f32(old_max + v * FV_LANES), dtype, rescaling);
        memcpy(strip->addend + v * FV_LANES, &addend, sizeof(addend));
    }
}

/* s of the strip's lanes. */
static inline fv_lanes fv_tile_scale_of(const fv_tile_strip *strip)
{
    fv_lanes scale = fv_lanes_splat(0.0f);
    for (int32_t v = 0; v < FV_TILE_STRIP_ROWS / FV_LANES; v++)
        memcpy((char *)&scale + v * sizeof(fv_f32x8), &strip->scale[v].scale, sizeof(fv_f32x8));
    return scale;
}

/* -n + log2(gamma): scores less this are logarithms of s p. gamma is within 2^-8 of 1, and the series within 2^-34. */
static inline fv_lanes fv_tile_scale_base(const fv_tile_strip *strip)
{
    fv_lanes base = fv_lanes_splat(0.0f);
    for (int32_t v = 0; v < FV_TILE_STRIP_ROWS / FV_LANES; v++) {
        const fv_f32x8 e = strip->scale[v].gamma - 1.0f;
        const fv_f32x8 half = (e - e * e * (0.5f - e * (1.0f / 3))) * FV_LOG2E - strip->scale[v].power;
        memcpy((char *)&base + v * sizeof(half), &half, sizeof(half));
    }
    return base;
}

/* 1: the sums of a lane stay as they are. */
static inline int32_t fv_tile_keeps_row(const fv_tile_strip *strip, int32_t lane, fv_rescaling rescaling)
{
    if (fv_rescaling_adds(rescaling)) return strip->addend[lane] == 0;
    return rescaling == FV_RESCALING_MULTIPLY && strip->rows.rescale[lane] == 1.0f;
}

/* 1: those of all lanes do. 0 where some may not. */
static inline int32_t fv_tile_keeps_all(const fv_tile_strip *strip, fv_rescaling rescaling)
{
    return rescaling == FV_RESCALING_MULTIPLY &&
           fv_lanes_all_below(1.0f - fv_lanes_load(strip->rows.rescale), 0x1p-30f);
}

/* The sums of a lane to the new scale: `num` vectors, `stride` floats apart. */
static inline void fv_tile_rescale_row(float *sums, int64_t stride, int32_t num, const fv_tile_strip *strip,
                                       int32_t lane, fv_rescaling rescaling)
{
    if (fv_rescaling_adds(rescaling)) {
        const int32_t addend = strip->addend[lane];
        for (int32_t i = 0; i < num; i++, sums += stride)
            fv_lanes_store(sums, fv_lanes_exponent_add(fv_lanes_load(sums), addend));
    } else {
        const float factor = strip->rows.rescale[lane];
        for (int32_t i = 0; i < num; i++, sums += stride) fv_lanes_store(sums, fv_lanes_load(sums) * factor);
    }
}

/* A finished row in natural units. */
static inline void fv_tile_unscale_row(float *row, int32_t size, const fv_tile_strip *strip, int32_t lane,
                                       fv_rescaling rescaling)
{
    if (!fv_rescaling_adds(rescaling)) return;
    const float unit = 1.0f / strip->scale[lane / FV_LANES].scale[lane % FV_LANES];
    for (int32_t d = 0; d < size; d += FV_TILE_COLUMNS) fv_lanes_store(row + d, fv_lanes_load(row + d) * unit);
}

#endif
