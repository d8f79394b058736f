/* Many rows of X with W of integers: a panel is 256 values of some rows as integers of 16 bits, in the first cache. The steps of a
 * row's sum are those of stored_kernels.h, so it has the same bits. */
#ifndef FV_ENGINE_STORED_STORED_PANEL_H
#define FV_ENGINE_STORED_STORED_PANEL_H

#include "engine/stored/stored_place.h"
#include "engine/stored/stored_words.h"

enum {
    FV_STORED_PANEL_BLOCKS = 8, /* of 32 values */
    FV_STORED_PANEL_VALUES = FV_STORED_PANEL_BLOCKS * FV_STORED_X_BLOCK,
    FV_STORED_PAIRS = FV_STORED_X_BLOCK / 2,
};

/* One array for each row of W. */
typedef struct fv_stored_panel {
    int32_t pairs[FV_STORED_PANEL_BLOCKS][FV_STORED_PAIRS][FV_STORED_PANEL_ROWS];
    float scales[FV_STORED_PANEL_BLOCKS][2][FV_STORED_PANEL_ROWS]; /* of the block's halves, or one of all of it */
    float minima[FV_STORED_PANEL_BLOCKS][FV_STORED_PANEL_ROWS];
} fv_stored_panel;

/* The memory of a call. */
typedef struct fv_stored_many {
    fv_stored_panel panel;
    float sums[FV_STORED_MANY_PANELS][FV_STORED_MANY_X][FV_STORED_PANEL_ROWS];
} fv_stored_many;

/* --- W -------------------------------------------------------------------------------------------- */

/* `num_blocks` blocks of 32 values of the stripes of one vector of lanes to the panel's rows from `row` on, and as much is asked
 * for. */
FV_ALWAYS_INLINE void fv_stored_fill_lanes(fv_stored_panel *panel, int32_t row, const uint8_t *const *stripes,
                                           int32_t num_blocks, fv_stored_asked *asked, const fv_stored_format *of)
{
    for (int32_t block = 0; block < num_blocks; block++) {
        const int32_t part = block % of->num_parts;
        fv_stored_ask(asked, (size_t)(of->block_bytes / of->num_parts));
        const uint8_t *scales[FV_STORED_STRIPES];
        FV_STORED_UNROLL
        for (int32_t i = 0; i < FV_STORED_STRIPES; i++)
            scales[i] = stripes[i] + block / of->num_parts * of->block_bytes;
        FV_STORED_UNROLL
        for (int32_t column = 0; column < FV_STORED_COLUMNS; column++) {
            __m256i even[FV_STORED_STRIPES], odd[FV_STORED_STRIPES];
            FV_STORED_UNROLL
            for (int32_t i = 0; i < FV_STORED_STRIPES; i++) {
                const fv_stored_pair pair = of->unpack(scales[i] + of->scales_bytes, part, column);
                even[i] = pair.even;
                odd[i] = pair.odd;
            }
            fv_stored_lanes_store(&panel->pairs[block][2 * column][row], even);
            fv_stored_lanes_store(&panel->pairs[block][2 * column + 1][row], odd);
        }
        FV_STORED_UNROLL
        for (int32_t half = 0; half < FV_STORED_COLUMNS / of->scale_columns; half++) {
            __m256i scale[FV_STORED_STRIPES], minimum[FV_STORED_STRIPES];
            FV_STORED_UNROLL
            for (int32_t i = 0; i < FV_STORED_STRIPES; i++) {
                const fv_stored_scale both = of->scale(scales[i], scales[i] + of->scales_bytes, part, half);
                scale[i] = _mm256_castps_si256(both.scale);
                minimum[i] = _mm256_castps_si256(both.minimum);
            }
            fv_stored_lanes_store(&panel->scales[block][half][row], scale);
            if (of->has_minimum) fv_stored_lanes_store(&panel->minima[block][row], minimum);
        }
    }
}

/* Fills the panel, and asks for what the next one is filled with. */
FV_ALWAYS_INLINE void fv_stored_fill_panel(fv_stored_panel *panel, const fv_stored_walk *walk,
                                           const fv_stored_place *place, const fv_stored_place *next,
                                           const fv_stored_format *of)
{
    for (int32_t lane = 0; lane < FV_STORED_PANEL_ROWS; lane += FV_STORED_LANES) {
        const uint8_t *stripes[FV_STORED_STRIPES];
        fv_stored_asked asked = fv_stored_asked_of(walk, next, lane);
        fv_stored_place_stripes(stripes, walk, place, lane);
        fv_stored_fill_lanes(panel, lane, stripes, place->count / FV_STORED_X_BLOCK, &asked, of);
    }
}

/* --- products ------------------------------------------------------------------------------------- */

