/* Latents whose parts of 128 elements have scales of their own: the 656-byte entry (kvcache/latent_entry.h).
 *
 * Its bytes become rows of bf16 as they are stored, which bf16 has exactly, and the scales stay beside them. So the scores of
 * each part are products by themselves, added up in fp32 with the scales of their keys: rounded to bf16 times its scale a
 * key would move the LSE beyond what is promised.
 *
 * Values come in two pieces, whose sum they are but for 2^-12: times a scale of four bits, which bf16 has exactly, for e4m3
 * has four, and times what that leaves of the scale. One rounding alone moves a row that one or two keys have most of by
 * as much as that of the output, which is more than is promised, too. */
#ifndef FV_KERNELS_CPU_AMX_LATENT_PARTS_H
#define FV_KERNELS_CPU_AMX_LATENT_PARTS_H

#include "kernels/cpu/amx/byte_rows.h"
#include "kernels/cpu/amx/tile_item.h"

enum {
    FV_PART_TILES = FV_DS_TILE / FV_TILE_DEPTH, /* of a part of a key: 32 elements each */
    FV_ROPE_TILES = FV_DS_ROPE / FV_TILE_DEPTH, /* behind all parts, without a scale */
};

/* Scales from here on are taken for infinite: below, times 448 they are numbers of bf16. */
#define FV_MAX_PART_SCALE 0x1p118f

/* The four leading bits of a number, rounded. */
static inline float fv_four_bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    bits = (bits + 0x80000u) & 0xfff00000u;
    memcpy(&value, &bits, sizeof(bits));
    return value;
}

/* Returns 1 where the scale is infinite, NaN or near to that: such keys are another kernel's. */
static inline int32_t fv_part_scale_set(fv_part_scales *scales, int32_t part, int32_t key, float scale)
{
    scales->of_keys[part][key] = scale;
    scales->of_high[part][key] = fv_four_bits_of(scale);
    scales->of_low[part][key] = scale - scales->of_high[part][key];
    return !(fabsf(scale) < FV_MAX_PART_SCALE);
}

/* A key of the block to a row of bf16, and its scales. Returns as fv_part_scale_set; where it `looks`, 1 for NaN among its elements,
 * too. */
static inline int32_t fv_latent_parts_of_entry(char *row, fv_part_scales *scales, const char *entry, int32_t key,
                                               int32_t looks)
{
    int32_t is_odd = 0;
    fv_byte_rows_convert(row, 0, FV_TILE_ROW_BYTES, &entry, 1, 0, FV_DS_LATENT, FV_DTYPE_F8_E4M3);
    memcpy(row + FV_DS_LATENT * FV_BF16_BYTES, entry + FV_DS_ROPE_AT, FV_DS_ROPE * FV_BF16_BYTES);
    for (int32_t part = 0; part < FV_LATENT_PARTS; part++) {
        float scale;
        memcpy(&scale, entry + FV_DS_SCALES_AT + part * (int32_t)sizeof(scale), sizeof(scale));
        is_odd |= fv_part_scale_set(scales, part, key, scale);
    }
    for (int32_t d = 0; looks && d < FV_DS_LATENT; d += FV_TILE_DEPTH)
        is_odd |= fv_words_not_finite(row + d * FV_BF16_BYTES);
    return is_odd;
}

/* 16 keys of the block from `first` on so; zeros for those that are not the item's. */
static inline int32_t fv_latent_parts_to_rows(char *rows, fv_part_scales *scales, const fv_key_block *block,
                                              int32_t first, int32_t looks)
{
    const int64_t row_bytes = (FV_DS_LATENT + FV_DS_ROPE) * FV_BF16_BYTES;
    int32_t is_odd = 0;
    for (int32_t key = first; key < first + FV_TILE_ROWS; key++, rows += row_bytes) {
        if (key >= block->first && key < block->end) {
            is_odd |= fv_latent_parts_of_entry(rows, scales, block->k_rows[key], key, looks);
            continue;
        }
        memset(rows, 0, (size_t)row_bytes);
        for (int32_t part = 0; part < FV_LATENT_PARTS; part++) fv_part_scale_set(scales, part, key, 0.0f);
    }
    return is_odd;
}

/* Adds the products of a part of 16 keys, [key][row], times the keys' scales to their scores. */
FV_ALWAYS_INLINE void fv_latent_part_add(float *scores, const float *products, const float *scales)
{
    FV_UNROLL
    for (int32_t key = 0; key < FV_TILE_ROWS; key++) {
        const int32_t at = key * FV_TILE_COLUMNS;
        fv_lanes_store(scores + at,
                       fv_lanes_load(scores + at) + fv_lanes_load(products + at) * fv_lanes_splat(scales[key]));
    }
}

/* Where the scales of two keys' values are, for the part at hand. */
typedef struct fv_pair_scales {
    const float *high, *low;
} fv_pair_scales;

FV_ALWAYS_INLINE fv_pair_scales fv_pair_scales_at(const fv_part_scales *scales, int32_t column, int32_t key)
{
    const int32_t part = column / FV_DS_TILE;
    return (fv_pair_scales){scales->of_high[part] + key, scales->of_low[part] + key};
}

/* fv_words_store_pairs of the pieces of values, those of the low ones `low_bytes` behind. */
FV_ALWAYS_INLINE void fv_words_store_piece_pairs(char *to, int64_t low_bytes, const char *even, const char *odd,
                                                 const fv_pair_scales *scales)
{
    fv_lane_bits pairs[2];
    fv_words_pair(pairs, even, odd);
    FV_UNROLL
    for (int32_t i = 0; i < 2; i++, to += FV_TILE_BYTES) {
        const fv_lanes of_even = (fv_lanes)(pairs[i] << 16), of_odd = (fv_lanes)(pairs[i] & 0xffff0000u);
        const fv_lane_bits even_high = (fv_lane_bits)(of_even * scales->high[0]);
        const fv_lane_bits odd_high = (fv_lane_bits)(of_odd * scales->high[1]);
        const fv_lane_bits even_low = (fv_lane_bits)(of_even * scales->low[0]) + 0x8000u;
        const fv_lane_bits odd_low = (fv_lane_bits)(of_odd * scales->low[1]) + 0x8000u;
        fv_lanes_store(to, (fv_lanes)(even_high >> 16 | (odd_high & 0xffff0000u)));
        fv_lanes_store(to + low_bytes, (fv_lanes)(even_low >> 16 | (odd_low & 0xffff0000u)));
    }
}

#endif
