/* Sums of the weights of strips whose scores lie as [row][key] (attend_many_tiles.c): of each row 16 parts, by the
 * lanes that its keys were in, which meet when they are asked for. */
#ifndef FV_KERNELS_CPU_AMX_WEIGHT_SUMS_H
#define FV_KERNELS_CPU_AMX_WEIGHT_SUMS_H

#include "kernels/cpu/amx/tile_strips.h"

enum { FV_ADDER_ROWS = 8 }; /* whose weights are summed at a time */

/* A strip's [16][16], of its weights as bf16: what its sums of values are relative to. */
static float *fv_weight_sums_of(const fv_tile_item *item, const fv_tile_strip *strip)
{
    return item->scratch.weight_sums + (strip - item->scratch.strips) * FV_TILE_ROWS * FV_TILE_COLUMNS;
}

/* The same of its weights in fp32. */
static float *fv_row_sums_of(const fv_tile_item *item, const fv_tile_strip *strip)
{
    return item->scratch.row_sums + (strip - item->scratch.strips) * FV_TILE_ROWS * FV_TILE_COLUMNS;
}

/* The rows' sums of [row][16] parts. */
static fv_lanes fv_parts_gather(const float *parts)
{
    float turned[FV_TILE_COLUMNS][FV_TILE_STRIP_ROWS];
    const char *rows[FV_TILE_STRIP_ROWS];
    for (int32_t i = 0; i < FV_TILE_STRIP_ROWS; i++) rows[i] = (const char *)(parts + i * FV_TILE_COLUMNS);
    fv_lanes_store_transposed((char *)turned, rows);
    fv_lanes sum = fv_lanes_load(turned[0]);
    for (int32_t i = 1; i < FV_TILE_COLUMNS; i++) sum += fv_lanes_load(turned[i]);
    return sum;
}

static void fv_parts_add(float *parts, const fv_lanes *more)
{
    for (int32_t row = 0; row < FV_TILE_STRIP_ROWS; row++, parts += FV_TILE_COLUMNS)
        fv_lanes_store(parts, fv_lanes_load(parts) + more[row]);
}

/* Takes over the parts of a strip's row sums. */
static void fv_row_sums_gather(const fv_tile_item *item, fv_tile_strip *strip)
{
    float *parts = fv_row_sums_of(item, strip);
    fv_lanes_store(strip->rows.sum, fv_lanes_load(strip->rows.sum) + fv_parts_gather(parts));
    memset(parts, 0, FV_TILE_BYTES);
}

/* The first of them in the making, beside products: those of FV_ADDER_ROWS rows, a quarter of a pair. */
typedef struct fv_weight_adder {
    const char *weights;
    float *parts;
    fv_lanes sums[FV_ADDER_ROWS];
} fv_weight_adder;

FV_ALWAYS_INLINE fv_weight_adder fv_weight_adder_begin(const fv_tile_item *item, const fv_strip_pair *pair,
                                                       int32_t quarter)
{
    const int32_t i = quarter / 2, row = quarter % 2 * FV_ADDER_ROWS;
    fv_weight_adder adder = {
        .weights = pair->weights[i] + row * FV_TILE_ROW_BYTES,
        .parts = fv_weight_sums_of(item, pair->strips[i]) + row * FV_TILE_COLUMNS,
    };
    FV_UNROLL
    for (int32_t j = 0; j < FV_ADDER_ROWS; j++) adder.sums[j] = fv_lanes_load(adder.parts + j * FV_TILE_COLUMNS);
    return adder;
}

FV_ALWAYS_INLINE void fv_weight_adder_step(fv_weight_adder *adder, int32_t step)
{
    const char *at = adder->weights + step * FV_TILE_BYTES;
    FV_UNROLL
    for (int32_t j = 0; j < FV_ADDER_ROWS; j++)
        adder->sums[j] = fv_words_add_to(adder->sums[j], fv_words_load(at + j * FV_TILE_ROW_BYTES));
}

FV_ALWAYS_INLINE void fv_weight_adder_end(const fv_weight_adder *adder)
{
    FV_UNROLL
    for (int32_t j = 0; j < FV_ADDER_ROWS; j++) fv_lanes_store(adder->parts + j * FV_TILE_COLUMNS, adder->sums[j]);
}

#endif
