/* Many rows of X: a panel of W, some rows x 256 values, becomes integers of 16 bits in the first cache, once for all rows
 * of X; the steps of a row's sum are those of stored_kernels.h, so it has the same bits.
 *
 *   W      | panel | panel | panel | panel |      256 values of each, then the next 256
 *   sums   [panel][row of X][row of W]            in the second cache, beside 256 values of all rows of X */
#ifndef FV_ENGINE_STORED_STORED_PANEL_H
#define FV_ENGINE_STORED_STORED_PANEL_H

#include "engine/stored/stored_ahead.h"
#include "engine/stored/stored_lanes.h"
#include "engine/stored/stored_words.h"

enum {
    FV_STORED_PANEL_BLOCKS = 8,                           /* of 32 values */
    FV_STORED_STRIPES = FV_STORED_LANES / FV_STORED_ROWS, /* whose rows are the lanes of a vector */
    FV_STORED_PANEL_ROWS = FV_STORED_GROUPS * FV_STORED_LANES,
    FV_STORED_PAIRS = FV_STORED_X_BLOCK / 2,
    FV_STORED_TILE_X = 4, /* rows of X whose sums are in registers */
    FV_STORED_MANY_PANELS = FV_STORED_MANY_ROWS / FV_STORED_PANEL_ROWS,
};

_Static_assert(FV_STORED_MANY_ROWS % FV_STORED_PANEL_ROWS == 0, "panels of a call are whole");
_Static_assert(FV_STORED_MANY_X % FV_STORED_TILE_X == 0, "there are sums for whole tiles");

/* One array for each row of W. */
typedef struct fv_stored_panel {
    int32_t pairs[FV_STORED_PANEL_BLOCKS][FV_STORED_PAIRS][FV_STORED_PANEL_ROWS];
    float scales[FV_STORED_PANEL_BLOCKS][2][FV_STORED_PANEL_ROWS]; /* of the block's halves, or one of all of it */
    float minima[FV_STORED_PANEL_BLOCKS][FV_STORED_PANEL_ROWS];
} fv_stored_panel;

typedef struct fv_stored_many {
    fv_stored_panel panel;
    float sums[FV_STORED_MANY_PANELS][FV_STORED_MANY_X][FV_STORED_PANEL_ROWS];
} fv_stored_many;

/* --- W -------------------------------------------------------------------------------------------- */