/* The integers of a block's half, of four rows of X. */
FV_ALWAYS_INLINE void fv_stored_dots_of_half(fv_stored_ints dots[][FV_STORED_GROUPS], const fv_stored_x *const *x,
                                             const fv_stored_panel *panel, int64_t first_block, int32_t block,
                                             int32_t half, const fv_stored_format *of)
{
    FV_STORED_UNROLL
    for (int32_t i = 0; i < FV_STORED_TILE_X; i++) {
        FV_STORED_UNROLL
        for (int32_t j = 0; j < FV_STORED_GROUPS; j++) dots[i][j] = fv_stored_ints_zero();
    }
    FV_STORED_UNROLL_16
    for (int32_t pair = 0; pair < 2 * of->scale_columns; pair++) {
        const int32_t at = half * 2 * of->scale_columns + pair;
        fv_stored_ints w[FV_STORED_GROUPS];
        FV_STORED_UNROLL
        for (int32_t j = 0; j < FV_STORED_GROUPS; j++)
            w[j] = fv_stored_ints_load(&panel->pairs[block][at][j * FV_STORED_LANES]);
        FV_STORED_UNROLL
        for (int32_t i = 0; i < FV_STORED_TILE_X; i++) {
            int32_t both;
            memcpy(&both, x[i]->integers + (first_block + block) * FV_STORED_X_BLOCK + 2 * at, sizeof(both));
            const fv_stored_ints values = fv_stored_ints_splat(both);
            FV_STORED_UNROLL
            for (int32_t j = 0; j < FV_STORED_GROUPS; j++) {
                dots[i][j] = fv_stored_ints_dot(dots[i][j], w[j], values);
                FV_STORED_KEEP_ORDER(dots[i][j]);
            }
        }
    }
}

/* Adds the values of a panel to the sums of four rows of X. */
FV_ALWAYS_INLINE void fv_stored_multiply_tile(float (*sums)[FV_STORED_PANEL_ROWS], const fv_stored_x *const *x,
                                              const fv_stored_panel *panel, int64_t first_block, int32_t num_blocks,
                                              const fv_stored_format *of)
{
    for (int32_t block = 0; block < num_blocks; block++) {
        FV_STORED_UNROLL
        for (int32_t half = 0; half < FV_STORED_COLUMNS / of->scale_columns; half++) {
            fv_stored_ints dots[FV_STORED_TILE_X][FV_STORED_GROUPS];
            fv_stored_dots_of_half(dots, x, panel, first_block, block, half, of);
            FV_STORED_UNROLL
            for (int32_t j = 0; j < FV_STORED_GROUPS; j++) {
                const int32_t row = j * FV_STORED_LANES;
                const fv_stored_floats scale = fv_stored_floats_load(&panel->scales[block][half][row]);
                FV_STORED_UNROLL
                for (int32_t i = 0; i < FV_STORED_TILE_X; i++) {
                    const fv_stored_floats x_scale = fv_stored_floats_splat(x[i]->scales[first_block + block]);
                    fv_stored_floats sum = fv_stored_floats_load(&sums[i][row]);
                    sum = fv_stored_floats_fma(fv_stored_floats_of(dots[i][j]), fv_stored_floats_mul(scale, x_scale),
                                               sum);
                    if (of->has_minimum) {
                        const fv_stored_floats minimum = fv_stored_floats_load(&panel->minima[block][row]);
                        const fv_stored_floats x_sum = fv_stored_floats_splat(x[i]->sums[first_block + block]);
                        sum = fv_stored_floats_fma(minimum, x_sum, sum);
                    }
                    fv_stored_floats_store(&sums[i][row], sum);
                }
            }
        }
    }
}

/* fv_stored_multiply_many_fn of a format. */
FV_ALWAYS_INLINE void fv_stored_multiply_panels(float *y, int64_t y_stride, const fv_stored_x *x, int64_t num_x,
                                                const fv_stored_rows *w, void *memory, const fv_stored_format *of)
{
    fv_stored_many *many = memory;
    const size_t sums_bytes = (size_t)fv_round_up(num_x, FV_STORED_TILE_X) * sizeof(many->sums[0][0]);
    for (int64_t p = 0; p * FV_STORED_PANEL_ROWS < w->num_rows; p++) memset(many->sums[p], 0, sums_bytes);
    const fv_stored_walk walk = fv_stored_walk_of(w, w->in_features, FV_STORED_PANEL_VALUES);
    fv_stored_place place = fv_stored_place_at(&walk, 0), next;
    for (; place.count > 0; place = next) {
        next = fv_stored_place_after(&walk, place);
        fv_stored_fill_panel(&many->panel, &walk, &place, &next, of);
        float(*sums)[FV_STORED_PANEL_ROWS] = many->sums[place.row / FV_STORED_PANEL_ROWS];
        for (int64_t row = 0; row < num_x; row += FV_STORED_TILE_X) {
            const fv_stored_x *rows[FV_STORED_TILE_X];
            fv_stored_rows_of_tile(rows, x, row, num_x);
            fv_stored_multiply_tile(sums + row, rows, &many->panel, place.first / FV_STORED_X_BLOCK,
                                    place.count / FV_STORED_X_BLOCK, of);
        }
    }
    for (int64_t p = 0; p * FV_STORED_PANEL_ROWS < w->num_rows; p++, y += FV_STORED_PANEL_ROWS)
        fv_stored_store_panel(y, y_stride, many->sums[p], num_x, w->num_rows - p * FV_STORED_PANEL_ROWS);
}

#endif