/* `num_blocks` blocks of 32 values of the stripes of one vector of lanes to the panel's rows from `row` on. */
FV_ALWAYS_INLINE void fv_stored_fill_lanes(fv_stored_panel *panel, int32_t row, const uint8_t *const *stripes,
                                           int32_t num_blocks, const fv_stored_format *of)
{
    for (int32_t block = 0; block < num_blocks; block++) {
        const int32_t part = block % of->num_parts;
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

/* Rows of W from `row` on, of which a panel has blocks [block, block + num_blocks) of 32 values. */
typedef struct fv_stored_place {
    int64_t row, block;
    int32_t num_blocks;
} fv_stored_place;

/* The place's bytes of each stripe. */
static inline int32_t fv_stored_place_bytes(const fv_stored_place *place, const fv_stored_format *of)
{
    return place->num_blocks / of->num_parts * of->block_bytes;
}

/* Where the stripes of lanes [first, first + FV_STORED_LANES) of the place begin. Of those that are not there the last one
 * serves again. */
static inline void fv_stored_stripes_at(const uint8_t **stripes, const fv_stored_rows *w, const fv_stored_place *place,
                                        int32_t first, const fv_stored_format *of)
{
    const size_t stripe_bytes = fv_stored_stripe_bytes(w->layout, w->in_features);
    const int64_t last_stripe = (w->num_rows - 1) / FV_STORED_ROWS;
    for (int32_t i = 0; i < FV_STORED_STRIPES; i++) {
        const int64_t stripe = fv_min_i64((place->row + first) / FV_STORED_ROWS + i, last_stripe);
        stripes[i] = w->stripes + (size_t)stripe * stripe_bytes +
                     (size_t)(place->block / of->num_parts * of->block_bytes);
    }
}

/* Fills the panel, and asks for what the next one is filled with. */
FV_ALWAYS_INLINE void fv_stored_fill_panel(fv_stored_panel *panel, const fv_stored_rows *w,
                                           const fv_stored_place *place, const fv_stored_place *next,
                                           const fv_stored_format *of, fv_stored_stream *ahead)
{
    const int32_t next_bytes = fv_stored_place_bytes(next, of);
    for (int32_t first = 0; first < FV_STORED_PANEL_ROWS; first += FV_STORED_LANES) {
        const uint8_t *stripes[FV_STORED_STRIPES];
        fv_stored_stripes_at(stripes, w, next, first, of);
        for (int32_t i = 0; i < FV_STORED_STRIPES; i++) {
            for (int32_t at = 0; at < next_bytes; at += FV_CACHE_LINE)
                _mm_prefetch((const char *)stripes[i] + at, _MM_HINT_T0);
        }
        fv_stored_stripes_at(stripes, w, place, first, of);
        fv_stored_fill_lanes(panel, first, stripes, place->num_blocks, of);
        fv_stored_stream_ask(ahead, FV_STORED_STRIPES * fv_stored_place_bytes(place, of));
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

/* All rows of X with a panel; of a last tile that is not whole rows are computed again, and nobody looks at their sums. */
FV_ALWAYS_INLINE void fv_stored_multiply_panel(float (*sums)[FV_STORED_PANEL_ROWS], const fv_stored_x *x, int64_t num_x,
                                               const fv_stored_panel *panel, int64_t first_block, int32_t num_blocks,
                                               const fv_stored_format *of)
{
    for (int64_t row = 0; row < num_x; row += FV_STORED_TILE_X) {
        const fv_stored_x *rows[FV_STORED_TILE_X];
        FV_STORED_UNROLL
        for (int32_t i = 0; i < FV_STORED_TILE_X; i++) rows[i] = x + fv_min_i64(row + i, num_x - 1);
        fv_stored_multiply_tile(sums + row, rows, panel, first_block, num_blocks, of);
    }
}

/* The first rows' place from `block` on; of no blocks where all are done. */
static inline fv_stored_place fv_stored_place_at(int64_t block, int64_t all_blocks)
{
    return (fv_stored_place){0, block, (int32_t)fv_min_i64(all_blocks - block, FV_STORED_PANEL_BLOCKS)};
}

/* Sums to their places in Y, which has num_outputs of them from there on. */
FV_ALWAYS_INLINE void fv_stored_store_panel(float *y, int64_t y_stride, float (*sums)[FV_STORED_PANEL_ROWS],
                                            int64_t num_x, int64_t num_outputs)
{
    for (int64_t row = 0; row < num_x; row++, y += y_stride) {
        if (num_outputs < FV_STORED_PANEL_ROWS) {
            memcpy(y, sums[row], (size_t)num_outputs * sizeof(*y));
            continue;
        }
        FV_STORED_UNROLL
        for (int32_t i = 0; i < FV_STORED_PANEL_ROWS; i += FV_STORED_LANES)
            fv_stored_floats_store(y + i, fv_stored_floats_load(&sums[row][i]));
    }
}

/* fv_stored_multiply_many_fn of a format. */
FV_ALWAYS_INLINE void fv_stored_multiply_panels(float *y, int64_t y_stride, const fv_stored_x *x, int64_t num_x,
                                                const fv_stored_rows *w, void *memory, const fv_stored_format *of)
{
    fv_stored_many *many = memory;
    fv_stored_stream ahead = fv_stored_stream_of(&w->ahead);
    const int64_t all_blocks = w->in_features / FV_STORED_X_BLOCK;
    const int64_t num_panels = fv_ceil_div(w->num_rows, FV_STORED_PANEL_ROWS);
    const int64_t sums_of_panel = fv_round_up(num_x, FV_STORED_TILE_X) * FV_STORED_PANEL_ROWS;
    for (int64_t p = 0; p < num_panels; p++) memset(many->sums[p], 0, (size_t)sums_of_panel * sizeof(float));
    fv_stored_place place = fv_stored_place_at(0, all_blocks), next;
    for (int64_t p = 0; place.num_blocks > 0; place = next, p = place.row / FV_STORED_PANEL_ROWS) {
        next = fv_stored_place_at(place.block, all_blocks);
        next.row = place.row + FV_STORED_PANEL_ROWS;
        if (next.row >= w->num_rows) next = fv_stored_place_at(place.block + FV_STORED_PANEL_BLOCKS, all_blocks);
        fv_stored_fill_panel(&many->panel, w, &place, &next, of, &ahead);
        fv_stored_multiply_panel(many->sums[p], x, num_x, &many->panel, place.block, place.num_blocks, of);
    }
    for (int64_t p = 0; p < num_panels; p++, y += FV_STORED_PANEL_ROWS)
        fv_stored_store_panel(y, y_stride, many->sums[p], num_x, w->num_rows - p * FV_STORED_PANEL_ROWS);
}

#endif
